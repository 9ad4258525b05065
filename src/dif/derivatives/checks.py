"""Checks of the user's losses and functions: values, derivatives by every method that dif uses, kinks and jumps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.losses import (
    NO_FORWARD,
    NO_MAP,
    NO_SECOND_BACKWARD,
    NO_VMAP,
    BatchLosses,
    Differentiable,
    OperationCounter,
    cost,
    fall_back,
    sample_losses,
    sample_slopes,
    stacked_losses,
    sweep_batches,
)
from dif.derivatives.rows import CompiledFunction, Rows, evaluate_function, wrong_type_error
from dif.errors import DifError, InvalidInputError, few, warn
from dif.problem.parameters import Parameters
from dif.problem.samples import PLAIN_ATTENTION, Samples
from dif.problem.term import Function
from dif.runtime.guard import convert_errors, is_unsupported, numbers_at_once

# Finite differences


def difference(at: Callable[[float], Tensor], here: Tensor, step: float) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate a function of a step along a direction by central differences.

    Returns:
        The slopes; their rounding errors; and how far the slopes to the two sides are apart, as they are on a kink.

    >>> slope, _, bend = difference(lambda t: torch.tensor([(1 + t) ** 2, abs(t)]).double(), torch.eye(2)[0], 1e-3)
    >>> [round(x, 6) for x in (*slope.tolist(), *bend.tolist())]
    [2.000034, 0.0, 0.002027, 2.0]
    """
    before, after = at(-step), at(step)
    rounding = torch.finfo(here.dtype).eps / step * here.abs()
    return (after - before) / (2 * step), rounding, (before - 2 * here + after).abs() / step


def check_slopes(samples: Samples, parameters: Parameters, theta: Tensor, v: Tensor) -> None:
    """Compare the slope of every sample's loss along v with finite differences; refuse the first wrong one."""
    eps = torch.finfo(theta.dtype).eps
    here, slopes = sample_slopes(samples, parameters, theta, v[:, None])
    slope, last, index, change = slopes[:, 0], slopes[:, 0], torch.arange(len(samples)), 0
    for step in (eps ** (1 / 3), 16 * eps ** (1 / 3)):  # a rounding error would change with the step
        chosen = None if len(index) == len(samples) else index
        at = lambda t, chosen=chosen: sample_losses(samples, parameters, theta + t * v, chosen)  # noqa: E731
        expected, rounding, bend = difference(at, here, step)
        excess = (slope - expected).abs() - 16 * rounding - bend - change * (last - expected).abs()
        wrong = torch.nonzero(excess > eps**0.25 * torch.maximum(slope.abs(), expected.abs())).reshape(-1)
        if len(wrong) == 0:
            return
        slope, last, here, index, change = slope[wrong], expected[wrong], here[wrong], index[wrong.cpu()], 4
    gap = abs(float((slope[0] - last[0]) / last[0]))
    raise _wrong_derivative_error(f"gradient of the loss of {samples.name}[{int(index[0])}]", gap)


# Every method of differentiating

_COMPARED_SAMPLES = 10  # samples on which methods are compared; torch may use other kernels for large batches
_GROUPS = 8  # groups of tensors with gradients of similar size, so that large gradients do not hide a small wrong one
_LEAP = 1e-2  # relative change of a loss within a tiny step that suggests a jump
_TRIES = 3  # directions and steps that are tried: a kink spoils one of them, a wrong derivative spoils all


def check_derivatives(samples: Samples, parameters: Parameters, theta: Tensor, points: int = 1) -> None:
    """Check every method of differentiating a loss at θ, on samples spread over the data.

    Notes fallbacks, or refuses the loss. Nothing is done where the loss was checked at so many points before.
    """
    if samples.compared[len(theta)] >= points:
        return
    index, what = _spread(samples, _COMPARED_SAMPLES).unique(), f"loss of Samples {samples.name!r}"
    _, losses = next(sweep_batches(samples, parameters, theta, index, shared=False))
    try:
        _Check(losses, theta).check_all(what, parameters)
    except DifError as error:
        if "scaled_dot_product" not in str(error) or PLAIN_ATTENTION in samples.fallbacks:
            raise
        samples.fallbacks.clear()
        samples.fallbacks.add(PLAIN_ATTENTION)
        _Check(losses, theta).check_all(what, parameters)
    samples.compared[len(theta)] += 1


