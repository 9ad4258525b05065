"""Columns that a user gives: one entry per sample or perturbation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def list_entries(column: Any) -> list[Any] | None:
    """Return the entries of a list, an array or a pandas column by position; None for other objects.

    >>> list_entries((1, 2)), list_entries("ab"), list_entries(3)
    ([1, 2], None, None)
    """
    listable = isinstance(column, Iterable) and not isinstance(column, str | bytes | Mapping | set)
    return list(column) if listable and getattr(column, "ndim", 1) > 0 else None
