"""Optimisers as differentiable functions, equal to those of `torch.optim` step for step; ascent for multipliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.runtime.inputs import check_number

Memory = tuple[Tensor, ...]


@runtime_checkable
class Optimizer(Protocol):
    """Updates θ from a gradient, coordinate by coordinate, with a memory of its own."""

    def start(self, theta: Tensor) -> Memory:
        """Return the memory before the first step."""
        ...

    def update(self, theta: Tensor, memory: Memory, g: Tensor, factor: float, step: int) -> tuple[Tensor, Memory]:
        """Return θ and the memory after step number `step` with gradient g; `factor` scales the learning rate."""
        ...

    def recover_gradient(self, theta: Tensor, memory: Memory, after: Memory) -> Tensor:
        """Return the gradient of a step from the memory before and after it (any, where the update is linear in it)."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Args:
        lr: Learning rate.
        momentum: Of the velocity; 0 for none.
        nesterov: Look ahead along the velocity.
        weight_decay: Adds weight_decay·θ to the gradient.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and not self.momentum:
            raise InvalidInputError(
                "`nesterov` is True, but `momentum` is 0.",
                "Nesterov's method needs a momentum above 0.",
                "It looks ahead along the velocity, and there is none.",
                "Pass momentum=0.9, or leave nesterov out.",
            )

    def start(self, theta: Tensor) -> Memory:
        """Return a velocity of zero, or nothing without momentum."""
        return (torch.zeros_like(theta),) if self.momentum else ()

    def update(self, theta: Tensor, memory: Memory, g: Tensor, factor: float, step: int) -> tuple[Tensor, Memory]:
        """Return θ and the velocity after a step."""
        g = g + self.weight_decay * theta if self.weight_decay else g
        if not self.momentum:
            return theta - factor * self.lr * g, ()
        velocity = self.momentum * memory[0] + g
        move = g + self.momentum * velocity if self.nesterov else velocity
        return theta - factor * self.lr * move, (velocity,)

    def recover_gradient(self, theta: Tensor, memory: Memory, after: Memory) -> Tensor:
        """Return zero: the update is linear in the gradient, so its derivative does not depend on it."""
        return torch.zeros_like(theta)


@dataclass(frozen=True)
class Adam:
    """Adam, as `torch.optim.Adam`.

    Args:
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the root of the average square.
        weight_decay: Adds weight_decay·θ to the gradient.
        eps_root: Added inside the root. The root of an average square near 0 has an unbounded derivative, so that
            influence through training needs eps_root > 0 (1e-8, say). Coordinates with gradients below √eps_root then
            move less than with Adam as it is.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    eps_root: float = 0.0

    def __post_init__(self) -> None:
        rates = {"lr": self.lr, "weight_decay": self.weight_decay, "eps": self.eps, "eps_root": self.eps_root}
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise InvalidInputError(
                f"`betas` is {self.betas!r}.",
                "It must be a pair of numbers.",
                "They are the decay rates of the averages of the gradient and of its square.",
                "Pass (0.9, 0.999), say.",
            )
        _check_rates(**rates, beta1=self.betas[0], beta2=self.betas[1])

    def start(self, theta: Tensor) -> Memory:
        """Return averages of zero."""
        return torch.zeros_like(theta), torch.zeros_like(theta)

    def update(self, theta: Tensor, memory: Memory, g: Tensor, factor: float, step: int) -> tuple[Tensor, Memory]:
        """Return θ and the averages after a step."""
        return self._move(theta, memory, g + self.weight_decay * theta if self.weight_decay else g, factor, step)

    def _move(self, theta: Tensor, memory: Memory, g: Tensor, factor: float, step: int) -> tuple[Tensor, Memory]:
        (first, second), (beta1, beta2) = memory, self.betas
        first = first + (1 - beta1) * (g - first)
        second = beta2 * second + (1 - beta2) * g * g
        unbiased = second / (1 - beta2 ** (step + 1)) + self.eps_root
        move = first / (1 - beta1 ** (step + 1)) / (unbiased.sqrt() + self.eps)
        return theta - factor * self.lr * move, (first, second)

    def recover_gradient(self, theta: Tensor, memory: Memory, after: Memory) -> Tensor:
        """Return the gradient that took the first average from its value before to its value after."""
        return _recover_from_average(self.betas[0], memory, after) - self.weight_decay * theta


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as `torch.optim.AdamW`: θ shrinks by lr·weight_decay before each step.

    Args are those of `dif.Adam`.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    eps_root: float = 0.0

    @property
    def _adam(self) -> Adam:
        return Adam(self.lr, self.betas, self.eps, 0.0, self.eps_root)

    def __post_init__(self) -> None:
        _check_rates(weight_decay=self.weight_decay)
        self.start(torch.zeros(0))

    def start(self, theta: Tensor) -> Memory:
        """Return averages of zero."""
        return self._adam.start(theta)

    def update(self, theta: Tensor, memory: Memory, g: Tensor, factor: float, step: int) -> tuple[Tensor, Memory]:
        """Return θ and the averages after a step."""
        return self._adam.update((1 - factor * self.lr * self.weight_decay) * theta, memory, g, factor, step)

    def recover_gradient(self, theta: Tensor, memory: Memory, after: Memory) -> Tensor:
        """Return the gradient that took the first average from its value before to its value after."""
        return _recover_from_average(self.betas[0], memory, after)


@dataclass(frozen=True)
class Ascent:
    """Ascent on the multipliers: λ + lr·(f − τ), projected at 0 for inequalities.

    Args:
        lr: Learning rate.
    """

    lr: float

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr)


def is_optimizer(thing: Any) -> bool:
    """Return whether an object, not a class, is an optimiser."""
    return isinstance(thing, Optimizer) and not isinstance(thing, type)


def _recover_from_average(beta: float, memory: Memory, after: Memory) -> Tensor:
    return memory[0] + (after[0] - memory[0]) / (1 - beta)


def _check_rates(**rates: float) -> None:
    """Check that rates are numbers ≥ 0, and that decay rates are below 1."""
    for name, rate in rates.items():
        check_number(
            rate,
            name,
            zero=True,
            meaning="Rates of an optimiser are numbers from 0 up.",
            cure="Use the value that you would pass to torch.optim.",
        )
        if name in ("momentum", "beta1", "beta2") and not rate < 1:
            raise InvalidInputError(
                f"`{name}` is {rate}.",
                "It must be below 1.",
                "It is the part of an average that each step keeps; at 1 the average never moves.",
                "Use 0.9, say.",
            )
