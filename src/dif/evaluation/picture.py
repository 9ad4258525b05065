"""Colours of the pictures of results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle

GREY = "#6b7280"  # colour of references: random choices, the line y = x
_COLOURS = ("#2563eb", "#ea7317", "#15803d", "#9333ea", "#db2777", "#0891b2")  # of the methods, in their order


def colour_methods(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each name with its colour; grey for the name "random"."""
    colours = cycle(_COLOURS)
    return ((name, GREY if name == "random" else next(colours)) for name in names)
