"""Whether what torch returns as derivatives of a loss are its derivatives: each way of differentiating is compared.

The plain gradient is compared with differences of the loss, and everything else with the plain gradient. A way that is
wrong is noted in `Samples.fallbacks`, so that another one is taken; where none is right the loss is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dif.derivatives import (
    NO_FORWARD,
    NO_FORWARD_OVER_REVERSE,
    NO_MAP,
    NO_VMAP,
    batch_gradients,
    batch_hessian_products,
    batch_loss,
    batch_pulled_back,
    pushed_forward,
    stacked_pullback,
)
from dif.errors import InvalidInputError
from dif.parameters import Parameters
from dif.samples import Samples

_FEW = 10  # samples on which the ways are compared: torch takes other kernels for small batches than for large ones
_TRIES = 3  # directions and steps: a kink between two evaluations spoils one, a wrong derivative all of them


def check_derivatives(samples: Samples, parameters: Parameters, theta: Tensor) -> None:
    """Compare every way of differentiating a loss at θ, on a few samples; note or refuse what is wrong."""
    index = torch.linspace(0, len(samples) - 1, min(_FEW, len(samples))).round().long().unique()
    place, batch = next(samples.batches(index, device=theta.device))
    check = _Check(samples, parameters, theta, batch, place.stop - place.start)
    if not check.agrees(check.gradient_gap):
        raise _refused(f"gradient of the loss of Samples {samples.name!r}", check.worst)
    ways: tuple[tuple[str, Callable[[int], float]], ...] = (
        (NO_VMAP, check.mapped_gap),
        (NO_FORWARD, check.slope_gap),
        (NO_MAP, check.each_gap),
        (NO_FORWARD_OVER_REVERSE, check.curvature_gap),
        (NO_VMAP, check.curvature_gap),
    )
    doubtful = False
    for fallback, gap in ways:
        try:
            right = check.agrees(gap)
        except (RuntimeError, NotImplementedError):  # torch cannot do it this way
            right = False
        if not right:
            samples.fallbacks.add(fallback)
            doubtful = True
    for gap in (check.mapped_gap, check.curvature_gap) if doubtful else ():
        if not check.agrees(gap):
            raise _refused(f"second derivative of the loss of Samples {samples.name!r}", check.worst)


class _Check:
    """One loss on one batch at one θ: how far each way of differentiating it is off, relative, along a direction."""

    def __init__(self, samples: Samples, parameters: Parameters, theta: Tensor, batch: object, count: int) -> None:
        self.samples, self.parameters, self.theta, self.batch, self.count = samples, parameters, theta, batch, count
        self.loss = batch_loss(samples, parameters, batch, count)
        eps = torch.finfo(theta.dtype).eps
        self.allowed = eps**0.2  # 7e-4 in float64
        self.steps = [eps ** (1 / 3) / 32**number for number in range(_TRIES)]  # from 6e-6 in float64
        self.noises = [eps / step for step in self.steps]  # of a difference, times the size of what is differenced
        self.worst = 0.0
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(theta)  # noqa: E731
        self.weights = draw(_TRIES, count)
        self.plain = torch.stack([self._gradient(theta, w) for w in self.weights])  # (tries, d)
        steep = self.plain.square().mean(0).sqrt()
        size = self._losses(theta).abs().mean()  # along the direction, losses change by about their own size
        units = torch.where(steep > 0, size / steep.clamp(min=torch.finfo(theta.dtype).tiny), float("inf"))
        self.along = (
            torch.nan_to_num(units.clamp(min=1e-4).minimum(torch.ones_like(units)), nan=1.0)
            * (1 + theta.abs())
            * draw(_TRIES, theta.numel())
        )

    def agrees(self, gap: Callable[[int], float]) -> bool:
        """Whether the gap is small along one of the directions."""
        gaps: list[float] = []
        while len(gaps) < _TRIES:
            gaps.append(gap(len(gaps)))
            if not gaps[-1] > self.allowed:  # where nothing is finite there is nothing to compare
                return True
        self.worst = min(gaps)
        return False

    def gradient_gap(self, number: int) -> float:
        """The plain gradient against differences of the loss."""
        v, w = self.along[number], self.weights[number]
        differences, doubt = self._differences(number)
        size = float((w * differences).abs().sum() + (w * doubt).abs().sum())
        return float((w @ differences - self.plain[number] @ v).abs()) / size if size > 0 else 0.0

    def mapped_gap(self, number: int) -> float:
        """Gradients for several weights at once, and at several θ, against plain ones."""
        w = self.weights
        pulled = batch_pulled_back(self.samples, self.parameters, self.theta, self.loss, w)[1]
        thetas = torch.stack([self.theta, self.theta + 1e-3 * self.along[number]])
        there = torch.stack([self.plain[0], self._gradient(thetas[1], w[0])])
        W, one = w[0].expand(2, 1, -1), torch.ones_like(thetas[:, :1])
        stacked = stacked_pullback(self.loss, thetas, W, one, 1 if NO_VMAP in self.samples.fallbacks else 2)[1]
        return max(_gap(pulled, self.plain), _gap(stacked, there))

    def slope_gap(self, number: int) -> float:
        """Slopes by forward mode, along one column and along two, against differences of the loss."""
        v, other = self.along[number], self.along[(number + 1) % _TRIES]
        differences, doubt = self._differences(number)
        single = pushed_forward(self.samples, self.loss, self.theta, v[:, None], 2)[1][:, 0]
        double = pushed_forward(self.samples, self.loss, self.theta, torch.stack([v, other], 1), 2)[1][:, 0]
        return max(_gap(one, differences, float(doubt.max())) for one in (single, double))

    def _differences(self, number: int) -> tuple[Tensor, Tensor]:
        """The slope of each loss by central differences, (n,), and the size below which it is not resolved, (n,)."""
        v, step = self.along[number], self.steps[number]
        before, here, after = (self._losses(self.theta + sign * step * v) for sign in (-1, 0, 1))
        noise = self.noises[number] * after.abs() / self.allowed
        return (after - before) / (2 * step), noise + (before - 2 * here + after).abs() / step

    def each_gap(self, number: int) -> float:
        """Gradients of each sample, mapped over samples, against a plain gradient."""
        found = self.weights[number] @ batch_gradients(self.samples, self.parameters, self.theta, self.batch)
        return _gap(found, self.plain[number])

    def curvature_gap(self, number: int) -> float:
        """Products with the Hessian, of one column and of two, against differences of the plain gradient."""
        v, other, w = self.along[number], self.along[(number + 1) % _TRIES], self.weights[number]
        V = torch.stack([v, other], 1)
        before, after = (self._gradient(self.theta + sign * self.steps[number] * v, w) for sign in (-1, 1))
        differences = (after - before) / (2 * self.steps[number])
        noise = self.noises[number] * float(after.abs().max()) / self.allowed
        scalar = lambda t: self.loss(t) @ w  # noqa: E731
        single, double = (
            batch_hessian_products(self.samples, self.parameters, self.theta, scalar, self.count, columns)
            for columns in (v[:, None], V)
        )
        crossed = torch.stack([double[:, 0] @ other, double[:, 1] @ v])  # of a symmetric matrix, the same twice
        size = float(double[:, 0].abs() @ other.abs() + double[:, 1].abs() @ v.abs())
        uneven = float((crossed[0] - crossed[1]).abs()) / size if size > 0 else 0.0
        return max(_gap(single[:, 0], differences, noise), _gap(double[:, 0], differences, noise), uneven)

    def _losses(self, theta: Tensor) -> Tensor:
        with torch.no_grad():
            return self.loss(theta)

    def _gradient(self, theta: Tensor, w: Tensor) -> Tensor:
        """Σᵢ wᵢ∇ℓᵢ(θ) by a plain backward pass."""
        with torch.enable_grad():
            leaf = theta.detach().clone().requires_grad_()
            total = self.loss(leaf) @ w
            if not total.requires_grad:
                return torch.zeros_like(theta)
            (found,) = torch.autograd.grad(total, leaf, allow_unused=True)
        return torch.zeros_like(theta) if found is None else found.detach()


def _gap(found: Tensor, wanted: Tensor, noise: float = 0.0) -> float:
    """The largest difference, of the largest entry wanted (or of what rounding makes of it)."""
    size = max(float(wanted.abs().max()), float(found.abs().max()), noise)
    return float((found - wanted).abs().max()) / size if size > 0 else 0.0


def _refused(what: str, gap: float) -> InvalidInputError:
    return InvalidInputError(
        what,
        measured=f"{gap:.2g} of its size away from what differences of its values say",
        threshold="less than 1e-3 in float64, 4e-2 in float32",
        meaning="What torch returns is not the derivative, so neither a solution nor an influence can rest on it.",
        cure="Look for .detach(), torch.no_grad(), in-place renormalisation (max_norm), rows that get no gradient "
        "(padding_idx) or a custom backward in the loss; pass what is meant to be constant in as data.",
    )
