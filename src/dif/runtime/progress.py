"""Show a progress bar during long computations, on a terminal or in a notebook; elsewhere print nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, Protocol

_INTERVAL = 0.2  # seconds between two updates in a notebook: each is a message to the browser


class Reporter(Protocol):
    """Report how far a computation is."""

    def __call__(self, done: float, text: str = "") -> None:
        """Report that `done` of the total is finished; `text` is shown after the title."""
        ...


@contextmanager
def progress(title: str, total: float | None, shown: bool) -> Iterator[Reporter]:
    """Show a progress bar with the time left; print nothing if `shown` is false or nobody is watching."""
    if not shown:
        yield lambda done, text="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if console.is_jupyter:
        bar = NotebookBar(title, total)
        try:
            yield bar
        finally:
            bar.remove()
        return
    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, text="": bar.update(task, completed=done, description=f"{title} {text}".strip())


class NotebookBar:
    """A progress bar below a notebook cell: an HTML element, which needs no widgets. It appears with the first report.

    Args:
        title: Shown before the bar.
        total: What counts as finished; None for a computation of unknown length.
    """

    def __init__(self, title: str, total: float | None) -> None:
        self.title, self.total = title, total
        self.begin, self.updated = time.monotonic(), float("-inf")
        self.handle: Any = None

    def __call__(self, done: float, text: str = "") -> None:
        """Draw the bar, unless it was drawn a moment ago."""
        now = time.monotonic()
        if now - self.updated < _INTERVAL:
            return
        self.updated = now
        self._show(self._render(done, text, now - self.begin))

    def remove(self) -> None:
        """Remove the bar: the computation has ended."""
        if self.handle is not None:
            self._show("")

    def _render(self, done: float, text: str, seconds: float) -> str:
        """Return the bar as HTML: with its share and the time left where the total is known."""
        words = f"{self.title} {text}".strip()
        if self.total is None:
            return f"<progress></progress> {escape(words)}, {seconds:.0f} s"
        left = f", {seconds * (self.total - done) / done:.0f} s left" if done else ""
        bar = f'<progress value="{done:g}" max="{self.total:g}"></progress>'
        return f"{bar} {escape(words)}, {done / self.total:.0%}{left}"

    def _show(self, page: str) -> None:
        """Show HTML below the cell, in place of what was shown before."""
        from IPython.display import HTML, display  # Jupyter runs, so it is there

        if self.handle is None:
            self.handle = display(HTML(page), display_id=True)
        else:
            self.handle.update(HTML(page))
