"""Real credits under a fairness constraint: DIF and classical influence against retraining without every single one."""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import dif
from dif import plots
from dif.report.description import Description
from dif.studies import results


def reproduce(out: Path, show_progress: bool = True) -> dict[str, Any]:
    """Score all 700 removals with each estimator, retrain all 700, write credit.json and credit.png; not twice."""
    known = results.finished(out / "credit.json", out / "credit.png")
    if known is not None:
        return known
    with as_file(files("dif") / "examples" / "credit.py") as path:
        told = Description.read(path)
    out.mkdir(parents=True, exist_ok=True)
    solution, removals = told.solution, told.train.remove_each()
    targets = list(told.targets.values())
    actual = dif.Retraining(solution, show_progress=show_progress).scores(targets, removals)
    made = {
        "classical IF": dif.ClassicalInfluence(solution),
        "DIF": dif.DirectionalInfluence(solution),
        "Newton": dif.NewtonInfluence(solution, show_progress=show_progress),
    }
    scores = {name: one.scores(targets, removals, assess=0) for name, one in made.items()}
    result = {
        "study": "credit",
        "version": dif.__version__,
        "removals": len(removals),
        "binding": [solution.active.names[j] for j in solution.active.binding],
        "largest_residual": max(actual.diagnostics["residuals"]),
        "agreement": {
            target: {
                name: asdict(dif.Agreement.of(one.values[:, t], actual.values[:, t])) for name, one in scores.items()
            }
            for t, target in enumerate(told.targets)
        },
    }
    results.write(out / "credit.json", result)
    _figure(out / "credit.png", result, {name: one.values[:, 0] for name, one in scores.items()}, actual.values[:, 0])
    return result


def _figure(path: Path, result: dict[str, Any], predicted: dict[str, Any], actual: Any) -> None:
    from matplotlib.figure import Figure

    target = next(iter(result["agreement"]))
    canvas = Figure(figsize=(9.6, 4.4), layout="constrained")
    for ax, name, colour in zip(
        canvas.subplots(1, 2), ("classical IF", "DIF"), (plots.BLUE, plots.ORANGE), strict=True
    ):
        found = result["agreement"][target][name]
        words = f"r = {found['pearson']:.3f}, slope {found['slope']:.2f}"
        plots.predicted_vs_actual(predicted[name], actual, ax, words, colour)
        ax.set_title(name)
    canvas.suptitle(f"{target} after removing each of {result['removals']} credits; held by “{result['binding'][0]}”")
    canvas.savefig(path, dpi=130)
