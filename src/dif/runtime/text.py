"""A table of text, printed with aligned columns or written as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class TextTable:
    """Headings and rows of text. The first `left` columns, of words, are aligned to the left, the others to the right.

    >>> print(TextTable(("constraint", "slack"), (("parity", "0.02"), ("budget", "1.5"))))
    constraint  slack
    parity       0.02
    budget        1.5
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1

    def __str__(self) -> str:
        lines = (self.headings, *self.rows)
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if number < self.left else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def to_html(self) -> str:
        """Return an HTML table; the cells are escaped."""
        head = "".join(f"<th>{escape(heading)}</th>" for heading in self.headings)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
