"""Which constraints hold the solution, how sure that is, and whether the derivative exists there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dif.errors import DegenerateError
from dif.linalg.lanczos import tangent_curvature
from dif.linalg.operator import Operator
from dif.optimality.residuals import Scales
from dif.problem.kinds import Kinds


@dataclass(frozen=True)
class Margin:
    """How far single perturbations move what decides whether a row binds: its slack, or its multiplier."""

    largest: float
    median: float


@dataclass(frozen=True, eq=False)
class ActiveSet:
    """The rows of all constraints, parted into binding, weak and inactive.

    binding: f = τ and λ̄ > 0, and every equality. weak: f = τ and λ̄ = 0 (the paper's "non-binding"). Row numbers count
    through the constraints in order; `names` has their names.
    """

    binding: tuple[int, ...]
    weak: tuple[int, ...]
    inactive: tuple[int, ...]
    names: tuple[str, ...]
    slack: Tensor  # (m,) scaled, in relative units of θ
    force: Tensor  # (m,) scaled multipliers
    tolerance: float
    margins: Tensor  # (m,) distance of the deciding number from the tolerance: how far from being classed otherwise
    licq: float  # smallest singular value of the active gradients, rows scaled to length 1; 1 with none active
    curvature: float  # smallest eigenvalue of ∇²L on the tangent space of the binding rows; inf if that is {0}
    relative_curvature: float  # the same with every coordinate scaled to curve alike: of ∇²L / √(D Dᵀ)
    licq_floor: float  # at or below these two the derivative does not exist to working precision
    curvature_floor: float

    @classmethod
    def read(
        cls, names: tuple[str, ...], scales: Scales, c: Tensor, lam: Tensor, kinds: Kinds, G: Tensor, H: Operator,
        tolerance: float,
    ) -> ActiveSet:  # fmt: skip
        """Read it off c = f − τ, λ, the constraint gradients G and the Hessian H of the Lagrangian."""
        slack, force = scales.slack(c), scales.multiplier(lam)
        active = kinds.at_bound(slack, tolerance)
        binding = active & kinds.pushing(force, tolerance)
        weak, inactive = active & ~binding, ~active
        curvature, relative = tangent_curvature(H, G[binding], scales.root)
        deciding = torch.where(inactive, slack - tolerance, force - tolerance)
        inside = tolerance - torch.maximum(slack.abs(), force.abs())
        margins = torch.where(weak, inside, deciding)
        margins = torch.where(kinds.one_sided, margins, float("inf"))
        return cls(
            binding=_rows(binding),
            weak=_rows(weak),
            inactive=_rows(inactive),
            names=names,
            slack=slack,
            force=force,
            tolerance=tolerance,
            margins=margins,
            licq=_independence((G / scales.root)[active], scales.norms[active]),
            curvature=curvature,
            relative_curvature=relative,
            licq_floor=torch.finfo(G.dtype).eps ** 0.5,
            curvature_floor=torch.finfo(G.dtype).eps ** 0.75,
        )

    @property
    def active(self) -> tuple[int, ...]:
        """Binding and weak rows, in order."""
        return tuple(sorted(self.binding + self.weak))

    def mask(self, rows: tuple[int, ...]) -> Tensor:
        """Those rows as a mask over all, (m,) bool."""
        mask = torch.zeros_like(self.slack, dtype=torch.bool)
        mask[list(rows)] = True
        return mask

    @property
    def uncertain(self) -> tuple[int, ...]:
        """Rows whose deciding number lies within a factor of 100 of the tolerance."""
        low, high = 0.01 * self.tolerance, 100 * self.tolerance
        found = []
        for j in range(len(self.names)):
            if not torch.isfinite(self.margins[j]):
                continue
            deciding = self.slack[j] if j in self.inactive else self.force[j] if j in self.binding else None
            number = max(abs(self.slack[j]), abs(self.force[j])) if deciding is None else abs(deciding)
            if low < number < high:
                found.append(j)
        return tuple(found)

    @property
    def regular(self) -> bool:
        """Whether the directional derivative exists: LICQ and positive tangent curvature (paper, Theorem 5)."""
        return self.licq > self.licq_floor and self.relative_curvature > self.curvature_floor

    def check(self, *, damped: bool = False) -> None:
        """Raise where the derivative does not exist; damping makes up for curvature, not for independence."""
        if not self.licq > self.licq_floor:
            shown = ", ".join(self.names[j] for j in self.active)
            raise DegenerateError(
                f"independence of the active constraints ({shown})",
                measured=f"smallest singular value {self.licq:.3g} of their scaled gradients",
                threshold=f"above {self.licq_floor:.1e}",
                meaning="One active gradient depends on the others (LICQ fails), so the multipliers are not unique.",
                cure="Drop a redundant constraint, or state equal ones once; strict=False goes on with one choice.",
            )
        if not damped:
            self.check_curvature()

    def check_curvature(self) -> None:
        """Raise where the solution is not a strict minimum."""
        if not self.relative_curvature > self.curvature_floor:
            raise DegenerateError(
                "curvature of the Lagrangian along the binding constraints",
                measured=f"smallest eigenvalue {self.curvature:.3g}",
                threshold=f"above {self.curvature_floor:.1e} of each coordinate's own",
                meaning="The solution is not a strict minimum there (the second-order condition fails): it is not "
                "unique, or it is a saddle.",
                cure="Add a ridge, drop redundant parameters, or fit to a minimum.",
            )

    def __str__(self) -> str:
        lines = []
        for kind in ("binding", "weak", "inactive"):
            for j in getattr(self, kind):
                lines.append(f"{self.names[j]}: {kind} (relative slack {self.slack[j]:.2e}, force {self.force[j]:.2e})")
        lines.append(f"independence {self.licq:.2e}, tangent curvature {self.curvature:.3g}")
        return "\n".join(lines)


def _rows(mask: Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(mask).reshape(-1).tolist())


def _independence(G: Tensor, norms: Tensor) -> float:
    if len(G) == 0:
        return 1.0
    if len(G) > G.shape[1] or not bool((norms > 0).all()):
        return 0.0
    return float(torch.linalg.svdvals((G / norms[:, None]).double())[-1])
