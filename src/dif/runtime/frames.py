"""Read pandas data frames and series, without importing pandas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    return frame.to_numpy() if shared else np.stack([values.astype(np.float64) for _, _, values in columns], axis=1)


def find_index(data: Any, what: str) -> Any:
    """Return the index of the first data frame or series in a structure; None if there is none.

    Frames that hold the same labels in another order are refused; `what` names the data in error messages.
    """
    indices = [frame.index for frame in _find_frames(data)]
    for other in indices[1:]:
        first = indices[0]
        if not other.equals(first) and set(other) == set(first):
            raise InvalidInputError(
                f"The data frames in {what} have the same index in different orders.",
                "Frames with the same labels must have them in the same order.",
                "Sample i is row i of every frame, whatever its label, so rows of different samples would be combined.",
                "Reorder one of them: y = y.loc[X.index].",
            )
    return indices[0] if indices else None


def _find_frames(data: Any) -> Iterator[Any]:
    """Yield the data frames and series of a structure."""
    if isinstance(data, Mapping):
        data = tuple(data.values())
    if isinstance(data, tuple | list):
        for part in data:
            yield from _find_frames(part)
    elif hasattr(data, "to_numpy") and hasattr(getattr(data, "index", None), "equals"):
        yield data
