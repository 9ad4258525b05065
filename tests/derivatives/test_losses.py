"""Unusual losses, operators and data: the result is right, or they are refused with a clear message."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from problems import class_data, logistic
from torch import nn
from zoo import Checkpointed, Square

import dif
from dif.derivatives.checks import find_kinks
from dif.derivatives.program import Program
from dif.problem.parameters import Parameters

F64 = torch.float64
QUIET = {"show_progress": False}


def draw(n=40, d=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=F64)
    return X, X[:, 0] + 0.5 * torch.randn(n, generator=generator, dtype=F64)


def squared(p, z):
    return (z[0] @ p["t"] - z[1]) ** 2


def fit(loss, data, params=None, ridge=0.1, constraints=()):
    train = dif.Samples(loss, data, name="train")
    params = {"t": torch.zeros(3, dtype=F64)} if params is None else params
    return train, dif.fit(dif.Problem(train.mean() + dif.ridge(ridge), constraints), params, **QUIET)


class Rescaled(torch.autograd.Function):
    """x² with half of its gradient."""

    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g


class Bag(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.rows = nn.Embedding(6, 1, **options)

    def forward(self, tokens):
        return self.rows(tokens).sum(1)[:, 0]


WRONG = {
    "detached weights": lambda p, z: squared(p, z) * torch.sigmoid((z[0] @ p["t"]).detach()),
    "custom backward": lambda p, z: Rescaled.apply(z[0] @ p["t"] - z[1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_is_refused(name):
    with pytest.raises(dif.InvalidInputError, match="What torch returns is not the derivative") as caught:
        fit(WRONG[name], draw())
    assert "of the loss of Samples 'train' differs from finite differences by" in caught.value.found


def bag_problem(**options):
    tokens = torch.randint(0, 6, (40, 5), generator=torch.Generator().manual_seed(0))
    model, y = Bag(**options).double().eval(), draw()[1]
    return tokens, y, model, lambda m, z: (m(z[0]) - z[1]) ** 2


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": -1}])
def test_embeddings_with_and_without_padding(options):
    tokens, y, model, loss = bag_problem(**options)
    train, solution = fit(loss, (tokens, y), model)
    counts = torch.stack([(tokens == k).sum(1) for k in range(6)], 1).double()
    if options:
        counts[:, options["padding_idx"]] = 0
    left = torch.arange(40) != 3
    theta = [torch.linalg.solve(2 * C.T @ C / len(C) + 0.1 * torch.eye(6).double(), 2 * C.T @ t / len(C))
             for C, t in ((counts, y), (counts[left], y[left]))]  # fmt: skip
    removal = train.remove([3])
    torch.testing.assert_close(solution.theta, theta[0], atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(dif.Retraining(solution).change(removal).flat, theta[1] - theta[0], atol=1e-9, rtol=1e-7)
    newton = dif.NewtonInfluence(solution).change(removal).flat
    torch.testing.assert_close(newton, theta[1] - theta[0], atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"padding_idx": 2}])
def test_embeddings_with_incomplete_gradients_are_refused(options):
    tokens, y, model, loss = bag_problem(**options)
    with torch.no_grad():
        model.rows.weight[2] = 1.0  # nonzero padding: training would keep it, a ridge would not
    with pytest.raises(dif.InvalidInputError, match="padding_idx"):
        fit(loss, (tokens, y), model)


def error_on_large_batches(loss):
    """Return the error for a loss that is wrong on large batches only, so that a check of few samples accepts it."""
    solution = fit(loss, draw())[1]
    with pytest.raises(dif.InvalidInputError) as caught:
        dif.DirectionalInfluence(solution)
    return caught.value


def test_a_gradient_that_is_wrong_on_large_batches_is_refused():
    def loss(p, z):
        score = z[0] @ p["t"]
        score = score if len(score) < 30 else 0.5 * score + 0.5 * score.detach()
        return (score - z[1] + 1.0) ** 2

    error = error_on_large_batches(loss)
    assert error.found.startswith("The gradient of the loss of train[0] differs from finite differences by")


class Rescaled40(Square):
    """x² with half of its gradient on large batches; its forward mode is right."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (2.0 if len(x) < 30 else 1.0) * x * g


def test_a_backward_pass_that_is_wrong_on_large_batches_is_refused():
    error = error_on_large_batches(lambda p, z: Rescaled40.apply(z[0] @ p["t"] - z[1] + 1.0))
    assert error.meaning == "What torch returns as the gradient is not the derivative of the losses."


