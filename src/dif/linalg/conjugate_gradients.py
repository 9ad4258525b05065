"""H_ρ X = B without the matrix: preconditioned conjugate gradients on all columns at once, true residuals checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dif.errors import DegenerateError, NotConvergedError
from dif.linalg.metric import Metric
from dif.linalg.operator import Operator

_SOLVING = 24_000  # evaluations of all losses that a preconditioner may cost: no more than solving without it
_PATIENCE = 300  # iterations without progress after which a solve counts as stalled


class Preconditioner(Protocol):
    """An approximate inverse of H_ρ."""

    def apply(self, R: Tensor) -> Tensor:
        """P⁻¹·r for every column of R (d, c)."""
        ...


@dataclass(frozen=True, eq=False)
class Scaled:
    """D^−½ H D^−½: the same operator in coordinates that curve alike."""

    operator: Operator
    root: Tensor  # √D

    @classmethod
    def of(cls, operator: Operator) -> Scaled:
        """Scaled by its own diagonal."""
        return cls(operator, operator.scale().sqrt())

    @property
    def d(self) -> int:
        """Its size."""
        return self.operator.d

    @property
    def like(self) -> Tensor:
        """A tensor of its type, on its device."""
        return self.root

    def product(self, V: Tensor) -> Tensor:
        """D^−½ H D^−½·v for every column v of V."""
        return self.operator.product(V / self.root[:, None]) / self.root[:, None]


class Nystrom:
    """H_ρ seen through a few products with random vectors (Frangella, Tropp, Udell: randomised Nyström).

    P⁻¹ = s·U S⁻¹ Uᵀ + (I − U Uᵀ), with the leading eigenpairs U, S of the sketch and s the smallest of them.
    """

    def __init__(self, curvature: Scaled, rank: int = 64, seed: int = 0) -> None:
        omega = torch.linalg.qr(_drawn(curvature, min(rank, curvature.d), seed)).Q
        Y = curvature.product(omega)
        shift = torch.finfo(Y.dtype).eps * float(Y.norm())
        Y = Y + shift * omega
        core = omega.T @ Y
        L, failed = torch.linalg.cholesky_ex(0.5 * (core + core.T))
        if int(failed):
            raise not_positive(float(torch.linalg.eigvalsh(0.5 * (core + core.T))[0]))
        B = torch.linalg.solve_triangular(L, Y.T, upper=False).T
        U, S, _ = torch.linalg.svd(B, full_matrices=False)
        self.U = U
        self.S = (S**2 - shift).clamp(min=torch.finfo(Y.dtype).eps * float(S[0]) ** 2)

    def apply(self, R: Tensor) -> Tensor:
        """P⁻¹·r for every column of R."""
        inside = self.U.T @ R
        return R + self.U @ ((self.S[-1] / self.S - 1.0)[:, None] * inside)


class Sketch:
    """|H_ρ| assembled from some of the samples: eigenvalues by their absolute value, the smallest raised."""

    def __init__(self, curvature: Scaled, sketched: Operator) -> None:
        metric = Metric(curvature.root)
        self.metric = metric.with_eigenpairs(*torch.linalg.eigh(metric.scaled(sketched.rough())))

    def apply(self, R: Tensor) -> Tensor:
        """P⁻¹·r for every column of R."""
        return self.metric.inverse(R)


def chosen_preconditioner(curvature: Scaled, rank: int) -> Preconditioner | None:
    """A sketch of the matrix where it can be assembled from some of the samples, else Nyström's."""
    operator = curvature.operator
    sketched = operator.sketched(_SOLVING) if rank else None
    if sketched is not None:
        return Sketch(curvature, sketched)
    return Nystrom(curvature, rank) if rank else None


