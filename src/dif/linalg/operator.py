"""Symmetric matrices, assembled or given by matrix-vector products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Operator(Protocol):
    """Interface of a symmetric matrix H (d, d), assembled or given by matrix-vector products."""

    @property
    def d(self) -> int:
        """Dimension d."""
        ...

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and on the device of the matrix."""
        ...

    @property
    def assembled(self) -> bool:
        """Whether the matrix is available, or cheap enough to assemble."""
        ...

    def dense(self) -> Tensor:
        """Return the matrix, (d, d)."""
        ...

    def scale(self) -> Tensor:
        """Return the curvature of each coordinate, (d,), positive."""
        ...

    def product(self, V: Tensor) -> Tensor:
        """Return H·v for every column v of V (d, c)."""
        ...

    def with_rows(self, G: Tensor, R: Tensor, damping: float = 0.0) -> Operator:
        """Return H + GᵀRG + δI for G (m, d), the diagonal R (m,) and damping δ."""
        ...

    def sketch(self, evaluations: float | None = None) -> Operator | None:
        """Estimate the matrix from some samples if that is much cheaper; else return None.

        evaluations: Largest cost of the estimate, in evaluations of all losses.
        """
        ...

    def rough(self) -> Tensor:
        """Return the matrix, (d, d), in single precision if that is cheaper."""
        ...


@dataclass(frozen=True, eq=False)
class Matrix:
    """A symmetric matrix that is assembled."""

    H: Tensor  # (d, d)
    assembled = True

    @property
    def d(self) -> int:
        """Dimension d."""
        return len(self.H)

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and on the device of the matrix."""
        return self.H

    def dense(self) -> Tensor:
        """Return the matrix, (d, d)."""
        return self.H

    def scale(self) -> Tensor:
        """Return the curvature of each coordinate, (d,): the absolute diagonal, see `coordinate_curvature`."""
        return positive(coordinate_curvature(self.H))

    def product(self, V: Tensor) -> Tensor:
        """Return H·v for every column v of V (d, c)."""
        return self.H @ V

    def with_rows(self, G: Tensor, R: Tensor, damping: float = 0.0) -> Matrix:
        """Return H + GᵀRG + δI for G (m, d), the diagonal R (m,) and damping δ."""
        H = torch.addmm(self.H, G.T, R[:, None] * G) if len(G) else self.H
        return Matrix(H + damping * torch.eye(self.d).to(H) if damping else H)

    def sketch(self, evaluations: float | None = None) -> None:
        """Return None: the matrix is available already."""

    def rough(self) -> Tensor:
        """Return the matrix, (d, d), as it is."""
        return self.H


def coordinate_curvature(H: Tensor) -> Tensor:
    """Return |diagonal of H|, (d,); for an entry of 0, the curvature through coupling to others (as in θ₁θ₂)."""
    D = H.diagonal().abs()
    flat = 1e-24 * D.max() >= D if len(D) else D > 0
    if not bool(flat.any()):
        return D
    divisor = torch.where(flat, torch.ones_like(D), D)
    coupling = torch.where(flat, H.abs(), H**2 / divisor)  # (d, d), column l: through coordinate l
    return torch.where(flat, coupling.amax(1), D)


def positive(D: Tensor) -> Tensor:
    """Return D (d,) with the mean of its positive finite entries in place of all others (1 if there are none)."""
    valid = (D > 0) & torch.isfinite(D)
    return torch.where(valid, D, D[valid].mean() if bool(valid.any()) else torch.ones_like(D[:1]).sum())