def _spread(samples: Samples, most: int) -> Tensor:
    """Return the indices of at most this many samples, spread over the data."""
    return torch.linspace(0, len(samples) - 1, min(most, len(samples))).round().long()


class _Check:
    """Numbers f(θ) at one θ, and the relative error of each method of differentiating them along a direction."""

    def __init__(self, losses: Differentiable, theta: Tensor) -> None:
        self.losses, self.theta = losses, theta
        self.ways = [losses]
        if isinstance(losses, BatchLosses) and cost(losses.samples, losses.parameters, theta).maps is not None:
            self.ways.append(replace(losses, by_maps=True))
        eps = torch.finfo(theta.dtype).eps
        self.allowed = eps**0.25  # 1e-4 in float64
        ratio = 32 if theta.dtype == torch.float64 else 4  # in float32, rounding hides the curvature in shorter steps
        self.steps = [eps ** (1 / 3) / ratio**number for number in range(_TRIES)]  # from 6e-6 in float64
        self.smallest_gap = 0.0  # of the last method that was found wrong
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(theta)  # noqa: E731
        self.weights = draw(_TRIES, len(losses.values(theta)))
        self.here, self.plain = self._gradients(theta, self.weights)  # (n,), (tries, d)
        steepness = self.plain.square().mean(0).sqrt()
        size = self.here.abs().mean()  # along a direction, losses change by about their own size
        units = torch.where(steepness > 0, size / steepness.clamp(min=torch.finfo(theta.dtype).tiny), float("inf"))
        self.units = torch.nan_to_num(units.clamp(1e-4, 1.0), nan=1.0) * (1 + theta.abs())
        self.directions = self.units * draw(_TRIES, theta.numel())
        self.negligible = eps**0.5 * float(self.weights[0].abs() @ self.here.abs())  # change of the weighted losses

    def check_all(self, what: str, parameters: Parameters) -> None:
        """Check all methods: refuse a wrong gradient, replace other methods that are wrong, or refuse the loss."""
        for names, mask in self._groups(parameters):
            if not self._agrees(partial(self.gradient_gap, mask)):
                raise _wrong_derivative_error(f"gradient of the {what}{names and f' in {names}'}", self.smallest_gap)
        if isinstance(self.losses, BatchLosses):
            self._replace_if_wrong(NO_MAP, self.sample_gap)
        replaced = [self.vmap_gap] if self._replace_if_wrong(NO_VMAP, self.vmap_gap) else []
        self._replace_if_wrong(NO_FORWARD, self.slope_gap)
        if self._replace_if_wrong(NO_SECOND_BACKWARD, self.curvature_gap):
            replaced += [self.vmap_gap] if self._replace_if_wrong(NO_VMAP, self.curvature_gap) else []
            replaced += [self.curvature_gap]
        for gap in replaced:
            try:
                agrees = self._agrees(gap)
            except Exception as error:
                if not is_unsupported(error) or self.smallest_gap <= self.allowed:
                    raise
                agrees = False  # one method was found wrong, and torch does not have the other
            if not agrees:
                raise _wrong_derivative_error(f"second derivative of the {what}", self.smallest_gap)

    def _groups(self, parameters: Parameters) -> Iterator[tuple[str, Tensor]]:
        """Yield masks of 0 and 1, (d,): all coordinates, then names and mask of tensors with gradients of like size."""
        yield "", torch.ones_like(self.theta)
        sizes = list(parameters.sizes)
        steepness = [float(g.abs().max()) for g in torch.split(self.plain[0], sizes)]
        order = sorted(range(len(sizes)), key=lambda k: steepness[k])
        length = -(-len(order) // _GROUPS)
        for start in range(0, len(order), length) if len(order) > 1 else ():
            group = order[start : start + length]
            masks = [torch.full((size,), float(k in group)) for k, size in enumerate(sizes)]
            yield few([parameters.names[k] for k in group]), torch.cat(masks).to(self.theta)

    def _replace_if_wrong(self, fallback: str, gap: Callable[[int], float]) -> bool:
        """Add the fallback if a method is wrong or unsupported by torch; return whether it was added."""
        with fall_back(self.losses.fallbacks):
            if self._agrees(gap):
                return False
        self.losses.fallbacks.add(fallback)
        return True

    def _agrees(self, gap: Callable[[int], float]) -> bool:
        """Return whether the gap is small along at least one of the directions."""
        gaps: list[float] = []
        while len(gaps) < _TRIES:
            gaps.append(gap(len(gaps)))
            if gaps[-1] <= self.allowed:
                return True
        self.smallest_gap = min(gaps)
        return False

    def gradient_gap(self, mask: Tensor, number: int) -> float:
        """Compare the plain gradient with differences of the losses along the masked coordinates of a direction."""
        W, (differences, uncertainty) = self.weights, self._differences(number, mask)
        excess = (W @ differences - self.plain @ (mask * self.directions[number])).abs() - W.abs() @ uncertainty
        return _largest_ratio(excess, W.abs() @ differences.abs())

    def vmap_gap(self, number: int) -> float:
        """Compare gradients by vmap and by linear maps, for several weights and at several θ, with plain ones."""
        thetas = torch.stack([self.theta, self.theta + self.steps[number] * self.directions[number]])
        expected = torch.stack([self.plain[0], self._gradient_near(number, self.steps[number])])
        W = self.weights[0].expand(2, 1, -1)
        gaps = [_relative_gap(self.losses.pull(self.theta, self.weights)[1], self.plain)]
        for losses in self.ways:
            gaps.append(_relative_gap(losses.evaluate_at(self.theta[None], self.weights[None])[1][0], self.plain))
            gaps.append(_relative_gap(losses.evaluate_at(thetas, W)[1][:, 0], expected))
        return max(gaps)

    def slope_gap(self, number: int) -> float:
        """Compare slopes by forward mode and linear maps, for one column and two, with differences of the losses."""
        expected, V = self._differences(number), self._two_directions(number)
        found = [losses.push(self.theta, v)[1][:, 0] for losses in self.ways for v in (V[:, :1], V)]
        return max(_relative_gap(slopes, *expected) for slopes in found)

    def _two_directions(self, number: int) -> Tensor:
        """Return a direction and the next one as columns, (d, 2)."""
        return self.directions[[number, (number + 1) % _TRIES]].T

    def sample_gap(self, number: int) -> float:
        """Compare per-sample gradients, (n, d), with a plain gradient."""
        assert isinstance(self.losses, BatchLosses)
        return _relative_gap(self.weights[0] @ self.losses.sample_gradients(self.theta), self.plain[0])

    def curvature_gap(self, number: int) -> float:
        """Compare Hessian-vector products, for one column and for two, with differences of the plain gradient."""
        V = self._two_directions(number)
        v, other = V.T
        single, double = (self.losses.products(self.theta, self.weights[0], columns) for columns in (V[:, :1], V))
        crossed = torch.stack([double[:, 0] @ other, double[:, 1] @ v])  # equal for a symmetric matrix
        size = float(double[:, 0].abs() @ other.abs() + double[:, 1].abs() @ v.abs())
        asymmetry = max(float((crossed[0] - crossed[1]).abs()) - self.negligible, 0.0) / size if size > 0 else 0.0
        at, step = partial(self._gradient_near, number), self.steps[number]
        differences, rounding, bend = difference(at, self.plain[0], step)
        closer, more_rounding, bent = difference(at, self.plain[0], step / 32)
        moved = 2 * (differences - closer).abs()  # on a kink, or where the curvature vanishes, the step matters
        uncertainty = self.negligible / self.units + rounding.max() + more_rounding.max() + bend + bent + moved
        return max(asymmetry, *(_relative_gap(HV[:, 0], differences, uncertainty) for HV in (single, double)))

    def _differences(self, number: int, mask: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the slope of each loss by differences, (n,), and its uncertainty, (n,): rounding, and bends on kinks.

        A jump is no excuse for a wrong slope.
        """
        v, step = mask * self.directions[number], self.steps[number]
        at = lambda t: self.losses.values(self.theta + t * v)  # noqa: E731
        slope, rounding, bend = difference(at, self.here, step)
        closer, _, bent = difference(at, self.here, step / 32)
        change, near = step * (slope.abs() + 0.5 * bend), step / 32 * (closer.abs() + 0.5 * bent)  # to the steeper side
        jumps = (change > _LEAP * torch.maximum(self.here.abs(), change)) & (near > 0.5 * change)  # of any step alike
        return slope, torch.where(jumps, rounding, rounding + bend)

    def _gradient_near(self, number: int, step: float) -> Tensor:
        """Return the plain gradient after a step along a direction, (d,)."""
        return self._gradients(self.theta + step * self.directions[number], self.weights[:1])[1][0]

    def _gradients(self, theta: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return ℓ(θ), and Σᵢ wᵢ∇ℓᵢ(θ) for each row w of weights, by plain backward passes."""
        with torch.enable_grad():
            leaf = theta.detach().clone().requires_grad_()
            losses = self.losses(leaf)
            rows = [None] * len(weights)
            if losses.requires_grad:
                rows = [torch.autograd.grad(losses, leaf, w, retain_graph=True, allow_unused=True)[0] for w in weights]
        return losses.detach(), torch.stack([torch.zeros_like(theta) if g is None else g.detach() for g in rows])


def _relative_gap(values: Tensor, expected: Tensor, uncertainty: Tensor | float = 0.0) -> float:
    """Return the largest difference beyond the uncertainty, relative to the largest entry."""
    return _largest_ratio((values - expected).abs() - uncertainty, torch.maximum(values.abs(), expected.abs()).max())


def _largest_ratio(excess: Tensor, size: Tensor) -> float:
    """Return the largest excess / size, at least 0; entries that are not finite count as 0."""
    ratio = torch.where(size > 0, excess / size, 0.0)
    return float(ratio.nan_to_num(0.0, 0.0, 0.0).max().clamp(min=0.0))


def _wrong_derivative_error(what: str, gap: float) -> InvalidInputError:
    return InvalidInputError(
        f"The {what} differs from finite differences by {gap:.2g} of its size.",
        "The relative difference must be below 1e-4 in float64 and 2e-2 in float32.",
        "What torch returns is not the derivative, so neither a solution nor an influence can rest on it.",
        "Look for .detach(), torch.no_grad(), in-place renormalisation (max_norm), rows that get no gradient "
        "(padding_idx), a custom backward, or a step (>, sign, round) in the loss. Pass constants as data, use smooth "
        "steps (sigmoid), and rewrite operators whose second derivative is wrong in torch (weight_norm).",
    )


# The values of losses and functions

_PROBE_SAMPLES = 64  # largest number of samples that are evaluated in a check


def probe(
    every_samples: Sequence[Samples], functions: Sequence[Function], parameters: Parameters, theta: Tensor
) -> None:
    """Refuse losses and functions whose values or derivatives at θ are invalid; the random state is preserved."""
    if torch.is_inference_mode_enabled():
        raise InvalidInputError(
            "torch.inference_mode() must be off: nothing can be differentiated inside it; torch.no_grad() does no harm."
        )
    devices = [parameters.device] if parameters.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for samples in every_samples:
            check_tensors(samples, parameters)
            with convert_errors(f"loss of Samples {samples.name!r}"):
                _check_losses(samples, parameters, theta)
                new = not samples.compared[len(theta)]
                check_derivatives(samples, parameters, theta)
                if new:
                    _warn_of_constants(samples, parameters, theta)
        for f in functions:
            if f.matrix is None and f.ridge is None:  # written by the user
                with convert_errors(f"function {f.name!r}"):
                    _check_function(f, parameters, theta)


def _shift(theta: Tensor, share: float, least: float = 0.0) -> Tensor:
    """Move every coordinate by a share of its size + `least`, with alternating signs."""
    signs = 1 - 2 * (torch.arange(len(theta), dtype=theta.dtype, device=theta.device) % 2)
    return theta + share * (least + theta.abs()) * signs


def _check_function(f: Function, parameters: Parameters, theta: Tensor) -> None:
    """Refuse a function that is not finite, random, or whose derivatives are wrong."""
    value = evaluate_function(f, parameters, theta)
    if not bool(torch.isfinite(value).all()):
        raise InvalidInputError(
            f"The function {f.name!r} must be finite where the work starts, but returned "
            f"{value.reshape(-1)[:4].tolist()}."
        )
    for at in (theta, _shift(theta, 1e-3, 1.0)):
        _evaluate_twice(f"function {f.name!r}", partial(evaluate_function, f, parameters, at))
    compiled = CompiledFunction.of(f, parameters, theta, value.numel())
    _Check(compiled, theta).check_all(f"function {f.name!r}", parameters)


def _evaluate_twice(what: str, evaluate: Callable[[], Tensor]) -> Tensor:
    """Return the values of a loss or function; refuse them if a second call returns others."""
    first, second = evaluate(), evaluate()
    if not torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)):
        raise InvalidInputError(
            f"Two calls of the {what} returned values that differ by up to {float((first - second).abs().max()):.3g}.",
            "They must return the same values.",
            "It is random (dropout, augmentation, sampling), so there is no solution to differentiate.",
            "Switch the randomness off: model.eval(), no augmentation, no sampling.",
        )
    return first


