"""A perturbation carried out is a problem like any other: solved, scored, saved and perturbed again."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import dif

F64 = torch.float64
QUIET = {"show_progress": False}


def squared(p, z):
    return (z[0] @ p["t"] - z[1]) ** 2


def draw_problem(seed, n=24, d=3, dataset=False):
    """A population with a view in a constraint, a group mean in another, and a bound."""
    rng = np.random.default_rng([3, seed])
    X, y = torch.tensor(rng.normal(size=(n, d))), torch.tensor(rng.normal(size=n))
    train = dif.Samples(squared, TensorDataset(X, y) if dataset else (X, y), name="train")
    rate = train.view(lambda p, z: z[0] @ p["t"], name="rate")
    group = torch.tensor(rng.random(n) < 0.5)
    group[:2] = torch.tensor([True, False])
    gap = rate.mean(where=group) - rate.mean(where=~group)
    problem = dif.Problem(
        train.mean() + dif.ridge(0.1), [gap <= 0.05, train.mean(where=group) <= 3.0, dif.linear(torch.ones(d)) <= 0.3]
    )
    return rng, train, problem


def solve(problem, d=3):
    return dif.fit(problem, {"t": torch.zeros(d, dtype=F64)}, **QUIET)


def perturbations(rng, train, problem):
    d = train.storage.one()[0].shape[1]
    new = (torch.tensor(rng.normal(size=(2, d))), torch.tensor(rng.normal(size=2)))
    one = tuple(part[:1] for part in new)
    return {
        "remove": train.remove([3, 8]),
        "remove, paper": train.remove([5], renormalise=False),
        "remove from the objective": train.remove([4], terms=[problem.objective]),
        "reweight": train.reweight(torch.tensor(rng.uniform(0, 0.02, size=len(train)))),
        "add": train.add(new, like=[0, 1]),
        "replace": train.replace([6], one),
        "shift": problem.constraints[0].shift(0.02),
        "several": train.remove([2]) + train.add(one, like=1) + problem.constraints[2].shift(-0.05),
        "half": 0.5 * train.remove([7]),
        "two additions, one of them to the objective": train.add(one, like=0, terms=[problem.objective])
        + train.add(tuple(part[1:] for part in new), like=1),
    }


@pytest.mark.parametrize("seed", range(5))
def test_after_is_what_retraining_solves(seed):
    rng, train, problem = draw_problem(seed)
    solution = solve(problem)
    for name, perturbation in perturbations(rng, train, problem).items():
        stated = solve(problem.after(perturbation))
        found = dif.Retraining(solution, tol=1e-12).change(perturbation)
        torch.testing.assert_close(solution.theta + found.flat, stated.theta, rtol=1e-7, atol=1e-8, msg=name)
        torch.testing.assert_close(solution.lam + found.multipliers.flat, stated.lam, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("seed", range(20))
def test_the_end_of_a_path_is_scored_and_perturbed_again(seed, tmp_path):
    rng, train, problem = draw_problem(seed)
    solution = solve(problem)
    name = list(perturbations(rng, train, problem))[seed % 10]
    first = perturbations(rng, train, problem)[name]
    end = dif.PathInfluence(solution).follow(first).end
    again = solve(end.problem)
    torch.testing.assert_close(end.theta, again.theta, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(end.lam, again.lam, rtol=1e-6, atol=1e-7)
    people = end.problem.people[0]  # the same people, or with others among them
    rest = [i for i in range(len(people)) if i not in (2, 3, 5, 6, 8)]
    some = people.remove_each(rest[:4])
    scores = dif.DirectionalInfluence(end).scores(people.mean(), some, **QUIET)
    fresh = dif.DirectionalInfluence(again).scores(people.mean(), some, **QUIET)
    np.testing.assert_allclose(scores.values.numpy(), fresh.values.numpy(), rtol=1e-5, atol=1e-8)
    scores.save(tmp_path / "s.npz")
    np.testing.assert_array_equal(dif.Influence.load(tmp_path / "s.npz").values.numpy(), scores.values.numpy())
    second = people.remove(rest[1:3])
    retrained = dif.Retraining(end, tol=1e-12).change(second).flat
    twice = solve(end.problem.after(second))
    torch.testing.assert_close(end.theta + retrained, twice.theta, rtol=1e-8, atol=1e-8)


def test_removing_twice_is_removing_both():
    _, train, problem = draw_problem(0)
    twice = problem.after(train.remove([3])).after(train.remove([8]))
    once = problem.after(train.remove([3, 8]))
    torch.testing.assert_close(solve(twice).theta, solve(once).theta, rtol=1e-9, atol=1e-10)


def test_added_samples_join_a_dataset():
    rng, train, problem = draw_problem(1, dataset=True)
    _, plain, other = draw_problem(1)
    new = (torch.tensor(rng.normal(size=(2, 3))), torch.tensor(rng.normal(size=2)))
    added = problem.after(train.add(new, like=[0, 1]))
    assert len(added.people[0]) == 26
    same = other.after(plain.add(new, like=[0, 1]))
    torch.testing.assert_close(solve(added).theta, solve(same).theta, rtol=1e-9, atol=1e-10)
    back = added.after(added.people[0].remove([24, 25]))
    torch.testing.assert_close(solve(back).theta, solve(problem).theta, rtol=1e-9, atol=1e-10)


def test_what_cannot_be_carried_out_is_refused():
    _, train, problem = draw_problem(0)
    stranger = dif.Samples(squared, (torch.randn(5, 3, dtype=F64), torch.randn(5, dtype=F64)), name="stranger")
    for wrong, words in (
        (None, "Problem.after takes one Perturbation, not of type NoneType"),
        (train.remove_each(), "Problem.after takes one Perturbation, not 24"),
        (stranger.remove([0]), "no term of the problem uses these samples"),
        ((dif.linear(torch.ones(3)) <= 1.0).shift(0.1),
         "is not a constraint of this problem"),
        (train.remove(list(range(24))), "leaves no samples in 'mean of train'; a term must keep at least one"),
        (train.add((torch.randn(1, 3, dtype=F64), torch.randn(1, dtype=F64))),
         "It is unknown whether the samples added to 'train' belong to mean of"),
    ):  # fmt: skip
        with pytest.raises(dif.InvalidInputError, match=re.escape(words)):
            problem.after(wrong)


def test_the_old_samples_are_refused_after_an_addition():
    rng, train, problem = draw_problem(0)
    new = (torch.tensor(rng.normal(size=(1, 3))), torch.tensor(rng.normal(size=1)))
    end = dif.PathInfluence(solve(problem)).follow(train.add(new, like=0)).end
    influence = dif.DirectionalInfluence(end)
    cure = r"A problem to which samples were added has new ones: take them from solution\.problem\.samples\."
    with pytest.raises(dif.InvalidInputError, match=cure):
        influence.change(train.remove([0]))
    assert torch.isfinite(influence.change(end.problem.samples[0].remove([24])).flat).all()
    cure = r"A perturbed problem has new ones: take them from solution\.problem\.constraints\."
    with pytest.raises(dif.InvalidInputError, match=cure):
        influence.change(problem.constraints[0].shift(0.01))
    assert torch.isfinite(influence.change(end.problem.constraints[0].shift(0.01)).flat).all()


def test_what_estimators_refuse_is_refused_here():
    X, y = torch.randn(12, 2, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.arange(12.0, dtype=F64)
    train = dif.Samples(lambda p, z: (z[0] @ p["w"] - z[1]) ** 2, (X, y), name="train")
    other = dif.Samples(lambda p, z: (z @ p["w"]) ** 2, X + 1.0, name="other")
    cap, bound = train.mean() <= 5.0, other.mean() <= 9.0
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [cap, bound])
    for terms, text in (
        ([42], "objective or constraint objects, not 42"),
        ([bound], "restricted to terms that do not use these samples"),
    ):
        with pytest.raises(dif.InvalidInputError, match=text):
            problem.after(train.remove([1], terms=terms))
    with pytest.raises(dif.InvalidInputError, match="must have 1 value, not 2"):
        problem.after(cap.shift(torch.tensor([1.0, 2.0])))


def test_means_stay_means_after_a_change_of_weights():
    X, y = torch.randn(12, 2, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.arange(12.0, dtype=F64)
    train = dif.Samples(lambda p, z: (z[0] @ p["w"] - z[1]) ** 2, (X, y), name="train")
    rare, none = train.mean(where=torch.arange(12) == 0), train.mean(where=torch.arange(12) == 5)
    problem = dif.Problem(train.mean() + none - none + dif.ridge(0.1), [rare <= 50.0])
    half = problem.after(0.5 * train.remove([3]))
    gone, straight = half.after(train.remove([3])), problem.after(train.remove([3]))
    start = {"w": torch.zeros(2, dtype=F64)}
    solutions = [dif.fit(p, start, show_progress=False) for p in (gone, straight)]
    np.testing.assert_allclose(solutions[0].theta, solutions[1].theta, atol=1e-9)
    at_half = dif.fit(half, start, show_progress=False)
    newton = dif.NewtonInfluence(at_half).change(train.remove([3]))
    np.testing.assert_allclose(at_half.theta + newton.flat, solutions[1].theta, atol=1e-8)

    solution = dif.fit(problem, start, show_progress=False)
    new = (X[:1] + 0.1, y[:1])
    swapped = dif.PathInfluence(solution).follow(train.replace([0], new)).end  # the only member of a term
    changed = dif.fit(problem.after(train.replace([0], new)), start, show_progress=False)
    np.testing.assert_allclose(swapped.theta, changed.theta, atol=1e-8)
    path = dif.PathInfluence(solution).follow(train.remove([5]))  # the only member of a term that cancels
    alone = dif.fit(path.end.problem, start, show_progress=False)
    np.testing.assert_allclose(path.end.theta, alone.theta, atol=1e-8)


def test_an_end_keeps_the_tolerance_and_refuses_what_is_like_a_removed_sample():
    rng, train, problem = draw_problem(0)
    solution = solve(problem)
    strict = dif.Solution(problem, solution.params, solution.multipliers, tol=1e-9)
    end = dif.PathInfluence(strict).follow(train.remove([3, 8])).end
    assert end.tol == 1e-9
    assert end.converged
    one = (torch.tensor(rng.normal(size=(1, 3))), torch.tensor(rng.normal(size=1)))
    for change in (train.replace([3], one), train.add(one, like=8)):
        for carry_out in (dif.DirectionalInfluence(end).change, end.problem.after):
            with pytest.raises(dif.InvalidInputError, match="has weight 0 in every term, so a sample like it"):
                carry_out(change)
    with pytest.raises(dif.InvalidInputError) as caught:
        end.problem.after(train.remove([1], terms=[problem.constraints[1]]))
    assert str(caught.value).endswith("A perturbed problem has new ones: take them from solution.problem.")
