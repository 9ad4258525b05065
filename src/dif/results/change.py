"""The change of one perturbation, and the agreement of two sets of scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.program import PerConstraint, Program
from dif.errors import InvalidInputError, format_table
from dif.runtime.inputs import as_numbers, check_count


@dataclass(frozen=True)
class Agreement:
    """Predicted against actual changes, pooled over all entries.

    The slope is that of predicted regressed on actual changes: above 1, predictions are too large.

    Examples:
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
                "Predicted and actual changes must have the same shape and at least 2 values, all of them finite; "
                f"these have shapes {tuple(p.shape)} and {tuple(a.shape)}, and {bad} values are not finite."
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


def name_entry(theta: Mapping[str, Tensor], position: int) -> str:
    """Return the name of one entry of flat θ, such as "w[0, 2]"."""
    for name, tensor in theta.items():
        if position < tensor.numel():
            place = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(position), tensor.shape))
            return f"{name}[{place}]" if place else name
        position -= tensor.numel()
    raise IndexError(position)


_SHOWN = 5  # entries of Δθ that are printed, the largest


@dataclass(frozen=True, eq=False)
class Change:
    """The change of the parameters and multipliers, Δθ and Δλ, under one perturbation."""

    theta: dict[str, Tensor]  # Δθ in the structure of the params
    multipliers: PerConstraint  # Δλ per constraint
    flat: Tensor  # Δθ as one vector
    diagnostics: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, dtheta: Tensor, dlam: Tensor, diagnostics: dict[str, Any]) -> Change:
        """Build from Δθ, (d,), and Δλ, (m,)."""
        multipliers = PerConstraint(dlam, program.problem, program.shapes)
        return cls(program.parameters.tensors(dtheta), multipliers, dtheta, diagnostics)

    def largest(self, k: int) -> list[tuple[str, float]]:
        """Return the name and the change of the k parameters that change most, such as ("w[0, 2]", 0.1)."""
        check_count(k, "k")
        order = torch.argsort(torch.nan_to_num(self.flat.abs(), nan=-1.0), descending=True, stable=True)[:k].tolist()
        return [(name_entry(self.theta, i), float(self.flat[i])) for i in order]

    def plot(self, ax: Any = None, k: int = 15) -> Any:
        """Draw the k largest changes of parameters as bars, on new axes if `ax` is None; return the axes."""
        from dif.report.plots import parameter_change

        return parameter_change(self, ax, k)

    def __str__(self) -> str:
        size, shown = float(self.flat.norm()), self.largest(_SHOWN)
        more = f", the {_SHOWN} largest of {len(self.flat)} entries" if len(self.flat) > _SHOWN else ""
        parameters = format_table(("parameter", "Δθ"), tuple((name, f"{value:+.4g}") for name, value in shown))
        text = f"Change of the solution: ‖Δθ‖ = {size:.4g}{more}\n{parameters}"
        rows = tuple(
            (name if value.dim() == 0 else f"{name}[{i}]", f"{number:+.4g}")
            for name, value in self.multipliers.items()
            for i, number in enumerate(value.reshape(-1).tolist())
        )
        return f"{text}\n{format_table(('constraint', 'Δλ'), rows)}" if rows else text
