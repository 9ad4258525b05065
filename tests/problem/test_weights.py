"""What perturbations do to weights, written out in numpy, against every reader: all must see the same weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import dif
from dif.derivatives.fingerprint import fingerprint_program
from dif.derivatives.weight_change import Direction
from dif.training.weights import RunPerturbation

F64 = torch.float64
N, D = 12, 2


def squared(p, z):
    return (z[0] @ p["t"] - z[1]) ** 2


def draw(count, seed):
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.normal(size=(count, D))), torch.tensor(rng.normal(size=count))


GROUP = np.arange(N) % 3 == 0
SOME = np.arange(N) < 5
RISING = 1.0 + np.arange(N)


def state():
    """All kinds of sums, over two views; row 0 is the objective, and some rows have two sums."""
    train = dif.Samples(squared, draw(N, 0), name="train")
    rate = train.view(lambda p, z: z[0] @ p["t"], name="rate")
    problem = dif.Problem(
        train.mean() + dif.ridge(0.1),
        [
            train.mean(where=torch.tensor(GROUP)) <= train.mean() + 1.0,
            (2.0 * rate.mean(where=torch.tensor(SOME)) >= -3.0).named("rate"),
            train.mean(weights=torch.tensor(RISING)) <= 9.0,
            train.sum(where=torch.tensor(SOME)) + rate.weighted(torch.tensor(RISING - 6.5)) <= 40.0,
        ],
    )
    return train, problem


class Sum:
    """One sum in numpy: weights of the old samples and then of the new ones, in the order in which they are added."""

    def __init__(self, weights, mean, everyone, rows):
        self.w, self.mean, self.everyone = np.asarray(weights, float), mean, everyone
        self.rows = rows  # row → coefficient


def sums(problem=None):
    """All sums of the problem as stated, or with the weights that they have in a problem after others."""
    ones = np.ones(N)
    stated = {
        "mean": Sum(ones / N, True, True, {0: 1.0, 1: -1.0}),
        "group": Sum(GROUP / GROUP.sum(), True, False, {1: 1.0}),
        "some of rate": Sum(SOME / SOME.sum(), True, False, {2: -2.0}),
        "weighted mean": Sum(RISING / RISING.sum(), True, False, {3: 1.0}),
        "sum": Sum(SOME * 1.0, False, False, {4: 1.0}),
        "weighted": Sum(RISING - 6.5, False, False, {4: 1.0}),
    }
    if problem is not None:
        places = {"mean": (0, 0), "group": (1, 0), "some of rate": (2, 0), "weighted mean": (3, 0), "sum": (4, 0)}
        for name, (row, at) in {**places, "weighted": (4, 1)}.items():
            stated[name].w = problem.terms[row].sums[at][1].weights.numpy()
    return stated


OF_RATE = ("some of rate", "weighted")


def sides(w, everyone, whole, before=0, added=0):
    """Return the weights in a sum and in its divisor once some actions are carried out together.

    `whole` lists ("remove", indices, renormalise) and ("add", like, renormalise); what does not renormalise leaves the
    divisor as it was. `before` new samples of other actions come first, of `added` in all.
    """
    above = np.concatenate([w, np.zeros(added)])
    below, at = above.copy(), len(w) + before
    for kind, which, renormalise in whole:
        if kind == "remove":
            place, given = list(which), 0.0
        else:
            typical = w.sum() / max((w != 0).sum(), 1) * everyone
            place, given = range(at, at + len(which)), [typical if like is None else w[like] for like in which]
            at += len(which)
        for side in (above, below) if renormalise else (above,):
            side[place] = given
    return above, below


def expected(s, row, pieces, added, in_a_run=False):
    """Return the weights of a sum in one row after pieces (factor, actions, rows or None for all).

    A factor scales the change of the weights; in a training run that of the sum and of its divisor.
    """
    base = np.concatenate([s.w, np.zeros(added)])
    total, above, below, before = base.copy(), base.copy(), base.copy(), 0
    for factor, actions, rows in pieces:
        if rows is None or row in rows:
            one, other = sides(s.w, s.everyone, [a for a in actions if a[0] != "dw"], before, added)
            dw = sum((np.where(s.w != 0, a[1](len(s.w)), 0.0) for a in actions if a[0] == "dw"), np.zeros(len(s.w)))
            dw = np.concatenate([dw, np.zeros(added)])
            above, below = above + factor * (one + dw - base), below + factor * (other - base)
            total += factor * (one * (base.sum() / other.sum() if s.mean else 1.0) + dw - base)
        before += sum(len(a[1]) for a in actions if a[0] == "add")
    return above * (base.sum() / below.sum() if s.mean else 1.0) if in_a_run else total


NEW2, NEW1 = draw(2, 1), draw(1, 2)


def more(count):
    return np.where(np.arange(count) % 4 == 1, 0.03, 0.0)


# name → (how the user writes it, the same for numpy, the number of new samples)
KINDS = {
    "remove one": (lambda t, p: t.remove([3]), [(1.0, [("remove", [3], True)], None)], 0),
    "remove several": (lambda t, p: t.remove([0, 3, 4]), [(1.0, [("remove", [0, 3, 4], True)], None)], 0),
    "remove, paper": (lambda t, p: t.remove([3, 5], renormalise=False), [(1.0, [("remove", [3, 5], False)], None)], 0),
    "remove from the objective": (
        lambda t, p: t.remove([3], terms=[p.objective]),
        [(1.0, [("remove", [3], True)], [0])],
        0,
    ),
    "remove from a constraint": (
        lambda t, p: t.remove([3], terms=[p.constraints[0]]),
        [(1.0, [("remove", [3], True)], [1])],
        0,
    ),
    "reweight": (lambda t, p: t.reweight(more(len(t))), [(1.0, [("dw", more)], None)], 0),
    "add": (
        lambda t, p: t.add(NEW2, terms=[p.objective]),
        [(1.0, [("add", [None, None], True)], [0])],
        2,
    ),
    "add, like": (lambda t, p: t.add(NEW2, like=[3, 1]), [(1.0, [("add", [3, 1], True)], None)], 2),
    "add, like, paper": (
        lambda t, p: t.add(NEW1, like=3, renormalise=False),
        [(1.0, [("add", [3], False)], None)],
        1,
    ),
    "replace": (
        lambda t, p: t.replace([3, 4], NEW2),
        [(1.0, [("remove", [3, 4], False), ("add", [3, 4], False)], None)],
        2,
    ),
    "half": (lambda t, p: 0.5 * t.remove([3]), [(0.5, [("remove", [3], True)], None)], 0),
    "backwards": (lambda t, p: -0.2 * t.remove([3, 6]), [(-0.2, [("remove", [3, 6], True)], None)], 0),
    "half of an addition": (lambda t, p: 0.5 * t.add(NEW1, like=3), [(0.5, [("add", [3], True)], None)], 1),
    "thirds": (
        lambda t, p: sum([t.remove([3]) * (1 / 3)] * 3),
        [(1.0, [("remove", [3], True)], None)],
        0,
    ),
    "two removals": (lambda t, p: t.remove([3]) + t.remove([4]), [(1.0, [("remove", [3, 4], True)], None)], 0),
    "a removal twice": (lambda t, p: t.remove([3]) + t.remove([3, 6]), [(1.0, [("remove", [3, 6], True)], None)], 0),
    "remove and add": (
        lambda t, p: t.remove([3]) + t.add(NEW1, like=3),
        [(1.0, [("remove", [3], False), ("add", [3], False)], None)],
        1,
    ),
    "half of removing and adding": (
        lambda t, p: 0.5 * (t.remove([3]) + t.add(NEW1, like=3)),
        [(0.5, [("remove", [3], False), ("add", [3], False)], None)],
        1,
    ),
    "replace and remove": (
        lambda t, p: t.replace([3], NEW1) + t.remove([4]),
        [(1.0, [("remove", [3], False), ("add", [3], False), ("remove", [4], True)], None)],
        1,
    ),
    "both kinds of removal": (
        lambda t, p: t.remove([3]) + t.remove([4], renormalise=False),
        [(1.0, [("remove", [4], False), ("remove", [3], True)], None)],
        0,
    ),
    "different terms": (
        lambda t, p: t.remove([3], terms=[p.objective]) + t.remove([4]),
        [(1.0, [("remove", [3, 4], True)], [0]), (1.0, [("remove", [4], True)], [1, 2, 3, 4])],
        0,
    ),
    "all at once": (
        lambda t, p: 0.3 * t.remove([1]) + t.remove([3]) + t.reweight(more(len(t))) + p.constraints[0].shift(0.25),
        [(0.3, [("remove", [1], True)], None), (1.0, [("remove", [3], True), ("dw", more)], None)],
        0,
    ),
}  # fmt: skip


# in a run the factor of these scales the divisor of a mean, too, so that its derivative is that of the weighted mean
IN_PART = ("half", "backwards", "half of an addition", "all at once")
# a run divides each mean by the weight of its members, which is not 1 in the problem after these
NOT_MEANS = ("remove, paper", "reweight", "add, like, paper", "both kinds of removal")


def weights_by_row(kind, in_a_run=False, problem=None):
    """Return by row the dense weights of `train` and of `rate`, old and new samples, (5, 2, N + new)."""
    _, pieces, added = KINDS[kind]
    before = sums(problem)
    table = np.zeros((5, 2, len(before["mean"].w) + added))
    for name, s in before.items():
        for row, c in s.rows.items():
            table[row, int(name in OF_RATE)] += c * expected(s, row, pieces, added, in_a_run)
    return table


def of_problem(problem, size):
    """The same of a Problem's terms."""
    table = np.zeros((5, 2, size))
    for row, term in enumerate(problem.terms):
        for c, s in term.sums:
            table[row, int(s.samples is not s.samples.population), : len(s.weights)] += c * s.weights.numpy()
    return table


