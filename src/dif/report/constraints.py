"""Constraints for readers: each as a formula and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dif.optimality.solution import Solution
from dif.problem.sample_losses import SampleLosses
from dif.problem.term import Function, SampleSum
from dif.report.numbers import format_number, format_percent
from dif.report.sample_sets import SampleSets

_MOST_COEFFICIENTS = 6  # coefficients of a linear row that a formula lists
_LOOSENED = 0.1  # share of the limit by which a constraint is loosened in words
_LOOSENED_FROM_ZERO = 0.01  # what it is loosened by if its limit is 0


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


def _describe_sum(part: SampleSum, sets: SampleSets, minimised: Sequence[SampleLosses]) -> str:
    """Describe a sum over samples, which samples it is over, and whether it is of a loss that training minimises."""
    members = torch.nonzero(part.weights).reshape(-1).tolist()
    if not members:
        return part.words
    kind = "mean" if part.normalised else "sum" if bool((part.weights[members] == 1).all()) else "weighted sum"
    name = f"{kind}{' loss' if part.samples in minimised else ''} of {part.samples.name}"
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
    parameters = solution.program.parameters
    layout = [(n, s) for n, s in zip(parameters.names, parameters.shapes, strict=True) if function.of in (None, n)]
    return [(float(coefficients[i]), _name_entry(i, layout)) for i in used]


def _name_entry(i: int, layout: Sequence[tuple[str, torch.Size]]) -> str:
    """Return the name of entry i of the flat parameters with these names and shapes, such as w[2]."""
    for name, shape in layout:
        if i < shape.numel():
            place = np.unravel_index(i, tuple(shape)) if shape else ()
            return f"{name}[{', '.join(map(str, place))}]" if shape else name
        i -= shape.numel()
    return f"θ[{i}]"


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
    if row["relation"] == "=":
        return f"Must be met exactly, so it always shapes the model.{_price(row, objective, 'Moving')}"
    if row["slack"] < 0:
        return f"Violated by {format_number(-row['slack'])}."
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
