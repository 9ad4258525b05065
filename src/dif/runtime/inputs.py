"""Read and check what users pass: numbers, lists, arrays, data frames, tensors, objects of dif, paths, axes."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar
from warnings import catch_warnings, simplefilter

import numpy as np
import torch
from torch import Tensor

from dif.errors import InvalidInputError, few

_NUMBERS = "biuf"  # kinds of numpy dtypes that are numbers: bool, int, unsigned int, float


def read_frame(frame: Any, what: str) -> np.ndarray:
    """Return the columns of a data frame as one array, (rows, columns).

    Columns of one floating-point dtype keep it; others become float64. `what` names the data in error messages.
    """
    if not hasattr(frame, "items") or not len(frame.columns):  # a frame of another library, or an empty one
        return frame.to_numpy()
    nullable = {k: c for k, c in frame.items() if not isinstance(c.dtype, np.dtype) and c.dtype.kind in _NUMBERS}
    missing = [f"{name} ({c.dtype}, {count})" for name, c in nullable.items() if (count := int(c.isna().sum()))]
    if missing:  # NaN in other columns is found later
        raise InvalidInputError(
            f"The DataFrame that was given as {what} has columns with missing entries: {few(missing)}; leave those "
            "rows out, or fill them: frame.dropna(), frame.fillna(0)."
        )
    columns = [(name, column, column.to_numpy()) for name, column in frame.items()]
    wrong = [f"{name} ({column.dtype})" for name, column, values in columns if values.dtype.kind not in _NUMBERS]
    if wrong:
        raise InvalidInputError(
            f"The DataFrame that was given as {what} has columns that are not numbers: {few(wrong)}; leave them "
            "out, or encode them: frame.drop(columns=[…]), pandas.get_dummies(frame, dtype=float)."
        )
    dtype, *others = {values.dtype for _, _, values in columns}
    return frame.to_numpy(dtype=dtype if dtype.kind == "f" and not others else np.float64)


def find_index(data: Any, what: str) -> Any:
    """Return the index of the first data frame or series in a structure; None if there is none.

    Frames that hold the same labels in another order are refused; `what` names the data in error messages.
    """
    return check_order(**{f"frame {number} of {what}": frame for number, frame in enumerate(_find_frames(data))})


def read_labels(column: Any) -> Any:
    """Return the index of a data frame, a series, or what was made from one; None for other objects."""
    index = getattr(column, "index", None)  # of a list, a method
    return index if hasattr(index, "equals") else None


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
    if is_same(index, labels):
        return False
    return set(index) == set(labels) or set(map(repr, index)) == set(map(repr, labels))


def is_same(index: Any, labels: Sequence[Any]) -> bool:
    """Return whether an index has these labels in this order; the latter may come from a file, as a tuple."""
    return index.equals(labels) if hasattr(labels, "equals") else list(index) == list(labels)


def is_numbering(index: Any) -> bool:
    """Return whether an index is the default one of pandas, 0 … n − 1, which names no rows."""
    return type(index).__name__ == "RangeIndex" and (index.start, index.step) == (0, 1)


def check_order(**columns: Any) -> Any:
    """Return the index of the first pandas object among columns of the same samples; None if there is none.

    Sample i is row i of each of them, whatever its label, as in scikit-learn. Columns that have the same labels in
    another order are refused.

    Examples:
        >>> check_order(X=[[1.0], [2.0]], y=[0, 1]) is None
        True
    """
    first, index = "", None
    for name, column in columns.items():
        if index is None:
            first, index = name, read_labels(column)
        check_labels(column, index, f"`{name}`", f"`{first}`")
    return index


def check_labels(column: Any, labels: Sequence[Any] | None, what: str, owner: str) -> None:
    """Refuse a data frame or a series that has the labels of the samples in another order.

    Args:
        column: What the user gave; anything without an index goes by position.
        labels: Labels of the samples in the index of the user's data; None without one.
        what: What was given, for the error message: the beginning of a sentence.
        owner: Whose labels these are, for the error message.
    """
    index = read_labels(column)
    if labels is not None and index is not None and is_reordered(index, labels):
        raise InvalidInputError(
            f"{what} has the labels of {owner} in another order. Rows are taken by position, so values of different "
            "samples would be combined. Put it into their order with .loc[X.index], or, if its rows are in order "
            "already, pass .to_numpy()."
        )


def read_array(column: Any) -> np.ndarray:
    """Return one or several columns as an array; one without dimensions for anything else."""
    try:
        return np.asarray(column.detach().cpu() if isinstance(column, Tensor) else column)
    except ValueError:  # lists of different lengths
        return np.asarray(None)


def read_column(column: Any, name: str, count: int | None = None) -> np.ndarray:
    """Return a column as an array of any dtype; it has one value for each of `count` samples, if that is known.

    >>> read_column(torch.tensor([1, 0]), "labels", 2)
    array([1, 0])
    """
    values = read_array(column)
    if values.ndim != 1 or values.size == 0 or count not in (None, len(values)):
        wanted = "(n,)" if count is None else f"({count},)"
        raise InvalidInputError(f"`{name}` must have shape {wanted}, one value per sample, not {describe(column)}.")
    return values


def read_numbers(column: Any, name: str, count: int | None = None, *, negative: bool = True) -> Tensor:
    """Return a column of finite numbers, (n,) float64; they must be ≥ 0 unless `negative`."""
    values = read_column(column, name, count)
    try:
        numbers = torch.as_tensor(values.astype(np.float64))
    except (TypeError, ValueError):  # text
        numbers = torch.full((len(values),), torch.nan, dtype=torch.float64)
    wrong = ~(numbers.isfinite() & ((numbers >= 0) | negative))
    if wrong.any():
        raise InvalidInputError(
            f"`{name}` must contain finite numbers{'' if negative else ' ≥ 0'}, not "
            f"{values[wrong.numpy()].tolist()[0]!r}, in {int(wrong.sum())} of {len(values)} places."
        )
    return numbers


def refuse_text(table: Any, what: str, names: Sequence[str] = ()) -> None:
    """Refuse text and dates in a column or a table of numbers; text that is a number is left to who reads it.

    Args:
        table: A column, or a table, whose columns are named in the error message.
        what: The name of the argument, for the error message.
        names: Names of the columns; without them those of the table, or their numbers.
    """
    if hasattr(table, "columns"):
        columns = {str(name): np.asarray(table[name], dtype=object) for name in table.columns}
    else:
        values = np.asarray(read_array(table), dtype=object)
        columns = {str(number): column for number, column in enumerate(values.T)} if values.ndim == 2 else {"": values}
    named = zip(names or columns, columns.values(), strict=True)
    wrong = {name: texts[0] for name, column in named if (texts := [v for v in np.ravel(column) if _is_text(v)])}
    if "" in wrong:
        raise InvalidInputError(f"`{what}` must contain numbers only, not {wrong['']!r}; encode text as numbers.")
    if wrong:
        raise InvalidInputError(
            f"`{what}` has columns of text or dates: {few(list(wrong))}; leave them out, or encode them as numbers: "
            "pandas.get_dummies(X, dtype=float), or a OneHotEncoder."
        )


def describe(value: Any) -> str:
    """Describe what was given as a column: "None", "an array of shape (2, 3)" or "of type str"."""
    shape = read_array(value).shape
    return "None" if value is None else f"an array of shape {shape}" if shape else f"of type {type(value).__name__}"


def _is_text(value: Any) -> bool:
    """Return whether a value is a date, or text that is not a number."""
    if not isinstance(value, str):
        return isinstance(value, date | np.datetime64)
    try:
        float(value)
    except ValueError:
        return True
    return False


def _find_frames(data: Any) -> Iterator[Any]:
    """Yield the data frames and series of a structure."""
    if isinstance(data, Mapping):
        data = tuple(data.values())
    if isinstance(data, tuple | list):
        for part in data:
            yield from _find_frames(part)
    elif read_labels(data) is not None:
        yield data


T = TypeVar("T")


def as_tensor(value: Any, what: str, dtype: torch.dtype | None = None) -> Tensor:
    """Convert numbers to a detached tensor; a data frame becomes (rows, columns).

    Args:
        value: A tensor, an array, a data frame or nested lists.
        what: What the numbers are, for error messages; a noun such as "multipliers".
        dtype: Dtype of the result; None keeps that of the numbers.
    """
    masked = getattr(value, "mask", None) if hasattr(value, "filled") else None
    if masked is not None and bool(masked.any() if hasattr(masked, "any") else masked):
        raise InvalidInputError(
            f"The array that was given as {what} has {int(masked.sum())} masked entries, which have no value; drop "
            "those samples, or fill the entries with array.filled(value) first."
        )
    if hasattr(value, "to_numpy"):
        value = read_frame(value, what) if hasattr(value, "columns") else value.to_numpy()
    try:
        with catch_warnings():
            simplefilter("ignore", UserWarning)  # that arrays of pandas must not be written to: dif does not write
            tensor = torch.as_tensor(value, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        given = f"array of dtype {value.dtype}" if hasattr(value, "dtype") else f"object of type {type(value).__name__}"
        raise InvalidInputError(
            f"The {given} that was given as {what} cannot be read as numbers; encode text as numbers, fill what is "
            "missing, and make nested lists equally long."
        ) from error
    if tensor.layout != torch.strided or tensor.is_nested:
        raise InvalidInputError(
            f"The tensor that was given as {what} must be dense, not {'nested' if tensor.is_nested else 'sparse'}; "
            "pass x.to_dense(), x.to_padded_tensor(0.0), or a Dataset whose samples are dense."
        )
    return tensor


def as_numbers(value: Any, what: str) -> Tensor:
    """Convert numbers to a float64 tensor on the CPU; `what` names them in error messages."""
    return as_tensor(value, what, torch.float64).cpu()


def as_index(value: Any) -> int | None:
    """Return an integer of Python, numpy or torch as an int; None for anything else, booleans included."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool":
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def check_number(value: Any, what: str, *, zero: bool = False, negative: bool = False) -> float:
    """Return a number as a float; it must be finite and > 0.

    Args:
        value: The number.
        what: The name of an argument, or a noun phrase, for the error message.
        zero: Whether 0 is accepted.
        negative: Whether numbers below 0 are accepted.
    """
    try:
        number = float("nan") if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = float("nan")
    if not (0 < (abs(number) if negative else number) < float("inf") or (zero and number == 0)):
        kind = "a finite number" if negative else "a number ≥ 0" if zero else "a positive number"
        raise InvalidInputError(f"{_title(what)} must be {kind}, not {value!r}.")
    return number


