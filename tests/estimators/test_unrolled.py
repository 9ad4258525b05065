"""Influence through training against autograd through an explicit loop, finite differences and rerunning."""

import warnings

import numpy as np
import pytest
import torch
from refusals import invalid, refused
from trainings import Explicit, classify, logistic, state_problem, violations

import dif
from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.training import adjoint
from dif.training.descent import TrainingStep

F64 = torch.float64
QUIET = {"show_progress": False}
PLAIN = {**QUIET, "probe": 0}
OPTIMIZERS = {
    "SGD": dif.SGD(0.1),
    "momentum": dif.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": dif.Adam(0.02, eps_root=1e-6),
    "AdamW": dif.AdamW(0.02, eps_root=1e-6, weight_decay=0.1),
}


def rerun(run, perturbation, since=0):
    return adjoint.rerun(run, Direction(run.loop.program, perturbation), since)


def train_model(optimizer, epochs=3):
    X, y, group, params = classify(n=40)
    train, problem = state_problem(X, y, group)
    test = dif.Samples(logistic, (X[:7] + 0.1, y[:7]), name="test")
    run = dif.Training(problem, params, optimizer, dif.Ascent(0.5), 9, epochs, 1, "cosine").run(**QUIET)
    return train, test, run, (X, y, group, params)


def by_autograd(run, data, optimizer):
    """∂(test losses)/∂w of every sample, through a loop written out with torch operations; also how often λ was 0."""
    X, y, group, params = data
    w = torch.ones(len(X), dtype=F64, requires_grad=True)
    theta = torch.cat([t.reshape(-1) for t in params.values()]).requires_grad_()
    lam, memory, touched = torch.zeros(3, dtype=F64), optimizer.start(theta), 0
    for t, (index,) in enumerate(run.loop.indices):
        p = {"W": theta[:6].reshape(3, 2), "v": theta[6:]}
        losses, weights = logistic(p, (X[index], y[index])), w[index]
        mean = (weights * losses).sum() / weights.sum()
        rows = []
        for g in range(2):
            mine = group[index] == g
            gap = (weights * losses)[mine].sum() / weights[mine].sum() - mean - 0.01
            rows.append(gap if bool(mine.any()) else torch.zeros_like(mean))
        violation = torch.stack([*rows, theta[0] - 0.1])
        lagrangian = mean + 0.005 * theta.square().sum() + lam @ violation
        (g,) = torch.autograd.grad(lagrangian, theta, create_graph=True)
        theta, memory = optimizer.update(theta, memory, g, run.loop.step.factors[t], t)
        ahead = lam + 0.5 * violation
        lam = torch.cat([ahead[:2].clamp(min=0), ahead[2:]])
        touched += int((lam[:2] == 0).sum())
    values = logistic({"W": theta[:6].reshape(3, 2), "v": theta[6:]}, (X[:7] + 0.1, y[:7]))
    return torch.stack([torch.autograd.grad(value, w, retain_graph=True)[0] for value in values]), touched


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_scores_are_autograd_through_the_loop(optimizer):
    train, test, run, data = train_model(optimizer)
    scores = dif.UnrolledInfluence(run).scores(test, 0.5 * train.remove_each(), **PLAIN)
    slopes, touched = by_autograd(run, data, optimizer)
    assert touched >= 2  # multipliers at zero
    assert max(run.history.multipliers[-1]) > 0
    np.testing.assert_allclose(scores.values, -0.5 * slopes.T, atol=1e-8 * float(slopes.abs().max()))


def perturbations(train, problem, X, y):
    n = len(X)
    return {
        "removal": train.remove([3]),
        "group": train.remove([1, 2, 20]),
        "the paper's": train.remove([1, 2], renormalise=False),
        "reweighting": train.reweight(torch.linspace(-0.01, 0.01, n)),
        "replacement": train.replace([5], (-X[5:6], y[5:6])),
        "addition": train.add((X[:2] + 0.3, y[:2]), like=[4, 7]),
        "bound": problem.constraints[0].shift(0.1),
        "one term": train.remove([3], terms=[problem.constraints[0]]),
        "sum": problem.constraints[2].shift(0.05) + 0.5 * train.remove([8]),
    }


@pytest.mark.parametrize("optimizer", [OPTIMIZERS["momentum"], OPTIMIZERS["Adam"]], ids=["momentum", "Adam"])
def test_every_perturbation_is_the_difference_of_running_again(optimizer):
    train, test, run, (X, y, *_) = train_model(optimizer, epochs=2)
    targets, estimator = Targets(test, run.end), dif.UnrolledInfluence(run)

    def ends(perturbation):
        ((theta, _),) = rerun(run, perturbation)
        return targets.values(theta[0])

    for name, one in perturbations(train, run.problem, X, y).items():
        h = 1e-5
        difference = (ends(h * one) - ends(-h * one)) / (2 * h)
        small = estimator.scores(test, h * one, **PLAIN).values[0] / h
        np.testing.assert_allclose(small, difference, atol=1e-6 * float(difference.abs().max()), err_msg=name)
        half = estimator.scores(test, 0.5 * one, **PLAIN).values[0]
        np.testing.assert_allclose(half, 0.5 * small, atol=1e-9 * float(small.abs().max()), err_msg=name)
        for whole in (one, 0.5 * one):
            found = estimator.scores(test, whole, **PLAIN).values[0]
            forward = estimator.change(whole).flat @ targets.gradients(run.theta)
            np.testing.assert_allclose(forward, found, atol=1e-10 * float(found.abs().max()), err_msg=name)
            by_term = estimator.by_term(test.mean(), whole, **QUIET)
            np.testing.assert_allclose(by_term.values.sum(), found.mean(), atol=1e-12)
            assert by_term.targets == ("objective", *run.end.program.names)


