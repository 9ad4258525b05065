"""Measure how time and memory grow with the samples N, the parameters d, the active rows m and the targets T.

The model is least squares with a ridge and m equalities. Its solution is known in closed form, so only dif is measured.
Each point is measured in its own process, with one thread and in float64. `python growth.py N 1000` measures one point.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, OURS, run_alone, table

SWEEPS: dict[str, tuple[int, ...]] = {  # values of the variable that grows
    "N": (1_000, 10_000, 100_000, 1_000_000),
    "d": (100, 1_000, 10_000, 100_000, 1_000_000),
    "m": (1, 3, 10, 30, 100, 300),
    "T": (1, 10, 100, 1_000),
}
FIXED = {  # the other variables meanwhile
    "N": {"d": 20, "m": 2, "T": 10},
    "d": {"N": 50, "m": 1, "T": 1},
    "m": {"N": 1_000, "d": 650, "T": 1},
    "T": {"N": 1_000, "d": 650, "m": 1},
}
MEANING = {  # explanation below each table
    "N": "There is one sweep over the samples. Memory holds the scores and the weights of the samples.",
    "d": "Up to 1,000 parameters the Hessian is assembled and factorised. Beyond that, conjugate gradients take a few "
    "dozen products, each of a few passes over the data; with a million parameters these no longer fit into any cache.",
    "m": "There is one solve for each row, and one Gram matrix of all rows.",
    "T": "There is one solve for each target, and one column of the sweep.",
}
RIDGE = 0.1  # weight of ½‖θ‖²
SECONDS = 10  # seconds; a run that takes longer is not repeated


def build(N: int, d: int, m: int, T: int) -> Callable[[], tuple[float, float]]:
    """Build the problem; return a function that measures the seconds to prepare and to score all removals."""
    import torch

    import dif

    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N, d, generator=generator, dtype=torch.float64) / d**0.5
    y = X.sum(1) + torch.randn(N, generator=generator, dtype=torch.float64)
    A = torch.randn(m, d, generator=generator, dtype=torch.float64) / d**0.5
    test = torch.randn(T, d, generator=generator, dtype=torch.float64) / d**0.5

    def inverse(V: Any) -> Any:
        """Return (XᵀX/N + cI)⁻¹V by solving with the smaller of the d × d and the N × N matrix."""
        if d <= N:
            return torch.linalg.solve(X.T @ X / N + RIDGE * torch.eye(d).double(), V)
        return (V - X.T @ torch.linalg.solve(X @ X.T + N * RIDGE * torch.eye(N).double(), X @ V)) / RIDGE

    free, across = inverse((X.T @ y / N)[:, None])[:, 0], inverse(A.T)
    lam = torch.linalg.solve(A @ across, A @ free - 0.1)
    theta = free - across @ lam

    def loss(params, z):
        return 0.5 * (z[0] @ params["theta"] - z[1]) ** 2

    train = dif.Samples(loss, (X, y))
    points = dif.Samples(loss, (test, torch.zeros(T).double()), name="test")
    stated = dif.Problem(train.mean() + dif.ridge(RIDGE), [dif.linear(A) == torch.full((m,), 0.1)])

    def run() -> tuple[float, float]:
        begun = time.perf_counter()
        influence = dif.DirectionalInfluence(dif.Solution(stated, {"theta": theta}, lam))
        prepared = time.perf_counter()
        influence.scores(points, train.remove_each(), show_progress=False, assess=0)
        return prepared - begun, time.perf_counter() - prepared

    return run


def point(kind: str, size: int) -> dict[str, float]:
    """Measure the seconds to prepare and to score all removals, and the peak memory that both add, in bytes."""
    import torch

    torch.set_num_threads(1)
    build(60, 5, 1, 1)()  # triggers lazy imports
    run = build(*({**FIXED[kind], kind: size}[key] for key in ("N", "d", "m", "T")))
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    runs = [run()]
    high = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    if sum(runs[0]) < SECONDS:
        runs = [run() for _ in range(3)]
    prepared, scored = (median(times) for times in zip(*runs, strict=True))  # Python's garbage collection may hit one
    return {"prepare": prepared, "scores": scored, "peak": high - before}


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the exponent with which the values grew over the last step."""
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def section() -> str:
    """Measure all points, save the plots and return the tables as Markdown."""
    from matplotlib.figure import Figure

    found = {kind: [run_alone(OURS, "growth.py", kind, str(size)) for size in sizes] for kind, sizes in SWEEPS.items()}
    canvas = Figure(figsize=(15, 3.8), layout="constrained")
    text = [
        "## Growth\n",
        "The model is least squares with a ridge and m equalities. Its solution is known in closed form, so only dif\n"
        "is measured: preparing (gradients, curvature, active set, solves) and scoring all removals. Each point is\n"
        "the median of 3 runs in its own process, in float64.\n",
    ]
    text.append("![Time and memory against N, d, m and T](figures/growth.png)\n")
    for ax, (kind, sizes) in zip(canvas.subplots(1, 4), SWEEPS.items(), strict=True):
        points = found[kind]
        for what, colour in (("prepare", "#0072b2"), ("scores", "#d55e00")):
            ax.loglog(sizes, [p[what] for p in points], "o-", color=colour, label=f"{what}, s")
        ax.loglog(sizes, [max(p["peak"], 1e5) / 1e9 for p in points], "s--", color="#555555", label="peak, GB")
        fixed = ", ".join(f"{key} = {value:,}" for key, value in FIXED[kind].items())
        ax.set(xlabel=kind, title=fixed)
        ax.grid(alpha=0.3)
        rows = []
        for size, p in zip(sizes, points, strict=True):
            times = f"{1e3 * p['prepare']:,.1f}", f"{1e3 * p['scores']:,.1f}"
            rows.append([f"{size:,}", *times, f"{p['peak'] / 1e6:,.0f}"])
        powers = {what: slope(sizes, [max(p[what], 1e-9) for p in points]) for what in ("prepare", "scores", "peak")}
        text.append(f"### {kind} ({fixed})\n\n" + table([kind, "prepare, ms", "scores, ms", "peak MB"], rows))
        text.append(
            f"Over the last step: preparing grows like {kind}^{powers['prepare']:.1f}, scoring like "
            f"{kind}^{powers['scores']:.1f}, memory like {kind}^{powers['peak']:.1f}. {MEANING[kind]}\n"
        )
    canvas.axes[0].legend()
    (HERE / "figures").mkdir(exist_ok=True)
    canvas.savefig(HERE / "figures" / "growth.png", dpi=110)
    return "\n".join(text)


if __name__ == "__main__":
    print(json.dumps(point(sys.argv[1], int(sys.argv[2]))))
