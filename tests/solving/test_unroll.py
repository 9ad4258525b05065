"""Steps of one's own: `dif.unroll`, its derivatives, and the same steps on changed data."""

import numpy as np
import pytest
import torch
from refusals import invalid, refused, table
from torch.func import grad
from trainings import F64, classify, logistic, state_problem

import dif
from dif.derivatives.program import Targets
from dif.runtime.guard import UserCodeError

QUIET = {"show_progress": False}
PLAIN = {"show_progress": False, "probe": 0}


def lagrangian(params, lam, X, y, weights):
    """A weighted mean with the bound mean ‖tanh(xW)‖² ≤ 0.5."""
    losses = logistic(params, (X, y))
    size = (torch.tanh(X @ params["W"]) ** 2).sum(1)
    mean = lambda values: (weights * values).sum() / weights.sum()  # noqa: E731
    return mean(losses) + lam * (mean(size) - 0.5), mean(size) - 0.5


def alternate(X, y):
    """Descent on the params by momentum, then ascent on λ at the new params."""

    def step(state, batch, weights):
        params, lam = state["params"], state["lam"]
        g = grad(lambda p: lagrangian(p, lam, X[batch], y[batch], weights)[0])(params)
        velocity = {k: 0.9 * state["velocity"][k] + g[k] for k in g}
        params = {k: params[k] - 0.1 * velocity[k] for k in g}
        lam = (lam + 0.5 * lagrangian(params, lam, X[batch], y[batch], weights)[1]).clamp(min=0)
        return {"params": params, "lam": lam, "velocity": velocity, "count": state["count"] + 1}

    return step


def extragradient(X, y):
    """Steps from the point that a first step reaches, by torch.autograd."""

    def slopes(params, lam, batch, weights):
        value = lagrangian(params, lam, X[batch], y[batch], weights)[0]
        return torch.autograd.grad(value, [params["W"], params["v"], lam], create_graph=True)

    def step(state, batch, weights):
        params, lam = state["params"], state["lam"]
        for _ in range(2):
            W, v, up = slopes(params, lam, batch, weights)
            params = {"W": state["params"]["W"] - 0.1 * W, "v": state["params"]["v"] - 0.1 * v}
            lam = torch.relu(state["lam"] + 0.5 * up)
        return {"params": params, "lam": lam}

    return step


def begin(params, kind):
    start = {"params": params, "lam": torch.tensor(0.1, dtype=F64)}
    if kind is alternate:
        start |= {"velocity": {k: torch.zeros_like(t) for k, t in params.items()}, "count": torch.tensor(0)}
    return start


def draw(n, size, epochs):
    generator = torch.Generator().manual_seed(3)
    return [b for _ in range(epochs) for b in torch.randperm(n, generator=generator).split(size)]


def train_explicitly(step, start, batches, weight):
    """The loop itself; `weight` has one weight per sample."""
    state = start
    for batch in batches:
        state = step(state, batch, weight[batch])
    return state


def rerun_last(step, run, batch):
    """Return θ after the last step without the first sample of its batch."""
    weights = torch.ones(len(batch), dtype=F64)
    weights[0] = 0
    state = {**run.states[15], "lam": run.states[15]["lam"].clone().requires_grad_()}
    state["params"] = {k: t.clone().requires_grad_() for k, t in state["params"].items()}
    after = step(state, batch, weights)
    return torch.cat([t.reshape(-1) for t in after["params"].values()]).detach()


