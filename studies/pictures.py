"""Pictures of the results of `dif.evaluation`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any

import torch

from dif.evaluation import DatamodellingScore, LabelErrors, LeaveOneOut, RemovalCurve

GREY = "#6b7280"  # colour of references: random choices, the line y = x
_COLOURS = ("#2563eb", "#ea7317", "#15803d", "#9333ea", "#db2777", "#0891b2")  # of the methods, in their order


def draw_correlations(result: DatamodellingScore, ax: Any) -> None:
    """Draw the correlations of all targets as one box per method, with the score as a diamond."""
    labels = []
    for place, (name, colour) in enumerate(reversed(list(_colour_methods(result.predicted)))):
        values, score = result.correlations[name], result.scores[name]
        boxes = ax.boxplot(
            values[torch.isfinite(values)].numpy(), positions=[place], orientation="horizontal", widths=0.6,
            patch_artist=True, flierprops={"marker": ".", "markersize": 3}, medianprops={"color": colour},
        )  # fmt: skip
        boxes["boxes"][0].set(facecolor=colour, alpha=0.25)
        error = result.standard_errors[name]
        ax.errorbar(score, place, xerr=error, color=colour, marker="D", markersize=6, capsize=4)
        labels.append(f"{name}\nLDS {f'{score:.3f}' if math.isfinite(score) else '–'}")
    ax.set_yticks(range(len(labels)), labels)
    ax.axvline(0.0, color=GREY, linewidth=1)
    ax.set_xlabel("rank correlation with retraining, per target")


def draw_singles(result: LeaveOneOut, axes: Sequence[Any]) -> None:
    """Plot predicted against actual changes, one panel per method, with the line y = x.

    Panels have their own vertical scale, since scores of some methods are not in the unit of the target.
    """
    for ax, (name, colour) in zip(axes, _colour_methods(result.predicted), strict=True):
        actual, predicted = result.actual.reshape(-1).numpy(), result.predicted[name].reshape(-1).numpy()
        ax.scatter(actual, predicted, s=14, alpha=0.6, color=colour, linewidths=0)
        limits = ax.get_ylim()
        ax.axline((0.0, 0.0), slope=1.0, color=GREY, linewidth=1, linestyle="--", zorder=0)
        ax.set_ylim(limits)
        ax.set_title(f"{name}, r = {result.agreements[name].pearson:.3f}", fontsize=10)
        ax.set_xlabel("actual change (retrained)")
    axes[0].set_ylabel("predicted change")


def draw_curve(result: RemovalCurve, ax: Any) -> None:
    """Plot the change of the target against k, with a band from the least to the greatest random change."""
    at = [0, *result.counts]
    if len(result.random):
        curves = torch.cat([torch.zeros(len(result.random), 1), result.random], 1).numpy()
        ax.fill_between(at, curves.min(0), curves.max(0), color=GREY, alpha=0.25, linewidth=0)
        label = f"random ({len(result.random)} orders)"
        ax.plot(at, curves.mean(0), color=GREY, linestyle="--", marker="o", markersize=3, label=label)
    for name, colour in _colour_methods(result.changes):
        ax.plot(at, [0.0, *result.changes[name].tolist()], color=colour, marker="o", markersize=4, label=name)
    ax.axhline(0.0, color=GREY, linewidth=1)
    ax.set_xlabel(f"samples removed, first those that should {'lower' if result.lower else 'raise'} it most")
    ax.set_ylabel(f"change of {result.target} (retrained)")
    ax.legend(frameon=False)


def draw_label_errors(result: LabelErrors, ax: Any) -> None:
    """Plot the share of wrong labels found against the share of samples inspected."""
    inspected = torch.arange(len(result.wrong) + 1) / len(result.wrong)
    for name, colour in _colour_methods(result.suspicion):
        order = torch.argsort(result.suspicion[name], descending=True, stable=True)
        found = torch.cumsum(result.wrong[order].double(), 0) / result.wrong.sum()
        ax.plot(inspected, [0.0, *found.tolist()], color=colour, label=f"{name}, AUC {result.areas[name]:.3f}")
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    ax.set_xlabel("share of samples inspected")
    ax.set_ylabel("share of wrong labels found")
    ax.legend(frameon=False)


def _colour_methods(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each name with its colour; grey for the name "random"."""
    colours = cycle(_COLOURS)
    return ((name, GREY if name == "random" else next(colours)) for name in names)
