"""Independent pieces of work among processes or machines: joblib's backends, and what a lost worker costs."""

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
_LOST = 3  # workers lost in a row without a single piece done: then the work itself is what kills them


def shared_out(work: Callable[..., R], pieces: Sequence[Any], jobs: int) -> Iterator[tuple[int, R]]:
    """work(piece) of each piece, with its number, in whatever order they are done.

    `joblib.parallel_config` chooses the backend (loky, Dask, Ray, …). A process that is killed costs the piece it was
    at: that one is done again, what was finished is not.
    """
    if jobs == 1:
        yield from ((number, work(piece)) for number, piece in enumerate(pieces))
        return
    left, lost = dict(enumerate(pieces)), 0
    while left:
        try:
            for number, made in _done(work, left, jobs):
                del left[number]
                lost = 0
                yield number, made
        except BrokenExecutor as error:
            lost += 1
            if lost >= _LOST:
                raise
            words = str(error).splitlines()[0]
            warnings.warn(f"a worker was lost, {len(left)} pieces are begun again ({words})", stacklevel=2)
        except Exception as error:
            if type(error).__name__ != "PicklingError":
                raise
            raise InvalidInputError(
                "what the processes should share",
                measured=str(error).splitlines()[0],
                threshold="a loss, a module and data that can be pickled",
                meaning="Other processes get a copy of them, and this one cannot be copied.",
                cure="Leave jobs out, or use threads: joblib.parallel_config(backend='threading').",
            ) from error


def in_order(work: Callable[..., R], pieces: Sequence[Any], jobs: int) -> Iterator[R]:
    """work(piece) of each piece, in their order."""
    ready, waiting = shared_out(work, pieces, jobs), {}
    for number in range(len(pieces)):
        while number not in waiting:
            which, made = next(ready)
            waiting[which] = made
        yield waiting.pop(number)


def _done(work: Callable[..., R], left: dict[int, Any], jobs: int) -> Iterator[tuple[int, R]]:
    streams = getattr(get_active_backend(prefer="processes")[0], "supports_return_generator", False)
    # in one piece, so that what is the same object stays the same object; losses are often lambdas
    tasks = [delayed(wrapped(partial(_numbered, work, number, piece)))() for number, piece in left.items()]
    made: Any = Parallel(jobs, prefer="processes", return_as="generator_unordered" if streams else "list")(tasks)
    yield from made


def _numbered(work: Callable[..., R], number: int, piece: Any) -> tuple[int, R]:
    return number, work(piece)


def checked_jobs(jobs: int) -> int:
    """A number of processes."""
    number = as_index(jobs)
    if number is None or number == 0:
        raise InvalidInputError(
            "jobs",
            measured=repr(jobs),
            threshold="a number of processes, or −1 for as many as there are cores",
            meaning="They share the work.",
            cure="Leave it out for one.",
        )
    return number