def check_used(
    every_samples: Sequence[Samples], functions: Sequence[Function], parameters: Parameters, theta: Tensor
) -> None:
    """Refuse parameters that no loss and no function other than a ridge depends on."""
    evaluations: list[Any] = [(f.fn, ()) for f in functions if f.ridge is None]
    for samples in every_samples:
        _, batch = next(samples.batches(torch.arange(min(_PROBE_SAMPLES, len(samples))), device=theta.device))
        evaluations.append((samples.loss, (batch,)))
    unused = set(parameters.names)
    for evaluate, data in evaluations:
        with torch.enable_grad():
            leaves = {n: t.detach().clone().requires_grad_() for n, t in parameters.tensors(theta).items()}
            out = evaluate(parameters.bind(leaves), *data).sum()
            if out.requires_grad:
                gradients = torch.autograd.grad(out, list(leaves.values()), allow_unused=True)
                unused -= {name for name, g in zip(leaves, gradients, strict=True) if g is not None}
    if unused:
        names = ", ".join(name for name in parameters.names if name in unused)
        raise InvalidInputError(
            f"No loss and no function other than a ridge depends on these parameters: {names}. Leave them out of "
            "params, set requires_grad=False, or use them in a loss that does not detach them."
        )


def check_tensors(samples: Samples, parameters: Parameters) -> None:
    """Refuse data of another type than the parameters, or on an accelerator other than theirs."""
    for t in samples.storage.tensors():
        wrong_type = t.is_floating_point() and t.dtype != parameters.dtype
        if wrong_type or t.device not in (parameters.device, torch.device("cpu")):
            raise InvalidInputError(
                f"The data of Samples {samples.name!r} must be {parameters.dtype} on {parameters.device}, like the "
                f"parameters, not {t.dtype} on {t.device}; convert one of them with .to(dtype=..., device=...)."
            )


