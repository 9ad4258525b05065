"""Where losses are not smooth: kinks and jumps near a point, found by probing, and the operators that may make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dif.errors import InvalidInputError
from dif.evaluation.rows import Rows, Smooth
from dif.evaluation.sweeps import sample_losses
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses

_LINES = 2  # random lines through the point along which losses are looked at,
_POINTS = 33  # at so many points each,
_SAMPLES = 512  # of so many samples
_CANDIDATES = 4  # bends per line that are looked at closely
_JUMP = 0.02  # of the range of slopes, or of values, along the line: what is left of it in a tiny interval is a kink

# Operators whose derivative, or value, jumps somewhere.
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
    """A place near the point at which the slope of a loss or function jumps, or its value."""

    where: str  # whose, in words
    jumps: bool  # the value jumps, not only the slope
    operators: tuple[str, ...]  # those that could be the reason

    def __str__(self) -> str:
        what = "jumps" if self.jumps else "has a kink"
        by = f" ({', '.join(self.operators)})" if self.operators else ""
        return f"{self.where} {what}{by}"


def explain(kinks: Sequence[Kink]) -> str:
    """What kinks mean for a point that could not be reached, and what to do."""
    named = "; ".join(map(str, kinks))
    return (
        f"{named[0].upper()}{named[1:]}: minima tend to lie on kinks, where no gradient can vanish, and polishing does "
        "not help. Use a smooth loss or activation (softplus, GELU, tanh, a smoothed absolute value) and fit again."
    )


def find_kinks(rows: Rows, theta: Tensor) -> tuple[Kink, ...]:
    """At most one kink for each Samples and each function in some rows: where they bend too sharply to be smooth.

    They are evaluated in double precision along random lines through θ. Where one bends most, the interval is halved
    again and again: the change of slope of a smooth loss shrinks with it, that of a kink stays.
    """
    try:
        rows = rows.to(torch.float64)
        found = [_in_samples(table.samples, rows.parameters, theta.double()) for table in rows.tables]
        found += [
            _in_function(f, theta.double()) for f in rows.functions if f.matrix is None and f.function.ridge is None
        ]
    except (RuntimeError, InvalidInputError):  # it runs in its own precision only: nothing is said
        return ()
    return tuple(kink for kink in found if kink is not None)


def _in_samples(samples: SampleLosses, parameters: Parameters, theta: Tensor) -> Kink | None:
    spread = torch.linspace(0, len(samples) - 1, min(_SAMPLES, len(samples))).round().long()

    def operators(i: int) -> tuple[str, ...]:
        _, batch = next(samples.batches(spread[i : i + 1], device=theta.device))
        return _operators(lambda: samples.losses(parameters.bind(parameters.tensors(theta)), batch, 1))

    def losses(at: Tensor, which: int | None) -> Tensor:
        return sample_losses(samples, parameters, at, spread if which is None else spread[which : which + 1])

    found = _along_lines(losses, theta)
    return found and Kink(f"the loss of {samples.name}[{int(spread[found[0]])}]", found[1], operators(found[0]))


def _in_function(f: Smooth, theta: Tensor) -> Kink | None:
    def values(at: Tensor, which: int | None) -> Tensor:
        value = f.value(at).detach()
        return value if which is None else value[which : which + 1]

    found = _along_lines(values, theta)
    return found and Kink(f"the function {f.function.name}", found[1], _operators(lambda: f.value(theta)))


def _along_lines(values: Callable[[Tensor, int | None], Tensor], theta: Tensor) -> tuple[int, bool] | None:
    """Which of several values has a kink near θ, and whether it jumps; None where none was found."""
    generator = torch.Generator().manual_seed(0)
    size = max(0.1, float(theta.square().mean().sqrt()))
    grid = torch.linspace(-1, 1, _POINTS, dtype=torch.float64).tolist()
    for _ in range(_LINES):
        along = 0.5 * size * torch.randn(theta.numel(), generator=generator, dtype=torch.float64).to(theta.device)
        line = torch.stack([values(theta + t * along, None).double().cpu() for t in grid])  # (points, n)
        for k, i in _bends(line):
            one = lambda t, i=i, along=along: float(values(theta + t * along, i))  # noqa: E731
            kind = _closely(one, grid[k], grid[k + 2], line[:, i])
            if kind is not None:
                return i, kind == "jump"
    return None


def _bends(values: Tensor) -> Iterator[tuple[int, int]]:
    """Where losses bend most, compared with how their slopes differ along the line: (point, sample), a few of them."""
    bends = values.diff(dim=0).diff(dim=0).abs()  # (points − 2, n)
    slopes = values.diff(dim=0)
    rounding = torch.finfo(values.dtype).eps ** 0.5 * float(values.abs().max())
    scale = (slopes.amax(0) - slopes.amin(0)).clamp(min=max(rounding, torch.finfo(values.dtype).tiny))
    sharp = torch.nan_to_num((bends - bends.median(0).values) / scale, nan=0.0, posinf=0.0)
    best = sharp.max(0)
    order = torch.argsort(best.values, descending=True)[:_CANDIDATES].tolist()
    return ((int(best.indices[i]), i) for i in order if best.values[i] > 0)


def _closely(loss: Callable[[float], float], low: float, high: float, line: Tensor) -> str | None:
    """Whether a bend between two points is a "kink" or a "jump"; None where it is smooth."""
    eps = torch.finfo(torch.float64).eps
    h = eps**0.44  # 1e-7
    slope = lambda t: (loss(t + h) - loss(t - h)) / (2 * h)  # noqa: E731

    def bend(a: tuple[float, float, float], b: tuple[float, float, float]) -> float:
        """How far slopes differ between two points (t, value, slope), and from that of the line between them."""
        chord = (b[1] - a[1]) / (b[0] - a[0])
        return abs(b[2] - a[2]) + abs(chord - 0.5 * (a[2] + b[2]))

    left, right = ((t, loss(t), slope(t)) for t in (low, high))
    while right[0] - left[0] > 16 * h:
        t = 0.5 * (left[0] + right[0])
        middle = (t, loss(t), slope(t))
        left, right = (left, middle) if bend(left, middle) >= bend(middle, right) else (middle, right)
    values, slopes = line, line.diff() * (len(line) - 1) / 2
    span = [float(x.max() - x.min()) for x in (values, slopes)]
    noise = eps * float(values.abs().max())  # of one value
    smoothly = 2 * float(slopes.abs().max()) * (right[0] - left[0] + 2 * h)  # how far the value may move there
    if abs(loss(right[0] + h) - loss(left[0] - h)) > max(_JUMP * span[0], 1e3 * noise, smoothly):
        return "jump"
    if abs(right[2] - left[2]) > max(_JUMP * span[1], 10 * noise / h):
        return "kink"
    return None


class _Recorder(TorchDispatchMode):
    """Notes the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__.removesuffix("_")] = None
        return func(*args, **(kwargs or {}))


def _operators(evaluate: Callable[[], Any]) -> tuple[str, ...]:
    """The operators that could make a kink."""
    with torch.no_grad(), _Recorder() as seen:
        evaluate()
    return tuple(name for name in seen.names if name in _PIECEWISE)
