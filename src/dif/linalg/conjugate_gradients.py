"""Preconditioned conjugate gradients on many columns at once: the routine, and a solver that checks true residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dif.errors import NotConvergedError
from dif.linalg.operator import Operator
from dif.linalg.preconditioner import (
    Preconditioner,
    ScaledOperator,
    choose_preconditioner,
    invert,
    negative_curvature_error,
)
from dif.runtime.inputs import check_instance

_PATIENCE = 300  # iterations without progress after which the routine gives up
_CHECK = 30  # iterations of the test for negative curvature, before a preconditioner is built


@dataclass(frozen=True)
class CGResult:
    """Result of `conjugate_gradients`."""

    X: Tensor  # (d, c)
    R: Tensor  # (d, c) residual B − A X, from the recursion, not recomputed
    reached: Tensor  # (c,) bool, columns whose residual is within the tolerance
    negative: Tensor  # (c,) curvature along the direction that stopped a column; +inf if none did
    iterations: int


def conjugate_gradients(
    product: Callable[[Tensor, Tensor], Tensor],
    B: Tensor,
    tolerance: Tensor,
    limit: int,
    precondition: Callable[[Tensor], Tensor] | None = None,
) -> CGResult:
    """Solve A X = B, starting from zero, until the relative residual of every column is at most its tolerance.

    A column that meets negative curvature stops.

    Args:
        product: Returns A·D for some columns D (d, k) and their numbers (k,) among the columns of B.
        B: Right-hand sides, (d, c).
        tolerance: (c,) relative residual to reach in each column.
        limit: Largest number of iterations.
        precondition: Applies an approximate inverse of A to columns.
    """
    precondition = precondition or torch.clone
    X, R = torch.zeros_like(B), B.clone()
    Z = precondition(R)
    D, rz = Z.clone(), (R * Z).sum(0)
    negative = torch.full_like(rz, float("inf"))
    goal = tolerance * torch.linalg.vector_norm(B, dim=0)
    sizes = torch.linalg.vector_norm(R, dim=0)
    live = sizes > goal
    used, best, since = 0, float("inf"), 0
    while bool(live.any()) and used < limit and since < _PATIENCE:
        used += 1
        some = torch.nonzero(live).reshape(-1)
        d, x = D[:, some], X[:, some]
        Ad = product(d, some)
        along = (d * Ad).sum(0)
        down = ~(along > 0)  # true for NaN too
        alpha = torch.where(down, 0.0, rz[some] / along)
        negative[some[down]] = (along / (d * d).sum(0))[down]
        X[:, some] = x + alpha * d
        R[:, some] -= alpha * Ad
        live[some[down]] = False
        Z = precondition(R[:, some])
        new = (R[:, some] * Z).sum(0)
        D[:, some] = Z + (new / rz[some]) * d
        rz[some] = new
        sizes = torch.linalg.vector_norm(R, dim=0)
        live &= sizes > goal
        worst = float((sizes[live] / goal[live]).max()) if bool(live.any()) else 0.0
        best, since = (worst, 0) if worst < 0.9 * best else (best, since + 1)
    return CGResult(X, R, sizes <= goal, negative, used)


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
        self.curvature = ScaledOperator(curvature, curvature.scale().sqrt())
        self.tolerance = tolerance if tolerance is not None else torch.finfo(curvature.like.dtype).eps ** 0.672
        self.max_iter = max_iter
        self.residual = 0.0  # largest relative residual of all solves
        self.steps = 0  # products with all columns, over all solves
        self.preconditioner = preconditioner
        b = self.curvature.draw(1, seed=1)
        self._iterate(b, torch.full_like(b[0], 1e-3), _CHECK)  # raises early where the curvature is negative
        if preconditioner is None:
            self.preconditioner = choose_preconditioner(self.curvature, rank)

    def solve(self, B: Tensor) -> Tensor:
        """Solve H_ρ X = B, every column to the tolerance."""
        B = B / self.curvature.root[:, None]
        X = torch.zeros_like(B)
        norms = torch.linalg.vector_norm(B, dim=0)
        live = norms > 0
        left, spent, last = B.clone(), 0, float("inf")
        gaps = torch.ones_like(norms)  # relative residuals
        while bool(live.any()):
            solved = self._iterate(left[:, live], 0.5 * self.tolerance / gaps[live], self.max_iter - spent)
            X[:, live] += solved.X
            spent += solved.iterations
            left = B - self.curvature.product(X)
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
        return X / self.curvature.root[:, None]

    def approximate(self, B: Tensor) -> Tensor:
        """Apply the preconditioner to B."""
        root = self.curvature.root[:, None]
        return self._precondition(B / root) / root

    def _iterate(self, B: Tensor, tolerance: Tensor, limit: int) -> CGResult:
        """Run conjugate gradients in scaled coordinates; raise where the curvature is negative."""
        product = lambda D, _: self.curvature.product(D)  # noqa: E731
        solved = conjugate_gradients(product, B, tolerance, limit, self._precondition)
        self.steps += solved.iterations
        negative = solved.negative[solved.negative != float("inf")]
        if len(negative):
            raise negative_curvature_error(float(negative.min()))
        return solved

    def _precondition(self, R: Tensor) -> Tensor:
        return R.clone() if self.preconditioner is None else self.preconditioner.apply(R)


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
            scaled = ScaledOperator(curvature, curvature.scale().sqrt())
            self._preconditioner = None if matrix is None else invert(scaled, matrix)
        solver = ConjugateGradients(curvature, tolerance=self.tolerance, preconditioner=self._preconditioner)
        self._preconditioner = solver.preconditioner
        return solver

    def restart(self) -> None:
        """Begin a new series: the next operator gets its own preconditioner."""
        self._preconditioner = None
