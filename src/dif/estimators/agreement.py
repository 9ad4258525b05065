"""Agreement between predicted and actual changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.runtime.inputs import as_numbers


@dataclass(frozen=True)
class Agreement:
    """Predicted against actual changes, pooled over all entries.

    >>> print(Agreement.of(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 4.0])))
    r 1.000000, rank r 1.000000, slope 1.0000, relative error 0, same sign 100.0% (n = 3)
    """

    pearson: float
    spearman: float
    slope: float  # of predicted regressed on actual, with intercept
    relative_error: float  # ‖predicted − actual‖ / ‖actual‖
    sign: float  # share of entries with the same sign
    n: int

    @classmethod
    def of(cls, predicted: Tensor, actual: Tensor) -> Agreement:
        """Compare two tensors of the same shape, value by value."""
        p, a = (as_numbers(x, f"{what} changes") for x, what in ((predicted, "predicted"), (actual, "actual")))
        bad = int((~torch.isfinite(p)).sum() + (~torch.isfinite(a)).sum())
        if p.shape != a.shape or p.numel() < 2 or bad:
            raise InvalidInputError(
                f"The values to compare have shapes {tuple(p.shape)} and {tuple(a.shape)}; {bad} are not finite.",
                "Both must have the same shape and at least 2 values, all of them finite.",
                "Predicted and actual changes are compared value by value.",
                "Score the same perturbations and targets with both estimators.",
            )
        p, a = p.reshape(-1), a.reshape(-1)
        da = a - a.mean()
        return cls(
            pearson=_correlation(p, a),
            spearman=_correlation(_ranks(p), _ranks(a)),
            slope=float((p - p.mean()) @ da) / float(da @ da) if float(da @ da) > 0 else float("nan"),
            relative_error=float((p - a).norm()) / float(a.norm()) if float(a.norm()) > 0 else float("nan"),
            sign=float((torch.sign(p) == torch.sign(a)).double().mean()),
            n=p.numel(),
        )

    def __str__(self) -> str:
        return (
            f"r {self.pearson:.6f}, rank r {self.spearman:.6f}, slope {self.slope:.4f}, relative error "
            f"{self.relative_error:.3g}, same sign {self.sign:.1%} (n = {self.n})"
        )


def _correlation(x: Tensor, y: Tensor) -> float:
    """Return Pearson's correlation; NaN where x or y is constant."""
    dx, dy = x - x.mean(), y - y.mean()
    spread = float(dx.norm() * dy.norm())
    return min(1.0, max(-1.0, float(dx @ dy) / spread)) if spread > 0 else float("nan")


def _ranks(x: Tensor) -> Tensor:
    """Return ranks from 1; ties share their mean rank."""
    _, place, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return (torch.cumsum(counts, 0) - (counts - 1) / 2)[place].double()