# Whole removals and additions: each step changes by its exact difference

PARTS = torch.eye(8, dtype=F64)


def carry_out(gone=(), new=(), renormalise=True, dtau=(0.0, 0.0, 0.0)):
    """Return the weights a and b, and the shift of τ, of a run without some samples and with others."""

    def moved(index, one):
        a = torch.where(torch.isin(index, torch.tensor(gone)), 0.0, one)
        a = torch.where(torch.isin(index, torch.tensor(new)), 1.0, a)
        return a, a if renormalise else one, torch.tensor(dtau, dtype=F64)

    return moved


def whole_changes(train, problem, X, y):
    """By name: a perturbation, what it does, and of which samples the two new ones are like."""
    new, third = (X[:2] + 0.3, y[:2]), (1 / 3) * train.remove([3])
    return {
        "one": (train.remove([3]), carry_out([3])),
        "the last of its group in a batch": (train.remove([6]), carry_out([6])),
        "several": (train.remove([1, 2, 20]), carry_out([1, 2, 20])),
        "a sum of removals": (train.remove([1, 2]) + train.remove([20]), carry_out([1, 2, 20])),
        "a group but one": (train.remove(range(0, 39, 3)), carry_out(range(0, 39, 3))),
        "the paper's": (train.remove([1, 2], renormalise=False), carry_out([1, 2], renormalise=False)),
        "three thirds": (third + third + third, carry_out([3])),
        "ten tenths": (sum([0.1 * train.remove([6])] * 10), carry_out([6])),
        "new samples": (train.add(new, like=[4, 7]), carry_out(new=[40, 41])),
        "replaced": (train.replace([4, 7], new), carry_out([4, 7], [40, 41])),
        "removed, others added": (train.remove([6]) + train.add(new, like=[4, 7]), carry_out([6], [40, 41])),
        "a bound": (problem.constraints[0].shift(-0.2), carry_out(dtau=(-0.2, 0.0, 0.0))),
        "a removal and a bound": (
            train.remove([3]) + problem.constraints[2].shift(0.3),
            carry_out([3], dtau=(0.0, 0.0, 0.3)),
        ),
    }


def test_whole_changes_are_exact_in_each_step_and_carried_on_linearly():
    """Against steps that are written out, with and without the samples, by forward mode."""
    X, y, group, params = classify(n=40)
    train, problem = state_problem(X, y, group)
    options = {
        "optimizer": dif.SGD(0.1, momentum=0.9, weight_decay=0.02),
        "dual": dif.Ascent(0.5),
        "schedule": "cosine",
    }
    run = dif.Training(problem, params, **options, batch_size=5, epochs=2, seed=1).run(**QUIET)
    members = [[int((group[index] == g).sum()) for (index,) in run.loop.indices] for g in range(2)]
    assert min(map(min, members)) == 0  # a group without members in a batch
    data = [torch.cat([x, more]) for x, more in ((X, X[:2] + 0.3), (y, y[:2]), (group, group[[4, 7]]))]
    explicit = Explicit(*data, weight_decay=0.02)
    start = torch.cat([params["W"].reshape(-1), params["v"], torch.zeros(11, dtype=F64)])
    copies = [[40] * int((index == 4).sum()) + [41] * int((index == 7).sum()) for (index,) in run.loop.indices]
    batches = [(i, torch.tensor(more, dtype=torch.long)) for (i,), more in zip(run.loop.indices, copies, strict=True)]
    estimator, linear, again = dif.UnrolledInfluence(run), dif.linear(PARTS), dif.Retraining(run)
    steps = explicit.linearise(start, batches, run.loop.step.factors)
    np.testing.assert_allclose(run.theta, steps[-1][4][:8], atol=1e-13)
    for name, (perturbation, moved) in whole_changes(train, problem, X, y).items():
        expected = explicit.predict(steps, moved)
        change = estimator.change(perturbation)
        size = float(expected[:8].abs().max())
        np.testing.assert_allclose(change.flat, expected[:8], atol=1e-11 * size, err_msg=name)
        lam = change.multipliers.flat
        np.testing.assert_allclose(lam, expected[16:], atol=1e-11 * float(expected[16:].abs().max()), err_msg=name)
        scores = estimator.scores(linear, perturbation, **PLAIN)
        np.testing.assert_allclose(scores.values[0], expected[:8], atol=1e-11 * size, err_msg=name)
        state = start
        for _, every, one, factor, *_ in steps:  # trained again
            state = explicit.step(state, every, *moved(every, one), factor)
        change = again.change(perturbation)
        np.testing.assert_allclose(change.flat, state[:8] - run.theta, atol=1e-13, err_msg=name)
        np.testing.assert_allclose(change.multipliers.flat, state[16:] - run.end.lam, atol=1e-12, err_msg=name)
    by_term = estimator.by_term(dif.linear(PARTS[3]), train.remove([3]), **QUIET).values.sum()
    np.testing.assert_allclose(by_term, scores_of(estimator, train.remove([3]))[3], atol=1e-14)
    each = estimator.scores(linear, train.remove_each(), **PLAIN).values
    for i in range(0, 40, 7):
        expected = explicit.predict(steps, carry_out([i]))
        np.testing.assert_allclose(each[i], expected[:8], atol=1e-11 * float(expected[:8].abs().max()))


def scores_of(estimator, perturbation):
    return estimator.scores(dif.linear(PARTS), perturbation, **PLAIN).values[0]


