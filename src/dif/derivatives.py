"""Derivatives of per-sample losses by autograd, batch by batch: the only place where data meets autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from dif.errors import InvalidInputError
from dif.parameters import Parameters
from dif.samples import Samples
from dif.structure import leaves, mapped

_VMAP_ELEMENTS = 2**22  # numbers in flight per vectorised map: bounds memory, changes no result
_GRADIENT_ELEMENTS = 2**24  # entries of the per-sample gradients held at once


def batch_loss(samples: Samples, parameters: Parameters, batch: Any, count: int) -> Callable[[Tensor], Tensor]:
    """θ → the losses of one batch, their shape checked."""

    def losses(theta: Tensor) -> Tensor:
        try:
            out = samples.loss(parameters.bind(parameters.tensors(theta)), batch)
        except Exception as error:
            error.add_note(f"raised by the loss of Samples {samples.name!r} on a batch of {count}")
            raise
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        if shape != (count,):
            raise InvalidInputError(
                f"what the loss of Samples {samples.name!r} returned",
                measured=f"shape {shape}" if isinstance(shape, tuple) else shape,
                threshold=f"a tensor of shape ({count},) for a batch of {count}",
                meaning="dif needs the loss of each sample by itself, before any mean or sum.",
                cure='Leave the reduction out (reduction="none", no .mean()) and squeeze extra dimensions.',
            )
        return out

    return losses


def sample_losses(samples: Samples, parameters: Parameters, theta: Tensor, indices: Tensor | None = None) -> Tensor:
    """ℓᵢ(θ) of all samples or of those listed, (n,)."""
    with torch.no_grad():
        pieces = [
            batch_loss(samples, parameters, batch, place.stop - place.start)(theta)
            for place, batch in samples.batches(indices)
        ]
    return torch.cat(pieces)


def sample_gradients(samples: Samples, parameters: Parameters, theta: Tensor, indices: Tensor | None = None) -> Tensor:
    """∇ℓᵢ(θ) row by row, (n, d)."""
    pieces = [_batch_gradients(samples, parameters, theta, batch) for _, batch in samples.batches(indices)]
    return torch.cat(pieces)


def sample_slopes(
    samples: Samples, parameters: Parameters, theta: Tensor, V: Tensor, indices: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """ℓᵢ(θ), (n,), and the slopes ∇ℓᵢ·v for every column v of V (d, c), as (n, c), in one sweep.

    One forward-mode pass costs about two evaluations per column; a gradient per sample about three, whatever the
    number of columns. So one column goes forward, more go by gradients, as long as a fair batch of those fits.
    """
    d, columns = V.shape
    fits = max(1, _GRADIENT_ELEMENTS // d)
    by_gradients = columns > 1 and fits >= 32
    losses, slopes = [theta.new_zeros(0)], [V.new_zeros((0, columns))]
    for place, batch in samples.batches(indices, at_most=fits if by_gradients else None):
        count = place.stop - place.start
        loss = batch_loss(samples, parameters, batch, count)
        losses.append(loss(theta).detach())
        if columns == 0:
            slopes.append(V.new_zeros((count, 0)))
        elif by_gradients:
            slopes.append(_batch_gradients(samples, parameters, theta, batch) @ V)
        else:
            slopes.append(_pushed_forward(loss, theta, V, count))
    return torch.cat(losses), torch.cat(slopes)


def forward(fn: Callable[[Tensor], Tensor], theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """fn(θ), and the map w → Jᵀw, which keeps the graph."""
    value, pull = vjp(fn, theta)[:2]
    return value, lambda w: pull(w)[0]


def pulled_back(fn: Callable[[Tensor], Tensor], theta: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """fn(θ), and Jᵀw for each row w of weights (k, n), as (k, d)."""
    value, pull = forward(fn, theta)
    if len(weights) == 0:
        return value, theta.new_zeros((0, theta.numel()))
    chunk = max(1, _VMAP_ELEMENTS // max(value.numel(), 1))
    return value, vmap(pull, chunk_size=chunk, randomness="same")(weights)


def _pushed_forward(fn: Callable[[Tensor], Tensor], theta: Tensor, V: Tensor, count: int) -> Tensor:
    """J·v for every column v of V, forward mode; from the gradients where a kernel has no forward mode."""
    options: dict[str, Any] = {"in_dims": 1, "out_dims": 1, "randomness": "same"}
    options["chunk_size"] = max(1, min(V.shape[1], _VMAP_ELEMENTS // count))
    try:
        return vmap(lambda v: jvp(fn, (theta,), (v,))[1], **options)(V)
    except (RuntimeError, NotImplementedError) as error:
        if not _unsupported(error):
            raise
        return pulled_back(fn, theta, torch.eye(count).to(theta))[1] @ V


def hessian_products(scalar: Callable[[Tensor], Tensor], theta: Tensor, V: Tensor, count: int) -> Tensor:
    """∇²·v for every column v of V (d, c); `count` samples are evaluated inside the scalar.

    Forward over reverse; reverse over reverse where a kernel has no forward mode.
    """
    options: dict[str, Any] = {"in_dims": 1, "out_dims": 1, "randomness": "same"}
    options["chunk_size"] = max(1, min(V.shape[1], _VMAP_ELEMENTS // max(count, 1)))
    try:
        return vmap(lambda v: jvp(grad(scalar), (theta,), (v,))[1], **options)(V).detach()
    except (RuntimeError, NotImplementedError) as error:
        if not _unsupported(error):
            raise
        return _reverse_over_reverse(scalar, theta, V, options)


def _reverse_over_reverse(
    scalar: Callable[[Tensor], Tensor], theta: Tensor, V: Tensor, options: dict[str, Any]
) -> Tensor:
    try:
        return vmap(forward(grad(scalar), theta)[1], **options)(V).detach()
    except NotImplementedError as error:
        raise InvalidInputError(
            "second derivative of a loss or function",
            measured=str(error).splitlines()[0],
            threshold="a kernel that torch can differentiate twice",
            meaning="Influence rests on the curvature, and torch has none for this kernel.",
            cure="Write that step with elementary operations (a sum of squares instead of cdist, say).",
        ) from error


def _batch_gradients(samples: Samples, parameters: Parameters, theta: Tensor, batch: Any) -> Tensor:
    """∇ℓ of each sample of a batch, (n, d); where the loss cannot be mapped over samples, from the batch as a whole."""

    def one(t: Tensor, z: Any) -> Tensor:
        return batch_loss(samples, parameters, mapped(z, lambda x: x.unsqueeze(0)), 1)(t)[0]

    try:
        return vmap(grad(one), in_dims=(None, 0), randomness="same")(theta, batch)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if not _unsupported(error):
            raise
        count = len(leaves(batch)[0])
        return pulled_back(batch_loss(samples, parameters, batch, count), theta, torch.eye(count).to(theta))[1]


def _unsupported(error: Exception) -> bool:
    """Whether torch cannot transform the loss (branches on data, kernels without forward mode), rather than run it."""
    words = ("vmap", "functorch", "forward AD", "forward-mode", "data-dependent")
    return isinstance(error, NotImplementedError) or any(word in str(error) for word in words)
