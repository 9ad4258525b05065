"""Numbers as users give them: lists, arrays, tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError


def as_tensor(value: Any, what: str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the given numbers, without their graph; words where there are none."""
    try:
        return torch.as_tensor(value, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidInputError(
            what,
            measured=f"{type(value).__name__} ({str(error).splitlines()[0]})",
            threshold="numbers, as a tensor, an array or nested lists of equal lengths",
            meaning="It cannot be read as numbers.",
            cure="Convert it with torch.tensor(...) first and look at the result.",
        ) from error


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
