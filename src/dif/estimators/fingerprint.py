"""Hashes that identify a computation on disk: the solution, the targets and the perturbations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dif.derivatives.fingerprint import READ, encode_rows, encode_samples, encode_tensor, fingerprint_program, hash_all
from dif.derivatives.weight_change import Direction
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.structure import leaves


def hash_solution(at: Solution) -> bytes:
    """Hash θ̄, λ̄ and the problem."""
    return hash_all((encode_tensor(at.theta), encode_tensor(at.lam), fingerprint_program(at.program)))


def hash_targets(targets: Targets) -> Iterator[bytes]:
    """Yield hashes of the losses, data and constants of the targets."""
    if targets.rows is not None:
        yield from encode_rows(targets.rows)
        yield encode_tensor(targets.constant)
    elif targets.samples is not None:
        yield from encode_samples(targets.samples)


def hash_direction(direction: Direction, p: int | None = None) -> Iterator[bytes]:
    """Yield hashes of the changes of weights and bounds under perturbation p, or all, and of the samples in them."""
    yield encode_tensor(direction.dtau if p is None else direction.dtau[p])
    if p is not None:
        yield encode_tensor(direction.rescaling(p))
    for block in direction.blocks:
        mine = slice(None) if p is None or block.owner is None else block.owner == p
        if p is None:
            yield encode_tensor(block.alpha)
            yield b"" if block.owner is None else encode_tensor(block.owner)
        yield from map(encode_tensor, (block.touch, block.index[mine], block.s[mine]))
        for _, batch in block.samples.batches(torch.unique(block.index[mine]).cpu(), READ):
            yield from map(encode_tensor, leaves(batch))
