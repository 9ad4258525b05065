"""Pictures (matplotlib); each function draws on the axes it is given and returns them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif import InvalidInputError, Solution

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea7317", "#15803d", "#6b7280"


def predicted_vs_actual(
    predicted: Tensor, actual: Tensor, ax: Any, label: str, colour: str = BLUE, marker: str = "o"
) -> Any:
    """Predicted changes against those found by retraining, with y = x."""
    x, y = np.asarray(actual).reshape(-1), np.asarray(predicted).reshape(-1)
    ax.scatter(x, y, s=14, alpha=0.6, color=colour, marker=marker, linewidths=0, label=label)
    low, high = min(x.min(), y.min(), *ax.get_xlim()), max(x.max(), y.max(), *ax.get_xlim())
    ax.axline((low, low), (high, high), color=GREY, linewidth=1, linestyle="--", zorder=0)
    ax.set_xlabel("actual change (retrained)")
    ax.set_ylabel("predicted change")
    ax.legend(frameon=False)
    return ax


def landscape(solution: Solution, ax: Any, span: float = 0.6, levels: int = 18) -> Any:
    """Objective and feasible region around a solution with two parameters."""
    program, centre = solution.program, solution.theta
    if len(centre) != 2:
        raise InvalidInputError(
            "parameters of a landscape",
            measured=len(centre),
            threshold="2",
            meaning="It is drawn in the plane.",
            cure="Plot two of the parameters of a smaller problem.",
        )
    axis = torch.linspace(-span, span, 81).to(centre)
    values = torch.stack([program.rows.values(centre + torch.stack([u, v])) for v in axis for u in axis])
    size = (len(axis), len(axis))
    x, y = (axis + centre[0]).numpy(), (axis + centre[1]).numpy()
    ax.contour(x, y, values[:, 0].reshape(size).numpy(), levels=levels, cmap="Greys", linewidths=0.8, alpha=0.8)
    if program.m:
        gap = values[:, 1:] - program.tau
        worst = torch.where(program.equality, gap.abs(), gap).max(1).values.reshape(size).numpy()
        ax.contourf(x, y, worst, levels=[-np.inf, 0.0], colors=[BLUE], alpha=0.10)
        ax.contour(x, y, worst, levels=[0.0], colors=[BLUE], linewidths=1.2)
    ax.plot(*centre.numpy(), marker="o", color="black", markersize=6, zorder=5)
    ax.set_aspect("equal")
    ax.set_xlabel("θ₁")
    ax.set_ylabel("θ₂")
    return ax


def arrow(start: Tensor, change: Tensor, ax: Any, label: str, colour: str, style: str = "-") -> Any:
    """A change of two parameters as an arrow."""
    begin, end = start.numpy(), (start + change).numpy()
    if np.linalg.norm(end - begin) > 0:
        shape = {"arrowstyle": "-|>", "color": colour, "lw": 2, "linestyle": style, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=end, xytext=begin, arrowprops=shape, zorder=6)
    ax.plot([], [], color=colour, linestyle=style, linewidth=2, label=label)
    return ax