def test_a_solution_on_a_kink_is_refused():
    z = torch.randn(21, dtype=F64, generator=torch.Generator().manual_seed(0))
    z -= z.median()
    train = dif.Samples(lambda p, b: (b - p["m"]).abs(), z, name="train")
    solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1)), {"m": torch.zeros((), dtype=F64)}, **QUIET)
    assert solution.converged  # torch's subgradient happens to be 0
    with pytest.raises(dif.DegenerateError) as caught:
        dif.DirectionalInfluence(solution)
    assert caught.value.meaning == (
        "The point lies on a kink of a loss (absolute value, hinge, ReLU): there is no derivative there."
    )


LINEAR = {
    "product": lambda p, z: z[0] @ p["t"],
    "elementwise": lambda p, z: (z[0] * p["t"]).sum(1),
    "einsum": lambda p, z: torch.einsum("ni,i->n", z[0], p["t"]),
    "bmm": lambda p, z: torch.bmm(z[0][:, None], p["t"].expand(len(z[0]), 3)[:, :, None])[:, 0, 0],
    "constant": lambda p, z: z[1] ** 2 + 0.0 * p["t"].sum(),
    "without parameters": lambda p, z: z[1] ** 2,
}


@pytest.mark.parametrize("name", LINEAR)
def test_losses_that_are_linear_or_constant(name):
    """With such a loss in a constraint on a view, every estimator answers, and those that re-solve agree."""
    data = draw()
    train = dif.Samples(squared, data, name="train")
    group = torch.arange(40) % 2 == 0
    row = train.view(LINEAR[name], name="row")
    free = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1)), {"t": torch.zeros(3, dtype=F64)}, **QUIET)
    gap = row.mean(where=group) - row.mean(where=~group)
    losses = LINEAR[name](free.params, data)
    value = float(losses[group].mean() - losses[~group].mean())
    tight = 0.05 if "const" not in name and "without" not in name else -1.0
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [gap <= value - tight])
    solution = dif.fit(problem, {"t": torch.zeros(3, dtype=F64)}, **QUIET)
    some = train.remove_groups([[0], [1, 2], list(range(20, 32))])
    adaptive = dif.AdaptiveInfluence(solution, accuracy=1e-6).scores(train.mean(), some)
    actual = dif.Retraining(solution).scores(train.mean(), some)
    np.testing.assert_allclose(adaptive.values.numpy(), actual.values.numpy(), rtol=1e-5, atol=1e-12)
    for estimator in (dif.DirectionalInfluence, dif.NewtonInfluence, dif.ClassicalInfluence):
        assert bool(torch.isfinite(estimator(solution).scores(train.mean(), some, assess=0).values).all())


def modules():
    plain = nn.Linear(3, 1).double().eval()
    return {
        "statistics of the batch": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False),
                                                 nn.Linear(3, 1)).double().eval(),
        "DataParallel": nn.DataParallel(plain),
        "checkpointing": Checkpointed().double().eval(),
        "lazy": nn.LazyLinear(1).double(),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["statistics of the batch", "DataParallel", "checkpointing", "lazy"])
def test_modules_that_torch_cannot_differentiate_are_refused(name):
    with pytest.raises(dif.InvalidInputError) as caught:
        fit(lambda m, z: (m(z[0])[:, 0] - z[1]) ** 2, draw(), modules()[name])
    texts = {"statistics of the batch": "track_running_stats=True", "DataParallel": "model.module",
            "checkpointing": "activation checkpointing",
            "lazy": "is lazy and has no shape yet"}  # fmt: skip
    assert texts[name] in str(caught.value)


def test_data_frames_and_masked_and_sparse_arrays():
    pandas = pytest.importorskip("pandas")
    X, y = draw()
    _, plain = fit(squared, (X, y))
    frame = pandas.DataFrame(X.numpy(), index=np.arange(100, 140)[::-1])
    _, framed = fit(squared, (frame, pandas.Series(y.numpy(), index=frame.index)))
    torch.testing.assert_close(framed.theta, plain.theta)
    masked = np.ma.masked_array(X.numpy(), mask=np.zeros(X.shape, dtype=bool))
    _, unmasked = fit(squared, (masked, y))
    torch.testing.assert_close(unmasked.theta, plain.theta)
    masked[3, 1] = np.ma.masked
    with pytest.raises(dif.InvalidInputError) as caught:
        fit(squared, (masked, y))
    assert "has 1 masked entries, which have no value; drop those samples, or fill the entries" in caught.value.found
    for sparse in (X.to_sparse(), X.to_sparse_csr(), torch.nested.nested_tensor(list(X))):
        with pytest.raises(dif.InvalidInputError, match=r"must be dense, not (sparse|nested); pass x\.to_dense"):
            fit(squared, (sparse, y))


