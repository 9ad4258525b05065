"""The figures of the network study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dif.report import plots
from studies.data import mnist
from studies.network import REEVALUATED, RENORMALISED


def draw_figure(path: Path, result: dict[str, Any]) -> None:
    """Draw predicted against actual changes with the line y = x, one panel per estimator.

    Estimators that predict the same share a panel: without equality constraints, penalty IF is classical IF.
    """
    from matplotlib.figure import Figure

    part = result["compared"][RENORMALISED]
    actual = torch.tensor(part["actual"])
    shown = _group_equal({name: x for name, x in part["predicted"].items() if REEVALUATED not in name})
    canvas = Figure(figsize=(4.2 * len(shown), 4.4), layout="constrained")
    for ax, names in zip(canvas.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        name = names[0]
        agreement = part["agreement"][name]
        label = f"r = {agreement['pearson']:.3f}, slope {agreement['slope']:.2f}" if "pearson" in agreement else "none"
        colour = plots.ORANGE if name.startswith("DIF") else plots.GREEN if name == "Newton" else plots.BLUE
        plots.predicted_vs_actual(torch.tensor(part["predicted"][name]), actual, ax, label, colour)
        remark = result["remarks"].get(name, "")
        ax.set_title(" = ".join(names) + (f"\n{remark[remark.find('damped') :]}" if "damped" in remark else ""))
    binding = ", ".join(result["binding"])
    setting, target = result["setting"], result["test_image"]
    canvas.suptitle(
        f"Loss of test image {target['index']} (a {target['label']} taken for a {target['taken_for']}), "
        f"{len(actual)} removals of {setting['n']}, L2 {setting['l2']:g}, τ {setting['tau']:g}, binding: {binding}"
    )
    canvas.savefig(path, dpi=130)


def _group_equal(predicted: dict[str, list[float]]) -> list[list[str]]:
    """Return the names of the estimators, those with equal predictions together."""
    groups: list[list[str]] = []
    for name, values in predicted.items():
        for group in groups:
            if np.allclose(predicted[group[0]], values, rtol=1e-6, atol=0.0, equal_nan=True):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def draw_images(path: Path, result: dict[str, Any], data: str | None) -> None:
    """Draw the test image and the training images whose removal raises or lowers its loss most."""
    from matplotlib.figure import Figure

    digits = mnist(result["setting"]["n"], 1_000, data=data)
    canvas = Figure(figsize=(11, 3.6), layout="constrained")
    axes = canvas.subplots(2, 9)
    target = result["test_image"]["index"]
    for row, kind in enumerate(("helpful", "harmful")):
        axes[row][0].imshow(digits.test[target].numpy(), cmap="gray_r")
        axes[row][0].set_title("test image" if row == 0 else "", fontsize=8)
        for ax, sample in zip(axes[row][1:], result[kind], strict=True):
            ax.imshow(digits.train[sample["index"]].numpy(), cmap="gray_r")
            ax.set_title(f"{sample['score']:+.4f}", fontsize=8)
        axes[row][1].set_ylabel(kind)
        for ax in axes[row]:
            ax.set_xticks([])
            ax.set_yticks([])
    canvas.suptitle("Predicted change of the test image's loss (DIF) when the training image is removed")
    canvas.savefig(path, dpi=130)
