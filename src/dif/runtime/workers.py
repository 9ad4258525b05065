"""Run independent tasks in several processes or machines (joblib's backends), and repeat the tasks of lost workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from functools import partial
from typing import Any, TypeVar

from joblib import Parallel, delayed
from joblib import wrap_non_picklable_objects as wrapped
from joblib.parallel import get_active_backend

from dif.errors import InvalidInputError
from dif.runtime.inputs import as_index

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
        except BrokenExecutor as error:
            lost += 1
            if lost >= _LOST:
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            warnings.warn(f"A worker was lost, so {len(unfinished)} tasks are started again ({reason}).", stacklevel=2)
        except Exception as error:
            if type(error).__name__ != "PicklingError":
                raise
            raise InvalidInputError(
                f"Pickling failed: {(str(error).splitlines() or [type(error).__name__])[0].rstrip('.')}.",
                "With several jobs, the loss, the module and the data must be picklable.",
                "Other processes get a copy of them, which is made by pickling.",
                "Leave `jobs` out, or use threads: joblib.parallel_config(backend='threading').",
            ) from error


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
        raise InvalidInputError(
            f"`jobs` is {jobs!r}.",
            "It must be a number of processes, or −1 for one per core.",
            "It says how many processes share the work.",
            "Leave it out for one process.",
        )
    return number
