"""Tables of results: as text, as Markdown, as a data frame."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_PLACES = 7  # decimal places beyond which powers of ten are written


@dataclass(frozen=True)
class Table:
    """A title, headings and rows. The first cell of a row is a name, the others are numbers.

    >>> print(Table("Scores", ("method", "LDS"), (("DIF", 0.97571), ("random", float("nan")))))
    Scores
    method     LDS
    DIF     0.9757
    random       –
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]

    def __repr__(self) -> str:
        columns = list(zip(self.headings, *self.format_rows(), strict=True))
        widths = [max(map(len, column)) for column in columns]
        aligned = [[cell.ljust(widths[0]) for cell in columns[0]]]
        aligned += [[cell.rjust(w) for cell in column] for column, w in zip(columns[1:], widths[1:], strict=True)]
        return "\n".join([self.title, *map("  ".join, zip(*aligned, strict=True))])

    def format_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of each row as text; the numbers of a column have equally many decimal places."""
        columns = [_format_column(column) for column in zip(*self.rows, strict=True)]
        return list(zip(*columns, strict=True))

    def to_markdown(self) -> str:
        """Return the table in Markdown, without its title."""
        lines = [self.headings, ("---",) * len(self.headings), *self.format_rows()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per name."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError('to_frame needs pandas: pip install "directional-influence[pandas]"') from error
        frame = pandas.DataFrame([list(row) for row in self.rows], columns=list(self.headings))
        return frame.set_index(self.headings[0])


def _format_column(cells: tuple[str | float, ...]) -> list[str]:
    """Format numbers so that the largest has four digits, at least to the fourth decimal place; a dash for NaN."""
    largest = max((abs(cell) for cell in cells if not isinstance(cell, str) and math.isfinite(cell)), default=0.0)
    places = max(4, 3 - math.floor(math.log10(largest))) if largest > 0 else 4
    form = f".{places}f" if places <= _PLACES else ".3e"
    return [cell if isinstance(cell, str) else format(cell, form) if math.isfinite(cell) else "–" for cell in cells]
