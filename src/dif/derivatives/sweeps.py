"""Derivatives of per-sample losses by autograd, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.func import grad, jvp, vjp, vmap
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from dif.derivatives.batch_losses import BatchLosses
from dif.derivatives.cost import cost
from dif.derivatives.linear_structure import NotLinearError, assemble_hessian
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import NO_SECOND_BACKWARD, SampleLosses
from dif.problem.structure import leaves, map_tensors
from dif.runtime.distributed import gather_rows, holds_in_all_processes, span, sum_over_processes
from dif.runtime.memory import numbers_at_once, retry_with_smaller_batches
from dif.runtime.user_code import UserCodeError, find_cure, is_out_of_memory, is_unsupported

_PASS = 2**21  # numbers (inputs and intermediates) in one batch on the CPU: 16 MiB, so that they stay in its caches
_PER_PARAMETER = 24  # numbers per parameter that a batch may have if that is more: each batch creates vectors of size d
_SHARED = 32  # columns that should go through a batch at once, to share its forward pass
_FEWEST = 128  # smallest number of samples per batch when many columns go through it
_PER_ENTRY = {"cpu": 128, "cuda": 2048}  # flops that take as long as one entry of a per-sample gradient
_LONGER = 1e-3  # increase of _PER_ENTRY per parameter: longer gradients leave room for fewer at once
_GRADIENTS = 2**22  # entries of per-sample gradients in memory at once on the CPU: 32 MiB

# Fallbacks, listed in diagnostics["fallbacks"]: what is done instead, and why.
NO_FORWARD = "slopes from gradients: an operator of the loss has no forward mode"
NO_MAP = "gradients from whole batches: the loss cannot be mapped over samples"
NO_VMAP = "one column at a time: an operator of the loss is wrong under vmap"


def sweep_batches(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, indices: Tensor | None = None,
    at_most: int | None = None, *, columns: int = 0, shared: bool = True,
) -> Iterator[tuple[slice, Any, BatchLosses]]:  # fmt: skip
    """Sweep over all samples, or those listed: yield positions, batch, and the losses of that batch as a map of θ.

    Batches are as large as memory allows, up to `at_most` samples, and leave room for the `columns` that go through
    them. Where samples are distributed over processes, only this process's part is swept, unless `shared` is False.
    """
    each = cost(samples, parameters, theta)
    room = numbers_at_once(theta, max(_PASS, _PER_PARAMETER * len(theta)))
    step = max(1, room // (each.elements + each.inputs))  # vectorised maps may copy inputs
    if columns:
        step = min(step, max(_FEWEST, numbers_at_once(theta) // (each.elements * min(columns, _SHARED))))
    if at_most is not None:
        step = min(step, at_most)
    total = len(samples) if indices is None else len(indices)
    within = span(total) if shared else None
    if samples.compile:
        step = _divide_evenly(total if within is None else within.stop - within.start, step)
    for place, batch in samples.batches(indices, step, theta.device, within):
        yield place, batch, BatchLosses(samples, parameters, batch, place.stop - place.start)


def _divide_evenly(total: int, most: int) -> int:
    """Return a batch size of at most `most` that divides the total if one is not much smaller: each is compiled."""
    fewest = -(-total // max(1, most))
    return next((total // count for count in range(fewest, 2 * fewest) if total % count == 0), most) if total else most


def columns_per_chunk(samples: SampleLosses, parameters: Parameters, theta: Tensor, count: int) -> int:
    """Return how many columns may go through a batch of `count` samples at once."""
    return max(1, numbers_at_once(theta) // (count * cost(samples, parameters, theta).elements + 4 * len(theta)))


def thetas_per_chunk(samples: SampleLosses, parameters: Parameters, theta: Tensor, place: slice, columns: int) -> int:
    """Return how many θ, with this many columns each, may go through a batch at once; each may copy the inputs."""
    if NO_VMAP in samples.fallbacks:
        return 1
    each, count, columns = cost(samples, parameters, theta), place.stop - place.start, max(1, columns)
    numbers = count * (each.inputs + each.elements * columns) + 4 * len(theta) * columns
    return max(1, numbers_at_once(theta) // numbers)


@retry_with_smaller_batches
def sample_losses(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, indices: Tensor | None = None
) -> Tensor:
    """Return ℓᵢ(θ) of all samples or of those listed, (n,)."""
    batches = [loss.values(theta) for _, _, loss in sweep_batches(samples, parameters, theta, indices)]
    losses = torch.cat(batches) if batches else theta.new_zeros(0)  # of this process
    return gather_rows(losses, len(samples) if indices is None else len(indices))


@retry_with_smaller_batches
def sample_gradients(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, indices: Tensor | None = None
) -> Tensor:
    """Return ∇ℓᵢ(θ) of all samples or of those listed, (n, d)."""
    sweep = sweep_batches(samples, parameters, theta, indices)
    batches = [batch_gradients(samples, parameters, theta, batch) for _, batch, _ in sweep]
    total = len(samples) if indices is None else len(indices)
    return gather_rows(torch.cat([theta.new_zeros((0, len(theta))), *batches]).detach(), total)


@retry_with_smaller_batches
def sample_slopes(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, V: Tensor, indices: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ℓᵢ(θ), (n,), and the slopes ∇ℓᵢ·v for every column v of V (d, c), as (n, c), in one sweep.

    Forward mode costs about two evaluations per column. Per-sample gradients cost about three evaluations and a fixed
    amount per parameter, for any number of columns. The cheaper method is used.
    """
    d, columns = V.shape
    flops = cost(samples, parameters, theta).flops
    entry = _PER_ENTRY.get(theta.device.type, 2048) + _LONGER * d
    by_gradients = columns > 1 and 3 * flops + entry * d < 2 * flops * columns
    losses, slopes = [theta.new_zeros(0)], [V.new_zeros((0, columns))]
    fits = max(1, numbers_at_once(theta, _GRADIENTS) // d) if by_gradients else None
    for place, batch, loss in sweep_batches(samples, parameters, theta, indices, fits):
        count = place.stop - place.start
        if columns == 0 or by_gradients:
            value = loss.values(theta)
            slope = batch_gradients(samples, parameters, theta, batch) @ V if columns else V.new_zeros((count, 0))
        else:
            chunk_size = columns_per_chunk(samples, parameters, theta, count)
            value, slope = push_forward(loss, theta, V, chunk_size, samples.fallbacks)
        losses.append(value)
        slopes.append(slope)
    total = len(samples) if indices is None else len(indices)
    return gather_rows(torch.cat(losses), total), gather_rows(torch.cat(slopes), total)


def evaluate_with_pullback(fn: Callable[[Tensor], Tensor], theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return fn(θ) and the map w → Jᵀw, which may be called repeatedly."""
    value, pull = vjp(fn, theta)[:2]
    return value, lambda w: pull(w)[0]


def pull_back(
    fn: Callable[[Tensor], Tensor],
    theta: Tensor,
    weights: Tensor,
    chunk_size: int | None = None,
    fallbacks: Container[str] = (),
) -> tuple[Tensor, Tensor]:
    """Return fn(θ), and Jᵀw for each row w of weights (k, n), as (k, d); `chunk_size` rows at once (None: all)."""
    value, pull = evaluate_with_pullback(fn, theta)
    if len(weights) == 0:
        return value.detach(), theta.new_zeros((0, theta.numel()))
    return value.detach(), map_columns(pull, weights.T, chunk_size, fallbacks).T


@retry_with_smaller_batches
def weighted_gradients(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Σᵢ wᵢℓᵢ(θ), (k,), and Σᵢ wᵢ∇ℓᵢ(θ), (k, d), over all samples, for each row w of weights (k, n)."""
    value, gradient = theta.new_zeros(len(weights)), theta.new_zeros((len(weights), theta.numel()))
    for place, _, loss in sweep_batches(samples, parameters, theta):
        w = weights[:, place]
        if loss.compiled and len(w):
            pulled = [loss.gradient(theta, row) for row in w]
            losses, part = pulled[0][0], torch.stack([gradient for _, gradient in pulled])
        else:
            chunk_size = columns_per_chunk(samples, parameters, theta, w.shape[1])
            losses, part = pull_back(loss, theta, w, chunk_size, samples.fallbacks)
        value = value + w @ losses
        gradient = gradient + part
    return sum_over_processes(value), sum_over_processes(gradient)


def push_forward(
    fn: Callable[[Tensor], Tensor], theta: Tensor, V: Tensor, chunk_size: int | None, fallbacks: set[str]
) -> tuple[Tensor, Tensor]:
    """Return fn(θ), and J·v for every column v of V, by forward mode, or from gradients if an operator has none."""
    if NO_FORWARD not in fallbacks:
        try:
            if V.shape[1] == 1:  # vmap over a single column costs more than the pass itself
                with _ConstantFactors():
                    value, slope = jvp(fn, (theta,), (V[:, 0],))[:2]
                return value.detach(), slope.detach()[:, None]
            if NO_VMAP in fallbacks:
                pushed = [push_forward(fn, theta, v[:, None], 1, fallbacks) for v in V.T]
                return pushed[0][0], torch.cat([slope for _, slope in pushed], 1)
            value, slope = vmap(lambda v: jvp(fn, (theta,), (v,))[:2], 1, chunk_size=chunk_size, randomness="same")(V)
            return value[0].detach(), slope.T.detach()
        except Exception as error:
            if not is_unsupported(error):
                raise
            fallbacks.add(NO_FORWARD)
    value, gradients = pull_back(fn, theta, torch.eye(len(fn(theta))).to(theta), chunk_size, fallbacks)
    return value, gradients @ V


class _ConstantFactors(TorchFunctionMode):
    """Skips the tangent of constant factors in matrix products, where torch would multiply by a matrix of zeros.

    It acts only in the outermost transform and leaves transforms inside a loss unchanged.
    """

    operators = (linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.operators or kwargs or maybe_current_level() != 1:
            return func(*args, **(kwargs or {}))
        first, second = unpack_dual(args[0]), unpack_dual(args[1])
        bias = [unpack_dual(b) for b in args[2:] if b is not None]
        if (first.tangent is None) == (second.tangent is None) or any(b.tangent is None for b in bias):
            return func(*args)
        primal = func(first.primal, second.primal, *(b.primal for b in bias))
        factors = (first.primal, second.tangent) if first.tangent is None else (first.tangent, second.primal)
        return make_dual(primal, func(*factors, *(b.tangent for b in bias)))


def hessian_products(
    scalar: Callable[[Tensor], Tensor], theta: Tensor, V: Tensor, chunk_size: int | None, fallbacks: set[str]
) -> Tensor:
    """Return ∇²·v for every column v of V (d, c), `chunk_size` columns at once.

    Uses two backward passes, which are faster than forward over reverse mode on small batches, and as fast on others.
    If an operator has no second backward pass, adds that to `fallbacks` and uses forward over reverse mode.
    """
    forward = lambda v: jvp(grad(scalar), (theta,), (v,))[1]  # noqa: E731
    if NO_SECOND_BACKWARD in fallbacks:
        return map_columns(forward, V, chunk_size, fallbacks)
    try:
        backward = evaluate_with_pullback(grad(scalar), theta)[1]
        if V.shape[1] == 1:  # vmap over a single column costs more than the pass itself
            return backward(V[:, 0]).detach()[:, None]
        return map_columns(backward, V, chunk_size, fallbacks)
    except Exception as error:
        if not is_unsupported(error):
            raise
        try:
            products = map_columns(forward, V, chunk_size, fallbacks)
        except Exception as other:
            if not is_unsupported(other):
                raise
            if isinstance(error, UserCodeError):
                raise error from None
            raise _no_curvature_error(error) from error
        fallbacks.add(NO_SECOND_BACKWARD)
        return products


def _no_curvature_error(error: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"Torch cannot differentiate a loss or function twice: {str(error).splitlines()[0].rstrip('.')}.",
        "Every operator of a loss or function must have a second derivative.",
        "Influence rests on the curvature, and torch has none for this operator.",
        find_cure(error, "Write that step with elementary operations, such as a sum of squares instead of cdist."),
    )


def map_columns(
    fn: Callable[[Tensor], Tensor], V: Tensor, chunk_size: int | None = None, fallbacks: Container[str] = ()
) -> Tensor:
    """Apply fn (vector → vector) to every column of V (d, c), `chunk_size` at once (None: all); return columns.

    vmap puts columns first and they are transposed afterwards: with out_dims=1 torch fails on a result that does not
    depend on its column.
    """
    if NO_VMAP in fallbacks:
        return torch.stack([fn(v).detach() for v in V.T], 1)
    return vmap(fn, in_dims=1, chunk_size=chunk_size, randomness="same")(V).T.detach()


@retry_with_smaller_batches
def structured_hessian(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, w: Tensor, indices: Tensor | None = None
) -> Tensor | None:
    """Return Σᵢ wᵢ∇²ℓᵢ of a loss that depends on θ only through linear maps of the batch; None for other losses."""
    each = cost(samples, parameters, theta)
    if each.maps is None:
        return None
    inputs, outputs = each.maps
    room = numbers_at_once(theta)
    fits = max(1, room // (outputs * (inputs + outputs) + each.inputs))
    chunk_size = max(1, room // (min(fits, len(w)) * (each.elements + outputs)))
    batches = samples.batches(indices, fits, theta.device, span(len(w)))
    try:
        H = assemble_hessian(samples, parameters, theta, batches, w, chunk_size)
    except (
        NotLinearError,
        RuntimeError,
        NotImplementedError,
    ) as error:  # a batch differs, or torch has no second derivative
        if is_out_of_memory(error):
            raise
        H = None
    return sum_over_processes(H) if holds_in_all_processes(H is not None, theta) and H is not None else None


@retry_with_smaller_batches
def stacked_losses(samples: SampleLosses, parameters: Parameters, thetas: Tensor) -> Tensor:
    """Return ℓᵢ of all samples at several θ (P, d), (P, n)."""
    batches = [thetas.new_zeros((len(thetas), 0))]
    with torch.no_grad():
        for place, _, loss in sweep_batches(samples, parameters, thetas[0], shared=False):
            batches.append(_map_stacked(loss, thetas_per_chunk(samples, parameters, thetas[0], place, 1), thetas))
    return torch.cat(batches, 1)


def stacked_gradients(
    loss: Callable[[Tensor], Tensor], thetas: Tensor, W: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Return W_p ℓ(θ_p), (P, k), and its Jacobian, (P, k, d), for several θ (P, d) with weights W (P, k, n)."""

    def at(theta: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        losses, pull = evaluate_with_pullback(loss, theta)
        jacobian = torch.stack([pull(row) for row in w]) if chunk_size == 1 else vmap(pull, randomness="same")(w)
        return w @ losses, jacobian

    values, jacobians = _map_stacked(at, chunk_size, thetas, W)
    return values.detach(), jacobians.detach()


def stacked_pullback(
    loss: Callable[[Tensor], Tensor], thetas: Tensor, W: Tensor, weights: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Return W_p ℓ(θ_p), (P, k), and the gradient of its sum with weights (P, k), (P, d), for several θ (P, d)."""

    def at(theta: Tensor, w: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        losses, pull = evaluate_with_pullback(loss, theta)
        return w @ losses, pull(mu @ w)

    values, gradients = _map_stacked(at, chunk_size, thetas, W, weights)
    return values.detach(), gradients.detach()


def stacked_products(
    scalar: Callable[..., Tensor], thetas: Tensor, more: tuple[Tensor, ...], V: Tensor, chunk_size: int
) -> Tensor:
    """Return ∇²·v at several θ (P, d), each with its own columns V (P, d, c) and further arguments `more`."""

    def at(theta: Tensor, V: Tensor, *more: Tensor) -> Tensor:
        product = evaluate_with_pullback(grad(lambda t: scalar(t, *more)), theta)[1]
        if chunk_size == 1:
            return torch.stack([product(v) for v in V.T], 1)
        return vmap(product, 1, randomness="same")(V).T

    return _map_stacked(at, chunk_size, thetas, V, *more).detach()


def _map_stacked(fn: Callable[..., Any], chunk_size: int, *arguments: Tensor) -> Any:
    """Map fn over the first dimension of its arguments, `chunk_size` at once."""
    if chunk_size > 1 and len(arguments[0]) > 1:
        try:
            return vmap(fn, chunk_size=chunk_size, randomness="same")(*arguments)
        except Exception as error:
            if not is_unsupported(error):
                raise
    results = [fn(*items) for items in zip(*arguments, strict=True)]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def batch_gradients(samples: SampleLosses, parameters: Parameters, theta: Tensor, batch: Any) -> Tensor:
    """Return ∇ℓ of each sample of a batch, (n, d), by vmap, or from the whole batch if vmap over samples fails."""

    def loss_of_one(t: Tensor, z: Any) -> Tensor:
        return BatchLosses(samples, parameters, map_tensors(z, lambda x: x.unsqueeze(0)), 1)(t)[0]

    if NO_MAP not in samples.fallbacks:
        try:
            return vmap(grad(loss_of_one), in_dims=(None, 0), randomness="same")(theta, batch)
        except Exception as error:
            if not is_unsupported(error):
                raise
            samples.fallbacks.add(NO_MAP)
    count = len(leaves(batch)[0])
    loss = BatchLosses(samples, parameters, batch, count)
    chunk_size = columns_per_chunk(samples, parameters, theta, count)
    return pull_back(loss, theta, torch.eye(count).to(theta), chunk_size, samples.fallbacks)[1]
