"""How far a point is from satisfying the optimality conditions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dif.problem.kinds import Kinds


@dataclass(frozen=True)
class KKT:
    """Residuals of the optimality conditions, relative, so that rescaling problem, rows or parameters changes nothing.

    All are steps of θ, in units of what random weights on the samples would move (see `Scales`).
    stationarity: the step that ∇L would make.
    feasibility: the step to the farthest constraint that is violated.
    complementarity: the largest min(slack, λ), both as such steps; negative λ counts in full.
    gradient_norm: ‖∇L‖ as it is.
    """

    stationarity: float
    feasibility: float
    complementarity: float
    gradient_norm: float
    rounding: float = 0.0  # what rounding of θ amounts to: residuals cannot be expected below a few times this

    @property
    def residual(self) -> float:
        """The largest of the three; NaN if one of them is."""
        parts = (self.stationarity, self.feasibility, self.complementarity)
        return float("nan") if any(part != part for part in parts) else max(parts)

    def __str__(self) -> str:
        return (
            f"stationarity {self.stationarity:.2e}, feasibility {self.feasibility:.2e}, "
            f"complementarity {self.complementarity:.2e}"
        )


@dataclass(frozen=True, eq=False)
class Scales:
    """The units in which rows and multipliers are compared with tolerances.

    Lengths are taken in u = √D·θ, where D is the absolute diagonal of ∇²L: there every coordinate curves alike,
    whatever the units of the features. A coordinate that hardly curves but is held by a force (a slack variable, say)
    counts as curved enough for that force to be a thousand units. The unit is how far random weights on the samples
    move u: the scale of influence itself; where θ is so large that rounding hides that, a small part of ‖u‖.
    """

    root: Tensor  # (d,) √D
    size: float  # the unit
    norms: Tensor  # (m,) ‖∇fⱼ‖ in u
    rounding: float  # what rounding of θ amounts to, in units

    @classmethod
    def of(cls, theta: Tensor, J: Tensor, D: Tensor, noise: float) -> Scales:
        """At θ, with the gradients J of all rows (1 + m, d), the curvature D of each coordinate, the samples' noise."""
        eps = torch.finfo(theta.dtype).eps
        part = eps**0.383  # 1e-6 in float64, 2e-3 in float32
        unit = max(noise, part * float((D.sqrt() * theta).norm()))
        if not 0 < unit < float("inf"):
            unit = float((J[0] / D.sqrt())[D > 0].norm()) or 1.0
        root = torch.maximum(D.sqrt(), J[0].abs() / (1e3 * unit))
        held = root[root > 0]
        root = torch.where(root > 0, root, held.mean() if len(held) else torch.ones_like(root))
        length = float((root * theta).norm())
        unit = max(unit, part * length)
        return cls(root, unit, torch.linalg.vector_norm(J[1:] / root, dim=1), eps * length / unit)

    def slack(self, c: Tensor) -> Tensor:
        """−c as a step of θ, in units; c = f − τ. Infinite where a row has slack and no gradient."""
        return torch.where(self.norms > 0, -c / (self.norms * self.size), torch.sign(-c) * float("inf")).nan_to_num(
            nan=0.0, posinf=float("inf"), neginf=float("-inf")
        )

    def multiplier(self, lam: Tensor) -> Tensor:
        """λ as the step that its force would make, in units."""
        return lam * self.norms / self.size

    def lengths(self, moves: Tensor, G: Tensor) -> Tensor:
        """(ω, Δλ), (..., d + m), as two steps of √D·θ: the one it is, and the one that its force would make."""
        d = len(self.root)
        return torch.cat([moves[..., :d] * self.root, (moves[..., d:] @ G) / self.root], -1)

    def gradient(self, g: Tensor) -> float:
        """∇L as the step that it would make, in units."""
        return float((g / self.root).norm()) / self.size


def violations(scales: Scales, c: Tensor, kinds: Kinds) -> Tensor:
    """Measure how far each row is from being met, scaled, (m,)."""
    return kinds.violation(-scales.slack(c))


def complementarity(scales: Scales, c: Tensor, lam: Tensor, kinds: Kinds) -> Tensor:
    """Measure how far each row is from complementarity, scaled, (m,)."""
    return kinds.complementarity(scales.slack(c), scales.multiplier(lam))


def residuals(scales: Scales, gradient: Tensor, c: Tensor, lam: Tensor, kinds: Kinds) -> KKT:
    """Measure the residuals at a point with ∇L = gradient, c = f − τ and multipliers λ."""
    return KKT(
        stationarity=scales.gradient(gradient),
        feasibility=float(violations(scales, c, kinds).max()) if len(c) else 0.0,
        complementarity=float(complementarity(scales, c, lam, kinds).max()) if len(c) else 0.0,
        gradient_norm=float(gradient.norm()),
        rounding=scales.rounding,
    )
