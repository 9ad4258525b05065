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
            f"One selection may be given, not {len(key)} separated by commas: write influence.values[3, 1] for one "
            "score, influence[[3, 1]] for two rows, and influence.to_frame() for columns by name."
        )
    if isinstance(key, slice):
        try:
            values = list(range(P))[key]
        except (TypeError, ValueError) as error:  # bounds that are not integers, a step of 0
            raise _selection_error(key, P) from error
    elif isinstance(key, str) or as_index(key) is not None:
        values = [key]
    else:
        values = key.tolist() if hasattr(key, "tolist") else list(key) if isinstance(key, Iterable) else None
    if not isinstance(values, list):
        raise _selection_error(f"an object of type {type(key).__name__}", P)
    if values and all(isinstance(value, bool) for value in values):
        if len(values) != P:
            raise _selection_error(f"a mask of {len(values)}", P)
        check_labels(key, index, "The mask", "the scores")
        values = [row for row, chosen in enumerate(values) if chosen]
    if not values:
        raise _selection_error(f"{key}, which selects none" if isinstance(key, slice) else "one that selects none", P)
    if all(isinstance(value, str) for value in values):
        return _find_labels(values, labels, index)
    wrong = [value for value in values if as_index(value) is None]
    if wrong:
        raise _selection_error(f"a list that includes {few(wrong, quoted=True)}", P)
    rows = [int(value) for value in values]
    outside = [row for row in rows if not -P <= row < P]
    if outside:
        raise IndexError(f"There are scores of {P} perturbations, but index {outside[0]} was given.")
    return [row % P for row in rows]


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
            f"No perturbation has the label {few(unknown, quoted=True)}; write it as in `influence.perturbations`, "
            f"with or without its verb: {few(labels, quoted=True)}."
        )
    return [row for key in keys for row in by_label[key]]


def _selection_error(found: Any, P: int) -> InvalidInputError:
    return InvalidInputError(
        f"Scores are selected by an integer, a slice, a label, a mask of {P} entries, or a list of integers or labels, "
        f"not by {found}; take columns, the targets, from influence.to_frame()."
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
