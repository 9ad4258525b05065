"""Scores as text and as HTML, for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor

from dif.errors import format_table
from dif.runtime.inputs import write_label

MOST_TARGETS = 6  # targets that are shown


@dataclass(frozen=True)
class Ranked:
    """One perturbation of a ranking: its row, its label and its score.

    The row is that of the scores that were ranked. In a slice it counts the rows of the slice, not the samples:
    `part.carried_out.pick([one.index for one in part.top(5)])` are the five perturbations.
    """

    index: int
    label: str
    value: float
    name: Any = None  # label of the sample in the index of the user's DataFrame; None without a DataFrame


def format_summary(
    heading: str, trust: str, targets: Sequence[str], values: Tensor, tops: Sequence[Sequence[Ranked]]
) -> str:
    """Return the heading, a sentence about trust, the spread of the scores, and the largest for each target."""
    shown = list(targets)[:MOST_TARGETS]
    left_out = f"… and {len(targets) - len(shown)} more targets" if len(targets) > len(shown) else ""
    described = tuple(_describe(name, values[:, t]) for t, name in enumerate(shown))
    spread = format_table(("target", "lowest", "highest", "median size"), described)
    rankings = []
    for t, (name, top) in enumerate(zip(shown, tops, strict=True)):
        table = format_table(*_tabulate(top, ["change"], values[:, t : t + 1]))
        rankings.append(f"Largest changes of {name}:\n{table}")
    return "\n\n".join(part for part in (f"{heading}\n{trust}".strip(), spread, left_out, *rankings) if part)


def format_html(heading: str, trust: str, targets: Sequence[str], values: Tensor, top: Sequence[Ranked]) -> str:
    """Return the heading, a sentence about trust, and the scores of the highest-ranked perturbations as HTML."""
    shown = list(targets)[:MOST_TARGETS]
    headings, rows, _ = _tabulate(top, shown, values[:, : len(shown)])
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    left_out = [
        f"{count - number} more {what}"
        for number, count, what in ((len(top), len(values), "perturbations"), (len(shown), len(targets), "targets"))
        if count > number
    ]
    parts = (escape(heading), escape(trust), table, f"… and {', '.join(left_out)}" if left_out else "")
    return "".join(f"<p>{part}</p>" if not part.startswith("<table") else part for part in parts if part)


def _describe(name: str, column: Tensor) -> tuple[str, ...]:
    """Return the name of a target and the spread of its scores."""
    known = column[torch.isfinite(column)]
    numbers = (known.min(), known.max(), known.abs().median()) if len(known) else (float("nan"),) * 3
    return name, *(f"{float(number):+.4g}" for number in numbers[:2]), f"{float(numbers[2]):.4g}"


def _tabulate(
    top: Sequence[Ranked], columns: Sequence[str], values: Tensor
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], int]:
    """Return the headings and the cells of a ranking, and how many of its columns are words.

    These are the index of a data frame, if there is one, and the label.
    """
    words = 1 if all(entry.name is None for entry in top) else 2
    rows = []
    for entry in top:
        numbers = [f"{v:+.4g}" if v == v else "no answer" for v in values[entry.index].tolist()]
        rows.append((*(write_label(entry.name), entry.label)[-words:], *numbers))
    return (*("index", "perturbation")[-words:], *columns), tuple(rows), words
