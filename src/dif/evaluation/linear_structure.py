"""Losses that see θ only through linear maps of the batch, z = X·W + b: found by running the loss, then exploited.

Such a loss is φ(z) with z linear in θ, so its Hessian is XᵀSX with the small matrices S = ∇²φ of each sample: as many
products with φ as z has entries, instead of as many products with the loss as there are parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn.functional import linear

from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses

_VIEWS = (
    Tensor.reshape, torch.reshape, Tensor.view, Tensor.flatten, torch.flatten, Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
    Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.squeeze, torch.squeeze,
    Tensor.unsqueeze, torch.unsqueeze, Tensor.__getitem__, Tensor.contiguous, Tensor.clone, torch.clone, Tensor.expand,
)  # fmt: skip
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.mv, Tensor.mv)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_ASKED = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_sparse",
    "size", "dim", "numel", "nelement", "__len__", "is_floating_point", "is_contiguous", "stride",
)  # fmt: skip
_WIDEST = 4  # entries of all maps together, in parameters: more, and parameters are shared by too many maps


class Curved(Exception):
    """A parameter is used otherwise than in a linear map of the batch."""


@dataclass(frozen=True)
class Map:
    """z = X·θ[index], plus constants."""

    X: Tensor  # (n, p)
    index: Tensor  # (p, C) of θ

    @property
    def outputs(self) -> int:
        """Entries of z for one sample."""
        return self.index.shape[1]


class _Traced(Tensor):
    """A parameter (a view of θ: `entries` says of what), or a linear map of the batch (`map`)."""

    tape: _Tape
    entries: Tensor | None
    map: Map | None

    @classmethod
    def of(cls, value: Tensor, tape: _Tape, entries: Tensor | None = None, map: Map | None = None) -> _Traced:
        traced = value.as_subclass(cls)
        traced.tape, traced.entries, traced.map = tape, entries, map
        return traced

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            made = None if kwargs else _traced_result(func, args)
            if made is not None:
                return made
            name = getattr(func, "__name__", "")
            about = getattr(func.__self__, "__name__", "") if name == "__get__" else name
            plain = _plain if about in _ASKED else _seen
            return func(*plain(args), **plain(kwargs))


class _Tape:
    """The linear maps in the order in which the loss takes anything but linear maps of them."""

    def __init__(self, given: tuple[Tensor, ...] | None = None, varied: Sequence[bool] = ()) -> None:
        self.given = given  # values in place of the maps,
        self.replayed = iter(varied)  # and what was asked of other tensors when they were found
        self.varied: list[bool] = []
        self.maps: list[Map] = []
        self.values: list[Tensor] = []

    def see(self, traced: _Traced) -> Tensor:
        """The values of a map, from here on a variable of the loss."""
        if traced.map is None:
            raise Curved
        known = [number for number, one in enumerate(self.maps) if one is traced.map]
        number = known[0] if known else len(self.maps)
        if not known:
            self.maps.append(traced.map)
            if self.given is None:
                self.values.append(_value(traced).detach().requires_grad_())
        return self.values[number] if self.given is None else self.given[number]


def _traced_result(func: Any, args: Any) -> _Traced | None:
    """What a linear operator makes of traced tensors, still traced; None if it is not one that is known."""
    first = args[0]
    second = args[1] if len(args) > 1 else None
    if func in _VIEWS and isinstance(first, _Traced) and first.entries is not None:
        if any(isinstance(a, Tensor) for a in args[1:]):
            return None
        return _Traced.of(func(_value(first), *args[1:]), first.tape, func(first.entries, *args[1:]))
    if func in _PRODUCTS and len(args) == 2:
        return _product(func, first, second, lambda index: index)
    if func is linear and len(args) in (2, 3):
        made = _product(func, first, second, lambda index: index.T)
        return made if made is None or len(args) == 2 or args[2] is None else _sum(torch.add, made, args[2])
    if func in _SUMS and len(args) == 2:
        return _sum(func, first, second)
    return None


def _product(func: Any, X: Any, W: Any, laid: Callable[[Tensor], Tensor]) -> _Traced | None:
    if isinstance(X, _Traced) or not isinstance(X, Tensor) or X.dim() != 2:
        return None
    if not isinstance(W, _Traced) or W.entries is None or W.dim() > 2:
        return None
    if _varies(X, W.tape):
        raise Curved  # a layer upon another: X depends on θ
    index = laid(W.entries) if W.dim() == 2 else W.entries[:, None]
    return _Traced.of(func(X, _value(W)), W.tape, map=Map(X, index))


def _sum(func: Any, first: Any, second: Any) -> _Traced | None:
    """A map plus a map, plus a parameter that is the same for all samples, or plus a constant."""
    if not isinstance(first, _Traced) or (isinstance(second, _Traced) and first.map is None):
        first, second = second, first
    if not isinstance(first, _Traced) or first.map is None:
        return None
    if isinstance(second, Tensor) and not isinstance(second, _Traced) and _varies(second, first.tape):
        return None  # no constant: what is added depends on θ too
    value = torch.add(_value(first), _value(second))
    X, index = first.map.X, first.map.index
    if value.shape != first.shape:
        return None
    if isinstance(second, _Traced):
        if second.map is not None:
            if second.shape != first.shape:
                return None
            more = second.map
        elif second.entries is not None and second.dim() <= 1:
            shared = second.entries.reshape(1, -1).expand(1, index.shape[1])
            more = Map(X.new_ones((len(X), 1)), shared)
        else:
            return None
        X, index = torch.cat([X, more.X], 1), torch.cat([index, more.index])
    return _Traced.of(value, first.tape, map=Map(X, index))


def _varies(t: Tensor, tape: _Tape) -> bool:
    """Whether a tensor was made from maps that were seen already; where values are given, what was found before."""
    if tape.given is None:
        tape.varied.append(t.requires_grad)
        return t.requires_grad
    return next(tape.replayed)


def _value(given: Any) -> Any:
    return given.as_subclass(Tensor) if isinstance(given, _Traced) else given


def _plain(given: Any) -> Any:
    if isinstance(given, tuple | list):
        return type(given)(_plain(g) for g in given)
    return {key: _plain(g) for key, g in given.items()} if isinstance(given, dict) else _value(given)


def _seen(given: Any) -> Any:
    if isinstance(given, tuple | list):
        return type(given)(_seen(g) for g in given)
    if isinstance(given, dict):
        return {key: _seen(g) for key, g in given.items()}
    return given.tape.see(given) if isinstance(given, _Traced) else given


def _run(samples: SampleLosses, parameters: Parameters, theta: Tensor, batch: Any, tape: _Tape) -> tuple[Tensor, _Tape]:
    index = parameters.tensors(torch.arange(len(theta), device=theta.device))
    traced = {name: _Traced.of(t, tape, index[name]) for name, t in parameters.tensors(theta).items()}
    out: Any = samples.loss(parameters.bind(traced), batch)  # type: ignore[arg-type]
    return _seen(out), tape


def widths(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, batch: Any, count: int
) -> tuple[int, int] | None:
    """Inputs and outputs of all linear maps together (Σ p, Σ C), if the loss sees θ through nothing else."""
    try:
        with torch.enable_grad():
            _, tape = _run(samples, parameters, theta, batch, _Tape())
    except Exception:  # whatever it is, the loss itself raises it again where it matters
        return None
    entries = sum(one.index.numel() for one in tape.maps)
    if not tape.maps or any(len(one.X) != count for one in tape.maps) or entries > _WIDEST * len(theta):
        return None
    return sum(one.X.shape[1] for one in tape.maps), sum(one.outputs for one in tape.maps)


def hessian(
    samples: SampleLosses,
    parameters: Parameters,
    theta: Tensor,
    batches: Iterator[tuple[slice, Any]],
    w: Tensor,
    together: int,
) -> Tensor:
    """Σᵢ wᵢ∇²ℓᵢ(θ), (d, d), over these batches, for a loss that has `widths`; `together` columns of S at once."""
    total, index = None, torch.zeros(0, dtype=torch.long)
    for place, batch in batches:
        with torch.enable_grad():  # tells what depends on θ
            _, tape = _run(samples, parameters, theta, batch, _Tape())
        S = _second_derivative(samples, parameters, theta, batch, tape, w[place], together)
        K = _assembled(tape.maps, S)
        total = K if total is None else total + K
        index = torch.cat([one.index.T.reshape(-1) for one in tape.maps])
    if total is None:
        return theta.new_zeros((len(theta), len(theta)))
    K = torch.triu(total) + torch.triu(total, 1).T
    half = theta.new_zeros((len(theta), len(K))).index_add_(0, index, K)
    return theta.new_zeros((len(theta), len(theta))).index_add_(0, index, half.T.contiguous())


def _second_derivative(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, batch: Any, tape: _Tape, w: Tensor, together: int
) -> Tensor:
    """S = wᵢ∇²φ of each sample in its z, (C, C, n); the samples of a batch know nothing of each other."""
    shapes = [value.shape for value in tape.values]
    sizes = [one.outputs for one in tape.maps]
    Z = torch.cat([value.detach().reshape(len(w), -1) for value in tape.values], 1)

    def phi(Z: Tensor) -> Tensor:
        given = tuple(part.reshape(shape) for part, shape in zip(torch.split(Z, sizes, 1), shapes, strict=True))
        return _run(samples, parameters, theta, batch, _Tape(given, tape.varied))[0] @ w

    along = torch.eye(Z.shape[1]).to(Z)[:, None, :].expand(-1, len(Z), -1)
    column = vmap(lambda e: jvp(grad(phi), (Z,), (e,))[1], chunk_size=together, randomness="same")
    return column(along).detach().transpose(1, 2).contiguous()


def _assembled(maps: list[Map], S: Tensor) -> Tensor:
    """The upper triangle of the Hessian in the entries of the maps, output by output."""
    begins = [0]
    for one in maps:
        begins.append(begins[-1] + one.index.numel())
    K = S.new_zeros((begins[-1], begins[-1]))
    inputs = [one.X.T.contiguous() for one in maps]  # (p, n): samples run fastest
    row = 0
    for k, left in enumerate(maps):
        p = left.X.shape[1]
        for a in range(left.outputs):
            top, column = begins[k] + a * p, row + a
            for right, X, begin in zip(maps[k:], inputs[k:], begins[k:], strict=False):
                first = a if right is left else 0  # of its outputs
                last = column + right.outputs - first
                weighed = (S[row + a, column:last, None, :] * X).reshape(-1, S.shape[2])
                K[top : top + p, begin + first * len(X) : begin + right.index.numel()] = inputs[k] @ weighed.T
                column = last
        row += left.outputs
    return K
