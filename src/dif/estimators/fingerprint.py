"""What tells one piece of work from another on disk: hashes of the problem, its data and code, and of what is done."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from numbers import Number
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dif.evaluation.rows import Rows
from dif.evaluation.weight_change import Direction
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.sample_losses import SampleLosses
from dif.problem.structure import leaves

_READ = 2**12  # samples read at once
_DEEP = 8  # functions within functions whose code is looked at
_LIBRARIES = ("torch", "numpy", "scipy", "dif")  # whose code does not change under a user's hands


def of_tensor(tensor: Tensor) -> bytes:
    """Type, shape and values, to the bit."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:  # numpy does not know it
        plain = plain.view(torch.int16)
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode() + plain.numpy().tobytes()


def of_solution(at: Solution) -> bytes:
    """θ̄, λ̄, the bounds, and everything that the problem consists of."""
    program = at.program
    seen = hashlib.sha256()
    for part in (at.theta, at.lam, program.tau, program.equality):
        seen.update(of_tensor(part))
    for part in of_rows(program.rows):
        seen.update(part)
    for part in _code((program.parameters.module, program.parameters.fixed), _DEEP):
        seen.update(part)
    return seen.digest()


def of_targets(targets: Targets) -> Iterator[bytes]:
    """Everything that targets consist of."""
    if targets.rows is not None:
        yield from of_rows(targets.rows)
        yield of_tensor(targets.constant)
    elif targets.samples is not None:
        yield from of_samples(targets.samples)


def of_rows(rows: Rows) -> Iterator[bytes]:
    """The data, weights, losses and functions that rows are made of."""
    yield of_tensor(rows.C)
    for table in rows.tables:
        yield of_tensor(table.U)
        yield from of_samples(table.samples)
    for smooth in rows.functions:
        function = smooth.function
        yield f"{function.name} {function.ridge!r} {function.of!r}".encode()
        yield b"" if smooth.matrix is None else of_tensor(smooth.matrix)
        if smooth.matrix is None and function.ridge is None:
            yield from _code(function.fn, _DEEP)


def of_samples(samples: SampleLosses) -> Iterator[bytes]:
    """The code of their loss, and all data."""
    parts = (samples.loss,) if samples.parted is None else samples.parted
    for part in parts:
        yield from _code(part, _DEEP)
    for _, batch in samples.batches(at_most=_READ):
        yield from map(of_tensor, leaves(batch))


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


def _code(thing: Any, deep: int) -> Iterator[bytes]:
    """What can be seen of a function: its instructions, and the numbers, tensors and functions that it refers to."""
    yield type(thing).__name__.encode()
    if deep == 0:
        return
    if isinstance(thing, Tensor):
        yield of_tensor(thing)
    elif isinstance(thing, Number | str | bytes | bool | None):
        yield repr(thing).encode()
    elif isinstance(thing, tuple | list):
        for one in thing:
            yield from _code(one, deep - 1)
    elif isinstance(thing, Mapping):
        for name, one in thing.items():
            yield str(name).encode()
            yield from _code(one, deep - 1)
    elif isinstance(thing, CodeType):
        yield thing.co_code
        yield " ".join(thing.co_names).encode()
        yield from _code(thing.co_consts, deep)
    elif isinstance(thing, FunctionType) and thing.__module__.split(".")[0] in _LIBRARIES:
        yield f"{thing.__module__}.{thing.__qualname__}".encode()
    elif isinstance(thing, FunctionType):
        yield from _code(thing.__code__, deep - 1)
        yield from _code((thing.__defaults__, thing.__kwdefaults__), deep - 1)
        yield from _code([_content(cell) for cell in thing.__closure__ or ()], deep - 1)
        used = {name: thing.__globals__.get(name) for name in thing.__code__.co_names}
        yield from _code({name: one for name, one in used.items() if _plain(one)}, deep - 1)
    elif isinstance(thing, partial):
        yield from _code((thing.func, thing.args, thing.keywords), deep - 1)
    elif isinstance(thing, MethodType):
        yield from _code((thing.__func__, thing.__self__), deep - 1)
    elif isinstance(thing, nn.Module):
        yield repr(thing).encode()
        yield from _code([type(part).forward for part in thing.modules()], deep - 1)
        yield from _code([_attributes(part) for part in thing.modules()], deep - 1)
    elif hasattr(thing, "__array__"):
        yield from _code(torch.as_tensor(thing), deep)
    elif isinstance(thing, set | frozenset):
        yield from _code(sorted(map(repr, thing)), deep - 1)
    elif hasattr(thing, "__dict__") and not isinstance(thing, type | ModuleType):
        yield from _code(vars(type(thing)).get("__call__"), deep - 1)
        yield from _code(_attributes(thing), deep - 1)


def _attributes(thing: Any) -> dict[str, Any]:
    """What an object carries under names of its user's choice; of a module, tensors are looked at elsewhere."""
    hidden = "_" if isinstance(thing, nn.Module) else "__"
    return {name: one for name, one in vars(thing).items() if not name.startswith(hidden)}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _plain(thing: Any) -> bool:
    """Whether a global may change what a loss computes: not the modules and classes that it names."""
    return not isinstance(thing, type | ModuleType)
