"""Every perturbation against the problem written again by hand, from the data as they would be."""

import numpy as np
import pytest
import torch
from problems import class_data, fit_problem, logistic, zeros

import dif

F64 = torch.float64

X, Y = class_data()
GROUP = torch.arange(60) % 3


def state(X, Y, group, tau=-0.02, coefficient=1.0):
    """A fair logistic regression: mean, masked mean, sum and weighted sum, all in one problem."""
    train = dif.Samples(logistic, (X, Y), name="train")
    risk = train.mean()
    objective = coefficient * risk + dif.ridge(0.05)
    constraints = [
        (train.mean(where=group == 1) <= risk + tau).named("gap"),
        (train.sum(where=group == 2) <= 18.0).named("sum"),
    ]
    return train, dif.Problem(objective, constraints)


def after(problem):
    return dif.fit(problem, zeros(), show_progress=False)


@pytest.fixture(scope="module")
def base():
    train, problem = state(X, Y, GROUP)
    solution = fit_problem(problem)
    assert 0 in solution.active.binding
    return train, problem, solution


def check(solution, perturbation, rebuilt):
    """Retraining must equal the rebuilt problem's solution; DIF its one-sided slope."""
    change = dif.Retraining(solution).change(perturbation)
    expected = after(rebuilt)
    assert float((solution.theta + change.flat - expected.theta).abs().max()) <= 1e-8
    assert float((solution.lam + change.multipliers.flat - expected.lam).abs().max()) <= 1e-7
    slope = dif.Retraining(solution).change(1e-5 * perturbation)
    predicted = dif.DirectionalInfluence(solution).change(perturbation)
    assert float((slope.flat / 1e-5 - predicted.flat).norm()) <= 1e-3 * float(predicted.flat.norm())
    assert float((slope.multipliers.flat / 1e-5 - predicted.multipliers.flat).norm()) <= 1e-3 * float(
        predicted.multipliers.flat.norm()
    )


@pytest.mark.parametrize("gone", [[0], [1], [2], [3, 4, 5], [7, 10, 13]])
def test_removal_is_the_mean_over_what_is_left(base, gone):
    train, _, solution = base
    left = torch.tensor([i for i in range(60) if i not in gone])
    check(solution, train.remove(gone), state(X[left], Y[left], GROUP[left])[1])


def test_removal_without_renormalising_keeps_one_over_n(base):
    train, _, solution = base
    w = torch.full((60,), 1 / 60, dtype=torch.float64)
    v = (GROUP == 1) / (GROUP == 1).sum().double()
    s = (GROUP == 2).double()
    for weights in (w, v, s):
        weights[[1, 2]] = 0.0
    again = dif.Samples(logistic, (X, Y))
    rebuilt = dif.Problem(
        again.weighted(w) + dif.ridge(0.05),
        [again.weighted(v) <= again.weighted(w) - 0.02, again.weighted(s) <= 18.0],
    )
    check(solution, train.remove([1, 2], renormalise=False), rebuilt)


def test_removal_from_some_terms_only(base):
    train, problem, solution = base
    again = dif.Samples(logistic, (X, Y))
    left = torch.ones(60, dtype=torch.bool)
    left[1] = False
    risk, fewer = again.mean(), again.mean(where=left)
    gap = again.mean(where=GROUP == 1) <= risk - 0.02
    total = again.sum(where=GROUP == 2) <= 18.0
    check(solution, train.remove([1], terms=[problem.objective]), dif.Problem(fewer + dif.ridge(0.05), [gap, total]))
    gap = again.mean(where=(GROUP == 1) & left) <= fewer - 0.02
    check(
        solution, train.remove([1], terms=[problem.constraints[0]]), dif.Problem(risk + dif.ridge(0.05), [gap, total])
    )


def test_added_samples(base):
    train, _, solution = base
    new = (
        torch.tensor([[0.3, -1.0, 0.5, 2.0], [1.0, 1.0, -0.4, 0.0]], dtype=torch.float64),
        torch.tensor([1.0, -1.0]).double(),
    )
    more = torch.cat([GROUP, GROUP[[1, 2]]])
    rebuilt = state(torch.cat([X, new[0]]), torch.cat([Y, new[1]]), more)[1]
    check(solution, train.add(new, like=[1, 2]), rebuilt)


def test_added_samples_join_means_over_everyone():
    train = dif.Samples(logistic, (X, Y), name="train")
    problem = dif.Problem(train.mean() + dif.ridge(0.05), [dif.linear([1.0, 0.0, 0.0, 0.0]) <= 0.1])
    new = (X[:1] * 0.5, -Y[:1])
    again = dif.Samples(logistic, (torch.cat([X, new[0]]), torch.cat([Y, new[1]])))
    check(fit_problem(problem), train.add(new), dif.Problem(again.mean() + dif.ridge(0.05), problem.constraints))


def test_replaced_samples(base):
    train, _, solution = base
    flipped = Y.clone()
    flipped[[4, 8]] *= -1
    rebuilt = state(X, flipped, GROUP)[1]
    check(solution, train.replace([4, 8], (X[[4, 8]], flipped[[4, 8]])), rebuilt)
    one = Y.clone()
    one[4] *= -1
    check(solution, train.replace(4, (X[4:5], one[4:5])), state(X, one, GROUP)[1])


