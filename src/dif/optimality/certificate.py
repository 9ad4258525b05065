"""The certificate of a point: questions on whether it is a solution at which influence exists, with their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dif.derivatives.checks import check_slopes, explain
from dif.errors import DegenerateError, InfeasibleError, InvalidInputError, NotASolutionError, SameDataWarning
from dif.optimality.judgement import BAD, GOOD, NOTE, Finding, Margin

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
        return cls(tuple(every), _rows(point), point.objective, point.theta.numel())

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


def _rows(point: Point) -> tuple[Row, ...]:
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