def solved(problem):
    """Any point will do: weights do not depend on it."""
    return dif.Solution(problem, {"t": torch.tensor([0.3, -0.2], dtype=F64)})


def losses_at(theta, people):
    """Losses of both views, (2, n)."""
    X, y = (t.numpy() for t in people.storage.data)
    return np.stack([(X @ theta - y) ** 2, X @ theta])


HISTORY = {
    "nothing": lambda p: p,
    "a removal": lambda p: p.after(p.people[0].remove([0, 7])),
    "an addition": lambda p: p.after(p.people[0].add(NEW2, like=[3, 1])),
    "both": lambda p: p.after(p.people[0].add(NEW1, like=4) + p.people[0].remove([0])),
}


@pytest.mark.parametrize("earlier", HISTORY)
@pytest.mark.parametrize("kind", KINDS)
def test_the_problem_after_the_linearisation_and_batched_programs(kind, earlier):
    problem = HISTORY[earlier](state()[1])
    perturbation, at = KINDS[kind][0](problem.people[0], problem), solved(problem)
    after, dense = problem.after(perturbation), weights_by_row(kind, problem=problem)
    found = of_problem(after, dense.shape[2])
    np.testing.assert_allclose(found, dense, atol=1e-14)
    assert (found[dense == 0] == 0).all() or kind == "thirds"
    change = np.einsum(
        "rvn,vn->r", dense - of_problem(problem, dense.shape[2]), losses_at(at.theta.numpy(), after.people[0])
    )
    direction, V = Direction(at.program, perturbation), torch.eye(D, dtype=F64)
    mu, p, Dp = torch.arange(1.0, 6.0, dtype=F64), at.parts, at.part_gradients
    df, DJ = direction.first_order(0, at.theta, p, Dp)
    np.testing.assert_allclose(df, change, atol=1e-12)
    bV, effects = direction.first_order_effects(at.theta, mu, p, Dp, V)
    by_row, _ = direction.first_order_effects(at.theta, torch.diag(mu), p, Dp, V)
    b, combined = direction.combine(torch.ones(1, 1, dtype=F64), at.theta, mu, p, Dp)
    for values, gradient in ((effects[0], bV[0]), (effects[0], by_row[0].sum(0)), (combined[0], b[0])):
        np.testing.assert_allclose(values, change, atol=1e-12)
        np.testing.assert_allclose(gradient, mu @ DJ, atol=1e-12)
    np.testing.assert_allclose(by_row[0], mu[:, None] * DJ, atol=1e-12)
    values, J = dif.Solution(after, at.params).program.rows.gradients(at.theta)
    np.testing.assert_allclose(at.f.numpy() + change, values, atol=1e-12)
    np.testing.assert_allclose(at.J + DJ, J, atol=1e-12)
    stack, alone = direction.stack_programs(), direction.perturbed_program(0)
    for f, gradients in (alone.rows.gradients(at.theta), [x[0] for x in stack.gradients(at.theta[None])]):
        np.testing.assert_allclose(f, values, atol=1e-12)
        np.testing.assert_allclose(gradients, J, atol=1e-12)
    tau = torch.stack([c.tau.reshape(()) for c in after.constraints])
    for found in (stack.tau[0], alone.tau, at.program.tau + direction.dtau[0]):
        np.testing.assert_allclose(found, tau, atol=1e-14)


