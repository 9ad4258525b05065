"""Fingerprints of problems, targets and perturbations: hashes of their data, weights, losses and functions.

A loss is hashed with everything it refers to: code, closures, globals, attributes, classes, modules and their tensors.
Code of installed packages is identified by name. An object that cannot be inspected gets a random fingerprint, so
cached results that depend on it are never reused.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dif.derivatives.program import Program, Targets
from dif.derivatives.rows import Rows
from dif.derivatives.weight_change import Direction
from dif.problem.data import leaves
from dif.problem.samples import Samples

READ = 2**12  # samples read per batch, so that data on disk are not loaded as a whole
# Folders of installed code, which is identified by name.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[1])  # folder of dif, whose code is identified by name too
# Types whose repr identifies the value.
_PLAIN = (type(None), type(Ellipsis), bool, int, float, complex, str, bytes, range, slice, np.generic, torch.dtype)
_METHODS = (FunctionType, staticmethod, classmethod, property)  # types of the dunder attributes that are encoded


def encode_tensor(tensor: Tensor) -> bytes:
    """Encode dtype, shape and exact values of a tensor."""
    plain = tensor.detach().cpu()
    plain = (plain if plain.layout == torch.strided else plain.to_dense()).contiguous()
    if plain.dtype == torch.bfloat16:  # numpy has no bfloat16
        plain = plain.view(torch.int16)
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode() + plain.numpy().tobytes()


def hash_all(parts: Iterable[bytes]) -> bytes:
    """Hash byte strings, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def fingerprint_program(program: Program) -> bytes:
    """Hash everything that defines a problem, except the values of its parameters."""
    bounds, encoder, layout = (program.tau, program.kinds.equal), ObjectEncoder(), program.parameters
    shares = tuple(constraint.share for constraint in program.problem.constraints)
    module, fixed = encoder.encode_module(layout.module), encoder.encode((shares, layout.fixed))
    return hash_all(chain(map(encode_tensor, bounds), encode_rows(program.rows), module, fixed))


def encode_rows(rows: Rows) -> Iterator[bytes]:
    """Yield the encoded data, weights, losses and functions of the rows."""
    yield encode_tensor(rows.C)
    for table in rows.tables:
        yield encode_tensor(table.U)
        yield from encode_samples(table.samples)
    for smooth in rows.functions:
        function = smooth.function
        yield f"{function.name} {function.ridge!r} {function.of!r}".encode()
        yield b"" if smooth.matrix is None else encode_tensor(smooth.matrix)
        if smooth.matrix is None and function.ridge is None:
            yield from ObjectEncoder().encode(function.fn)


def encode_samples(samples: Samples) -> Iterator[bytes]:
    """Yield the encoded loss and all data of the samples."""
    yield from ObjectEncoder().encode((samples.loss,) if samples.parted is None else samples.parted)
    for _, batch in samples.batches(at_most=READ):
        yield from map(encode_tensor, leaves(batch))


def hash_targets(targets: Targets) -> Iterator[bytes]:
    """Yield hashes of the losses, data and constants of the targets."""
    if targets.samples is not None:
        yield from encode_samples(targets.samples)
    else:
        yield from encode_rows(targets.rows)
        yield encode_tensor(targets.constant)


def hash_direction(direction: Direction) -> Iterator[bytes]:
    """Yield hashes of the changes of weights and bounds under all perturbations, and of the samples in them."""
    yield encode_tensor(direction.dtau)
    for block in direction.blocks:
        yield from map(encode_tensor, (block.touch, block.alpha, block.owner, block.index, block.s))
        for _, batch in block.samples.batches(block.distinct if block.distinct is None else block.distinct.cpu(), READ):
            yield from map(encode_tensor, leaves(batch))


