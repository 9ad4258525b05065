"""Sweeps over the losses of all samples: each goes over the batches and adds up, or joins, what they give."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dif.derivatives.linear_structure import NotLinearError, assemble_hessian
from dif.derivatives.losses import BatchLosses, cost, gradients_at_once, jacobians_at_once, samples_at_once
from dif.problem.parameters import Parameters
from dif.problem.samples import Samples
from dif.runtime.guard import (
    gather_rows,
    holds_in_all_processes,
    is_out_of_memory,
    numbers_at_once,
    retry_with_smaller_batches,
    span,
    sum_over_processes,
)


def sweep_batches(
    samples: Samples, parameters: Parameters, theta: Tensor, indices: Tensor | None = None,
    at_most: int | None = None, *, columns: int = 0, shared: bool = True,
) -> Iterator[tuple[slice, BatchLosses]]:  # fmt: skip
    """Sweep over all samples, or those listed: yield positions and the losses of the samples there as a map of θ.

    Batches are as large as memory allows, up to `at_most` samples, and leave room for the `columns` that go through
    them. Where samples are distributed over processes, only this process's part is swept, unless `shared` is False.
    """
    most = samples_at_once(samples, parameters, theta, columns)
    within = span(len(samples) if indices is None else len(indices)) if shared else None
    for place, batch in samples.batches(indices, min(most, at_most or most), theta.device, within):
        yield place, BatchLosses(samples.fallbacks, samples, parameters, batch, place.stop - place.start)


@retry_with_smaller_batches
def sample_losses(samples: Samples, parameters: Parameters, theta: Tensor, indices: Tensor | None = None) -> Tensor:
    """Return ℓᵢ(θ) of all samples or of those listed, (n,)."""
    batches = [loss.values(theta) for _, loss in sweep_batches(samples, parameters, theta, indices)]
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
    """Return ℓᵢ(θ), (n,), and the slopes ∇ℓᵢ·v for every column v of V (d, c), as (n, c), in one sweep."""
    most = gradients_at_once(samples, parameters, theta, V.shape[1])
    losses, slopes = [theta.new_zeros(0)], [V.new_zeros((0, V.shape[1]))]
    for _, loss in sweep_batches(samples, parameters, theta, indices, most):
        value, slope = loss.slopes(theta, V)
        losses.append(value)
        slopes.append(slope)
    total = len(samples) if indices is None else len(indices)
    return gather_rows(torch.cat(losses), total), gather_rows(torch.cat(slopes), total)


@retry_with_smaller_batches
def weighted_gradients(
    samples: Samples, parameters: Parameters, theta: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Σᵢ wᵢℓᵢ(θ), (k,), and Σᵢ wᵢ∇ℓᵢ(θ), (k, d), over all samples, for each row w of weights (k, n)."""
    value, gradient = theta.new_zeros(len(weights)), theta.new_zeros((len(weights), theta.numel()))
    for place, loss in sweep_batches(samples, parameters, theta):
        losses, part = loss.pull(theta, weights[:, place])
        value, gradient = value + weights[:, place] @ losses, gradient + part
    return sum_over_processes(value), sum_over_processes(gradient)


@retry_with_smaller_batches
def stacked_losses(samples: Samples, parameters: Parameters, thetas: Tensor) -> Tensor:
    """Return ℓᵢ of all samples at several θ (P, d), (P, n)."""
    sweep = sweep_batches(samples, parameters, thetas[0], shared=False)
    return torch.cat([thetas.new_zeros((len(thetas), 0)), *(loss.stacked_values(thetas) for _, loss in sweep)], 1)


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
    batches = samples.batches(indices, fits, theta.device, span(len(w)))
    try:
        H = assemble_hessian(samples, parameters, theta, batches, w, each.elements)
    except (NotLinearError, RuntimeError, NotImplementedError) as error:  # a batch differs, or no second derivative
        if is_out_of_memory(error):
            raise
        H = None
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
