"""Steps of Newton's method inside a ball, where the curvature may be negative: it is used, not feared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def exact_step(eigenvalues: Tensor, vectors: Tensor, g: Tensor, radius: float) -> tuple[Tensor, float]:
    """Argmin of gᵀp + ½pᵀHp over ‖p‖ ≤ radius, H given by its eigenvalues (ascending) and vectors; and that minimum.

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
        pass  # Newton's own step
    elif lowest <= 0 and not float(slope[eigenvalues <= lowest].norm()) > 1e-14 * size and float(p.norm()) < radius:
        p[0] = (radius**2 - float(p.norm()) ** 2) ** 0.5  # no slope along the most negative direction: either way down
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
    """A step that does as well as conjugate gradients can inside ‖p‖ ≤ radius: p and Hp.

    It stops at the border, at negative curvature (followed to the border), or where the residual is small.
    """
    p, Hp, r = torch.zeros_like(g), torch.zeros_like(g), g.clone()
    d, rr = -r, float(r @ r)
    goal = (accuracy**2) * rr
    for _ in range(limit):
        if rr <= goal:
            break
        Hd = product(d)
        along = float(d @ Hd)
        alpha = rr / along if along > 0 else float("inf")
        beyond = along <= 0 or float((p + alpha * d).norm()) >= radius
        if beyond:
            alpha = _to_border(p, d, radius)
        p, Hp, r = p + alpha * d, Hp + alpha * Hd, r + alpha * Hd
        if beyond:
            break
        new = float(r @ r)
        d, rr = -r + (new / rr) * d, new
    return p, Hp


def _to_border(p: Tensor, d: Tensor, radius: float) -> float:
    a, b, c = float(d @ d), float(p @ d), float(p @ p) - radius**2
    return (-b + max(b * b - a * c, 0.0) ** 0.5) / a