def test_parts_of_perturbations_trained_again_are_the_loop_by_hand():
    """Weights of a run without half a sample, with half of a new one, and reweighted; the directions add up."""
    X, y, group, params = classify(n=40)
    train, problem = state_problem(X, y, group)
    run = dif.Training(problem, params, dif.SGD(0.1, momentum=0.9), dif.Ascent(0.5), 9, 2).run(**QUIET)
    explicit = Explicit(torch.cat([X, X[:1] + 1]), torch.cat([y, y[:1]]), torch.cat([group, group[4:5]]))
    dw, new = torch.linspace(-0.01, 0.01, 40, dtype=F64), (X[:1] + 1, y[:1])
    members = torch.tensor([40.0, *(float((group == g).sum()) for g in range(2))], dtype=F64)

    def weigh(change, index, one):
        a, b = one.expand(3, -1).clone(), one.expand(3, -1).clone()
        for sample, share in change.items():
            a[:, index == sample], b[:, index == sample] = a[:, index == sample] + share, b[:, index == sample] + share
        return a, b

    for perturbation, change, reweighted in (
        (0.5 * train.remove([3]), {3: -0.5}, 0.0),
        (-0.2 * train.remove([3, 6]), {3: 0.2, 6: 0.2}, 0.0),
        (0.5 * train.add(new, like=4), {40: 0.5}, 0.0),
        (0.25 * train.remove([3]) + 0.5 * train.remove([3, 7]), {3: -0.75, 7: -0.5}, 0.0),
        (train.remove([3]) + 0.5 * train.add(new, like=4) + train.reweight(dw), {3: -1.0, 40: 0.5}, 1.0),
        (0.3 * train.reweight(dw), {}, 0.3),
    ):
        state = torch.cat([params["W"].reshape(-1), params["v"], torch.zeros(11, dtype=F64)])
        for (index,) in run.loop.indices:
            every = torch.cat([index, torch.tensor([40] * int((index == 4).sum()), dtype=torch.long)])
            one = (torch.arange(len(every)) < len(index)).double()
            a, b = weigh(change, every, one)
            a = a + reweighted * members[:, None] * torch.cat([dw, dw[:1] * 0])[every]
            state = explicit.step(state, every, a, b, torch.zeros(3, dtype=F64))
        found = dif.Retraining(run).change(perturbation)
        np.testing.assert_allclose(found.flat, state[:8] - run.theta, atol=1e-13, err_msg=str(perturbation))


@pytest.mark.parametrize("optimizer", [OPTIMIZERS["SGD"], OPTIMIZERS["momentum"]], ids=["SGD", "momentum"])
@pytest.mark.parametrize("size", [6, 12])
def test_a_run_of_one_step_is_predicted_exactly(optimizer, size):
    X, y, group, params = classify(n=size)
    train, problem = state_problem(X, y, group)
    training = dif.Training(problem, params, optimizer, dif.Ascent(0.5), size, multipliers=[0.3, 0.0, -0.2])
    run = training.run(**QUIET)
    new = (X[:2] + 0.3, y[:2])
    for one in (
        train.remove([0]),
        train.remove([0], renormalise=False),
        train.remove([0, 1]),
        train.remove([1], terms=[problem.constraints[1]]) + train.remove([2]),
        train.add(new, like=[0, 1]),
        train.replace([0, 2], new),
        train.remove([1]) + 0.5 * train.remove([2]),
        train.remove([2]) + problem.constraints[1].shift(0.3),
        problem.constraints[0].shift(1.0),
    ):
        found, actual = dif.UnrolledInfluence(run).change(one), dif.Retraining(run).change(one)
        np.testing.assert_allclose(found.flat, actual.flat, atol=1e-15, err_msg=str(one))
        np.testing.assert_allclose(found.multipliers.flat, actual.multipliers.flat, atol=1e-15, err_msg=str(one))
        scores = dif.UnrolledInfluence(run).scores(dif.linear(PARTS), one, **PLAIN)
        np.testing.assert_allclose(scores.values[0], actual.flat, atol=1e-15, err_msg=str(one))


