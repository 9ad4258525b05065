"""How far a point is from satisfying the optimality conditions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class KKT:
    """Residuals of the optimality conditions, relative, so that rescaling problem, rows or parameters changes nothing.

    stationarity: the step that ∇L would make, relative to the size of θ.
    feasibility: the step to the farthest constraint that is violated, relative to the size of θ.
    complementarity: the largest min(slack, λ), both as such steps; negative λ counts in full.
    gradient_norm: ‖∇L‖ as it is.
    """

    stationarity: float
    feasibility: float
    complementarity: float
    gradient_norm: float

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
    whatever the units of the features. The size of θ is ‖u‖, or what a random reweighting of the samples would move if
    θ is smaller than that (at θ = 0, say).
    """

    root: Tensor  # (d,) √D
    size: float
    norms: Tensor  # (m,) ‖∇fⱼ‖ in u

    @classmethod
    def of(cls, theta: Tensor, G: Tensor, D: Tensor, noise: float) -> Scales:
        """At θ, with the constraint gradients G (m, d), the curvature D of each coordinate and the samples' noise."""
        root = D.sqrt()
        size = max(float((root * theta).norm()), noise)
        return cls(root, size if 0 < size < float("inf") else 1.0, torch.linalg.vector_norm(G / root, dim=1))

    def at(self, G: Tensor) -> Scales:
        """The same units with other constraint gradients."""
        return replace(self, norms=torch.linalg.vector_norm(G / self.root, dim=1))

    def slack(self, c: Tensor) -> Tensor:
        """−c as a step of θ, relative to its size; c = f − τ."""
        return -c / (torch.where(self.norms > 0, self.norms, 1.0) * self.size)

    def multiplier(self, lam: Tensor) -> Tensor:
        """λ as the step that its force would make, relative to the size of θ."""
        return lam * self.norms / self.size

    def gradient(self, g: Tensor) -> float:
        """∇L as the step that it would make, relative to the size of θ."""
        return float((g / self.root).norm()) / self.size


def violations(scales: Scales, c: Tensor, equality: Tensor) -> Tensor:
    """How far each row is from being met, scaled, (m,)."""
    slack = scales.slack(c)
    return torch.where(equality, slack.abs(), (-slack).clamp(min=0))


def products(scales: Scales, c: Tensor, lam: Tensor, equality: Tensor) -> Tensor:
    """How far each row is from complementarity, scaled, (m,): min(slack, λ), a negative λ in full."""
    slack, force = scales.slack(c).clamp(min=0), scales.multiplier(lam)
    return torch.where(equality, torch.zeros_like(slack), torch.where(force < 0, -force, torch.minimum(slack, force)))


def residuals(scales: Scales, gradient: Tensor, c: Tensor, lam: Tensor, equality: Tensor) -> KKT:
    """The residuals at a point with ∇L = gradient, c = f − τ and multipliers λ."""
    return KKT(
        stationarity=scales.gradient(gradient),
        feasibility=float(violations(scales, c, equality).max()) if len(c) else 0.0,
        complementarity=float(products(scales, c, lam, equality).max()) if len(c) else 0.0,
        gradient_norm=float(gradient.norm()),
    )
