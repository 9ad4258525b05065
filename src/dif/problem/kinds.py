"""What each kind of constraint requires of its value and its multiplier. Other rooms ask here, not for the kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Kind(Enum):
    """The kind of one constraint."""

    EQUAL = "=="
    AT_MOST = "<="

    @property
    def symbol(self) -> str:
        """Return the kind as one character of a formula."""
        return {"==": "=", "<=": "≤"}[self.value]


@dataclass(frozen=True, eq=False)
class Kinds:
    """The kinds of all rows: f = τ with any λ on equal rows; f ≤ τ, λ ≥ 0 and λ(f − τ) = 0 on the others.

    In the methods, c is f − τ, slack is τ − f and force is λ; slack and force may be scaled by their caller.
    """

    equal: Tensor  # (m,) bool

    @classmethod
    def of(cls, rows: Iterable[tuple[Kind, int]], device: torch.device) -> Kinds:
        """Build from the kind and the number of rows of each constraint."""
        is_equal = {Kind.EQUAL: True, Kind.AT_MOST: False}  # a kind that is not listed here is refused
        equal = [is_equal[kind] for kind, count in rows for _ in range(count)]
        return cls(torch.tensor(equal, dtype=torch.bool, device=device))

    def take(self, rows: Tensor) -> Kinds:
        """Return the kinds of some rows."""
        return Kinds(self.equal[rows])

    @property
    def one_sided(self) -> Tensor:
        """Rows that can switch between binding and inactive, (m,) bool."""
        return ~self.equal

    def project(self, lam: Tensor) -> Tensor:
        """Return the admissible multipliers nearest to λ, (..., m)."""
        return torch.where(self.equal, lam, lam.clamp(min=0))

    def violation(self, c: Tensor) -> Tensor:
        """Measure how far each row is from being met, (..., m)."""
        return torch.where(self.equal, c.abs(), c.clamp(min=0))

    def complementarity(self, slack: Tensor, force: Tensor) -> Tensor:
        """Measure how far each row is from λ(f − τ) = 0: min(slack, force); a negative force counts in full."""
        gap = torch.where(force < 0, -force, torch.minimum(slack.clamp(min=0), force))
        return torch.where(self.equal, torch.zeros_like(gap), gap)

    def inadmissible(self, lam: Tensor) -> Tensor:
        """Return which rows have a multiplier of the wrong sign, (..., m) bool."""
        return self.one_sided & (lam < 0)

    def at_bound(self, slack: Tensor, tolerance: float) -> Tensor:
        """Return which rows are active, (m,) bool: equal rows, and those with a slack of at most the tolerance."""
        return self.equal | (slack <= tolerance)

    def has_force(self, force: Tensor, tolerance: float = 0.0) -> Tensor:
        """Return which rows act on the solution, (..., m) bool: equal rows, and those with a force above the tolerance.

        Dropping one of these constraints would move the solution.
        """
        return self.equal | (force > tolerance)

    def penalty(self, c: Tensor, rho: float, k: float) -> tuple[Tensor, Tensor]:
        """Return the first two derivatives of the paper's penalty of each row: ½ρc² if equal, else k·max(c, 0)³."""
        over = c.clamp(min=0)
        return torch.where(self.equal, rho * c, 3 * k * over**2), torch.where(self.equal, rho, 6 * k * over)
