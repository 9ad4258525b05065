"""Work in float32, answers in float64: conjugate gradients in single precision, residuals in double."""

from __future__ import annotations

import torch
from torch import Tensor

from dif.errors import InvalidInputError, NotConvergedError
from dif.linalg.conjugate_gradients import ConjugateGradients
from dif.linalg.operator import Operator


class Refinement:
    """Iterative refinement: each round solves for the float64 residual in float32 and adds the correction.

    On accelerators a float64 product costs many times a float32 one; here one of them is spent per round.

    Args:
        curvature: H_ρ in float64.
        tolerance: ‖B − H X‖ / ‖B‖ to reach in every column, measured in float64.
        max_rounds: Limit on rounds.
        rank: Of the Nyström preconditioner.
    """

    def __init__(self, curvature: Operator, *, tolerance: float = 1e-9, max_rounds: int = 12, rank: int = 64) -> None:
        if curvature.like.dtype != torch.float64:
            raise InvalidInputError(
                "precision of the problem",
                measured=curvature.like.dtype,
                threshold="torch.float64",
                meaning="Residuals in float64 need a problem in float64; the work in float32 is done on a copy.",
                cure="Convert parameters and data to float64, or use ConjugateGradients.",
            )
        self.curvature = curvature
        self.root = curvature.scale().sqrt()[:, None]
        self.inner = ConjugateGradients(curvature.to(torch.float32), tolerance=1e-3, rank=rank)
        self.tolerance, self.max_rounds = tolerance, max_rounds
        self.residual = 0.0

    @property
    def steps(self) -> int:
        """Products in float32, with all columns, over all solves."""
        return self.inner.steps

    def approximate(self, B: Tensor) -> Tensor:
        """What the preconditioner makes of B."""
        return self.inner.approximate(B.float()).to(B)

    def solve(self, B: Tensor) -> Tensor:
        """X with H_ρ X = B, every column to the tolerance in float64."""
        B = B / self.root  # residuals are measured in coordinates that curve alike
        X, left = torch.zeros_like(B), B
        norms = torch.linalg.vector_norm(B, dim=0)
        live, worst = norms > 0, 0.0
        for _ in range(self.max_rounds if bool(live.any()) else 0):
            size = torch.linalg.vector_norm(left[:, live], dim=0)
            correction = self.inner.solve((self.root * left[:, live] / size).to(torch.float32))
            X[:, live] += self.root * correction.to(B) * size
            left = B - self.curvature.product(X / self.root) / self.root
            gaps = torch.linalg.vector_norm(left, dim=0) / torch.where(norms > 0, norms, 1.0)
            worst, live = float(gaps.max()), gaps > self.tolerance
            if not bool(live.any()):
                break
        if not worst <= self.tolerance:
            raise NotConvergedError(
                "relative residual of the refined linear solve",
                measured=f"{worst:.3g} after {self.max_rounds} rounds",
                threshold=f"{self.tolerance:.3g}",
                meaning="The curvature is too badly conditioned for float32 to help.",
                cure="Use ConjugateGradients in float64, raise max_rounds or rank, or add a ridge.",
            )
        self.residual = max(self.residual, worst)
        return X / self.root
