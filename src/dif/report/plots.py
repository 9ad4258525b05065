"""Pictures (matplotlib); each function draws on the axes it is given and returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif import BoundCurve, Change, Influence, InvalidInputError, Solution
from dif.solving.continuation import Path

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea7317", "#15803d", "#6b7280"


def predicted_vs_actual(
    predicted: Tensor, actual: Tensor, ax: Any, label: str, colour: str = BLUE, marker: str = "o"
) -> Any:
    """Predicted changes against those found by retraining, with y = x."""
    x, y = (_numbers(values) for values in (actual, predicted))
    if x.shape != y.shape or not len(x):
        raise InvalidInputError(
            "values to draw",
            measured=f"{len(y)} predicted, {len(x)} actual",
            threshold="as many of both, at least 1",
            meaning="Each point is one perturbation.",
            cure="Score the same perturbations with both.",
        )
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
        for j in torch.nonzero(program.kinds.equal).reshape(-1).tolist():
            ax.contour(x, y, gap[:, j].reshape(size).numpy(), levels=[0.0], colors=[ORANGE], linewidths=1.6)
        if bool(program.kinds.one_sided.any()):
            worst = gap[:, program.kinds.one_sided].max(1).values.reshape(size).numpy()
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


def ranking(
    influence: Influence, ax: Any, k: int = 15, target: int | str = 0, names: Sequence[str] | None = None
) -> Any:
    """The k perturbations that move a target most, largest on top, with their names."""
    top = influence.top(k, target)[::-1]
    values = [one.value for one in top]
    words = [one.label if names is None else str(names[one.index]) for one in top]
    ax.barh(range(len(top)), values, color=[ORANGE if value > 0 else BLUE for value in values])
    ax.set_yticks(range(len(top)), words)
    ax.axvline(0.0, color=GREY, linewidth=1)
    place = influence.targets.index(target) if isinstance(target, str) else target
    ax.set_xlabel(f"change of {influence.targets[place]} ({influence.estimator})")
    return ax


def by_group(influence: Influence, groups: Sequence[object], ax: Any, target: int | str = 0) -> Any:
    """The scores of each group's samples, and what they add up to."""
    if len(groups) != len(influence):
        raise InvalidInputError(
            "groups of a plot",
            measured=len(groups),
            threshold=f"{len(influence)}, one per perturbation",
            meaning="Scores are gathered by them.",
            cure="Give the group of each, in order.",
        )
    target = influence.targets.index(target) if isinstance(target, str) else target
    column = influence.values[:, target].numpy()
    named = sorted({str(group) for group in groups})
    mine = [column[[str(group) == name for group in groups]] for name in named]
    words = [f"{name}\nΣ {np.nansum(values):+.3g}" for name, values in zip(named, mine, strict=True)]
    ax.boxplot(
        [values[np.isfinite(values)] for values in mine],
        orientation="horizontal",
        flierprops={"marker": ".", "markersize": 3},
    )
    ax.set_yticks(range(1, 1 + len(named)), words)
    ax.axvline(0.0, color=GREY, linewidth=1)
    ax.set_xlabel(f"change of {influence.targets[target]} ({influence.estimator})")
    return ax


def by_term(parts: Influence, ax: Any, k: int = 12, names: Sequence[str] | None = None) -> Any:
    """Through which term each perturbation acts (what `DirectionalInfluence.by_term` answers), stacked."""
    total = parts.values.sum(1)
    order = torch.argsort(torch.nan_to_num(total.abs(), nan=-1.0), descending=True)[:k].flip(0).tolist()
    above, below = np.zeros(len(order)), np.zeros(len(order))
    for column, name in enumerate(parts.targets):
        values = parts.values[order, column].numpy()
        if not np.any(values):
            continue
        left = np.where(values > 0, above, below)
        ax.barh(range(len(order)), values, left=left, label=name, height=0.7)
        above, below = above + np.maximum(values, 0), below + np.minimum(values, 0)
    ax.plot(total[order].numpy(), range(len(order)), "k|", markersize=12, label="together")
    ax.set_yticks(range(len(order)), [parts.perturbations[i] if names is None else str(names[i]) for i in order])
    ax.axvline(0.0, color=GREY, linewidth=1)
    ax.set_xlabel(parts.estimator)
    ax.legend(frameon=False, fontsize=8)
    return ax