@pytest.mark.parametrize("kind", [alternate, extragradient])
def test_scores_equal_autograd_through_the_loop_and_retraining_the_loop_itself(kind):
    X, y, _, params = classify(n=30)
    step, start, batches = kind(X, y), begin(params, kind), draw(30, 8, 4)
    run = dif.unroll(step, start, batches, **QUIET)
    test = dif.Samples(logistic, (X[:5] + 0.3, y[:5]), name="test")
    assert run.loop.length == 16
    assert float(run.state["lam"]) > 0
    whole = {k: t.requires_grad_() for k, t in params.items()}
    tracked = {**start, "params": whole, "lam": start["lam"].clone().requires_grad_()}

    weight = torch.ones(30, dtype=F64, requires_grad=True)
    end = train_explicitly(step, tracked, batches, weight)
    np.testing.assert_allclose(run.params["W"], end["params"]["W"].detach(), atol=1e-14)
    losses = logistic(end["params"], (X[:5] + 0.3, y[:5]))
    expected = [-torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses]
    removals = run.samples[0].remove_each()
    estimator = dif.UnrolledInfluence(run)
    half = estimator.scores(test, 0.5 * removals, **PLAIN).values
    np.testing.assert_allclose(half, 0.5 * torch.stack(expected, 1), atol=1e-12)
    targets, scores = Targets(test, run.point), estimator.scores(test, removals, **PLAIN).values
    for i in (2, 11):
        for share, mine in ((0.5, half[i]), (1.0, scores[i])):
            change = estimator.change(share * removals[i]).flat
            np.testing.assert_allclose(change @ targets.gradients(run.theta), mine, atol=1e-12)

    found = dif.Retraining(run).scores(test, removals[:4], **QUIET).values
    for i in range(4):
        out = torch.ones(30, dtype=F64)
        out[i] = 0
        again = train_explicitly(step, tracked, batches, out)["params"]
        difference = logistic(again, (X[:5] + 0.3, y[:5])) - losses
        np.testing.assert_allclose(found[i], difference.detach(), atol=1e-12)
    last = dif.UnrolledInfluence(run, since=15)  # a single step: exact
    change, actual = last.change(removals[int(batches[15][0])]), rerun_last(step, run, batches[15])
    np.testing.assert_allclose(change.flat, actual - run.theta, atol=1e-14)
    probe = estimator.scores(test, removals, **QUIET).diagnostics["probe"]
    assert probe["agreement"] > 0.8


def test_the_rules_of_training_written_out_give_the_scores_of_training():
    X, y, group, params = classify()
    train, problem = state_problem(X, y, group)
    run = dif.Training(problem, params, dif.SGD(0.1, momentum=0.9), dif.Ascent(0.5), 20, 3, seed=1).run(**QUIET)

    def step(state, batch, weights):
        def value(theta, lam, weights):
            W, v = theta[:6].reshape(3, 2), theta[6:]
            losses = torch.nn.functional.softplus(-batch[1] * (torch.tanh(batch[0] @ W) @ v))
            mean = (weights * losses).sum() / weights.sum()
            rows = []
            for g in range(2):
                mine = weights * (batch[2] == g)
                rows.append((mine * losses).sum() / mine.sum() - mean - 0.01)  # no batch is without members
            f = torch.stack([*rows, theta[0] - 0.1])
            return mean + 0.005 * (theta**2).sum() + lam @ f, f

        g, f = grad(value, has_aux=True)(state["theta"], state["lam"], weights)
        velocity, up = 0.9 * state["velocity"] + g, state["lam"] + 0.5 * f
        lam = torch.cat([up[:2].clamp(min=0), up[2:]])
        return {"theta": state["theta"] - 0.1 * velocity, "lam": lam, "velocity": velocity}

    theta = torch.cat([params["W"].reshape(-1), params["v"]])
    start = {"theta": theta, "lam": torch.zeros(3, dtype=F64), "velocity": torch.zeros_like(theta)}
    rows = dif.Samples(lambda p, z: z[1], (X, y, group), name="train")
    own = dif.unroll(step, start, [index for (index,) in run.loop.indices], samples=rows, **QUIET)
    np.testing.assert_allclose(own.state["theta"], run.theta, atol=1e-13)
    np.testing.assert_allclose(own.state["lam"], run.end.lam, atol=1e-13)
    f = lambda p: (p["W"] ** 3).sum() + p["v"][0]  # noqa: E731
    g = lambda p: (p["theta"][:6] ** 3).sum() + p["theta"][6]  # noqa: E731
    corrected = (X[4:5] + 1, -y[4:5], group[4:5])
    for mine, theirs in (
        (rows.remove_each(), train.remove_each()),
        (rows.remove_groups([[1, 5], [7, 8, 9]]), train.remove_groups([[1, 5], [7, 8, 9]])),
        (rows.replace([4], corrected), train.replace([4], corrected[:2])),
        (rows.add(corrected, like=4), train.add(corrected[:2], like=4)),
    ):
        found = dif.UnrolledInfluence(own).scores(dif.Function(g), mine, **PLAIN)
        expected = dif.UnrolledInfluence(run).scores(dif.Function(f), theirs, **PLAIN)
        np.testing.assert_allclose(found.values, expected.values, atol=1e-11)
        found = dif.Retraining(own).scores(dif.Function(g), mine[:3], **QUIET)
        expected = dif.Retraining(run).scores(dif.Function(f), theirs[:3], **QUIET)
        np.testing.assert_allclose(found.values, expected.values, atol=1e-11)
    dw = torch.linspace(-0.5, 0.5, 60, dtype=F64)
    reweighted = dif.UnrolledInfluence(own).change(rows.reweight(dw)).flat
    half = [dif.UnrolledInfluence(own).change(0.5 * rows.remove([i])).flat for i in range(60)]
    np.testing.assert_allclose(reweighted, -2 * torch.stack(half, 1) @ dw, atol=1e-11)