def _check_losses(samples: Samples, parameters: Parameters, theta: Tensor) -> None:
    """Refuse losses that are not finite, random, of another type than the parameters, or depend on other samples."""
    name, spread, eps = samples.name, _spread(samples, _PROBE_SAMPLES), torch.finfo(parameters.dtype).eps
    for at in (theta, _shift(theta, 1e-3, 1.0)):  # randomness may hide at θ = 0
        together = _evaluate_twice(f"loss of Samples {name!r}", partial(sample_losses, samples, parameters, at, spread))
        if together.dtype != parameters.dtype:
            raise wrong_type_error(f"The loss of Samples {name!r}", together, parameters.dtype)
        apart = together.clone()
        for subset in (slice(0, None, 2), slice(1, None, 2), slice(0, 1), slice(1, 2)):
            if len(spread[subset]):
                apart[subset] = sample_losses(samples, parameters, at, spread[subset])
        shifted = sample_losses(samples, parameters, _shift(at, 16 * eps), spread)  # effect of rounding
        gap = ((together - apart).abs() - 4 * (shifted - together).abs()) / (1.0 + apart.abs())
        allowed = eps**0.5
        if bool((gap > allowed).any()):
            raise InvalidInputError(
                f"The loss of a sample of {name!r} changes by {float(gap.max()):.3g} of its size when its batch has "
                "other samples.",
                f"The relative change must be at most {allowed:.1g}.",
                "The loss of a sample depends on the other samples of its batch (batch statistics, contrastive "
                "losses, a mean inside), so removing one is not a change of weights.",
                "Use a loss that treats each sample by itself.",
            )
    losses = sample_losses(samples, parameters, theta)
    bad = torch.nonzero(~torch.isfinite(losses)).reshape(-1)
    if len(bad):
        raise InvalidInputError(
            f"The loss of Samples {name!r} is NaN or infinite for {len(bad)} of {len(losses)} samples "
            f"({bad[:8].tolist()}); use numerically safe losses (log_softmax, logsigmoid), and start at a finite point."
        )


