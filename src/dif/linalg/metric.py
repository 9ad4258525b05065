"""Coordinates u in which a function curves alike in all directions, so that steps of one length mean the same."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_FLOOR = 1e-7  # of the largest eigenvalue: flatter directions count as curved so much


@dataclass(frozen=True, eq=False)
class Metric:
    """u = |Λ|^½ Qᵀ √D θ, with the eigenvalues Λ and vectors Q of D^−½ H D^−½; only √D where these are not known."""

    root: Tensor  # (d,) √D
    eigenvalues: Tensor | None = None  # (d,) |Λ|, floored
    vectors: Tensor | None = None  # (d, d) Q

    def with_eigenpairs(self, eigenvalues: Tensor, vectors: Tensor) -> Metric:
        """By the absolute eigenvalues of the scaled Hessian."""
        size = eigenvalues.abs()
        return Metric(self.root, size.clamp(min=_FLOOR * float(size.max())), vectors)

    def to_u(self, theta: Tensor) -> Tensor:
        """θ → u."""
        scaled = self.root * theta
        if self.eigenvalues is None or self.vectors is None:
            return scaled
        return self.eigenvalues.sqrt() * (self.vectors.T @ scaled)

    def to_theta(self, u: Tensor) -> Tensor:
        """U → θ."""
        if self.eigenvalues is not None and self.vectors is not None:
            u = self.vectors @ (u / self.eigenvalues.sqrt())
        return u / self.root

    def gradient(self, g: Tensor) -> Tensor:
        """∇ with respect to θ → with respect to u."""
        scaled = g / self.root
        if self.eigenvalues is None or self.vectors is None:
            return scaled
        return (self.vectors.T @ scaled) / self.eigenvalues.sqrt()

    def scaled(self, H: Tensor) -> Tensor:
        """D^−½ H D^−½."""
        return H / self.root / self.root[:, None]

    def inverse(self, R: Tensor) -> Tensor:
        """Q |Λ|⁻¹ Qᵀ r for every column r of R (d, c), in √D·θ."""
        if self.eigenvalues is None or self.vectors is None:
            return R
        return self.vectors @ ((self.vectors.T @ R) / self.eigenvalues[:, None])
