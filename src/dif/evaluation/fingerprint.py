"""Hashes that tell one problem from another: its data, its weights, its losses as far as they can be seen.

What a loss depends on is followed from the function to whatever it refers to: code, closures, globals, attributes,
classes, modules and their tensors. The code of installed packages is known by name. What cannot be followed counts as
new every time, so that nothing rests on it.
"""

from __future__ import annotations

import enum
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dif.evaluation.program import Program
from dif.evaluation.rows import Rows
from dif.problem.sample_losses import SampleLosses
from dif.problem.structure import leaves

READ = 2**12  # samples read at once
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[1])
_PLAIN = (type(None), type(Ellipsis), bool, int, float, complex, str, bytes, range, slice, np.generic, torch.dtype)
_METHODS = (FunctionType, staticmethod, classmethod, property)  # what counts of a class under names like __call__


def of_tensor(tensor: Tensor) -> bytes:
    """Type, shape and values of a tensor, to the bit."""
    plain = tensor.detach().cpu()
    plain = (plain if plain.layout == torch.strided else plain.to_dense()).contiguous()
    if plain.dtype == torch.bfloat16:  # numpy does not know it
        plain = plain.view(torch.int16)
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode() + plain.numpy().tobytes()


def of_program(program: Program) -> bytes:
    """Everything that a problem consists of, but not its parameters."""
    seen = hashlib.sha256()
    for part in (program.tau, program.kinds.equal):
        seen.update(of_tensor(part))
    for part in of_rows(program.rows):
        seen.update(part)
    look = Look()
    for part in look.at_module(program.parameters.module):
        seen.update(part)
    for part in look.at(program.parameters.fixed):
        seen.update(part)
    return seen.digest()


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
            yield from Look().at(function.fn)


def of_samples(samples: SampleLosses) -> Iterator[bytes]:
    """The code of their loss, and all data."""
    yield from Look().at((samples.loss,) if samples.parted is None else samples.parted)
    for _, batch in samples.batches(at_most=READ):
        yield from map(of_tensor, leaves(batch))


class Look:
    """A walk through everything that an object refers to; each object is visited once."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, Any]] = {}  # id → number of the visit, and the object, which stays alive

    def at(self, thing: Any) -> Iterator[bytes]:
        """What can be seen of an object."""
        if isinstance(thing, _PLAIN):
            yield f"{type(thing).__name__} {thing!r}".encode()
            return
        if id(thing) in self.seen:
            yield f"visit {self.seen[id(thing)][0]}".encode()
            return
        self.seen[id(thing)] = len(self.seen), thing
        yield type(thing).__qualname__.encode()
        try:
            yield from self._inside(thing)
        except Exception:  # it cannot be followed
            yield os.urandom(16)

    def _inside(self, thing: Any) -> Iterator[bytes]:
        if isinstance(thing, Tensor):
            yield of_tensor(thing)
        elif isinstance(thing, np.ndarray):
            yield f"{thing.dtype} {thing.shape}".encode()
            yield from self.at(thing.tolist()) if thing.dtype.hasobject else (np.ascontiguousarray(thing).tobytes(),)
        elif isinstance(thing, tuple | list):
            for one in thing:
                yield from self.at(one)
        elif isinstance(thing, set | frozenset):
            yield from sorted(hashlib.sha256(b" ".join(Look().at(one))).digest() for one in thing)
        elif isinstance(thing, Mapping):
            for name, one in thing.items():
                yield from self.at(name)
                yield from self.at(one)
        elif isinstance(thing, CodeType):
            yield thing.co_code
            yield " ".join((*thing.co_names, *thing.co_varnames)).encode()
            yield from self.at(thing.co_consts)
        elif isinstance(thing, FunctionType):
            yield from self._function(thing)
        elif isinstance(thing, MethodType):
            yield from self.at(thing.__func__)
            yield from self.at(thing.__self__)
        elif isinstance(thing, BuiltinFunctionType):
            yield f"{thing.__module__} {thing.__qualname__}".encode()
            if not isinstance(thing.__self__, ModuleType | type(None)):
                yield from self.at(thing.__self__)
        elif isinstance(thing, ModuleType):
            yield thing.__name__.encode()
        elif isinstance(thing, type):
            yield from self._class(thing)
        elif isinstance(thing, staticmethod | classmethod):
            yield from self.at(thing.__func__)
        elif isinstance(thing, property):
            yield from self.at((thing.fget, thing.fset))
        elif isinstance(thing, enum.Enum):
            yield from self.at((type(thing), thing.name, thing.value))
        elif hasattr(thing, "__wrapped__"):  # a cache around a function, say
            yield from self.at(thing.__wrapped__)
        else:
            arguments, state, items, pairs = (*thing.__reduce_ex__(4)[1:5], None, None, None)[:4]
            yield from self.at((type(thing), arguments, state, list(items or ()), list(pairs or ())))

    def at_module(self, module: nn.Module | None) -> Iterator[bytes]:
        """The classes and attributes of an nn.Module and of all that are in it, without its tensors."""
        tensors = ("_parameters", "_buffers", "_modules")
        for name, part in () if module is None else module.named_modules():
            yield name.encode()
            yield from self.at(type(part))
            yield from self.at({k: v for k, v in vars(part).items() if k not in tensors})

    def _function(self, thing: FunctionType) -> Iterator[bytes]:
        if _installed(thing):
            yield f"{thing.__module__} {thing.__qualname__}".encode()
            return
        yield from self.at((thing.__code__, thing.__defaults__, thing.__kwdefaults__, vars(thing)))
        for cell in thing.__closure__ or ():
            try:
                yield from self.at(cell.cell_contents)
            except ValueError:  # not filled yet
                yield b"empty"
        names = sorted(set(_names(thing.__code__)))
        for name in names:
            if name in thing.__globals__:
                one = thing.__globals__[name]
                yield name.encode()
                yield from self.at(one)
                if isinstance(one, ModuleType) and not _installed(one):
                    yield from self.at({other: vars(one)[other] for other in names if other in vars(one)})

    def _class(self, thing: type) -> Iterator[bytes]:
        for one in thing.__mro__:
            yield f"{one.__module__} {one.__qualname__}".encode()
            if not _installed(one):
                yield from self.at({k: v for k, v in vars(one).items() if k[:2] != "__" or isinstance(v, _METHODS)})


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function uses, those of the functions inside it too."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)


def _installed(thing: Any) -> bool:
    """Whether code belongs to Python, to an installed package or to dif, which users do not edit."""
    name = thing.__name__ if isinstance(thing, ModuleType) else (thing.__module__ or "")
    if name.partition(".")[0] in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if file.startswith(_OURS):
        return not file.startswith((f"{_OURS}/examples", f"{_OURS}/studies"))
    return file.startswith(_INSTALLED)