def check_count(value: Any, what: str, *, zero: bool = False) -> int:
    """Return an integer ≥ 1 as an int; `what` is the name of an argument, or a noun phrase, for the error message.

    With `zero`, 0 is accepted too.
    """
    number, least = as_index(value), 0 if zero else 1
    if number is None or number < least:
        raise InvalidInputError(f"{_title(what)} must be an integer ≥ {least}, not {value!r}.")
    return number


def _title(what: str) -> str:
    """Begin a sentence with the name of an argument, or with a noun phrase."""
    return f"`{what}`" if what.isidentifier() else what[0].upper() + what[1:]


def check_list(values: Any, what: str, of: str) -> list[Any]:
    """Return values that must be a list, or can be listed, of at least one.

    Args:
        values: The values.
        what: The name of the argument, for the error message.
        of: What the values are, such as "integers".
    """
    several = isinstance(values, Iterable) and getattr(values, "ndim", 1) > 0  # an array may hold a single number
    listed = list(values) if several else []
    if not listed:
        found = "an empty one" if several else f"of type {type(values).__name__}"
        raise InvalidInputError(f"`{what}` must be a list of {of}, not {found}.")
    return listed


def check_callable(value: object, call: str, owner: str) -> None:
    """Refuse a value that cannot be called as in `call`, such as "fn(params)", which begins with its name."""
    if not callable(value):
        name, found = call.split("(")[0], type(value).__name__
        raise InvalidInputError(f"`{name}` of {owner} must be a callable {call}, not of type {found}.")


