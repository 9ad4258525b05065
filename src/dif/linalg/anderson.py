"""Anderson acceleration of fixed-point iterations, for many problems at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_DEPTH = 10  # past steps that are combined, at most: one per direction of slow convergence
_MAX_NUMBERS = 2**26  # numbers that the stored steps of all problems may take: 512 MiB in double precision
_NEGLIGIBLE = 1e-12  # eigenvalue of the Gram matrix of unit moves, per stored step, below which it is rounding


class Extrapolation:
    """Anderson acceleration: combine the latest move r(z) with past ones so that their sum is as small as possible.

    The iteration z → z + r(z) may converge slowly along a few directions only, for example because the Hessian in use
    differs from the true one by a few samples. One past step per such direction identifies them. No derivatives of r
    are needed.

    >>> A = torch.diag(torch.tensor([1.9, 1.0, 0.2])).double()
    >>> extrapolation, z = Extrapolation(1, 3, lambda moves: moves), torch.ones(1, 3).double()
    >>> for _ in range(4):
    ...     z = z + extrapolation.combine(torch.tensor([0]), z, -z @ A)
    >>> bool(z.abs().max() < 1e-9)
    True

    Args:
        problems: Number of problems P.
        length: Number of coordinates of z.
        rescale: Map moves (..., length) to coordinates in which their norm is meaningful.
    """

    def __init__(self, problems: int, length: int, rescale: Callable[[Tensor], Tensor]) -> None:
        self.rescale = rescale
        self.depth = min(_DEPTH, _MAX_NUMBERS // max(1, 2 * problems * length))
        self._differences: list[
            Tensor
        ] = []  # of successive points and of successive moves, (2, P, length), newest last
        self._shape = (2, problems, length)
        self._last: Tensor | None = None  # last point and last move, (2, P, length), NaN where there is none

    def forget(self, which: Tensor) -> None:
        """Discard the history of these problems, because their moves are of another kind from now on."""
        for difference in self._differences:
            difference[:, which] = 0.0
        if self._last is not None:
            self._last[:, which] = float("nan")

    def combine(self, which: Tensor, z: Tensor, r: Tensor) -> Tensor:
        """Return the accelerated step from z (p, length) with move r (p, length), for the problems `which` (p,)."""
        if self.depth == 0:
            return r
        now = torch.stack([z, r])
        if self._last is None:
            self._last = torch.full(self._shape, float("nan")).to(r)
        difference = torch.zeros_like(self._last)
        difference[:, which] = torch.nan_to_num(now - self._last[:, which], nan=0.0)
        self._differences.append(difference)
        del self._differences[: -self.depth]
        self._last[:, which] = now
        dZ, dR = torch.stack(self._differences, 2)[:, which]  # (p, depth, length) each
        F = self.rescale(dR)
        sizes = torch.linalg.vector_norm(F, dim=2, keepdim=True)
        sizes = torch.where(sizes > 0, sizes, 1.0)
        F, floor = F / sizes, _NEGLIGIBLE * len(self._differences)
        values, vectors = torch.linalg.eigh(F @ F.mT)
        inverse = torch.where(values > floor, 1.0 / values.clamp(min=floor), 0.0)[:, :, None]
        gamma = vectors @ (inverse * (vectors.mT @ (F @ self.rescale(r)[:, :, None]))) / sizes
        return r - ((dZ + dR) * gamma).sum(1)
