"""Work on batches of any structure: tensors in nested tuples, named tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dif.runtime.inputs import as_tensor


def map_tensors(item: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor of a structure, and return the same structure of the results."""
    if isinstance(item, Tensor):
        return fn(item)
    if isinstance(item, Mapping):
        return {k: map_tensors(v, fn) for k, v in item.items()}
    if isinstance(item, tuple | list):
        parts = [map_tensors(v, fn) for v in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item


def cast(data: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors of a structure to a dtype."""
    return map_tensors(data, lambda t: t.to(dtype) if t.is_floating_point() else t)


def leaves(data: Any) -> list[Tensor]:
    """Return the tensors of a structure as a list."""
    tensors: list[Tensor] = []
    map_tensors(data, tensors.append)
    return tensors


def holds_only_tensors(data: Any) -> bool:
    """Return whether a structure has no leaves but tensors."""
    if isinstance(data, Mapping):
        return all(holds_only_tensors(v) for v in data.values())
    if isinstance(data, tuple | list):
        return all(holds_only_tensors(v) for v in data)
    return isinstance(data, Tensor)


def to_tensors(data: Any, what: str) -> Any:
    """Convert the numbers of a structure to tensors; `what` names the data in error messages."""
    if isinstance(data, Mapping):
        return {k: to_tensors(v, what) for k, v in data.items()}
    if isinstance(data, tuple):
        parts = [to_tensors(v, what) for v in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    return as_tensor(data, what)


def describe(batch: Any) -> str:
    """Describe the types and shapes of one sample of a batch, such as "(float64[3], int64[])"."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape[1:])}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, tuple | list) and not all(isinstance(v, str) for v in batch):
        return "(" + ", ".join(describe(v) for v in batch) + ")"
    return "text" if isinstance(batch, list | tuple) else type(batch).__name__