def test_views_several_samples_and_weighted_means_by_hand():
    """Two steps on a line, by NumPy: risk of `train`, mean and sum of a view, weighted mean of other samples."""
    generator = np.random.default_rng(0)
    x, z, rising = generator.normal(size=6), generator.normal(size=4), np.arange(1.0, 5.0)
    train = dif.Samples(lambda p, b: 0.5 * (p["t"] - b) ** 2, torch.tensor(x), name="train")
    rate, other = (
        train.view(lambda p, b: torch.sin(p["t"] * b), name="rate"),
        dif.Samples(lambda p, b: p["t"] ** 2 * b, torch.tensor(z), name="other"),
    )
    some = torch.tensor([True, False, False, True, False, False])
    terms = [rate.mean(where=some) + 0.1 * rate.sum() <= 0.05, other.mean(weights=rising) >= 0.2]
    problem = dif.Problem(train.mean() + dif.ridge(0.1), terms)
    start, lr, up, lam0 = 0.7, 0.3, 0.8, np.array([0.4, 0.3])
    run = dif.Training(
        problem, {"t": torch.tensor(start, dtype=F64)}, dif.SGD(lr), dif.Ascent(up), 3, multipliers=lam0
    ).run(**QUIET)
    batches = [(i.numpy(), j.numpy()) for i, _, j in run.loop.indices]
    assert len(batches) == 2

    def step(t, lam, index, others, weights, more):
        """The step with weights of the samples and of the others; also its derivative in t and λ."""
        w, v, members = weights[index], more[others] * rising[others], some.numpy()[index] * weights[index]
        there, others_there = members.sum() > 0, v.sum() > 0
        values = lambda t: np.array([  # noqa: E731
            there * ((members * np.sin(t * x[index])).sum() / max(members.sum(), 1)
                     + 0.1 * (w * np.sin(t * x[index])).sum() * 6 / len(index) - 0.05),
            others_there * (0.2 - t**2 * (v * z[others]).sum() / max(v.sum(), 1e-9)),
        ])  # fmt: skip
        slopes = lambda t: np.array([  # noqa: E731
            there * ((members * np.cos(t * x[index]) * x[index]).sum() / max(members.sum(), 1)
                     + 0.1 * (w * np.cos(t * x[index]) * x[index]).sum() * 6 / len(index)),
            others_there * (-2 * t * (v * z[others]).sum() / max(v.sum(), 1e-9)),
        ])  # fmt: skip
        g = (w * (t - x[index])).sum() / w.sum() + 0.1 * t + lam @ slopes(t)
        h = 1e-6
        g_t = 1 + 0.1 + lam @ (slopes(t + h) - slopes(t - h)) / (2 * h)
        after = np.concatenate([[t - lr * g], np.maximum(0, lam + up * values(t))])
        J = np.zeros((3, 3))
        J[0, 0], J[0, 1:] = 1 - lr * g_t, -lr * slopes(t)
        J[1:, 0], J[1:, 1:] = (after[1:] > 0) * up * slopes(t), np.diag((after[1:] > 0).astype(float))
        return after, J

    one, all_others, estimator = np.ones(6), np.ones(4), dif.UnrolledInfluence(run)
    for samples, gone in ((train, [0]), (train, [3, 5]), (train, [1, 2]), (other, [2]), (other, [0, 1, 3])):
        weights, more = one.copy(), all_others.copy()
        (weights if samples is train else more)[gone] = 0
        state, change = np.array([start, *lam0]), np.zeros(3)
        for index, others in batches:
            after, J = step(state[0], state[1:], index, others, one, all_others)
            change = J @ change + step(state[0], state[1:], index, others, weights, more)[0] - after
            state = after
        np.testing.assert_allclose(run.theta, state[:1], atol=1e-14)
        found = estimator.change(samples.remove(gone))
        np.testing.assert_allclose(found.flat, change[:1], atol=1e-9)
        np.testing.assert_allclose(found.multipliers.flat, change[1:], atol=1e-9)
        score = estimator.scores(dif.linear([1.0]), samples.remove(gone), **PLAIN).values
        np.testing.assert_allclose(score, change[:1, None], atol=1e-9)


@pytest.mark.parametrize("optimizer", [OPTIMIZERS["Adam"], OPTIMIZERS["AdamW"]], ids=["Adam", "AdamW"])
def test_adam_moves_along_the_exact_change_of_the_gradient(optimizer):
    """One step: the optimiser's derivative along the difference of two gradients."""
    X, y, group, params = classify(n=12)
    train, problem = state_problem(X, y, group)
    training = dif.Training(problem, params, optimizer, dif.Ascent(0.5), 12, multipliers=[0.3, 0.1, -0.2])
    run, theta = training.run(**QUIET), torch.cat([t.reshape(-1) for t in params.values()])
    explicit, lam = Explicit(X, y, group), torch.tensor([0.3, 0.1, -0.2], dtype=F64)
    (index,), one, none = run.loop.indices[0], torch.ones(12, dtype=F64), torch.zeros(3, dtype=F64)
    slope = torch.func.grad(lambda *args: explicit.lagrangian(*args)[0])
    g, left = slope(theta, lam, index, one, one, none), (index != 3).double()
    move = lambda g: optimizer.update(theta, optimizer.start(theta), g, 1.0, 0)[0]  # noqa: E731
    expected = torch.func.jvp(move, (g,), (slope(theta, lam, index, left, left, none) - g,))[1]
    np.testing.assert_allclose(dif.UnrolledInfluence(run).change(train.remove([3])).flat, expected, atol=1e-14)


def test_minorities_in_small_batches_are_predicted():
    """160 people, batches of 16, a bounded group of 10: a member is often the only one in its batch."""
    r = []
    for seed in range(3):
        run, train, target = train_minority(seed)
        removals = train.remove_each()
        actual = dif.Retraining(run).scores(target, removals, **QUIET)
        finite, derivative = (
            dif.UnrolledInfluence(run).scores(target, factor * removals, **PLAIN) for factor in (1.0, 0.5)
        )
        r.append([np.corrcoef(x.values[:, 0], actual.values[:, 0])[0, 1] for x in (finite, derivative)])
    finite, derivative = np.median(r, 0)
    assert finite > 0.94 > 0.84 > derivative


def train_minority(seed, n=160, members=10):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=F64)  # noqa: E731
    X, group = draw(n, 4), torch.zeros(n, dtype=torch.bool)
    X[:, 0] = 1
    group[torch.randperm(n, generator=generator)[:members]] = True
    y = torch.sign(X[:, 1] - 0.5 * X[:, 2] + torch.where(group, -1.0, 1.0) + 0.7 * draw(n))
    loss = lambda p, z: torch.nn.functional.softplus(-z[1] * (z[0] @ p["w"]))  # noqa: E731
    train = dif.Samples(loss, (X, y), name="train")
    X_test = draw(200, 4)
    X_test[:, 0] = 1
    y_test = torch.sign(X_test[:, 1] - 0.5 * X_test[:, 2] + 0.7 * draw(200))
    problem = dif.Problem(train.mean() + dif.ridge(0.01), [(train.mean(where=group) <= 0.5).named("minority")])
    training = dif.Training(problem, {"w": torch.zeros(4, dtype=F64)}, dif.SGD(0.1), dif.Ascent(0.3), 16, 8, seed)
    return training.run(**QUIET), train, dif.Samples(loss, (X_test, y_test), name="test").mean()


