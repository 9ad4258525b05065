"""Derivatives of per-sample losses by autograd, batch by batch: the only place where data meets autograd."""

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

from dif.errors import InvalidInputError
from dif.evaluation.cost import cost
from dif.evaluation.linear_structure import Curved, hessian
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses
from dif.problem.structure import leaves, mapped
from dif.runtime.distributed import added, everywhere, gathered, span
from dif.runtime.memory import in_flight, within_memory
from dif.runtime.user_code import UserCodeError, cure_of, out_of_memory, unsupported

_PASS = 2**21  # numbers that a batch consists of and leaves behind, on the CPU: what its caches hold; changes no result
_PER_PARAMETER = 24  # or so many per parameter, if that is more: each batch makes vectors of their length
_SHARED = 32  # columns that should go through a batch together,
_FEWEST = 128  # if so many samples can be in it
_PER_ENTRY = {"cpu": 128, "cuda": 2048}  # flops that an entry of a per-sample gradient is worth (written, read, used),
_LONGER = 1e-3  # and this more per entry of the gradient: fewer of them are held at once
_GRADIENTS = 2**22  # entries of per-sample gradients held at once on the CPU
NO_FORWARD = "slopes by gradients: an operator of the loss has no forward mode"
NO_FORWARD_OVER_REVERSE = "curvature by two backward passes: an operator has no forward mode"
NO_MAP = "gradients of a batch at once: the loss cannot be mapped over samples"
NO_VMAP = "one column after the other: an operator of the loss is wrong when it is mapped"


