"""Find kinks and jumps of losses and functions near a point, and the operators that may cause them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dif.derivatives.compiled_function import CompiledFunction
from dif.derivatives.rows import Rows
from dif.derivatives.sweeps import sample_losses
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses

_LINES = 2  # random lines through the point along which losses are evaluated
_POINTS = 33  # evaluation points per line
_SAMPLES = 512  # largest number of samples that are evaluated
_CANDIDATES = 4  # sharpest bends per line that are examined closely
_JUMP = 0.02  # change over a tiny interval that makes a kink or jump, relative to the range along the line

# Operators whose derivative or value jumps somewhere.
_PIECEWISE = frozenset(
    (
        *("abs", "amax", "amin", "argmax", "argmin", "ceil", "clamp", "clamp_max", "clamp_min", "eq", "floor", "ge"),
        *("gt", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "heaviside", "le", "leaky_relu", "lt", "max"),
        *("maximum", "max_pool2d_with_indices", "median", "min", "minimum", "ne", "relu", "rrelu_with_noise", "round"),
        *("sign", "softshrink", "sort", "threshold", "topk", "trunc", "where", "_prelu_kernel"),
    )
)


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

    Losses and functions are evaluated in double precision along random lines through θ. Around the sharpest bends the
    interval is bisected: for a smooth loss the change of slope shrinks with the interval, at a kink it does not.
    """
    try:
        rows = rows.to(torch.float64)
        kinks = [_find_in_samples(table.samples, rows.parameters, theta.double()) for table in rows.tables]
        kinks += [_find_in_function(f, theta.double()) for f in rows.functions if f.is_nonlinear]
    except (RuntimeError, InvalidInputError):  # a loss that cannot run in double precision
        return ()
    return tuple(kink for kink in kinks if kink is not None)


def _find_in_samples(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> Kink | None:
    """Search the losses of samples spread over the data."""
    spread = torch.linspace(0, len(samples) - 1, min(_SAMPLES, len(samples))).round().long()

    def losses(at: Tensor, which: int | None) -> Tensor:
        return sample_losses(samples, parameters, at, spread if which is None else spread[which : which + 1])

    return _find(losses, theta, lambda i: f"the loss of {samples.name}[{int(spread[i])}]")


def _find_in_function(f: CompiledFunction, theta: Tensor) -> Kink | None:
    """Search the outputs of a function of the parameters."""

    def values(at: Tensor, which: int | None) -> Tensor:
        value = f.value(at).detach()
        return value if which is None else value[which : which + 1]

    return _find(values, theta, lambda _: f"the function {f.function.name}")


def _find(values: Callable[[Tensor, int | None], Tensor], theta: Tensor, describe: Callable[[int], str]) -> Kink | None:
    """Return a kink or jump near θ of one of several values; None if there is none.

    `values(θ, i)` evaluates value i at θ, or all values for i = None; `describe(i)` is value i in words.
    """
    generator = torch.Generator().manual_seed(0)
    size = max(0.1, float(theta.square().mean().sqrt()))
    grid = torch.linspace(-1, 1, _POINTS, dtype=torch.float64).tolist()
    for _ in range(_LINES):
        v = 0.5 * size * torch.randn(theta.numel(), generator=generator, dtype=torch.float64).to(theta.device)
        line = torch.stack([values(theta + t * v, None).double().cpu() for t in grid])  # (points, n)
        for k, i in _sharpest_bends(line):
            loss = lambda t, i=i, v=v: float(values(theta + t * v, i))  # noqa: E731
            kind = _classify_bend(loss, grid[k], grid[k + 2], line[:, i])
            if kind is not None:
                return Kink(describe(i), kind == "jump", _piecewise_operators(lambda i=i: values(theta, i)))
    return None


def _sharpest_bends(values: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (point, sample) of the sharpest bends, relative to the range of the sample's slopes along the line."""
    bends = values.diff(dim=0).diff(dim=0).abs()  # (points − 2, n)
    slopes = values.diff(dim=0)
    rounding = torch.finfo(values.dtype).eps ** 0.5 * float(values.abs().max())
    scale = (slopes.amax(0) - slopes.amin(0)).clamp(min=max(rounding, torch.finfo(values.dtype).tiny))
    sharpness = torch.nan_to_num((bends - bends.median(0).values) / scale, nan=0.0, posinf=0.0)
    sharpest = sharpness.max(0)
    order = torch.argsort(sharpest.values, descending=True)[:_CANDIDATES].tolist()
    return ((int(sharpest.indices[i]), i) for i in order if sharpest.values[i] > 0)


def _classify_bend(loss: Callable[[float], float], low: float, high: float, line: Tensor) -> str | None:
    """Return "kink" or "jump" for a bend between two points of the line; None if it is smooth."""
    eps = torch.finfo(torch.float64).eps
    h = eps**0.44  # 1e-7
    slope = lambda t: (loss(t + h) - loss(t - h)) / (2 * h)  # noqa: E731

    def bend(a: tuple[float, float, float], b: tuple[float, float, float]) -> float:
        """Measure how far the slopes at two points (t, value, slope) differ, from each other and from the chord."""
        chord = (b[1] - a[1]) / (b[0] - a[0])
        return abs(b[2] - a[2]) + abs(chord - 0.5 * (a[2] + b[2]))

    left, right = ((t, loss(t), slope(t)) for t in (low, high))
    while right[0] - left[0] > 16 * h:
        t = 0.5 * (left[0] + right[0])
        middle = (t, loss(t), slope(t))
        left, right = (left, middle) if bend(left, middle) >= bend(middle, right) else (middle, right)
    values, slopes = line, line.diff() * (len(line) - 1) / 2
    value_range, slope_range = (float(x.max() - x.min()) for x in (values, slopes))
    noise = eps * float(values.abs().max())  # rounding error of one value
    smooth_change = 2 * float(slopes.abs().max()) * (right[0] - left[0] + 2 * h)  # without a jump
    if abs(loss(right[0] + h) - loss(left[0] - h)) > max(_JUMP * value_range, 1e3 * noise, smooth_change):
        return "jump"
    if abs(right[2] - left[2]) > max(_JUMP * slope_range, 10 * noise / h):
        return "kink"
    return None


class _OperatorRecorder(TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__.removesuffix("_")] = None
        return func(*args, **(kwargs or {}))


def _piecewise_operators(evaluate: Callable[[], Any]) -> tuple[str, ...]:
    """Return the operators called by `evaluate` that may cause a kink."""
    with torch.no_grad(), _OperatorRecorder() as recorder:
        evaluate()
    return tuple(name for name in recorder.names if name in _PIECEWISE)
