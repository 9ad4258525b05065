"""Symmetric matrices, assembled or given by their products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Operator(Protocol):
    """A symmetric matrix, assembled or not."""

    @property
    def d(self) -> int:
        """Its size."""
        ...

    @property
    def like(self) -> Tensor:
        """A tensor of its type, on its device."""
        ...

    @property
    def assembled(self) -> bool:
        """Whether the matrix can be had at a fair price."""
        ...

    def dense(self) -> Tensor:
        """The matrix, (d, d)."""
        ...

    def scale(self) -> Tensor:
        """How much each coordinate curves, (d,), positive."""
        ...

    def product(self, V: Tensor) -> Tensor:
        """H·v for every column v of V (d, c)."""
        ...

    def with_rows(self, G: Tensor, R: Tensor, damping: float = 0.0) -> Operator:
        """Add GᵀRG and δI."""
        ...

    def sketched(self, evaluations: float | None = None) -> Operator | None:
        """Estimate the matrix from some samples, where that is much cheaper; None where it is not."""
        ...

    def rough(self) -> Tensor:
        """The matrix in single precision, where that is cheaper, (d, d)."""
        ...

    def to(self, dtype: torch.dtype) -> Operator:
        """Convert to another precision."""
        ...


@dataclass(frozen=True, eq=False)
class Matrix:
    """An assembled Hessian."""

    H: Tensor  # (d, d)
    assembled = True

    @property
    def d(self) -> int:
        """Its size."""
        return len(self.H)

    @property
    def like(self) -> Tensor:
        """A tensor of its type, on its device."""
        return self.H

    def dense(self) -> Tensor:
        """The matrix."""
        return self.H

    def scale(self) -> Tensor:
        """How much each coordinate curves: the absolute diagonal."""
        return positive(curved(self.H))

    def product(self, V: Tensor) -> Tensor:
        """H·v for every column v of V (d, c)."""
        return self.H @ V

    def with_rows(self, G: Tensor, R: Tensor, damping: float = 0.0) -> Matrix:
        """With GᵀRG and δI in it."""
        H = torch.addmm(self.H, G.T, R[:, None] * G) if len(G) else self.H
        return Matrix(H + damping * torch.eye(self.d).to(H) if damping else H)

    def sketched(self, evaluations: float | None = None) -> None:
        """None: the matrix is there."""

    def rough(self) -> Tensor:
        """The matrix."""
        return self.H

    def to(self, dtype: torch.dtype) -> Matrix:
        """Convert to another precision."""
        return Matrix(self.H.to(dtype))


def curved(H: Tensor) -> Tensor:
    """|diagonal|; where that vanishes, what the coordinate's coupling to others amounts to (θ₁θ₂ curves too)."""
    D = H.diagonal().abs()
    flat = 1e-24 * D.max() >= D if len(D) else D > 0
    if not bool(flat.any()):
        return D
    curved = torch.where(flat, torch.ones_like(D), D)
    through = torch.where(flat, H.abs(), H**2 / curved)  # (d, d), column l: by way of coordinate l
    return torch.where(flat, through.amax(1), D)


def positive(D: Tensor) -> Tensor:
    """D, where a coordinate that does not curve at all counts as the average one."""
    some = D[(D > 0) & torch.isfinite(D)]
    return torch.where((D > 0) & torch.isfinite(D), D, some.mean() if len(some) else torch.ones_like(D[:1]).sum())
