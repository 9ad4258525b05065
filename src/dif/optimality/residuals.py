"""Residuals of the optimality conditions, and the units in which they are measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dif.problem.kinds import Kinds


@dataclass(frozen=True)
class KKT:
    """Residuals of the optimality conditions. Rescaling the problem, its rows or its parameters does not change them.

    Each is the length of a step of θ, in units of the step that random weights on the samples cause (see `Scales`).
    stationarity: the step that ∇L causes.
    feasibility: the step to the farthest violated constraint.
    complementarity: the largest min(slack, λ), both as steps; a negative λ counts in full.
    gradient_norm: ‖∇L‖, not scaled.
    """

    stationarity: float
    feasibility: float
    complementarity: float
    gradient_norm: float
    rounding: float = 0.0  # the step that rounding of θ amounts to: residuals do not fall much below it

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

    Lengths are measured in u = √D·θ, where D is the absolute diagonal of ∇²L, so that they do not depend on the units
    of the features. A coordinate with little curvature and a large force (a slack variable, say) is given the
    curvature with which that force causes a step of a thousand units. The unit is how far random weights on the
    samples move u: the scale of influence itself. Where θ is so large that rounding hides such moves, the unit is a
    small part of ‖u‖.
    """

    root: Tensor  # (d,) √D
    size: float  # the unit
    norms: Tensor  # (m,) ‖∇fⱼ‖ in u
    rounding: float  # the step that rounding of θ amounts to, in units

    @classmethod
    def of(cls, theta: Tensor, J: Tensor, D: Tensor, noise: float) -> Scales:
        """Compute the units at θ from the gradients J (1 + m, d) of all rows, the curvatures D (d,) and the noise."""
        eps = torch.finfo(theta.dtype).eps
        part = eps**0.383  # 1e-6 in float64, 2e-3 in float32
        unit = max(noise, part * float((D.sqrt() * theta).norm()))
        if not 0 < unit < float("inf"):
            unit = float((J[0] / D.sqrt())[D > 0].norm()) or 1.0
        root = torch.maximum(D.sqrt(), J[0].abs() / (1e3 * unit))
        curved = root[root > 0]
        root = torch.where(root > 0, root, curved.mean() if len(curved) else torch.ones_like(root))
        length = float((root * theta).norm())
        unit = max(unit, part * length)
        return cls(root, unit, torch.linalg.vector_norm(J[1:] / root, dim=1), eps * length / unit)

    def slack(self, c: Tensor) -> Tensor:
        """Convert c = f − τ to the step of θ that it allows, in units; infinite for slack without a gradient."""
        return torch.where(self.norms > 0, -c / (self.norms * self.size), torch.sign(-c) * float("inf")).nan_to_num(
            nan=0.0, posinf=float("inf"), neginf=float("-inf")
        )

    def multiplier(self, lam: Tensor) -> Tensor:
        """Convert λ to the step that its force causes, in units."""
        return lam * self.norms / self.size

    def lengths(self, moves: Tensor, G: Tensor) -> Tensor:
        """Convert (ω, Δλ), (..., d + m), to two steps of √D·θ: ω itself, and the step that the force GᵀΔλ causes."""
        d = len(self.root)
        return torch.cat([moves[..., :d] * self.root, (moves[..., d:] @ G) / self.root], -1)

    def gradient(self, g: Tensor) -> float:
        """Convert ∇L to the length of the step that it causes, in units."""
        return float((g / self.root).norm()) / self.size


def residuals(scales: Scales, gradient: Tensor, c: Tensor, lam: Tensor, kinds: Kinds) -> KKT:
    """Measure the residuals at a point with ∇L = gradient, c = f − τ and multipliers λ."""
    slack = scales.slack(c)
    return KKT(
        stationarity=scales.gradient(gradient),
        feasibility=float(kinds.violation(-slack).max()) if len(c) else 0.0,
        complementarity=float(kinds.complementarity(slack, scales.multiplier(lam)).max()) if len(c) else 0.0,
        gradient_norm=float(gradient.norm()),
        rounding=scales.rounding,
    )