def test_choose_keeps_only_rounds_that_improve():
    X, y = draw(30)
    for seed in range(3):
        X_test, y_test = draw(20, seed=10 + seed)
        train, test = dif.Samples(squared, (X, y), name="train"), dif.Samples(squared, (X_test, y_test), name="test")
        problem = dif.Problem(train.mean() + dif.ridge(0.05), [dif.linear([1.0, 0.0, 0.0]) <= 0.3])
        solution = dif.fit(problem, {"t": torch.zeros(3, dtype=F64)}, **QUIET)
        chosen = dif.choose(solution, test.mean(), train, 20, **QUIET)
        values = [chosen.before, *chosen.followed]
        assert all(after < before for before, after in pairwise(values))
        assert chosen.verified == pytest.approx(values[-1], rel=1e-6)


def test_negative_curvature_cancelled_by_a_constraint():
    """At a vertex only the constraint contributes curvature, and rounding errors must not take its place."""
    for seed in range(20):
        x = torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=F64)
        train = dif.Samples(lambda p, x: -((x * p["t"] - 1) ** 2), x, name="train")
        a, b, t = x.square().mean(), x.mean(), torch.full((1,), 0.4, dtype=F64)  # f₁ = −at² + 2bt − 1 + st
        s = float(2 * a * t - 2 * b) + 1.3
        problem = dif.Problem(train.mean(), [train.mean() + dif.linear([s]) <= float(-a * t**2 + (2 * b + s) * t - 1)])
        lam = (2 * a * t - 2 * b) / 1.3
        if lam < 0.1:
            continue
        solution = dif.Solution(problem, {"t": t}, lam)
        assert solution.converged
        derivative = dif.DirectionalInfluence(solution, switching=False)
        for gone in range(7):
            left = x[torch.arange(7) != gone]
            change = (left * t - 1).square().mean() - (x * t - 1).square().mean()  # −δf₁, and f₁' = 1.3
            found = derivative.change(train.remove([gone])).flat
            torch.testing.assert_close(found, (change / 1.3).reshape(1), rtol=1e-9, atol=1e-12)


def test_a_loss_with_a_bounded_domain_is_fitted_inside_it():
    """Cholesky factors exist only for positive definite matrices; steps outside are rejected."""
    Y = (
        torch.randn(50, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
        @ torch.tensor([[2.0, 0], [1, 0.3]]).double()
    )

    def likelihood(p, z):
        L = torch.linalg.cholesky(torch.stack([torch.stack([p["a"], p["b"]]), torch.stack([p["b"], p["c"]])]))
        u = torch.linalg.solve_triangular(L, z.T, upper=False)
        return 0.5 * (u**2).sum(0) + L.diagonal().log().sum()

    train = dif.Samples(likelihood, Y, name="train")
    start = {name: torch.tensor(value, dtype=F64) for name, value in (("a", 30.0), ("b", 0.0), ("c", 30.0))}
    solution = dif.fit(dif.Problem(train.mean()), start, **QUIET)
    S = Y.T @ Y / 50
    torch.testing.assert_close(solution.theta, torch.stack([S[0, 0], S[0, 1], S[1, 1]]), atol=1e-8, rtol=1e-8)
    start["b"] = torch.tensor(40.0, dtype=F64)
    with pytest.raises(dif.InvalidInputError, match="NaN or infinite for 50 of 50"):
        dif.fit(dif.Problem(train.mean()), start, **QUIET)


def test_a_constraint_that_cannot_be_met_is_named():
    """e⁻ᵗ ≤ 0 has no solution, but the violation can be arbitrarily small."""
    X, y = draw()
    train = dif.Samples(squared, (X, y), name="train")
    never = (dif.Function(lambda p: torch.exp(-p["t"][0]), name="e") <= 0.0).named("never")
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [never])
    with pytest.warns(dif.NotConvergedWarning, match="It violates 'never' by .* if no point satisfies the constraints"):
        dif.fit(problem, {"t": torch.zeros(3, dtype=F64)}, **QUIET)


def test_constraints_without_a_gradient_at_the_start():
    X, y = draw()
    train = dif.Samples(squared, (X, y), name="train")
    zero = {"t": torch.zeros(3, dtype=F64)}
    for power in (2, 4):
        size = dif.Function(lambda p, power=power: (p["t"] ** power).sum(), name="size")
        solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1), [size >= 3.0]), zero, **QUIET)
        assert solution.converged
        assert float((solution.theta**power).sum()) == pytest.approx(3.0)


def test_a_wrong_gradient_of_a_small_parameter_is_found():
    X, y = draw(200)

    def loss(p, z):
        return squared(p, z) + 1e-4 * ((p["v"] - z[1] - 1) ** 2 + p["v"].detach() * p["v"])

    params = {"t": torch.zeros(3, dtype=F64), "v": torch.full((), 0.7, dtype=F64)}
    with pytest.raises(dif.InvalidInputError, match="is not the derivative") as caught:
        fit(loss, (X, y), params)
    assert caught.value.found.startswith("The gradient of the loss of Samples 'train' in v differs from")