def _warn_of_constants(samples: Samples, parameters: Parameters, theta: Tensor) -> None:
    """Warn where the losses of a third of the samples, or more, have no slope at all, although they are not 0."""
    spread, generator = _spread(samples, _PROBE_SAMPLES), torch.Generator().manual_seed(0)
    v = torch.randn(len(theta), 1, generator=generator, dtype=torch.float64).to(theta)
    losses, slopes = sample_slopes(samples, parameters, theta, v, spread)
    constant = int(((slopes[:, 0] == 0) & (losses != 0)).sum())
    if len(spread) <= 3 * constant < 3 * len(spread):
        warn(
            f"The loss of {constant} of {len(spread)} samples of {samples.name!r} is not 0, but does not depend on "
            "the parameters. Labels 0 and 1 do this in a loss that takes −1 and 1: pass 2·y − 1.",
            UserWarning,
        )


# Kinks

_LINES = 2  # random lines through the point along which losses are evaluated
_POINTS = 33  # evaluation points per line
_SAMPLES = 512  # largest number of samples that are evaluated
_CANDIDATES = 4  # sharpest bends per line that are examined closely
_JUMP = 0.02  # change over a tiny interval that makes a kink or jump, relative to the range along the line

# Operators whose derivative or value jumps somewhere.
_PIECEWISE = {
    "abs", "amax", "amin", "argmax", "argmin", "ceil", "clamp", "clamp_max", "clamp_min", "eq", "floor", "ge", "gt",
    "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "heaviside", "le", "leaky_relu", "lt", "max", "maximum",
    "max_pool2d_with_indices", "median", "min", "minimum", "ne", "relu", "rrelu_with_noise", "round", "sign",
    "softshrink", "sort", "threshold", "topk", "trunc", "where", "_prelu_kernel",
}  # fmt: skip