def test_steps_may_write_into_their_state_and_return_it_in_another_order(tmp_path):
    X, y, _, _ = classify(n=20)
    start = {"w": torch.ones(3, dtype=F64), "velocity": torch.zeros(3, dtype=F64)}

    def slope(state, batch, weights):
        return (weights * (X[batch] @ state["w"] - y[batch])) @ X[batch] / weights.sum()

    def plain(state, batch, weights):
        velocity = 0.5 * state["velocity"] + slope(state, batch, weights)
        return {"w": state["w"] - 0.1 * velocity, "velocity": velocity}

    def writing(state, batch, weights):
        state["velocity"] = 0.5 * state["velocity"] + slope(state, batch, weights)
        state["w"] = state["w"] - 0.1 * state["velocity"]
        return {"velocity": state["velocity"], "w": state["w"]}

    target = dif.Function(lambda p: (p["w"] ** 3).sum())
    found = []
    for step, keep in ((plain, None), (writing, None), (writing, tmp_path / "run")):
        run = dif.unroll(step, start, draw(20, 5, 3), keep=keep, **QUIET)
        found.append(dif.UnrolledInfluence(run).scores(target, run.samples[0].remove_each(), **QUIET).values)
    np.testing.assert_allclose(found[1], found[0], atol=1e-14)
    np.testing.assert_allclose(found[2], found[0], atol=1e-14)


def test_a_step_that_is_cut_off_from_its_state_is_refused():
    X, y, _, _ = classify(n=20)

    def step(state, batch, weights):
        lam = state["lam"].detach()
        slope = (weights * (X[batch] @ state["w"] - y[batch])) @ X[batch] / weights.sum() + lam
        w = state["w"] - 0.1 * slope
        return {"w": w, "lam": (state["lam"] + 0.5 * (w.sum() + 1)).clamp(min=0)}

    start = {"w": torch.ones(3, dtype=F64), "lam": torch.zeros((), dtype=F64)}
    invalid(
        lambda: dif.unroll(step, start, draw(20, 5, 1), **QUIET),
        "in its state is off by",
        "Something inside the step is cut off from autograd",
    )


