"""Whether a point is a solution at which influence exists, in plain words: what was measured, what it means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dif.errors import DegenerateError, NotASolutionError, SameDataWarning
from dif.evaluation.kinks import explain
from dif.optimality.active_set import Margin
from dif.optimality.solution import Solution

GOOD, NOTE, BAD = "good", "note", "bad"
BINDING = "binding"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    verdict: str  # good, note or bad
    measured: str
    meaning: str
    cure: str = ""


@dataclass(frozen=True)
class Row:
    """One row of the constraints."""

    name: str
    state: str  # binding, weak or inactive
    slack: float  # τ − f, in the constraint's own units
    multiplier: float
    uncertain: bool
    largest: float | None = None  # what single removals move the slack by, or the multiplier where it binds: at most,
    median: float | None = None  # and usually; None where that was not looked at


@dataclass(frozen=True)
class Certificate:
    """What `Solution.check` and `ActiveSet.check` rest on, all of it, whether they would raise or not."""

    findings: tuple[Finding, ...]
    constraints: tuple[Row, ...]
    objective: float
    parameters: int

    @classmethod
    def of(cls, solution: Solution, margins: Sequence[Margin | None] | None = None) -> Certificate:
        """Looked at, not judged by exceptions.

        Args:
            solution: The point.
            margins: What the removals in question move the constraints by, `DirectionalInfluence.margins(removals)`.
        """
        findings = [_optimality(solution)]
        if solution.program.m:
            findings += [_multipliers(solution), _independence(solution)]
        findings += [_curvature(solution), *_weak(solution)]
        rows = _rows(solution, margins or [None] * solution.program.m)
        if solution.program.m:
            findings += _uncertain(solution) if margins is None else _reached(rows)
        findings += [*_smoothness(solution), *_doubles(solution)]
        bad = [finding.verdict for finding in findings].index(BAD) if BAD in (f.verdict for f in findings) else None
        # what follows from being a regular solution is not said of a point that is none
        told = [f for k, f in enumerate(findings) if bad is None or k < bad or f.verdict != GOOD]
        return cls(tuple(told), rows, solution.objective, solution.theta.numel())

    @property
    def holds(self) -> bool:
        """Whether nothing was bad."""
        return all(finding.verdict != BAD for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        said = asdict(self)
        return {
            "holds": self.holds,
            **{key: list(part) if isinstance(part, tuple) else part for key, part in said.items()},
        }


def _optimality(solution: Solution) -> Finding:
    kkt, allowed = solution.kkt, max(solution.tol, 16 * solution.kkt.rounding)
    measured = f"relative KKT residual {kkt.residual:.1e}, allowed {allowed:.0e} ({kkt})"
    if solution.converged:
        return Finding("Is it a solution?", GOOD, measured, "Yes: the optimality conditions hold.")
    cure = (
        "Train on, or polish it: dif.fit(problem, solution.params). Where that does not end, add a ridge: separable "
        "data and redundant parameters have no minimum."
    )
    cure = explain(solution.kinks) if solution.kinks else cure
    meaning = "No: there is no solution here to predict a change of."
    return Finding("Is it a solution?", BAD, measured, meaning, cure)


def _multipliers(solution: Solution) -> Finding:
    what, size = "Are the multipliers finite?", float(solution.lam.abs().max()) if len(solution.lam) else 0.0
    try:
        solution.check()
    except NotASolutionError:
        pass  # said already
    except DegenerateError as error:
        return Finding(what, BAD, f"{error.measured}, allowed {error.threshold}", error.meaning, error.cure)
    return Finding(what, GOOD, f"largest {size:.3g}", "Yes: a point strictly inside the constraints exists.")


def _independence(solution: Solution) -> Finding:
    active, what = solution.active, "Are the active constraints independent (LICQ)?"
    if not active.active:
        return Finding(what, GOOD, "none is active", "Nothing to compare: this is an unconstrained minimum.")
    measured = f"smallest singular value {active.licq:.2g} of their gradients, allowed above {active.licq_floor:.1e}"
    if active.licq > active.licq_floor:
        return Finding(what, GOOD, measured, "Yes: the multipliers are unique.")
    meaning = "No: one active gradient depends on the others, so the multipliers are not unique."
    return Finding(what, BAD, measured, meaning, "Drop a redundant constraint, or state equal ones once.")


def _curvature(solution: Solution) -> Finding:
    active, what = solution.active, "Is it a strict minimum?"
    measured = f"smallest curvature {active.curvature:.3g}" + (
        " along the binding constraints" if active.binding else ""
    )
    if active.curvature == float("inf"):
        return Finding(what, GOOD, "the binding constraints leave no direction free", "Yes: they fix the parameters.")
    if active.relative_curvature > active.curvature_floor:
        how = "without jumps" if active.weak else "smoothly"
        return Finding(what, GOOD, measured, f"Yes: the solution is unique nearby and moves {how}.")
    meaning = "No: it is not unique, or it is a saddle, and influence does not exist."
    cure = "Add a ridge, drop redundant parameters, fit to a minimum, or pass damping (it changes the answer)."
    return Finding(what, BAD, measured, meaning, cure)


def _weak(solution: Solution) -> list[Finding]:
    active = solution.active
    if not active.weak:
        return []
    named = ", ".join(active.names[j] for j in active.weak)
    meaning = "They touch without force, so the derivative has two sides: DIF answers for the side a change takes."
    return [Finding("Are constraints weakly active?", NOTE, named, meaning)]


def _uncertain(solution: Solution) -> list[Finding]:
    active = solution.active
    what = "Is it clear which constraints bind?"
    if not active.uncertain:
        return [Finding(what, GOOD, f"none within a factor of 100 of the threshold {active.tolerance:.0e}", "Yes.")]
    named = ", ".join(active.names[j] for j in active.uncertain)
    meaning = "These could be classed otherwise: their slack or multiplier is near the threshold."
    cure = "Solve more tightly, or compare with switching=True, which does not depend on it."
    return [Finding(what, NOTE, f"{named} (threshold {active.tolerance:.0e})", meaning, cure)]


def _reached(rows: Sequence[Row]) -> list[Finding]:
    """The margin of each constraint beside what one removal moves it by."""
    what = "Is it clear which constraints bind, whoever is removed?"
    looked = [row for row in rows if row.largest is not None]
    if not looked:
        return [Finding(what, GOOD, "equalities only", "Yes.")]

    def said(row: Row) -> str:
        which, number = ("multiplier", row.multiplier) if row.state == BINDING else ("slack", row.slack)
        moves = f"one removal moves it by {row.largest:.2g} at most, {row.median:.2g} in the median"
        return f"{row.name}: {which} {number:.3g}, {moves}"

    def times(row: Row) -> float:
        number = row.multiplier if row.state == BINDING else row.slack
        return number / row.largest if row.largest else float("inf")

    near = sorted((row for row in looked if times(row) <= 1), key=times)
    if near:
        meaning = (
            "Not for all: single removals can make these let go or begin to bind. Predictions allow for that "
            '(switching="auto"); a derivative would not.'
        )
        return [Finding(what, NOTE, "; ".join(map(said, near)), meaning)]
    return [
        Finding(
            what,
            GOOD,
            said(min(looked, key=times)),
            "Yes: no single removal is predicted to move a constraint that far.",
        )
    ]


def _smoothness(solution: Solution) -> list[Finding]:
    what = "Are the losses smooth?"
    if not solution.kinks:
        return [Finding(what, GOOD, "no kink found by probing", "Yes, as far as was seen.")]
    named = "; ".join(map(str, solution.kinks))
    if not solution.converged:
        return [Finding(what, BAD, named, "No: a minimum tends to lie on kinks, where no gradient can vanish.")]
    meaning = "No. The solution is not on a kink, but a removal may carry samples across one, which no derivative sees."
    return [Finding(what, NOTE, named, meaning, "Retrain the strongest, or use a smooth loss or activation.")]


def _doubles(solution: Solution) -> list[Finding]:
    what, pairs = "Are all losses of a person changed together?", solution.problem.same_data
    words = [(f"{a.name}, {b.name}", SameDataWarning.words(a.name, b.name)) for a, b in pairs]
    return [Finding(what, NOTE, named, asked) for named, asked in words]


def _rows(solution: Solution, margins: Sequence[Margin | None]) -> tuple[Row, ...]:
    active = solution.active
    state = dict.fromkeys(active.binding, BINDING) | dict.fromkeys(active.weak, "weak")
    reach = 1e-12 * (1 + solution.program.tau.abs())  # what rounding leaves of f − τ
    slack = torch.where(solution.c.abs() <= reach, 0.0, -solution.c).tolist()
    lam = solution.lam.tolist()
    return tuple(
        Row(
            name, state.get(j, "inactive"), slack[j], lam[j], j in active.uncertain,
            None if margin is None else margin.largest, None if margin is None else margin.median,
        )
        for j, (name, margin) in enumerate(zip(active.names, margins, strict=True))
    )  # fmt: skip
