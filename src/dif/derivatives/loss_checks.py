"""Checks that torch differentiates a loss correctly, by every method that dif uses.

A plain backward pass is compared with finite differences of the loss, and every other method with the plain backward
pass. A method that is wrong is added to `Samples.fallbacks`, so that another one replaces it. A loss that no method
differentiates correctly is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from dif.derivatives.batch_losses import BatchLosses
from dif.derivatives.sweeps import (
    NO_FORWARD,
    NO_MAP,
    NO_VMAP,
    batch_gradients,
    hessian_products,
    pull_back,
    push_forward,
    sample_losses,
    sample_slopes,
    stacked_pullback,
)
from dif.errors import DifError, InvalidInputError, few
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import NO_SECOND_BACKWARD, PLAIN_ATTENTION, SampleLosses
from dif.runtime.user_code import is_unsupported

_PROBE_SAMPLES = 10  # samples on which methods are compared; torch may use other kernels for large batches
_GROUPS = 8  # groups of tensors with gradients of similar size, so that large gradients do not hide a small wrong one
_LEAP = 1e-2  # relative change of a loss within a tiny step that suggests a jump
_TRIES = 3  # directions and steps that are tried: a kink spoils one of them, a wrong derivative spoils all


def check_derivatives(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> None:
    """Check every method of differentiating a loss at θ on a few samples; note fallbacks or refuse the loss."""
    try:
        _check_methods(samples, parameters, theta)
    except DifError as error:
        if "scaled_dot_product" not in str(error) or PLAIN_ATTENTION in samples.fallbacks:
            raise
        samples.fallbacks.clear()
        samples.fallbacks.add(PLAIN_ATTENTION)
        _check_methods(samples, parameters, theta)


def _check_methods(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> None:
    """Check every method on samples spread over the data."""
    index = torch.linspace(0, len(samples) - 1, min(_PROBE_SAMPLES, len(samples))).round().long().unique()
    place, batch = next(samples.batches(index, device=theta.device))
    count = place.stop - place.start
    check = _Check(BatchLosses(samples, parameters, batch, count), theta, count, samples.fallbacks)
    what = f"loss of Samples {samples.name!r}"
    check.check_gradient(what, parameters)
    check.replace_if_wrong(NO_MAP, lambda _: check.sample_gap(batch_gradients(samples, parameters, theta, batch)))
    check.check_other_methods(what)


def check_function(
    name: str, values: Callable[[Tensor], Tensor], parameters: Parameters, theta: Tensor, fallbacks: set[str]
) -> None:
    """Check every method of differentiating a function θ → rows at θ; note fallbacks or refuse the function."""
    check = _Check(values, theta, len(values(theta)), fallbacks)
    check.check_gradient(f"function {name!r}", parameters)
    check.check_other_methods(f"function {name!r}")


def check_slopes(samples: SampleLosses, parameters: Parameters, theta: Tensor, v: Tensor) -> None:
    """Compare the slope of every sample's loss along v with finite differences; refuse the first wrong one."""
    eps = torch.finfo(theta.dtype).eps
    step, allowed = eps ** (1 / 3), eps**0.25
    here, slopes = sample_slopes(samples, parameters, theta, v[:, None])

    def differences(step: float, index: Tensor | None, here: Tensor) -> tuple[Tensor, Tensor]:
        """Return central differences and their uncertainty."""
        before, after = (sample_losses(samples, parameters, theta + s * step * v, index) for s in (-1, 1))
        noise = 8 * eps / step * (before.abs() + after.abs())
        return (after - before) / (2 * step), noise + (before - 2 * here + after).abs() / step

    slope = slopes[:, 0]
    expected, uncertainty = differences(step, None, here)
    excess = (slope - expected).abs() - uncertainty
    index = torch.nonzero(excess > allowed * torch.maximum(slope.abs(), expected.abs())).reshape(-1).cpu()
    if len(index) == 0:
        return
    slope, expected, here = slope[index], expected[index], here[index]
    second, uncertainty = differences(16 * step, index, here)  # a rounding error would change with the step
    wrong = (slope - second).abs() > uncertainty + 4 * (expected - second).abs() + allowed * torch.maximum(
        slope.abs(), second.abs()
    )
    if bool(wrong.any()):
        k = int(wrong.nonzero()[0])
        gap = abs(float((slope[k] - second[k]) / second[k]))
        raise _wrong_derivative_error(f"gradient of the loss of {samples.name}[{int(index[k])}]", gap)


