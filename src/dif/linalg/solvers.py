"""Symmetric matrices H, assembled or given by products, and solvers for H_ρ X = B, prepared once for many columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dif.errors import DegenerateError, InvalidInputError, NotConvergedError
from dif.linalg.conjugate_gradients import CGResult, conjugate_gradients
from dif.linalg.preconditioner import Metric, Nystrom, Preconditioner, draw_columns, negative_curvature_error
from dif.runtime.inputs import check_instance

_CHECK = 30  # iterations of the test for negative curvature, before a preconditioner is built
_BUDGET = 24_000  # evaluations of all losses that building a preconditioner may cost


@runtime_checkable
class Operator(Protocol):
    """Interface of a symmetric matrix H (d, d), assembled or given by matrix-vector products."""

    @property
    def d(self) -> int:
        """Dimension d."""
        ...

    @property
    def assembled(self) -> bool:
        """Whether the matrix is available, or cheap enough to assemble."""
        ...

    def dense(self) -> Tensor:
        """Return the matrix, (d, d)."""
        ...

    def scale(self) -> Tensor:
        """Return the curvature of each coordinate, (d,), positive."""
        ...

    def product(self, V: Tensor) -> Tensor:
        """Return H·v for every column v of V (d, c)."""
        ...

    def with_rows(self, G: Tensor, R: Tensor, damping: float = 0.0) -> Operator:
        """Return H + GᵀRG + δI for G (m, d), the diagonal R (m,) and damping δ."""
        ...

    def sketch(self, evaluations: float | None = None) -> Operator | None:
        """Estimate the matrix from some samples if that is much cheaper; else return None.

        evaluations: Largest cost of the estimate, in evaluations of all losses.
        """
        ...

    def rough(self) -> Tensor:
        """Return the matrix, (d, d), in single precision if that is cheaper."""
        ...


@dataclass(frozen=True, eq=False)
class Matrix:
    """A symmetric matrix that is assembled."""

    H: Tensor  # (d, d)
    assembled = True

    @property
    def d(self) -> int:
        """Dimension d."""
        return len(self.H)

    def dense(self) -> Tensor:
        """Return the matrix, (d, d)."""
        return self.H

    def scale(self) -> Tensor:
        """Return the curvature of each coordinate, (d,): the absolute diagonal, see `coordinate_curvature`."""
        return positive(coordinate_curvature(self.H))

    def product(self, V: Tensor) -> Tensor:
        """Return H·v for every column v of V (d, c)."""
        return self.H @ V

    def with_rows(self, G: Tensor, R: Tensor, damping: float = 0.0) -> Matrix:
        """Return H + GᵀRG + δI for G (m, d), the diagonal R (m,) and damping δ."""
        H = torch.addmm(self.H, G.T, R[:, None] * G) if len(G) else self.H
        return Matrix(H + damping * torch.eye(self.d).to(H) if damping else H)

    def sketch(self, evaluations: float | None = None) -> None:
        """Return None: the matrix is available already."""

    def rough(self) -> Tensor:
        """Return the matrix, (d, d), as it is."""
        return self.H


def coordinate_curvature(H: Tensor) -> Tensor:
    """Return |diagonal of H|, (d,); for an entry of 0, the curvature through coupling to others (as in θ₁θ₂)."""
    D = H.diagonal().abs()
    flat = 1e-24 * D.max() >= D if len(D) else D > 0
    if not bool(flat.any()):
        return D
    divisor = torch.where(flat, torch.ones_like(D), D)
    coupling = torch.where(flat, H.abs(), H**2 / divisor)  # (d, d), column l: through coordinate l
    return torch.where(flat, coupling.amax(1), D)


def positive(D: Tensor) -> Tensor:
    """Return D (d,) with the mean of its positive finite entries in place of all others (1 if there are none)."""
    valid = (D > 0) & torch.isfinite(D)
    return torch.where(valid, D, D[valid].mean() if bool(valid.any()) else torch.ones_like(D[:1]).sum())


@runtime_checkable
class LinearSolver(Protocol):
    """Interface of a solver for H_ρ X = B.

    A solver never returns a solution that did not converge. The constructor raises a DegenerateError where H_ρ is not
    positive definite; a new solver is then prepared with a larger weight R of the rows. `solve` raises a
    NotConvergedError.
    """

    residual: float  # largest relative residual of all solves so far

    @property
    def steps(self) -> int:
        """Number of products with the curvature so far; 0 for a factorisation."""
        ...

    def solve(self, B: Tensor) -> Tensor:
        """Solve H_ρ X = B for B (d, c); c may be 0."""
        ...

    def approximate(self, B: Tensor) -> Tensor:
        """Apply a cheap, positive definite, approximate inverse; used as preconditioner for matrices close to H_ρ."""
        ...


# The argument `solver` of estimators: a function that prepares a solver for an operator; None: chosen by its size
Solver = Callable[[Operator], LinearSolver] | None


class DenseCholesky:
    """Cholesky factorisation of a dense positive definite matrix, with one step of iterative refinement per solve.

    >>> solver = DenseCholesky(torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64))
    >>> solver.solve(torch.eye(2, dtype=torch.float64)).diagonal().tolist()
    [0.5, 0.25]
    """

    steps = 0

    def __init__(self, H: Tensor, tolerance: float | None = None) -> None:
        self.H = H
        self.residual = 0.0
        self.tolerance = tolerance if tolerance is not None else torch.finfo(H.dtype).eps ** 0.5
        self._factor, failed = torch.linalg.cholesky_ex(H)
        floor = 100 * torch.finfo(H.dtype).eps  # a pivot below this share of its diagonal entry is a rounding error
        pivots = self._factor.diagonal() ** 2 / H.diagonal()
        smallest = float("-inf") if int(failed) or not bool(torch.isfinite(pivots).all()) else float(pivots.min())
        if not smallest > floor:
            raise DegenerateError(
                "One of the pivots of the curvature is not positive."
                if smallest < 0
                else f"The smallest of the pivots of the curvature is {smallest:.3g} of its diagonal entry.",
                f"All must be above {floor:.1e}.",
                "The curvature is not positive definite, so the linearised problem has no unique solution.",
                "Add a ridge to the objective, or pass damping (it changes the answer and is reported).",
            )

    def approximate(self, B: Tensor) -> Tensor:
        """Solve H X = B without refinement and without checking the residual."""
        return torch.cholesky_solve(B, self._factor)

    def solve(self, B: Tensor) -> Tensor:
        """Solve H X = B and check the residual."""
        if B.numel() == 0:
            return torch.zeros_like(B)
        X = torch.cholesky_solve(B, self._factor)
        X = X + torch.cholesky_solve(B - self.H @ X, self._factor)
        left, right, found = (torch.linalg.vector_norm(each, dim=0) for each in (B - self.H @ X, B, X))
        gaps = left / (right + torch.linalg.matrix_norm(self.H) * found).clamp(min=torch.finfo(B.dtype).tiny)
        worst = float(gaps.max())
        self.residual = worst if not worst <= self.residual else self.residual
        if not self.residual <= self.tolerance:
            raise NotConvergedError(
                f"The relative residual of the linear solve is {self.residual:.3g}.",
                f"It must be at most {self.tolerance:.3g}.",
                "The curvature is too badly conditioned for this precision.",
                "Work in float64, scale the features, or add a ridge.",
            )
        return X


class ConjugateGradients:
    """Solves H_ρ X = B by products with H_ρ. The preconditioner is prepared once, for any number of right-hand sides.

    After every solve the residual is computed anew; where it misses the tolerance, the solve continues from there.
    An error is raised where the curvature is negative and where the residual no longer falls.

    Args:
        curvature: H_ρ as an operator.
        tolerance: ‖B − H X‖ / ‖B‖ to reach in every column, in coordinates scaled to equal curvature (None: 3e-11 in
            float64, 3e-5 in float32).
        max_iter: Limit on iterations per solve.
        rank: Rank of the Nyström preconditioner; 0 for the diagonal only. Where the matrix of some of the samples can
            be assembled, its inverse is the preconditioner instead.
        preconditioner: A preconditioner to reuse, built for a similar curvature.
    """

    def __init__(
        self,
        curvature: Operator,
        *,
        tolerance: float | None = None,
        max_iter: int = 5000,
        rank: int = 64,
        preconditioner: Preconditioner | None = None,
    ) -> None:
        check_instance(curvature, Operator, "curvature")
        self.curvature, self._root = curvature, curvature.scale().sqrt()[:, None]
        self.tolerance = tolerance if tolerance is not None else torch.finfo(self._root.dtype).eps ** 0.672
        self.max_iter = max_iter
        self.residual = 0.0  # largest relative residual of all solves
        self.steps = 0  # products with all columns, over all solves
        self.preconditioner = preconditioner or Metric(self._root[:, 0])
        b = draw_columns(self._root, 1, seed=1)
        self._iterate(b, torch.full_like(b[0], 1e-3), _CHECK)  # raises early where the curvature is negative
        if preconditioner is None and rank:
            sketch = curvature.sketch(_BUDGET)
            if sketch is None:
                columns = draw_columns(self._root, min(rank, curvature.d), seed=0)
                self.preconditioner = Nystrom(self._product, columns)
            else:
                self.preconditioner = Metric(self._root[:, 0]).fit(sketch.rough())

    def solve(self, B: Tensor) -> Tensor:
        """Solve H_ρ X = B, every column to the tolerance."""
        B = B / self._root
        X = torch.zeros_like(B)
        norms = torch.linalg.vector_norm(B, dim=0)
        live = norms > 0
        left, spent, last = B.clone(), 0, float("inf")
        gaps = torch.ones_like(norms)  # relative residuals
        while bool(live.any()):
            solved = self._iterate(left[:, live], 0.5 * self.tolerance / gaps[live], self.max_iter - spent)
            X[:, live] += solved.X
            spent += solved.iterations
            left = B - self._product(X)
            self.steps += 1
            gaps = torch.linalg.vector_norm(left, dim=0) / norms.clamp(min=torch.finfo(B.dtype).tiny)
            worst = float(gaps.max())
            if worst <= self.tolerance:
                self.residual = max(self.residual, worst)
                break
            if spent >= self.max_iter or not worst < 0.5 * last:
                raise NotConvergedError(
                    f"The linear solve has a relative residual of {worst:.3g} after {spent} iterations.",
                    f"Its tolerance is {self.tolerance:.3g}.",
                    "The curvature is too badly conditioned for this precision.",
                    "Raise max_iter or rank, work in float64, add a ridge, or pass damping (it is reported).",
                )
            last, live = worst, gaps > self.tolerance
        return X / self._root

    def approximate(self, B: Tensor) -> Tensor:
        """Apply the preconditioner to B."""
        return self.preconditioner.apply(B / self._root) / self._root

    def _product(self, V: Tensor) -> Tensor:
        """Return D^−½ H_ρ D^−½ v for every column v of V."""
        return self.curvature.product(V / self._root) / self._root

    def _iterate(self, B: Tensor, tolerance: Tensor, limit: int) -> CGResult:
        """Run conjugate gradients in scaled coordinates; raise where the curvature is negative."""
        solved = conjugate_gradients(lambda D, _: self._product(D), B, tolerance, limit, self.preconditioner.apply)
        self.steps += solved.iterations
        negative = solved.negative[solved.negative != float("inf")]
        if len(negative):
            raise negative_curvature_error(float(negative.min()))
        return solved


class SolverSeries:
    """Builds solvers for a series of similar operators; all share the preconditioner of the first.

    Args:
        estimate: Returns a matrix like the first operator, from which its preconditioner is built, or None; without it
            the solver chooses.
    """

    def __init__(self, estimate: Callable[[Any], Tensor | None] | None = None) -> None:
        self.tolerance: float | None = None  # of the next solver
        self._estimate = estimate
        self._preconditioner: Preconditioner | None = None

    def __call__(self, curvature: Operator) -> ConjugateGradients:
        """Build a solver for this curvature, reusing the preconditioner."""
        if self._preconditioner is None and self._estimate is not None:
            matrix = self._estimate(curvature)
            self._preconditioner = None if matrix is None else Metric(curvature.scale().sqrt()).fit(matrix)
        solver = ConjugateGradients(curvature, tolerance=self.tolerance, preconditioner=self._preconditioner)
        self._preconditioner = solver.preconditioner
        return solver

    def restart(self) -> None:
        """Begin a new series: the next operator gets its own preconditioner."""
        self._preconditioner = None


def build_solver(H: Operator, solver: Solver = None) -> LinearSolver:
    """Build a solver for H, of the user's choice; None: a factorisation if H can be assembled, else by products."""
    if solver is None:
        return DenseCholesky(H.dense()) if H.assembled else ConjugateGradients(H)
    built, cause, found = None, None, f"is {solver!r}"
    if callable(solver):
        try:
            built = solver(H)
            found = f"returned an object of type {type(built).__name__}"
        except TypeError as error:
            cause, found = error, f"could not be called with the curvature ({error})"
    if not isinstance(built, LinearSolver):
        raise InvalidInputError(
            f"`solver` {found}; it must be a class or a function that takes the curvature and returns a "
            "dif.LinearSolver, such as dif.ConjugateGradients."
        ) from cause
    return built