@dataclass(frozen=True)
class Kink:
    """A kink (the slope jumps) or a jump (the value jumps) of a loss or function near a point."""

    where: str  # description of the loss or function
    jumps: bool  # the value jumps, not only the slope
    operators: tuple[str, ...]  # operators that may cause it

    def __str__(self) -> str:
        verb = "jumps" if self.jumps else "has a kink"
        operators = f" ({', '.join(self.operators)})" if self.operators else ""
        return f"{self.where} {verb}{operators}"


def explain(kinks: Sequence[Kink]) -> str:
    """Describe why these kinks may have prevented convergence, and what to do."""
    named = "; ".join(map(str, kinks))
    return (
        f"{named[0].upper()}{named[1:]}: minima tend to lie on kinks, where no gradient can vanish, and polishing does "
        "not help. Use a smooth loss or activation (softplus, GELU, tanh, a smoothed absolute value) and fit again."
    )


def find_kinks(rows: Rows, theta: Tensor) -> tuple[Kink, ...]:
    """Return at most one kink or jump near θ for each Samples and each function of the rows.

    Losses and functions are evaluated in double precision along random lines through θ, all points together. Around the
    sharpest bends the interval is bisected: for a smooth loss the change of slope shrinks with the interval, at a kink
    it does not. A loss that is searched again at the same θ is not evaluated again.
    """
    theta, kinks = theta.double(), []
    try:
        double = rows.to(torch.float64)
        searched = [(old.samples, new.samples) for old, new in zip(rows.tables, double.tables, strict=True)]
        for owner, losses in searched + [(f.function, f) for f in double.functions if f.is_nonlinear]:
            where = (getattr(owner, "storage", None), rows.parameters.module)
            known = owner.kinks.get(len(theta), ((), theta, None))
            if known[0] != where or not known[1].equal(theta):
                known = owner.kinks[len(theta)] = where, theta, _search(losses, double.parameters, theta)
            kinks.append(known[2])
    except (RuntimeError, InvalidInputError):  # a loss that cannot run in double precision
        return ()
    return tuple(kink for kink in kinks if kink is not None)


