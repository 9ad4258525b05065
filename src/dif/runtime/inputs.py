"""Numbers as users give them: lists, arrays, tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError


def as_tensor(value: Any, what: str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the given numbers (columns of a data frame by position), without their graph; words for the rest."""
    masked = getattr(value, "mask", None) if hasattr(value, "filled") else None
    if masked is not None and bool(masked.any() if hasattr(masked, "any") else masked):
        raise InvalidInputError(
            what,
            measured=f"a masked array with {int(masked.sum())} entries masked",
            threshold="none masked",
            meaning="A masked entry has no value, and torch would take what lies under the mask.",
            cure="Drop those samples or fill the entries with array.filled(value) first.",
        )
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    try:
        found = torch.as_tensor(value, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidInputError(
            what,
            measured=f"{type(value).__name__} ({str(error).splitlines()[0]})",
            threshold="numbers, as a tensor, an array or nested lists of equal lengths",
            meaning="It cannot be read as numbers.",
            cure="Convert it with torch.tensor(...) first and look at the result.",
        ) from error
    if found.layout != torch.strided or found.is_nested:
        raise InvalidInputError(
            what,
            measured=f"a {'nested' if found.is_nested else 'sparse'} tensor",
            threshold="a dense one",
            meaning="Samples are taken by index, which sparse and nested tensors do not allow.",
            cure="Pass a dense tensor (.to_dense(), .to_padded_tensor(0.0)), or a Dataset whose samples are dense.",
        )
    return found


def as_numbers(value: Any, what: str) -> Tensor:
    """Float64 numbers on the CPU."""
    return as_tensor(value, what, torch.float64).cpu()


def as_index(value: Any) -> int | None:
    """An integer of Python, numpy or torch as an int; None for anything else, booleans included."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool":
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def check_number(value: Any, what: str, *, zero: bool, meaning: str, cure: str) -> float:
    """A finite number > 0, or ≥ 0 where zero is allowed."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = float("nan")
    if not (0 < number < float("inf") or (zero and number == 0)):
        threshold = f"a finite number {'≥' if zero else '>'} 0"
        raise InvalidInputError(what, measured=value, threshold=threshold, meaning=meaning, cure=cure)
    return number
