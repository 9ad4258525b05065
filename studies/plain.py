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
    return nn.functional.cross_entropy(_evaluate(model, theta, images), labels, reduction="none")


def _evaluate(model: nn.Module, theta: Tensor, images: Tensor) -> Tensor:
    """Return the class scores of each image at the flat parameters θ."""
    parameters = dict(model.named_parameters())
    chunks = torch.split(theta, [t.numel() for t in parameters.values()])
    weights = {name: chunk.view_as(t) for (name, t), chunk in zip(parameters.items(), chunks, strict=True)}
    return torch.func.functional_call(model, weights, (images,))


def whiten(model: nn.Module, theta: Tensor, images: Tensor, l2: float, chunk: int = 250) -> Tensor:
    """Return W, (d, d), for which the curvature in u is about the same in all directions if θ moves by W·u.

    W Wᵀ is the inverse of the ridge plus the Gauss–Newton matrix of the mean cross-entropy.
    """

    def scores(theta: Tensor, image: Tensor) -> Tensor:
        return _evaluate(model, theta, image[None])[0]

    H = l2 * torch.eye(len(theta)).to(theta)
    for some in torch.split(images, chunk):
        J = torch.func.vmap(torch.func.jacrev(scores), (None, 0))(theta, some).detach()
        p = torch.softmax(_evaluate(model, theta, some), 1).detach()
        centred = J - (p[:, None] @ J)  # Jᵀ(diag p − p pᵀ)J = Σₖ pₖ (Jₖ − p·J)(Jₖ − p·J)ᵀ
        H += torch.einsum("nkd,nk,nke->de", centred, p, centred) / len(images)
    return torch.linalg.inv(torch.linalg.cholesky(H)).T


def retrain(
    rows: Rows, theta: Tensor, lam: Tensor, W: Tensor, penalty: float = 10.0, tol: float = 1e-7, rounds: int = 40
) -> tuple[Tensor, Tensor, float]:
    """Solve min f₀ s.t. c ≤ 0 from (θ, λ), in coordinates u with θ + W·u.

    Returns:
        θ, λ ≥ 0 and the largest of ‖∇L‖∞, max c₊ and |λc|.
    """
    lam, residual, last_gap = lam.clone(), float("inf"), float("inf")
    for _ in range(rounds):

        def augmented_lagrangian(
            x: np.ndarray, lam: Tensor = lam, like: Tensor = theta, penalty: float = penalty
        ) -> tuple[float, np.ndarray]:
            point = (like + W @ torch.tensor(x).to(like)).requires_grad_(True)
            values = rows(point)
            shifted = (lam + penalty * values[1:]).clamp(min=0)
            total = values[0] + ((shifted**2).sum() - (lam**2).sum()) / (2 * penalty)
            (gradient,) = torch.autograd.grad(total, point)
            return float(total.detach()), (W.T @ gradient).cpu().double().numpy()

        options = {"maxiter": 5000, "maxfun": 10_000, "maxcor": 100, "ftol": 0.0, "gtol": 0.03 * tol}
        minimum = minimize(augmented_lagrangian, np.zeros(len(theta)), jac=True, method="L-BFGS-B", options=options)
        theta = theta + W @ torch.tensor(minimum.x).to(theta)
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
