"""Fast Hessians of losses that depend on θ only through linear maps of the batch, z = X·W + b.

Such a loss is φ(z) with z linear in θ, so its Hessian is XᵀSX with a small matrix S = ∇²φ per sample. It takes one
product with ∇²φ per entry of z, instead of one product with the Hessian of the loss per parameter. The structure is
detected by running the loss on tensors that trace how θ is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.nn.functional import linear

from dif.problem.data import map_tensors
from dif.problem.parameters import Parameters
from dif.problem.samples import Samples
from dif.runtime.guard import numbers_at_once

# Operators on parameters that only rearrange or select entries.
_VIEWS = (
    Tensor.reshape, torch.reshape, Tensor.view, Tensor.flatten, torch.flatten, Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
    Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.squeeze, torch.squeeze,
    Tensor.unsqueeze, torch.unsqueeze, Tensor.__getitem__, Tensor.contiguous, Tensor.clone, torch.clone, Tensor.expand,
)  # fmt: skip
# Matrix products that are traced.
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.mv, Tensor.mv)
# Additions that are traced.
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
# Attributes that do not depend on the values of a tensor.
_METADATA = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_sparse",
    "size", "dim", "numel", "nelement", "__len__", "is_floating_point", "is_contiguous", "stride",
)  # fmt: skip
_CACHED = 2**19  # entries of weighted inputs that are multiplied at once: 4 MiB in double precision
_FEW = 4  # columns up to which products of a matrix with one after the other are faster
_MAX_SHARING = 4  # entries of all maps per parameter beyond which the structure does not pay


class NotLinearError(Exception):
    """A parameter is used in another way than in a linear map of the batch."""


@dataclass(frozen=True)
class Map:
    """A linear map of the batch: z = X·θ[index] plus constants."""

    X: Tensor  # (n, p)
    index: Tensor  # (p, C) positions in θ

    @property
    def outputs(self) -> int:
        """Number of entries of z for one sample."""
        return self.index.shape[1]


class _Traced(Tensor):
    """A view of θ (`entries` holds the positions in θ) or a linear map of the batch (`map`)."""

    tape: _Tape
    entries: Tensor | None
    map: Map | None

    @classmethod
    def of(cls, value: Tensor, tape: _Tape, entries: Tensor | None = None, map: Map | None = None) -> _Traced:
        """Wrap a value."""
        traced = value.as_subclass(cls)
        traced.tape, traced.entries, traced.map = tape, entries, map
        return traced

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = None if kwargs else _trace(func, args)
            if result is not None:
                return result
            name = getattr(func, "__name__", "")
            attribute = getattr(func.__self__, "__name__", "") if name == "__get__" else name
            unwrap = _value if attribute in _METADATA else _record
            return func(*map_tensors(args, unwrap), **map_tensors(kwargs, unwrap))


class _Tape:
    """The linear maps, in the order in which the loss first uses them in anything but another linear map.

    The first run records them. A replay puts the values `given` in their place and repeats the recorded answers of
    `_depends_on_theta`, because the given values do not carry that information.
    """

    def __init__(self, given: tuple[Tensor, ...] | None = None, dependences: Sequence[bool] = ()) -> None:
        self.given = given
        self.replayed = iter(dependences)
        self.dependences: list[bool] = []
        self.maps: list[Map] = []
        self.values: list[Tensor] = []


def _trace(func: Any, args: Any) -> _Traced | None:
    """Apply a linear operator to traced tensors and keep the result traced; None if it is not a known one."""
    first = args[0]
    second = args[1] if len(args) > 1 else None
    if func in _VIEWS and isinstance(first, _Traced) and first.entries is not None:
        if any(isinstance(a, Tensor) for a in args[1:]):
            return None
        return _Traced.of(func(_value(first), *args[1:]), first.tape, func(first.entries, *args[1:]))
    if (func in _PRODUCTS and len(args) == 2) or (func is linear and len(args) in (2, 3)):
        product = _trace_product(func, first, second)
        has_bias = product is not None and len(args) == 3 and args[2] is not None
        return _trace_sum(product, args[2]) if has_bias else product
    if func in _SUMS and len(args) == 2:
        return _trace_sum(first, second)
    return None


def _trace_product(func: Any, X: Any, W: Any) -> _Traced | None:
    """Return the product of data X and parameters W as a map."""
    if isinstance(X, _Traced) or not isinstance(X, Tensor) or X.dim() != 2:
        return None
    if not isinstance(W, _Traced) or W.entries is None or W.dim() > 2:
        return None
    if _depends_on_theta(X, W.tape):
        raise NotLinearError  # a second layer: X depends on θ
    index = W.entries[:, None] if W.dim() < 2 else W.entries.T if func is linear else W.entries  # (p, C)
    return _Traced.of(func(X, _value(W)), W.tape, map=Map(X, index))


def _trace_sum(first: Any, second: Any) -> _Traced | None:
    """Return the sum of a map and another map, a parameter shared by all samples, or a constant, as a map."""
    if not isinstance(first, _Traced) or first.map is None:
        first, second = second, first
    if not isinstance(first, _Traced) or first.map is None:
        return None
    if isinstance(second, Tensor) and not isinstance(second, _Traced) and _depends_on_theta(second, first.tape):
        return None  # not a constant
    value = torch.add(_value(first), _value(second))
    X, index = first.map.X, first.map.index
    if value.shape != first.shape:
        return None
    if isinstance(second, _Traced):
        if second.map is not None and second.shape == first.shape:
            more = second.map
        elif second.entries is not None and second.dim() <= 1:
            shared = second.entries.reshape(1, -1).expand(1, index.shape[1])
            more = Map(X.new_ones((len(X), 1)), shared)
        else:
            return None
        X, index = torch.cat([X, more.X], 1), torch.cat([index, more.index])
    return _Traced.of(value, first.tape, map=Map(X, index))


def _depends_on_theta(t: Tensor, tape: _Tape) -> bool:
    """Return whether a tensor was computed from recorded maps; in a replay, the recorded answer."""
    if tape.given is None:
        tape.dependences.append(t.requires_grad)
        return t.requires_grad
    return next(tape.replayed)


def _value(given: Any) -> Any:
    """Return a traced tensor as a plain one, and anything else unchanged."""
    return given.as_subclass(Tensor) if isinstance(given, _Traced) else given


def _record(given: Tensor) -> Tensor:
    """Return the value of a map as a variable of φ, noted on the tape at its first use, and other tensors unchanged."""
    if not isinstance(given, _Traced):
        return given
    if given.map is None:
        raise NotLinearError
    tape = given.tape
    known = [number for number, recorded in enumerate(tape.maps) if recorded is given.map]
    number = known[0] if known else len(tape.maps)
    if not known:
        tape.maps.append(given.map)
        if tape.given is None:
            tape.values.append(_value(given).detach().requires_grad_())
    return tape.values[number] if tape.given is None else tape.given[number]


def _run(samples: Samples, parameters: Parameters, theta: Tensor, batch: Any, tape: _Tape) -> Tensor:
    """Evaluate the losses of a batch on traced parameters, which use the tape."""
    index = parameters.tensors(torch.arange(len(theta), device=theta.device))
    traced = {name: _Traced.of(t, tape, index[name]) for name, t in parameters.tensors(theta).items()}
    out: Any = samples.loss(parameters.bind(traced), batch)  # type: ignore[arg-type]
    return map_tensors(out, _record)


def _record_maps(run: Callable[[_Tape], Any]) -> _Tape:
    """Return the tape of one run."""
    tape = _Tape()
    with torch.enable_grad():  # requires_grad marks what depends on θ
        run(tape)
    return tape


def measure_maps(
    samples: Samples, parameters: Parameters, theta: Tensor, batch: Any, count: int
) -> tuple[int, int] | None:
    """Return the inputs and outputs of all linear maps together (Σ p, Σ C); None if θ enters the loss otherwise."""
    try:
        tape = _record_maps(partial(_run, samples, parameters, theta, batch))
    except Exception:  # an error of the loss itself is raised again where the loss is evaluated
        return None
    entries = sum(m.index.numel() for m in tape.maps)
    if not tape.maps or any(len(m.X) != count for m in tape.maps) or entries > _MAX_SHARING * len(theta):
        return None
    return sum(m.X.shape[1] for m in tape.maps), sum(m.outputs for m in tape.maps)


def evaluate_maps(
    samples: Samples, parameters: Parameters, thetas: Tensor, batch: Any, W: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ℓ of a batch, (P, n), and Σᵢ wᵢ∇ℓᵢ, (P, k, d), for a loss of linear maps at several θ (P, d).

    All θ go through X in one matrix product, and all weights W (P, k, n) in another one; no weights: k = 0.
    """
    P = len(thetas)
    traced = thetas[0] if P == 1 else torch.zeros_like(thetas[0])  # at 0, the maps have the values of their constants
    run = partial(_run, samples, parameters, traced, batch)
    tape = _record_maps(run)
    Z = [value.detach()[None] for value in tape.values]
    if P > 1:
        for k, (m, value) in enumerate(zip(tape.maps, tape.values, strict=True)):
            products = thetas[:, m.index.T].flatten(0, 1) @ m.X.T  # (P·C, n)
            Z[k] = Z[k] + products.reshape(P, m.outputs, -1).mT.reshape(P, *value.shape)

    def phi(*given: Tensor) -> Tensor:
        return run(_Tape(given, tape.dependences))

    def at(*given: Tensor) -> tuple[Tensor, ...]:
        if W is None:
            return (phi(*given).detach(),)
        losses, pull = vjp(phi, *given)[:2]
        return losses.detach(), *pull(torch.ones_like(losses))  # the losses of samples do not interact

    chunk_size = max(1, numbers_at_once(thetas) // sum(8 * z[0].numel() for z in Z))
    losses, *slopes = vmap(at, chunk_size=chunk_size, randomness="same")(*Z) if P > 1 else at(*(z[0] for z in Z))
    gradients = thetas.new_zeros((P, 0 if W is None else W.shape[1], thetas.shape[1]))
    for m, slope in zip(tape.maps, slopes, strict=False):
        assert W is not None
        weighted = (W[:, :, None] * slope.detach().reshape(P, 1, -1, m.outputs).mT).flatten(0, 2)  # (P·k·C, n)
        gradients.index_add_(2, m.index.T.reshape(-1), (weighted @ m.X).reshape(*W.shape[:2], -1))
    return losses.reshape(P, -1), gradients


def push_maps(samples: Samples, parameters: Parameters, theta: Tensor, batch: Any, V: Tensor) -> tuple[Tensor, Tensor]:
    """Return ℓ of a batch, (n,), and its slopes along the columns of V (d, c), (n, c), for a loss of linear maps."""
    tape = _Tape()
    with torch.enable_grad():
        losses = _run(samples, parameters, theta, batch, tape)
        pulled = torch.autograd.grad(losses.sum(), tape.values, allow_unused=True)  # samples do not interact
    slopes = V.new_zeros((len(losses), V.shape[1]))
    for m, slope in zip(tape.maps, pulled, strict=True):
        if slope is None:
            continue
        slope, at_once = slope.reshape(len(m.X), 1, -1), max(1, numbers_at_once(V) // slope.numel())
        for begin in range(0, V.shape[1], at_once):
            columns = V[:, begin : begin + at_once][m.index].flatten(1)  # (p, C·c)
            few = columns.shape[1] <= _FEW
            products = torch.stack([m.X @ v for v in columns.T], 1) if few else m.X @ columns
            slopes[:, begin : begin + at_once] += (slope @ products.reshape(len(m.X), m.outputs, -1))[:, 0]
    return losses.detach(), slopes


def assemble_hessian(
    samples: Samples, parameters: Parameters, theta: Tensor, batches: Iterator[tuple[slice, Any]], w: Tensor,
    elements: int,
) -> Tensor:  # fmt: skip
    """Return Σᵢ wᵢ∇²ℓᵢ(θ), (d, d), over these batches, for a loss of linear maps.

    `elements` is how many intermediate numbers the loss of one sample has, see `Cost`.
    """
    total, index, run = None, torch.zeros(0, dtype=torch.long), partial(_run, samples, parameters, theta)
    for place, batch in batches:
        tape = _record_maps(partial(run, batch))
        K = _assemble_upper(tape.maps, _second_derivative(partial(run, batch), tape, w[place], elements))
        total = K if total is None else total + K
        index = torch.cat([m.index.T.reshape(-1) for m in tape.maps])
    if total is None:
        return theta.new_zeros((len(theta), len(theta)))
    K = torch.triu(total) + torch.triu(total, 1).T
    if torch.equal(index, torch.arange(len(theta)).to(index)):
        return K
    half = theta.new_zeros((len(theta), len(K))).index_add_(0, index, K)
    return theta.new_zeros((len(theta), len(theta))).index_add_(0, index, half.T.contiguous())


def _second_derivative(run: Callable[[_Tape], Tensor], tape: _Tape, w: Tensor, elements: int) -> Tensor:
    """Return S = wᵢ∇²φ of each sample in its z, (C, C, n); one product serves all samples, as they do not interact."""
    Z = torch.cat([value.detach().reshape(len(w), -1) for value in tape.values], 1)

    def phi(Z: Tensor) -> Tensor:
        parts = torch.split(Z, [m.outputs for m in tape.maps], 1)
        given = tuple(part.reshape(value.shape) for part, value in zip(parts, tape.values, strict=True))
        return run(_Tape(given, tape.dependences)) @ w

    if Z.shape[1] == 1:  # without transforms, which would take longer than the passes where the data are small
        with torch.enable_grad():
            leaf = Z.requires_grad_()
            slope = torch.autograd.grad(phi(leaf), leaf, create_graph=True)[0]
            curved = torch.autograd.grad(slope.sum(), leaf)[0] if slope.requires_grad else torch.zeros_like(Z)
        return curved.T[None].contiguous()
    directions = torch.eye(Z.shape[1]).to(Z)[:, None, :].expand(-1, len(Z), -1)
    at_once = max(1, numbers_at_once(Z) // max(1, len(Z) * (elements + Z.shape[1])))
    product = vmap(vjp(grad(phi), Z)[1], chunk_size=at_once, randomness="same")
    return product(directions)[0].detach().transpose(1, 2).contiguous()


def _assemble_upper(maps: list[Map], S: Tensor) -> Tensor:
    """Return the upper triangle of the Hessian in the entries of all maps, ordered by map and output.

    Samples are taken in slices whose weighted inputs stay in the cache.
    """
    inputs = [m.X for m in maps for _ in range(m.outputs)]  # of each output
    starts = list(accumulate((X.shape[1] for X in inputs), initial=0))
    K = S.new_zeros((starts[-1], starts[-1]))
    for a, X in enumerate(inputs):
        for b in range(a, len(inputs)):
            _add_product(K[starts[a] :, starts[b] :], X, S[a, b], inputs[b], upper=a == b)
    return K


def _add_product(K: Tensor, X: Tensor, s: Tensor, Y: Tensor, upper: bool) -> None:
    """Add XᵀSY with the diagonal matrix S = diag(s) to the first entries of K; `upper` says that X is Y."""
    most = max(_CACHED // Y.shape[1], Y.shape[1])  # fewer rows would take less time than adding up the matrices
    for place in range(0, len(s), most):
        left, right, weights = (t[place : place + most] for t in (X, Y, s))
        if not upper or K.is_cuda:
            K[: X.shape[1], : Y.shape[1]].addmm_(left.T, right * weights[:, None])
            continue
        for sign in (1.0, -1.0):  # NumPy multiplies AᵀA with half of the work
            signed = sign * weights > 0
            if bool(signed.any()):
                A = (left[signed] * weights[signed].abs().sqrt()[:, None]).numpy()
                K[: X.shape[1], : Y.shape[1]].add_(torch.from_numpy(A.T @ A), alpha=sign)
