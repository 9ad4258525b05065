"""The small network study with one setting changed at a time: ridge, data, bounds, damping, early stopping."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import dif
from dif.runtime.archive import open_atomically
from studies import cnn

VARIED: dict[str, tuple[float, ...]] = {  # values of each setting; the others stay as in the small study
    "l2": (0.003, 0.01, 0.03),
    "n": (1_000, 2_000, 4_000),
    "tau": (0.001, 0.01, 0.02),
}
DAMPINGS = (1e-3, 1e-2, 1e-1)  # values of δ in H + δI
EPOCHS = (20, 200)  # mini-batch epochs without the exact solver
TOLERANCES = (1e-1, 1e-3)  # KKT residuals at which fitting stops early
derivative = partial(dif.DirectionalInfluence, switching=False)  # the estimator of the paper


def reproduce(out: Path, base: cnn.Setting = cnn.SMALL_STUDY, show_progress: bool = True) -> list[dict[str, Any]]:
    """Run all variants, write ablation.json and return the rows of the table; finished variants are reloaded."""
    rows = list(_run_variants(out, base, show_progress))
    with open_atomically(out / "ablation.json") as file:
        file.write((json.dumps({"version": dif.__version__, "base": asdict(base), "rows": rows}, indent=2)).encode())
    return rows


def _run_variants(out: Path, base: cnn.Setting, show_progress: bool) -> Iterator[dict[str, Any]]:
    """Yield the table rows: first one study per setting, then variants of the estimator at the base solution."""
    results: dict[cnn.Setting, dict[str, Any]] = {}
    for name, values in VARIED.items():
        for value in values:
            setting = replace(base, **{name: value})
            if setting not in results:
                folder = out / ("base" if setting == base else f"{name}-{value:g}")
                options = {"resume": True, "paper_epsilon": False, "show_progress": show_progress}
                results[setting] = cnn.reproduce(setting, folder, **options)
            yield _summarize(name, value, results[setting])
    yield from _vary_estimator(out / "base", base, results[base], show_progress)


def _summarize(name: str, value: float, result: dict[str, Any]) -> dict[str, Any]:
    """Return the table row of a network study."""
    agreement = result["compared"][cnn.RENORMALISED]["agreement"]
    kkt = result["kkt"]
    return {
        "varied": name,
        "value": value,
        "residual": max(kkt["stationarity"], kkt["feasibility"], kkt["complementarity"]),
        "tangent_curvature": result["tangent_curvature"],
        "binding": len(result["binding"]),
        "damping": 0.0,
        "DIF": agreement.get("DIF", {}),
        "Newton": agreement.get("Newton", {}),
        "classical IF": agreement.get("classical IF", {}),
    }


def _vary_estimator(
    folder: Path, base: cnn.Setting, result: dict[str, Any], show_progress: bool
) -> Iterator[dict[str, Any]]:
    """Compare DIF with damping, and DIF where training stopped early, with the same retrainings."""
    task = cnn.build_task(base, None, "cpu")
    solution = cnn.load_or_fit(task, base, folder, show_progress)
    test = cnn.find_target(task, solution)[3]
    removals = task.train.remove_each(result["removed"])
    actual = dif.Retraining(solution, keep=folder / "retrained", strict=False).scores(test, removals).values

    def row(name: str, value: float, at: dif.Solution, estimator: Any, damping: float) -> dict[str, Any]:
        agreement = {}
        if estimator is not None:
            agreement = cnn.measure_agreement(estimator.scores(test, removals, assess=0).values, actual)
        return {
            "varied": name,
            "value": value,
            "residual": at.kkt.residual,
            "tangent_curvature": at.active.curvature,
            "binding": len(at.active.binding),
            "damping": damping,
            "DIF": agreement,
        }

    for damping in DAMPINGS:
        yield row("damping", damping, solution, derivative(solution, damping=damping), damping)
    stages = [("mini-batches only, epochs", epochs) for epochs in EPOCHS] + [("stopped at", tol) for tol in TOLERANCES]
    for name, value in stages:
        if name == "stopped at":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", dif.NotConvergedWarning)
                early = cnn.fit(task, base, show_progress, tol=value)
        else:
            early = cnn.train(task, replace(base, epochs=int(value)), show_progress).end
        damped = cnn.find_least_damping(
            lambda damping, at=early: derivative(at, damping=damping, strict=False), test, task.train
        )
        yield row(name, value, early, *(damped or (None, float("nan"))))
