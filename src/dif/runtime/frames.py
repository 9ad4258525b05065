"""Read pandas data frames and series, without importing pandas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dif.errors import InvalidInputError, few

_NUMBERS = "biuf"  # kinds of numpy dtypes that are numbers: bool, int, unsigned int, float


def read_frame(frame: Any, what: str) -> np.ndarray:
    """Return the columns of a data frame as one array, (rows, columns).

    Columns of one floating-point dtype keep it; others become float64. `what` names the data in error messages.
    """
    if not hasattr(frame, "items") or not len(frame.columns):  # a frame of another library, or an empty one
        return frame.to_numpy()
    _check_missing(frame, what)
    columns = [(name, column, column.to_numpy()) for name, column in frame.items()]
    wrong = [f"{name} ({column.dtype})" for name, column, values in columns if values.dtype.kind not in _NUMBERS]
    if wrong:
        raise InvalidInputError(
            f"The DataFrame that was given as {what} has columns that are not numbers: {few(wrong)}.",
            "All columns must be numbers, or True and False, with nothing missing.",
            "A DataFrame becomes one tensor with its rows and columns, and a tensor holds numbers only.",
            "Leave those columns out, or encode them: frame.drop(columns=[…]), pandas.get_dummies(frame, dtype=float).",
        )
    dtypes = {values.dtype for _, _, values in columns}
    shared = len(dtypes) == 1 and next(iter(dtypes)).kind == "f"
    return frame.to_numpy(dtype=next(iter(dtypes)) if shared else np.float64)


def _check_missing(frame: Any, what: str) -> None:
    """Refuse columns of a nullable dtype, such as Int64, that lack entries; NaN in other columns is found later."""
    nullable = [
        (name, column)
        for name, column in frame.items()
        if not isinstance(column.dtype, np.dtype) and getattr(column.dtype, "kind", "") in _NUMBERS
    ]
    missing = [f"{name} ({column.dtype}, {count})" for name, column in nullable if (count := int(column.isna().sum()))]
    if missing:
        raise InvalidInputError(
            f"The DataFrame that was given as {what} has columns with missing entries: {few(missing)}.",
            "No entry may be missing.",
            "A missing entry has no value that a loss could be computed from.",
            "Leave those rows out, or fill them: frame.dropna(), frame.fillna(0).",
        )


def find_index(data: Any, what: str) -> Any:
    """Return the index of the first data frame or series in a structure; None if there is none.

    Frames that hold the same labels in another order are refused; `what` names the data in error messages.
    """
    indices = [frame.index for frame in _find_frames(data)]
    for other in indices[1:]:
        if is_reordered(other, indices[0]):
            raise InvalidInputError(
                f"The data frames in {what} have the same index in different orders.",
                "Frames with the same labels must have them in the same order.",
                "Sample i is row i of every frame, whatever its label, so rows of different samples would be combined.",
                "Reorder one of them: y = y.loc[X.index].",
            )
    return indices[0] if indices else None


def read_labels(column: Any) -> Any:
    """Return the index of a data frame or a series; None for other objects."""
    index = getattr(column, "index", None)
    return index if hasattr(column, "to_numpy") and hasattr(index, "equals") else None


def write_label(label: Any) -> str:
    """Return a label of an index as text; that of a MultiIndex without the types of its parts.

    >>> write_label("ann"), write_label(("a", np.int64(11)))
    ('ann', "('a', 11)")
    """
    if not isinstance(label, tuple):
        return str(label)
    return f"({', '.join(repr(part) if isinstance(part, str) else str(part) for part in label)})"


def is_reordered(index: Any, labels: Sequence[Any]) -> bool:
    """Return whether an index has these labels in another order."""
    return not is_same(index, labels) and set(index) == set(labels)


def is_same(index: Any, labels: Sequence[Any]) -> bool:
    """Return whether an index has these labels in this order; the latter may come from a file, as a tuple."""
    return index.equals(labels) if hasattr(labels, "equals") else list(index) == list(labels)


def is_numbering(index: Any) -> bool:
    """Return whether an index is the default one of pandas, 0 … n − 1, which names no rows."""
    return type(index).__name__ == "RangeIndex" and (index.start, index.step) == (0, 1)


def check_order(column: Any, labels: Sequence[Any] | None, what: str, owner: str) -> None:
    """Refuse a data frame or a series that has the labels of the samples in another order.

    Args:
        column: What the user gave; anything without an index goes by position.
        labels: Labels of the samples in the index of the user's data; None without one.
        what: What was given, for the error message: the beginning of a sentence.
        owner: Whose labels these are, for the error message.
    """
    index = None if labels is None else read_labels(column)
    if index is not None and labels is not None and is_reordered(index, labels):
        raise InvalidInputError(
            f"{what} has the labels of {owner} in another order.",
            "The same labels must be in the same order.",
            "Rows are taken by position, whatever their labels, so values of different samples would be combined.",
            "Put it into their order with .loc[X.index], or, if its rows are in order already, pass .to_numpy().",
        )


def _find_frames(data: Any) -> Iterator[Any]:
    """Yield the data frames and series of a structure."""
    if isinstance(data, Mapping):
        data = tuple(data.values())
    if isinstance(data, tuple | list):
        for part in data:
            yield from _find_frames(part)
    elif read_labels(data) is not None:
        yield data
