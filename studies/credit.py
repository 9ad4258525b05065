"""A fair credit score on real data: DIF and classical influence compared with retraining without each credit."""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import as_file, files
from pathlib import Path
from runpy import run_path
from typing import Any

import dif
from dif.report import plots
from studies import results


def reproduce(out: Path, show_progress: bool = True) -> dict[str, Any]:
    """Score and retrain all 700 removals, write credit.json and credit.png; reload them if they exist."""
    known = results.load_finished(out / "credit.json", out / "credit.png")
    if known is not None:
        return known
    with as_file(files("dif") / "examples" / "credit.py") as path:
        told = run_path(str(path))
    out.mkdir(parents=True, exist_ok=True)
    solution, removals = told["solution"], told["train"].remove_each()
    targets = list(told["targets"].values())
    actual = dif.Retraining(solution).scores(targets, removals)
    estimators = {
        "classical IF": dif.ClassicalInfluence(solution),
        "DIF": dif.DirectionalInfluence(solution),
        "Newton": dif.NewtonInfluence(solution),
    }
    scores = {name: estimator.scores(targets, removals, assess=0) for name, estimator in estimators.items()}
    result = {
        "study": "credit",
        "version": dif.__version__,
        "removals": len(removals),
        "binding": [solution.active.names[j] for j in solution.active.binding],
        "largest_residual": max(actual.diagnostics["residuals"]),
        "agreement": {
            target: {
                name: asdict(dif.Agreement.of(influence.values[:, t], actual.values[:, t]))
                for name, influence in scores.items()
            }
            for t, target in enumerate(told["targets"])
        },
    }
    results.write(out / "credit.json", result)
    predicted = {name: influence.values[:, 0] for name, influence in scores.items()}
    _draw_figure(out / "credit.png", result, predicted, actual.values[:, 0])
    return result


def _draw_figure(path: Path, result: dict[str, Any], predicted: dict[str, Any], actual: Any) -> None:
    from matplotlib.figure import Figure

    target = next(iter(result["agreement"]))
    canvas = Figure(figsize=(9.6, 4.4), layout="constrained")
    for ax, name, colour in zip(
        canvas.subplots(1, 2), ("classical IF", "DIF"), (plots.BLUE, plots.ORANGE), strict=True
    ):
        agreement = result["agreement"][target][name]
        label = f"r = {agreement['pearson']:.3f}, slope {agreement['slope']:.2f}"
        plots.predicted_vs_actual(predicted[name], actual, ax, label, colour)
        ax.set_title(name)
    canvas.suptitle(f"{target} after removing each of {result['removals']} credits; binding: {result['binding'][0]}")
    canvas.savefig(path, dpi=130)
