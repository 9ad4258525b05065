"""Fixed-point steps of many problems at once, combined with those before them (Anderson's acceleration)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_DEPTH = 10  # steps remembered
_HELD = 2**26  # numbers that may be remembered
_NEGLIGIBLE = 1e-12  # relative size, squared, of what is left of a remembered step beside the others


class Extrapolation:
    """Of moves r(z) that lead to r = 0, the combination of the past ones that cancels best is taken.

    Where z → z + r(z) closes in slowly along a few directions only (a curvature that differs by a few samples), as many
    steps find these out, and the rest goes quickly: each move costs what it costs, no derivatives of it are needed.

    >>> A = torch.diag(torch.tensor([1.9, 1.0, 0.2])).double()
    >>> extrapolation, z = Extrapolation(1, 3, lambda moves: moves), torch.ones(1, 3).double()
    >>> for _ in range(4):
    ...     z = z + extrapolation.combined(torch.tensor([0]), z, -z @ A)
    >>> bool(z.abs().max() < 1e-9)
    True
    """

    def __init__(self, problems: int, length: int, measured: Callable[[Tensor], Tensor]) -> None:
        self.measured = measured  # moves (..., length) in coordinates in which their lengths mean something
        self.depth = min(_DEPTH, _HELD // max(1, 2 * problems * length))
        self._points: list[Tensor] = []  # differences of successive points and moves, (P, length), newest last
        self._moves: list[Tensor] = []
        self._shape = (problems, length)
        self._last: tuple[Tensor, Tensor] | None = None

    def forget(self, which: Tensor) -> None:
        """Those problems begin anew: their moves are of another kind from now on."""
        for past in (*self._points, *self._moves):
            past[which] = 0.0
        if self._last is not None:
            self._last[0][which] = float("nan")

    def combined(self, which: Tensor, z: Tensor, r: Tensor) -> Tensor:
        """The step to make from z (p, length), where r (p, length) leads, for the problems listed."""
        if self.depth == 0:
            return r
        if self._last is None:
            self._last = tuple(torch.full(self._shape, float("nan")).to(r) for _ in range(2))  # type: ignore[assignment]
        assert self._last is not None
        for kept, now, last in ((self._points, z, self._last[0]), (self._moves, r, self._last[1])):
            difference = torch.zeros_like(last)
            difference[which] = torch.nan_to_num(now - last[which], nan=0.0)
            kept.append(difference)
            del kept[: -self.depth]
        self._last[0][which], self._last[1][which] = z, r
        dZ, dR = torch.stack(self._points, 1)[which], torch.stack(self._moves, 1)[which]  # (p, depth, length)
        F = self.measured(dR)
        sizes = torch.linalg.vector_norm(F, dim=2, keepdim=True)
        F = F / torch.where(sizes > 0, sizes, 1.0)
        gram, along = F @ F.mT, (F @ self.measured(r)[:, :, None])[:, :, 0]
        values, vectors = torch.linalg.eigh(gram)
        seen = values > _NEGLIGIBLE * len(self._moves)
        inverse = torch.where(seen, 1.0 / torch.where(seen, values, 1.0), 0.0)
        gamma = (vectors @ (inverse * (vectors.mT @ along[:, :, None])[:, :, 0])[:, :, None])[:, :, 0]
        gamma = gamma / torch.where(sizes > 0, sizes, 1.0)[:, :, 0]
        return r - ((dZ + dR) * gamma[:, :, None]).sum(1)
