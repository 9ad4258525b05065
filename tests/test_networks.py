"""Models with hundreds of parameters on real data: the matrix-free engine against the dense one."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import dif
from dif.conjugate_gradients import ConjugateGradients
from dif.refinement import Refinement

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


def certified(model, l2, tau):
    """A solution with one binding and one weak group constraint.

    The weak one is made so: its bound is put at the value that the group's risk has at the solution without it.
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


@pytest.mark.parametrize(("make", "l2", "d"), [(logistic_model, 0.01, 650), (tanh_model, 0.01, 1210)])
def test_matrix_free_is_dense(make, l2, d):
    torch.manual_seed(0)
    train, test, solution = certified(make(), l2, tau=0.01)
    assert solution.theta.numel() == d
    assert (solution.active.binding, solution.active.weak) == ((0,), (1,))
    assert solution.active.curvature > 0
    removals = train.remove_each(range(0, N, 3))
    dense = dif.DirectionalInfluence(solution).scores(test, removals)
    free = dif.DirectionalInfluence(solution, solver=ConjugateGradients).scores(test, removals)
    scale = float(dense.values.abs().max())
    np.testing.assert_allclose(free.values, dense.values, atol=1e-8 * scale)
    assert free.diagnostics["solver_residual"] <= 1e-10
    refined = dif.DirectionalInfluence(solution, solver=Refinement).scores(test, removals)
    np.testing.assert_allclose(refined.values, dense.values, atol=1e-5 * scale)
    assert refined.diagnostics["solver_residual"] <= 1e-9
