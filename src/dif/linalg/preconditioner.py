"""Approximate inverses of H_ρ: preconditioners for conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dif.errors import DegenerateError

_FLOOR = 1e-7  # eigenvalues are raised to this, relative to the largest, so that flat directions do not get huge steps


@dataclass(frozen=True, eq=False)
class Metric:
    """u = |Λ|^½ Qᵀ √D θ, where Λ and Q are eigenvalues and eigenvectors of D^−½ H D^−½; u = √D θ without them."""

    root: Tensor  # (d,) √D
    size: Tensor | float = 1.0  # (d,) |Λ|^½, raised to the floor
    vectors: Tensor | None = None  # (d, d) Q

    def with_eigenpairs(self, eigenvalues: Tensor, vectors: Tensor) -> Metric:
        """Return the metric of these eigenvalues and eigenvectors of the scaled Hessian."""
        size = eigenvalues.abs()
        return Metric(self.root, size.clamp(min=_FLOOR * float(size.max())).sqrt(), vectors)

    def fit(self, H: Tensor) -> Metric:
        """Return the metric of an assembled Hessian like H (d, d)."""
        return self.with_eigenpairs(*torch.linalg.eigh(self.scale_hessian(H)))

    def to_u(self, theta: Tensor) -> Tensor:
        """Map θ to u."""
        scaled = self.root * theta
        return self.size * (scaled if self.vectors is None else self.vectors.T @ scaled)

    def to_theta(self, u: Tensor) -> Tensor:
        """Map u to θ."""
        scaled = u / self.size
        return (scaled if self.vectors is None else self.vectors @ scaled) / self.root

    def map_gradient(self, g: Tensor) -> Tensor:
        """Map a gradient with respect to θ to one with respect to u."""
        scaled = g / self.root
        return (scaled if self.vectors is None else self.vectors.T @ scaled) / self.size

    def scale_hessian(self, H: Tensor) -> Tensor:
        """Return D^−½ H D^−½."""
        return H / self.root / self.root[:, None]

    def apply(self, R: Tensor) -> Tensor:
        """Return Q |Λ|⁻¹ Qᵀ r for every column r of R (d, c), in the coordinates √D·θ."""
        return R if self.vectors is None else self.vectors @ ((R.T @ self.vectors) / self.size**2).T


def draw_columns(like: Tensor, columns: int, seed: int) -> Tensor:
    """Draw standard normal columns, (len(like), columns), of the type and device of `like`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(like), columns, generator=generator, dtype=torch.float64).to(like)


class Nystrom:
    """A randomised Nyström approximation of H_ρ from a few products (Frangella, Tropp and Udell).

    P⁻¹ = s·U S⁻¹ Uᵀ + (I − U Uᵀ), with the leading eigenpairs U, S of the sketch and s the smallest of them.

    Args:
        product: V → D^−½ H_ρ D^−½ V.
        columns: (d, rank) random columns.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], columns: Tensor) -> None:
        omega = torch.linalg.qr(columns).Q
        Y = product(omega)
        shift = torch.finfo(Y.dtype).eps * float(Y.norm())
        Y = Y + shift * omega
        core = omega.T @ Y
        L, failed = torch.linalg.cholesky_ex(0.5 * (core + core.T))
        if int(failed):
            raise negative_curvature_error(float(torch.linalg.eigvalsh(0.5 * (core + core.T))[0]))
        B = torch.linalg.solve_triangular(L, Y.T, upper=False).T
        self.U, S, _ = torch.linalg.svd(B, full_matrices=False)
        self.S = (S**2 - shift).clamp(min=torch.finfo(Y.dtype).eps * float(S[0]) ** 2)

    def apply(self, R: Tensor) -> Tensor:
        """Return P⁻¹r for every column r of R."""
        inside = self.U.T @ R
        return R + self.U @ ((self.S[-1] / self.S - 1.0)[:, None] * inside)


# Approximate inverses of D^−½ H_ρ D^−½, positive definite, where D is `Operator.scale()`
Preconditioner = Metric | Nystrom


def negative_curvature_error(found: float) -> DegenerateError:
    """Build the error for negative curvature."""
    return DegenerateError(
        f"The linear solver found curvature {found:.3g} along one direction.",
        "It must be positive along every direction.",
        "The curvature is not positive definite, so the linearised problem has no unique solution.",
        "Fit to a minimum (a saddle point has negative curvature), add a ridge to the objective, or pass damping (it "
        "changes the answer and is reported).",
    )