@pytest.mark.parametrize("renormalise", [True, False])
def test_the_cvxpy_adapter(renormalise):
    """Removals from a weighted mean, after earlier ones, are those of dif."""
    cp = pytest.importorskip("cvxpy")
    from dif.adapters.cvxpy import Sensitivity

    train = state()[0]
    problem = dif.Problem(train.mean(weights=torch.tensor(RISING)) + dif.ridge(0.1)).after(train.remove([0, 7]))
    solution = dif.fit(problem, {"t": torch.zeros(D, dtype=F64)}, show_progress=False)
    (X, y), t = (x.numpy() for x in train.storage.data), cp.Variable(D)
    w = cp.Parameter(N, nonneg=True, value=problem.objective.sums[0][1].weights.numpy())
    stated = cp.Problem(cp.Minimize(w @ cp.square(X @ t - y) + 0.05 * cp.sum_squares(t)))
    stated.solve()
    found, estimator = (
        Sensitivity(stated).remove_each(w, renormalise=renormalise)[t],
        dif.DirectionalInfluence(solution),
    )
    for i in (3, 11):
        change = estimator.change(problem.people[0].remove([i], renormalise=renormalise))
        np.testing.assert_allclose(found[i], change.flat, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_run_on_all_samples_at_once(kind):
    train, problem = state()
    start = {"t": torch.tensor([0.3, -0.2], dtype=F64)}
    options = {"batch_size": N, "epochs": 2, "dual": dif.Ascent(0.1)}
    run = dif.Training(problem, start, dif.SGD(0.01), **options).run(show_progress=False)
    perturbation = KINDS[kind][0](train, problem)
    change = RunPerturbation(run.loop, Direction(run.loop.program, perturbation))
    batch = change.batch(0)
    weights, dense = change.weights(0, batch), np.zeros((5, 2, N + KINDS[kind][2]))
    rows, divisors = run.loop.program.rows, {}
    for number in range(len(rows.tables)):
        mine = [p for p, part in enumerate(batch) if part.table == number]
        members = sum((batch[p].U * weights.b[p][0]).sum(-1) for p in mine)  # (5, k)
        divisors[number] = torch.where(rows.means[rows.columns(number)], members, 1.0)
    for p, part in enumerate(batch):
        share = rows.C[:, rows.columns(part.table)] / divisors[part.table]
        seen = (share[:, :, None] * part.U * weights.a[p][0]).sum(1).numpy()
        view = int(part.samples.loss is not squared)
        dense[:, view, part.index.numpy()] += seen
    np.testing.assert_allclose(dense, weights_by_row(kind, in_a_run=True), atol=1e-14)
    if kind in IN_PART:
        return
    np.testing.assert_allclose(dense, weights_by_row(kind), atol=1e-14)
    ends = dif.Retraining(run).change(perturbation)
    again = dif.Training(problem.after(perturbation), start, dif.SGD(0.01), **{**options, "batch_size": N + 2})
    if kind not in NOT_MEANS:
        torch.testing.assert_close(run.theta + ends.flat, again.run(show_progress=False).theta, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_derivative_through_training_is_along_the_same_weights(kind):
    """Forwards and backwards they are, and parts in proportion to the factor."""
    train, problem = state()
    start = {"t": torch.tensor([0.3, -0.2], dtype=F64)}
    run = dif.Training(problem, start, dif.SGD(0.01), batch_size=N, epochs=3).run(show_progress=False)
    perturbation = KINDS[kind][0](train, problem)
    forwards = dif.UnrolledInfluence(run).change(perturbation).flat
    target = dif.linear(torch.eye(D)[0]).as_term()
    scores = dif.UnrolledInfluence(run, strict=False).scores(target, perturbation, probe=0, show_progress=False).values
    np.testing.assert_allclose(scores[0, 0], forwards[0], rtol=1e-9, atol=1e-14)
    half, quarter = (dif.UnrolledInfluence(run).change(share * perturbation).flat for share in (0.5, 0.25))
    torch.testing.assert_close(quarter, 0.5 * half, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("earlier", [name for name in HISTORY if name != "nothing"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*IN_PART, *NOT_MEANS)])
def test_a_training_run_after_earlier_perturbations(earlier, kind):
    problem = HISTORY[earlier](state()[1])
    perturbation = KINDS[kind][0](problem.people[0], problem)
    after, start = problem.after(perturbation), {"t": torch.tensor([0.3, -0.2], dtype=F64)}
    options = {"batch_size": N + 4, "epochs": 3, "dual": dif.Ascent(0.1)}
    run, again = (dif.Training(p, start, dif.SGD(0.01), **options).run(show_progress=False) for p in (problem, after))
    ends = dif.Retraining(run).change(perturbation)
    torch.testing.assert_close(run.theta + ends.flat, again.theta, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.point.lam + ends.multipliers.flat, again.point.lam, rtol=0, atol=1e-12)


@pytest.mark.parametrize("gone", [0, 39])
def test_a_sample_added_to_a_run_after_a_removal(gone):
    """The new sample weighs as much as the others, whichever was removed before."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(40, 2, generator=g, dtype=F64)
    y = X @ torch.tensor([1.0, -0.5], dtype=F64) + 0.1 * torch.randn(40, generator=g, dtype=F64)
    train = dif.Samples(squared, (X, y), name="train")
    target = dif.Samples(squared, (X[:5] + 1, y[:5]), name="test").mean()
    new = (torch.tensor([[2.0, 1.0]], dtype=F64), torch.tensor([0.5], dtype=F64))
    problem = dif.Problem(train.mean() + dif.ridge(0.1)).after(train.remove([gone]))
    start = {"t": torch.zeros(2, dtype=F64)}
    run = dif.Training(problem, start, dif.SGD(0.05), batch_size=40, epochs=200).run(show_progress=False)
    options = {"show_progress": False}
    through = dif.UnrolledInfluence(run).scores(target, train.add(new), **options).values
    again = dif.Retraining(run).scores(target, train.add(new), **options).values
    solution = dif.fit(problem, start, **options)
    truth = dif.Retraining(solution).scores(target, train.add(new), **options).values
    first = dif.DirectionalInfluence(solution).scores(target, train.add(new), **options).values
    torch.testing.assert_close(again, truth, rtol=1e-6, atol=0)
    torch.testing.assert_close(through, first, rtol=1e-6, atol=0)  # each step changes by (g − mean)/(n + 1)


def test_removing_and_adding_is_replacing():
    train, problem = state()
    solution = dif.fit(problem, {"t": torch.zeros(D, dtype=F64)}, show_progress=False)
    run = dif.Training(problem, {"t": torch.zeros(D, dtype=F64)}, dif.SGD(0.01), batch_size=5, epochs=3, seed=1)
    run = run.run(show_progress=False)
    replaced, both = train.replace([3], NEW1), train.remove([3]) + train.add(NEW1, like=3)
    for estimator in (dif.DirectionalInfluence, dif.NewtonInfluence, dif.PathInfluence, dif.Retraining):
        one, other = (estimator(solution).change(p).flat for p in (replaced, both))
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    one, other = (dif.Retraining(run).change(p).flat for p in (replaced, both))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    whole, thirds = train.remove([3]), sum([train.remove([3]) * (1 / 3)] * 3)
    for estimator in (dif.DirectionalInfluence, dif.NewtonInfluence, dif.Retraining):
        one, other = (estimator(solution).change(p).flat for p in (whole, thirds))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)
    one, other = (dif.Retraining(run).change(p).flat for p in (whole, thirds))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    assert problem.after(thirds).objective.sums[0][1].weights[3] == 0.0


def test_many_perturbations_are_resolved_once_and_picked():
    train, problem = state()
    at = solved(problem)
    many = [
        train.remove_each(),
        train.remove_groups([[1, 2], [4], [3, 6, 9]]),
        train.remove_each() + train.remove([3]),
        train.remove_each() + train.add(NEW1, like=1) + problem.constraints[0].shift(0.1),
        0.5 * train.remove_each() + train.reweight(more(N)),
        train.remove_each(terms=[problem.objective]) + 0.1 * train.replace([4], NEW1),
    ]
    for perturbations in many:
        direction = Direction(at.program, perturbations)
        stack = direction.stack_programs().gradients(at.theta.expand(direction.P, D))[0]
        rows = [2, 0]
        picked = direction.pick(rows)
        for p, number in enumerate(rows):
            alone = Direction(at.program, perturbations[number])
            value = alone.perturbed_program(0).rows.values(at.theta)
            torch.testing.assert_close(stack[number], value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(picked.perturbed_program(p).rows.values(at.theta), value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(picked.dtau[p], alone.dtau[0])
        mix = torch.tensor([[1.0, -2.0]], dtype=F64)
        first = [direction.first_order(p, at.theta, at.parts, at.part_gradients)[0] for p in rows]
        mixed = picked.combine(mix, at.theta, torch.ones(5, dtype=F64), at.parts, at.part_gradients)[1][0]
        torch.testing.assert_close(mixed, first[0] - 2 * first[1], rtol=1e-11, atol=1e-12)


def compare_groups(inside, weights=None):
    """A problem that compares the mean of one of two groups with that of both, from above and from below."""
    train = dif.Samples(squared, draw(len(inside), 0), name="train")
    weights = None if weights is None else torch.tensor(weights)
    group, both = train.mean(where=torch.tensor(inside), weights=weights), train.mean(weights=weights)
    rows = (group <= both + 0.5).of_smaller_group(), (group >= both - 0.25).of_smaller_group().named("least")
    return train, dif.Problem(train.mean() + dif.ridge(0.1), rows)


SIX_OF_14 = np.arange(14) < 6
FROM_LARGER = range(6, 11)  # leaves 6 and 3
# name → (perturbation, what the upper bound of .5 and the lower bound of −.25 are multiplied by)
GROUPS_CHANGE = {
    "the order stays": (lambda t, p: t.remove([0, 8]), 1.0),
    "equal": (lambda t, p: t.remove([8, 9]), 1.0),
    "turned": (lambda t, p: t.remove(FROM_LARGER), 3 / 6),
    "turned by people who come": (lambda t, p: t.add(draw(6, 3), like=2), 8 / 12),
    "in thirds": (lambda t, p: sum([(1 / 3) * t.remove(FROM_LARGER)] * 3), 3 / 6),
    "half of it": (lambda t, p: 0.5 * t.remove(FROM_LARGER), 3 / 4),
    "means keep their divisors": (lambda t, p: t.remove(FROM_LARGER, renormalise=False), 1.0),
    "from the objective": (lambda t, p: t.remove(FROM_LARGER, terms=[p.objective]), 1.0),
    "with other bounds": (lambda t, p: t.remove(FROM_LARGER) + p.constraints[0].shift(0.5), 1.0),
    "nobody else is left": (lambda t, p: t.remove(range(6, 14)), 1.0),
}


@pytest.mark.parametrize("kind", GROUPS_CHANGE)
def test_the_bound_of_the_smaller_group(kind):
    train, problem = compare_groups(SIX_OF_14)
    make, factor = GROUPS_CHANGE[kind]
    perturbation = make(train, problem)
    after = problem.after(perturbation)
    upper, lower = after.constraints
    shifted = kind == "with other bounds"  # from .5 to 1, and then by 1/2
    assert float(upper.tau) == pytest.approx(0.5 * factor, abs=1e-15)
    assert float(lower.tau) == pytest.approx(0.25 * (0.5 if shifted else factor), abs=1e-15)
    direction = Direction(solved(problem).program, perturbation)
    torch.testing.assert_close(direction.perturbed_program(0).tau, torch.stack([upper.tau, lower.tau]))
    together = Direction(solved(problem).program, train.remove_each() + perturbation)
    one = Direction(solved(problem).program, train.remove([13]) + perturbation)
    torch.testing.assert_close(together.dtau[13], one.dtau[0], rtol=0, atol=0)
    torch.testing.assert_close(together.pick([13]).dtau, one.dtau, rtol=0, atol=0)


def test_the_bound_of_the_smaller_group_after_several_perturbations():
    """Where the order turns back, the bound is the first one; weights count as repetitions."""
    weights = np.where(SIX_OF_14, 2.0, 1.5)  # 12 and 12
    train, problem = compare_groups(SIX_OF_14, weights)
    turned = problem.after(train.remove([13]))
    assert float(turned.constraints[0].tau) == pytest.approx(0.5 * 10.5 / 12)
    back = turned.after(turned.people[0].remove([0]))
    assert float(back.constraints[0].tau) == pytest.approx(0.5)
    again = back.after(back.people[0].remove([12]))
    assert float(again.constraints[0].tau) == pytest.approx(0.5 * 9 / 10)
    fixed = dif.Problem(problem.objective, [replace(c, share=None) for c in problem.constraints])
    assert fingerprint_program(solved(problem).program) != fingerprint_program(solved(fixed).program)
