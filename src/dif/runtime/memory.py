"""How many numbers may be held at once; what does not fit is done in smaller batches."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from dif.errors import MemoryWarning
from dif.runtime.distributed import alone
from dif.runtime.user_code import in_words, out_of_memory

IN_FLIGHT = 2**23  # numbers held at once when several columns go through a batch together, on the CPU
_ACCELERATED = 2**29  # at most, on an accelerator
_HALVINGS = 24  # so often: after these nothing is left to halve
_short: list[int] = [0]  # how often batches were halved in this process, for want of memory

P = ParamSpec("P")
R = TypeVar("R")


def in_flight(like: Tensor, cpu: int = IN_FLIGHT) -> int:
    """How many numbers may be held at once: more on an accelerator, where there is room."""
    if like.device.type != "cuda":
        return max(1, cpu >> _short[0])
    room = torch.cuda.get_device_properties(like.device).total_memory - torch.cuda.memory_allocated(like.device)
    return max(1, max(cpu, min(_ACCELERATED, int(room / (8 * like.element_size())))) >> _short[0])


def within_memory(sweep: Callable[P, R]) -> Callable[P, R]:
    """A sweep over the data that is begun again with half the batch where memory runs out, which is said.

    For the rest of the process: what did not fit once will not fit again. Not where samples are shared among processes:
    the others would wait for ever. What else is raised inside comes out in words.
    """

    @wraps(sweep)
    def begun_again(*args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            try:
                with in_words("a loss or function"):
                    return sweep(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or _short[0] >= _HALVINGS or not alone():
                    raise
                words = str(error).splitlines()[0]
            _short[0] += 1
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            warnings.warn(f"out of memory, going on with batches halved ({words})", MemoryWarning, stacklevel=2)

    return begun_again
