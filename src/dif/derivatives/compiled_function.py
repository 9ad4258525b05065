"""A function of the parameters, compiled for a parameter layout: its value and derivatives at flat θ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dif.derivatives.sweeps import evaluate_with_pullback, pull_back
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.term import Function
from dif.runtime.user_code import convert_errors


@dataclass(frozen=True, eq=False)
class CompiledFunction:
    """A function of the parameters, evaluated at flat θ; a linear one is represented by its matrix."""

    function: Function
    parameters: Parameters
    size: int  # rows
    matrix: Tensor | None  # (rows, d)

    @property
    def is_nonlinear(self) -> bool:
        """Whether it is neither linear nor a ridge."""
        return self.matrix is None and self.function.ridge is None

    @classmethod
    def of(cls, f: Function, parameters: Parameters, theta: Tensor, size: int) -> CompiledFunction:
        """Compile a function with this many rows for a parameter layout."""
        if f.matrix is None:
            return cls(f, parameters, size, None)
        matrix = torch.atleast_2d(f.matrix).to(theta)
        if f.of is not None:
            padded = theta.new_zeros((len(matrix), theta.numel()))
            number = parameters.names.index(f.of)
            start = sum(parameters.sizes[:number])
            padded[:, start : start + parameters.sizes[number]] = matrix
            matrix = padded
        return cls(f, parameters, size, matrix)

    def value(self, theta: Tensor) -> Tensor:
        """Return φ(θ), (rows,)."""
        if self.matrix is not None:
            return self.matrix @ theta
        return evaluate_function(self.function, self.parameters, theta).reshape(-1)

    def evaluate_with_pullback(self, theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return φ(θ), (rows,), and the map w → Jᵀw."""
        if (matrix := self.matrix) is not None:
            return matrix @ theta, lambda w: w @ matrix
        return evaluate_with_pullback(self.value, theta)

    def stacked_values(self, thetas: Tensor) -> Tensor:
        """Return φ at several θ (P, d), (P, rows)."""
        if self.matrix is not None:
            return thetas @ self.matrix.T
        if self.function.ridge is not None:
            return 0.5 * self.function.ridge * thetas.square().sum(1, keepdim=True)
        return torch.stack([self.value(theta).detach() for theta in thetas])

    def stacked_pullback(self, thetas: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return φ at several θ (P, d), (P, rows), and Jᵀw for the weights w (P, rows) of each θ, (P, d)."""
        if self.matrix is not None:
            return self.stacked_values(thetas), weights @ self.matrix
        if self.function.ridge is not None:
            return self.stacked_values(thetas), self.function.ridge * weights * thetas
        evaluated = [self.evaluate_with_pullback(theta) for theta in thetas]
        values = torch.stack([value.detach() for value, _ in evaluated])
        return values, torch.stack([pull(w).detach() for (_, pull), w in zip(evaluated, weights, strict=True)])

    def gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return φ(θ), (rows,), and its Jacobian, (rows, d)."""
        if self.matrix is not None:
            return self.matrix @ theta, self.matrix
        return pull_back(self.value, theta, torch.eye(self.size).to(theta))


def output_slices(functions: Sequence[CompiledFunction], start: int = 0) -> Iterator[tuple[CompiledFunction, slice]]:
    """Yield each function with the positions of its outputs, which are consecutive from `start`."""
    for f in functions:
        yield f, slice(start, start + f.size)
        start += f.size


def evaluate_function(f: Function, parameters: Parameters, theta: Tensor) -> Tensor:
    """Return φ(θ) after checking its shape and type."""
    with convert_errors(f"function {f.name!r}"):
        out = f.fn(parameters.bind(parameters.tensors(theta)))
    if not isinstance(out, Tensor) or out.dim() > 1:
        shape = tuple(out.shape) if isinstance(out, Tensor) else None
        kind = f"a value of type {type(out).__name__}" if shape is None else f"a tensor of shape {shape}"
        raise InvalidInputError(
            f"The function {f.name!r} returned {kind}.",
            "It must return a tensor of shape () or (rows,).",
            "A function of the params gives one number, or one per row.",
            "Return a scalar tensor or a vector.",
        )
    check_type(out, theta.dtype, f"The function {f.name!r}")
    return out


def check_type(out: Tensor, dtype: torch.dtype, source: str) -> None:
    """Refuse an output of another type than the parameters."""
    if out.dtype != dtype:
        raise InvalidInputError(
            f"{source} returned a tensor of {out.dtype}.",
            f"It must return {dtype}, the type of the parameters.",
            "Counts and booleans have no derivative, and other types lose digits silently.",
            "Return a differentiable value, computed in the type of the parameters without casts.",
        )
