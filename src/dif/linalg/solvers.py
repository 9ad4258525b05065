"""Solvers for H_ρ X = B, prepared once for many right-hand sides, and the interface for solvers of your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dif.errors import DegenerateError, InvalidInputError, NotConvergedError
from dif.linalg.conjugate_gradients import ConjugateGradients
from dif.linalg.operator import Operator


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
        scale = torch.linalg.vector_norm(B, dim=0) + torch.linalg.matrix_norm(self.H) * torch.linalg.vector_norm(
            X, dim=0
        )
        gaps = torch.linalg.vector_norm(B - self.H @ X, dim=0) / scale.clamp(min=torch.finfo(B.dtype).tiny)
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


def prepare(
    H: Operator,
    G: Tensor,
    rho: float | None = None,
    damping: float = 0.0,
    solver: Solver = None,
) -> tuple[LinearSolver, Tensor]:
    """Prepare a solver for H_ρ = H + GᵀRG (+ δI), for rows G that are equalities; return it and the diagonal of R.

    With rho=None, R is chosen such that each row adds curvature of the size of H. It is raised tenfold, up to six
    times, until H_ρ is positive definite. On {Gω = −r} the added term is constant, so the answer does not depend on R.
    With solver=None, H_ρ is factorised where it can be assembled; otherwise conjugate gradients are used.
    """
    if rho is not None or len(G) == 0:
        R = torch.full_like(G[:, 0], rho or 0.0)
        return _build(solver, H.with_rows(G, R, damping)), R
    unit = 1.0 / (G * G / H.scale()).sum(1).clamp(min=torch.finfo(G.dtype).tiny)
    failure = None
    for power in range(7):
        R = unit * 10.0**power
        H_rho = H.with_rows(G, R, damping)
        if power < 6 and H_rho.assembled:
            rounding = torch.finfo(G.dtype).eps ** 0.5 * (H.scale() + R @ G**2)
            if bool((H_rho.dense().diagonal().abs() < rounding).any()):  # the two parts of an entry cancel
                continue
        try:
            return _build(solver, H_rho), R
        except DegenerateError as error:
            failure = error
    assert failure is not None
    raise failure


def _build(solver: Solver, H: Operator) -> LinearSolver:
    """Build a solver for H; with solver=None, a factorisation where H can be assembled, else conjugate gradients."""
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