def passes(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, indices: Tensor | None = None,
    at_most: int | None = None,
    *, shared: bool = True,
) -> Iterator[tuple[slice, Any, Callable[[Tensor], Tensor]]]:  # fmt: skip
    """One sweep over the data (all of it, or the samples listed): positions, batch, and θ → the losses of that batch.

    As many samples at once as fit. Where samples are shared among processes, this one's part only, unless told not to.
    """
    price = cost(samples, parameters, theta)
    room = in_flight(theta, max(_PASS, _PER_PARAMETER * len(theta)))
    fits = max(1, room // (price.elements + price.inputs))  # vectorised maps may copy inputs
    step = fits if at_most is None else min(fits, at_most)
    within = span(len(samples) if indices is None else len(indices)) if shared else None
    for place, batch in samples.batches(indices, step, theta.device, within):
        yield place, batch, batch_loss(samples, parameters, batch, place.stop - place.start)


def sharing(samples: SampleLosses, parameters: Parameters, theta: Tensor, columns: int) -> int:
    """Samples per pass where many columns go through each: better some columns together than many samples."""
    each = cost(samples, parameters, theta).elements * min(columns, _SHARED)
    return max(_FEWEST, in_flight(theta) // max(1, each))


def _columns(samples: SampleLosses, parameters: Parameters, theta: Tensor, count: int) -> int:
    """How many columns may go through a batch of this many samples together."""
    return max(1, in_flight(theta) // (count * cost(samples, parameters, theta).elements + 4 * len(theta)))


def fitting(samples: SampleLosses, parameters: Parameters, theta: Tensor, place: slice, columns: int) -> int:
    """How many θ, with so many columns each, may go through a batch together: at worst each copies its inputs."""
    if NO_VMAP in samples.fallbacks:
        return 1
    price, count = cost(samples, parameters, theta), place.stop - place.start
    each = count * (price.inputs + price.elements * max(1, columns)) + 4 * len(theta) * max(1, columns)
    return max(1, in_flight(theta) // each)


def batch_loss(samples: SampleLosses, parameters: Parameters, batch: Any, count: int) -> Callable[[Tensor], Tensor]:
    """θ → the losses of one batch, their shape checked."""
    return lambda theta: samples.losses(parameters.bind(parameters.tensors(theta)), batch, count)


@within_memory
def sample_losses(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, indices: Tensor | None = None
) -> Tensor:
    """ℓᵢ(θ) of all samples or of those listed, (n,)."""
    with torch.no_grad():
        pieces = [loss(theta) for _, _, loss in passes(samples, parameters, theta, indices)]
    own = torch.cat(pieces) if pieces else theta.new_zeros(0)
    return gathered(own, len(samples) if indices is None else len(indices))


@within_memory
def sample_gradients(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, indices: Tensor | None = None
) -> Tensor:
    """∇ℓᵢ(θ) row by row, (n, d)."""
    pieces = [batch_gradients(samples, parameters, theta, z) for _, z, _ in passes(samples, parameters, theta, indices)]
    total = len(samples) if indices is None else len(indices)
    return gathered(torch.cat([theta.new_zeros((0, len(theta))), *pieces]).detach(), total)


@within_memory
def sample_slopes(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, V: Tensor, indices: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """ℓᵢ(θ), (n,), and the slopes ∇ℓᵢ·v for every column v of V (d, c), as (n, c), in one sweep.

    A forward-mode pass costs about two evaluations per column; a gradient per sample about three and a fixed price per
    parameter, whatever the number of columns. The cheaper is taken.
    """
    d, columns = V.shape
    flops = cost(samples, parameters, theta).flops
    entry = _PER_ENTRY.get(theta.device.type, 2048) + _LONGER * d
    by_gradients = columns > 1 and 3 * flops + entry * d < 2 * flops * columns
    losses, slopes = [theta.new_zeros(0)], [V.new_zeros((0, columns))]
    fits = max(1, in_flight(theta, _GRADIENTS) // d) if by_gradients else None
    for place, batch, loss in passes(samples, parameters, theta, indices, fits):
        count = place.stop - place.start
        if columns == 0:
            with torch.no_grad():
                losses.append(loss(theta))
            slopes.append(V.new_zeros((count, 0)))
        elif by_gradients:
            with torch.no_grad():
                losses.append(loss(theta))
            slopes.append(batch_gradients(samples, parameters, theta, batch) @ V)
        else:
            together = _columns(samples, parameters, theta, count)
            value, slope = pushed_forward(loss, theta, V, together, samples.fallbacks)
            losses.append(value)
            slopes.append(slope)
    total = len(samples) if indices is None else len(indices)
    return gathered(torch.cat(losses), total), gathered(torch.cat(slopes), total)


def forward(fn: Callable[[Tensor], Tensor], theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """fn(θ), and the map w → Jᵀw, which keeps the graph."""
    value, pull = vjp(fn, theta)[:2]
    return value, lambda w: pull(w)[0]


def pulled_back(
    fn: Callable[[Tensor], Tensor],
    theta: Tensor,
    weights: Tensor,
    together: int | None = None,
    fallbacks: Container[str] = (),
) -> tuple[Tensor, Tensor]:
    """fn(θ), and Jᵀw for each row w of weights (k, n), as (k, d); `together` of them at once (None: all)."""
    value, pull = forward(fn, theta)
    if len(weights) == 0:
        return value, theta.new_zeros((0, theta.numel()))
    return value, map_columns(pull, weights.T, together, fallbacks).T


def batch_pulled_back(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, loss: Callable[[Tensor], Tensor], weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The losses of a batch, and Σᵢ wᵢ∇ℓᵢ for each row w of weights (k, count)."""
    together = _columns(samples, parameters, theta, weights.shape[1])
    value, pulled = pulled_back(loss, theta, weights, together, samples.fallbacks)
    return value.detach(), pulled.detach()


def pushed_forward(
    fn: Callable[[Tensor], Tensor], theta: Tensor, V: Tensor, together: int | None, fallbacks: set[str]
) -> tuple[Tensor, Tensor]:
    """fn(θ), and J·v for every column v of V, forward mode; from the gradients where a kernel has no forward mode."""
    if NO_FORWARD not in fallbacks:
        try:
            # on one column too: a map over a single one costs more than the pass itself
            if V.shape[1] == 1:
                with _ConstantFactors():
                    value, slope = jvp(fn, (theta,), (V[:, 0],))[:2]
                return value.detach(), slope.detach()[:, None]
            if NO_VMAP in fallbacks:
                pushed = [pushed_forward(fn, theta, v[:, None], 1, fallbacks) for v in V.T]
                return pushed[0][0], torch.cat([slope for _, slope in pushed], 1)
            value, slope = vmap(lambda v: jvp(fn, (theta,), (v,))[:2], 1, chunk_size=together, randomness="same")(V)
            return value[0].detach(), slope.T.detach()
        except Exception as error:
            if not unsupported(error):
                raise
            fallbacks.add(NO_FORWARD)
    value, gradients = pulled_back(fn, theta, torch.eye(len(fn(theta))).to(theta), together, fallbacks)
    return value.detach(), gradients.detach() @ V


class _ConstantFactors(TorchFunctionMode):
    """Spares matrix products the tangent of a factor that has none: torch would multiply by a matrix of zeros.

    Only in the outermost transform: what a loss does inside transforms of its own is left as it is.
    """

    products = (linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.products or kwargs or maybe_current_level() != 1:
            return func(*args, **(kwargs or {}))
        first, second = unpack_dual(args[0]), unpack_dual(args[1])
        bias = [unpack_dual(b) for b in args[2:] if b is not None]
        if (first.tangent is None) == (second.tangent is None) or any(b.tangent is None for b in bias):
            return func(*args)
        primal = func(first.primal, second.primal, *(b.primal for b in bias))
        factors = (first.primal, second.tangent) if first.tangent is None else (first.tangent, second.primal)
        return make_dual(primal, func(*factors, *(b.tangent for b in bias)))


def batch_hessian_products(
    samples: SampleLosses,
    parameters: Parameters,
    theta: Tensor,
    scalar: Callable[[Tensor], Tensor],
    count: int,
    V: Tensor,
) -> Tensor:
    """∇²·v for every column v of V (d, c), of a scalar in which `count` of the samples are evaluated."""
    return hessian_products(scalar, theta, V, _columns(samples, parameters, theta, count), samples.fallbacks)


def hessian_products(
    scalar: Callable[[Tensor], Tensor], theta: Tensor, V: Tensor, together: int | None, fallbacks: set[str]
) -> Tensor:
    """∇²·v for every column v of V (d, c), `together` of them at once.

    Forward over reverse; reverse over reverse where a kernel has no forward mode, which is remembered.
    """
    if NO_FORWARD_OVER_REVERSE not in fallbacks:
        try:
            if V.shape[1] == 1:
                return jvp(grad(scalar), (theta,), (V[:, 0],))[1].detach()[:, None]
            return map_columns(lambda v: jvp(grad(scalar), (theta,), (v,))[1], V, together, fallbacks)
        except Exception as error:
            if not unsupported(error):
                raise
            fallbacks.add(NO_FORWARD_OVER_REVERSE)
    return _reverse_over_reverse(scalar, theta, V, together, fallbacks)


def map_columns(
    fn: Callable[[Tensor], Tensor], V: Tensor, together: int | None = None, fallbacks: Container[str] = ()
) -> Tensor:
    """Evaluate fn, vector → vector, on every column of V (d, c), `together` at once (None: all); columns again.

    Columns come out first: torch cannot put a result that does not depend on its column anywhere else.
    """
    if NO_VMAP in fallbacks:
        return torch.stack([fn(v).detach() for v in V.T], 1)
    return vmap(fn, in_dims=1, chunk_size=together, randomness="same")(V).T.detach()


@within_memory
def mapped_hessian(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, w: Tensor, indices: Tensor | None = None
) -> Tensor | None:
    """Σᵢ wᵢ∇²ℓᵢ of a loss that sees θ through linear maps of the batch alone; None for any other."""
    price = cost(samples, parameters, theta)
    if price.maps is None:
        return None
    inputs, outputs = price.maps
    room = in_flight(theta)
    fits = max(1, room // (outputs * (inputs + outputs) + price.inputs))
    together = max(1, room // (min(fits, len(w)) * (price.elements + outputs)))
    mine = span(len(w))
    batches = samples.batches(indices, fits, theta.device, mine)
    try:
        made = hessian(samples, parameters, theta, batches, w, together)
    except (Curved, RuntimeError, NotImplementedError) as error:  # in some batch another structure; or no forward mode
        if out_of_memory(error):
            raise
        made = None
    return added(made) if everywhere(made is not None, theta) and made is not None else None


def batch_gauss_newton_products(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, batch: Any, w: Tensor, V: Tensor
) -> Tensor:
    """Σᵢ wᵢ Jᵢᵀ(∇²ℓᵢ)Jᵢ·v for every column v of V (d, c): J of the model's outputs, ∇² of the loss in them."""
    if samples.parted is None:
        raise InvalidInputError(
            f"Gauss–Newton curvature of {samples.name!r}",
            measured="a loss of the params",
            threshold="outputs of the model, and a loss of these",
            meaning="Gauss–Newton leaves out the curvature of the model, so it must know where the model ends.",
            cure="Say dif.Samples(loss, data, outputs=lambda params, z: ...), the loss then gets the outputs.",
        )
    outputs, criterion = samples.parted

    def model(t: Tensor) -> Tensor:
        return outputs(parameters.bind(parameters.tensors(t)), batch)

    made, pull = forward(model, theta)
    slope = grad(lambda out: criterion(out, batch) @ w)

    def one(v: Tensor) -> Tensor:
        along = jvp(model, (theta,), (v,))[1]
        return pull(jvp(slope, (made,), (along,))[1])

    together = _columns(samples, parameters, theta, len(w))
    return map_columns(one, V, together, samples.fallbacks)


def _reverse_over_reverse(
    scalar: Callable[[Tensor], Tensor], theta: Tensor, V: Tensor, together: int | None, fallbacks: Container[str]
) -> Tensor:
    try:
        return map_columns(forward(grad(scalar), theta)[1], V, together, fallbacks)
    except Exception as error:
        if isinstance(error, UserCodeError) or not unsupported(error):
            raise
        raise InvalidInputError(
            "second derivative of a loss or function",
            measured=str(error).splitlines()[0],
            threshold="a kernel that torch can differentiate twice",
            meaning="Influence rests on the curvature, and torch has none for this kernel.",
            cure=cure_of(error, "Write that step with elementary operations (a sum of squares instead of cdist, say)."),
        ) from error


@within_memory
def stacked_losses(samples: SampleLosses, parameters: Parameters, thetas: Tensor) -> Tensor:
    """ℓᵢ of all samples at several θ (P, d), (P, n)."""
    pieces = [thetas.new_zeros((len(thetas), 0))]
    with torch.no_grad():
        for place, _, loss in passes(samples, parameters, thetas[0], shared=False):
            pieces.append(_stacked(loss, fitting(samples, parameters, thetas[0], place, 1), thetas))
    return torch.cat(pieces, 1)


def stacked_gradients(
    loss: Callable[[Tensor], Tensor], thetas: Tensor, W: Tensor, together: int
) -> tuple[Tensor, Tensor]:
    """W_p ℓ(θ_p), (P, k), and its Jacobian, (P, k, d), for several θ (P, d) with weights W (P, k, n)."""

    def one(theta: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        losses, pull = forward(loss, theta)
        mapped = torch.stack([pull(row) for row in w]) if together == 1 else vmap(pull, randomness="same")(w)
        return w @ losses, mapped

    value, slope = _stacked(one, together, thetas, W)
    return value.detach(), slope.detach()


def stacked_pullback(
    loss: Callable[[Tensor], Tensor], thetas: Tensor, W: Tensor, weights: Tensor, together: int
) -> tuple[Tensor, Tensor]:
    """W_p ℓ(θ_p), (P, k), and the gradient of its sum with weights (P, k), (P, d), for several θ (P, d)."""

    def one(theta: Tensor, w: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        losses, pull = forward(loss, theta)
        return w @ losses, pull(mu @ w)

    value, slope = _stacked(one, together, thetas, W, weights)
    return value.detach(), slope.detach()


def stacked_products(
    scalar: Callable[..., Tensor], thetas: Tensor, more: tuple[Tensor, ...], V: Tensor, together: int
) -> Tensor:
    """∇²·v at several θ (P, d), each with its own further arguments and columns V (P, d, c)."""

    def one(theta: Tensor, V: Tensor, *more: Tensor) -> Tensor:
        gradient = grad(lambda t: scalar(t, *more))
        along = lambda v: jvp(gradient, (theta,), (v,))[1]  # noqa: E731
        return torch.stack([along(v) for v in V.T], 1) if together == 1 else vmap(along, 1, randomness="same")(V).T

    return _stacked(one, together, thetas, V, *more).detach()


def _stacked(fn: Callable[..., Any], together: int, *arguments: Tensor) -> Any:
    """Map fn over the first dimension of its arguments, `together` at once."""
    if together > 1 and len(arguments[0]) > 1:
        try:
            return vmap(fn, chunk_size=together, randomness="same")(*arguments)
        except Exception as error:
            if not unsupported(error):
                raise
    results = [fn(*one) for one in zip(*arguments, strict=True)]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def batch_gradients(samples: SampleLosses, parameters: Parameters, theta: Tensor, batch: Any) -> Tensor:
    """∇ℓ of each sample of a batch, (n, d); where the loss cannot be mapped over samples, from the batch as a whole."""

    def one(t: Tensor, z: Any) -> Tensor:
        return batch_loss(samples, parameters, mapped(z, lambda x: x.unsqueeze(0)), 1)(t)[0]

    if NO_MAP not in samples.fallbacks:
        try:
            return vmap(grad(one), in_dims=(None, 0), randomness="same")(theta, batch)
        except Exception as error:
            if not unsupported(error):
                raise
            samples.fallbacks.add(NO_MAP)
    count = len(leaves(batch)[0])
    loss = batch_loss(samples, parameters, batch, count)
    return batch_pulled_back(samples, parameters, theta, loss, torch.eye(count).to(theta))[1]
