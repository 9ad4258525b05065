"""Limit how many numbers are in memory at once, and retry with smaller batches where memory runs out."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from dif.errors import MemoryWarning
from dif.runtime.distributed import is_single_process
from dif.runtime.user_code import convert_errors, is_out_of_memory

NUMBERS_AT_ONCE = 2**23  # numbers in memory at once while several columns go through a batch on the CPU: 64 MiB
_ACCELERATED = 2**29  # largest value of the same limit on an accelerator: 4 GiB in double precision
_HALVINGS = 24  # halvings of the batches after which running out of memory is an error; few numbers are left then
_short: list[int] = [0]  # how often batches were halved so far in this process

P = ParamSpec("P")
R = TypeVar("R")


def numbers_at_once(like: Tensor, cpu: int = NUMBERS_AT_ONCE) -> int:
    """Return how many numbers may be in memory at once on the device of `like`.

    On an accelerator this is an eighth of the unused memory, between `cpu` and `_ACCELERATED`.
    """
    if like.device.type != "cuda":
        return max(1, cpu >> _short[0])
    unused = torch.cuda.get_device_properties(like.device).total_memory - torch.cuda.memory_allocated(like.device)
    return max(1, max(cpu, min(_ACCELERATED, int(unused / (8 * like.element_size())))) >> _short[0])


def retry_with_smaller_batches(sweep: Callable[P, R]) -> Callable[P, R]:
    """Wrap a pass over the data so that it is repeated with batches of half the size where memory runs out.

    A MemoryWarning is given, and batches stay small for the rest of the process. Inside `dif.sharded()` with several
    processes the error is raised instead, because the other processes would wait forever. Other exceptions become a
    UserCodeError.
    """

    @wraps(sweep)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            try:
                with convert_errors("loss or function"):
                    return sweep(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or _short[0] >= _HALVINGS or not is_single_process():
                    raise
                reason = str(error).splitlines()[0].rstrip(".")
            _short[0] += 1
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            text = f"Memory ran out, so dif is going on with batches halved in size ({reason})."
            warnings.warn(text, MemoryWarning, stacklevel=2)

    return run
