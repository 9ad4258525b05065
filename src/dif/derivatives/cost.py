"""The cost of evaluating the loss of one sample: memory, multiplications, and whether θ enters by linear maps only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dif.derivatives.linear_structure import measure_maps
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses
from dif.problem.structure import leaves

_PROBE_SAMPLES = 8  # number of samples on which the cost per sample is measured


@dataclass(frozen=True)
class Cost:
    """The cost of evaluating the loss of one sample."""

    elements: int  # intermediate numbers of the forward pass, all kept for the backward pass
    inputs: int  # numbers in the data of the sample
    flops: int  # of one evaluation
    maps: tuple[int, int] | None = None  # inputs and outputs of its linear maps, if θ enters by nothing else


def cost(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> Cost:
    """Measure the cost of one sample on a few samples; the result is cached per number of parameters."""
    cached = samples.costs.get(len(theta))
    if cached is None:
        many = min(_PROBE_SAMPLES, len(samples), samples.batch_size or _PROBE_SAMPLES)
        few = many // 2
        more, less = _measure_batch(samples, parameters, theta, many), _measure_batch(samples, parameters, theta, few)
        each = [max(0, (x - y) // (many - few)) for x, y in zip(more, less, strict=True)]  # without fixed overhead
        _, batch = next(samples.batches(torch.arange(many), device=theta.device))
        maps = measure_maps(samples, parameters, theta, batch, many)
        cached = Cost(max(1, each[0]), each[1], max(1, more[2] // many), maps)
        samples.costs[len(theta)] = cached
    return cached


def _measure_batch(samples: SampleLosses, parameters: Parameters, theta: Tensor, count: int) -> tuple[int, int, int]:
    """Count the intermediate numbers, the input numbers and the multiplications of one batch of `count` samples."""
    if count == 0:
        return 0, 0, 0
    _, batch = next(samples.batches(torch.arange(count), device=theta.device))
    with torch.no_grad(), _OperationCounter() as counter:
        tensors = {name: t.clone() for name, t in parameters.tensors(theta).items()}
        samples.losses(parameters.bind(tensors), batch, count)
    return counter.elements, sum(t.numel() for t in leaves(batch)), counter.flops


class _OperationCounter(TorchDispatchMode):
    """Counts the numbers that operators create and the multiplications they perform."""

    elements = flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in args if isinstance(t, Tensor)]
        if isinstance(out, Tensor) and all(out.untyped_storage() is not t.untyped_storage() for t in given):
            name, factors = func.__name__.split(".")[0], [t for t in given if t.dim() > 0]
            flops_per_entry = 1
            if name in ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv") and len(factors) >= 2:
                flops_per_entry = 2 * factors[-2].shape[-1]
            elif "convolution" in name and len(factors) >= 2:
                flops_per_entry = 2 * factors[1][0].numel()
            self.elements += out.numel()
            self.flops += out.numel() * flops_per_entry
        return out
