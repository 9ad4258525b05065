"""The mini-batch phase of `fit`: Adam on θ and gradient ascent on λ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dif.derivatives.program import Program
from dif.derivatives.rows import Rows
from dif.runtime.limits import Limits
from dif.runtime.progress import Reporter

_ASCENT = 10.0  # step size of λ relative to that of Adam
_BETAS = (0.9, 0.999)  # decay rates of Adam's two moving averages, as in torch


class PrimalDual:
    """Stochastic descent on the Lagrangian in θ and ascent in λ, with a step size that falls to zero along a cosine.

    It ends near a solution; the later phases of `fit` continue from there.
    """

    def __init__(
        self, program: Program, epochs: int, batch_size: int, rate: float, seed: int, limits: Limits, report: Reporter
    ) -> None:
        self.program, self.epochs, self.rate = program, epochs, rate
        self.batch_size, self.seed = batch_size, seed
        self.limits, self.report = limits, report
        sizes = [len(table.samples) for table in program.rows.tables]
        self.steps = max((math.ceil(n / batch_size) for n in sizes), default=1)  # per epoch

    def run(
        self, theta: Tensor, lam: Tensor, done: int, save: Callable[[Tensor, Tensor, int], None]
    ) -> tuple[Tensor, Tensor, int]:
        """Run the epochs after the first `done`, and call `save` after each; return θ, λ and the epochs done."""
        theta, lam = theta.clone(), lam.clone()
        first, second, count = torch.zeros_like(theta), torch.zeros_like(theta), 0
        for epoch in range(done, self.epochs):
            for step, rows in enumerate(self._batches(epoch)):
                if self.limits.find_reached():
                    return theta, lam, epoch
                share = (epoch + step / self.steps) / self.epochs
                rate = self.rate * 0.5 * (1 + math.cos(math.pi * share))
                f, g = rows.weighted_gradient(theta, self.program.weights(lam))
                count += 1
                first = _BETAS[0] * first + (1 - _BETAS[0]) * g
                second = _BETAS[1] * second + (1 - _BETAS[1]) * g * g
                size = (second / (1 - _BETAS[1] ** count)).sqrt() + 1e-8
                theta = theta - rate * (first / (1 - _BETAS[0] ** count)) / size
                lam = self.program.kinds.project(lam + _ASCENT * rate * (f[1:] - self.program.tau))
                self.limits.used += 1
            self.report(self.limits.used, f"(mini-batches, epoch {epoch + 1} of {self.epochs})")
            save(theta, lam, epoch + 1)
        return theta, lam, self.epochs

    def _batches(self, epoch: int) -> Iterator[Rows]:
        """Yield the rows over one mini-batch of every table at a time; each is an unbiased estimate of all rows."""
        rows = self.program.rows
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**62)
        orders = [torch.randperm(len(table.samples), generator=generator) for table in rows.tables]
        for step in range(self.steps):
            sizes = [min(self.batch_size, len(order)) for order in orders]
            yield rows.over(
                [
                    order[torch.arange(step * size, (step + 1) * size) % len(order)]
                    for order, size in zip(orders, sizes, strict=True)
                ]
            )