class _Check:
    """Losses θ → (n,) at one θ, and the relative error of each method of differentiating them along a direction."""

    def __init__(self, losses: Callable[[Tensor], Tensor], theta: Tensor, count: int, fallbacks: set[str]) -> None:
        self.losses, self.theta, self.fallbacks = losses, theta, fallbacks
        eps = torch.finfo(theta.dtype).eps
        self.allowed = eps**0.25  # 1e-4 in float64
        ratio = 32 if theta.dtype == torch.float64 else 4  # in float32, rounding hides the curvature in shorter steps
        self.steps = [eps ** (1 / 3) / ratio**number for number in range(_TRIES)]  # from 6e-6 in float64
        self.noises = [eps / step for step in self.steps]  # rounding error of a difference, relative to the values
        self.smallest_gap = 0.0  # of the last method that was found wrong
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(theta)  # noqa: E731
        self.weights = draw(_TRIES, count)
        self.here, self.plain = self._gradients(theta, self.weights)  # (n,), (tries, d)
        steepness = self.plain.square().mean(0).sqrt()
        size = self.here.abs().mean()  # along a direction, losses change by about their own size
        units = torch.where(steepness > 0, size / steepness.clamp(min=torch.finfo(theta.dtype).tiny), float("inf"))
        units = torch.nan_to_num(units.clamp(1e-4, 1.0), nan=1.0) * (1 + theta.abs())
        self.directions = units * draw(_TRIES, theta.numel())
        self.negligible = eps**0.5 * float(self.weights[0].abs() @ self.here.abs())  # change of the weighted losses
        self.units = units
        self.differences, self.gradient_near = cache(self._differences), cache(self._gradient_near)

    def check_gradient(self, what: str, parameters: Parameters) -> None:
        """Refuse a loss whose plain gradient is wrong, in all parameters together or in a group of tensors."""
        groups = self._groups(parameters)
        for names, mask in {"all of them": torch.ones_like(self.theta), **groups}.items():
            if not self._agrees(partial(self.gradient_gap, mask)):
                suffix = f" in {names}" if names in groups else ""
                raise _wrong_derivative_error(f"gradient of the {what}{suffix}", self.smallest_gap)

    def _groups(self, parameters: Parameters) -> dict[str, Tensor]:
        """Group tensors by the size of their gradients: names of the group → mask of its coordinates (0 or 1), (d,)."""
        steepness = [float(g.abs().max()) for g in torch.split(self.plain[0], list(parameters.sizes))]
        order = sorted(range(len(steepness)), key=lambda k: steepness[k])
        length = -(-len(order) // _GROUPS)
        groups: dict[str, Tensor] = {}
        for start in range(0, len(order), length) if len(order) > 1 else ():
            group = order[start : start + length]
            masks = [torch.full((size,), float(k in group)) for k, size in enumerate(parameters.sizes)]
            groups[few([parameters.names[k] for k in group])] = torch.cat(masks).to(self.theta)
        return groups

    def check_other_methods(self, what: str) -> None:
        """Replace the methods that are wrong, and refuse a loss whose second derivative no method gives."""
        vmapped = self.replace_if_wrong(NO_VMAP, self.vmap_gap)
        self.replace_if_wrong(NO_FORWARD, self.slope_gap)
        curved = self.replace_if_wrong(NO_SECOND_BACKWARD, self.curvature_gap)
        if curved and self.replace_if_wrong(NO_VMAP, self.curvature_gap):
            vmapped = True
        for gap in (self.vmap_gap,) * vmapped + (self.curvature_gap,) * curved:
            try:
                agrees = self._agrees(gap)
            except Exception as error:
                if not is_unsupported(error) or self.smallest_gap <= self.allowed:
                    raise
                agrees = False  # one method was found wrong, and torch does not have the other
            if not agrees:
                raise _wrong_derivative_error(f"second derivative of the {what}", self.smallest_gap)

    def replace_if_wrong(self, fallback: str, gap: Callable[[int], float]) -> bool:
        """Add the fallback if a method is wrong or unsupported by torch; return whether it was added."""
        try:
            wrong = not self._agrees(gap)
        except Exception as error:
            if not is_unsupported(error):
                raise
            wrong = True
        if wrong:
            self.fallbacks.add(fallback)
        return wrong

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
        W = self.weights
        differences, uncertainty = self.differences(number) if bool(mask.all()) else self._differences(number, mask)
        excess = (W @ differences - self.plain @ (mask * self.directions[number])).abs() - W.abs() @ uncertainty
        return _largest_ratio(excess, W.abs() @ differences.abs())

    def vmap_gap(self, number: int) -> float:
        """Compare gradients by vmap, over several weights and over several θ, with plain ones."""
        pulled = pull_back(self.losses, self.theta, self.weights, None, self.fallbacks)[1]
        thetas = torch.stack([self.theta, self.theta + self.steps[number] * self.directions[number]])
        expected = torch.stack([self.plain[0], self.gradient_near(number, 1)])
        W, ones = self.weights[0].expand(2, 1, -1), torch.ones_like(thetas[:, :1])
        stacked = stacked_pullback(self.losses, thetas, W, ones, 1 if NO_VMAP in self.fallbacks else 2)[1]
        return max(_relative_gap(pulled, self.plain), _relative_gap(stacked, expected))

    def slope_gap(self, number: int) -> float:
        """Compare slopes by forward mode, for one column and for two, with differences of the losses."""
        differences, uncertainty = self.differences(number)
        slopes = [push_forward(self.losses, self.theta, V, None, self.fallbacks)[1] for V in self._columns(number)]
        return max(_relative_gap(slope[:, 0], differences, uncertainty) for slope in slopes)

    def _columns(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a direction as one column, (d, 1), and the same with the next one beside it, (d, 2)."""
        both = self.directions[[number, (number + 1) % _TRIES]].T
        return both[:, :1], both

    def sample_gap(self, gradients: Tensor) -> float:
        """Compare per-sample gradients, (n, d), with a plain gradient."""
        return _relative_gap(self.weights[0] @ gradients, self.plain[0])

    def curvature_gap(self, number: int) -> float:
        """Compare Hessian-vector products, for one column and for two, with differences of the plain gradient."""
        columns = self._columns(number)
        v, other = columns[1].T
        scalar = lambda t: self.losses(t) @ self.weights[0]  # noqa: E731
        single, double = (hessian_products(scalar, self.theta, V, None, self.fallbacks) for V in columns)
        crossed = torch.stack([double[:, 0] @ other, double[:, 1] @ v])  # equal for a symmetric matrix
        size = float(double[:, 0].abs() @ other.abs() + double[:, 1].abs() @ v.abs())
        asymmetry = max(float((crossed[0] - crossed[1]).abs()) - self.negligible, 0.0) / size if size > 0 else 0.0
        differences, rounding = self._gradient_differences(number, 1)
        uncertainty = self.negligible / self.units + rounding
        gap = max(_relative_gap(HV[:, 0], differences, uncertainty) for HV in (single, double))
        if gap > self.allowed:  # on a kink, or where the curvature vanishes, differences depend on the step
            closer, rounding = self._gradient_differences(number, 32)
            uncertainty = uncertainty + rounding + 2 * (differences - closer).abs()
            gap = max(_relative_gap(HV[:, 0], differences, uncertainty) for HV in (single, double))
        return max(gap, asymmetry)

    def _differences(self, number: int, mask: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the slope of each loss by central differences, (n,), and its uncertainty, (n,).

        The uncertainty is rounding and, on a kink, the difference between the slopes of its two sides.
        """
        v, step = mask * self.directions[number], self.steps[number]

        def evaluate(step: float) -> tuple[Tensor, Tensor, Tensor]:
            """Return the losses one step before and after θ, and the larger change of each."""
            with torch.no_grad():
                before, after = (self.losses(self.theta + sign * step * v) for sign in (-1, 1))
            return before, after, torch.maximum((before - self.here).abs(), (after - self.here).abs())

        before, after, change = evaluate(step)
        rounding, bend = self.noises[number] * after.abs(), (before - 2 * self.here + after).abs() / step
        jumps = change > _LEAP * torch.maximum(self.here.abs(), change)
        if bool(jumps.any()):  # a real jump has the same size at a smaller step
            jumps &= evaluate(step / 32)[2] > 0.5 * change
        return (after - before) / (2 * step), torch.where(jumps, rounding, rounding + bend)

    def _gradient_differences(self, number: int, shorter: float) -> tuple[Tensor, Tensor]:
        """Return the derivative of the gradient along a direction by central differences, (d,), and its uncertainty.

        The step is divided by `shorter`.
        """
        before, after = (self.gradient_near(number, sign / shorter) for sign in (-1, 1))
        step = self.steps[number] / shorter
        rounding = shorter * self.noises[number] * after.abs().max()
        return (after - before) / (2 * step), rounding + (before - 2 * self.plain[0] + after).abs() / step

    def _gradient_near(self, number: int, share: float) -> Tensor:
        """Return the plain gradient at a share of a step along a direction, (d,)."""
        near = self.theta + share * self.steps[number] * self.directions[number]
        return self._gradients(near, self.weights[:1])[1][0]

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
