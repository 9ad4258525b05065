"""Convert and check what users pass: numbers, lists, arrays, tensors, objects of dif."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeVar
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.runtime.frames import read_frame

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
            f"An array with {int(masked.sum())} masked entries was given as {what}.",
            "No entry may be masked.",
            "A masked entry has no value, and torch would take what lies under the mask.",
            "Drop those samples, or fill the entries with array.filled(value) first.",
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
            f"An {given} was given as {what}.",
            "Numbers are needed: a tensor, an array, or nested lists of equal lengths.",
            "It cannot be read as numbers.",
            "Encode text as numbers, fill what is missing, and make lists equally long.",
        ) from error
    if tensor.layout != torch.strided or tensor.is_nested:
        raise InvalidInputError(
            f"A {'nested' if tensor.is_nested else 'sparse'} tensor was given as {what}.",
            "The tensor must be dense.",
            "Samples are taken by index, which sparse and nested tensors do not allow.",
            "Pass a dense tensor (.to_dense(), .to_padded_tensor(0.0)), or a Dataset whose samples are dense.",
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


def check_number(value: Any, what: str, *, zero: bool, meaning: str, cure: str, negative: bool = False) -> float:
    """Return a number as a float; it must be finite and > 0, or ≥ 0 where `zero` is true.

    Args:
        value: The number.
        what: The name of an argument, or a noun phrase, for the error message.
        zero: Whether 0 is accepted.
        meaning: What the number is for; a sentence of the error message.
        cure: What to do; a sentence of the error message.
        negative: Whether numbers below 0 are accepted.
    """
    try:
        number = float("nan") if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = float("nan")
    if not (0 < (abs(number) if negative else number) < float("inf") or (zero and number == 0)):
        least = "" if negative else f" {'≥' if zero else '>'} 0"
        raise InvalidInputError(f"{_title(what)} is {value!r}.", f"It must be a finite number{least}.", meaning, cure)
    return number


def check_count(value: Any, what: str, *, meaning: str, cure: str) -> int:
    """Return an integer ≥ 1 as an int; the arguments are those of `check_number`."""
    number = as_index(value)
    if number is None or number < 1:
        raise InvalidInputError(f"{_title(what)} is {value!r}.", "It must be an integer ≥ 1.", meaning, cure)
    return number


def _title(what: str) -> str:
    """Begin a sentence with the name of an argument, or with a noun phrase."""
    return f"`{what}`" if what.isidentifier() else what[0].upper() + what[1:]


def check_list(values: Any, what: str, *, allowed: str, meaning: str, cure: str) -> list[Any]:
    """Return values that must be a list, or can be listed, of at least one.

    Args:
        values: The values.
        what: The name of the argument, for the error message.
        allowed: What it must be; like `meaning` and `cure` a sentence of the error message.
        meaning: What the values are for.
        cure: What to do.
    """
    several = isinstance(values, Iterable) and getattr(values, "ndim", 1) > 0  # an array may hold a single number
    listed = list(values) if several else []
    if not listed:
        content = "empty" if several else f"of type {type(values).__name__}"
        raise InvalidInputError(f"`{what}` is {content}.", allowed, meaning, cure)
    return listed


def check_instance(value: object, kind: type[T], what: str, *, meaning: str, cure: str) -> T:
    """Return a value that must be an instance of a public class of dif, or have the members of a public interface.

    Args:
        value: The value.
        kind: The class or interface.
        what: The name of the argument, for the error message.
        meaning: What the value is for; a sentence of the error message.
        cure: What to do; a sentence of the error message.
    """
    if not isinstance(value, kind):
        found, allowed = f"`{what}` is of type {type(value).__name__}.", f"It must be a dif.{kind.__name__}."
        raise InvalidInputError(found, allowed, meaning, cure)
    return value
