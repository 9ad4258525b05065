"""The samples of a report as CSV, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # beginnings of a cell that spreadsheets take for a formula


def write_csv(report: Mapping[str, Any]) -> str:
    """Return the listed samples of a report, one line each, with numbers in full precision."""
    samples = report["samples"]
    losses = list(dict.fromkeys(name for sample in samples for name in sample["losses"]))
    features = list(dict.fromkeys(name for sample in samples for name in sample["features"]))
    fixed = ["sample", "group", "predicted change", "retrained change", "expected relative error"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(
        map(_defuse, [*fixed, *(f"loss {name}" for name in losses), *(f"feature {name}" for name in features)])
    )
    for sample in samples:
        numbers = (sample["score"], sample.get("actual"), sample["expected_error"])
        numbers += tuple(sample["losses"].get(name) for name in losses)
        texts = [sample["features"].get(name, "") for name in features]
        cells = [
            _defuse(sample["name"]),
            _defuse(sample["group"] or ""),
            *("" if x is None else repr(x) for x in numbers),
        ]
        writer.writerow([*cells, *map(_defuse, texts)])
    return text.getvalue()


def _defuse(text: str) -> str:
    """Return a cell as it is; with an apostrophe before it if a spreadsheet would run it as a formula.

    >>> [_defuse(text) for text in ("=1+1", "+a", "-a", "@a", "-0.5", "a=1")]
    ["'=1+1", "'+a", "'-a", "'@a", '-0.5', 'a=1']
    """
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
