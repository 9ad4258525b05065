"""The certificate of a point: questions on whether it is a solution at which influence exists, with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dif.errors import SameDataWarning
from dif.optimality.active_set import Margin
from dif.optimality.finding import BAD, GOOD, NOTE, Finding
from dif.optimality.solution import Solution, expect_solution

BINDING = "binding"  # state of a row; the others are "weak" and "inactive"


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

    findings: tuple[Finding, ...]
    constraints: tuple[Row, ...]
    objective: float
    parameters: int

    @classmethod
    def of(cls, solution: Solution, margins: Sequence[Margin | None] | None = None) -> Certificate:
        """Judge a point.

        Args:
            solution: The point.
            margins: How far the removals in question move the constraints: `DirectionalInfluence.margins(removals)`.
        """
        findings = list(expect_solution(solution).findings())
        if solution.program.m:
            findings.append(solution.active.independence())
        findings += [solution.active.strict_minimum(), *_judge_weak_rows(solution)]
        rows = _rows(solution, margins or [None] * solution.program.m)
        if solution.program.m:
            findings += _judge_clarity(solution) if margins is None else _judge_reach(rows)
        findings += [*_judge_smoothness(solution), *_judge_same_data(solution)]
        verdicts = [finding.verdict for finding in findings]
        first_bad = verdicts.index(BAD) if BAD in verdicts else len(findings)
        # good findings after a bad one mean nothing: they assume a regular solution
        shown = [f for k, f in enumerate(findings) if k < first_bad or f.verdict != GOOD]
        return cls(tuple(shown), rows, solution.objective, solution.theta.numel())

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


def _judge_weak_rows(solution: Solution) -> list[Finding]:
    active = solution.active
    if not active.weak:
        return []
    names = ", ".join(active.names[j] for j in active.weak)
    meaning = "They touch without force, so the derivative has two sides: DIF answers for the side a change takes."
    return [Finding("Are constraints weakly active?", NOTE, f"{names}.", meaning)]


def _judge_clarity(solution: Solution) -> list[Finding]:
    active = solution.active
    what, threshold = "Is it clear which constraints bind?", f"{active.tolerance:.0e}"
    if not active.uncertain:
        found = f"No slack or multiplier is within a factor of 100 of the threshold {threshold}."
        return [Finding(what, GOOD, found, "The active set is clear.")]
    names = ", ".join(active.names[j] for j in active.uncertain)
    meaning = "These could be classified otherwise: their slack or multiplier is near the threshold."
    cure = "Solve more tightly, or compare with switching=True, which does not depend on the threshold."
    return [Finding(what, NOTE, f"{names} (threshold {threshold}).", meaning, cure)]


def _judge_reach(rows: Sequence[Row]) -> list[Finding]:
    """Compare the margin of each constraint with how far one removal moves it."""
    what = "Is it clear which constraints bind, whoever is removed?"
    compared = [row for row in rows if row.largest is not None]
    if not compared:
        return [Finding(what, GOOD, "All constraints are equalities.", "They always bind.")]

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
        return [Finding(what, NOTE, "; ".join(map(describe, near)) + ".", meaning)]
    meaning = "No single removal is predicted to make a constraint active or inactive."
    return [Finding(what, GOOD, describe(min(compared, key=times)) + ".", meaning)]


def _judge_smoothness(solution: Solution) -> list[Finding]:
    what = "Are the losses smooth?"
    if not solution.kinks:
        return [Finding(what, GOOD, "Probing found no kink.", "The losses look smooth.")]
    kinks = "; ".join(map(str, solution.kinks)) + "."
    if not solution.converged:
        return [Finding(what, BAD, kinks, "A minimum tends to lie on kinks, where no gradient can vanish.")]
    meaning = "The solution is not on a kink, but a removal may carry samples across one, which no derivative sees."
    return [Finding(what, NOTE, kinks, meaning, "Retrain the strongest, or use a smooth loss or activation.")]


def _judge_same_data(solution: Solution) -> list[Finding]:
    what, pairs = "Are all losses of a person changed together?", solution.problem.same_data
    return [Finding(what, NOTE, f"{a.name}, {b.name}.", SameDataWarning.words(a.name, b.name)) for a, b in pairs]


def _signs(solution: Solution) -> list[tuple[str, float]]:
    """Return for each row the relation as written, and the sign that turns the stored sides into the written ones."""
    pairs = zip(solution.problem.constraints, solution.program.shapes, strict=True)
    return [
        ("≥", -1.0) if constraint.negated else (constraint.kind.symbol, 1.0)
        for constraint, shape in pairs
        for _ in range(shape.numel())
    ]


def _rows(solution: Solution, margins: Sequence[Margin | None]) -> tuple[Row, ...]:
    active = solution.active
    state = dict.fromkeys(active.binding, BINDING) | dict.fromkeys(active.weak, "weak")
    reach = 1e-12 * (1 + solution.program.tau.abs())  # what rounding leaves of f − τ
    slack = torch.where(solution.c.abs() <= reach, 0.0, -solution.c).tolist()
    lam, value, limit = solution.lam.tolist(), solution.f[1:].tolist(), solution.program.tau.tolist()
    written = _signs(solution)
    return tuple(
        Row(
            name, state.get(j, "inactive"), slack[j], lam[j], j in active.uncertain,
            None if margin is None else margin.largest, None if margin is None else margin.median,
            written[j][0], written[j][1] * value[j] + 0.0, written[j][1] * limit[j] + 0.0,
        )
        for j, (name, margin) in enumerate(zip(active.names, margins, strict=True))
    )  # fmt: skip