def test_batches_of_targets_and_ways_to_keep_states_agree(tmp_path):
    X, y, group, params = classify(n=40)
    train, problem = state_problem(X, y, group)
    test = dif.Samples(logistic, (X[:7], y[:7]), name="test")
    training = dif.Training(problem, params, dif.SGD(0.1, momentum=0.9), dif.Ascent(0.5), 9, 4)
    whole, disk, some = (training.run(keep=keep, **QUIET) for keep in ("all", tmp_path / "run", "sqrt"))
    assert len(some.states._kept) == 6
    removals = train.remove_each()
    scores = dif.UnrolledInfluence(whole).scores(test, removals, **PLAIN).values
    for run in (disk, some):
        found = dif.UnrolledInfluence(run).scores(test, removals, **PLAIN).values
        np.testing.assert_allclose(found, scores, atol=1e-12 * float(scores.abs().max()))
    one_by_one = [
        dif.UnrolledInfluence(whole).scores(test.weighted(torch.eye(7)[i]), removals, **PLAIN).values for i in range(7)
    ]
    np.testing.assert_allclose(torch.cat(one_by_one, 1), scores, atol=1e-12 * float(scores.abs().max()))


def test_since_leaves_the_steps_before_as_they_were():
    train, test, run, _ = train_model(OPTIMIZERS["momentum"])
    estimator, removal = dif.UnrolledInfluence(run, since=6), train.remove([3])
    targets, h = Targets(test, run.end), 1e-5
    ends = [targets.values(next(iter(rerun(run, sign * h * removal, 6)))[0][0]) for sign in (1, -1)]
    difference = (ends[0] - ends[1]) / (2 * h)
    found = estimator.scores(test, h * removal, **PLAIN).values[0] / h
    np.testing.assert_allclose(found, difference, atol=1e-6 * float(difference.abs().max()))
    whole = estimator.scores(test, removal, **PLAIN).values[0]
    np.testing.assert_allclose(estimator.change(removal).flat @ targets.gradients(run.theta), whole, atol=1e-12)
    last = dif.UnrolledInfluence(run, since=run.loop.length - 1)  # a single step: exact
    ((theta, _),) = rerun(run, train.remove_each(), run.loop.length - 1)
    scores = last.scores(dif.linear(PARTS), train.remove_each(), **PLAIN)
    np.testing.assert_allclose(scores.values, theta - run.theta, atol=1e-15)
    late = dif.UnrolledInfluence(run, since=run.loop.length).scores(test, removal, **PLAIN).values
    assert float(late.abs().max()) == 0


def test_removals_carried_out_together_are_those_carried_out_alone():
    train, _, run, (X, y, group, params) = train_model(OPTIMIZERS["AdamW"])
    ((thetas, lams),) = rerun(run, train.remove_each(range(5)))
    for i in range(5):
        left = torch.arange(40) != i
        theta, lam = torch.cat([t.reshape(-1) for t in params.values()]), torch.zeros(3, dtype=F64)
        memory = run.loop.step.optimizer.start(theta)
        for t, (index,) in enumerate(run.loop.indices):
            index = index[left[index]]
            theta = theta.requires_grad_()
            p = {"W": theta[:6].reshape(3, 2), "v": theta[6:]}
            losses = logistic(p, (X[index], y[index]))
            violation = violations(losses, group[index], theta[0])
            (g,) = torch.autograd.grad(losses.mean() + 0.005 * theta.square().sum() + lam @ violation, theta)
            theta, memory = run.loop.step.optimizer.update(theta.detach(), memory, g, run.loop.step.factors[t], t)
            lam = lam + 0.5 * violation.detach()
            lam[:2] = lam[:2].clamp(min=0)
        np.testing.assert_allclose(thetas[i], theta, atol=1e-12)
        np.testing.assert_allclose(lams[i], lam, atol=1e-12)


def test_retraining_of_a_run_is_kept_and_compared(tmp_path, monkeypatch):
    train, test, run, _ = train_model(OPTIMIZERS["momentum"])
    removals = train.remove_each(range(20))
    actual = dif.Retraining(run, keep=tmp_path / "kept").scores(test, removals, **QUIET)
    ((thetas, _),) = rerun(run, removals)
    targets = Targets(test, run.end)
    expected = torch.stack([targets.values(theta) - targets.values(run.theta) for theta in thetas])
    np.testing.assert_allclose(actual.values, expected, atol=1e-12)
    predicted = dif.UnrolledInfluence(run).scores(test, removals, **QUIET)
    assert predicted.compare(actual).pearson > 0.95
    probed = predicted.diagnostics["probe"]
    assert len(probed["actual"]) == 12
    assert probed["agreement"] > 0.9
    change = dif.Retraining(run).change(train.remove([3]))
    np.testing.assert_allclose(change.flat, thetas[3] - run.theta, atol=1e-12)

    monkeypatch.setattr("dif.estimators.retraining.rerun", lambda *_: pytest.fail("trained again"))
    again = dif.Retraining(run, keep=tmp_path / "kept").scores(test, removals, **QUIET)
    assert torch.equal(again.values, actual.values)


