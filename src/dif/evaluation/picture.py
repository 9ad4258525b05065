"""Axes and colours of the pictures of results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

GREY = "#6b7280"  # colour of references: random choices, the line y = x
_COLOURS = ("#2563eb", "#ea7317", "#15803d", "#9333ea", "#db2777", "#0891b2")  # of the methods, in their order


def make_axes(panels: int = 1) -> list[Any]:
    """Return the axes of a new pyplot figure, which notebooks show by themselves."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('plot needs matplotlib. Install it: pip install "directional-influence[studies]"') from error
    _, axes = pyplot.subplots(1, panels, figsize=(max(6.4, 3.2 * panels), 4.0), squeeze=False, layout="constrained")
    return list(axes[0])


def colour_methods(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each name with its colour; grey for the name "random"."""
    colours = cycle(_COLOURS)
    return ((name, GREY if name == "random" else next(colours)) for name in names)
