"""What tells one piece of work from another on disk: bytes of the solution, the problem's values and what is done."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dif.direction import Direction
from dif.solution import Solution
from dif.structure import leaves

_READ = 2**12  # samples read at once


def of_tensor(tensor: Tensor) -> bytes:
    """Shape and values, to the bit."""
    return str(tuple(tensor.shape)).encode() + tensor.detach().cpu().contiguous().numpy().tobytes()


def rounded(tensor: Tensor) -> bytes:
    """Shape and values, to eight digits of the largest: rounding differs from run to run."""
    size = float(tensor.abs().max()) if tensor.numel() else 1.0
    return of_tensor(torch.round(tensor.detach().double().cpu() / (size or 1.0), decimals=8) + 0.0)


def of_solution(at: Solution) -> bytes:
    """θ̄, λ̄, the bounds, and the values of the objective and of the constraints."""
    program = at.program
    return b"".join([*map(of_tensor, (at.theta, at.lam, program.tau, program.equality)), rounded(at.f)])


def of_direction(direction: Direction, p: int | None = None) -> Iterator[bytes]:
    """What perturbation p, or all of them, do to weights and bounds, and the data of the samples in them."""
    yield of_tensor(direction.dtau if p is None else direction.dtau[p])
    if p is not None:
        yield of_tensor(direction.scaled_parts(p))
    for block in direction.blocks:
        mine = slice(None) if p is None or block.owner is None else block.owner == p
        if p is None:
            yield of_tensor(block.alpha)
            yield b"" if block.owner is None else of_tensor(block.owner)
        yield from map(of_tensor, (block.touch, block.index[mine], block.s[mine]))
        for _, batch in block.samples.batches(torch.unique(block.index[mine]).cpu(), _READ):
            yield from map(of_tensor, leaves(batch))