def test_an_interrupted_sweep_resumes(tmp_path, monkeypatch):
    X, y, group, params = classify(n=40)
    train, problem = state_problem(X, y, group)
    test = dif.Samples(logistic, (X[:3], y[:3]), name="test")
    training = dif.Training(problem, params, dif.Adam(0.01, eps_root=1e-8), dif.Ascent(0.5), 9, 3)
    expected = dif.UnrolledInfluence(training.run(**QUIET)).scores(test, train.remove_each(), **PLAIN)
    monkeypatch.setattr("dif.training.adjoint._SECONDS", -1.0)  # a checkpoint after every step
    steps, usual = [], TrainingStep.pull_back

    def pull_back(self, t, *args):
        steps.append(t)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return usual(self, t, *args)

    monkeypatch.setattr(TrainingStep, "pull_back", pull_back)

    def score(removals=None):
        run = training.run(keep=tmp_path / "run", **QUIET)
        return dif.UnrolledInfluence(run).scores(test, removals or train.remove_each(), **PLAIN)

    with pytest.raises(KeyboardInterrupt):
        score()
    found = score()
    assert steps == [*range(14, 8, -1), *range(9, -1, -1)]
    np.testing.assert_array_equal(found.values, expected.values)
    assert found.diagnostics == expected.diagnostics
    np.testing.assert_array_equal(score(train.remove_each([5])).values, expected.values[5:6])
    assert len(steps) == 16  # a finished sweep is not repeated for the same targets


def smooth_runs():
    """Ten runs of different kinds: optimisers, constraints, batches, models, steps of one's own."""
    X, y, group, params = classify(n=80, seed=1)
    train, problem = state_problem(X, y, group)
    free = dif.Problem(train.mean() + dif.ridge(0.01))
    fixed = dif.Problem(train.mean() + dif.ridge(0.01), [train.mean(where=group == 0) == train.mean()])
    squared = dif.Samples(lambda p, z: (z[0] @ p["w"] - z[1]) ** 2, (X, y), name="train")
    line = dif.Problem(squared.mean(), [dif.linear(torch.eye(3)[:1]) <= 0.1])
    make = lambda stated, start, *args: dif.Training(stated, start, *args).run(**QUIET)  # noqa: E731
    yield train, make(problem, params, dif.SGD(0.05), dif.Ascent(0.2), 20, 4)
    yield train, make(problem, params, dif.SGD(0.02, momentum=0.9), dif.Ascent(0.2), 20, 4)
    yield train, make(problem, params, dif.SGD(0.02, momentum=0.9, nesterov=True), dif.Ascent(0.2), 80, 10)
    yield train, make(problem, params, dif.SGD(0.05, weight_decay=0.1), dif.Ascent(0.2), 10, 3, 5, "cosine")
    yield train, make(problem, params, dif.Adam(0.005, eps_root=1e-3), dif.Ascent(0.2), 20, 4)
    yield train, make(problem, params, dif.AdamW(0.005, eps_root=1e-3), dif.Ascent(0.2), 20, 4)
    yield train, make(free, params, dif.SGD(0.1, momentum=0.9), dif.Ascent(0.2), 20, 8)
    yield train, make(fixed, params, dif.SGD(0.05, momentum=0.5), dif.Ascent(0.3), 20, 6)
    yield squared, make(line, {"w": torch.zeros(3, dtype=F64)}, dif.SGD(0.05), dif.Ascent(0.5), 20, 5)

    def step(state, batch, weights):
        slope = (weights * (X[batch] @ state["w"] - y[batch])) @ X[batch] / weights.sum()
        return {"w": state["w"] - 0.1 * slope}

    batches = torch.randperm(80, generator=torch.Generator().manual_seed(0)).split(20)
    own = dif.unroll(step, {"w": torch.zeros(3, dtype=F64)}, batches * 3, **QUIET)
    yield own.samples[0], own


