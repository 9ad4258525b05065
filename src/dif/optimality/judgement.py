"""Judge a point (θ, λ): residuals, active set, findings, and the certificate that holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.checks import check_slopes, explain
from dif.errors import DegenerateError, DifError, InfeasibleError, InvalidInputError, NotASolutionError, SameDataWarning
from dif.linalg.lanczos import tangent_curvature
from dif.linalg.solvers import Operator
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
            binding=_positions(binding),
            weak=_positions(weak),
            inactive=_positions(inactive),
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
        return _positions(near & torch.isfinite(self.margins))

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


def _positions(mask: Tensor) -> tuple[int, ...]:
    """Return the numbers of the rows in a mask."""
    return tuple(torch.nonzero(mask).reshape(-1).tolist())


def _independence(G: Tensor, norms: Tensor) -> float:
    """Return the smallest singular value of rows scaled to length 1."""
    if len(G) == 0:
        return 1.0
    if len(G) > G.shape[1] or not bool((norms > 0).all()):
        return 0.0
    return float(torch.linalg.svdvals((G / norms[:, None]).double())[-1])


_CLEAR = "Is it clear which constraints bind?"
BINDING = "binding"  # state of a row; the others are "weak" and "inactive"
_MODERATE = 1e3  # ratio of a sample's weights in Lagrangian and objective below which the multipliers count as bounded
_UNBOUNDED = 1e7  # ratio of the curvatures of Lagrangian and objective above which multipliers count as unbounded
_BENT = 10.0  # ratio of finite-difference to exact curvature above which the point is on a kink
_OFF = 10.0  # largest gap between the slopes by differences and by the gradient, in units of step · curvature
_NOISE = 50.0  # rounding error of a sum of losses, as a multiple of eps · (sum of absolute values)
_CANCELLING = 1e6  # ratio of a constraint's force and the objective's gradient above which forces cancel each other
# What to do about a point that is not a solution
_POLISH = "Train on, or polish it: dif.fit(problem, solution.params). If that does not converge, add a ridge."


Point = Any  # a Solution, which asks for its own certificate


@dataclass(frozen=True)
class Row:
    """One row of the constraints."""

    name: str
    state: str  # binding, weak or inactive
    slack: float  # τ − f, in the constraint's own units
    multiplier: float
    uncertain: bool
    largest: float | None = None  # largest change of slack (of multiplier, if binding) by a single removal
    median: float | None = None  # median of these changes; both are None where they were not computed
    relation: str = "≤"  # ≤, ≥ or =, as the constraint was written
    value: float = 0.0  # left-hand side at the point, as written, with all terms on the left
    limit: float = 0.0  # right-hand side, as written, with all numbers on the right


@dataclass(frozen=True)
class Certificate:
    """All findings about a point, good and bad, and its constraints; `Solution.check` raises from the bad ones."""

    every: tuple[Finding, ...]
    constraints: tuple[Row, ...]
    objective: float
    parameters: int

    @classmethod
    def of(cls, solution: Any, margins: Sequence[Margin | None] | None = None) -> Certificate:
        """Return the certificate of a solution.

        Args:
            solution: The point.
            margins: How far the removals in question move the constraints: `DirectionalInfluence.margins(removals)`.
        """
        if not hasattr(type(solution), "certificate"):
            raise InvalidInputError(
                f"`solution` must be a dif.Solution, not of type {type(solution).__name__}; find it with "
                "dif.fit(problem, params)."
            )
        return solution.certificate if margins is None else solution.certificate.compare(margins)

    @classmethod
    def judge(cls, point: Point, findings: Sequence[Finding]) -> Certificate:
        """Judge a point, given the findings on whether it is a solution."""
        every = list(findings)
        if point.program.m:
            every.append(point.active.independence())
        every += [point.active.strict_minimum(), *_judge_weak_rows(point)]
        if point.program.m:
            every.append(_judge_clarity(point))
        every += [_judge_smoothness(point), *_judge_same_data(point)]
        return cls(tuple(every), _list_rows(point), point.objective, point.theta.numel())

    def compare(self, margins: Sequence[Margin | None]) -> Certificate:
        """Return the certificate with how far perturbations move each constraint, instead of how clear its state is."""
        rows = tuple(
            row if margin is None else replace(row, largest=margin.largest, median=margin.median)
            for row, margin in zip(self.constraints, margins, strict=True)
        )
        every = tuple(_judge_reach(rows) if finding.what == _CLEAR else finding for finding in self.every)
        return replace(self, constraints=rows, every=every)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings that are shown: good ones after a bad one assume a regular solution and mean nothing."""
        verdicts = [finding.verdict for finding in self.every]
        first_bad = verdicts.index(BAD) if BAD in verdicts else len(verdicts)
        return tuple(f for k, f in enumerate(self.every) if k < first_bad or f.verdict != GOOD)

    @property
    def holds(self) -> bool:
        """Whether no finding is bad."""
        return all(finding.verdict != BAD for finding in self.findings)

    def __str__(self) -> str:
        """Return the questions with their answers, and the constraints, as text."""
        signs = {GOOD: "yes", NOTE: "note", BAD: "NO"}
        answers = [f"{signs[f.verdict]:4} {f.what} {f.found} {f.meaning} {f.cure}".rstrip() for f in self.findings]
        rows = [
            f"{row.name}: {row.value:.4g} {row.relation} {row.limit:.4g}, {row.state}, multiplier {row.multiplier:.4g}"
            for row in self.constraints
        ]
        return "\n".join([f"Certificate: {'holds' if self.holds else 'does NOT hold'}", *answers, *rows])

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as plain dicts and lists, for JSON."""
        shown = ("what", "verdict", "measured", "meaning", "cure")
        return {
            "holds": self.holds,
            "findings": [{name: getattr(finding, name) for name in shown} for finding in self.findings],
            "constraints": [asdict(row) for row in self.constraints],
            "objective": self.objective,
            "parameters": self.parameters,
        }


def judge_solution(point: Point) -> Iterator[Finding]:
    """Judge whether a point is a solution: each finding supposes that those before it are good."""
    yield _judge_optimality(point)
    if not point.converged:
        return
    if point.program.m:
        multipliers = judge_feasibility(point) or _judge_multipliers(point)
        yield multipliers
        if multipliers.verdict == BAD:
            return
    yield judge_derivatives(point)


def _judge_optimality(point: Point) -> Finding:
    """Judge whether the optimality conditions hold."""
    kkt, what = point.kkt, "Is it a solution?"
    found = f"The relative KKT residual is {kkt.residual:.3g} ({kkt}; ‖∇L‖ = {kkt.gradient_norm:.3g})"
    allowed = f"It must be at most {point.goal:.1g}."
    if point.converged:
        return Finding(what, GOOD, f"{found}.", "The optimality conditions hold.", allowed=allowed)
    kinds, slack = point.program.kinds, point.scales.slack(point.c)
    parts = {
        "stationarity": None,
        "feasibility": kinds.violation(-slack),
        "complementarity": kinds.complementarity(slack, point.scales.multiplier(point.lam)),
    }
    worst = max(parts, key=lambda part: getattr(kkt, part))
    by_row = parts[worst]
    where = "" if by_row is None else f" of {point.program.names[int(by_row.argmax())]}"
    return Finding(
        what,
        BAD,
        f"{found}; {worst}{where} is the largest part.",
        "The point does not solve the problem, so there is no solution whose change could be predicted.",
        explain(point.kinks) if point.kinks else _POLISH,
        allowed,
        NotASolutionError,
        "strict=False goes on regardless and records the residual.",
    )


def _judge_multipliers(point: Point) -> Finding:
    """Judge whether the multipliers are bounded: some point must lie strictly inside the constraints."""
    what, size = "Are the multipliers finite?", float(point.lam.abs().max())
    good = Finding(
        what, GOOD, f"The largest multiplier is {size:.3g}.", "A point strictly inside the constraints exists."
    )
    rows, weights = point.program.rows, point.program.weights
    if rows.weight_ratio(weights(point.lam), than=weights(torch.zeros_like(point.lam))) < _MODERATE:
        return good
    ratio = float(point.curvature.scale().max() / point.objective_curvature.scale().max())
    if ratio <= _UNBOUNDED:
        return good
    row = int(point.lam.abs().argmax())
    return Finding(
        what,
        BAD,
        f"The multiplier of {point.program.names[row]} is {float(point.lam[row]):.3g}; with it the Lagrangian curves "
        f"{ratio:.1e} times as much as the objective.",
        "Multipliers grow without bound where no point lies strictly inside the constraint (no Slater point): the "
        "solution has no derivative there.",
        "Loosen the bound, or state what it fixes as equalities.",
        f"The ratio must be below {_UNBOUNDED:.0e}.",
        DegenerateError,
    )


def judge_feasibility(point: Point) -> Finding | None:
    """Judge whether huge multipliers hide a violated constraint; None if they do not.

    Multipliers weight the samples that set the units of `kkt`, so huge ones make every residual look small. Here
    violations are measured in the units of the objective alone.
    """
    forces = point.lam.abs() * torch.linalg.vector_norm(point.J[1:], dim=1)
    if not bool((forces > _CANCELLING * point.J[0].norm()).any()):
        return None
    found = point.program.kinds.violation(-point.objective_scales.slack(point.c))
    worst = int(found.argmax())
    if float(found[worst]) <= point.tol:
        return None
    return Finding(
        "Are the multipliers finite?",
        BAD,
        f"{point.program.names[worst]} is violated by {float(point.c[worst].abs()):.4g}, and its multiplier is "
        f"{float(point.lam[worst]):.1e}.",
        "The constraints contradict each other: their forces cancel and grow without bound.",
        "Loosen that bound, or drop one of the constraints in conflict with it.",
        "A solution violates no constraint.",
        InfeasibleError,
    )


def judge_derivatives(point: Point) -> Finding:
    """Compare the gradient and the curvature with differences of the Lagrangian along a random direction."""
    what, theta, rows = "Are the derivatives right?", point.theta, point.program.rows
    eps = torch.finfo(theta.dtype).eps
    h, weights = eps**0.25, point.program.weights(point.lam)
    draw = torch.randn(theta.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = draw.to(theta) * torch.minimum(1 / point.scales.root, 1 + theta.abs())
    for table in rows.tables:
        check_slopes(table.samples, point.program.parameters, theta, v)
    before, after = (float(weights @ rows.values(theta + sign * h * v)) for sign in (-1, 1))
    slope, bend = (after - before) / (2 * h), (before - 2 * float(weights @ point.f) + after) / h**2
    H = point.curvature
    Hv = H.dense() @ v if H.cheap else H.product(v[:, None])[:, 0]
    along, curved = float(weights @ point.J @ v), float(v @ Hv)
    noise = _NOISE * eps * float(weights.abs() @ point.f.abs())
    if abs(bend) > _BENT * abs(curved) + noise / h**2:
        return Finding(
            what,
            BAD,
            f"The curvature along a random direction is {bend:.3g} by differences of the Lagrangian and "
            f"{curved:.3g} by its second derivative.",
            "The point lies on a kink of a loss (absolute value, hinge, ReLU): there is no derivative there.",
            "Use a smooth loss or activation (a smoothed absolute value, softplus, GELU) and fit again.",
            f"The two must differ by less than a factor of {_BENT:g}.",
            DegenerateError,
        )
    if abs(slope - along) > _OFF * h * max(abs(curved), abs(bend)) + noise / h:
        return Finding(
            what,
            BAD,
            f"The slope of the Lagrangian along a random direction is {slope:.3g} by differences, but {along:.3g} "
            "by its gradient.",
            "What torch returns as the gradient is not the derivative of the losses.",
            "Look for .detach(), torch.no_grad() or a custom backward in the losses.",
            f"The two must differ by less than {_OFF * h:.1g} of its curvature.",
            InvalidInputError,
        )
    found = f"Slope {along:.3g} and curvature {curved:.3g} along a random direction agree with differences."
    return Finding(what, GOOD, found, "Torch returns the derivatives of the losses.")


def _judge_weak_rows(point: Point) -> list[Finding]:
    active = point.active
    if not active.weak:
        return []
    names = ", ".join(active.names[j] for j in active.weak)
    meaning = "They touch without force, so the derivative has two sides: DIF answers for the side a change takes."
    return [Finding("Are constraints weakly active?", NOTE, f"{names}.", meaning)]


def _judge_clarity(point: Point) -> Finding:
    active, what = point.active, _CLEAR
    threshold = f"{active.tolerance:.0e}"
    if not active.uncertain:
        found = f"No slack or multiplier is within a factor of 100 of the threshold {threshold}."
        return Finding(what, GOOD, found, "The active set is clear.")
    names = ", ".join(active.names[j] for j in active.uncertain)
    meaning = "These could be classified otherwise: their slack or multiplier is near the threshold."
    cure = "Solve more tightly, or compare with switching=True, which does not depend on the threshold."
    return Finding(what, NOTE, f"{names} (threshold {threshold}).", meaning, cure)


def _judge_reach(rows: Sequence[Row]) -> Finding:
    """Compare the margin of each constraint with how far one removal moves it."""
    what = "Is it clear which constraints bind, whoever is removed?"
    compared = [row for row in rows if row.largest is not None]
    if not compared:
        return Finding(what, GOOD, "All constraints are equalities.", "They always bind.")

    def describe(row: Row) -> str:
        which, number = ("multiplier", row.multiplier) if row.state == BINDING else ("slack", row.slack)
        moves = f"one removal moves it by {row.largest:.2g} at most, {row.median:.2g} in the median"
        return f"{row.name}: {which} {number:.3g}, {moves}"

    def times(row: Row) -> float:
        """Return the margin as a multiple of the largest move."""
        number = row.multiplier if row.state == BINDING else row.slack
        return number / row.largest if row.largest else float("inf")

    near = sorted((row for row in compared if times(row) <= 1), key=times)
    if near:
        meaning = (
            "Not for all: single removals can make these constraints active or inactive. Predictions allow for that "
            '(switching="auto"); a derivative would not.'
        )
        return Finding(what, NOTE, "; ".join(map(describe, near)) + ".", meaning)
    meaning = "No single removal is predicted to make a constraint active or inactive."
    return Finding(what, GOOD, describe(min(compared, key=times)) + ".", meaning)


def _judge_smoothness(point: Point) -> Finding:
    what = "Are the losses smooth?"
    if not point.kinks:
        return Finding(what, GOOD, "Probing found no kink.", "The losses look smooth.")
    kinks = "; ".join(map(str, point.kinks)) + "."
    if not point.converged:
        return Finding(what, BAD, kinks, "A minimum tends to lie on kinks, where no gradient can vanish.")
    meaning = "The solution is not on a kink, but a removal may carry samples across one, which no derivative sees."
    return Finding(what, NOTE, kinks, meaning, "Retrain the strongest, or use a smooth loss or activation.")


def _judge_same_data(point: Point) -> list[Finding]:
    what, pairs = "Are all losses of a person changed together?", point.problem.same_data
    return [Finding(what, NOTE, f"{a.name}, {b.name}.", SameDataWarning.words(a.name, b.name)) for a, b in pairs]


def _signs(point: Point) -> list[tuple[str, float]]:
    """Return for each row the relation as written, and the sign that turns the stored sides into the written ones."""
    pairs = zip(point.problem.constraints, point.program.shapes, strict=True)
    return [
        ("≥", -1.0) if constraint.negated else (constraint.kind.symbol, 1.0)
        for constraint, shape in pairs
        for _ in range(shape.numel())
    ]


def _list_rows(point: Point) -> tuple[Row, ...]:
    active = point.active
    state = dict.fromkeys(active.binding, BINDING) | dict.fromkeys(active.weak, "weak")
    reach = 1e-12 * (1 + point.program.tau.abs())  # what rounding leaves of f − τ
    slack = torch.where(point.c.abs() <= reach, 0.0, -point.c).tolist()
    lam, value, limit = point.lam.tolist(), point.f[1:].tolist(), point.program.tau.tolist()
    written = _signs(point)
    return tuple(
        Row(
            name, state.get(j, "inactive"), slack[j], lam[j], j in active.uncertain, None, None,
            written[j][0], written[j][1] * value[j] + 0.0, written[j][1] * limit[j] + 0.0,
        )
        for j, name in enumerate(active.names)
    )  # fmt: skip