def check_instance(value: object, kind: type[T], what: str, cure: str = "") -> T:
    """Return a value that must be an instance of a public class of dif, or have the members of a public interface.

    Args:
        value: The value.
        kind: The class or interface.
        what: The name of the argument, for the error message.
        cure: How to make one, where that is not plain; it follows after a semicolon.
    """
    if not isinstance(value, kind):
        name = kind.__name__ if kind.__module__ == "builtins" else f"dif.{kind.__name__}"
        found = f"`{what}` must be a {name}, not of type {type(value).__name__}"
        raise InvalidInputError(f"{found}; {cure}." if cure else f"{found}.")
    return value


def expect_path(path: Any, name: str = "path", *, folder: bool = False) -> Path:
    """Return the path of a file, or of a folder; refuse other objects, and a path of the other kind."""
    kind, other = ("folder", "file") if folder else ("file", "folder")
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidInputError(f"`{name}` must be the path of a {kind}, not {path!r}.")
    if Path(path).exists() and Path(path).is_dir() != folder:
        raise InvalidInputError(f"`{name}` must be the path of a {kind}, not of the {other} {os.fspath(path)!r}.")
    return Path(path)


def expect_folder(path: Any, name: str) -> Path:
    """Return the path of a folder, which is created if it is missing; refuse other objects, and a file."""
    folder = expect_path(path, name, folder=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except NotADirectoryError as error:
        raise InvalidInputError(f"`{name}` must be a folder, but a part of {str(path)!r} is a file.") from error
    return folder