class ConjugateGradients:
    """Conjugate gradients on H_ρ, prepared once (the preconditioner), then any number of right-hand sides.

    Every solve ends with residuals computed afresh; where they miss the tolerance it goes on from there. It raises
    where the curvature is negative along a direction it meets, and where it stalls: it never returns quietly.

    Args:
        curvature: H_ρ as an operator.
        tolerance: ‖B − H X‖ / ‖B‖ to reach in every column, in coordinates that curve alike (None: 3e-11 in float64,
            3e-5 in float32).
        max_iter: Limit on iterations per solve.
        rank: Of the Nyström preconditioner; 0 for none but the diagonal. Where the matrix of a fair number of samples
            can be assembled, its inverse preconditions instead.
        preconditioner: One that is known already, of a curvature nearby.
    """

    def __init__(
        self,
        curvature: Operator,
        *,
        tolerance: float | None = None,
        max_iter: int = 5000,
        rank: int = 64,
        preconditioner: Preconditioner | None = None,
    ) -> None:
        self.curvature = Scaled.of(curvature)
        self.tolerance = tolerance if tolerance is not None else torch.finfo(curvature.like.dtype).eps ** 0.672
        self.max_iter = max_iter
        self.residual = 0.0  # the largest seen, relative
        self.steps = 0  # products with all columns, over all solves
        self.preconditioner = preconditioner
        self._check_sign()
        if preconditioner is None:
            self.preconditioner = chosen_preconditioner(self.curvature, rank)

    def _check_sign(self) -> None:
        """A few steps on a random right-hand side: negative curvature is better met now than in the middle of work."""
        b = _drawn(self.curvature, 1, seed=1)
        self._run(b, 1e-3 * b.norm(dim=0), 30)

    def solve(self, B: Tensor) -> Tensor:
        """X with H_ρ X = B, every column to the tolerance."""
        B = B / self.curvature.root[:, None]
        X = torch.zeros_like(B)
        norms = torch.linalg.vector_norm(B, dim=0)
        live = norms > 0
        goal, left, spent = self.tolerance * norms, B.clone(), 0
        last = float("inf")
        while bool(live.any()):
            step, used = self._run(left[:, live], 0.5 * goal[live], self.max_iter - spent)
            X[:, live] += step
            spent += used
            left = B - self.curvature.product(X)
            self.steps += 1
            gaps = torch.linalg.vector_norm(left, dim=0) / norms.clamp(min=torch.finfo(B.dtype).tiny)
            worst = float(gaps.max())
            if worst <= self.tolerance:
                self.residual = max(self.residual, worst)
                break
            if spent >= self.max_iter or not worst < 0.5 * last:
                raise NotConvergedError(
                    "relative residual of the linear solve",
                    measured=f"{worst:.3g} after {spent} iterations of conjugate gradients",
                    threshold=f"{self.tolerance:.3g}",
                    meaning="The curvature is too badly conditioned for this precision.",
                    cure="Raise max_iter or rank, work in float64, add a ridge, or pass damping (it is reported).",
                )
            last, live = worst, gaps > self.tolerance
        return X / self.curvature.root[:, None]

    def approximate(self, B: Tensor) -> Tensor:
        """What the preconditioner makes of B."""
        root = self.curvature.root[:, None]
        return self._precondition(B / root) / root

    def _run(self, B: Tensor, goal: Tensor, limit: int) -> tuple[Tensor, int]:
        """Conjugate gradients from zero until the recursive residual of every column meets its goal."""
        X, R = torch.zeros_like(B), B.clone()
        Z = self._precondition(R)
        D, rz = Z.clone(), (R * Z).sum(0)
        live = torch.linalg.vector_norm(R, dim=0) > goal
        used, best, since = 0, float("inf"), 0
        while bool(live.any()) and used < limit and since < _PATIENCE:
            used += 1
            some = torch.nonzero(live).reshape(-1)
            d = D[:, some]
            Hd = self.curvature.product(d)
            along = (d * Hd).sum(0)
            if not bool((along > 0).all()):
                length = (d * d).sum(0)
                raise not_positive(float((along / length).min()))
            alpha = rz[some] / along
            X[:, some] += alpha * d
            R[:, some] -= alpha * Hd
            Z = self._precondition(R[:, some])
            new = (R[:, some] * Z).sum(0)
            D[:, some] = Z + (new / rz[some]) * d
            rz[some] = new
            sizes = torch.linalg.vector_norm(R, dim=0)
            live = sizes > goal
            worst = float((sizes[live] / goal[live]).max()) if bool(live.any()) else 0.0
            best, since = (worst, 0) if worst < 0.9 * best else (best, since + 1)
        self.steps += used
        return X, used

    def _precondition(self, R: Tensor) -> Tensor:
        return R.clone() if self.preconditioner is None else self.preconditioner.apply(R)


class Repeated:
    """Prepares conjugate gradients for operators near each other: one preconditioner serves them all."""

    def __init__(self) -> None:
        self.tolerance: float | None = None  # of the next one
        self._known: Preconditioner | None = None

    def __call__(self, curvature: Operator) -> ConjugateGradients:
        """One more."""
        solver = ConjugateGradients(curvature, tolerance=self.tolerance, preconditioner=self._known)
        self._known = solver.preconditioner
        return solver

    def forget(self) -> None:
        """The next operator is far from those before: it gets a preconditioner of its own."""
        self._known = None


def not_positive(found: float) -> DegenerateError:
    """Negative curvature was met."""
    return DegenerateError(
        "curvature met by the linear solver",
        measured=f"{found:.3g} along one direction",
        threshold="positive along all",
        meaning="The curvature is not positive definite, so the linearised problem has no unique solution.",
        cure="Fit to a minimum (a saddle has negative curvature), add a ridge to the objective, or pass damping (it "
        "changes the answer and is reported).",
    )


def _drawn(curvature: Scaled, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(curvature.d, columns, generator=generator, dtype=torch.float64).to(curvature.like)
