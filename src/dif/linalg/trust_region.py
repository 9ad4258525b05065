"""Newton steps inside a ball; the curvature may be negative."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dif.linalg.lanczos import Krylov


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


class KrylovModel:
    """Newton's model gᵀp + ½pᵀHp on a Krylov space, which is large enough for a good step in the ball ‖p‖ ≤ radius.

    Lanczos steps are made until the gradient of the model at its minimum in the ball is small outside the space.

    Args:
        product: v → Hv.
        g: The gradient, not zero.
        radius: Radius of the ball; smaller balls need no more products.
        limit: Largest number of products.
        accuracy: Size of the gradient at the minimum, relative to g.
    """

    def __init__(
        self, product: Callable[[Tensor], Tensor], g: Tensor, radius: float, limit: int, accuracy: float = 0.1
    ) -> None:
        self._krylov, self._size = Krylov(product, g), float(g.norm())
        check_at = 1
        for step in range(1, 1 + min(limit, len(g))):
            grows = self._krylov.extend()
            if not grows or step == check_at:
                check_at = step + max(1, step // 8)
                p, _ = self._minimise(radius)
                if not grows or self._krylov.residual * abs(float(p[-1])) <= accuracy * self._size:
                    return

    def step(self, radius: float) -> tuple[Tensor, float]:
        """Minimise the model over ‖p‖ ≤ radius; return p and the minimum."""
        p, gain = self._minimise(radius)
        return self._krylov.basis @ p.to(self._krylov.basis), gain

    def _minimise(self, radius: float) -> tuple[Tensor, float]:
        """Minimise the model over ‖p‖ ≤ radius; return p in the basis of the space, and the minimum."""
        values, vectors = self._krylov.diagonalise()
        if len(values) == 0:  # the first product was not finite
            return values, 0.0
        slope = torch.zeros_like(values)
        slope[0] = self._size  # the first vector of the basis is g/‖g‖
        return exact_step(values, vectors, slope, radius)
