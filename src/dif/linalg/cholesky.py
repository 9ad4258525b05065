"""H_ρ x = B: prepared once, many right-hand sides. The place where other solvers plug in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dif.errors import DegenerateError, NotConvergedError
from dif.linalg.conjugate_gradients import ConjugateGradients
from dif.linalg.operator import Operator


class LinearSolver(Protocol):
    """What the engine needs of a solver for H_ρ x = B."""

    residual: float  # the largest seen, relative

    @property
    def steps(self) -> int:
        """Products with the curvature so far; 0 for a factorisation."""
        ...

    def solve(self, B: Tensor) -> Tensor:
        """X with H_ρ X = B, for B (d, c)."""
        ...

    def approximate(self, B: Tensor) -> Tensor:
        """About the same at the price of a few vectors, positive definite: a preconditioner for what is near H_ρ."""
        ...


Solver = Callable[[Operator], LinearSolver] | None  # how estimators take one; None: chosen by the size


class DenseCholesky:
    """Cholesky factors of a dense positive definite matrix, with one step of refinement per solve.

    >>> solver = DenseCholesky(torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64))
    >>> solver.solve(torch.eye(2, dtype=torch.float64)).diagonal().tolist()
    [0.5, 0.25]
    """

    steps = 0

    def __init__(self, H: Tensor, tolerance: float | None = None) -> None:
        self.H = H
        self.residual = 0.0  # the largest seen, relative
        self.tolerance = tolerance if tolerance is not None else torch.finfo(H.dtype).eps ** 0.5
        self._factor, failed = torch.linalg.cholesky_ex(H)
        floor = 100 * torch.finfo(H.dtype).eps  # of the diagonal entry: below it the pivot is rounding
        pivots = self._factor.diagonal() ** 2 / H.diagonal()
        smallest = float("-inf") if int(failed) or not bool(torch.isfinite(pivots).all()) else float(pivots.min())
        if not smallest > floor:
            raise DegenerateError(
                "pivots of the curvature",
                measured="one not positive" if smallest < 0 else f"smallest {smallest:.3g} of its diagonal entry",
                threshold=f"all above {floor:.1e}",
                meaning="The curvature is not positive definite, so the linearised problem has no unique solution.",
                cure="Add a ridge to the objective, or pass damping (it changes the answer and is reported).",
            )

    def approximate(self, B: Tensor) -> Tensor:
        """X with H X = B, residual not looked at."""
        return torch.cholesky_solve(B, self._factor)

    def solve(self, B: Tensor) -> Tensor:
        """X with H X = B, residual checked."""
        if B.numel() == 0:
            return torch.zeros_like(B)
        X = torch.cholesky_solve(B, self._factor)
        X = X + torch.cholesky_solve(B - self.H @ X, self._factor)
        scale = torch.linalg.vector_norm(B, dim=0) + torch.linalg.matrix_norm(self.H) * torch.linalg.vector_norm(
            X, dim=0
        )
        gap = torch.linalg.vector_norm(B - self.H @ X, dim=0) / scale.clamp(min=torch.finfo(B.dtype).tiny)
        worst = float(gap.max())
        self.residual = worst if not worst <= self.residual else self.residual
        if not self.residual <= self.tolerance:
            raise NotConvergedError(
                "relative residual of the linear solve",
                measured=f"{self.residual:.3g}",
                threshold=f"{self.tolerance:.3g}",
                meaning="The curvature is too badly conditioned for this precision.",
                cure="Work in float64, scale the features, or add a ridge.",
            )
        return X


def prepare(
    H: Operator,
    G: Tensor,
    rho: float | None = None,
    damping: float = 0.0,
    solver: Solver = None,
) -> tuple[LinearSolver, Tensor]:
    """A solver for H_ρ = H + GᵀRG (+ δI), for rows G that hold as equalities; and the diagonal of R.

    With R chosen (rho=None) each row adds curvature of the size of H, and more while H_ρ is not positive definite:
    on {Gω = −r} that changes nothing, so any R that works gives the same answer. Without a solver of your own, H is
    factorised where it can be assembled, and met by conjugate gradients where not.
    """
    chosen = solver or (_factorised if H.assembled else ConjugateGradients)
    if rho is not None or len(G) == 0:
        R = torch.full_like(G[:, 0], rho or 0.0)
        return chosen(H.with_rows(G, R, damping)), R
    unit = 1.0 / (G * G / H.scale()).sum(1).clamp(min=torch.finfo(G.dtype).tiny)
    failure = None
    for power in range(7):
        R = unit * 10.0**power
        whole = H.with_rows(G, R, damping)
        if power < 6 and whole.assembled and _cancelled(whole, H.scale() + R @ G**2):
            continue
        try:
            return chosen(whole), R
        except DegenerateError as error:
            failure = error
    assert failure is not None
    raise failure


def _cancelled(H: Operator, parts: Tensor) -> bool:
    """Whether what is left on the diagonal is rounding, compared with the parts it is made of, (d,)."""
    return bool((H.dense().diagonal().abs() < torch.finfo(parts.dtype).eps ** 0.5 * parts).any())


def _factorised(H: Operator) -> DenseCholesky:
    return DenseCholesky(H.dense())
