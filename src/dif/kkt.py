"""How far a point is from satisfying the optimality conditions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KKT:
    """Residuals of the optimality conditions, relative, so that rescaling the problem does not change them.

    stationarity: ‖∇L‖ / (h·max(1, ‖θ‖)), h the mean absolute diagonal of ∇²L: about the relative error of θ.
    feasibility: largest violation / (‖∇f‖·max(1, ‖θ‖)): about the relative distance to the feasible set.
    complementarity: the largest min(slack, λ), scaled alike; negative λ counts in full.
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
    """The units in which rows and multipliers are compared with tolerances."""

    h: float  # mean |diag ∇²L|
    size: float  # max(1, ‖θ‖)
    norms: Tensor  # (m,) ‖∇fⱼ‖

    @classmethod
    def of(cls, theta: Tensor, G: Tensor, h: float) -> Scales:
        """At θ, with the constraint gradients G (m, d) and the size of the Hessian of the Lagrangian."""
        return cls(h, max(1.0, float(theta.norm())), torch.linalg.vector_norm(G, dim=1))

    def slack(self, c: Tensor) -> Tensor:
        """−c in units of θ, relative to its size; c = f − τ."""
        return -c / (_safe(self.norms) * self.size)

    def multiplier(self, lam: Tensor) -> Tensor:
        """λ as the step that its force would make, relative to the size of θ."""
        return lam * self.norms / (_safe_number(self.h) * self.size)

    def gradient(self, g: Tensor) -> float:
        """‖g‖ as the step that it would make."""
        return float(g.norm()) / (_safe_number(self.h) * self.size)


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


def _safe(norms: Tensor) -> Tensor:
    return torch.where(norms > 0, norms, torch.ones_like(norms))


def _safe_number(h: float) -> float:
    return h if h > 0 else 1.0
