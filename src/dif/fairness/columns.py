"""Columns: what users pass beside the samples, one value per sample, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif import InvalidInputError


def check(valid: bool, found: str, allowed: str, meaning: str, cure: str) -> None:
    """Raise an InvalidInputError of these sentences unless something is valid."""
    if not valid:
        raise InvalidInputError(found, allowed, meaning, cure)


def check_function(value: Any, name: str) -> Any:
    """Return the function that was passed as the argument `name`."""
    found = f"`{name}` is of type {type(value).__name__}."
    cure = "Pass a function of the params and a batch (`link`: of the scores) that returns one number per sample."
    check(callable(value), found, "It must be a function.", "It is evaluated at many parameters.", cure)
    return value


def check_order(**columns: Any) -> Any:
    """Return the index of the first pandas object among columns of the same samples; None if there is none.

    Sample i is row i of each of them, whatever its label, as in scikit-learn. Columns that have the same labels in
    another order are refused.

    >>> check_order(X=[[1.0], [2.0]], y=[0, 1]) is None
    True
    """
    indices = {name: value.index for name, value in columns.items() if hasattr(getattr(value, "index", None), "equals")}
    for name, index in indices.items():
        first, other = next(iter(indices.items()))
        check(
            index.equals(other) or sorted(map(repr, index)) != sorted(map(repr, other)),
            f"`{first}` and `{name}` have the same index in different orders.",
            "Data of the same samples must have them in the same order.",
            "Sample i is row i of each, whatever its label, so values of different samples would be combined.",
            f"Put `{name}` into the order of `{first}`, with .loc[] and the index of the latter.",
        )
    return next(iter(indices.values()), None)


def as_array(column: Any) -> np.ndarray:
    """Return one or several columns as an array; one without dimensions for anything else."""
    try:
        return np.asarray(column.detach().cpu() if isinstance(column, Tensor) else column)
    except ValueError:  # lists of different lengths
        return np.asarray(None)


def read_values(column: Any, name: str, count: int | None = None) -> np.ndarray:
    """Return a column as an array of any dtype; it has one value for each of `count` samples, if that is known.

    >>> read_values(torch.tensor([1, 0]), "labels", 2)
    array([1, 0])
    """
    values = as_array(column)
    given = f"of type {type(column).__name__}" if values.ndim == 0 else f"an array of shape {values.shape}"
    wanted = "(n,)" if count is None else f"({count},)"
    check(
        values.ndim == 1 and values.size > 0 and len(values) == (len(values) if count is None else count),
        f"`{name}` is {'None' if column is None else given}.",
        f"It must have shape {wanted}.",
        "There is one value for each sample.",
        f"Pass {name} as a list, an array or a column of a data frame, with the samples in the same order.",
    )
    return values


def read_numbers(column: Any, name: str, count: int | None = None, *, negative: bool = True) -> Tensor:
    """Return a column of finite numbers, (n,) float64; they must be ≥ 0 unless `negative`."""
    values = read_values(column, name, count)
    try:
        numbers = torch.as_tensor(values.astype(np.float64))
    except (TypeError, ValueError):  # text
        numbers = torch.full((len(values),), torch.nan, dtype=torch.float64)
    wrong = ~numbers.isfinite() if negative else ~(numbers.isfinite() & (numbers >= 0))
    shown = repr(values[wrong.numpy()].tolist()[0]) if wrong.any() else ""
    check(
        not shown,
        f"`{name}` contains {shown}, in {int(wrong.sum())} of {len(values)} places.",
        f"It must contain finite numbers{'' if negative else ' ≥ 0'}.",
        "Text, missing values and infinity cannot be used in a mean.",
        "Encode text as numbers, and leave out the samples with missing values.",
    )
    return numbers


def read_data(data: Any) -> Any:
    """Return data with its arrays, data frames and series as tensors; frames become (rows, columns) in float64."""
    if isinstance(data, Mapping):
        return {name: read_data(part) for name, part in data.items()}
    if isinstance(data, tuple):
        return tuple(read_data(part) for part in data)
    if hasattr(data, "columns"):
        return torch.stack([read_numbers(data[name], str(name)) for name in data.columns], 1)
    if isinstance(data, Tensor) or (not isinstance(data, list) and not hasattr(data, "__array__")):
        return data
    values = as_array(data)
    return torch.as_tensor(np.array(values)) if values.dtype.kind in "biuf" else read_numbers(values, "data")


def count_samples(data: Any) -> int | None:
    """Return the length of the tensors in data, which must be the same; None if there are none."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else [data]
    lengths = list(dict.fromkeys(len(part) for part in parts if isinstance(part, Tensor) and part.dim()))
    check(
        len(lengths) < 2,
        f"The parts of `data` have {' and '.join(map(str, lengths))} samples.",
        "They must have the same number.",
        "Sample i is row i of every part.",
        "Pass the features and targets of the same samples.",
    )
    return lengths[0] if lengths else None