class ObjectEncoder:
    """Encodes an object and everything it refers to as bytes. An object that occurs again is encoded by its number."""

    def __init__(self) -> None:
        # By id the number of each object, and the object, so that its id stays valid
        self.seen: dict[int, tuple[int, Any]] = {}

    def encode(self, thing: Any) -> Iterator[bytes]:
        """Yield the encoding of an object and of everything it refers to."""
        if isinstance(thing, _PLAIN):
            yield f"{type(thing).__name__} {thing!r}".encode()
            return
        if id(thing) in self.seen:
            yield f"visit {self.seen[id(thing)][0]}".encode()
            return
        self.seen[id(thing)] = len(self.seen), thing
        yield type(thing).__qualname__.encode()
        try:
            yield from self._encode_contents(thing)
        except Exception:  # it cannot be inspected
            yield os.urandom(16)

    def _encode_contents(self, thing: Any) -> Iterator[bytes]:
        """Yield the encoding of what an object contains, by its type."""
        if isinstance(thing, Tensor):
            yield encode_tensor(thing)
        elif isinstance(thing, np.ndarray):
            yield f"{thing.dtype} {thing.shape}".encode()
            yield from self.encode(thing.tolist()) if thing.dtype.hasobject else [thing.tobytes()]
        elif isinstance(thing, tuple | list):
            for item in thing:
                yield from self.encode(item)
        elif isinstance(thing, set | frozenset):
            yield from sorted(hashlib.sha256(b" ".join(ObjectEncoder().encode(item))).digest() for item in thing)
        elif isinstance(thing, Mapping):
            for key, value in thing.items():
                yield from self.encode(key)
                yield from self.encode(value)
        elif isinstance(thing, CodeType):
            yield thing.co_code
            yield " ".join((*thing.co_names, *thing.co_varnames)).encode()
            yield from self.encode(thing.co_consts)
        elif isinstance(thing, FunctionType):
            yield from self._encode_function(thing)
        elif isinstance(thing, MethodType):
            yield from self.encode(thing.__func__)
            yield from self.encode(thing.__self__)
        elif isinstance(thing, BuiltinFunctionType):
            yield f"{thing.__module__} {thing.__qualname__}".encode()
            if not isinstance(thing.__self__, ModuleType | type(None)):
                yield from self.encode(thing.__self__)
        elif isinstance(thing, ModuleType):
            yield thing.__name__.encode()
        elif isinstance(thing, type):
            yield from self._encode_class(thing)
        elif isinstance(thing, property):
            yield from self.encode((thing.fget, thing.fset))
        elif hasattr(thing, "__wrapped__"):  # for example functools.cache, and staticmethod
            yield from self.encode(thing.__wrapped__)
        else:
            arguments, state, items, pairs = (*thing.__reduce_ex__(4)[1:5], None, None, None)[:4]
            yield from self.encode((type(thing), arguments, state, list(items or ()), list(pairs or ())))

    def encode_module(self, module: nn.Module | None) -> Iterator[bytes]:
        """Yield the encoded classes and attributes of a module and its submodules, without their tensors."""
        tensors = ("_parameters", "_buffers", "_modules")
        for name, part in () if module is None else module.named_modules():
            yield name.encode()
            yield from self.encode(type(part))
            yield from self.encode({k: v for k, v in vars(part).items() if k not in tensors})

    def _encode_function(self, function: FunctionType) -> Iterator[bytes]:
        """Yield the encoded code, defaults, attributes, closure and used globals of a function."""
        if _is_installed(function):
            yield f"{function.__module__} {function.__qualname__}".encode()
            return
        yield from self.encode((function.__code__, function.__defaults__, function.__kwdefaults__, vars(function)))
        for cell in function.__closure__ or ():
            try:
                yield from self.encode(cell.cell_contents)
            except ValueError:  # not filled yet
                yield b"empty"
        names = sorted(set(_used_names(function.__code__)))
        for name in names:
            if name in function.__globals__:
                value = function.__globals__[name]
                yield name.encode()
                yield from self.encode(value)
                if isinstance(value, ModuleType) and not _is_installed(value):
                    yield from self.encode({other: vars(value)[other] for other in names if other in vars(value)})

    def _encode_class(self, thing: type) -> Iterator[bytes]:
        """Yield the encoded attributes and methods of a class and its bases."""
        for base in thing.__mro__:
            yield f"{base.__module__} {base.__qualname__}".encode()
            if not _is_installed(base):
                own = {k: v for k, v in vars(base).items() if k[:2] != "__" or isinstance(v, _METHODS)}
                yield from self.encode(own)


def _used_names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and its inner functions use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _used_names(constant)


def _is_installed(thing: Any) -> bool:
    """Return whether code belongs to Python, to an installed package or to dif, which users do not edit."""
    name = thing.__name__ if isinstance(thing, ModuleType) else (thing.__module__ or "")
    if name.partition(".")[0] in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if file.startswith(_OURS):
        return not file.startswith(f"{_OURS}/examples")
    return file.startswith(_INSTALLED)
