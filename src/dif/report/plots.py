"""Plots with matplotlib. Each function draws on the axes it is given, or on new ones, and returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif import BoundCurve, Change, Influence, InvalidInputError, Run, Solution
from dif.errors import few
from dif.estimators.selection import find_column
from dif.optimality.solution import expect_solution
from dif.report.column import expect_column
from dif.runtime.axes import draw_on, draw_on_panels
from dif.runtime.frames import write_label
from dif.runtime.inputs import as_numbers, check_count, check_instance
from dif.solving.continuation import Path

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea7317", "#15803d", "#6b7280"  # colours of all plots


def predicted_vs_actual(
    predicted: Any, actual: Any, ax: Any = None, label: str = "", colour: str = BLUE, marker: str = "o"
) -> Any:
    """Plot predicted changes against those found by retraining, with the line y = x.

    Both are tensors, arrays or Influences of the same perturbations.
    """
    x, y = (_numbers(values) for values in (actual, predicted))
    if x.shape != y.shape or not len(x):
        raise InvalidInputError(
            f"There are {len(y)} predicted and {len(x)} actual changes.",
            "There must be equally many of both, and at least one.",
            "Each point of the plot is one perturbation.",
            "Score the same perturbations with both estimators.",
        )
    ax = draw_on(ax)
    ax.scatter(x, y, s=14, alpha=0.6, color=colour, marker=marker, linewidths=0, label=label)
    low, high = min(x.min(), y.min(), *ax.get_xlim()), max(x.max(), y.max(), *ax.get_xlim())
    ax.axline((low, low), (high, high), color=GREY, linewidth=1, linestyle="--", zorder=0)
    ax.set_xlabel("actual change (retrained)")
    ax.set_ylabel("predicted change")
    if label:
        ax.legend(frameon=False)
    return ax


def landscape(solution: Solution, ax: Any = None, span: float = 0.6, levels: int = 18) -> Any:
    """Plot objective and feasible region around a solution with two parameters."""
    solution = expect_solution(solution)
    program, centre = solution.program, solution.theta
    if len(centre) != 2:
        raise InvalidInputError(
            f"The solution has {len(centre)} parameter{'s' if len(centre) != 1 else ''}.",
            "It must have 2.",
            "A landscape is drawn in the plane.",
            "Plot a smaller problem that has two parameters.",
        )
    ax, axis = draw_on(ax), torch.linspace(-span, span, 81).to(centre)
    values = torch.stack([program.rows.values(centre + torch.stack([u, v])) for v in axis for u in axis])
    size = (len(axis), len(axis))
    x, y = (axis + centre[0]).numpy(), (axis + centre[1]).numpy()
    ax.contour(x, y, values[:, 0].reshape(size).numpy(), levels=levels, cmap="Greys", linewidths=0.8, alpha=0.8)
    if program.m:
        gap = (values[:, 1:] - program.tau).T.reshape(-1, *size).numpy()
        for j in torch.nonzero(program.kinds.equal).reshape(-1).tolist():
            ax.contour(x, y, gap[j], levels=[0.0], colors=[ORANGE], linewidths=1.6)
        if bool(program.kinds.one_sided.any()):
            rows = [gap[j] for j in torch.nonzero(program.kinds.one_sided).reshape(-1).tolist()]
            worst = np.max([_refine(row) for row in rows], axis=0)
            fine = (np.linspace(axis[0], axis[-1], len(worst)) for axis in (x, y))
            where = (*fine, worst)
            ax.contourf(*where, levels=[-np.inf, 0.0], colors=[BLUE], alpha=0.10)
            ax.contour(*where, levels=[0.0], colors=[BLUE], linewidths=1.2)
    ax.plot(*centre.numpy(), marker="o", color="black", markersize=6, zorder=5)
    ax.set_aspect("equal")
    ax.set_xlabel("θ₁")
    ax.set_ylabel("θ₂")
    return ax


def arrow(start: Tensor, change: Tensor, ax: Any, label: str, colour: str, style: str = "-") -> Any:
    """Draw a change of two parameters as an arrow."""
    begin, end = start.numpy(), (start + change).numpy()
    if np.linalg.norm(end - begin) > 0:
        shape = {"arrowstyle": "-|>", "color": colour, "lw": 2, "linestyle": style, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=end, xytext=begin, arrowprops=shape, zorder=6)
    ax.plot([], [], color=colour, linestyle=style, linewidth=2, label=label)
    return ax


def ranking(
    influence: Influence, ax: Any = None, k: int = 15, target: int | str = 0, names: Sequence[str] | None = None
) -> Any:
    """Draw the k perturbations with the largest effect on a target as bars, largest on top.

    They are named by `names`, by the index of the user's DataFrame, or by their labels.
    """
    influence = _expect_influence(influence)
    top = influence.top(k, target)[::-1]
    values = [entry.value for entry in top]
    labels = [entry.label if entry.name is None else write_label(entry.name) for entry in top]
    if names is not None:
        given = expect_column(names, "`names`", {len(influence)}, per="perturbation")
        labels = [str(given[entry.index]) for entry in top]
    ax = draw_on(ax)
    ax.barh(range(len(top)), values, color=[ORANGE if value > 0 else BLUE for value in values])
    ax.set_yticks(range(len(top)), labels)
    ax.axvline(0.0, color=GREY, linewidth=1)
    ax.set_xlabel(f"change of {influence.targets[_find_target(influence, target)]} ({influence.estimator})")
    return ax


def by_group(influence: Influence, groups: Sequence[object], ax: Any = None, target: int | str = 0) -> Any:
    """Draw a box plot of the scores of each group, labelled with their sum."""
    influence, place = _expect_influence(influence), _find_target(influence, target)
    groups, ax = expect_column(groups, "`groups`", {len(influence)}, per="perturbation"), draw_on(ax)
    column = influence.values[:, place].numpy()
    named = sorted({str(group) for group in groups})
    members = [column[[str(group) == name for group in groups]] for name in named]
    labels = [f"{name}\nΣ {np.nansum(values):+.3g}" for name, values in zip(named, members, strict=True)]
    ax.boxplot(
        [values[np.isfinite(values)] for values in members],
        orientation="horizontal",
        flierprops={"marker": ".", "markersize": 3},
    )
    ax.set_yticks(range(1, 1 + len(named)), labels)
    ax.axvline(0.0, color=GREY, linewidth=1)
    ax.set_xlabel(f"change of {influence.targets[place]} ({influence.estimator})")
    return ax


def by_term(parts: Influence, ax: Any = None, k: int = 12, names: Sequence[str] | None = None) -> Any:
    """Draw the k largest scores as bars stacked by term, from the result of `DirectionalInfluence.by_term`."""
    parts = _expect_influence(parts)
    k = check_count(k, "k", meaning="So many bars are drawn.", cure="Leave it out for 12.")
    given = parts.perturbations if names is None else expect_column(names, "`names`", {len(parts)}, per="perturbation")
    ax, total = draw_on(ax), parts.values.sum(1)
    order = torch.argsort(torch.nan_to_num(total.abs(), nan=-1.0), descending=True)[:k].flip(0).tolist()
    above, below = np.zeros(len(order)), np.zeros(len(order))
    for column, name in enumerate(parts.targets):
        values = parts.values[order, column].numpy()
        if not np.any(values):
            continue
        left = np.where(values > 0, above, below)
        ax.barh(range(len(order)), values, left=left, label=name, height=0.7)
        above, below = above + np.maximum(values, 0), below + np.minimum(values, 0)
    ax.plot(total[order].numpy(), range(len(order)), "k|", markersize=12, label="total")
    ax.set_yticks(range(len(order)), [str(given[i]) for i in order])
    ax.axvline(0.0, color=GREY, linewidth=1)
    ax.set_xlabel(parts.estimator)
    ax.legend(frameon=False, fontsize=8)
    return ax


def parameter_change(change: Change, ax: Any = None, k: int = 15) -> Any:
    """Draw the k largest entries of Δθ, the change of the parameters, as bars, largest on top."""
    ax, largest = draw_on(ax), change.largest(k)[::-1]
    values = [value for _, value in largest]
    ax.barh(range(len(largest)), values, color=[ORANGE if value > 0 else BLUE for value in values])
    ax.set_yticks(range(len(largest)), [name for name, _ in largest])
    ax.axvline(0.0, color=GREY, linewidth=1)
    ax.set_xlabel("Δθ")
    return ax


def multipliers(solution: Solution, change: Change, ax: Any = None) -> Any:
    """Draw Δλ, the change of the multiplier (price) of each constraint."""
    ax = draw_on(ax)
    names, values = solution.program.names, change.multipliers.flat.detach().cpu().numpy()
    ax.bar(range(len(values)), values, color=[ORANGE if value > 0 else BLUE for value in values])
    ax.set_xticks(range(len(values)), names, rotation=30, ha="right")
    ax.axhline(0.0, color=GREY, linewidth=1)
    ax.set_ylabel("Δλ")
    return ax


def path(followed: Path, ax: Any = None, change: Change | None = None, most: int = 4) -> Any:
    """Plot θ(ε) along a path, the points where constraints switch, and the predicted change as a straight line.

    The `most` parameters that change most are drawn.
    """
    ax = draw_on(ax)
    shares, moved = followed.epsilons.numpy(), (followed.thetas - followed.thetas[0]).cpu()
    chosen = torch.argsort(moved[-1].abs(), descending=True)[:most].tolist()
    for number, i in enumerate(chosen):
        (line,) = ax.plot(shares, moved[:, i], marker="o", markersize=3, label=f"θ{i + 1}")
        if change is not None:
            predicted = [0, float(change.flat[i])]
            ax.plot([0, 1], predicted, "--", color=line.get_color(), label="predicted" if number == 0 else None)
    ax.set_ylabel("θ(ε) − θ̄")
    return _mark_events(followed, ax)


def multiplier_path(followed: Path, ax: Any = None) -> Any:
    """Plot λ(ε) of every constraint that binds somewhere on a path, and the points where constraints switch."""
    ax = draw_on(ax)
    for j, name in enumerate(followed.start.program.names):
        if bool((followed.multipliers[:, j] != 0).any()):
            ax.plot(followed.epsilons, followed.multipliers[:, j].cpu(), marker="o", markersize=3, label=name)
    ax.axhline(0.0, color=GREY, linewidth=1)
    ax.set_ylabel("λ(ε)")
    return _mark_events(followed, ax)


def _mark_events(followed: Path, ax: Any) -> Any:
    """Mark the points where constraints switch, and label the axis."""
    for event in followed.events:
        ax.axvline(event.epsilon, color=GREY, linestyle=":", linewidth=1)
        text = f"{event.name} {'becomes active' if event.binds else 'becomes inactive'}"
        ax.annotate(text, (event.epsilon, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=7)
    ax.set_xlabel("ε, the share of the perturbation that is applied")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=8)
    return ax


def history(run: Run, axes: Sequence[Any] | None = None) -> Sequence[Any]:
    """Plot the history of a training run on three axes: objective, violations f − τ and multipliers λ at every step.

    Each step sees its own batch, so the curves are noisy.
    """
    run = check_instance(run, Run, "run", meaning="Its history is drawn.", cure="Pass dif.Training(...).run().")
    panels = draw_on_panels(axes, 3, rows=3, meaning="Objective, violations and multipliers have different units.")
    recorded, names = run.history, run.end.program.names
    panels[0].plot(recorded.steps, recorded.objective, color=GREY, linewidth=1)
    for ax, rows in ((panels[1], recorded.violations), (panels[2], recorded.multipliers)):
        for j, name in enumerate(names):
            ax.plot(recorded.steps, [row[j] for row in rows], linewidth=1, label=name)
        ax.axhline(0.0, color=GREY, linewidth=1, linestyle="--", zorder=0)
        if names:
            ax.legend(frameon=False, fontsize=8)
    for ax, label in zip(panels, ("objective", "violation f − τ", "multiplier λ"), strict=True):
        ax.set_ylabel(label)
    panels[2].set_xlabel("step")
    return panels if axes is None else axes


def bound_curve(curve: BoundCurve, ax: Any = None, target: int | str | None = None) -> Any:
    """Plot the price of a constraint (target=None) or a target against the bound of the constraint, with the kinks."""
    column = None if target is None else find_column(target, curve.targets)
    if target is not None and column is None:
        raise InvalidInputError(
            f"`target` is {target!r}.",
            f"It must be None or one of the curve's targets: {', '.join(curve.targets) or 'it has none'}.",
            "The curve holds no values of other targets.",
            "Pass the target to dif.bound_curve.",
        )
    ax, values = draw_on(ax), curve.price if column is None else curve.values[:, column]
    ax.plot(curve.bounds, values, marker="o", markersize=3, color=BLUE)
    for kink in curve.kinks:
        ax.axvline(kink.bound, color=GREY, linestyle=":", linewidth=1)
        text = f"{kink.name} binds {kink.binds}"
        ax.annotate(text, (kink.bound, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=7)
    ax.set_xlabel(f"bound of {curve.constraint}")
    ax.set_ylabel("price λ" if column is None else curve.targets[column])
    return ax


def _refine(grid: np.ndarray, factor: int = 10) -> np.ndarray:
    """Interpolate values on a grid linearly, so that a corner of the maximum of several rows is drawn sharp."""
    for _ in range(2):  # along one axis, then along the other
        coarse, fine = np.arange(len(grid)), np.linspace(0, len(grid) - 1, factor * (len(grid) - 1) + 1)
        grid = np.stack([np.interp(fine, coarse, column) for column in grid.T])
    return grid


def _numbers(values: Any) -> np.ndarray:
    """Return scores, a tensor or an array as a flat array."""
    return as_numbers(values.values if isinstance(values, Influence) else values, "changes").reshape(-1).numpy()


def _expect_influence(influence: object) -> Influence:
    """Return scores; refuse other objects."""
    cure = "Pass the result of estimator.scores(target, perturbations)."
    return check_instance(influence, Influence, "influence", meaning="The plot shows scores.", cure=cure)


def _find_target(influence: Influence, target: int | str) -> int:
    """Return the number of a target that is given by name or by number."""
    place = find_column(target, influence.targets)
    if place is None:
        raise InvalidInputError(
            f"`target` is {target!r}.",
            f"It must be one of the targets {few(influence.targets, quoted=True)}, or its number.",
            "The plot shows the scores of one target.",
            "Choose one of them.",
        )
    return place