def _search(searched: Samples | CompiledFunction, parameters: Parameters, theta: Tensor) -> Kink | None:
    """Return a kink or jump near θ of the losses of some samples, or of the outputs of a function; None without one."""
    if isinstance(searched, Samples):
        what, spread = f"the loss of {searched.name}", _spread(searched, _SAMPLES)
    else:
        what, spread = f"the function {searched.function.name}", torch.arange(searched.size)

    def evaluate(thetas: Tensor, which: Tensor) -> Tensor:
        """Return the values of given numbers (k,) at several θ (P, d), (P, k)."""
        if isinstance(searched, Samples):
            return stacked_losses(searched.take(spread[which]), parameters, thetas)
        return searched.evaluate_at(thetas)[0][:, which.to(thetas.device)]

    generator, d = torch.Generator().manual_seed(0), theta.numel()
    size = 0.5 * max(0.1, float(theta.square().mean().sqrt()))
    V = torch.stack([size * torch.randn(d, generator=generator, dtype=torch.float64) for _ in range(_LINES)]).to(theta)
    at_once = max(1, numbers_at_once(theta) // d)

    def along(t: Tensor, number: Tensor, which: Tensor) -> Tensor:
        """Return values at θ + t·v for each t and number of a line, (len(t), k)."""
        pairs = zip(t.to(V).split(at_once), number.to(V.device).split(at_once), strict=True)
        return torch.cat([evaluate(theta + a[:, None] * V[b], which).double().cpu() for a, b in pairs])

    grid = torch.linspace(-1, 1, _POINTS, dtype=torch.float64)
    numbers = torch.arange(_LINES).repeat_interleave(_POINTS)
    lines = along(grid.repeat(_LINES), numbers, torch.arange(len(spread))).reshape(_LINES, _POINTS, -1)
    bends = [(number, k, i) for number, line in enumerate(lines) for k, i in _sharpest_bends(line)]
    if not bends:
        return None
    number, k, i = torch.tensor(bends).T

    def values(t: Tensor) -> Tensor:
        """Return the value of each bend at its own points, (points, bends)."""
        found = along(t.reshape(-1), number.repeat(len(t)), i).reshape(*t.shape, len(i))
        return found.diagonal(dim1=1, dim2=2)

    jumps, bent = _classify_bends(values, grid[k], grid[k + 2], lines[number, :, i])
    found = torch.nonzero(jumps | bent).reshape(-1)
    if len(found) == 0:
        return None
    first = i[found[:1]]
    with torch.no_grad(), OperationCounter() as counter:
        evaluate(theta[None], first)
    operators = tuple(name for name in counter.names if name in _PIECEWISE)
    where = f"{what}[{int(spread[first])}]" if isinstance(searched, Samples) else what
    return Kink(where, bool(jumps[found[0]]), operators)


def _sharpest_bends(values: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (point, sample) of the sharpest bends, relative to the range of the sample's slopes along the line."""
    slopes = values.diff(dim=0)
    bends = slopes.diff(dim=0).abs()  # (points − 2, n)
    rounding = torch.finfo(values.dtype).eps ** 0.5 * float(values.abs().max())
    scale = (slopes.amax(0) - slopes.amin(0)).clamp(min=max(rounding, torch.finfo(values.dtype).tiny))
    sharpness = torch.nan_to_num((bends - bends.median(0).values) / scale, nan=0.0, posinf=0.0)
    sharpest = sharpness.max(0)
    order = torch.argsort(sharpest.values, descending=True)[:_CANDIDATES].tolist()
    return ((int(sharpest.indices[i]), i) for i in order if sharpest.values[i] > 0)


def _classify_bends(
    values: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, lines: Tensor
) -> tuple[Tensor, Tensor]:
    """Return whether the value jumps, and whether the slope does, between two points of a line, (B,) bool for B bends.

    Of each interval, the half with the sharpest bend is kept; `lines` (B, points) has the values along the whole lines.
    """
    eps = torch.finfo(torch.float64).eps
    h = eps**0.44  # 1e-7
    while float((high - low).max()) > 16 * h:
        quarter = 0.25 * (high - low)
        f = values(torch.stack([low + k * quarter for k in range(5)]))
        low = low + quarter * (f[:3] - 2 * f[1:4] + f[2:]).abs().argmax(0)
        high = low + 2 * quarter
    ends = values(torch.stack([low - h, low + h, high - h, high + h]))
    left, right = (ends[1] - ends[0]) / (2 * h), (ends[3] - ends[2]) / (2 * h)
    slopes = lines.diff(dim=1) * (lines.shape[1] - 1) / 2
    every_slope = torch.cat([slopes, left[:, None], right[:, None]], 1)  # an exponential is steep at once
    value_range, slope_range = (x.amax(1) - x.amin(1) for x in (lines, every_slope))
    noise = eps * lines.abs().amax(1)  # rounding error of one value
    smooth_change = 2 * slopes.abs().amax(1) * (high - low + 2 * h)  # without a jump
    jumps = (ends[3] - ends[0]).abs() > torch.stack([_JUMP * value_range, 1e3 * noise, smooth_change]).amax(0)
    return jumps, (right - left).abs() > torch.maximum(_JUMP * slope_range, 10 * noise / h)
