"""Axes of matplotlib: those that a user gives, or those of a new figure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dif.errors import InvalidInputError


def draw_on(ax: Any) -> Any:
    """Return the given axes, or those of a new figure; refuse other objects."""
    if ax is None:
        return open_figure()[0]
    if not _is_axes(ax):
        raise InvalidInputError(
            f"`ax` is of type {type(ax).__name__}.",
            "It must be axes of matplotlib, or None for a new figure.",
            "The plot is drawn on them.",
            "Leave it out, or pass pyplot.subplots()[1].",
        )
    return ax


def draw_on_panels(axes: Any, count: int, *, meaning: str, rows: int = 1) -> list[Any]:
    """Return `count` given axes, or those of a new figure.

    Args:
        axes: A list or an array of axes; None opens a figure.
        count: How many there must be.
        meaning: Why there are so many; a sentence of the error message.
        rows: How many of the new panels are one below the other.
    """
    if axes is None:
        return open_figure(rows, count // rows)
    given = list(axes) if isinstance(axes, Iterable) and getattr(axes, "ndim", 1) else [axes]
    if len(given) != count or not all(map(_is_axes, given)):
        found = "1 axis" if len(given) == 1 else f"{len(given)} axes"
        other = [type(ax).__name__ for ax in given if not _is_axes(ax)]
        what = f"`axes` has {found}{f', one of them of type {other[0]}' if other else ''}."
        shape = (rows, count // rows)
        cure = f"Leave the axes out, or pass pyplot.subplots{shape}[1]."
        raise InvalidInputError(what, f"It must have {count} axes of matplotlib.", meaning, cure)
    return given


def open_figure(rows: int = 1, columns: int = 1) -> list[Any]:
    """Return the axes of a new pyplot figure; notebooks show it, `pyplot.show()` opens a window."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('Plots need matplotlib. Install it: pip install "directional-influence[studies]"') from error
    size = (max(6.4, 3.2 * columns), max(4.8 if columns == 1 else 4.0, 1.6 * rows))
    _, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, sharex=rows > 1, layout="constrained")
    return list(axes.reshape(-1))


def _is_axes(ax: Any) -> bool:
    return hasattr(ax, "plot") and hasattr(ax, "set_xlabel")
