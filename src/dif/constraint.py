"""f(θ) ≤ τ or f(θ) = τ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.perturbation import Perturbation, Shift
from dif.reading import as_numbers

if TYPE_CHECKING:
    from dif.term import Term


@dataclass(frozen=True, eq=False)
class Constraint:
    """One constraint, of one row or of several; made by comparing Terms, `a <= b`, `a >= b`, `a == b`.

    `>=` is stored negated, so that every multiplier of an inequality is ≥ 0 with L = f₀ + Σ λⱼ(fⱼ − τⱼ).
    """

    term: Term  # f, without constant
    tau: Tensor  # () or (rows,)
    equality: bool
    negated: bool = False
    name: str | None = None

    def named(self, name: str) -> Constraint:
        """The same constraint under a name, shown by `active`, Δλ and reports."""
        return replace(self, name=name)

    def shift(self, dtau: float | Tensor) -> Perturbation:
        """Move the right-hand side as it was written by dtau (one number, or one per row).

        For `a <= b` a positive dtau loosens, for `a >= b` it tightens.
        """
        moved = as_numbers(dtau, "shift of a bound").clone()
        if not bool(torch.isfinite(moved).all()) or moved.dim() > 1:
            raise InvalidInputError(
                "shift of a bound",
                measured=dtau,
                threshold="one finite number, or one per row",
                meaning="The bound moves by this much at ε = 1.",
                cure="Pass a number in the constraint's own units.",
            )
        written = f"{float(moved):+g}" if moved.dim() == 0 else f"{moved.numel()} values"
        return Perturbation(((1.0, Shift(self, -moved if self.negated else moved, written)),))

    def __bool__(self) -> bool:
        raise TypeError(
            "a Constraint has no truth value: it states a condition on θ. Write 0 <= t <= 1 as two constraints, "
            "and compare Terms by `is`."
        )

    def __repr__(self) -> str:
        sign = "==" if self.equality else "<="
        bound = f"{float(self.tau):g}" if self.tau.dim() == 0 else f"<{self.tau.numel()} bounds>"
        title = f"{self.name}: " if self.name else ""
        return f"Constraint({title}{self.term!r} {sign} {bound}{', written >=' if self.negated else ''})"