def test_one_sample_without_a_gradient_is_found_among_many():
    X, y = draw(5000)
    flag = (torch.arange(5000) == 1007).double()

    def loss(p, z):
        plain = squared(p, z)
        return torch.where(z[2] > 0, plain.detach(), plain)

    solution = fit(loss, (X, y, flag))[1]
    with pytest.raises(dif.InvalidInputError) as caught:
        dif.DirectionalInfluence(solution)
    assert caught.value.found.startswith("The gradient of the loss of train[1007] differs from")


def test_networks_may_start_at_zero_and_with_zero_biases():
    X, y = draw(30)
    for scale in (0.0, 1.0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double().eval()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(scale if parameter.dim() > 1 else 0.0)
        X[:5] = 0.0  # all activations on the kink
        train = dif.Samples(lambda m, z: (m(z[0])[:, 0] - z[1]) ** 2, (X, y), name="train")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1)), net, max_iter=5, **QUIET)
        assert found.objective <= float(y.square().mean())  # that of the network that answers 0


def test_large_units_in_single_precision():
    generator = torch.Generator().manual_seed(0)
    Z, w = torch.randn(500, 6, generator=generator), torch.randn(6, generator=generator) * 1e8
    train = dif.Samples(squared, (Z, Z @ w), name="train")
    point = dif.Solution(dif.Problem(train.mean()), {"t": w})
    assert point.objective <= 1e-12 * float((Z @ w).square().mean())


def test_a_step_function_in_a_constraint_is_refused():
    """Error counts have a derivative of zero, or an operator without one; the message suggests a sigmoid."""
    X, y = draw()
    train = dif.Samples(squared, (X, y), name="train")
    start = {"t": torch.zeros(3, dtype=F64)}
    steps = {
        "comparison": lambda p, z: (z[0] @ p["t"] * z[1] <= 0).to(F64),
        "heaviside": lambda p, z: torch.heaviside(-(z[0] @ p["t"]) * z[1], torch.tensor(0.5, dtype=F64)),
        "sign": lambda p, z: torch.sign(-(z[0] @ p["t"]) * z[1]),
    }
    for name, step in steps.items():
        errors = train.view(step, name=name)
        with pytest.raises(dif.InvalidInputError, match="sigmoid"):
            dif.fit(dif.Problem(train.mean() + dif.ridge(0.1), [errors.mean() <= 0.1]), start, **QUIET)


@pytest.mark.parametrize("batch_size", [None, 7])
def test_a_gradient_with_given_weights(batch_size):
    """One sweep gives the rows and their weighted gradient; the oracle is autograd of the rows written out."""
    X, y = class_data()
    train = dif.Samples(logistic, (X, y), name="train", batch_size=batch_size)
    function = dif.Function(lambda p: p["theta"].exp().sum(), name="sum of exponentials")
    constraints = [train.mean(where=torch.arange(60) < 20) <= 0.5, function <= 9.0, dif.linear(torch.ones(4)) <= 3.0]
    problem = dif.Problem(train.mean() + dif.ridge(0.1), constraints)
    theta = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    program = Program.of(problem, *Parameters.of({"theta": theta.detach()}))
    mu = torch.tensor([1.0, 0.7, 0.2, 0.4], dtype=torch.float64)
    f, gradient = program.rows.weighted_gradient(theta.detach(), mu)
    losses = logistic({"theta": theta}, (X, y))
    rows = torch.stack([losses.mean() + 0.05 * theta @ theta, losses[:20].mean(), theta.exp().sum(), theta.sum()])
    torch.testing.assert_close(f, rows.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gradient, torch.autograd.grad(mu @ rows, theta)[0], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("bend", [torch.relu, torch.nn.functional.softplus])
def test_kinks_are_looked_for_once_and_with_few_evaluations(bend):
    calls = []

    def loss(p, z):
        calls.append(len(z[0]))
        return bend(z[1] * (z[0] @ p["w"])) + (z[0] @ p["w"]) ** 2

    train = dif.Samples(loss, draw(300), name="train")
    wave = dif.Function(lambda p: calls.append(0) or p["w"].sin().sum(), name="wave")
    solution = dif.Solution(dif.Problem(train.mean() + wave), {"w": torch.full((3,), 0.3, dtype=F64)})
    calls.clear()
    assert len(solution.kinks) == (bend is torch.relu)
    assert len(calls) <= 45  # of the loss and of the function
    calls.clear()
    assert len(find_kinks(solution.program.rows, solution.theta)) == (bend is torch.relu)
    assert calls == []
