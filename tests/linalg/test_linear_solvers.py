"""Conjugate gradients compared with the dense factorisation, and the errors of the linear solvers."""

import numpy as np
import pytest
import torch
from problems import F64, bound_regression, fair_logistic, fit_problem, free_regression, weak_regression

import dif
from dif.derivatives.hessian import Curvature
from dif.linalg.lanczos import lanczos, tangent_curvature
from dif.linalg.preconditioner import Nystrom, draw_columns
from dif.linalg.solvers import ConjugateGradients, DenseCholesky, Matrix


def positive_definite(d=60, condition=1e4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=F64)).Q
    return Q @ torch.diag(torch.logspace(0, -np.log10(condition), d, dtype=F64)) @ Q.T


@pytest.mark.parametrize("rank", [0, 10, 60])
def test_columns_of_any_size_are_solved(rank):
    """With column norms of 1e-8 … 1e8 in one block, each column meets its own tolerance."""
    H = positive_definite()
    B = torch.randn(60, 9, dtype=F64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-8, 8, 9, dtype=F64)
    B[:, 4] = 0
    solver = ConjugateGradients(Matrix(H), rank=rank)
    X = solver.solve(B)
    root = H.diagonal().sqrt()[:, None]
    gaps = ((B - H @ X) / root).norm(dim=0) / (B / root).norm(dim=0)
    assert float(gaps[[0, 1, 2, 3, 5, 6, 7, 8]].max()) <= solver.tolerance
    assert bool((X[:, 4] == 0).all())
    exact = DenseCholesky(H).solve(B)
    assert float(((X - exact).norm(dim=0) / exact.norm(dim=0).clamp(min=1e-300)).max()) <= 1e-6
    assert 0 < solver.residual <= solver.tolerance


