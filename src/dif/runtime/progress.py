"""Show a progress bar on the terminal during long computations; print nothing where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Reporter(Protocol):
    """Report how far a computation is."""

    def __call__(self, done: float, text: str = "") -> None:
        """Report that `done` of the total is finished; `text` is shown after the title."""
        ...


@contextmanager
def progress(title: str, total: float | None, shown: bool) -> Iterator[Reporter]:
    """Show a progress bar with the time left; print nothing if `shown` is false or stderr is no terminal."""
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
