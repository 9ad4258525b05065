"""The QP in the multipliers, checked against its optimality conditions and against CVXPY."""

import time

import cvxpy as cp
import numpy as np
import pytest
import torch

from dif.linalg.multiplier_qp import _factorise, _solve_daqp, solve_reduced_qp


def solve(*arrays):
    nu, failed = solve_reduced_qp(*map(torch.from_numpy, arrays))
    return nu.numpy(), failed


def violation(S, a, equal, nu):
    """Return how far ν is from satisfying the conditions, relative to the size of a; the largest over all rows."""
    t = a - nu @ S
    size = np.abs(a).max(1, keepdims=True)
    wrong = np.where(
        equal, np.abs(t), np.maximum(np.maximum(t, -nu * np.diag(S)), np.minimum(np.abs(t), np.abs(nu) * np.diag(S)))
    )
    return float((wrong / size).max())


@pytest.mark.parametrize("m", [1, 2, 3, 6, 12, 40])
@pytest.mark.parametrize("share_equal", [0.0, 0.4, 1.0])
def test_solution_satisfies_the_conditions(m, share_equal):
    rng = np.random.default_rng(m)
    for _ in range(5):
        G = rng.standard_normal((m, m + 3)) * 10.0 ** rng.uniform(-3, 3, (m, 1))  # rows of very different scales
        S, equal = G @ G.T, rng.uniform(size=m) < share_equal
        a = rng.standard_normal((300, m)) * np.sqrt(np.diag(S))
        nu, failed = solve(S, a, equal)
        assert not failed
        scaled = S / np.sqrt(np.outer(np.diag(S), np.diag(S)))
        assert violation(scaled, a / np.sqrt(np.diag(S)), equal, nu * np.sqrt(np.diag(S))) <= 1e-9


def test_pivoting_and_daqp_agree():
    rng = np.random.default_rng(0)
    for m in (3, 8, 20):
        G = rng.standard_normal((m, m + 2))
        S, equal = G @ G.T, np.arange(m) < 2
        a = rng.standard_normal((20, m))
        batched, _ = solve(S, a, equal)
        single, _ = _solve_daqp(_factorise(S), a, equal, np.ones(m))
        np.testing.assert_allclose(batched, single, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("equal_rows", [0, 1, 2])
def test_dependent_rows_against_cvxpy(equal_rows):
    """More rows than dimensions, two-sided bounds, a duplicated row: ω is unique, ν need not be."""
    rng = np.random.default_rng(5)
    d = 4
    G = np.concatenate([rng.standard_normal((2, d)), np.eye(d), -np.eye(d), np.ones((1, d))])
    G = np.concatenate([G, 2.0 * G[:1]])  # a copy of the first row
    m = len(G)
    H = np.diag(rng.uniform(0.5, 2.0, d))
    S = G @ np.linalg.solve(H, G.T)
    equal = np.zeros(m, dtype=bool)
    equal[: min(equal_rows, 1)] = True
    equal[m - 1] = equal_rows == 2  # and its copy
    for _ in range(10):
        g = 3 * rng.standard_normal(d)
        c = np.concatenate([np.zeros(2), -np.ones(2 * d), [-1.0], [0.0]])
        nu = solve(S, (c - G @ np.linalg.solve(H, g))[None], equal)[0][0]
        omega = -np.linalg.solve(H, g + G.T @ nu)
        x = cp.Variable(d)
        rows = [G[equal] @ x + c[equal] == 0] if equal.any() else []
        problem = cp.Problem(cp.Minimize(g @ x + 0.5 * cp.quad_form(x, H)), [*rows, G[~equal] @ x + c[~equal] <= 0])
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
        np.testing.assert_allclose(omega, x.value, atol=1e-8)
        assert nu[~equal].min() >= 0


def test_inconsistent_rows_are_reported_and_the_others_solved():
    S, both = np.ones((2, 2)), np.array([True, True])
    nu, failed = solve(S, np.array([[1.0, -1.0], [2.0, 2.0]]), both)
    assert set(failed) == {0}
    assert "moved apart" in failed[0]
    assert np.isnan(nu[0]).all()
    np.testing.assert_allclose(S @ nu[1], [2.0, 2.0])


def test_empty():
    assert solve(np.zeros((0, 0)), np.zeros((5, 0)), np.zeros(0, dtype=bool))[0].shape == (5, 0)


def test_many_rows_in_few_dimensions_take_quadratic_time():
    """S has rank 10, so that DAQP solves; an eigenvalue decomposition of it takes seconds for each right-hand side."""
    rng = np.random.default_rng(0)
    m = 1200
    G = rng.standard_normal((m, 10))
    a = rng.standard_normal((40, 10)) @ G.T - rng.exponential(size=(40, m))
    S, none = G @ G.T, np.zeros(m, dtype=bool)
    began = time.process_time()
    np.linalg.eigh(S)
    once = time.process_time() - began
    began = time.process_time()
    nu, failed = solve(S, a, none)
    assert time.process_time() - began < 10 * once
    assert not failed
    assert violation(S, a, none, nu) <= 1e-9
