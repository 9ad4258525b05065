"""Share work among processes, limit it, and show its progress."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any, TypeVar

from dif.errors import InvalidInputError
from dif.runtime.inputs import as_index


@dataclass
class Limits:
    """The iterations and seconds that a solver may take, and the iterations it has used."""

    max_iter: int
    max_seconds: float | None = None
    begun: float = field(default_factory=time.monotonic)  # time.monotonic() at the start, seconds
    used: int = 0  # iterations

    def find_reached(self) -> str | None:
        """Return the name of the limit that has been reached, or None."""
        if self.used >= self.max_iter:
            return "max_iter"
        late = self.max_seconds is not None and time.monotonic() - self.begun > self.max_seconds
        return "max_seconds" if late else None


_INTERVAL = 0.2  # seconds between two updates in a notebook: each is a message to the browser


Reporter = Callable[..., None]  # report(done, text=""): so much of the total is finished; the text follows the title


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


R = TypeVar("R")
_LOST = 3  # losses in a row, with no task finished in between, after which the tasks themselves must be the cause


def run_unordered(work: Callable[..., R], tasks: Sequence[Any], jobs: int) -> Iterator[tuple[int, R]]:
    """Yield (number of the task, work(task)) in the order in which the tasks finish.

    `joblib.parallel_config` chooses the backend (loky, Dask, Ray, …). Where a process is killed, unfinished tasks are
    started again; finished ones are not.
    """
    if jobs == 1:
        yield from ((number, work(task)) for number, task in enumerate(tasks))
        return
    unfinished, lost = dict(enumerate(tasks)), 0
    while unfinished:
        try:
            for number, result in _run(work, unfinished, jobs):
                del unfinished[number]
                lost = 0
                yield number, result
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            if type(error).__name__ == "PicklingError":
                raise InvalidInputError(
                    f"With several `jobs`, the loss, the module and the data must be picklable ({reason}); leave "
                    "`jobs` out, or use threads: joblib.parallel_config(backend='threading')."
                ) from error
            lost += 1
            if lost >= _LOST or not isinstance(error, BrokenExecutor):
                raise
            warnings.warn(f"A worker was lost, so {len(unfinished)} tasks are started again ({reason}).", stacklevel=2)


def run_in_order(work: Callable[..., R], tasks: Sequence[Any], jobs: int) -> Iterator[R]:
    """Yield work(task) for each task, in the order of the tasks."""
    finished, waiting = run_unordered(work, tasks, jobs), {}
    for number in range(len(tasks)):
        while number not in waiting:
            other, result = next(finished)
            waiting[other] = result
        yield waiting.pop(number)


def _run(work: Callable[..., R], tasks: dict[int, Any], jobs: int) -> Iterator[tuple[int, R]]:
    """Run numbered tasks with joblib, and yield results as they finish where the backend can."""
    from joblib import Parallel, delayed  # slow to import
    from joblib import wrap_non_picklable_objects as wrapped
    from joblib.parallel import get_active_backend

    streams = getattr(get_active_backend(prefer="processes")[0], "supports_return_generator", False)
    # work and task are pickled together, so that shared objects stay shared; wrapped, because losses are often lambdas
    calls = [delayed(wrapped(partial(_run_one, work, number, task)))() for number, task in tasks.items()]
    results: Any = Parallel(jobs, prefer="processes", return_as="generator_unordered" if streams else "list")(calls)
    yield from results


def _run_one(work: Callable[..., R], number: int, task: Any) -> tuple[int, R]:
    return number, work(task)


def check_jobs(jobs: int) -> int:
    """Return `jobs`, a number of processes, as an int; it must be an integer other than 0."""
    number = as_index(jobs)
    if number is None or number == 0:
        raise InvalidInputError(f"`jobs` must be a number of processes, or −1 for one per core, not {jobs!r}.")
    return number
