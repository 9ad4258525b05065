"""Mixed-precision iterative refinement: conjugate gradients in float32, residuals in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from dif.errors import InvalidInputError, NotConvergedError
from dif.linalg.conjugate_gradients import ConjugateGradients
from dif.linalg.operator import Operator, check_operator


class Refinement:
    """Iterative refinement: each round solves for the float64 residual in float32 and adds the correction.

    On accelerators a float64 product costs many times as much as a float32 one. Each round needs one float64 product.

    Args:
        curvature: H_ρ in float64.
        tolerance: Largest ‖b − H x‖ / ‖b‖ of a column, measured in float64.
        max_rounds: Largest number of rounds.
        rank: Rank of the Nyström preconditioner.
    """

    def __init__(self, curvature: Operator, *, tolerance: float = 1e-9, max_rounds: int = 12, rank: int = 64) -> None:
        check_operator(curvature)
        if curvature.like.dtype != torch.float64:
            raise InvalidInputError(
                f"The problem is in {curvature.like.dtype}.",
                "It must be in torch.float64.",
                "Residuals in float64 need a problem in float64; the work in float32 is done on a copy.",
                "Convert parameters and data to float64, or use ConjugateGradients.",
            )
        self.curvature = curvature
        self.root = curvature.scale().sqrt()[:, None]
        self.inner = ConjugateGradients(curvature.to(torch.float32), tolerance=1e-3, rank=rank)
        self.tolerance, self.max_rounds = tolerance, max_rounds
        self.residual = 0.0  # largest relative residual of all solves so far

    @property
    def steps(self) -> int:
        """Number of float32 products with all columns, over all solves."""
        return self.inner.steps

    def approximate(self, B: Tensor) -> Tensor:
        """Apply the float32 preconditioner to B."""
        return self.inner.approximate(B.float()).to(B)

    def solve(self, B: Tensor) -> Tensor:
        """Solve H_ρ X = B, every column to the tolerance in float64."""
        B = B / self.root  # residuals are measured in scaled coordinates, whose curvatures are alike
        X, residual = torch.zeros_like(B), B
        norms = torch.linalg.vector_norm(B, dim=0)
        open_columns, worst = norms > 0, 0.0
        for _ in range(self.max_rounds if bool(open_columns.any()) else 0):
            size = torch.linalg.vector_norm(residual[:, open_columns], dim=0)
            correction = self.inner.solve((self.root * residual[:, open_columns] / size).to(torch.float32))
            X[:, open_columns] += self.root * correction.to(B) * size
            residual = B - self.curvature.product(X / self.root) / self.root
            errors = torch.linalg.vector_norm(residual, dim=0) / torch.where(norms > 0, norms, 1.0)
            worst, open_columns = float(errors.max()), errors > self.tolerance
            if not bool(open_columns.any()):
                break
        if not worst <= self.tolerance:
            raise NotConvergedError(
                f"The relative residual of the refined linear solve is {worst:.3g} after {self.max_rounds} rounds.",
                f"It must be at most {self.tolerance:.3g}.",
                "The curvature is too badly conditioned for float32 to help.",
                "Use ConjugateGradients in float64, raise max_rounds or rank, or add a ridge.",
            )
        self.residual = max(self.residual, worst)
        return X / self.root
