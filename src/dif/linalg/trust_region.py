"""Newton steps inside a ball; the curvature may be negative."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dif.linalg.conjugate_gradients import conjugate_gradients


def exact_step(eigenvalues: Tensor, vectors: Tensor, g: Tensor, radius: float) -> tuple[Tensor, float]:
    """Minimise gᵀp + ½pᵀHp over ‖p‖ ≤ radius, H given by eigenvalues (ascending) and vectors; return p and the minimum.

    >>> values, vectors = torch.tensor([-1.0, 2.0]).double(), torch.eye(2).double()
    >>> step, gain = exact_step(values, vectors, torch.tensor([0.0, 2.0]).double(), 2.0)
    >>> [round(x, 4) for x in step.abs().tolist()], round(gain, 4)
    ([1.8856, 0.6667], -2.6667)
    """
    slope = vectors.T @ g
    lowest = float(eigenvalues[0])
    size = float(slope.norm())

    def step(shift: float) -> Tensor:
        bent = eigenvalues + shift
        return -slope / torch.where(bent > 0, bent, torch.full_like(bent, float("inf")))

    low = max(0.0, -lowest)
    p = step(low)
    if lowest > 0 and float(p.norm()) <= radius:
        pass  # the Newton step lies inside the ball
    elif lowest <= 0 and not float(slope[eigenvalues <= lowest].norm()) > 1e-14 * size and float(p.norm()) < radius:
        p[0] = (radius**2 - float(p.norm()) ** 2) ** 0.5  # no slope along this direction: both signs are as good
    else:
        high = low + size / radius
        for _ in range(200):  # bisection on the secular equation ‖p(shift)‖ = radius
            middle = 0.5 * (low + high)
            low, high = (middle, high) if float(step(middle).norm()) > radius else (low, middle)
            if high - low <= 1e-14 * high:
                break
        p = step(high)
    return vectors @ p, float(slope @ p + 0.5 * (eigenvalues * p) @ p)


def steihaug_step(
    product: Callable[[Tensor], Tensor], g: Tensor, radius: float, limit: int, accuracy: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Minimise gᵀp + ½pᵀHp over ‖p‖ ≤ radius by conjugate gradients; return p and Hp.

    It stops at the border, or where the residual is small. A direction of negative curvature is followed to the border.
    """
    B = -g[:, None]
    tolerance = torch.full_like(B[0], accuracy)
    solved = conjugate_gradients(lambda D, _: product(D[:, 0])[:, None], B, tolerance, limit, radius=radius)
    return solved.X[:, 0], (B - solved.R)[:, 0]
