"""Samples shared among the processes of torch.distributed: each sweeps its own part of them, sums are added up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as processes
from torch import Tensor

from dif.errors import InvalidInputError

_groups: list[Any] = []  # of the innermost `sharded` first


@contextmanager
def sharded(group: Any = None) -> Iterator[None]:
    """Share every sweep over samples among the processes of torch.distributed.

    All processes run the same lines on the same problem (each may read the data from its own copy or mount); every
    process evaluates its part of the samples only, and gets the same numbers as all others. Results do not depend on
    the number of processes, rounding apart.

    Args:
        group: Of processes; None: all.

    Start with `torchrun --nproc-per-node 8 script.py`; in the script, after
    `torch.distributed.init_process_group()`:

        with dif.sharded():
            solution = dif.fit(problem, params)
            scores = dif.DirectionalInfluence(solution).scores(test, train.remove_each())
    """
    if not (processes.is_available() and processes.is_initialized()):
        raise InvalidInputError(
            "torch.distributed",
            measured="not initialised",
            threshold="a process group",
            meaning="There are no processes among which samples could be shared.",
            cure="Start the script with torchrun and call torch.distributed.init_process_group() first.",
        )
    _groups.insert(0, group if group is not None else processes.group.WORLD)
    try:
        yield
    finally:
        del _groups[0]


def alone() -> bool:
    """Whether this process sweeps all samples itself."""
    return not _groups or processes.get_world_size(_groups[0]) == 1


def span(n: int) -> slice:
    """Which of n samples are this process's."""
    if alone():
        return slice(0, n)
    rank, world = processes.get_rank(_groups[0]), processes.get_world_size(_groups[0])
    return slice(rank * n // world, (rank + 1) * n // world)


def added(part: Tensor) -> Tensor:
    """The sum of the parts of all processes, the same to the bit in each."""
    if alone():
        return part
    total = part.contiguous().clone()
    processes.all_reduce(total, group=_groups[0])
    return total


def gathered(rows: Tensor, n: int) -> Tensor:
    """The rows of all processes in order, (n, …)."""
    if alone():
        return rows
    every = rows.new_zeros((n, *rows.shape[1:]))
    every[span(n)] = rows
    return added(every)


def everywhere(yes: bool, like: Tensor) -> bool:
    """Whether it is so in all processes."""
    return bool(added(torch.tensor(float(not yes), device=like.device)) == 0)
