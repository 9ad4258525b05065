"""Gauss–Newton curvature: Σᵢ wᵢ Jᵢᵀ(∇²ℓᵢ)Jᵢ, with J of the model's outputs and ∇² of the loss in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap

from dif.derivatives.cost import cost
from dif.derivatives.sweeps import NO_MAP, columns_per_chunk, evaluate_with_pullback, map_columns, sweep_batches
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses
from dif.problem.structure import map_tensors
from dif.runtime.distributed import sum_over_processes
from dif.runtime.memory import numbers_at_once, retry_with_smaller_batches
from dif.runtime.user_code import is_unsupported


@retry_with_smaller_batches
def gauss_newton_matrix(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, w: Tensor, indices: Tensor | None = None
) -> Tensor:
    """Return Σᵢ wᵢ Jᵢᵀ(∇²ℓᵢ)Jᵢ, (d, d), from the Jacobian of each sample; w has one weight per sample swept."""
    outputs, criterion = _split_model(samples)

    def model(t: Tensor, z: Any) -> Tensor:
        one = map_tensors(z, lambda x: x.unsqueeze(0))
        return outputs(parameters.bind(parameters.tensors(t)), one)[0]

    def loss(out: Tensor, z: Any) -> Tensor:
        return criterion(out.unsqueeze(0), map_tensors(z, lambda x: x.unsqueeze(0)))[0]

    count = _count_outputs(samples, parameters, theta)
    each = count * (len(theta) + cost(samples, parameters, theta).elements)
    total = theta.new_zeros((len(theta), len(theta)))
    for place, batch, _ in sweep_batches(samples, parameters, theta, indices, max(1, numbers_at_once(theta) // each)):
        out = outputs(parameters.bind(parameters.tensors(theta)), batch).detach()
        J = vmap(jacrev(model), (None, 0), randomness="same")(theta, batch).reshape(-1, count, len(theta)).detach()
        S = vmap(hessian(loss), randomness="same")(out, batch).reshape(-1, count, count).detach()
        bent = (w[place, None, None] * S) @ J
        total.addmm_(J.flatten(0, 1).T, bent.flatten(0, 1))
    return sum_over_processes(total)


def can_map(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> bool:
    """Return whether the Jacobian of each sample can be taken by vmap; tried on one sample."""
    if NO_MAP not in samples.fallbacks:
        try:
            gauss_newton_matrix(samples, parameters, theta, torch.ones_like(theta[:1]), torch.tensor([0]))
        except Exception as error:
            if not is_unsupported(error):
                raise
            samples.fallbacks.add(NO_MAP)
    return NO_MAP not in samples.fallbacks


def _count_outputs(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> int:
    """Return how many outputs the model has for one sample."""
    outputs, _ = _split_model(samples)
    _, batch = next(samples.batches(None, 1, theta.device))
    return max(1, outputs(parameters.bind(parameters.tensors(theta)), batch).numel())


def gauss_newton_products(
    samples: SampleLosses, parameters: Parameters, theta: Tensor, batch: Any, w: Tensor, V: Tensor
) -> Tensor:
    """Return Σᵢ wᵢ Jᵢᵀ(∇²ℓᵢ)Jᵢ·v for every column v of V (d, c): J of the model's outputs, ∇² of the loss in them."""
    outputs, criterion = _split_model(samples)

    def model(t: Tensor) -> Tensor:
        return outputs(parameters.bind(parameters.tensors(t)), batch)

    values, pull = evaluate_with_pullback(model, theta)
    slope = grad(lambda out: criterion(out, batch) @ w)

    def product(v: Tensor) -> Tensor:
        Jv = jvp(model, (theta,), (v,))[1]
        return pull(jvp(slope, (values,), (Jv,))[1])

    chunk_size = columns_per_chunk(samples, parameters, theta, len(w))
    return map_columns(product, V, chunk_size, samples.fallbacks)


def _split_model(samples: SampleLosses) -> tuple[Callable[[Any, Any], Tensor], Callable[[Tensor, Any], Tensor]]:
    """Return the model and the loss of its outputs; refuse samples that do not name the outputs."""
    if samples.parted is None:
        raise InvalidInputError(
            f"Samples {samples.name!r} has a loss of the params and does not name the outputs of the model.",
            "Gauss–Newton needs the outputs of the model, and a loss of these outputs.",
            "Gauss–Newton leaves out the curvature of the model, so it must know where the model ends.",
            "Write dif.Samples(loss, data, outputs=lambda params, z: ...); the loss then receives the outputs.",
        )
    return samples.parted
