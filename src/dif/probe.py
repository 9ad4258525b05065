"""Questions asked of the user's losses once, before any number is trusted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dif.derivatives import batch_loss, sample_losses
from dif.errors import InvalidInputError
from dif.parameters import Parameters
from dif.rows import function_value
from dif.samples import Samples
from dif.term import Function

_FEW = 16  # samples in a probe


def probe(
    every_samples: Sequence[Samples], functions: Sequence[Function], parameters: Parameters, theta: Tensor
) -> None:
    """Refuse losses and functions whose numbers cannot be trusted at θ."""
    for samples in every_samples:
        _check_tensors(samples, parameters)
        _check_deterministic(samples, parameters, theta)
        _check_alone(samples, parameters, theta)
        _check_finite(samples, parameters, theta)
    for f in functions:
        value = function_value(f, parameters, theta)
        if not bool(torch.isfinite(value).all()):
            raise InvalidInputError(
                f"value of the function {f.name!r}",
                measured=value.reshape(-1)[:4].tolist(),
                threshold="finite",
                meaning="It cannot be part of an objective or a constraint here.",
                cure="Start where the function is finite.",
            )


def check_used(
    every_samples: Sequence[Samples], functions: Sequence[Function], parameters: Parameters, theta: Tensor
) -> None:
    """Refuse parameters that no loss and no function (a ridge apart) depends on."""
    used = dict.fromkeys(parameters.names, False)
    for samples in every_samples:
        place, batch = next(samples.batches(torch.arange(min(_FEW, len(samples)))))
        loss = batch_loss(samples, parameters, batch, place.stop)
        _mark(used, parameters, theta, loss)
    for f in functions:
        if not f.regulariser:
            _mark(used, parameters, theta, lambda t, f=f: function_value(f, parameters, t))
    unused = [name for name, yes in used.items() if not yes]
    if unused:
        raise InvalidInputError(
            "parameters that nothing depends on",
            measured=", ".join(unused),
            threshold="none",
            meaning="No loss and no function (a ridge apart) uses them, so the data say nothing about them and the "
            "curvature in their direction is zero.",
            cure="Leave them out of params (or set requires_grad=False), or use them in the loss; check that the loss "
            "does not detach its inputs.",
        )


def _mark(used: dict[str, bool], parameters: Parameters, theta: Tensor, fn) -> None:
    with torch.enable_grad():
        leaf = theta.detach().clone()
        pieces = {n: t.detach().requires_grad_() for n, t in parameters.tensors(leaf).items()}
        out = fn(torch.cat([t.reshape(-1) for t in pieces.values()])).sum()
        if not out.requires_grad:
            return
        gradients = torch.autograd.grad(out, list(pieces.values()), allow_unused=True)
    for name, g in zip(pieces, gradients, strict=True):
        used[name] |= g is not None


def _check_tensors(samples: Samples, parameters: Parameters) -> None:
    for t in samples.tensors():
        wrong_type = t.is_floating_point() and t.dtype != parameters.dtype
        if wrong_type or t.device != parameters.device:
            raise InvalidInputError(
                f"data of Samples {samples.name!r}",
                measured=f"{t.dtype} on {t.device}",
                threshold=f"{parameters.dtype} on {parameters.device}, as the parameters",
                meaning="Mixed types lose digits silently, mixed devices fail in the middle of a run.",
                cure="Convert the data, or the parameters, with .to(dtype=..., device=...).",
            )


def _losses_twice(samples: Samples, parameters: Parameters, theta: Tensor) -> tuple[Tensor, Tensor]:
    few = torch.arange(min(_FEW, len(samples)))
    devices = [parameters.device] if parameters.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        return (
            sample_losses(samples, parameters, theta, few),
            sample_losses(samples, parameters, theta, few),
        )


def _check_deterministic(samples: Samples, parameters: Parameters, theta: Tensor) -> None:
    first, second = _losses_twice(samples, parameters, theta)
    if not torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)):
        raise InvalidInputError(
            f"two calls of the loss of Samples {samples.name!r}",
            measured=f"values that differ by up to {float((first - second).abs().max()):.3g}",
            threshold="0",
            meaning="The loss is random (dropout, augmentation, sampling), so it has no solution to differentiate.",
            cure="Switch the randomness off: model.eval(), fixed augmentations, fixed seeds inside the loss.",
        )


def _check_alone(samples: Samples, parameters: Parameters, theta: Tensor) -> None:
    few = torch.arange(min(2, len(samples)))
    together = sample_losses(samples, parameters, theta, few)
    alone = torch.cat([sample_losses(samples, parameters, theta, few[i : i + 1]) for i in range(len(few))])
    gap = (together - alone).abs() / (1.0 + alone.abs())
    allowed = torch.finfo(together.dtype).eps ** 0.5
    if bool((gap > allowed).any()):
        raise InvalidInputError(
            f"loss of one sample of {samples.name!r}, alone and beside another",
            measured=f"values that differ by {float(gap.max()):.3g} of their size",
            threshold=f"{allowed:.1g}",
            meaning="The loss of a sample depends on the other samples of its batch (batch statistics, contrastive "
            "losses, a mean inside), so removing one is not a change of weights.",
            cure="Use a loss that treats each sample by itself.",
        )


def _check_finite(samples: Samples, parameters: Parameters, theta: Tensor) -> None:
    losses = sample_losses(samples, parameters, theta)
    if not losses.is_floating_point():
        raise InvalidInputError(
            f"what the loss of Samples {samples.name!r} returned",
            measured=losses.dtype,
            threshold="floating point",
            meaning="Counts and booleans have no derivative.",
            cure="Return a differentiable loss.",
        )
    bad = torch.nonzero(~torch.isfinite(losses)).reshape(-1)
    if len(bad):
        raise InvalidInputError(
            f"losses of {samples.name!r}",
            measured=f"NaN or infinite for {len(bad)} of {len(losses)} samples ({bad[:8].tolist()})",
            threshold="0",
            meaning="Their sum, and every derivative of it, would not be finite either.",
            cure="Look at those samples; use numerically safe losses (log_softmax, logsigmoid) and a finite start.",
        )
