"""Checks of the user's losses and functions before their values are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dif.derivatives.compiled_function import check_type, evaluate_function
from dif.derivatives.loss_checks import check_derivatives, check_function
from dif.derivatives.sweeps import sample_losses
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses
from dif.problem.term import Function
from dif.runtime.user_code import convert_errors

_PROBE_SAMPLES = 64  # largest number of samples that are evaluated in a check


def probe(
    every_samples: Sequence[SampleLosses], functions: Sequence[Function], parameters: Parameters, theta: Tensor
) -> None:
    """Refuse losses and functions whose values or derivatives at θ are invalid; the random state is preserved."""
    if torch.is_inference_mode_enabled():
        raise InvalidInputError(
            "torch.inference_mode() is on.",
            "It must be off.",
            "Nothing can be differentiated inside it.",
            "Call dif outside of it; torch.no_grad() does no harm.",
        )
    devices = [parameters.device] if parameters.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for samples in every_samples:
            check_tensors(samples, parameters)
            with convert_errors(f"loss of Samples {samples.name!r}"):
                for at in (theta, _nearby(theta)):
                    _check_losses(samples, parameters, at)
                _check_finite(samples, parameters, theta)
                if theta.numel() not in samples.compared:
                    check_derivatives(samples, parameters, theta)
                    samples.compared.add(theta.numel())
        for f in functions:
            if f.matrix is None and f.ridge is None:  # written by the user
                with convert_errors(f"function {f.name!r}"):
                    _check_function(f, parameters, theta)


def _nearby(theta: Tensor) -> Tensor:
    """Return a point near θ: a loss may hide its randomness at θ = 0."""
    return theta + 1e-3 * _signs(theta) + (_shift(theta, 1e-3) - theta)


def _shift(theta: Tensor, share: float) -> Tensor:
    """Move every coordinate by a share of its size, with alternating signs."""
    return theta + share * theta.abs() * _signs(theta)


def _signs(theta: Tensor) -> Tensor:
    """Return +1, −1, +1, …, (d,)."""
    return 1 - 2 * (torch.arange(len(theta), dtype=theta.dtype, device=theta.device) % 2)


def _check_function(f: Function, parameters: Parameters, theta: Tensor) -> None:
    """Refuse a function that is not finite, random, or whose derivatives are wrong."""
    value = evaluate_function(f, parameters, theta)
    if not bool(torch.isfinite(value).all()):
        raise InvalidInputError(
            f"The function {f.name!r} returned {value.reshape(-1)[:4].tolist()}.",
            f"The values of {f.name!r} must be finite.",
            "It cannot be part of an objective or a constraint here.",
            "Start where the function is finite.",
        )
    for at in (theta, _nearby(theta)):
        _check_same(f"function {f.name!r}", *(evaluate_function(f, parameters, at) for _ in range(2)))
    values = lambda t: evaluate_function(f, parameters, t).reshape(-1)  # noqa: E731
    check_function(f.name, values, parameters, theta, f.fallbacks)


def _check_same(what: str, first: Tensor, second: Tensor) -> None:
    """Refuse two calls with different results."""
    if not torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)):
        raise InvalidInputError(
            f"Two calls of the {what} returned values that differ by up to {float((first - second).abs().max()):.3g}.",
            "They must return the same values.",
            "It is random (dropout, augmentation, sampling), so there is no solution to differentiate.",
            "Switch the randomness off: model.eval(), no augmentation, no sampling.",
        )


def check_used(
    every_samples: Sequence[SampleLosses], functions: Sequence[Function], parameters: Parameters, theta: Tensor
) -> None:
    """Refuse parameters that no loss and no function other than a ridge depends on."""
    used = dict.fromkeys(parameters.names, False)
    for samples in every_samples:
        _, batch = next(samples.batches(torch.arange(min(_PROBE_SAMPLES, len(samples))), device=theta.device))
        _mark_used(used, parameters, theta, lambda params, s=samples, b=batch: s.loss(params, b))
    for f in functions:
        if f.ridge is None:
            _mark_used(used, parameters, theta, f.fn)
    unused = [name for name, is_used in used.items() if not is_used]
    if unused:
        raise InvalidInputError(
            f"No loss and no function other than a ridge depends on these parameters: {', '.join(unused)}.",
            "Every parameter must be used by at least one of them.",
            "The data say nothing about them, and the curvature in their direction is zero.",
            "Leave them out of params, set requires_grad=False, or use them in a loss that does not detach them.",
        )


def _mark_used(
    used: dict[str, bool], parameters: Parameters, theta: Tensor, fn: Callable[[dict[str, Tensor]], Tensor]
) -> None:
    """Set `used` to True for the parameters on which fn depends."""
    with torch.enable_grad():
        leaves = {n: t.detach().clone().requires_grad_() for n, t in parameters.tensors(theta).items()}
        out = fn(parameters.bind(leaves)).sum()
        if not out.requires_grad:
            return
        gradients = torch.autograd.grad(out, list(leaves.values()), allow_unused=True)
    for name, g in zip(leaves, gradients, strict=True):
        used[name] |= g is not None


def check_tensors(samples: SampleLosses, parameters: Parameters) -> None:
    """Refuse data of another type than the parameters, or on an accelerator other than theirs."""
    for t in samples.storage.tensors():
        wrong_type = t.is_floating_point() and t.dtype != parameters.dtype
        if wrong_type or t.device not in (parameters.device, torch.device("cpu")):
            raise InvalidInputError(
                f"The data of Samples {samples.name!r} are {t.dtype} on {t.device}.",
                f"They must be {parameters.dtype} on {parameters.device}, like the parameters.",
                "Mixed types lose digits silently, and mixed devices fail in the middle of a run.",
                "Convert the data, or the parameters, with .to(dtype=..., device=...).",
            )


def _check_losses(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> None:
    """Refuse losses of another type than the parameters, random ones, and those that depend on other samples."""
    spread = torch.linspace(0, len(samples) - 1, min(_PROBE_SAMPLES, len(samples))).round().long()
    together, again = (sample_losses(samples, parameters, theta, spread) for _ in range(2))
    check_type(together, parameters.dtype, f"The loss of Samples {samples.name!r}")
    _check_same(f"loss of Samples {samples.name!r}", together, again)
    apart = together.clone()
    for subset in (slice(0, None, 2), slice(1, None, 2), slice(0, 1), slice(1, 2)):
        if len(spread[subset]):
            apart[subset] = sample_losses(samples, parameters, theta, spread[subset])
    eps = torch.finfo(together.dtype).eps
    shifted = sample_losses(samples, parameters, _shift(theta, 16 * eps), spread)  # effect of rounding
    gap = ((together - apart).abs() - 4 * (shifted - together).abs()) / (1.0 + apart.abs())
    allowed = eps**0.5
    if bool((gap > allowed).any()):
        raise InvalidInputError(
            f"The loss of a sample of {samples.name!r} changes by {float(gap.max()):.3g} of its size "
            "when its batch has other samples.",
            f"The relative change must be at most {allowed:.1g}.",
            "The loss of a sample depends on the other samples of its batch (batch statistics, contrastive "
            "losses, a mean inside), so removing one is not a change of weights.",
            "Use a loss that treats each sample by itself.",
        )


def _check_finite(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> None:
    """Refuse losses that are NaN or infinite."""
    losses = sample_losses(samples, parameters, theta)
    bad = torch.nonzero(~torch.isfinite(losses)).reshape(-1)
    if len(bad):
        raise InvalidInputError(
            f"The loss of Samples {samples.name!r} is NaN or infinite for {len(bad)} of {len(losses)} samples "
            f"({bad[:8].tolist()}).",
            "Every loss must be finite.",
            "The sum of the losses and its derivatives would not be finite either.",
            "Check these samples, use numerically safe losses (log_softmax, logsigmoid), and start at a finite point.",
        )
