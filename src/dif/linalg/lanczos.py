"""Krylov spaces: tangent curvature by Lanczos steps, and trust-region steps inside such a space."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dif.linalg.solvers import Operator

_MAX_STEPS = 60  # largest number of Lanczos steps
_CHECK_EVERY = 6  # steps between two tests for convergence
_TOLERANCE = 1e-4  # relative residual of the smallest Ritz pair; the value is accurate to about its square
_ROUGH_TOLERANCE = 0.03  # the same where only the size of the eigenvalue matters
_EXHAUSTED = 1e-7  # residual of a Lanczos step, relative to the curvature, below which the space is exhausted


def tangent_curvature(H: Operator, G: Tensor, root: Tensor) -> tuple[float, float]:
    """Return the smallest eigenvalue of H on {ω : Gω = 0}, in θ and in the scaled coordinates root·θ, for large H.

    Both are inf if the tangent space is {0}. If H is assembled, the first is accurate to about eight digits and the
    second to a few per cent: where all eigenvalues are positive, they come from Lanczos steps of H⁻¹. Otherwise they
    are the smallest Ritz values of a Lanczos run.
    """
    if not H.assembled:
        return lanczos(H.product, G, torch.ones_like(root))[0], lanczos(H.product, G, root)[0]
    found = []
    for unit, tolerance in ((torch.ones_like(root).double(), _TOLERANCE), (root.double(), _ROUGH_TOLERANCE)):
        A, N = H.dense().double() / unit / unit[:, None], _normal_space(G.double() / unit)
        if N.shape[1] >= H.d:
            return float("inf"), float("inf")
        AN, norm = A @ N, float(torch.linalg.matrix_norm(A)) or 1.0
        W = AN - 0.5 * N @ (N.T @ AN + norm * torch.eye(N.shape[1]).to(A))
        A = torch.addmm(A, torch.cat([N, W], 1), torch.cat([W, N], 1).T, alpha=-1)  # ‖A‖ on the normal space
        factor, failed = torch.linalg.cholesky_ex(A)
        if int(failed):
            found.append(float(torch.linalg.eigvalsh(A)[0]))
        else:
            invert = lambda V, factor=factor: -torch.cholesky_solve(V, factor)  # noqa: E731
            found.append(-1.0 / lanczos(invert, A.new_zeros((0, H.d)), torch.ones_like(unit), tolerance)[0])
    return found[0], found[1]


def _normal_space(G: Tensor) -> Tensor:
    """Return an orthonormal basis of the space that the rows of G span, (d, k)."""
    lengths = torch.linalg.vector_norm(G, dim=1, keepdim=True)
    U, sizes, _ = torch.linalg.svd((G / lengths.clamp(min=torch.finfo(G.dtype).tiny)).T, full_matrices=False)
    return U[:, sizes > 1e-10]


def lanczos(
    product: Callable[[Tensor], Tensor], G: Tensor, root: Tensor, tolerance: float = _TOLERANCE
) -> tuple[float, Tensor]:
    """Return the smallest Ritz value of H on {ω : Gω = 0} and its vector, both in the coordinates root·θ.

    `product` returns H·v for the columns v of a matrix.
    """
    normal, d = _normal_space(G.double() / root.double()).to(G), len(root)
    if normal.shape[1] >= d:
        return float("inf"), torch.zeros_like(root)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(d, generator=generator, dtype=torch.float64).to(normal)
    krylov = Krylov(lambda v: product((v / root)[:, None])[:, 0] / root, start, normal)
    for step in range(1, 1 + min(_MAX_STEPS, d - normal.shape[1])):
        if not krylov.extend():
            break
        if step % _CHECK_EVERY == 0:
            values, vectors = krylov.diagonalise()
            if krylov.residual * abs(float(vectors[-1, 0])) <= tolerance * abs(float(values[0])):
                break
    values, vectors = krylov.diagonalise()
    return float(values[0]), krylov.basis @ vectors[:, 0].to(normal)


class Krylov:
    """Lanczos steps: an orthonormal basis Q of the span of v, Hv, H²v, … in which H is tridiagonal.

    Args:
        product: v → Hv for the symmetric matrix H.
        start: The vector v.
        normal: (d, k) orthonormal columns. H and v are projected to the space orthogonal to them.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], start: Tensor, normal: Tensor | None = None) -> None:
        self._product = product
        self._normal = start.new_zeros((len(start), 0)) if normal is None else normal
        start = start - self._normal @ (self._normal.T @ start)
        self._vectors = [start / start.norm()]  # one more than there are steps, unless the space is exhausted
        self._diagonal: list[float] = []
        self._off_diagonal: list[float] = []

    @property
    def basis(self) -> Tensor:
        """Q, (d, k)."""
        return torch.stack(self._vectors, 1)[:, : len(self._diagonal)]

    @property
    def residual(self) -> float:
        """‖HQ − QQᵀHQ‖: the part of HQ outside the space."""
        return self._off_diagonal[-1]

    def extend(self) -> bool:
        """Make one Lanczos step; return False if the space cannot grow further, or a product is not finite."""
        q = self._vectors[-1]
        w = self._product(q)
        if not bool(torch.isfinite(w).all()):
            return False
        self._diagonal.append(float(w @ q))
        Q = torch.cat([self._normal, torch.stack(self._vectors, 1)], 1)
        for _ in range(2):  # full reorthogonalisation; twice is enough, and keeps rounding errors out of the normals
            w = w - Q @ (Q.T @ w)
        self._off_diagonal.append(float(w.norm()))
        if not self._off_diagonal[-1] > _EXHAUSTED * max(abs(x) for x in self._diagonal):
            return False
        self._vectors.append(w / w.norm())
        return True

    def diagonalise(self) -> tuple[Tensor, Tensor]:
        """Return the eigenvalues (ascending) and eigenvectors of QᵀHQ, in double precision on the CPU."""
        main = torch.tensor(self._diagonal, dtype=torch.float64)
        off = torch.tensor(self._off_diagonal[:-1], dtype=torch.float64)
        return torch.linalg.eigh(torch.diag(main) + torch.diag(off, 1) + torch.diag(off, -1))


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
