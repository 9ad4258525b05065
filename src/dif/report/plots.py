"""Plots with matplotlib. Each function draws on the axes it is given, or on new ones, and returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dif import BoundCurve, Change, Influence, InvalidInputError, Run
from dif.errors import few
from dif.report.subjects import expect_column, list_entries
from dif.results.influence import TRUSTED
from dif.results.selection import find_column
from dif.runtime.inputs import as_numbers, check_instance, write_label
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
            f"There are {len(y)} predicted and {len(x)} actual changes; there must be equally many, at least one."
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


def ranking(
    influence: Influence, ax: Any = None, k: int = 15, target: int | str = 0, names: Sequence[str] | None = None
) -> Any:
    """Draw the k perturbations with the largest effect on a target as bars, largest on top.

    They are named by `names`, by the index of the user's DataFrame, or by their labels. Bars of scores that cannot be
    trusted are hatched.
    """
    influence = check_instance(influence, Influence, "influence")
    top = influence.top(k, target)[::-1]
    values = [entry.value for entry in top]
    labels = [entry.label if entry.name is None else write_label(entry.name) for entry in top]
    if names is not None:
        given = expect_column(names, "`names`", {len(influence)}, per="perturbation")
        labels = [str(given[entry.index]) for entry in top]
    column = _find_target(influence.targets, target)
    ax = _draw_bars(ax, values, labels, _describe(influence, column))
    untrusted, errors = _is_untrusted(influence, column), influence.expected_error
    for bar, entry in zip(ax.patches[-len(top) :], top, strict=True):
        if untrusted or errors[entry.index] > TRUSTED:
            bar.set(hatch="//", fill=False, edgecolor=bar.get_facecolor())
    return ax


def by_group(influence: Influence, groups: Sequence[object], ax: Any = None, target: int | str = 0) -> Any:
    """Draw a box plot of the scores of each group, labelled with their sum."""
    place = _find_target(check_instance(influence, Influence, "influence").targets, target)
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
    ax.set_xlabel(_describe(influence, place))
    return ax


def parameter_change(change: Change, ax: Any = None, k: int = 15) -> Any:
    """Draw the k largest entries of Δθ, the change of the parameters, as bars, largest on top."""
    largest = change.largest(k)[::-1]
    return _draw_bars(ax, [value for _, value in largest], [name for name, _ in largest], "Δθ")


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
        _mark(ax, event.epsilon, f"{event.name} {'becomes active' if event.binds else 'becomes inactive'}")
    ax.set_xlabel("ε, the share of the perturbation that is applied")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=8)
    return ax


def history(run: Run, axes: Sequence[Any] | None = None) -> Sequence[Any]:
    """Plot the history of a training run on three axes: objective, violations f − τ and multipliers λ at every step.

    Each step sees its own batch, so the curves are noisy.
    """
    check_instance(run, Run, "run", "it comes from dif.Training(...).run()")
    panels: list[Any] = _open_figure(3) if axes is None else list_entries(axes) or [axes]
    if len(panels) != 3 or not all(map(_is_axes, panels)):
        raise InvalidInputError(f"`axes` must be 3 axes of matplotlib, or None for a new figure, not {len(panels)}.")
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
    column = None if target is None else _find_target(curve.targets, target)
    ax, values = draw_on(ax), curve.price if column is None else curve.values[:, column]
    ax.plot(curve.bounds, values, marker="o", markersize=3, color=BLUE)
    for kink in curve.kinks:
        _mark(ax, kink.bound, f"{kink.name} binds {kink.binds}")
    ax.set_xlabel(f"bound of {curve.constraint}")
    ax.set_ylabel("price λ" if column is None else curve.targets[column])
    return ax


def draw_on(ax: Any) -> Any:
    """Return the given axes, or those of a new figure; refuse other objects."""
    if ax is None:
        return _open_figure(1)[0]
    if not _is_axes(ax):
        raise InvalidInputError(f"`ax` must be axes of matplotlib, or None for a new figure, not {type(ax).__name__}.")
    return ax


def _open_figure(rows: int) -> list[Any]:
    """Return the axes of a new pyplot figure; notebooks show it, `pyplot.show()` opens a window."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('Plots need matplotlib. Install it: pip install "directional-influence[studies]"') from error
    _, axes = pyplot.subplots(rows, figsize=(6.4, 4.8), squeeze=False, sharex=True, layout="constrained")
    return list(axes.reshape(-1))


def _is_axes(ax: Any) -> bool:
    return hasattr(ax, "plot") and hasattr(ax, "set_xlabel")


def _draw_bars(ax: Any, values: Sequence[float], labels: Sequence[str], what: str) -> Any:
    """Draw one horizontal bar for each value, from below."""
    ax = draw_on(ax)
    ax.barh(range(len(values)), values, color=[ORANGE if value > 0 else BLUE for value in values])
    ax.set_yticks(range(len(values)), labels)
    ax.axvline(0.0, color=GREY, linewidth=1)
    ax.set_xlabel(what)
    return ax


def _mark(ax: Any, x: float, text: str) -> None:
    """Draw a dotted vertical line with a text beside it."""
    ax.axvline(x, color=GREY, linestyle=":", linewidth=1)
    ax.annotate(text, (x, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=7)


def _numbers(values: Any) -> np.ndarray:
    """Return scores, a tensor or an array as a flat array."""
    return as_numbers(values.values if isinstance(values, Influence) else values, "changes").reshape(-1).numpy()


def _describe(influence: Influence, column: int) -> str:
    """Return the label of an axis with the scores of one target."""
    doubt = ", not trusted" if _is_untrusted(influence, column) else ""
    return f"change of {influence.targets[column]} ({influence.estimator}{doubt})"


def _is_untrusted(influence: Influence, column: int) -> bool:
    return influence.trusted_by_target[influence.targets[column]] is False


def _find_target(targets: Sequence[str], target: int | str) -> int:
    """Return the number of a target that is given by name or by number."""
    place = find_column(target, targets)
    if place is None:
        known = few(targets, quoted=True) or "(there are none)"
        raise InvalidInputError(f"`target` must be one of the targets {known}, or its number, not {target!r}.")
    return place
