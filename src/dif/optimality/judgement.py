"""Judge a point (θ, λ): residuals, active set and findings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dif.errors import DegenerateError, DifError
from dif.linalg.lanczos import tangent_curvature
from dif.linalg.operator import Operator
from dif.problem.term import Kinds

GOOD, NOTE, BAD = "good", "note", "bad"  # verdicts: the condition holds, holds with a reservation, fails


@dataclass(frozen=True)
class Finding:
    """The answer to one question about a point, in sentences."""

    what: str  # the question
    verdict: str  # good, note or bad
    found: str
    meaning: str
    cure: str = ""
    allowed: str = ""
    error: type[DifError] = DifError  # raised by `check` where the verdict is bad
    otherwise: str = ""  # how a caller can go on regardless; only the error says it

    @property
    def measured(self) -> str:
        """The text of `found`, followed by that of `allowed` if there is one."""
        return f"{self.found} {self.allowed}".strip()

    def check(self) -> None:
        """Raise where the verdict is bad."""
        if self.verdict == BAD:
            raise self.error(self.found, self.allowed, self.meaning, f"{self.cure} {self.otherwise}".strip())


@dataclass(frozen=True)
class KKT:
    """Residuals of the optimality conditions. Rescaling the problem, its rows or its parameters does not change them.

    Each is the length of a step of θ, in units of the step that random weights on the samples cause (see `Scales`).
    stationarity: the step that ∇L causes.
    feasibility: the step to the farthest violated constraint.
    complementarity: the largest min(slack, λ), both as steps; a negative λ counts in full.
    gradient_norm: ‖∇L‖, not scaled.
    """

    stationarity: float
    feasibility: float
    complementarity: float
    gradient_norm: float
    rounding: float = 0.0  # the step that rounding of θ amounts to: residuals do not fall much below it

    @property
    def residual(self) -> float:
        """The largest of the three; NaN if one of them is."""
        parts = self.parts.values()
        return float("nan") if any(part != part for part in parts) else max(parts)

    @property
    def parts(self) -> dict[str, float]:
        """The three residuals by name."""
        names = ("stationarity", "feasibility", "complementarity")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return ", ".join(f"{name} {part:.2e}" for name, part in self.parts.items())


@dataclass(frozen=True, eq=False)
class Scales:
    """The units in which rows and multipliers are compared with tolerances.

    Lengths are measured in u = √D·θ, where D is the absolute diagonal of ∇²L, so that they do not depend on the units
    of the features. A coordinate with little curvature and a large force (a slack variable, say) is given the
    curvature with which that force causes a step of a thousand units. The unit is how far random weights on the
    samples move u: the scale of influence itself. Where θ is so large that rounding hides such moves, the unit is a
    small part of ‖u‖.
    """

    root: Tensor  # (d,) √D
    size: float  # the unit
    norms: Tensor  # (m,) ‖∇fⱼ‖ in u
    rounding: float  # the step that rounding of θ amounts to, in units

    @classmethod
    def of(cls, theta: Tensor, J: Tensor, D: Tensor, noise: float) -> Scales:
        """Compute the units at θ from the gradients J (1 + m, d) of all rows, the curvatures D (d,) and the noise."""
        eps = torch.finfo(theta.dtype).eps
        part = eps**0.383  # 1e-6 in float64, 2e-3 in float32
        unit = max(noise, part * float((D.sqrt() * theta).norm()))
        if not 0 < unit < float("inf"):
            unit = float((J[0] / D.sqrt())[D > 0].norm()) or 1.0
        root = torch.maximum(D.sqrt(), J[0].abs() / (1e3 * unit))
        curved = root[root > 0]
        root = torch.where(root > 0, root, curved.mean() if len(curved) else torch.ones_like(root))
        length = float((root * theta).norm())
        unit = max(unit, part * length)
        return cls(root, unit, torch.linalg.vector_norm(J[1:] / root, dim=1), eps * length / unit)

    def slack(self, c: Tensor) -> Tensor:
        """Convert c = f − τ to the step of θ that it allows, in units; infinite for slack without a gradient."""
        return torch.where(self.norms > 0, -c / (self.norms * self.size), torch.sign(-c) * float("inf")).nan_to_num(
            nan=0.0, posinf=float("inf"), neginf=float("-inf")
        )

    def multiplier(self, lam: Tensor) -> Tensor:
        """Convert λ to the step that its force causes, in units."""
        return lam * self.norms / self.size

    def lengths(self, moves: Tensor, G: Tensor) -> Tensor:
        """Convert (ω, Δλ), (..., d + m), to two steps of √D·θ: ω itself, and the step that the force GᵀΔλ causes."""
        d = len(self.root)
        return torch.cat([moves[..., :d] * self.root, (moves[..., d:] @ G) / self.root], -1)

    def gradient(self, g: Tensor) -> float:
        """Convert ∇L to the length of the step that it causes, in units."""
        return float((g / self.root).norm()) / self.size


def residuals(scales: Scales, gradient: Tensor, c: Tensor, lam: Tensor, kinds: Kinds) -> KKT:
    """Measure the residuals at a point with ∇L = gradient, c = f − τ and multipliers λ."""
    slack = scales.slack(c)
    return KKT(
        stationarity=scales.gradient(gradient),
        feasibility=float(kinds.violation(-slack).max()) if len(c) else 0.0,
        complementarity=float(kinds.complementarity(slack, scales.multiplier(lam)).max()) if len(c) else 0.0,
        gradient_norm=float(gradient.norm()),
        rounding=scales.rounding,
    )


@dataclass(frozen=True)
class Margin:
    """How far single perturbations move a row towards switching: the largest and the median absolute change.

    For a binding row this is the change of its multiplier, for any other row that of f − τ.
    """

    largest: float
    median: float


@dataclass(frozen=True, eq=False)
class ActiveSet:
    """The rows of all constraints, divided into binding, weak and inactive.

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
    margins: Tensor  # (m,) how far the slack or multiplier that decides the class is from the tolerance; inf if equal
    licq: float  # smallest singular value of the active gradients, rows scaled to length 1; 1 with none active
    curvature: float  # smallest eigenvalue of ∇²L on the tangent space of the binding rows; inf if that is {0}
    relative_curvature: float  # the same of ∇²L / √(D Dᵀ), in which all coordinates have curvature 1
    licq_floor: float  # at or below it the gradients count as dependent
    curvature_floor: float  # at or below it the relative curvature counts as zero

    @classmethod
    def read(
        cls, names: tuple[str, ...], scales: Scales, c: Tensor, lam: Tensor, kinds: Kinds, G: Tensor, H: Operator,
        tolerance: float,
    ) -> ActiveSet:  # fmt: skip
        """Classify the rows from c = f − τ, λ, the constraint gradients G and the Hessian H of the Lagrangian."""
        slack, force = scales.slack(c), scales.multiplier(lam)
        active = kinds.at_bound(slack, tolerance)
        binding = active & kinds.has_force(force, tolerance)
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
        """Return a mask of the given rows, (m,) bool."""
        mask = torch.zeros_like(self.slack, dtype=torch.bool)
        mask[list(rows)] = True
        return mask

    @property
    def uncertain(self) -> tuple[int, ...]:
        """Rows whose class is decided by a slack or multiplier within a factor of 100 of the tolerance."""
        slack, force = self.slack.abs(), self.force.abs()
        weak = torch.where(self.mask(self.weak), torch.maximum(slack, force), force)
        deciding = torch.where(self.mask(self.inactive), slack, weak)
        near = (deciding > 0.01 * self.tolerance) & (deciding < 100 * self.tolerance)
        return _rows(near & torch.isfinite(self.margins))

    @property
    def regular(self) -> bool:
        """Whether the directional derivative exists: LICQ and positive tangent curvature (paper, Theorem 5)."""
        return self.licq > self.licq_floor and self.relative_curvature > self.curvature_floor

    def independence(self) -> Finding:
        """Judge whether the active gradients are independent (LICQ)."""
        what = "Are the active constraints independent (LICQ)?"
        if not self.active:
            return Finding(what, GOOD, "No constraint is active.", "The point is an unconstrained minimum.")
        names = ", ".join(self.names[j] for j in self.active)
        found = f"The smallest singular value of the scaled active gradients ({names}) is {self.licq:.3g}."
        allowed = f"It must be above {self.licq_floor:.1e}."
        if self.licq > self.licq_floor:
            return Finding(what, GOOD, found, "The multipliers are unique.", allowed=allowed)
        meaning = "One active gradient depends on the others (LICQ fails), so the multipliers are not unique."
        cure = "Drop a redundant constraint, or state equal ones once."
        otherwise = "strict=False goes on with one choice."
        return Finding(what, BAD, found, meaning, cure, allowed, DegenerateError, otherwise)

    def strict_minimum(self) -> Finding:
        """Judge whether the Lagrangian curves upwards along the binding constraints (the second-order condition)."""
        what = "Is it a strict minimum?"
        if self.curvature == float("inf"):
            return Finding(what, GOOD, "The binding constraints leave no direction free.", "They fix the parameters.")
        along = " along the binding constraints" if self.binding else ""
        found = f"The smallest curvature of the Lagrangian{along} is {self.curvature:.3g}."
        allowed = f"It must be above {self.curvature_floor:.1e} of each coordinate's own."
        if self.relative_curvature > self.curvature_floor:
            how = "continuously" if self.weak else "smoothly"
            return Finding(what, GOOD, found, f"The solution is locally unique and moves {how}.", allowed=allowed)
        meaning = (
            "The solution is not a strict minimum (the second-order condition fails): it is not unique, or it is a "
            "saddle point."
        )
        cure = "Add a ridge, drop redundant parameters, fit to a minimum, or pass damping (it changes the answer)."
        return Finding(what, BAD, found, meaning, cure, allowed, DegenerateError)

    def check(self, *, damped: bool = False) -> None:
        """Raise where the derivative does not exist; damping makes up for curvature, not for independence."""
        self.independence().check()
        if not damped:
            self.strict_minimum().check()

    def __str__(self) -> str:
        lines = []
        for kind in ("binding", "weak", "inactive"):
            for j in getattr(self, kind):
                slack, force = self.slack[j] + 0.0, self.force[j] + 0.0  # 0 instead of −0
                lines.append(f"{self.names[j]}: {kind} (relative slack {slack:.2e}, force {force:.2e})")
        lines.append(f"independence {self.licq:.2e}, tangent curvature {self.curvature:.3g}")
        return "\n".join(lines)


def _rows(mask: Tensor) -> tuple[int, ...]:
    """Return the numbers of the rows in a mask."""
    return tuple(torch.nonzero(mask).reshape(-1).tolist())


def _independence(G: Tensor, norms: Tensor) -> float:
    """Return the smallest singular value of rows scaled to length 1."""
    if len(G) == 0:
        return 1.0
    if len(G) > G.shape[1] or not bool((norms > 0).all()):
        return 0.0
    return float(torch.linalg.svdvals((G / norms[:, None]).double())[-1])
