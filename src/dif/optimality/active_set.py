"""Which constraints are active, with what margins, and whether the derivative exists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dif.errors import DegenerateError
from dif.linalg.lanczos import tangent_curvature
from dif.linalg.operator import Operator
from dif.optimality.finding import BAD, GOOD, Finding
from dif.optimality.residuals import Scales
from dif.problem.kinds import Kinds


@dataclass(frozen=True)
class Margin:
    """How far single perturbations move a row towards switching: the largest and the median absolute change.

    For a binding row this is the change of its multiplier, for any other row that of f − τ.
    """

    largest: float
    median: float


@dataclass(frozen=True, eq=False)
class ActiveSet:
    """The rows of all constraints, divided into binding, weak and inactive.

    binding: f = τ and λ̄ > 0, and every equality. weak: f = τ and λ̄ = 0 (the paper's "non-binding"). Row numbers count
    through the constraints in order; `names` has their names.
    """

    binding: tuple[int, ...]
    weak: tuple[int, ...]
    inactive: tuple[int, ...]
    names: tuple[str, ...]
    slack: Tensor  # (m,) scaled, in relative units of θ
    force: Tensor  # (m,) scaled multipliers
    tolerance: float
    margins: Tensor  # (m,) how far the slack or multiplier that decides the class is from the tolerance; inf if equal
    licq: float  # smallest singular value of the active gradients, rows scaled to length 1; 1 with none active
    curvature: float  # smallest eigenvalue of ∇²L on the tangent space of the binding rows; inf if that is {0}
    relative_curvature: float  # the same of ∇²L / √(D Dᵀ), in which all coordinates have curvature 1
    licq_floor: float  # at or below it the gradients count as dependent
    curvature_floor: float  # at or below it the relative curvature counts as zero

    @classmethod
    def read(
        cls, names: tuple[str, ...], scales: Scales, c: Tensor, lam: Tensor, kinds: Kinds, G: Tensor, H: Operator,
        tolerance: float,
    ) -> ActiveSet:  # fmt: skip
        """Classify the rows from c = f − τ, λ, the constraint gradients G and the Hessian H of the Lagrangian."""
        slack, force = scales.slack(c), scales.multiplier(lam)
        active = kinds.at_bound(slack, tolerance)
        binding = active & kinds.has_force(force, tolerance)
        weak, inactive = active & ~binding, ~active
        curvature, relative = tangent_curvature(H, G[binding], scales.root)
        deciding = torch.where(inactive, slack - tolerance, force - tolerance)
        inside = tolerance - torch.maximum(slack.abs(), force.abs())
        margins = torch.where(weak, inside, deciding)
        margins = torch.where(kinds.one_sided, margins, float("inf"))
        return cls(
            binding=_rows(binding),
            weak=_rows(weak),
            inactive=_rows(inactive),
            names=names,
            slack=slack,
            force=force,
            tolerance=tolerance,
            margins=margins,
            licq=_independence((G / scales.root)[active], scales.norms[active]),
            curvature=curvature,
            relative_curvature=relative,
            licq_floor=torch.finfo(G.dtype).eps ** 0.5,
            curvature_floor=torch.finfo(G.dtype).eps ** 0.75,
        )

    @property
    def active(self) -> tuple[int, ...]:
        """Binding and weak rows, in order."""
        return tuple(sorted(self.binding + self.weak))

    def mask(self, rows: tuple[int, ...]) -> Tensor:
        """Return a mask of the given rows, (m,) bool."""
        mask = torch.zeros_like(self.slack, dtype=torch.bool)
        mask[list(rows)] = True
        return mask

    @property
    def uncertain(self) -> tuple[int, ...]:
        """Rows whose class is decided by a slack or multiplier within a factor of 100 of the tolerance."""
        slack, force = self.slack.abs(), self.force.abs()
        weak = torch.where(self.mask(self.weak), torch.maximum(slack, force), force)
        deciding = torch.where(self.mask(self.inactive), slack, weak)
        near = (deciding > 0.01 * self.tolerance) & (deciding < 100 * self.tolerance)
        return _rows(near & torch.isfinite(self.margins))

    @property
    def regular(self) -> bool:
        """Whether the directional derivative exists: LICQ and positive tangent curvature (paper, Theorem 5)."""
        return self.licq > self.licq_floor and self.relative_curvature > self.curvature_floor

    def independence(self) -> Finding:
        """Judge whether the active gradients are independent (LICQ)."""
        what = "Are the active constraints independent (LICQ)?"
        if not self.active:
            return Finding(what, GOOD, "No constraint is active.", "The point is an unconstrained minimum.")
        names = ", ".join(self.names[j] for j in self.active)
        found = f"The smallest singular value of the scaled active gradients ({names}) is {self.licq:.3g}."
        allowed = f"It must be above {self.licq_floor:.1e}."
        if self.licq > self.licq_floor:
            return Finding(what, GOOD, found, "The multipliers are unique.", allowed=allowed)
        meaning = "One active gradient depends on the others (LICQ fails), so the multipliers are not unique."
        cure = "Drop a redundant constraint, or state equal ones once."
        otherwise = "strict=False goes on with one choice."
        return Finding(what, BAD, found, meaning, cure, allowed, DegenerateError, otherwise)

    def strict_minimum(self) -> Finding:
        """Judge whether the Lagrangian curves upwards along the binding constraints (the second-order condition)."""
        what = "Is it a strict minimum?"
        if self.curvature == float("inf"):
            return Finding(what, GOOD, "The binding constraints leave no direction free.", "They fix the parameters.")
        along = " along the binding constraints" if self.binding else ""
        found = f"The smallest curvature of the Lagrangian{along} is {self.curvature:.3g}."
        allowed = f"It must be above {self.curvature_floor:.1e} of each coordinate's own."
        if self.relative_curvature > self.curvature_floor:
            how = "continuously" if self.weak else "smoothly"
            return Finding(what, GOOD, found, f"The solution is locally unique and moves {how}.", allowed=allowed)
        meaning = (
            "The solution is not a strict minimum (the second-order condition fails): it is not unique, or it is a "
            "saddle point."
        )
        cure = "Add a ridge, drop redundant parameters, fit to a minimum, or pass damping (it changes the answer)."
        return Finding(what, BAD, found, meaning, cure, allowed, DegenerateError)

    def check(self, *, damped: bool = False) -> None:
        """Raise where the derivative does not exist; damping makes up for curvature, not for independence."""
        self.independence().check()
        if not damped:
            self.strict_minimum().check()

    def __str__(self) -> str:
        lines = []
        for kind in ("binding", "weak", "inactive"):
            for j in getattr(self, kind):
                slack, force = self.slack[j] + 0.0, self.force[j] + 0.0  # 0 instead of −0
                lines.append(f"{self.names[j]}: {kind} (relative slack {slack:.2e}, force {force:.2e})")
        lines.append(f"independence {self.licq:.2e}, tangent curvature {self.curvature:.3g}")
        return "\n".join(lines)


def _rows(mask: Tensor) -> tuple[int, ...]:
    """Return the numbers of the rows in a mask."""
    return tuple(torch.nonzero(mask).reshape(-1).tolist())


def _independence(G: Tensor, norms: Tensor) -> float:
    """Return the smallest singular value of rows scaled to length 1."""
    if len(G) == 0:
        return 1.0
    if len(G) > G.shape[1] or not bool((norms > 0).all()):
        return 0.0
    return float(torch.linalg.svdvals((G / norms[:, None]).double())[-1])
