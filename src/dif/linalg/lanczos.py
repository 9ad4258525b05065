"""Smallest eigenvalues of symmetric matrices on the tangent space of some rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dif.linalg.operator import Operator

_LANCZOS = 60  # steps
_LOOKED_AT = 6  # every so many of them: whether the smallest value has settled,
_SETTLED = 1e-4  # its residual within this of it: the value itself within about the square;
_JUDGED = 0.03  # enough where only its size is asked for
_ITERATED = 128  # parameters from which that is cheaper than all eigenvalues


def tangent_curvature(H: Operator, G: Tensor, root: Tensor) -> tuple[float, float]:
    """The smallest eigenvalue of H on {ω : Gω = 0}, as it is and in the coordinates root·θ.

    inf if the tangent space is {0}. Where H is assembled, to about eight digits, the scaled one to a few per cent (its
    size is what is judged); else the smallest Ritz value of a Lanczos run.
    """
    if H.assembled:
        dense, root = H.dense().double(), root.double()
        scaled = dense / root / root[:, None]
        return _smallest(dense, G.double()), _smallest(scaled, G.double() / root, _JUDGED)
    return lanczos(H, G, torch.ones_like(root))[0], lanczos(H, G, root)[0]


def _unit(G: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(G, dim=1, keepdim=True)
    return G / lengths.clamp(min=torch.finfo(G.dtype).tiny)


def _smallest(H: Tensor, G: Tensor, settled: float = _SETTLED) -> float:
    if len(G):
        U, sizes, _ = torch.linalg.svd(_unit(G).T, full_matrices=False)
        N = U[:, sizes > 1e-10]  # (d, k) across the tangent space
        if N.shape[1] >= len(H):
            return float("inf")
        HN, height = H @ N, float(torch.linalg.matrix_norm(H)) or 1.0
        W = HN - 0.5 * N @ (N.T @ HN + height * torch.eye(N.shape[1]).to(H))
        H = torch.addmm(H, torch.cat([N, W], 1), torch.cat([W, N], 1).T, alpha=-1)  # steep across, as it was along
    if len(H) >= _ITERATED:
        factor, failed = torch.linalg.cholesky_ex(H)
        if not int(failed):
            nothing, one = H.new_zeros((0, len(H))), torch.ones_like(H[0])
            return -1.0 / lanczos(_Inverse(factor), nothing, one, settled)[0]
    return float(torch.linalg.eigvalsh(H)[0]) if len(H) else float("inf")


@dataclass(frozen=True)
class _Inverse:
    """−H⁻¹, its smallest eigenvalue first: −1/λ."""

    factor: Tensor

    @property
    def d(self) -> int:
        return len(self.factor)

    def product(self, V: Tensor) -> Tensor:
        return -torch.cholesky_solve(V, self.factor)


def lanczos(H: Operator | _Inverse, G: Tensor, root: Tensor, settled: float = _SETTLED) -> tuple[float, Tensor]:
    """Smallest Ritz value of H on {Gω = 0}, in the coordinates root·θ, and its direction there."""
    U, sizes, _ = torch.linalg.svd(_unit(G.double() / root.double()).T, full_matrices=False)
    normal = U[:, sizes > 1e-10].to(G)
    if normal.shape[1] >= H.d:
        return float("inf"), torch.zeros_like(root)

    def tangent(v: Tensor) -> Tensor:
        return v - normal @ (normal.T @ v)

    generator = torch.Generator().manual_seed(0)
    v = tangent(torch.randn(H.d, generator=generator, dtype=torch.float64).to(normal))
    basis, diagonal, beside = [v / v.norm()], [], []
    for _ in range(min(_LANCZOS, H.d - normal.shape[1])):
        w = tangent(H.product((basis[-1] / root)[:, None])[:, 0] / root)
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):  # full reorthogonalisation, twice is enough
            Q = torch.stack(basis, 1)
            w = tangent(w - Q @ (Q.T @ w))
        beside.append(float(w.norm()))
        if beside[-1] <= 1e-7 * max(abs(x) for x in diagonal):
            break
        if len(diagonal) % _LOOKED_AT == 0:
            values, vectors = _tridiagonal(diagonal, beside[:-1])
            if beside[-1] * abs(float(vectors[-1, 0])) <= settled * abs(float(values[0])):
                break
        basis.append(w / w.norm())
    values, vectors = _tridiagonal(diagonal, beside[:-1])
    return float(values[0]), torch.stack(basis[: len(diagonal)], 1) @ vectors[:, 0].to(normal)


def _tridiagonal(diagonal: list[float], beside: list[float]) -> tuple[Tensor, Tensor]:
    along, off = torch.tensor(diagonal, dtype=torch.float64), torch.tensor(beside, dtype=torch.float64)
    return torch.linalg.eigh(torch.diag(along) + torch.diag(off, 1) + torch.diag(off, -1))
