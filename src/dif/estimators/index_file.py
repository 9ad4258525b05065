"""The index of a user's data frame as JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_TIMES = ("datetime64", "timedelta64", "period")  # kinds of labels that JSON holds as text


def describe_index(index: Any) -> dict[str, Any]:
    """Return the labels of an index, and the name and dtype of each of its levels, as JSON can hold them."""
    labels = index.tolist() if hasattr(index, "tolist") else list(index)
    dtypes = list(index.dtypes) if hasattr(index, "levels") else [getattr(index, "dtype", "object")]
    levels = zip(getattr(index, "names", [None]), dtypes, strict=True)
    about = {"index": labels, "levels": [[name, str(dtype)] for name, dtype in levels]}
    return json.loads(json.dumps(about, default=str))  # dates become text


def restore_index(about: dict[str, Any]) -> Any:
    """Return the index that `describe_index` described; a tuple of labels without pandas, None where there is none."""
    if about.get("index") is None:
        return None
    labels = tuple(tuple(label) if isinstance(label, list) else label for label in about["index"])  # of a MultiIndex
    try:
        import pandas
    except ImportError:
        return labels
    names, dtypes = zip(*about.get("levels", [[None, "object"]]), strict=True)
    if len(dtypes) == 1:
        return _restore_level(labels, dtypes[0], pandas).rename(names[0])
    columns = zip(zip(*labels, strict=True), dtypes, strict=True)
    return pandas.MultiIndex.from_arrays([_restore_level(*column, pandas) for column in columns], names=names)


def pick_labels(index: Any, rows: list[int]) -> Any:
    """Return the labels of some rows of what `restore_index` returned."""
    return tuple(index[row] for row in rows) if isinstance(index, tuple) else None if index is None else index[rows]


def _restore_level(labels: Sequence[Any], dtype: str, pandas: Any) -> Any:
    """Return one level of labels; dates, durations and periods are read from their text."""
    level = pandas.Index(list(labels), tupleize_cols=False)
    return level.astype(dtype) if dtype.startswith(_TIMES) else level