def test_two_tables_repeated_samples_and_resuming(tmp_path):
    X, y, _, params = classify(n=20)
    train = dif.Samples(logistic, (X, y), name="train")
    safe = dif.Samples(logistic, X[:8] + 1, name="safe")

    def step(state, batch, weights):
        (x, label), other = batch

        def value(p):
            size = (torch.tanh(other @ p["W"]) ** 2).sum(1)
            f = (weights[1] * size).mean() - 0.3
            return (weights[0] * logistic(p, (x, label))).mean() + state["lam"] * f, f

        slope, f = grad(value, has_aux=True)(state["params"])
        moved = {k: t - 0.2 * slope[k] for k, t in state["params"].items()}
        return {"params": moved, "lam": (state["lam"] + 0.3 * f).clamp(min=0)}

    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randint(20, (6,), generator=generator), torch.randint(8, (3,), generator=generator)) for _ in range(12)
    ]
    start = {"params": params, "lam": torch.zeros((), dtype=F64)}
    target = dif.Function(lambda p: p["v"].sum())
    run = dif.unroll(step, start, pairs, samples=(train, safe), keep=tmp_path / "run", **QUIET)
    removals = safe.remove_each() + 0.5 * train.remove([3])
    scores = dif.UnrolledInfluence(run).scores(target, removals, **PLAIN).values
    h = 1e-6
    for i in (0, 5):
        moved = dif.Retraining(run).scores(target, h * removals[i], **QUIET).values
        np.testing.assert_allclose(moved / h, scores[i][None], rtol=1e-4)
    assert list((tmp_path / "run").glob("sweep_*.npz"))
    again = dif.unroll(step, start, pairs, samples=(train, safe), keep=tmp_path / "run", **QUIET)
    np.testing.assert_array_equal(dif.UnrolledInfluence(again).scores(target, removals, **PLAIN).values, scores)
    invalid(
        lambda: dif.unroll(step, start, pairs[::-1], samples=(train, safe), keep=tmp_path / "run", **QUIET),
        "holds another run: the batches differ. Pass the same ones (draw batches once, by a seed)",
    )


SMALL_X, SMALL_Y, _, SMALL = classify(n=20)
PAIR = [dif.Samples(logistic, (SMALL_X, SMALL_Y), name=name) for name in ("a", "b")]


def mean(p, batch, w):
    return (w * logistic(p, (SMALL_X[batch], SMALL_Y[batch]))).mean()


def descend(loss):
    def step(state, batch, weights):
        slope = grad(lambda p: loss(p, batch, weights))(state["params"])
        return {"params": {k: t - 0.1 * slope[k] for k, t in state["params"].items()}}

    return step


def shrink(state, batch, weights):
    return {"params": {**descend(mean)(state, batch, weights)["params"], "v": SMALL["v"][:1]}}


def make(step=descend(mean), start=None, batches=((0, 1, 2, 3),) * 3, **options):  # noqa: B008
    return dif.unroll(step, {"params": SMALL} if start is None else start, batches, **QUIET, **options)


