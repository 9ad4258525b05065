"""Judge a point (θ, λ): residuals, active set, findings, and the certificate that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dif.derivatives.checks import check_slopes, explain
from dif.errors import (
    DegenerateError,
    DifError,
    InfeasibleError,
    InvalidInputError,
    NotASolutionError,
    SameDataWarning,
    few,
)
from dif.linalg.lanczos import tangent_curvature
from dif.problem.term import Kinds
from dif.runtime.guard import UserCodeError

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
    error: type[DifError] = DifError  # raised by `Solution.check` where the verdict is bad
    otherwise: str = ""  # how a caller can go on regardless; only the error says it

    @property
    def measured(self) -> str:
        """The text of `found`, followed by that of `allowed` if there is one."""
        return f"{self.found} {self.allowed}".strip()

    def refusal(self) -> DifError:
        """Build the error about this finding."""
        return self.error(self.found, self.allowed, self.meaning, f"{self.cure} {self.otherwise}".strip())


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
    residual: float  # the largest of the first three; NaN if one of them is
    goal: float  # the residual that counts as solved: the tolerance, or what rounding allows
    parts: dict[str, float] = field(repr=False)  # the first three by name

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
    floor: float  # the residual that rounding of θ allows: 16 times the step that it amounts to, in units

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
        return cls(root, unit, torch.linalg.vector_norm(J[1:] / root, dim=1), 16 * eps * length / unit)

    def steps(self, c: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        """Convert c = f − τ to the step of θ that it allows, the slack, and λ to the step that its force causes.

        Both are (m,), in units. Slack without a gradient is infinite.
        """
        infinity = float("inf")
        slack = (-c / (self.norms * self.size)).nan_to_num(nan=0.0, posinf=infinity, neginf=-infinity)
        return slack, lam * self.norms / self.size

    def lengths(self, moves: Tensor, G: Tensor) -> Tensor:
        """Convert (ω, Δλ), (..., d + m), to two steps of √D·θ: ω itself, and the step that the force GᵀΔλ causes."""
        d = len(self.root)
        return torch.cat([moves[..., :d] * self.root, (moves[..., d:] @ G) / self.root], -1)


def residuals(scales: Scales, gradient: Tensor, c: Tensor, lam: Tensor, kinds: Kinds, tol: float = 0.0) -> KKT:
    """Measure the residuals at a point with ∇L = gradient, c = f − τ and multipliers λ."""
    slack, force = scales.steps(c, lam)
    parts = {
        "stationarity": float((gradient / scales.root).norm()) / scales.size,
        "feasibility": float(kinds.violation(-slack).max()) if len(c) else 0.0,
        "complementarity": float(kinds.complementarity(slack, force).max()) if len(c) else 0.0,
    }
    residual = float("nan") if any(part != part for part in parts.values()) else max(parts.values())
    size, goal = float(gradient.norm()), max(tol, scales.floor)
    return KKT(gradient_norm=size, residual=residual, goal=goal, parts=parts, **parts)


class Margin(NamedTuple):
    """How far single perturbations move a row towards switching: the largest and the median absolute change.

    For a binding row this is the change of its multiplier, for any other row that of f − τ.
    """

    largest: float
    median: float


@dataclass(frozen=True, eq=False)
class ActiveSet:
    """The rows of all constraints, divided into binding, weak and inactive.

    binding: f = τ and λ̄ > 0, and every equality. weak: f = τ and λ̄ = 0 (the paper's "non-binding"). Rows that are not
    met, at a point that is no solution, are treated as binding or weak, and listed in `violated`. Row numbers count
    through the constraints in order; `names` has their names.
    """

    binding: tuple[int, ...]
    weak: tuple[int, ...]
    inactive: tuple[int, ...]
    active: tuple[int, ...]  # binding and weak
    uncertain: tuple[int, ...]  # whose slack or multiplier is within a factor of 100 of the tolerance
    violated: dict[int, float]  # rows that are not met, and by how much, in their own units
    names: tuple[str, ...]
    slack: Tensor  # (m,) scaled, in relative units of θ
    force: Tensor  # (m,) scaled multipliers
    is_binding: Tensor  # (m,) bool
    is_active: Tensor  # (m,) bool
    tolerance: float
    margins: Tensor  # (m,) how far the slack or multiplier that decides the class is from the tolerance; inf if equal
    licq: float  # smallest singular value of the active gradients, rows scaled to length 1; 1 with none active
    curvature: float  # smallest eigenvalue of ∇²L on the tangent space of the binding rows; inf if that is {0}
    relative_curvature: float  # the same of ∇²L / √(D Dᵀ), in which all coordinates have curvature 1
    licq_floor: float  # at or below it the gradients count as dependent
    curvature_floor: float  # at or below it the relative curvature counts as zero

    @classmethod
    def read(cls, point: Point) -> ActiveSet:
        """Classify the rows of a point."""
        scales, kinds = point.scales, point.program.kinds
        eps = torch.finfo(point.theta.dtype).eps
        tolerance = max(eps**0.447, min(10 * point.kkt.residual, eps**0.25))  # 1e-7 in float64 at a clean solution
        slack, force = scales.steps(point.c, point.lam)
        active = kinds.at_bound(slack, tolerance)
        binding = active & kinds.has_force(force, tolerance)
        weak = active & ~binding
        larger = torch.maximum(slack.abs(), force.abs())
        margins = torch.where(weak, tolerance - larger, torch.where(active, force, slack) - tolerance)
        deciding = torch.where(weak, larger, torch.where(active, force, slack).abs())
        near = (deciding > 0.01 * tolerance) & (deciding < 100 * tolerance) & kinds.one_sided & torch.isfinite(margins)
        G, norms, licq = (point.G / scales.root)[active], scales.norms[active], 1.0
        if len(G):
            regular = len(G) <= G.shape[1] and bool((norms > 0).all())
            licq = float(torch.linalg.svdvals((G / norms[:, None]).double())[-1]) if regular else 0.0
        H, curvatures = point.curvature, []  # on the tangent space, in θ and in √D·θ
        units = torch.ones_like(scales.root).double(), scales.root.double()
        for unit in units if H.assembled and H.d < _LARGE else ():
            rows = point.G[binding].double() / unit
            lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            _, sizes, V = torch.linalg.svd(rows / lengths.clamp(min=torch.finfo(rows.dtype).tiny))
            tangent = V[int((sizes > 1e-10).sum()) :] / unit
            values = torch.linalg.eigvalsh(tangent @ H.dense().double() @ tangent.T)
            curvatures.append(float(values[0]) if len(values) else float("inf"))
        curvature, relative = curvatures or tangent_curvature(H, point.G[binding], scales.root)
        wrong = torch.nonzero(kinds.violation(-slack) > tolerance).reshape(-1)
        groups = {"binding": binding, "weak": weak, "inactive": ~active, "active": active, "uncertain": near}
        return cls(
            **{name: tuple(torch.nonzero(rows).reshape(-1).tolist()) for name, rows in groups.items()},
            violated=dict(zip(wrong.tolist(), point.c[wrong].abs().tolist(), strict=True)),
            names=point.program.names,
            slack=slack,
            force=force,
            is_binding=binding,
            is_active=active,
            tolerance=tolerance,
            margins=torch.where(kinds.one_sided, margins, float("inf")),
            licq=licq,
            curvature=curvature,
            relative_curvature=relative,
            licq_floor=eps**0.5,
            curvature_floor=eps**0.75,
        )

    def judge_regularity(self) -> tuple[Finding, Finding]:
        """Judge whether the derivative exists (paper, Theorem 5): LICQ, and the second-order condition."""
        what, names = "Are the active constraints independent (LICQ)?", ", ".join(self.names[j] for j in self.active)
        found = f"The smallest singular value of the scaled active gradients ({names}) is {self.licq:.3g}."
        allowed = f"It must be above {self.licq_floor:.1e}."
        if not self.active:
            meaning = "The point is an unconstrained minimum."
            independent = Finding(what, GOOD, "No constraint is active.", meaning)
        elif self.licq > self.licq_floor:
            independent = Finding(what, GOOD, found, "The multipliers are unique.", allowed=allowed)
        else:
            meaning = "One active gradient depends on the others (LICQ fails), so the multipliers are not unique."
            cure = "Drop a redundant constraint, or state equal ones once."
            otherwise = "strict=False goes on with one choice."
            independent = Finding(what, BAD, found, meaning, cure, allowed, DegenerateError, otherwise)

        what, along = "Is it a strict minimum?", " along the binding constraints" if self.binding else ""
        found = f"The smallest curvature of the Lagrangian{along} is {self.curvature:.3g}."
        allowed = f"It must be above {self.curvature_floor:.1e} of each coordinate's own."
        if self.curvature == float("inf"):
            found, meaning = "The binding constraints leave no direction free.", "They fix the parameters."
            return independent, Finding(what, GOOD, found, meaning)
        if self.relative_curvature > self.curvature_floor:
            meaning = f"The solution is locally unique and moves {'continuously' if self.weak else 'smoothly'}."
            return independent, Finding(what, GOOD, found, meaning, allowed=allowed)
        meaning = (
            "The solution is not a strict minimum (the second-order condition fails): it is not unique, or it is a "
            "saddle point."
        )
        cure = "Add a ridge, drop redundant parameters, fit to a minimum, or pass damping (it changes the answer)."
        return independent, Finding(what, BAD, found, meaning, cure, allowed, DegenerateError)

    def __str__(self) -> str:
        lines = []
        for kind in ("binding", "weak", "inactive"):
            for j in getattr(self, kind):
                slack, force = self.slack[j] + 0.0, self.force[j] + 0.0  # 0 instead of −0
                state = f"violated by {self.violated[j]:.4g}" if j in self.violated else kind
                lines.append(f"{self.names[j]}: {state} (relative slack {slack:.2e}, force {force:.2e})")
        lines.append(f"independence {self.licq:.2e}, tangent curvature {self.curvature:.3g}")
        return "\n".join(lines)


BINDING, VIOLATED = "binding", "violated"  # states of a row; the others are "weak" and "inactive"
_MODERATE = 1e3  # ratio of a sample's weights in Lagrangian and objective below which the multipliers count as bounded
_UNBOUNDED = 1e7  # ratio of the curvatures of Lagrangian and objective above which multipliers count as unbounded
_LARGE = 128  # parameters from which Lanczos steps are cheaper than all eigenvalues
_BENT = 10.0  # ratio of finite-difference to exact curvature above which the point is on a kink
_OFF = 10.0  # largest gap between the slopes by differences and by the gradient, in units of step · curvature
_NOISE = 50.0  # rounding error of a sum of losses, as a multiple of eps · (sum of absolute values)
_CANCELLING = 1e6  # ratio of a constraint's force and the objective's gradient above which forces cancel each other
_DECADES = 30  # powers of ten by which parameters are multiplied to see whether the objective has a minimum
ENDLESS = "The objective falls without end as the parameters grow (separable data do that)"
# What to do about a point that is not a solution
_POLISH = "Train on, or polish it: dif.fit(problem, solution.params). If that does not converge, add a ridge."


Point = Any  # a Solution, which asks for its own certificate


@dataclass(frozen=True)
class Row:
    """One row of the constraints."""

    name: str
    state: str  # binding, weak, inactive or violated
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
        return solution.certificate if margins is None else cls.judge(solution, margins)

    @classmethod
    def judge(cls, point: Point, margins: Sequence[Margin | None] | None = None) -> Certificate:
        """Judge a point; with margins, say how far perturbations move each constraint, not how clear its state is."""
        active, rows, every = point.active, list_rows(point, margins), list(point.findings)
        every.extend(active.judge_regularity()[0 if point.program.m else 1 :])
        touching = [active.names[j] for j in active.weak if j not in active.violated]
        if touching:
            meaning = (
                "They touch without force, so the derivative has two sides: DIF answers for the side a change takes."
            )
            every.append(Finding("Are constraints weakly active?", NOTE, f"{', '.join(touching)}.", meaning))
        if point.program.m:
            every.append(_judge_clarity(point) if margins is None else _judge_reach(rows))
        every.append(_judge_smoothness(point))
        for a, b in point.problem.same_data:
            what, meaning = "Are all losses of a person changed together?", SameDataWarning.words(a.name, b.name)
            every.append(Finding(what, NOTE, f"{a.name}, {b.name}.", meaning))
        return cls(tuple(every), rows, point.objective, point.theta.numel())

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


def judge_solution(point: Point) -> tuple[Finding, ...]:
    """Judge whether a point is a solution at which derivatives can be trusted; the first bad finding is the last."""
    kkt, what = point.kkt, "Is it a solution?"
    found = f"The relative KKT residual is {kkt.residual:.3g} ({kkt}; ‖∇L‖ = {kkt.gradient_norm:.3g})"
    allowed = f"It must be at most {kkt.goal:.1g}."
    if kkt.residual <= kkt.goal:
        findings = [Finding(what, GOOD, f"{found}.", "The optimality conditions hold.", allowed=allowed)]
        if point.program.m:
            findings.append(judge_multipliers(point))
        if findings[-1].verdict == GOOD:
            findings.append(judge_derivatives(point))
        return tuple(findings)
    kinds, names, (slack, force) = point.program.kinds, point.program.names, point.scales.steps(point.c, point.lam)
    worst, missing = max(kkt.parts, key=lambda part: kkt.parts[part]), kinds.violation(-slack)
    by_row = {"feasibility": missing, "complementarity": kinds.complementarity(slack, force)}
    where = f" of {names[int(by_row[worst].argmax())]}" if worst in by_row else ""
    rows = torch.nonzero(missing > kkt.goal).reshape(-1).tolist()
    violated = few([f"{names[j]} by {float(point.c[j].abs()):.4g}" for j in rows])
    found += f"; {worst}{where} is the largest part.{f' Violated: {violated}.' if rows else ''}"
    meaning, cure = "The point does not solve the problem", _POLISH
    if falls_without_end(point):
        meaning, cure = f"{ENDLESS}: there is no minimum", "Add a ridge, or bounds on the parameters."
    elif point.kinks:
        cure = explain(point.kinks)
    meaning += ", so there is no solution whose change could be predicted."
    otherwise = "strict=False goes on regardless and records the residual."
    return (Finding(what, BAD, found, meaning, cure, allowed, NotASolutionError, otherwise),)


def falls_without_end(point: Point) -> bool:
    """Return whether the objective falls, and no constraint is violated more, as θ is multiplied by 10, 100, … 10³⁰."""
    program, last = point.program, point.f
    allowed = program.kinds.violation(point.c)
    for power in range(1, 1 + _DECADES):
        try:
            f = program.rows.values(10.0**power * point.theta)
        except UserCodeError:  # outside the domain of a loss
            return False
        further = program.kinds.violation(f[1:] - program.tau) > allowed
        if not bool(f[0] <= last[0]) or bool(further.any()):
            return False
        last = f
    return bool(last[0] < point.f[0])


def judge_multipliers(point: Point) -> Finding:
    """Judge whether the multipliers are finite: some point must lie strictly inside the constraints.

    Multipliers weight the samples that set the units of `kkt`, so huge ones make every residual look small: they may
    hide a violated constraint. Here violations are measured in the units of the objective alone.
    """
    what, lam, names, weights = "Are the multipliers finite?", point.lam, point.program.names, point.program.weights
    missing = torch.zeros_like(lam)
    if bool((lam.abs() * torch.linalg.vector_norm(point.G, dim=1) > _CANCELLING * point.J[0].norm()).any()):
        missing = point.program.kinds.violation(-point.objective_scales.steps(point.c, lam)[0])
    worst = int(missing.argmax())
    if float(missing[worst]) > point.tol:
        size, force = float(point.c[worst].abs()), float(lam[worst])
        found = f"{names[worst]} is violated by {size:.4g}, and its multiplier is {force:.1e}."
        meaning = "The constraints contradict each other: their forces cancel and grow without bound."
        cure = "Loosen that bound, or drop one of the constraints in conflict with it."
        return Finding(what, BAD, found, meaning, cure, "A solution violates no constraint.", InfeasibleError)
    row, ratio = int(lam.abs().argmax()), 0.0
    if point.program.rows.weight_ratio(weights(lam), than=weights(torch.zeros_like(lam))) >= _MODERATE:
        ratio = float(point.curvature.scale().max() / point.objective_curvature.scale().max())
    if ratio > _UNBOUNDED:
        found = (
            f"The multiplier of {names[row]} is {float(lam[row]):.3g}; with it the Lagrangian curves {ratio:.1e} times "
            "as much as the objective."
        )
        meaning = (
            "Multipliers grow without bound where no point lies strictly inside the constraint (no Slater point): the "
            "solution has no derivative there."
        )
        cure, allowed = (
            "Loosen the bound, or state what it fixes as equalities.",
            f"The ratio must be below {_UNBOUNDED:.0e}.",
        )
        return Finding(what, BAD, found, meaning, cure, allowed, DegenerateError)
    found = f"The largest multiplier is {float(lam[row].abs()):.3g}."
    return Finding(what, GOOD, found, "A point strictly inside the constraints exists.")


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
        found = (
            f"The curvature along a random direction is {bend:.3g} by differences of the Lagrangian and {curved:.3g} "
            "by its second derivative."
        )
        meaning = "The point lies on a kink of a loss (absolute value, hinge, ReLU): there is no derivative there."
        cure = "Use a smooth loss or activation (a smoothed absolute value, softplus, GELU) and fit again."
        allowed = f"The two must differ by less than a factor of {_BENT:g}."
        return Finding(what, BAD, found, meaning, cure, allowed, DegenerateError)
    if abs(slope - along) > _OFF * h * max(abs(curved), abs(bend)) + noise / h:
        found = (
            f"The slope of the Lagrangian along a random direction is {slope:.3g} by differences, but {along:.3g} by "
            "its gradient."
        )
        meaning = "What torch returns as the gradient is not the derivative of the losses."
        cure = "Look for .detach(), torch.no_grad() or a custom backward in the losses."
        allowed = f"The two must differ by less than {_OFF * h:.1g} of its curvature."
        return Finding(what, BAD, found, meaning, cure, allowed, InvalidInputError)
    found = f"Slope {along:.3g} and curvature {curved:.3g} along a random direction agree with differences."
    return Finding(what, GOOD, found, "Torch returns the derivatives of the losses.")


def _judge_clarity(point: Point) -> Finding:
    active, what = point.active, "Is it clear which constraints bind?"
    threshold = f"{active.tolerance:.0e}"
    if not active.uncertain:
        found = f"No slack or multiplier is within a factor of 100 of the threshold {threshold}."
        meaning = (
            "Each constraint clearly binds or does not, at this point. Whether a removal switches one is another "
            "question: DirectionalInfluence(solution).margins(removals) answers it."
        )
        return Finding(what, GOOD, found, meaning)
    names = ", ".join(active.names[j] for j in active.uncertain)
    meaning = "These could be classified otherwise: their slack or multiplier is near the threshold."
    cure = "Solve more tightly, or compare with switching=True, which does not depend on the threshold."
    return Finding(what, NOTE, f"{names} (threshold {threshold}).", meaning, cure)


def _judge_reach(rows: Sequence[Row]) -> Finding:
    """Compare the margin of each constraint with how far one removal moves it."""
    what = "Is it clear which constraints bind, whoever is removed?"
    compared = [row for row in rows if row.largest is not None and row.state != VIOLATED]
    if not compared:
        return Finding(what, GOOD, "All constraints are equalities.", "They always bind.")

    near = []
    for row in compared:
        which, number = ("multiplier", row.multiplier) if row.state == BINDING else ("slack", row.slack)
        moves = f"one removal moves it by {row.largest:.2g} at most, {row.median:.2g} in the median"
        times = number / row.largest if row.largest else float("inf")  # the margin in units of the largest move
        near.append((times, f"{row.name}: {which} {number:.3g}, {moves}"))
    near.sort(key=lambda entry: entry[0])
    within = "; ".join(words for times, words in near if times <= 1)
    if not within:
        meaning = "No single removal is predicted to make a constraint active or inactive."
        return Finding(what, GOOD, f"{near[0][1]}.", meaning)
    meaning = (
        "Not for all: single removals can make these constraints active or inactive. Predictions allow for that "
        '(switching="auto"); a derivative would not.'
    )
    return Finding(what, NOTE, f"{within}.", meaning)


def _judge_smoothness(point: Point) -> Finding:
    what = "Are the losses smooth?"
    if not point.kinks:
        return Finding(what, GOOD, "Probing found no kink.", "The losses look smooth.")
    kinks = "; ".join(map(str, point.kinks)) + "."
    if not point.converged:
        return Finding(what, BAD, kinks, "A minimum tends to lie on kinks, where no gradient can vanish.")
    meaning = "The solution is not on a kink, but a removal may carry samples across one, which no derivative sees."
    return Finding(what, NOTE, kinks, meaning, "Retrain the strongest, or use a smooth loss or activation.")


def list_rows(point: Point, margins: Sequence[Margin | None] | None = None) -> tuple[Row, ...]:
    """Describe each row of the constraints at a point, and how far perturbations move it if that is known."""
    active, program, rows = point.active, point.program, []
    state = dict.fromkeys(active.binding, BINDING) | dict.fromkeys(active.weak, "weak")
    state |= dict.fromkeys(active.violated, VIOLATED)
    reach = 1e-12 * (1 + program.tau.abs())  # what rounding leaves of f − τ
    slack = torch.where(point.c.abs() <= reach, 0.0, -point.c).tolist()
    lam, value, limit = point.lam.tolist(), point.f[1:].tolist(), program.tau.tolist()
    for constraint, shape in zip(point.problem.constraints, program.shapes, strict=True):
        relation, sign = ("≥", -1.0) if constraint.negated else (constraint.kind.symbol, 1.0)
        for j in range(len(rows), len(rows) + shape.numel()):
            name, written = program.names[j], (relation, sign * value[j] + 0.0, sign * limit[j] + 0.0)
            moves = None if margins is None else margins[j]
            known = name, state.get(j, "inactive"), slack[j], lam[j], j in active.uncertain
            rows.append(Row(*known, *(moves or (None, None)), *written))
    return tuple(rows)
