"""Models with hundreds of parameters on real data: the matrix-free engine against the dense one."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import dif
from dif.linalg.solvers import ConjugateGradients

N = 1500


def digits(dtype=torch.float64):
    X, y = load_digits(return_X_y=True)
    return torch.as_tensor(X / 16, dtype=dtype), torch.as_tensor(y)


def cross_entropy(model, z):
    return torch.nn.functional.cross_entropy(model(z[0]), z[1], reduction="none")


def logistic_model():
    return torch.nn.Linear(64, 10).double()


def tanh_model():
    return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)).double()


def certify(model, l2, tau):
    """Return a solution with one binding and one weak group constraint, its training and its test samples.

    The bound of the weak constraint is the value of the group's risk at the solution without it.
    """
    X, y = digits()
    train = dif.Samples(cross_entropy, (X[:N], y[:N]), name="train")
    risk, group = train.mean(), y[:N] % 3
    gaps = [train.mean(where=group == g) - risk for g in range(3)]
    first = dif.fit(dif.Problem(risk + dif.ridge(l2), [(gaps[2] <= tau).named("binding")]), model)
    assert first.active.binding == (0,)
    at = dif.Solution(dif.Problem(risk + dif.ridge(l2), [gaps[0] <= 9.0]), first.params, [0.0])
    constraints = [(gaps[2] <= tau).named("binding"), (gaps[0] <= float(at.f[1])).named("weak")]
    solution = dif.Solution(dif.Problem(risk + dif.ridge(l2), constraints), first.params, [float(first.lam[0]), 0.0])
    test = dif.Samples(cross_entropy, (X[N : N + 20], y[N : N + 20]), name="test")
    return train, test, solution


@pytest.mark.parametrize(
    ("make", "l2", "d"), [(logistic_model, 0.01, 650), pytest.param(tanh_model, 0.01, 1210, marks=pytest.mark.slow)]
)
def test_matrix_free_agrees_with_dense(make, l2, d):
    torch.manual_seed(0)
    train, test, solution = certify(make(), l2, tau=0.01)
    assert solution.theta.numel() == d
    assert (solution.active.binding, solution.active.weak) == ((0,), (1,))
    assert solution.active.curvature > 0
    removals = train.remove_each(range(0, N, 3))
    dense = dif.DirectionalInfluence(solution).scores(test, removals)
    free = dif.DirectionalInfluence(solution, solver=ConjugateGradients).scores(test, removals)
    scale = float(dense.values.abs().max())
    np.testing.assert_allclose(free.values, dense.values, atol=1e-8 * scale)
    assert free.diagnostics["solver_residual"] <= 1e-10


@pytest.mark.slow  # a smaller network is compared by default in tests/studies/test_cnn.py
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_network_against_retraining(seed):
    """The 50 most influential samples on a misclassified test point, removed and retrained.

    With a smaller ridge the minimum is flatter than one sample's share of the curvature: one removal is then no small
    change, and the slope falls below 1.
    """
    torch.manual_seed(seed)
    X, y = digits()
    train = dif.Samples(cross_entropy, (X[:N], y[:N]), name="train")
    risk, group = train.mean(), y[:N] % 3
    constraints = [(train.mean(where=group == g) <= risk + 0.003).named(f"group {g}") for g in range(3)]
    solution = dif.fit(dif.Problem(risk + dif.ridge(0.03), constraints), tanh_model(), show_progress=False)
    assert solution.kkt.stationarity <= 1e-8
    assert solution.active.curvature > 0
    assert len(solution.active.binding) >= 1
    wrong = torch.nonzero(solution.params(X[N:]).argmax(1) != y[N:]).reshape(-1)[:1]
    test = dif.Samples(cross_entropy, (X[N:][wrong], y[N:][wrong]), name="test")
    influence = dif.DirectionalInfluence(solution)
    chosen = train.remove_each([r.index for r in influence.scores(test, train.remove_each()).top(50)])
    actual = dif.Retraining(solution).scores(test, chosen)
    assert max(actual.diagnostics["residuals"]) <= 1e-10
    agreement = influence.scores(test, chosen).compare(actual)
    assert agreement.pearson >= 0.99
    assert abs(agreement.slope - 1) <= 0.05
    lowest = float(torch.linalg.eigvalsh(solution.objective_curvature.dense())[0])
    if lowest < 0:  # the objective alone is not even convex at most of these minima
        with pytest.raises(dif.DegenerateError):
            dif.ClassicalInfluence(solution)
    classical = dif.ClassicalInfluence(solution, damping=0.003).scores(test, chosen).compare(actual)
    print(f"seed {seed}: DIF {agreement}; classical IF, damped by 0.003: {classical}")
    assert agreement.relative_error < classical.relative_error


@pytest.mark.slow
def test_a_hundred_thousand_parameters():
    """Random Fourier features of the digits, multinomial logistic regression, nothing assembled."""
    X, y = digits()
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(64, 10_000, generator=generator, dtype=torch.float64)
    b = 2 * np.pi * torch.rand(10_000, generator=generator, dtype=torch.float64)
    Z = torch.cos(X @ W + b) * (2 / 10_000) ** 0.5
    loss = lambda p, z: torch.nn.functional.cross_entropy(z[0] @ p["W"], z[1], reduction="none")  # noqa: E731
    train = dif.Samples(loss, (Z[:N], y[:N]), name="train")
    risk, group = train.mean(), y[:N] % 3
    constraints = [(train.mean(where=group == g) <= risk + 0.005).named(f"group {g}") for g in range(3)]
    problem = dif.Problem(risk + dif.ridge(3e-3), constraints)
    solution = dif.fit(problem, {"W": torch.zeros(10_000, 10, dtype=torch.float64)}, tol=1e-6)
    assert solution.theta.numel() == 100_000
    assert solution.kkt.residual <= 1e-6
    assert len(solution.active.binding) >= 1
    wrong = torch.nonzero((Z[N:] @ solution.params["W"]).argmax(1) != y[N:]).reshape(-1)[:2]
    test = dif.Samples(loss, (Z[N:][wrong], y[N:][wrong]), name="test")
    influence = dif.DirectionalInfluence(solution)
    scores = influence.scores(test, train.remove_each())
    assert scores.diagnostics["solver_residual"] <= 1e-10
    chosen = train.remove_each([r.index for r in scores.top(5)])
    agreement = influence.scores(test, chosen).compare(dif.Retraining(solution, tol=1e-6).scores(test, chosen))
    assert agreement.pearson >= 0.999
