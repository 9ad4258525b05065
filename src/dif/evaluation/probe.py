"""Questions asked of the user's losses once, before any number is trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.evaluation.loss_checks import check_derivatives, check_function
from dif.evaluation.rows import checked_value, function_value
from dif.evaluation.sweeps import sample_losses
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses
from dif.problem.term import Function
from dif.runtime.user_code import in_words

_FEW = 64  # samples that are asked twice


def probe(
    every_samples: Sequence[SampleLosses], functions: Sequence[Function], parameters: Parameters, theta: Tensor
) -> None:
    """Refuse losses and functions whose numbers cannot be trusted at θ; the random state stays as it was."""
    if torch.is_inference_mode_enabled():
        raise InvalidInputError(
            "torch.inference_mode()",
            measured="on",
            threshold="off",
            meaning="Nothing can be differentiated inside it.",
            cure="Call dif outside of it; torch.no_grad() does no harm.",
        )
    devices = [parameters.device] if parameters.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for samples in every_samples:
            check_tensors(samples, parameters)
            with in_words(f"loss of Samples {samples.name!r}"):
                _check_type(samples, parameters, theta)
                _check_deterministic(samples, parameters, theta)
                _check_alone(samples, parameters, theta)
                _check_finite(samples, parameters, theta)
                if theta.numel() not in samples.compared:
                    check_derivatives(samples, parameters, theta)
                    samples.compared.add(theta.numel())
        for f in functions:
            if f.matrix is None:
                with in_words(f"function {f.name!r}"):
                    _check_function(f, parameters, theta)


def _nearby(theta: Tensor) -> Tensor:
    """A point beside θ: at θ = 0 much is hidden."""
    return theta + 1e-3 * _signs(theta) + (_beside(theta, 1e-3) - theta)


def _beside(theta: Tensor, share: float) -> Tensor:
    """Every coordinate moved by a share of itself, up and down in turn."""
    return theta + share * theta.abs() * _signs(theta)


def _signs(theta: Tensor) -> Tensor:
    return 1 - 2 * (torch.arange(len(theta), device=theta.device) % 2)


def _check_function(f: Function, parameters: Parameters, theta: Tensor) -> None:
    value = function_value(f, parameters, theta)
    if not bool(torch.isfinite(value).all()):
        raise InvalidInputError(
            f"value of the function {f.name!r}",
            measured=value.reshape(-1)[:4].tolist(),
            threshold="finite",
            meaning="It cannot be part of an objective or a constraint here.",
            cure="Start where the function is finite.",
        )
    for at in (theta, _nearby(theta)):
        _check_same(f"function {f.name!r}", *(function_value(f, parameters, at) for _ in range(2)))
    check_function(f.name, lambda t: function_value(f, parameters, t).reshape(-1), parameters, theta)


def _check_same(what: str, first: Tensor, second: Tensor) -> None:
    if not torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)):
        raise InvalidInputError(
            f"two calls of the {what}",
            measured=f"values that differ by up to {float((first - second).abs().max()):.3g}",
            threshold="0",
            meaning="It is random (dropout, augmentation, sampling), so there is no solution to differentiate.",
            cure="Switch the randomness off: model.eval(), no augmentation, no sampling.",
        )


def check_used(
    every_samples: Sequence[SampleLosses], functions: Sequence[Function], parameters: Parameters, theta: Tensor
) -> None:
    """Refuse parameters that no loss and no function (a ridge apart) depends on."""
    used = dict.fromkeys(parameters.names, False)
    for samples in every_samples:
        _, batch = next(samples.batches(torch.arange(min(_FEW, len(samples))), device=theta.device))
        _mark(used, parameters, theta, lambda params, s=samples, b=batch: s.loss(params, b))
    for f in functions:
        if f.ridge is None:
            _mark(used, parameters, theta, lambda params, f=f: checked_value(f, params, theta.dtype))
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


def _mark(
    used: dict[str, bool], parameters: Parameters, theta: Tensor, fn: Callable[[dict[str, Tensor]], Tensor]
) -> None:
    with torch.enable_grad():
        pieces = {n: t.detach().clone().requires_grad_() for n, t in parameters.tensors(theta).items()}
        out = fn(parameters.bind(pieces)).sum()
        if not out.requires_grad:
            return
        gradients = torch.autograd.grad(out, list(pieces.values()), allow_unused=True)
    for name, g in zip(pieces, gradients, strict=True):
        used[name] |= g is not None


def check_tensors(samples: SampleLosses, parameters: Parameters) -> None:
    """Refuse data of another type than the parameters, or on an accelerator where they are not."""
    for t in samples.storage.tensors():
        wrong_type = t.is_floating_point() and t.dtype != parameters.dtype
        if wrong_type or t.device not in (parameters.device, torch.device("cpu")):
            raise InvalidInputError(
                f"data of Samples {samples.name!r}",
                measured=f"{t.dtype} on {t.device}",
                threshold=f"{parameters.dtype} on {parameters.device}, as the parameters",
                meaning="Mixed types lose digits silently, mixed devices fail in the middle of a run.",
                cure="Convert the data, or the parameters, with .to(dtype=..., device=...).",
            )


def _check_type(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> None:
    dtype = sample_losses(samples, parameters, theta, _spread(samples)).dtype
    if dtype != parameters.dtype:
        raise InvalidInputError(
            f"what the loss of Samples {samples.name!r} returned",
            measured=dtype,
            threshold=f"{parameters.dtype}, as the parameters",
            meaning="Counts and booleans have no derivative, and other types lose digits silently.",
            cure="Return a differentiable loss, computed in the parameters' type.",
        )


def _spread(samples: SampleLosses) -> Tensor:
    """A few samples from all over the data."""
    return torch.linspace(0, len(samples) - 1, min(_FEW, len(samples))).round().long()


def _check_deterministic(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> None:
    spread = _spread(samples)
    for at in (theta, _nearby(theta)):
        twice = (sample_losses(samples, parameters, at, spread) for _ in range(2))
        _check_same(f"loss of Samples {samples.name!r}", *twice)


def _check_alone(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> None:
    spread = _spread(samples)
    for at in (theta, _nearby(theta)):
        together = sample_losses(samples, parameters, at, spread)
        alone = together.clone()
        for some in (slice(0, None, 2), slice(1, None, 2), slice(0, 1), slice(1, 2)):
            alone[some] = sample_losses(samples, parameters, at, spread[some]) if len(spread[some]) else alone[some]
        eps = torch.finfo(together.dtype).eps
        shaken = sample_losses(samples, parameters, _beside(at, 16 * eps), spread)  # what rounding may make of it
        gap = ((together - alone).abs() - 4 * (shaken - together).abs()) / (1.0 + alone.abs())
        allowed = eps**0.5
        if bool((gap > allowed).any()):
            raise InvalidInputError(
                f"loss of one sample of {samples.name!r}, alone and beside another",
                measured=f"values that differ by {float(gap.max()):.3g} of their size",
                threshold=f"{allowed:.1g}",
                meaning="The loss of a sample depends on the other samples of its batch (batch statistics, contrastive "
                "losses, a mean inside), so removing one is not a change of weights.",
                cure="Use a loss that treats each sample by itself.",
            )


def _check_finite(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> None:
    losses = sample_losses(samples, parameters, theta)
    bad = torch.nonzero(~torch.isfinite(losses)).reshape(-1)
    if len(bad):
        raise InvalidInputError(
            f"losses of {samples.name!r}",
            measured=f"NaN or infinite for {len(bad)} of {len(losses)} samples ({bad[:8].tolist()})",
            threshold="0",
            meaning="Their sum, and every derivative of it, would not be finite either.",
            cure="Look at those samples; use numerically safe losses (log_softmax, logsigmoid) and a finite start.",
        )
