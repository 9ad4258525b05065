"""Whether what torch returns as derivatives of a loss are its derivatives: each way of differentiating is compared.

The plain gradient is compared with differences of the loss, and everything else with the plain gradient. A way that is
wrong is noted in `Samples.fallbacks`, so that another one is taken; where none is right the loss is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from dif.errors import DifError, InvalidInputError, few
from dif.evaluation.sweeps import (
    NO_FORWARD,
    NO_FORWARD_OVER_REVERSE,
    NO_MAP,
    NO_VMAP,
    batch_gradients,
    batch_loss,
    hessian_products,
    pulled_back,
    pushed_forward,
    sample_losses,
    sample_slopes,
    stacked_pullback,
)
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import PLAIN_ATTENTION, SampleLosses
from dif.runtime.user_code import unsupported

_FEW = 10  # samples on which the ways are compared: torch takes other kernels for small batches than for large ones
_GROUPS = 8  # of tensors with gradients of similar size: what is wrong with a small one is not hidden by a large one
_LEAP = 1e-2  # of a loss: what it cannot change by within a tiny step, unless it is about to vanish
_TRIES = 3  # directions and steps: a kink between two evaluations spoils one, a wrong derivative all of them


def check_derivatives(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> None:
    """Compare every way of differentiating a loss at θ, on a few samples; note or refuse what is wrong."""
    try:
        _compare(samples, parameters, theta)
    except DifError as error:
        if "scaled_dot_product" not in str(error) or PLAIN_ATTENTION in samples.fallbacks:
            raise
        samples.fallbacks.clear()
        samples.fallbacks.add(PLAIN_ATTENTION)
        _compare(samples, parameters, theta)


def _compare(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> None:
    index = torch.linspace(0, len(samples) - 1, min(_FEW, len(samples))).round().long().unique()
    place, batch = next(samples.batches(index, device=theta.device))
    count = place.stop - place.start
    check = _Check(batch_loss(samples, parameters, batch, count), theta, count, samples.fallbacks)
    what = f"loss of Samples {samples.name!r}"
    check.gradient(what, parameters)
    check.replaced(NO_MAP, check.each_gap(lambda: batch_gradients(samples, parameters, theta, batch)))
    check.ways(what)


def check_function(name: str, values: Callable[[Tensor], Tensor], parameters: Parameters, theta: Tensor) -> None:
    """The same for a function θ → its rows."""
    check = _Check(values, theta, len(values(theta)), set())
    check.gradient(f"function {name!r}", parameters)
    check.ways(f"function {name!r}")


def check_slopes(samples: SampleLosses, parameters: Parameters, theta: Tensor, v: Tensor) -> None:
    """Compare the slope of every sample's loss along a direction with differences; refuse the first that is none."""
    eps = torch.finfo(theta.dtype).eps
    step, allowed = eps ** (1 / 3), eps**0.25
    here, slopes = sample_slopes(samples, parameters, theta, v[:, None])

    def differences(step: float, index: Tensor | None, here: Tensor) -> tuple[Tensor, Tensor]:
        before, after = (sample_losses(samples, parameters, theta + s * step * v, index) for s in (-1, 1))
        noise = 8 * eps / step * (before.abs() + after.abs())
        return (after - before) / (2 * step), noise + (before - 2 * here + after).abs() / step

    slope = slopes[:, 0]
    found, doubt = differences(step, None, here)
    off = (slope - found).abs() - doubt
    index = torch.nonzero(off > allowed * torch.maximum(slope.abs(), found.abs())).reshape(-1).cpu()
    if len(index) == 0:
        return
    slope, found, here = slope[index], found[index], here[index]
    again, doubt = differences(16 * step, index, here)  # rounding would be another one
    wrong = (slope - again).abs() > doubt + 4 * (found - again).abs() + allowed * torch.maximum(
        slope.abs(), again.abs()
    )
    if bool(wrong.any()):
        k = int(wrong.nonzero()[0])
        raise _refused(
            f"gradient of the loss of {samples.name}[{int(index[k])}]", abs(float((slope[k] - again[k]) / again[k]))
        )


