"""A line on the terminal while long work runs; silent where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Reporter(Protocol):
    """Says how far the work is."""

    def __call__(self, done: float, text: str = "") -> None:
        """`done` of the total, and what is going on."""
        ...


@contextmanager
def progress(title: str, total: float | None, shown: bool) -> Iterator[Reporter]:
    """A progress line with time left; nothing is printed when `shown` is false or no terminal listens."""
    if not shown:
        yield lambda done, text="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, text="": bar.update(task, completed=done, description=f"{title} {text}".strip())
