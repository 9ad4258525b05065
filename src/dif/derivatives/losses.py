"""The losses of a batch as a function of θ and their derivatives, and sweeps that add them up or join them.

Only this module knows of vmap, forward mode, double backward passes, how much fits into memory, and what to do instead
where torch lacks one of them: such fallbacks are noted once per loss, and listed in `diagnostics["fallbacks"]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dif.derivatives.linear_structure import assemble_hessian, evaluate_maps, measure_maps, push_maps
from dif.errors import InvalidInputError
from dif.problem.data import leaves, map_tensors
from dif.problem.parameters import Parameters
from dif.problem.samples import Samples
from dif.runtime.guard import (
    UserCodeError,
    find_cure,
    gather_rows,
    holds_in_all_processes,
    is_unsupported,
    numbers_at_once,
    retry_with_smaller_batches,
    span,
    sum_over_processes,
)

NO_FORWARD = "slopes from gradients: an operator of the loss has no forward mode"
NO_MAP = "gradients from whole batches: the loss cannot be mapped over samples"
NO_SECOND_BACKWARD = (
    "Hessian-vector products by forward over reverse mode: an operator has no correct second backward pass"
)
NO_VMAP = "one column at a time: an operator of the loss is wrong under vmap"

_PASS = 2**21  # numbers (inputs and intermediates) in one batch on the CPU: 16 MiB, so that they stay in its caches
_PER_PARAMETER = 24  # numbers per parameter that a batch may have if that is more: each batch creates vectors of size d
_SHARED = 32  # columns that should go through a batch at once, to share its forward pass
_FEW = 2  # rows up to which one backward pass after the other is faster than vmap
_FEWEST = 128  # smallest number of samples per batch when many columns go through it
STACKED = 2**18  # losses of a batch at several θ together, so that they stay in the caches: 2 MiB
_PER_ENTRY = {"cpu": 128, "cuda": 2048}  # flops that take as long as one entry of a per-sample gradient
_LONGER = 1e-3  # increase of _PER_ENTRY per parameter: longer gradients leave room for fewer at once
_GRADIENTS = 2**22  # entries of per-sample gradients in memory at once on the CPU: 32 MiB
_LARGE = 2**16  # numbers in the data of a batch from which tracing its linear maps pays
_PROBE_SAMPLES = 8  # number of samples on which the cost per sample is measured


@contextmanager
def fall_back(fallbacks: set[str], note: str | None = None) -> Iterator[None]:
    """Try a method that torch may lack: on failure, note the fallback, and go on with the statements that follow."""
    try:
        yield
    except Exception as error:
        if not is_unsupported(error):
            raise
        if note is not None:
            fallbacks.add(note)


@dataclass(frozen=True, eq=False)
class Differentiable(ABC):
    """n numbers as a function of θ, such as the losses of a batch or the values of a function of the parameters."""

    fallbacks: set[str]  # what torch could not do with them, and what is done instead; shared by all batches of a loss
    inputs: int  # how many numbers their data have
    kept: int  # how many numbers one evaluation keeps

    @abstractmethod
    def __call__(self, theta: Tensor) -> Tensor:
        """Return the numbers, (n,), for torch to differentiate."""

    def values(self, theta: Tensor) -> Tensor:
        """Return the numbers, (n,), without a graph."""
        with torch.no_grad():
            return self(theta)

    def pull(self, theta: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers, (n,), and Jᵀw for each row w of W (k, n), as (k, d)."""
        if len(W) > _FEW:
            value, pull = vjp(self, theta)[:2]
            return value.detach(), self._map_columns(pull, theta, W.T)[0]
        with torch.enable_grad():
            leaf = theta.detach().clone().requires_grad_()
            value = self(leaf)
        given = [w for w in W if value.requires_grad]  # none where the numbers do not depend on θ
        found = [torch.autograd.grad(value, leaf, w, retain_graph=True, allow_unused=True)[0] for w in given]
        rows = [torch.zeros_like(theta) if g is None else g for g in found]
        return value.detach(), torch.stack(rows) if rows else theta.new_zeros((len(W), theta.numel()))

    def push(self, theta: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers, (n,), and J·v for every column v of V (d, c), as (n, c).

        Forward mode gives them, or gradients if an operator has none.
        """
        if NO_FORWARD not in self.fallbacks:
            with fall_back(self.fallbacks, NO_FORWARD), _ConstantFactors() if V.shape[1] == 1 else nullcontext():
                value, slope = self._map_columns(lambda v: jvp(self, (theta,), (v,))[:2], theta, V)
                return value[0], slope.T
        value, gradients = self.evaluate_at(theta[None], torch.eye(len(self.values(theta))).to(theta)[None])
        return value[0], gradients[0] @ V

    def products(self, theta: Tensor, w: Tensor, V: Tensor) -> Tensor:
        """Return ∇²(wᵀf)·v for every column v of V (d, c), f these numbers.

        Two backward passes are faster than forward over reverse mode on small batches, and as fast on others. Forward
        over reverse mode replaces them if an operator has no second backward pass.
        """
        gradient = grad(lambda t: self(t) @ w)
        forward = lambda v: jvp(gradient, (theta,), (v,))[1:]  # noqa: E731
        if NO_SECOND_BACKWARD in self.fallbacks:
            return self._map_columns(forward, theta, V)[0].T
        try:
            return self._map_columns(vjp(gradient, theta)[1], theta, V)[0].T
        except Exception as error:
            if not is_unsupported(error):
                raise
            with fall_back(self.fallbacks):
                products = self._map_columns(forward, theta, V)[0].T
                self.fallbacks.add(NO_SECOND_BACKWARD)
                return products
            if isinstance(error, UserCodeError):
                raise
            first_line = str(error).splitlines()[0].rstrip(".")
            cure = find_cure(
                error, "Write that step with elementary operations, such as a sum of squares instead of cdist."
            )
            raise InvalidInputError(
                f"Torch cannot differentiate a loss or function twice: {first_line}. {cure}"
            ) from error

    # At several θ (P, d), each with its own arguments

    def evaluate_at(self, thetas: Tensor, W: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the numbers f at several θ, (P, n), and W∇f, (P, k, d), for weights W (P, k, n)."""
        if W is None:
            with torch.no_grad():
                return self._map_thetas(lambda theta: (self(theta),), 1, thetas)[0], thetas[:, None][:, :0]

        def at(theta: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            values, pull = vjp(self, theta)[:2]
            return values, self._map_columns(pull, theta, w.T)[0]

        values, jacobians = self._map_thetas(at, W.shape[1], thetas, W)
        return values, jacobians

    def stacked_products(self, thetas: Tensor, w: Tensor, V: Tensor) -> Tensor:
        """Return ∇²(wᵀf)·v at several θ, each with its own w (P, n) and columns V (P, d, c)."""

        def at(theta: Tensor, w: Tensor, V: Tensor) -> tuple[Tensor]:
            return (self._map_columns(vjp(grad(lambda t: self(t) @ w), theta)[1], theta, V)[0].T,)

        return self._map_thetas(at, V.shape[2], thetas, w, V)[0]

    # How torch is asked

    def _map_columns(self, fn: Callable[[Tensor], tuple[Tensor, ...]], theta: Tensor, V: Tensor) -> tuple[Tensor, ...]:
        """Apply fn (vector → vectors) to every column of V (m, c), as many at once as fit; return (c, …) for each.

        Columns come first: with out_dims=1 torch fails on a result that does not depend on its column.
        """
        if V.shape[1] == 1 or NO_VMAP in self.fallbacks:  # for a single column, vmap costs more than the pass
            mapped = [torch.stack(parts) for parts in zip(*map(fn, V.T), strict=True)]
        else:
            at_once = max(1, numbers_at_once(theta) // (self.kept + 4 * len(theta)))
            mapped = vmap(fn, in_dims=1, chunk_size=at_once, randomness="same")(V)
        return tuple(part.detach() for part in mapped)

    def _map_thetas(self, fn: Callable[..., tuple[Tensor, ...]], columns: int, *arguments: Tensor) -> list[Tensor]:
        """Map fn over the first dimension of its arguments, θ the first of them, as many at once as fit.

        Each θ has this many columns, and may copy the inputs.
        """
        theta = arguments[0][0]
        at_once = numbers_at_once(theta) // (self.inputs + (self.kept + 4 * len(theta)) * max(1, columns))
        if at_once > 1 and len(arguments[0]) > 1 and NO_VMAP not in self.fallbacks:
            with fall_back(self.fallbacks):
                return [part.detach() for part in vmap(fn, chunk_size=at_once, randomness="same")(*arguments)]
        results = [fn(*items) for items in zip(*arguments, strict=True)]
        return [torch.stack(parts).detach() for parts in zip(*results, strict=True)]


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


@dataclass(frozen=True, eq=False)
class BatchLosses(Differentiable):
    """The losses of one batch as a function of θ."""

    samples: Samples
    parameters: Parameters
    batch: Any
    count: int
    by_maps: bool  # whether θ enters by linear maps of the batch only, and the batch is large

    def __call__(self, theta: Tensor) -> Tensor:
        """Return the losses, (count,), with their shape checked."""
        return self.samples.losses(self.parameters.bind(theta), self.batch, self.count)

    def evaluate_at(self, thetas: Tensor, W: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the losses at several θ, (P, n), and Σᵢ wᵢ∇ℓᵢ, (P, k, d), for weights W (P, k, n).

        A matrix product by linear maps is faster than vmap, which multiplies by one vector after the other.
        """
        if self.by_maps and NO_VMAP not in self.fallbacks:
            with fall_back(self.fallbacks):
                return evaluate_maps(self.samples, self.parameters, thetas, self.batch, W)
        return super().evaluate_at(thetas, W)

    def push(self, theta: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses, (n,), and J·v for every column v of V (d, c), as (n, c): all by one matrix product."""
        if self.by_maps and NO_FORWARD not in self.fallbacks:
            with fall_back(self.fallbacks):
                return push_maps(self.samples, self.parameters, theta, self.batch, V)
        return super().push(theta, V)

    def sample_gradients(self, theta: Tensor) -> Tensor:
        """Return ∇ℓ of each sample, (count, d), by vmap, or from the whole batch if vmap over samples fails."""
        loss_of_one = lambda t, z: replace(self, batch=_as_batch(z), count=1)(t)[0]  # noqa: E731
        if NO_MAP not in self.fallbacks:
            with fall_back(self.fallbacks, NO_MAP):
                return vmap(grad(loss_of_one), in_dims=(None, 0), randomness="same")(theta, self.batch)
        return self.evaluate_at(theta[None], torch.eye(self.count).to(theta)[None])[1][0]

    # Gauss–Newton curvature: J of the model's outputs, ∇² of the loss in them

    def gauss_newton_products(self, theta: Tensor, w: Tensor, V: Tensor) -> Tensor:
        """Return Σᵢ wᵢ Jᵢᵀ(∇²ℓᵢ)Jᵢ·v for every column v of V (d, c)."""
        outputs, criterion = _split_model(self.samples, self.parameters)
        model = lambda t: outputs(t, self.batch)  # noqa: E731
        values, pull = vjp(model, theta)[:2]
        slope = grad(lambda out: criterion(out, self.batch) @ w)

        def product(v: Tensor) -> tuple[Tensor]:
            return pull(jvp(slope, (values,), (jvp(model, (theta,), (v,))[1],))[1])

        return self._map_columns(product, theta, V)[0].T

    def gauss_newton_matrix(self, theta: Tensor, w: Tensor) -> Tensor:
        """Return Σᵢ wᵢ Jᵢᵀ(∇²ℓᵢ)Jᵢ, (d, d), from the Jacobian of each sample."""
        outputs, criterion = _split_model(self.samples, self.parameters)
        model = lambda t, z: outputs(t, _as_batch(z))[0]  # noqa: E731
        loss = lambda out, z: criterion(out.unsqueeze(0), _as_batch(z))[0]  # noqa: E731
        out = outputs(theta, self.batch).detach()
        count = max(1, out[0].numel())
        J = vmap(jacrev(model), (None, 0), randomness="same")(theta, self.batch).reshape(-1, count, len(theta)).detach()
        S = vmap(hessian(loss), randomness="same")(out, self.batch).reshape(-1, count, count).detach()
        return J.flatten(0, 1).T @ ((w[:, None, None] * S) @ J).flatten(0, 1)


def _as_batch(z: Any) -> Any:
    """Return one sample as a batch."""
    return map_tensors(z, lambda x: x.unsqueeze(0))


def _split_model(samples: Samples, parameters: Parameters) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the model, (θ, batch) → outputs, and their loss; refuse samples that do not name the outputs."""
    if samples.parted is None:
        raise InvalidInputError(
            f"Samples {samples.name!r} must name the outputs of the model for Gauss–Newton, which leaves out the "
            "curvature of the model; write dif.Samples(loss, data, outputs=lambda params, z: ...)."
        )
    outputs, loss = samples.parted
    return lambda theta, batch: outputs(parameters.bind(theta), batch), loss


# What a pass costs, and how many samples it takes at once


@dataclass(frozen=True)
class Cost:
    """The cost of evaluating the loss of one sample."""

    elements: int  # intermediate numbers of the forward pass, all kept for the backward pass
    inputs: int  # numbers in the data of the sample
    flops: int  # of one evaluation
    maps: tuple[int, int] | None = None  # inputs and outputs of its linear maps, if θ enters by nothing else


def cost(samples: Samples, parameters: Parameters, theta: Tensor) -> Cost:
    """Measure the cost of one sample on a few samples; the result is cached per number of parameters."""
    cached = samples.costs.get(len(theta))
    if cached is None:
        many = min(_PROBE_SAMPLES, len(samples), samples.batch_size or _PROBE_SAMPLES)
        measured = [_measure_batch(samples, parameters, theta, count) for count in (many, many // 2)]
        each = [max(0, (x - y) // (many - many // 2)) for x, y in zip(*measured, strict=True)]  # without fixed overhead
        _, batch = next(samples.batches(torch.arange(many), device=theta.device))
        maps = measure_maps(samples, parameters, theta, batch, many)
        cached = samples.costs[len(theta)] = Cost(max(1, each[0]), each[1], max(1, measured[0][2] // many), maps)
    return cached


def _measure_batch(samples: Samples, parameters: Parameters, theta: Tensor, count: int) -> tuple[int, int, int]:
    """Count the intermediate numbers, the input numbers and the multiplications of one batch of `count` samples."""
    if count == 0:
        return 0, 0, 0
    _, batch = next(samples.batches(torch.arange(count), device=theta.device))
    with torch.no_grad(), OperationCounter() as counter:
        tensors = {name: t.clone() for name, t in parameters.tensors(theta).items()}
        samples.losses(parameters.bind(tensors), batch, count)
    return counter.elements, sum(t.numel() for t in leaves(batch)), counter.flops


class OperationCounter(TorchDispatchMode):
    """Counts the numbers that operators create and the multiplications they perform, and lists their names."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.flops = 0
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in args if isinstance(t, Tensor)]
        name = func.overloadpacket.__name__.removesuffix("_")
        self.names[name] = None
        if isinstance(out, Tensor) and all(out.untyped_storage() is not t.untyped_storage() for t in given):
            factors, flops_per_entry = [t for t in given if t.dim() > 0], 1
            if name in ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv") and len(factors) >= 2:
                flops_per_entry = 2 * factors[-2].shape[-1]
            elif "convolution" in name and len(factors) >= 2:
                flops_per_entry = 2 * factors[1][0].numel()
            self.elements += out.numel()
            self.flops += out.numel() * flops_per_entry
        return out


def samples_at_once(each: Cost, theta: Tensor, columns: int = 0) -> int:
    """Return how many samples of this cost make a batch that leaves room for the `columns` that go through it."""
    room = numbers_at_once(theta, max(_PASS, _PER_PARAMETER * len(theta)))
    most = max(1, room // (each.elements + each.inputs))  # vectorised maps may copy inputs
    if columns:
        most = min(most, max(_FEWEST, numbers_at_once(theta) // (each.elements * min(columns, _SHARED))))
    return most


def jacobians_at_once(samples: Samples, parameters: Parameters, theta: Tensor) -> int | None:
    """Return how many samples' Jacobians of the model fit into memory; None if torch cannot map the model over samples.

    It is tried on one sample.
    """
    outputs, _ = _split_model(samples, parameters)
    _, loss = next(sweep_batches(samples, parameters, theta, at_most=1, shared=False))
    if NO_MAP not in samples.fallbacks:
        with fall_back(samples.fallbacks, NO_MAP):
            loss.gauss_newton_matrix(theta, torch.ones_like(theta[:1]))
    if NO_MAP in samples.fallbacks:
        return None
    count = max(1, outputs(theta, loss.batch).numel())
    return max(1, numbers_at_once(theta) // (count * (len(theta) + loss.kept)))


def sweep_batches(
    samples: Samples, parameters: Parameters, theta: Tensor, indices: Tensor | None = None,
    at_most: int | None = None, *, columns: int = 0, shared: bool = True,
) -> Iterator[tuple[slice, BatchLosses]]:  # fmt: skip
    """Sweep over all samples, or those listed: yield positions and the losses of the samples there as a map of θ.

    Batches are as large as memory allows, up to `at_most` samples, and leave room for the `columns` that go through
    them. Where samples are distributed over processes, only this process's part is swept, unless `shared` is False.
    """
    each = cost(samples, parameters, theta)
    most = samples_at_once(each, theta, columns)
    within = span(len(samples) if indices is None else len(indices)) if shared else None
    for place, batch in samples.batches(indices, min(most, at_most or most), theta.device, within):
        n = place.stop - place.start
        by_maps = each.maps is not None and n * each.inputs >= _LARGE
        memory = n * each.inputs, n * each.elements
        yield place, BatchLosses(samples.fallbacks, *memory, samples, parameters, batch, n, by_maps)


@retry_with_smaller_batches
def sample_losses(samples: Samples, parameters: Parameters, theta: Tensor, indices: Tensor | None = None) -> Tensor:
    """Return ℓᵢ(θ) of all samples or of those listed, (n,)."""
    with torch.no_grad():
        batches = [loss(theta) for _, loss in sweep_batches(samples, parameters, theta, indices)]
    losses = torch.cat(batches) if batches else theta.new_zeros(0)  # of this process
    return gather_rows(losses, len(samples) if indices is None else len(indices))


@retry_with_smaller_batches
def sample_gradients(samples: Samples, parameters: Parameters, theta: Tensor, indices: Tensor | None = None) -> Tensor:
    """Return ∇ℓᵢ(θ) of all samples or of those listed, (n, d)."""
    batches = [loss.sample_gradients(theta) for _, loss in sweep_batches(samples, parameters, theta, indices)]
    total = len(samples) if indices is None else len(indices)
    return gather_rows(torch.cat([theta.new_zeros((0, len(theta))), *batches]).detach(), total)


@retry_with_smaller_batches
def sample_slopes(
    samples: Samples, parameters: Parameters, theta: Tensor, V: Tensor, indices: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ℓᵢ(θ), (n,), and the slopes ∇ℓᵢ·v for every column v of V (d, c), as (n, c), in one sweep.

    Forward mode costs about two evaluations per column. Per-sample gradients cost about three evaluations and a fixed
    amount per parameter, for any number of columns. The cheaper of them is used, unless one matrix product does.
    """
    (d, columns), flops = V.shape, cost(samples, parameters, theta).flops
    entry = _PER_ENTRY.get(theta.device.type, 2048) + _LONGER * d
    by_gradients = columns > 1 and 3 * flops + entry * d < 2 * flops * columns
    at_most = max(1, numbers_at_once(theta, _GRADIENTS) // d) if by_gradients else None
    losses, slopes = [theta.new_zeros(0)], [V.new_zeros((0, columns))]
    for _, loss in sweep_batches(samples, parameters, theta, indices, at_most):
        if by_gradients and not loss.by_maps:
            value, slope = loss.values(theta), loss.sample_gradients(theta) @ V
        else:
            value, slope = loss.push(theta, V) if columns else (loss.values(theta), V.new_zeros((loss.count, 0)))
        losses.append(value)
        slopes.append(slope)
    total = len(samples) if indices is None else len(indices)
    return gather_rows(torch.cat(losses), total), gather_rows(torch.cat(slopes), total)


@retry_with_smaller_batches
def weighted_gradients(
    samples: Samples, parameters: Parameters, theta: Tensor, weights: Tensor, indices: Tensor | None = None,
    of_losses: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return Σᵢ wᵢℓᵢ(θ), (k,), and Σᵢ wᵢ∇ℓᵢ(θ), (k, d), of all samples or those listed, for each row w of weights.

    The sums of losses may have weights of their own, `of_losses`.
    """
    U = weights if of_losses is None else of_losses
    value, gradient = theta.new_zeros(len(U)), theta.new_zeros((len(weights), theta.numel()))
    for place, loss in sweep_batches(samples, parameters, theta, indices):
        if loss.by_maps and len(weights) > 1:
            losses, part = (at_theta[0] for at_theta in loss.evaluate_at(theta[None], weights[None, :, place]))
        else:
            losses, part = loss.pull(theta, weights[:, place])
        value, gradient = value + U[:, place] @ losses, gradient + part
    return sum_over_processes(value), sum_over_processes(gradient)


@retry_with_smaller_batches
def stacked_losses(samples: Samples, parameters: Parameters, thetas: Tensor, indices: Tensor | None = None) -> Tensor:
    """Return ℓᵢ of all samples or of those listed at several θ (P, d), (P, n)."""
    sweep = sweep_batches(samples, parameters, thetas[0], indices, 1 + STACKED // len(thetas), shared=False)
    return torch.cat([thetas.new_zeros((len(thetas), 0)), *(loss.evaluate_at(thetas)[0] for _, loss in sweep)], 1)


@retry_with_smaller_batches
def structured_hessian(
    samples: Samples, parameters: Parameters, theta: Tensor, w: Tensor, indices: Tensor | None = None
) -> Tensor | None:
    """Return Σᵢ wᵢ∇²ℓᵢ of a loss that depends on θ only through linear maps of the batch; None for other losses."""
    each = cost(samples, parameters, theta)
    if each.maps is None:
        return None
    inputs, outputs = each.maps
    fits = max(1, numbers_at_once(theta) // (outputs * (inputs + outputs) + each.inputs))
    batches, H = samples.batches(indices, fits, theta.device, span(len(w))), None
    with fall_back(samples.fallbacks):  # where a batch differs, or there is no second derivative
        H = assemble_hessian(samples, parameters, theta, batches, w, each.elements)
    return sum_over_processes(H) if holds_in_all_processes(H is not None, theta) and H is not None else None


@retry_with_smaller_batches
def gauss_newton_hessian(
    samples: Samples, parameters: Parameters, theta: Tensor, w: Tensor, indices: Tensor | None = None
) -> Tensor | None:
    """Return Σᵢ wᵢ∇²ℓᵢ without the curvature of the model; None if torch cannot map the model over samples."""
    most = jacobians_at_once(samples, parameters, theta)
    if most is None:
        return None
    total = theta.new_zeros((len(theta), len(theta)))
    for place, loss in sweep_batches(samples, parameters, theta, indices, most):
        total += loss.gauss_newton_matrix(theta, w[place])
    return sum_over_processes(total)
