"""Columns that a user gives: one entry per sample or perturbation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dif.errors import InvalidInputError

_MAX_LENGTH = 160  # characters of an entry


def list_entries(column: Any) -> list[Any] | None:
    """Return the entries of a list, an array or a pandas column by position; None for other objects.

    >>> list_entries((1, 2)), list_entries("ab"), list_entries(3)
    ([1, 2], None, None)
    """
    listable = isinstance(column, Iterable) and not isinstance(column, str | bytes | Mapping | set)
    return list(column) if listable and getattr(column, "ndim", 1) > 0 else None


def expect_column(column: Any, name: str, lengths: set[int], *, per: str = "sample") -> list[Any]:
    """Return the entries of a column; refuse other objects, and other numbers of entries.

    Args:
        column: A list, an array or a pandas column.
        name: What the user calls it, in backquotes, for the error message.
        lengths: How many entries it may have.
        per: What has one entry; a noun.
    """
    entries = list_entries(column)
    if entries is None or len(entries) not in lengths:
        found = f"is of type {type(column).__name__}" if entries is None else f"has {len(entries)} entries"
        numbers = " or ".join(map(str, sorted(lengths)))
        raise InvalidInputError(
            f"{name} {found}.",
            f"It must be a list, an array or a column with {numbers} entries, one per {per}.",
            "One entry is shown beside each score.",
            f"Give one entry per {per}, in their order, or leave it out.",
        )
    return entries


def expect_features(features: Any, name: str, lengths: set[int]) -> dict[str, list[Any]]:
    """Return the columns of a dict or a data frame by name; the arguments are those of `expect_column`."""
    if not hasattr(features, "items") or not hasattr(features, "keys"):
        raise InvalidInputError(
            f"{name} is of type {type(features).__name__}.",
            "It must be a dict of columns, or a data frame.",
            "Each column is shown under its name.",
            'Pass {"age": ages}, say, or leave it out.',
        )
    return {
        str(key): expect_column(column, name.replace("`features`", f"`features[{key!r}]`"), lengths)
        for key, column in features.items()
    }


def write_entry(value: Any) -> str:
    """Return an entry as text, long ones cut short.

    >>> write_entry(1.0), write_entry(0.123456789), write_entry("a")
    ('1', '0.123457', 'a')
    """
    value = value.item() if hasattr(value, "item") else value
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_LENGTH else text[:_MAX_LENGTH] + "…"