def test_smooth_runs_are_trusted_without_a_warning():
    for number, (train, run) in enumerate(smooth_runs()):
        target = dif.Function(lambda p: sum((t**3).sum() for t in p.values()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = dif.UnrolledInfluence(run).scores(target, train.remove_each(), **QUIET)
        assert found.trusted, number
        assert found.diagnostics["probe"]["agreement"] > 0.9, number
    assert number == 9


# The verdict


def judge_by_hand(scores, removals, run, target):
    """Carry out what was carried out, and compare: relative errors, and weights by how many each one stands for."""
    rows = scores.diagnostics["assessment"]["rows"]
    actual = dif.Retraining(run).scores(target, removals.pick(rows)).values
    return rows, (scores.values[rows] - actual).abs(), actual


def test_the_verdict_is_that_of_removals_that_are_carried_out():
    run, train, target = train_minority(1)
    other = dif.linear([1.0, 0.0, 0.0, 0.0]).as_term().named("weight")
    targets, removals = [target.named("loss"), other], train.remove_each()
    with pytest.warns(dif.FirstOrderWarning) as seen:
        scores = dif.UnrolledInfluence(run).scores(targets, removals, **QUIET)
    rows, error, actual = judge_by_hand(scores, removals, run, targets)
    members = torch.nonzero(run.problem.constraints[0].term.sums[0][1].weights).reshape(-1).tolist()
    assert len(rows) == len(set(rows)) == 12
    strength = (scores.values.abs() / scores.values.abs().max(0).values).sum(1)
    assert rows[:4] == strength.argsort(descending=True)[:4].tolist()  # the others are random
    drawn = [[row for row in rows[4:] if (row in members) == inside] for inside in (True, False)]
    assert [len(some) for some in drawn] == [4, 4]
    rest = [i for i in range(160) if i not in rows[:4]]
    left = [sum((i in members) == inside for i in rest) for inside in (True, False)]
    weights = torch.tensor([1.0] * 4 + [left[row not in members] / 4 for row in rows[4:]], dtype=F64)[:, None]
    pooled = ((weights * error**2).sum(0) / (weights * actual**2).sum(0)).sqrt()
    signs = (weights * (scores.values[rows].sign() != actual.sign())).sum(0) / weights.sum()
    found = scores.diagnostics["assessment"]
    np.testing.assert_allclose(found["by_target"], torch.maximum(pooled, signs), rtol=1e-10)
    assert found["pooled"] == max(found["by_target"])
    assert list(scores.trusted_by_target.items()) == [("loss", pooled[0] <= 0.25), ("weight", pooled[1] <= 0.25)]
    expected = scores.expected_error
    assert torch.isfinite(expected).nonzero().reshape(-1).tolist() == sorted(rows)
    units = torch.maximum(actual.abs(), scores.values[rows].abs()).max(0).values
    ratios = (error / units).norm(dim=1) / (actual / units).norm(dim=1)
    np.testing.assert_allclose(expected[rows], ratios, rtol=1e-10)
    assert not scores.trusted
    assert "NOT trusted" in scores.summary()
    text = str(seen[-1].message)
    assert "cannot be trusted. Their estimated relative error is" in text
    assert "Use dif.Retraining(run), which carries the perturbations out." in text


def test_few_members_in_a_batch_are_said_before_the_sweep(monkeypatch):
    run, train, target = train_minority(1)
    monkeypatch.setattr("dif.estimators.unrolled.sweep_back", lambda *_: pytest.fail("swept"))
    estimator = dif.UnrolledInfluence(run)
    members = torch.nonzero(run.problem.constraints[0].term.sums[0][1].weights).reshape(-1)
    text = "A batch has 1 members of the group in 'minority' on average; it should have 2."
    with pytest.warns(dif.FirstOrderWarning, match=text), pytest.raises(pytest.fail.Exception):
        estimator.scores(target, train.remove_each(), **QUIET)
    others = train.remove_each([i for i in range(160) if i not in members])
    warnings.simplefilter("error")
    with pytest.raises(pytest.fail.Exception):
        estimator.scores(target, others, **QUIET)


def test_a_target_that_cannot_move_is_no_chaos_and_does_not_count_among_others():
    """The end has converged, so that a constraint pins one weight; its changes are rounding."""
    X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    y = X @ torch.tensor([1.0, -2.0], dtype=F64) + 0.3 * torch.sin(torch.arange(20.0)).double()
    train = dif.Samples(lambda p, z: 0.5 * (z[0] @ p["w"] - z[1]) ** 2, (X, y), name="train")
    pinned, other = dif.linear([1.0, 0.0]), dif.linear([0.0, 1.0])
    problem = dif.Problem(train.mean() + dif.ridge(0.01), [(pinned == 0.5).named("pinned")])
    run = dif.Training(problem, {"w": torch.zeros(2, dtype=F64)}, dif.SGD(0.8), dif.Ascent(0.5), 20, 250).run(**QUIET)
    targets = {"w0": pinned, "gap": pinned - 0.5, "w1": other}  # the value of the gap is rounding, too
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = dif.UnrolledInfluence(run).scores(targets, train.remove_each(), **QUIET)
        alone = dif.UnrolledInfluence(run).scores(pinned, train.remove_each(), **QUIET)
    assert 0 < float(alone.values.abs().max()) < 1e-15
    assert alone.trusted
    assert alone.diagnostics["probe"]["agreement"] == 1.0
    assert scores.trusted
    *still, moving = scores.diagnostics["assessment"]["by_target"]
    assert still == [0.0, 0.0]
    assert 0 < moving < 0.25
    w1 = dif.UnrolledInfluence(run).scores(other, train.remove_each(), **QUIET)
    np.testing.assert_allclose(w1.diagnostics["assessment"]["by_target"], moving, rtol=0.5)


def test_every_constrained_group_is_among_those_carried_out():
    X, y, _, params = classify(n=60)
    train = dif.Samples(logistic, (X, y), name="train")
    groups = [torch.arange(60) // 4 == g for g in range(15)]
    problem = dif.Problem(train.mean() + dif.ridge(0.01), [train.mean(where=g) <= 1.0 for g in groups])
    run = dif.Training(problem, params, dif.SGD(0.05), dif.Ascent(0.1), 30, 2).run(**QUIET)
    for count in (12, 3):
        scores = dif.UnrolledInfluence(run).scores(train.mean(), train.remove_each(), probe=count, **QUIET)
        rows = scores.diagnostics["assessment"]["rows"]
        random = rows[-(-count // 3) :]
        assert {row // 4 for row in random} == set(range(15))
    few = dif.UnrolledInfluence(run).scores(train.mean(), train.remove_each([5, 17]), **QUIET)
    assert sorted(few.diagnostics["assessment"]["rows"]) == [0, 1]
    assert dif.UnrolledInfluence(run).scores(train.mean(), train.remove_each([5]), **PLAIN).trusted is None


def test_a_removal_that_empties_a_mean_leaves_the_others_their_scores(tmp_path):
    """Sample 0 is alone in its group; the run and its retraining answer all other removals, also in a file."""
    X, y, group, params = classify(n=40)
    group[0] = 7
    train = dif.Samples(logistic, (X, y), name="train")
    alone = (train.mean(where=group == 7) <= 0.4).named("alone")
    problem = dif.Problem(train.mean() + dif.ridge(0.01), [alone])
    run = dif.Training(problem, params, dif.SGD(0.05), dif.Ascent(0.1), 20, 3).run(**QUIET)
    removals, others = train.remove_each(), train.remove_each(range(1, 40))
    estimator = dif.UnrolledInfluence(run)
    with pytest.warns(dif.FirstOrderWarning, match="1 of 40 perturbations have no answer"):
        scores = estimator.scores(train.mean(), removals, out=tmp_path / "s.npy", **QUIET)
    with pytest.warns(dif.FirstOrderWarning, match="1 of 40 perturbations have no answer"):
        truth = dif.Retraining(run).scores(train.mean(), removals, **QUIET)
    expected = estimator.scores(train.mean(), others, **PLAIN)
    assert torch.isnan(scores.values[0]).all()
    assert torch.isnan(truth.values[0]).all()
    np.testing.assert_allclose(scores.values[1:], expected.values, rtol=1e-12)
    rows = scores.diagnostics["assessment"]["rows"]
    assert 0 not in rows
    np.testing.assert_allclose(scores.diagnostics["probe"]["actual"], truth.values[rows], rtol=1e-9)
    for influence in (scores, truth, estimator.by_term(train.mean(), removals, **QUIET)):
        ((label, reason),) = influence.diagnostics["unanswered"].items()
        assert label == removals.labels[0]
        assert "leaves no samples in" in reason
        assert torch.isfinite(influence.values[1:]).all()
    invalid(lambda: estimator.scores(train.mean(), removals[0], **QUIET), "leaves no samples in")


def test_scores_in_a_file_keep_their_verdict(tmp_path):
    run, train, target = train_minority(1)
    first, again = (
        dif.UnrolledInfluence(run).scores(target, train.remove_each(), out=tmp_path / "s.npy", **QUIET)
        for _ in range(2)
    )
    assert first.diagnostics == again.diagnostics
    assert dif.Influence.load(tmp_path / "s.npy").trusted is first.trusted is again.trusted is False


def test_a_chaotic_run_is_refused_with_its_probes():
    X, y, group, params = classify(n=40)
    train, problem = state_problem(X, y, group)
    wild = dif.Training(problem, params, dif.SGD(3.0, momentum=0.9), dif.Ascent(3.0), 9, 12, 1).run(**QUIET)
    error = refused(
        dif.DegenerateError,
        lambda: dif.UnrolledInfluence(wild).scores(train.mean(), train.remove_each(), **QUIET),
        "The training is chaotic or not smooth at this scale, so its derivative predicts nothing.",
    )
    assert "predicted (actual)" in error.found
    recorded = dif.UnrolledInfluence(wild, strict=False).scores(train.mean(), train.remove_each(), **QUIET)
    assert not recorded.diagnostics["probe"]["agreement"] > 0.5
    assert recorded.diagnostics["adjoint_growth"] > 100


def test_wrong_input_is_refused():
    train, _, run, _ = train_model(OPTIMIZERS["SGD"], epochs=1)
    flat = dif.Samples(lambda p, z: z * p["a"] ** 2 + 0 * p["b"].sum(), torch.ones(8, dtype=F64))
    start = {"a": torch.ones((), dtype=F64), "b": torch.ones(2, dtype=F64)}
    adam = dif.Training(dif.Problem(flat.mean()), start, dif.Adam(0.1), batch_size=4).run(**QUIET)
    refused(
        dif.DegenerateError,
        lambda: dif.UnrolledInfluence(adam).scores(flat.mean(), flat.remove_each(), **QUIET),
        "scores are NaN or infinite",
        "A step has no derivative somewhere, such as the root of an average square of 0 in Adam without eps_root. "
        "Or a step of your own divides by the weights of a group that is empty without a sample.",
        "Leave empty groups out of a step of your own.",
    )
    invalid(lambda: dif.UnrolledInfluence(run).change(3), "int")
    invalid(lambda: dif.UnrolledInfluence(run.end), "`run` must be a dif.Run, not of type Solution")
    two = lambda: dif.UnrolledInfluence(run).by_term([run.problem.objective] * 2, train.remove([0]))  # noqa: E731
    invalid(two, "`by_term` takes exactly 1 target, not 2", "the columns of its result are the terms of the problem.")
    none = dif.UnrolledInfluence(run, since=run.loop.length).scores(train.mean(), train.remove_each(), **QUIET)
    assert none.diagnostics["probe"]["agreement"] == 1.0
    assert not bool(none.values.any())
    invalid(lambda: dif.UnrolledInfluence(run, since=99), "`since` must be an integer from 0 to 5 (the end), not 99.")


def test_a_training_that_diverges_without_a_sample_is_refused_or_recorded(monkeypatch):
    train, test, run, _ = train_model(OPTIMIZERS["SGD"], epochs=1)
    lost = [(torch.full((1, len(run.theta)), float("nan"), dtype=F64), run.end.lam[None])]
    monkeypatch.setattr("dif.estimators.retraining.rerun", lambda *_: iter(lost))
    action = lambda: dif.Retraining(run).scores(test, train.remove([1]), **QUIET)  # noqa: E731
    text = "The same training on the changed data diverges, so there is no difference to report."
    refused(dif.NotConvergedError, action, "'remove train[1]'", text)
    recorded = dif.Retraining(run, strict=False).scores(test, train.remove([1]), **QUIET)
    assert bool(torch.isnan(recorded.values).all())
    assert list(recorded.diagnostics["failed"]) == ["remove train[1]"]