def test_columns_are_solved_alike_one_by_one_and_together():
    H = positive_definite()
    B = torch.randn(60, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    solver = ConjugateGradients(Matrix(H))
    singles = torch.cat([solver.solve(B[:, i : i + 1]) for i in range(5)], 1)
    assert float((solver.solve(B) - singles).norm() / singles.norm()) <= 1e-8


def test_the_residual_meets_the_tolerance():
    H = positive_definite(condition=1e6)
    B = torch.randn(60, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    steps = []
    for tolerance in (1e-2, 1e-5, 1e-9):
        solver = ConjugateGradients(Matrix(H), tolerance=tolerance, rank=0)
        root = H.diagonal().sqrt()[:, None]
        residual = (B - H @ solver.solve(B)) / root
        assert float((residual.norm(dim=0) / (B / root).norm(dim=0)).max()) <= tolerance
        steps.append(solver.steps)
    assert steps == sorted(set(steps))


def test_the_preconditioner_saves_steps():
    H = positive_definite(d=200, condition=1e5)
    B = torch.randn(200, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    plain, preconditioned = ConjugateGradients(Matrix(H), rank=0), ConjugateGradients(Matrix(H), rank=100)
    plain.solve(B), preconditioned.solve(B)
    assert preconditioned.steps < 0.7 * plain.steps
    eigenvalues = torch.linalg.eigvals(Nystrom(H.matmul, draw_columns(H, 200, seed=0)).apply(H)).real
    assert float(eigenvalues.max() / eigenvalues.min()) < 1.01  # with full rank it is the inverse


def test_negative_curvature_is_refused():
    H = positive_definite()
    eigenvalues, Q = torch.linalg.eigh(H)
    eigenvalues[-1] = -0.5
    H = Q @ torch.diag(eigenvalues) @ Q.T
    for rank in (0, 40):
        with pytest.raises(dif.DegenerateError, match="The linear solver found curvature -") as caught:
            ConjugateGradients(Matrix(H), rank=rank)
        assert "Fit to a minimum" in caught.value.cure


def test_a_stall_is_refused():
    H = positive_definite(condition=1e10)
    B = torch.randn(60, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(dif.NotConvergedError, match=r"relative residual of .* after 5 iterations\.") as caught:
        ConjugateGradients(Matrix(H), max_iter=5, rank=0).solve(B)
    assert caught.value.meaning == "The curvature is too badly conditioned for this precision."
    assert "Raise max_iter" in caught.value.cure


@pytest.mark.parametrize("make", [free_regression, bound_regression, weak_regression, fair_logistic])
def test_influence_is_the_same_without_the_matrix(make):
    train, problem, *_ = make()
    solution = fit_problem(problem)
    removals = train.remove_each()
    for kind, options in (
        (dif.DirectionalInfluence, {}),
        (dif.DirectionalInfluence, {"switching": True}),
        (dif.ClassicalInfluence, {}),
    ):
        dense = kind(solution, **options).scores(train, removals)
        iterative = kind(solution, solver=ConjugateGradients, **options).scores(train, removals)
        scale = float(dense.values.abs().max())
        assert float((dense.values - iterative.values).abs().max()) <= 1e-8 * scale
        assert 0 < iterative.diagnostics["solver_residual"] <= 1e-10


def test_products_and_matrix_agree():
    _, problem, _ = fair_logistic(batch_size=7)
    solution = fit_problem(problem)
    curvature = solution.curvature.with_rows(solution.G, torch.tensor([2.0, 3.0], dtype=F64), damping=0.1)
    V = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected = solution.hessian + solution.G.T @ torch.diag(torch.tensor([2.0, 3.0], dtype=F64)) @ solution.G
    expected = expected + 0.1 * torch.eye(4, dtype=F64)
    np.testing.assert_allclose(curvature.product(V), expected @ V, rtol=1e-12)
    np.testing.assert_allclose(curvature.dense(), expected, rtol=1e-12)
    curvature = Curvature(solution.program.rows, solution.theta, solution.program.weights(solution.lam))
    np.testing.assert_allclose(curvature.dense(), torch.func.hessian(_lagrangian(solution))(solution.theta), rtol=1e-10)


def _lagrangian(solution):
    """Return L(θ), written out from the data."""
    train = solution.program.rows.tables[0].samples
    group = torch.arange(60) % 3

    def value(theta):
        losses = train.loss({"theta": theta}, train.storage.data)
        risk = losses.mean()
        gaps = torch.stack([losses[group == g].mean() - risk for g in (1, 2)])
        return risk + 0.025 * (theta**2).sum() + solution.lam @ gaps

    return value


def clustered(d=400, n=50):
    """Eigenvalues in two narrow clusters, as of least squares with few samples and a ridge."""
    Q = torch.linalg.qr(torch.randn(d, n, dtype=F64, generator=torch.Generator().manual_seed(4)))[0]
    return 0.1 * torch.eye(d, dtype=F64) + Q @ torch.diag(torch.linspace(0.0199, 0.0201, n, dtype=F64)) @ Q.T


@pytest.mark.parametrize(
    "H",
    [positive_definite(d=80, condition=30) - 0.02 * torch.eye(80, dtype=F64), clustered()],
    ids=["spread", "clustered"],
)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_tangent_curvature_by_lanczos(H, rows):
    G = torch.randn(rows, len(H), dtype=F64, generator=torch.Generator().manual_seed(3))
    root = torch.linspace(1.0, 2.0, len(H), dtype=F64)
    for scale in (torch.ones_like(root), root):
        tangent = torch.linalg.svd(G / scale, full_matrices=True)[2][rows:]  # rows: an orthonormal basis
        exact = float(torch.linalg.eigvalsh(tangent @ (H / scale / scale[:, None]) @ tangent.T)[0])
        assert tangent_curvature(Matrix(H), G, scale)[1] == pytest.approx(exact, rel=0.05)
        smallest, direction = lanczos(Matrix(H).product, G, scale)
        assert smallest == pytest.approx(exact, rel=0.01)
        assert float((G / scale @ direction).abs().max() if rows else 0.0) <= 1e-10
