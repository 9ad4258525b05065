"""What the loss of one sample takes: numbers, multiplications, and whether it is a loss of linear maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dif.evaluation.linear_structure import widths
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses
from dif.problem.structure import leaves

_PROBED = 8  # samples on which the cost of one is measured


@dataclass(frozen=True)
class Cost:
    """What the loss of one sample takes."""

    elements: int  # numbers made on the way, as many as are kept for the way back
    inputs: int  # numbers that the sample consists of
    flops: int  # of one evaluation
    maps: tuple[int, int] | None = None  # inputs and outputs of its linear maps, where it sees θ through nothing else


def cost(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> Cost:
    """Measured once per samples and model, on a few of them."""
    known = samples.costs.get(len(theta))
    if known is None:
        many = min(_PROBED, len(samples), samples.batch_size or _PROBED)
        few = many // 2
        more, less = _measured(samples, parameters, theta, many), _measured(samples, parameters, theta, few)
        each = [max(0, (x - y) // (many - few)) for x, y in zip(more, less, strict=True)]  # per sample, overheads gone
        _, batch = next(samples.batches(torch.arange(many), device=theta.device))
        maps = widths(samples, parameters, theta, batch, many)
        known = Cost(max(1, each[0]), each[1], max(1, more[2] // many), maps)
        samples.costs[len(theta)] = known
    return known


def _measured(samples: SampleLosses, parameters: Parameters, theta: Tensor, count: int) -> tuple[int, int, int]:
    """Numbers that a batch leaves behind on its way forward, those it consists of, and the multiplications it takes."""
    if count == 0:
        return 0, 0, 0
    _, batch = next(samples.batches(torch.arange(count), device=theta.device))
    with torch.no_grad(), _Counted() as counted:
        tensors = {name: t.clone() for name, t in parameters.tensors(theta).items()}
        samples.losses(parameters.bind(tensors), batch, count)
    return counted.elements, sum(t.numel() for t in leaves(batch)), counted.flops


class _Counted(TorchDispatchMode):
    """Counts the numbers that operators make, and the multiplications it takes them."""

    elements = flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in args if isinstance(t, Tensor)]
        if isinstance(out, Tensor) and all(out.untyped_storage() is not t.untyped_storage() for t in given):
            name, factors = func.__name__.split(".")[0], [t for t in given if t.dim() > 0]
            each = 1
            if name in ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv") and len(factors) >= 2:
                each = 2 * factors[-2].shape[-1]
            elif "convolution" in name and len(factors) >= 2:
                each = 2 * factors[1][0].numel()
            self.elements += out.numel()
            self.flops += out.numel() * each
        return out