def test_reweighting_adds_weight_times_the_coefficient():
    train, problem = state(X, Y, GROUP, coefficient=2.0)
    dw = torch.zeros(60, dtype=torch.float64)
    dw[[1, 2, 3]] = torch.tensor([0.01, -0.005, 0.02], dtype=torch.float64)
    again = dif.Samples(logistic, (X, Y))
    w = torch.full((60,), 1 / 60, dtype=torch.float64) + dw
    v = torch.where(GROUP == 1, 1 / (GROUP == 1).sum().double() + dw, 0.0)
    s = torch.where(GROUP == 2, 1.0 + dw, 0.0)
    rebuilt = dif.Problem(
        2.0 * again.weighted(w) + dif.ridge(0.05),
        [again.weighted(v) <= again.weighted(w) - 0.02, again.weighted(s) <= 18.0],
    )
    check(fit_problem(problem), train.reweight(dw), rebuilt)


def test_shifted_bounds_move_as_written(base):
    _, problem, solution = base
    check(solution, problem.constraints[0].shift(0.005), state(X, Y, GROUP, tau=-0.015)[1])
    train = dif.Samples(logistic, (X, Y), name="train")
    low = (dif.linear([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]) >= [1.5, -0.3]).named("low")
    problem = dif.Problem(train.mean() + dif.ridge(0.05), [low])
    raised = dif.Problem(train.mean() + dif.ridge(0.05), [dif.linear([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]) >= [1.6, -0.1]])
    check(fit_problem(problem), low.shift([0.1, 0.2]), raised)


def test_sums_and_scales(base):
    train, problem, solution = base
    influence = dif.DirectionalInfluence(solution)
    both = influence.change(0.5 * train.remove([3]) + problem.constraints[0].shift(0.01) - train.remove([4]))
    parts = [
        0.5 * influence.change(train.remove([3])).flat,
        influence.change(problem.constraints[0].shift(0.01)).flat,
        -influence.change(train.remove([4])).flat,
    ]
    assert float((both.flat - sum(parts)).abs().max()) <= 1e-12
    each = influence.scores(train, train.remove_each(range(5)) + problem.constraints[0].shift(0.01)).values
    singles = [influence.scores(train, train.remove([i]) + problem.constraints[0].shift(0.01)).values for i in range(5)]
    assert float((each - torch.cat(singles)).abs().max()) <= 1e-12


def test_each_and_groups_are_what_they_say(base):
    train, _, solution = base
    influence = dif.DirectionalInfluence(solution)
    each = influence.scores(train.mean(), train.remove_each([5, 9])).values
    groups = influence.scores(train.mean(), train.remove_groups([[5], [9], [5, 9]])).values
    together = influence.scores(train.mean(), train.remove([5, 9])).values
    assert torch.allclose(each, groups[:2], rtol=1e-12, atol=1e-15)
    assert torch.allclose(together, groups[2:], rtol=1e-12, atol=1e-15)
    assert len(train.remove_each()) == 60
    assert train.remove_groups([[1, 2], [5]]).labels == ["remove train[1, 2]", "remove train[5]"]
    assert [p.labels[0] for p in train.remove_each([5, 9])] == ["remove train[5]", "remove train[9]"]
    assert train.remove_each()[3:5].labels == ["remove train[3]", "remove train[4]"]
    assert (0.5 * train.remove([1])).labels == ["0.5 × remove train[1]"]


def test_numpy_and_tensor_indices(base):
    train, _, solution = base
    influence = dif.DirectionalInfluence(solution)
    expected = influence.change(train.remove([3, 5])).flat
    for indices in (np.array([3, 5]), torch.tensor([3, 5]), (3, 5), [np.int64(3), np.int32(5)]):
        assert torch.equal(influence.change(train.remove(indices)).flat, expected)
    assert torch.equal(influence.change(train.remove(3)).flat, influence.change(train.remove([3])).flat)


def test_a_sample_in_no_term_has_no_influence():
    train = dif.Samples(logistic, (X, Y), name="train")
    problem = dif.Problem(train.mean(where=GROUP != 0) + dif.ridge(0.05))
    scores = dif.DirectionalInfluence(fit_problem(problem)).scores(train.mean(), train.remove_each()).values[:, 0]
    assert bool((scores[GROUP == 0] == 0).all())
    assert bool((scores[GROUP != 0] != 0).all())


def test_constraint_data_of_its_own():
    """Objective and constraint over different samples with different losses; a removal in the constraint moves both."""
    train = dif.Samples(logistic, (X[:40], Y[:40]), name="train")
    audit = dif.Samples(lambda p, z: torch.sigmoid(3 * (z @ p["theta"])), X[40:], name="audit")

    def stated(data):
        again = dif.Samples(audit.loss, data, name="audit")
        return again, dif.Problem(train.mean() + dif.ridge(0.05), [again.mean() <= 0.45])

    audit, problem = stated(X[40:])
    solution = fit_problem(problem)
    assert solution.active.binding == (0,)
    check(solution, audit.remove([2]), stated(torch.cat([X[40:42], X[43:]]))[1])


def test_many_perturbations_and_one_that_they_share():
    X, y = torch.randn(8, 2, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.arange(8.0, dtype=F64)
    train = dif.Samples(lambda p, z: (z[0] @ p["w"] - z[1]) ** 2, (X, y), name="train")
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [dif.linear([1.0, 1.0]) <= 0.5])
    solution = dif.fit(problem, {"w": torch.zeros(2, dtype=F64)}, show_progress=False)
    shared = train.reweight([0.01 * i for i in range(8)])
    together = dif.DirectionalInfluence(solution).scores(train, train.remove_each() + shared).values
    for i in range(8):
        alone = dif.DirectionalInfluence(solution).scores(train, train.remove(i) + shared).values
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-9, atol=1e-12)
