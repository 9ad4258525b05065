"""Scaled coordinates u in which a function has about the same curvature in all directions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_FLOOR = 1e-7  # eigenvalues are raised to this, relative to the largest, so that flat directions do not get huge steps


@dataclass(frozen=True, eq=False)
class Metric:
    """u = |Λ|^½ Qᵀ √D θ, where Λ and Q are eigenvalues and eigenvectors of D^−½ H D^−½; u = √D θ without them."""

    root: Tensor  # (d,) √D
    eigenvalues: Tensor | None = None  # (d,) |Λ|, raised to the floor
    vectors: Tensor | None = None  # (d, d) Q

    def with_eigenpairs(self, eigenvalues: Tensor, vectors: Tensor) -> Metric:
        """Return the metric of these eigenvalues and eigenvectors of the scaled Hessian."""
        size = eigenvalues.abs()
        return Metric(self.root, size.clamp(min=_FLOOR * float(size.max())), vectors)

    def to_u(self, theta: Tensor) -> Tensor:
        """Map θ to u."""
        scaled = self.root * theta
        if self.eigenvalues is None or self.vectors is None:
            return scaled
        return self.eigenvalues.sqrt() * (self.vectors.T @ scaled)

    def to_theta(self, u: Tensor) -> Tensor:
        """Map u to θ."""
        if self.eigenvalues is not None and self.vectors is not None:
            u = self.vectors @ (u / self.eigenvalues.sqrt())
        return u / self.root

    def map_gradient(self, g: Tensor) -> Tensor:
        """Map a gradient with respect to θ to one with respect to u."""
        scaled = g / self.root
        if self.eigenvalues is None or self.vectors is None:
            return scaled
        return (self.vectors.T @ scaled) / self.eigenvalues.sqrt()

    def scale_hessian(self, H: Tensor) -> Tensor:
        """Return D^−½ H D^−½."""
        return H / self.root / self.root[:, None]

    def apply(self, R: Tensor) -> Tensor:
        """Return Q |Λ|⁻¹ Qᵀ r for every column r of R (d, c), in the coordinates √D·θ."""
        if self.eigenvalues is None or self.vectors is None:
            return R
        return self.vectors @ ((self.vectors.T @ R) / self.eigenvalues[:, None])
