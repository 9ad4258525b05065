"""The words of a report: numbers as text, constraints as formulas and in sentences, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dif.errors import count_words
from dif.optimality.judgement import BAD, GOOD, NOTE
from dif.optimality.solution import Solution
from dif.problem.samples import Samples
from dif.problem.term import Function, SampleSum
from dif.report.subjects import SampleSets
from dif.results.change import name_entry
from dif.results.influence import TRUSTED

_DIGITS = 4  # significant digits of a number, here and in report.js
_SMALLEST, _LARGEST = 1e-4, 1e6  # sizes between which a number is written without an exponent
_MOST_COEFFICIENTS = 6  # coefficients of a linear row that a formula lists
_LOOSENED = 0.1  # share of the limit by which a constraint is loosened in words
_LOOSENED_FROM_ZERO = 0.01  # what it is loosened by if its limit is 0
# Beginning of the verdict where predictions can be trusted, and where they cannot
_ACCEPTED = "Predictions for this model can be trusted"
_REFUSED = "Predictions for this model cannot be trusted"
# What to do about a target with kinks
_SMOOTH = "Derivatives do not see jumps or kinks: use a smooth target (a probability, for example), or retrain."
# What to do about perturbations that are too large
_TOO_LARGE = (
    "These removals are too large for a first-order prediction: ask for an accuracy (--accuracy 0.05, or "
    "dif.AdaptiveInfluence), retrain, or use a larger ridge or more samples."
)


def format_number(x: float | None, *, signed: bool = False) -> str:
    """Return a number with four significant digits, "−" as minus sign; "—" for no number.

    >>> [format_number(x) for x in (0.02, -12345.6, 1.5e-7, None)]
    ['0.02', '−12346', '1.5e−7', '—']
    """
    if x is None or not math.isfinite(x):
        return "—"
    size = abs(x)
    if size == 0:
        return "0"
    if _SMALLEST <= size < _LARGEST:
        text = f"{size:.0f}" if size >= 10 ** (_DIGITS - 1) else f"{size:.{_DIGITS}g}"
    else:
        mantissa, exponent = f"{size:.{_DIGITS - 1}e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    sign = "-" if x < 0 else "+" if signed else ""
    return (sign + text).replace("-", "−")


def format_percent(share: float) -> str:
    """Return a share in per cent: two significant digits below 10 %, a whole number above.

    >>> [format_percent(share) for share in (0.0312, 0.5, 2e-7)]
    ['3.1 %', '50 %', 'less than 0.001 %']
    """
    size = abs(100 * share)
    if 0 < size < 0.001:
        return "less than 0.001 %"
    text = f"{size:.0f}" if size >= 10 else f"{size:.2g}"
    return f"{'−' if share < 0 and size else ''}{text} %"


def write_formulas(solution: Solution, sets: SampleSets) -> list[str]:
    """Return the left-hand side, relation and limit of each row as one line of text.

    Args:
        solution: The solution whose constraints are written.
        sets: Names for the sets of samples that sums are over.
    """
    formulas, minimised = [], [s.samples for c, s in solution.problem.objective.sums if c > 0]
    for constraint, shape in zip(solution.problem.constraints, solution.program.shapes, strict=True):
        sign = -1.0 if constraint.negated else 1.0
        for row in range(shape.numel()):
            summands = [(sign * c, _describe_sum(s, sets, minimised)) for c, s in constraint.term.sums if c]
            for c, function in constraint.term.functions:
                parts = _split_function(function, row if shape else None, solution)
                summands += [(sign * c * factor, text) for factor, text in parts if c * factor]
            limit = sign * float(constraint.tau.expand(shape).reshape(-1)[row]) + 0.0
            relation = "≥" if constraint.negated else constraint.kind.symbol
            formulas.append(f"{_join(summands)} {relation} {format_number(limit)}")
    return formulas


def _describe_sum(part: SampleSum, sets: SampleSets, minimised: Sequence[Samples]) -> str:
    """Describe a sum over samples, which samples it is over, and whether it is of a loss that training minimises."""
    members = torch.nonzero(part.weights).reshape(-1).tolist()
    if not members:
        return part.words
    kind = "mean" if part.normalised else "sum" if bool((part.weights[members] == 1).all()) else "weighted sum"
    is_loss = any(part.samples.same_loss(other) for other in minimised)
    name = f"{kind}{' loss' if is_loss else ''} of {part.samples.name}"
    return name if part.everyone else f"{name} over {sets.describe(part.samples, members)}"


def _split_function(function: Function, row: int | None, solution: Solution) -> list[tuple[float, str]]:
    """Return the summands of one row of a function: the entries of θ if it is linear in a few of them."""
    name = function.name if row is None else f"{function.name}[{row}]"
    if function.matrix is None:
        return [(1.0, name)]
    coefficients = function.matrix if function.matrix.dim() == 1 else function.matrix[row or 0]
    used = torch.nonzero(coefficients).reshape(-1).tolist()
    if not 0 < len(used) <= _MOST_COEFFICIENTS:
        return [(1.0, f"{name} ({len(used)} coefficients)")]
    everything = solution.program.parameters.tensors(solution.theta)
    acted_on = {name: tensor for name, tensor in everything.items() if function.of in (None, name)}
    return [(float(coefficients[i]), name_entry(acted_on, i)) for i in used]


def _join(summands: Sequence[tuple[float, str]]) -> str:
    """Write a sum of terms with their factors."""
    text = ""
    for factor, name in summands:
        size = "" if abs(factor) == 1.0 else f"{format_number(abs(factor))}·"
        sign = ("−" if factor < 0 else "") if not text else (" − " if factor < 0 else " + ")
        text += f"{sign}{size}{name}"
    return text or "0"


def explain_constraint(row: Mapping[str, Any], objective: float) -> str:
    """Say what a constraint does to the model, from a row of the certificate and the value of the objective."""
    if row["state"] == "violated":
        return f"Violated by {format_number(abs(row['slack']))}."
    if row["relation"] == "=":
        return f"Must be met exactly, so it always shapes the model.{_price(row, objective, 'Moving')}"
    doubt = " Whether it is reached is uncertain." if row["uncertain"] else ""
    near = row["largest"] is not None and row["largest"] >= (
        row["multiplier"] if row["state"] == "binding" else row["slack"]
    )
    if row["state"] == "binding":
        freed = " Without a single sample it may no longer be reached." if near else ""
        return f"The limit is reached, and it shapes the model.{_price(row, objective, 'Loosening')}{freed}{doubt}"
    if row["state"] == "weak":
        return f"The limit is just reached without shaping the model; after a small change of the data it may.{doubt}"
    part = row["slack"] / abs(row["limit"]) if row["limit"] else 2.0
    share = f", {format_percent(part)} of the limit" if part < 1 else ""
    reached = " Without a single sample it may be reached." if near else ""
    room = f"There is room of {format_number(row['slack'])}{share}."
    return f"The limit is not reached, so it does not shape the model. {room}{reached}{doubt}"


def _price(row: Mapping[str, Any], objective: float, verb: str) -> str:
    """Say what moving the limit would do to the objective, to first order."""
    step = _LOOSENED * abs(row["limit"]) or _LOOSENED_FROM_ZERO
    change = abs(row["multiplier"]) * step
    if change == 0:
        return ""
    share = f" ({format_percent(_LOOSENED)} of it)" if row["limit"] else ""
    relative = f" ({format_percent(change / abs(objective))})" if objective else ""
    does = "lower" if verb == "Loosening" else "change"
    moved = f"{verb} it by {format_number(step)}{share}"
    return f" {moved} would {does} the objective by about {format_number(change)}{relative}."


@dataclass(frozen=True)
class Verdict:
    """One sentence on the predictions for a model, and what to do where they cannot be trusted."""

    sign: str  # good, note or bad
    words: str
    cure: str = ""

    @classmethod
    def of(
        cls, certificate: Mapping[str, Any], assessment: Mapping[str, Any] | None, retrained: Mapping[str, Any] | None,
        unanswered: tuple[int, str] | None = None, kinked: str = "", instead: int = 0,
    ) -> Verdict:  # fmt: skip
        """Judge by the strongest evidence: a failed certificate, then retrainings, then expected errors.

        Args:
            certificate: `Certificate.to_dict()`.
            assessment: `Influence.diagnostics["assessment"]`; None where nothing was assessed.
            retrained: Results of retraining: `n`, `relative_error`, `wrong_signs`; None where nothing was retrained.
            unanswered: How many removals have no answer, and the reason for the first of them.
            kinked: What is not smooth about the target; empty where it is smooth.
            instead: How many of the removals without an answer were carried out by training again.
        """
        verdict = _judge(certificate, assessment, retrained)
        if kinked and verdict.sign == BAD:
            verdict = cls(BAD, f"{_REFUSED}: the target is not smooth ({kinked}).", _SMOOTH)
        if unanswered is not None and verdict.sign != BAD:
            count, reason = unanswered
            have = "has" if count == 1 else "have"
            words = f"{verdict.words} {count_words(count, 'removal')} {have} no answer: {reason.rstrip('.')}."
            if instead:
                which = "it" if count == 1 else "each of them" if instead == count else f"{instead} of them"
                words += f" The model was trained again without {which}."
            verdict = cls(NOTE if instead < count else verdict.sign, words, verdict.cure)
        return verdict


def _judge(
    certificate: Mapping[str, Any], assessment: Mapping[str, Any] | None, retrained: Mapping[str, Any] | None
) -> Verdict:
    """Return the verdict on smooth targets with an answer for every removal."""
    bad = [finding for finding in certificate["findings"] if finding["verdict"] == BAD]
    if bad:
        return Verdict(BAD, f"{_REFUSED}. {bad[0]['meaning']}", bad[0]["cure"])
    if retrained is not None:
        return _judge_retraining(retrained, assessment)
    if assessment is None:
        return Verdict(NOTE, "No prediction was checked.", "Leave out assess=0, or retrain.")
    if assessment["pooled"] is None:
        return Verdict(BAD, f"{_REFUSED}: they could not be checked ({assessment['failed']}).", _TOO_LARGE)
    removals = count_words(len(assessment["rows"]), "removal")
    method = f"estimated for {removals} by two more steps of Newton's method each"
    error = _percent(assessment["pooled"])
    if assessment["pooled"] <= TRUSTED:
        words = f"{_ACCEPTED}: they are off by about {error} ({method})."
        return Verdict(GOOD, words, "`dif retrain` verifies the strongest.")
    return Verdict(BAD, f"{_REFUSED}: they are off by about {error} ({method}).", _TOO_LARGE)


def _judge_retraining(retrained: Mapping[str, Any], assessment: Mapping[str, Any] | None) -> Verdict:
    """Return the verdict on predictions that were compared with retraining."""
    n, error, wrong = retrained["n"], retrained["relative_error"], retrained["wrong_signs"]
    removed = "1 sample was removed" if n == 1 else f"{n} samples were removed, one at a time,"
    done = f"{removed} and the model was trained again"
    signs = "all in the right direction" if wrong == 0 else f"{wrong} of {n} in the wrong direction"
    estimate = None if assessment is None else assessment["pooled"]
    expected = "" if estimate is None else f" ({_percent(estimate)} was expected)"
    comparison = f"the predictions were off by {_percent(error)} overall, {signs}{expected}"
    if error <= TRUSTED:
        return Verdict(GOOD, f"{_ACCEPTED}: {done}, and {comparison}.")
    return Verdict(BAD, f"{_REFUSED}: {done}, and {comparison}.", _TOO_LARGE)


def _percent(share: float) -> str:
    """Write a relative error in per cent, without claiming more than was measured."""
    if not share < 1:
        return "100 % or more"
    return "less than 0.1 %" if share < 0.001 else format_percent(share)