NUMBERS = "must list numbers of samples from 0 to"
START = "`start` must be a dict of tensors, also nested, those with fractions all float64 or all float32; "
OWN = "This run was made by a step of your own"
WRONG = {
    "shape": (lambda: make(shrink), "not float64[1] for ['params']['v'], which was float64[2]."),
    "nothing": (lambda: make(lambda s, b, w: {}), "not nothing for ['params']['W']"),
    "chance": (
        lambda: make(descend(lambda p, b, w: mean(p, b, w) * torch.rand(()))),
        "Two calls of the step",
        "It is random (dropout, augmentation, sampling), so rerunning it without a sample would show the noise.",
    ),
    "weights ignored": (
        lambda: make(descend(lambda p, b, w: mean(p, b, torch.ones_like(w)))),
        "`step` must multiply the loss of each sample by its weight",
    ),
    "weights cut off": (
        lambda: make(descend(lambda p, b, w: mean(p, b, w.detach() ** 2))),
        "is off by 1 of its size",
        "Something inside the step is cut off from autograd, so that influence through it would be wrong.",
    ),
    "divergence": (
        lambda: make(descend(lambda p, b, w: -1e6 * mean(p, b, w) * (p["v"] ** 4).sum()), batches=[[0, 1, 2, 3]] * 27),
        "is not finite after step",
        "The training diverged",
    ),
    "tensor as start": (lambda: make(start=torch.zeros(3)), START + "it is an object of type Tensor."),
    "half precision": (
        lambda: make(start={"params": {k: t.half() for k, t in SMALL.items()}}),
        START + "start['params']['W'] is float16[3, 2].",
    ),
    "two precisions": (
        lambda: make(start={"params": {**SMALL, "b": torch.zeros(1)}}),
        START + "it has tensors of types ['torch.float32', 'torch.float64'].",
    ),
    "number as step": (lambda: make(3), "`step` must be a function step(state, batch, weights)"),
    "two arguments": (
        lambda: make(lambda state, batch: state),
        "`step` must be a function step(state, batch, weights)",
    ),
    "empty batch": (lambda: make(batches=[[0, 1], []]), f"Batch 1 {NUMBERS} 1"),
    "no batches": (lambda: make(batches=[]), "`batches` must be a list of numbers of samples"),
    "number as batches": (lambda: make(batches=3), "`batches` must be a list of numbers of samples"),
    "data as batch": (lambda: make(batches=[SMALL_X]), f"Batch 0 {NUMBERS} ", "not float64[20, 3]."),
    "numbers beyond": (
        lambda: make(samples=dif.Samples(logistic, (SMALL_X[:3], SMALL_Y[:3]))),
        f"Batch 0 {NUMBERS} 2",
        "not int64[4] from 0 to 3.",
    ),
    "one batch for two": (lambda: make(samples=PAIR, batches=[3]), f"Batch 0 {NUMBERS} 19 and 19", "not int64[]."),
    "number as samples": (lambda: make(samples=5), "`samples` must be dif.Samples, one or several, not 5."),
    "numbers as samples": (lambda: make(samples=[5]), "`samples` must be dif.Samples, one or several, not [5]."),
    "no samples": (lambda: make(samples=[]), "`samples` must be dif.Samples, one or several, not []."),
    "residuals": (lambda: make().kkt, OWN),
    "terms": (
        lambda: dif.UnrolledInfluence(run := make()).by_term(SUM, run.samples[0].remove_each()),
        OWN,
    ),
    "addition": (
        lambda: dif.UnrolledInfluence(run := make()).change(run.samples[0].add(torch.tensor([7]))),
        "are in no batch",
        "A step of your own draws its batches by rules that dif does not know",
    ),
    "probe": (
        lambda: dif.UnrolledInfluence(run := make()).scores(SUM, run.samples[0].remove_each(), probe=-1),
        "`probe` must be an integer ≥ 0, not -1.",
    ),
}
SUM = dif.Function(lambda p: p["v"].sum())


@table(WRONG)
def test_wrong_input_is_refused(case):
    invalid(*case, keep=[SMALL])


def test_an_exception_of_the_step_is_named():
    refused(UserCodeError, lambda: make(lambda s, b, w: s["nothing"]), "The step raised KeyError", "by your code")
    assert repr(make()) == "Run(3 steps)"


def test_a_step_that_torch_can_map_is_called_once_for_all_removals():
    calls = []

    def step(state, batch, weights):
        calls.append(batch)
        return descend(mean)(state, batch, weights)

    run = make(step, batches=[range(20)] * 3)
    (numbered,) = run.samples
    counts = []
    for removed in ([0, 1], range(20)):
        calls.clear()
        dif.UnrolledInfluence(run).scores(dif.ridge(1.0), numbered.remove_each(removed), **PLAIN)
        dif.Retraining(run).scores(dif.ridge(1.0), numbered.remove_each(removed), **QUIET)
        counts.append(len(calls))
    assert counts[1] <= counts[0] + 3  # found out once, on two states
