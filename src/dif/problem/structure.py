"""Batches of any structure: tensors in tuples, named tuples, lists and dicts, nested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dif.runtime.inputs import as_tensor


def mapped(item: Any, fn: Callable[[Tensor], Any]) -> Any:
    """The same structure (tuples, named tuples, lists, dicts, nested) with fn of every tensor in it."""
    if isinstance(item, Tensor):
        return fn(item)
    if isinstance(item, Mapping):
        return {k: mapped(v, fn) for k, v in item.items()}
    if isinstance(item, tuple | list):
        parts = [mapped(v, fn) for v in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item


def leaves(data: Any) -> list[Tensor]:
    """The tensors of a structure."""
    found: list[Tensor] = []
    mapped(data, found.append)
    return found


def tensors_of(data: Any, what: str) -> Any:
    """The same structure with tensors for whatever numbers it holds."""
    if isinstance(data, Mapping):
        return {k: tensors_of(v, what) for k, v in data.items()}
    if isinstance(data, tuple):
        parts = [tensors_of(v, what) for v in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    return as_tensor(data, what)


def described(batch: Any) -> str:
    """Types and shapes of one sample, in words."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape[1:])}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k}: {described(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, tuple | list) and not all(isinstance(v, str) for v in batch):
        return "(" + ", ".join(described(v) for v in batch) + ")"
    return "text" if isinstance(batch, list | tuple) else type(batch).__name__