def multipliers(solution: Solution, change: Change, ax: Any) -> Any:
    """Δλ: how the price of each constraint moves."""
    names, values = solution.program.names, change.multipliers.flat.detach().cpu().numpy()
    ax.bar(range(len(values)), values, color=[ORANGE if value > 0 else BLUE for value in values])
    ax.set_xticks(range(len(values)), names, rotation=30, ha="right")
    ax.axhline(0.0, color=GREY, linewidth=1)
    ax.set_ylabel("Δλ")
    return ax


def path(followed: Path, ax: Any, change: Change | None = None, most: int = 4) -> Any:
    """θ(ε) while a perturbation is carried out, where constraints switch, and the straight line that was predicted."""
    shares, moved = followed.epsilons.numpy(), (followed.thetas - followed.thetas[0]).cpu()
    chosen = torch.argsort(moved[-1].abs(), descending=True)[:most].tolist()
    for number, i in enumerate(chosen):
        (line,) = ax.plot(shares, moved[:, i], marker="o", markersize=3, label=f"θ{i + 1}")
        if change is not None:
            predicted = [0, float(change.flat[i])]
            ax.plot([0, 1], predicted, "--", color=line.get_color(), label="predicted" if number == 0 else None)
    ax.set_ylabel("θ(ε) − θ̄")
    return _along_path(followed, ax)


def multiplier_path(followed: Path, ax: Any) -> Any:
    """λ(ε) of every constraint that binds anywhere on a path, and where they switch."""
    for j, name in enumerate(followed.start.program.names):
        if bool((followed.multipliers[:, j] != 0).any()):
            ax.plot(followed.epsilons, followed.multipliers[:, j].cpu(), marker="o", markersize=3, label=name)
    ax.axhline(0.0, color=GREY, linewidth=1)
    ax.set_ylabel("λ(ε)")
    return _along_path(followed, ax)


def _along_path(followed: Path, ax: Any) -> Any:
    for event in followed.events:
        ax.axvline(event.epsilon, color=GREY, linestyle=":", linewidth=1)
        words = f"{event.name} {'binds' if event.binds else 'lets go'}"
        ax.annotate(words, (event.epsilon, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=7)
    ax.set_xlabel("ε, how far the perturbation is carried out")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=8)
    return ax


def bound_curve(curve: BoundCurve, ax: Any, target: int | str | None = None) -> Any:
    """The price of a constraint (target=None), or a target, against its bound, with the kinks."""
    column = curve.targets.index(target) if isinstance(target, str) and target in curve.targets else target
    if column is not None and (isinstance(column, str) or not 0 <= column < len(curve.targets)):
        raise InvalidInputError(
            "target of a curve",
            measured=repr(target),
            threshold=f"None, or one of {', '.join(curve.targets) or 'no targets'}",
            meaning="The curve was not followed for it.",
            cure="Pass the target to dif.bound_curve.",
        )
    values = curve.price if column is None else curve.values[:, column]
    ax.plot(curve.bounds, values, marker="o", markersize=3, color=BLUE)
    for kink in curve.kinks:
        ax.axvline(kink.bound, color=GREY, linestyle=":", linewidth=1)
        words = f"{kink.name} binds {kink.binds}"
        ax.annotate(words, (kink.bound, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=7)
    ax.set_xlabel(f"bound of {curve.constraint}")
    ax.set_ylabel("price λ" if column is None else curve.targets[column])
    return ax


def _numbers(values: Any) -> np.ndarray:
    values = values.values if isinstance(values, Influence) else values
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=float).reshape(-1)
