"""A retraining that shares nothing with dif's: SciPy's L-BFGS-B on an augmented Lagrangian, gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

Rows = Callable[[Tensor], Tensor]  # θ → (objective, constraint values minus their bounds)


def losses(model: nn.Module, theta: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each image with the parameters θ, flat."""
    known = dict(model.named_parameters())
    pieces = torch.split(theta, [t.numel() for t in known.values()])
    weights = {name: piece.view_as(t) for (name, t), piece in zip(known.items(), pieces, strict=True)}
    out = torch.func.functional_call(model, weights, (images,))
    return nn.functional.cross_entropy(out, labels, reduction="none")


def retrained(
    rows: Rows, theta: Tensor, lam: Tensor, penalty: float = 10.0, tol: float = 1e-7, rounds: int = 40
) -> tuple[Tensor, Tensor, float]:
    """θ, λ ≥ 0 and the largest of ‖∇L‖, violation and |λc| at a KKT point of min f₀ s.t. c ≤ 0, from (θ, λ)."""
    lam, worst, missed = lam.clone(), float("inf"), float("inf")
    for _ in range(rounds):

        def value(
            x: np.ndarray, lam: Tensor = lam, like: Tensor = theta, penalty: float = penalty
        ) -> tuple[float, np.ndarray]:
            point = torch.tensor(x).to(like).requires_grad_(True)
            out = rows(point)
            force = (lam + penalty * out[1:]).clamp(min=0)
            total = out[0] + ((force**2).sum() - (lam**2).sum()) / (2 * penalty)
            (slope,) = torch.autograd.grad(total, point)
            return float(total.detach()), slope.cpu().double().numpy()

        options = {"maxiter": 5000, "maxfun": 10_000, "maxcor": 100, "ftol": 0.0, "gtol": 0.3 * tol}
        found = minimize(value, theta.cpu().double().numpy(), jac=True, method="L-BFGS-B", options=options)
        theta = torch.tensor(found.x).to(theta)
        point = theta.clone().requires_grad_(True)
        out = rows(point)
        lam = (lam + penalty * out[1:].detach()).clamp(min=0)
        (slope,) = torch.autograd.grad(out[0] + lam @ out[1:], point)
        c = out[1:].detach()
        worst = max(float(slope.abs().max()), float(c.clamp(min=0).max()), float((lam * c).abs().max()))
        if worst <= tol:
            break
        gap = float(torch.maximum(c, -lam / penalty).abs().max())
        penalty, missed = (penalty if gap < 0.1 * missed else 10 * penalty), gap
    return theta, lam, worst
