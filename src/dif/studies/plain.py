"""Independent retraining: SciPy's L-BFGS-B on an augmented Lagrangian with autograd; shares no code with dif."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

Rows = Callable[[Tensor], Tensor]  # θ → (objective, constraint values minus their bounds)


def sample_losses(model: nn.Module, theta: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each image at the flat parameters θ."""
    parameters = dict(model.named_parameters())
    chunks = torch.split(theta, [t.numel() for t in parameters.values()])
    weights = {name: chunk.view_as(t) for (name, t), chunk in zip(parameters.items(), chunks, strict=True)}
    scores = torch.func.functional_call(model, weights, (images,))
    return nn.functional.cross_entropy(scores, labels, reduction="none")


def retrain(
    rows: Rows, theta: Tensor, lam: Tensor, penalty: float = 10.0, tol: float = 1e-7, rounds: int = 40
) -> tuple[Tensor, Tensor, float]:
    """Solve min f₀ s.t. c ≤ 0 from (θ, λ); return θ, λ ≥ 0 and the largest of ‖∇L‖∞, max c₊ and |λc|."""
    lam, residual, last_gap = lam.clone(), float("inf"), float("inf")
    for _ in range(rounds):

        def augmented_lagrangian(
            x: np.ndarray, lam: Tensor = lam, like: Tensor = theta, penalty: float = penalty
        ) -> tuple[float, np.ndarray]:
            point = torch.tensor(x).to(like).requires_grad_(True)
            values = rows(point)
            shifted = (lam + penalty * values[1:]).clamp(min=0)
            total = values[0] + ((shifted**2).sum() - (lam**2).sum()) / (2 * penalty)
            (gradient,) = torch.autograd.grad(total, point)
            return float(total.detach()), gradient.cpu().double().numpy()

        options = {"maxiter": 5000, "maxfun": 10_000, "maxcor": 100, "ftol": 0.0, "gtol": 0.3 * tol}
        start = theta.cpu().double().numpy()
        minimum = minimize(augmented_lagrangian, start, jac=True, method="L-BFGS-B", options=options)
        theta = torch.tensor(minimum.x).to(theta)
        point = theta.clone().requires_grad_(True)
        values = rows(point)
        lam = (lam + penalty * values[1:].detach()).clamp(min=0)
        (gradient,) = torch.autograd.grad(values[0] + lam @ values[1:], point)
        c = values[1:].detach()
        residual = max(float(gradient.abs().max()), float(c.clamp(min=0).max()), float((lam * c).abs().max()))
        if residual <= tol:
            break
        gap = float(torch.maximum(c, -lam / penalty).abs().max())
        penalty, last_gap = (penalty if gap < 0.1 * last_gap else 10 * penalty), gap
    return theta, lam, residual