class _Check:
    """Losses θ → (n,) at one θ: how far each way of differentiating them is off, relative, along a direction."""

    def __init__(self, losses: Callable[[Tensor], Tensor], theta: Tensor, count: int, fallbacks: set[str]) -> None:
        self.losses, self.theta, self.fallbacks = losses, theta, fallbacks
        eps = torch.finfo(theta.dtype).eps
        self.allowed = eps**0.25  # 1e-4 in float64
        self.steps = [eps ** (1 / 3) / 32**number for number in range(_TRIES)]  # from 6e-6 in float64
        self.noises = [eps / step for step in self.steps]  # of a difference, times the size of what is differenced
        self.worst = 0.0
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(theta)  # noqa: E731
        self.weights = draw(_TRIES, count)
        self.here, self.plain = self._gradients(theta, self.weights)  # (n,), (tries, d)
        steep = self.plain.square().mean(0).sqrt()
        size = self.here.abs().mean()  # along the direction, losses change by about their own size
        units = torch.where(steep > 0, size / steep.clamp(min=torch.finfo(theta.dtype).tiny), float("inf"))
        units = torch.nan_to_num(units.clamp(1e-4, 1.0), nan=1.0) * (1 + theta.abs())
        self.along = units * draw(_TRIES, theta.numel())
        self.little = eps**0.5 * float(self.weights[0].abs() @ self.here.abs())  # of a change of the losses
        self.units = units
        self.differences, self.gradient_beside = cache(self._differences), cache(self._gradient_beside)

    def gradient(self, what: str, parameters: Parameters) -> None:
        """Refuse a loss whose plain gradient is none, in all parameters together or in some of the tensors."""
        groups = self._groups(parameters)
        for names, mask in {"all of them": torch.ones_like(self.theta), **groups}.items():
            if not self._agrees(partial(self.gradient_gap, mask)):
                raise _refused(f"gradient of the {what}" + (f" in {names}" if names in groups else ""), self.worst)

    def _groups(self, parameters: Parameters) -> dict[str, Tensor]:
        """Tensors whose gradients have about the same size, by name: 1 in their coordinates, else 0, (d,)."""
        steep = [float(g.abs().max()) for g in torch.split(self.plain[0], list(parameters.sizes))]
        order = sorted(range(len(steep)), key=lambda k: steep[k])
        several = [order[k : k - (-len(order) // _GROUPS)] for k in range(0, len(order), -(-len(order) // _GROUPS))]
        groups: dict[str, Tensor] = {}
        for some in several if len(order) > 1 else ():
            parts = [torch.full((size,), float(k in some)) for k, size in enumerate(parameters.sizes)]
            groups[few([parameters.names[k] for k in some])] = torch.cat(parts).to(self.theta)
        return groups

    def ways(self, what: str) -> None:
        """Replace the ways that are wrong, and refuse a loss of which none is right."""
        mapped = self.replaced(NO_VMAP, self.mapped_gap)
        self.replaced(NO_FORWARD, self.slope_gap)
        curved = self.replaced(NO_FORWARD_OVER_REVERSE, self.curvature_gap)
        if curved and self.replaced(NO_VMAP, self.curvature_gap):
            mapped = True
        for gap in (self.mapped_gap,) * mapped + (self.curvature_gap,) * curved:
            if not self._agrees(gap):
                raise _refused(f"second derivative of the {what}", self.worst)

    def replaced(self, fallback: str, gap: Callable[[int], float]) -> bool:
        """Whether a way is wrong, or torch cannot go it; the one to take instead is noted."""
        try:
            wrong = not self._agrees(gap)
        except Exception as error:
            if not unsupported(error):
                raise
            wrong = True
        if wrong:
            self.fallbacks.add(fallback)
        return wrong

    def _agrees(self, gap: Callable[[int], float]) -> bool:
        """Whether the gap is small along one of the directions."""
        gaps: list[float] = []
        while len(gaps) < _TRIES:
            gaps.append(gap(len(gaps)))
            if gaps[-1] <= self.allowed:
                return True
        self.worst = min(gaps)
        return False

    def gradient_gap(self, mask: Tensor, number: int) -> float:
        """The plain gradient against differences of the losses, along some coordinates."""
        W = self.weights
        differences, doubt = self.differences(number) if bool(mask.all()) else self._differences(number, mask)
        off = (W @ differences - self.plain @ (mask * self.along[number])).abs() - W.abs() @ doubt
        return _largest(off, W.abs() @ differences.abs())

    def mapped_gap(self, number: int) -> float:
        """Gradients for several weights at once, and at several θ, against plain ones."""
        pulled = pulled_back(self.losses, self.theta, self.weights, None, self.fallbacks)[1].detach()
        thetas = torch.stack([self.theta, self.theta + self.steps[number] * self.along[number]])
        there = torch.stack([self.plain[0], self.gradient_beside(number, 1)])
        W, one = self.weights[0].expand(2, 1, -1), torch.ones_like(thetas[:, :1])
        stacked = stacked_pullback(self.losses, thetas, W, one, 1 if NO_VMAP in self.fallbacks else 2)[1]
        return max(_gap(pulled, self.plain), _gap(stacked, there))

    def slope_gap(self, number: int) -> float:
        """Slopes by forward mode, along one column and along two, against differences of the losses."""
        v, other = self.along[number], self.along[(number + 1) % _TRIES]
        differences, doubt = self.differences(number)
        slopes = [
            pushed_forward(self.losses, self.theta, V, None, self.fallbacks)[1][:, 0]
            for V in (v[:, None], torch.stack([v, other], 1))
        ]
        return max(_gap(one, differences, doubt) for one in slopes)

    def each_gap(self, each: Callable[[], Tensor]) -> Callable[[int], float]:
        """Gradients of each sample, mapped over samples, against a plain gradient."""
        return lambda number: _gap(self.weights[0] @ each(), self.plain[0])

    def curvature_gap(self, number: int) -> float:
        """Products with the Hessian, of one column and of two, against differences of the plain gradient."""
        v, other, w = self.along[number], self.along[(number + 1) % _TRIES], self.weights[0]
        scalar = lambda t: self.losses(t) @ w  # noqa: E731
        single, double = (
            hessian_products(scalar, self.theta, V, None, self.fallbacks)
            for V in (v[:, None], torch.stack([v, other], 1))
        )
        crossed = torch.stack([double[:, 0] @ other, double[:, 1] @ v])  # of a symmetric matrix, the same twice
        size = float(double[:, 0].abs() @ other.abs() + double[:, 1].abs() @ v.abs())
        uneven = max(float((crossed[0] - crossed[1]).abs()) - self.little, 0.0) / size if size > 0 else 0.0
        differences, rounding = self._bend(number, 1)
        doubt = self.little / self.units + rounding
        gap = max(_gap(one[:, 0], differences, doubt) for one in (single, double))
        if gap > self.allowed:  # on a kink, or where the curvature vanishes, differences depend on the step
            closer, rounding = self._bend(number, 32)
            doubt = doubt + rounding + 2 * (differences - closer).abs()
            gap = max(_gap(one[:, 0], differences, doubt) for one in (single, double))
        return max(gap, uneven)

    def _differences(self, number: int, mask: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """The slope of each loss by central differences, (n,), and how far they may be off, (n,).

        That is rounding, and on a kink how far the slopes of its two sides differ.
        """
        v, step = mask * self.along[number], self.steps[number]

        def beside(step: float) -> tuple[Tensor, Tensor, Tensor]:
            with torch.no_grad():
                before, after = (self.losses(self.theta + sign * step * v) for sign in (-1, 1))
            return before, after, torch.maximum((before - self.here).abs(), (after - self.here).abs())

        before, after, far = beside(step)
        rounding, bend = self.noises[number] * after.abs(), (before - 2 * self.here + after).abs() / step
        leaps = far > _LEAP * torch.maximum(self.here.abs(), far)
        if bool(leaps.any()):  # a value that jumps does so at any step
            leaps &= beside(step / 32)[2] > 0.5 * far
        return (after - before) / (2 * step), torch.where(leaps, rounding, rounding + bend)

    def _bend(self, number: int, shorter: float) -> tuple[Tensor, Tensor]:
        """The change of the gradient along a direction by central differences, (d,), and how far they may be off."""
        before, after = (self.gradient_beside(number, sign / shorter) for sign in (-1, 1))
        step = self.steps[number] / shorter
        rounding = shorter * self.noises[number] * after.abs().max()
        return (after - before) / (2 * step), rounding + (before - 2 * self.plain[0] + after).abs() / step

    def _gradient_beside(self, number: int, share: float) -> Tensor:
        """The plain gradient a share of a step along a direction, (d,)."""
        return self._gradients(self.theta + share * self.steps[number] * self.along[number], self.weights[:1])[1][0]

    def _gradients(self, theta: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """ℓ(θ), and Σᵢ wᵢ∇ℓᵢ(θ) for each row w of weights by a plain backward pass."""
        with torch.enable_grad():
            leaf = theta.detach().clone().requires_grad_()
            losses = self.losses(leaf)
            found = [None] * len(weights)
            if losses.requires_grad:
                found = [torch.autograd.grad(losses, leaf, w, retain_graph=True, allow_unused=True)[0] for w in weights]
        return losses.detach(), torch.stack([torch.zeros_like(theta) if g is None else g.detach() for g in found])


def _gap(found: Tensor, wanted: Tensor, doubt: Tensor | float = 0.0) -> float:
    """The largest difference beyond doubt, of the largest entry."""
    return _largest((found - wanted).abs() - doubt, torch.maximum(found.abs(), wanted.abs()).max())


def _largest(off: Tensor, size: Tensor) -> float:
    """The largest of some differences, relative; where nothing is finite there is nothing to compare."""
    share = torch.where(size > 0, off / size, 0.0)
    return float(share.nan_to_num(0.0, 0.0, 0.0).max().clamp(min=0.0))


def _refused(what: str, gap: float) -> InvalidInputError:
    return InvalidInputError(
        what,
        measured=f"{gap:.2g} of its size away from what differences of its values say",
        threshold="less than 1e-4 in float64, 2e-2 in float32",
        meaning="What torch returns is not the derivative, so neither a solution nor an influence can rest on it.",
        cure="Look for .detach(), torch.no_grad(), in-place renormalisation (max_norm), rows that get no gradient "
        "(padding_idx), a custom backward, or a step (>, sign, round) in the loss; pass what is meant to be constant "
        "in as data, use smooth steps (sigmoid), and write out what torch differentiates wrongly (weight_norm, twice).",
    )
