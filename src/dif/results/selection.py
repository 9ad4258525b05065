"""Select rows of scores: by position, slice, mask or label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dif.errors import InvalidInputError, few
from dif.runtime.inputs import as_index, check_labels, write_label

_BY_LABEL = ("unanswered", "failed", "crossed", "events")  # diagnostics with an entry for some perturbations, by label
_BY_ROW = ("residuals", "remainders", "by")  # diagnostics with an entry for each perturbation, in order


def find_rows(key: Any, labels: Sequence[str], index: Sequence[Any] | None) -> list[int]:
    """Return the numbers of the rows that a key in square brackets selects.

    Args:
        key: An integer, a slice, a mask, a label, or a list of integers or labels. A label is that of a perturbation
            ("remove train[17]"), the same without its verb ("train[17]"), or text in the index of a data frame.
        labels: Labels of the perturbations.
        index: Label of each row in the index of the user's data frame, or None.

    Raises:
        IndexError: Where an integer is out of range.
    """
    P = len(labels)
    if isinstance(key, tuple):
        raise InvalidInputError(
            f"The scores were indexed with {len(key)} selections, separated by commas.",
            "One selection may be given: a list is written in brackets of its own.",
            "It could mean one score, or several rows.",
            "Write influence.values[3, 1] for one score, influence[[3, 1]] for two rows, and influence.to_frame() for "
            "columns by name.",
        )
    if isinstance(key, slice):
        rows = _find_slice(key, P)
    elif isinstance(key, str):
        rows = _find_labels([key], labels, index)
    elif (number := as_index(key)) is not None:
        rows = [_check_position(number, P)]
    else:
        rows = _find_listed(key, labels, index)
    if not rows:
        raise _selection_error(f"{_describe(key)} selects none of {P} perturbations", P)
    return rows


def _find_slice(key: slice, P: int) -> list[int]:
    """Return the rows of a slice."""
    try:
        return list(range(P))[key]
    except (TypeError, ValueError) as error:  # bounds that are not integers, a step of 0
        raise _selection_error(f"The scores were indexed with {key}", P) from error


def _find_listed(key: Any, labels: Sequence[str], index: Sequence[Any] | None) -> list[int]:
    """Return the rows of a mask, or of a list of integers or labels."""
    P = len(labels)
    values = key.tolist() if hasattr(key, "tolist") else list(key) if isinstance(key, Iterable) else None
    if not isinstance(values, list):
        raise _selection_error(f"The scores were indexed with an object of type {type(key).__name__}", P)
    if values and all(isinstance(value, bool) for value in values):
        if len(values) != P:
            raise _selection_error(f"The mask has {len(values)} entries for {P} perturbations", P)
        check_labels(key, index, "The mask", "the scores")
        return [row for row, chosen in enumerate(values) if chosen]
    if values and all(isinstance(value, str) for value in values):
        return _find_labels(values, labels, index)
    numbers = [as_index(value) for value in values]
    if None in numbers:
        wrong = [value for value, number in zip(values, numbers, strict=True) if number is None]
        raise _selection_error(f"The list of perturbations includes {few(wrong, quoted=True)}", P)
    return [_check_position(number, P) for number in numbers if number is not None]


def _find_labels(keys: list[str], labels: Sequence[str], index: Sequence[Any] | None) -> list[int]:
    """Return the rows with these labels, in the order of the keys."""
    by_label: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        texts = {label, label.partition(" ")[2]} | ({write_label(index[row])} if index is not None else set())
        for text in texts - {""}:
            by_label.setdefault(text, []).append(row)
    unknown = [key for key in keys if key not in by_label]
    if unknown:
        raise InvalidInputError(
            f"No perturbation has the label {few(unknown, quoted=True)}.",
            f"The labels are {few(labels, quoted=True)}.",
            "A label names the samples that a perturbation changes.",
            "Write it as in `influence.perturbations`, with or without its verb: influence['train[17]'].",
        )
    return [row for key in keys for row in by_label[key]]


def _check_position(number: int, P: int) -> int:
    """Return a position ≥ 0; negative ones count from the end."""
    if not -P <= number < P:
        raise IndexError(f"There are scores of {P} perturbations, but index {number} was given.")
    return number % P


def _describe(key: Any) -> str:
    return f"The slice {key}" if isinstance(key, slice) else "The given mask or list"


def _selection_error(found: str, P: int) -> InvalidInputError:
    return InvalidInputError(
        f"{found}.",
        f"A selection is an integer, a slice, a label, a mask of {P} entries, or a list of integers or labels, and "
        "selects at least one.",
        "Scores are selected by perturbation; their columns are the targets.",
        "Write influence[3:10], influence['train[17]'] or influence[mask]; of one target take influence.to_frame().",
    )


def pick_diagnostics(diagnostics: dict[str, Any], rows: list[int], labels: Sequence[str]) -> dict[str, Any]:
    """Return the diagnostics of the selected rows, which have these labels.

    What describes the whole computation stays, such as the pooled error estimate.
    """
    picked, kept = dict(diagnostics), set(labels)
    for key in _BY_LABEL:
        if isinstance(picked.get(key), dict):
            picked[key] = {label: value for label, value in picked[key].items() if label in kept}
    for key in _BY_ROW:
        if isinstance(picked.get(key), list):
            picked[key] = [picked[key][row] for row in rows]
    if picked.get("assessment") is not None:
        known = dict(zip(picked["assessment"]["rows"], picked["assessment"]["errors"], strict=True))
        assessed = [(place, known[row]) for place, row in enumerate(rows) if row in known]
        places, errors = [place for place, _ in assessed], [error for _, error in assessed]
        picked["assessment"] = picked["assessment"] | {"rows": places, "errors": errors}
    if "rows" in picked:  # of a file that is being filled: how many are finished
        picked["rows"] = sum(row < picked["rows"] for row in rows)
    return picked


def find_column(target: Any, names: Sequence[str]) -> int | None:
    """Return the number ≥ 0 of a target that is given by name or by number; None where there is no such target."""
    place = names.index(target) if isinstance(target, str) and target in names else as_index(target)
    return place % len(names) if place is not None and -len(names) <= place < len(names) else None


def match_labels(labels: Sequence[str], others: Sequence[str]) -> tuple[list[int], list[int]] | None:
    """Return the places of the common labels in both lists, in the same order.

    None where neither list is among the other, or a label is not unique.
    """
    places, other_places = ({label: place for place, label in enumerate(given)} for given in (labels, others))
    common = [label for label in min(others, labels, key=len) if label in places and label in other_places]
    unique = len(places) == len(labels) and len(other_places) == len(others)
    if not unique or len(common) < min(len(labels), len(others)):
        return None
    return [places[label] for label in common], [other_places[label] for label in common]
