"""Share samples among the processes of torch.distributed: each evaluates its own range, and the sums are added up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as processes
from torch import Tensor

from dif.errors import InvalidInputError

_groups: list[Any] = []  # process groups of the enclosing `sharded` blocks, innermost first


@contextmanager
def sharded(group: Any = None) -> Iterator[None]:
    """Share every pass over the samples among the processes of torch.distributed.

    All processes run the same lines on the same problem; each may read the data from its own copy or mount. Every
    process evaluates only its own part of the samples, and all processes get the same numbers. Up to rounding, results
    do not depend on the number of processes.

    Args:
        group: The process group; None means all processes.

    Raises:
        InvalidInputError: Where torch.distributed is not initialised.

    Start the script with `torchrun --nproc-per-node 8 script.py`. In the script, after
    `torch.distributed.init_process_group()`:

        with dif.sharded():
            solution = dif.fit(problem, params)
            scores = dif.DirectionalInfluence(solution).scores(test, train.remove_each())
    """
    if not (processes.is_available() and processes.is_initialized()):
        raise InvalidInputError(
            "torch.distributed is not initialised.",
            "dif.sharded() needs a process group.",
            "There are no processes among which samples could be shared.",
            "Start the script with torchrun and call torch.distributed.init_process_group() first.",
        )
    _groups.insert(0, group if group is not None else processes.group.WORLD)
    try:
        yield
    finally:
        del _groups[0]


def is_single_process() -> bool:
    """Return whether this process evaluates all samples itself."""
    return not _groups or processes.get_world_size(_groups[0]) == 1


def span(n: int) -> slice:
    """Return the range of the n samples that this process evaluates."""
    if is_single_process():
        return slice(0, n)
    rank, world = processes.get_rank(_groups[0]), processes.get_world_size(_groups[0])
    return slice(rank * n // world, (rank + 1) * n // world)


def sum_over_processes(part: Tensor) -> Tensor:
    """Add up the parts of all processes; every process gets the bit-identical sum."""
    if is_single_process():
        return part
    total = part.contiguous().clone()
    processes.all_reduce(total, group=_groups[0])
    return total


def gather_rows(rows: Tensor, n: int) -> Tensor:
    """Collect the rows of all processes, in the order of the samples, (n, …)."""
    if is_single_process():
        return rows
    all_rows = rows.new_zeros((n, *rows.shape[1:]))
    all_rows[span(n)] = rows
    return sum_over_processes(all_rows)


def holds_in_all_processes(condition: bool, like: Tensor) -> bool:
    """Return whether a condition is true in all processes; `like` determines the device of the exchange."""
    return bool(sum_over_processes(torch.tensor(float(not condition), device=like.device)) == 0)
