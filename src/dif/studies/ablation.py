"""What the agreement of the network study depends on: the ridge, the data, the bounds, damping, stopping early."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import dif
from dif.runtime.atomic_file import written
from dif.studies import cnn

VARIED: dict[str, tuple[float, ...]] = {  # one at a time, the others as in the small study
    "l2": (0.003, 0.01, 0.03),
    "n": (1_000, 2_000, 4_000),
    "tau": (0.001, 0.01, 0.02),
}
DAMPED = (1e-3, 1e-2, 1e-1)
derivative = partial(dif.DirectionalInfluence, switching=False)  # the paper's
EPOCHS = (20, 200)  # of mini-batches, and nothing after them
STOPPED = (1e-1, 1e-3)  # KKT residuals


def reproduce(out: Path, base: cnn.Setting = cnn.SMALL_STUDY, show_progress: bool = True) -> list[dict[str, Any]]:
    """All rows of the table, each kept in its folder as soon as it is done; ablation.json has every number."""
    rows = list(_rows(out, base, show_progress))
    with written(out / "ablation.json") as file:
        file.write((json.dumps({"version": dif.__version__, "base": asdict(base), "rows": rows}, indent=2)).encode())
    return rows


def _rows(out: Path, base: cnn.Setting, show_progress: bool) -> Iterator[dict[str, Any]]:
    results: dict[cnn.Setting, dict[str, Any]] = {}
    for name, values in VARIED.items():
        for value in values:
            setting = replace(base, **{name: value})
            if setting not in results:
                folder = out / ("base" if setting == base else f"{name}-{value:g}")
                options = {"resume": True, "paper_epsilon": False, "show_progress": show_progress}
                results[setting] = cnn.reproduce(setting, folder, **options)
            yield _of_study(name, value, results[setting])
    yield from _at_one_solution(out / "base", base, results[base], show_progress)


def _of_study(name: str, value: float, result: dict[str, Any]) -> dict[str, Any]:
    found = result["compared"][cnn.RENORMALISED]["agreement"]
    kkt = result["kkt"]
    return {
        "varied": name,
        "value": value,
        "residual": max(kkt["stationarity"], kkt["feasibility"], kkt["complementarity"]),
        "tangent_curvature": result["tangent_curvature"],
        "binding": len(result["binding"]),
        "damping": 0.0,
        "DIF": found.get("DIF", {}),
        "Newton": found.get("Newton", {}),
        "classical IF": found.get("classical IF", {}),
    }


def _at_one_solution(
    folder: Path, base: cnn.Setting, result: dict[str, Any], show_progress: bool
) -> Iterator[dict[str, Any]]:
    """DIF damped, and DIF at points where training stopped early, against the same retrainings."""
    stated = cnn.posed(base, None, "cpu")
    solution = cnn.solved(stated, base, folder, show_progress)
    test = cnn.target_of(stated, solution)[3]
    removals = stated.train.remove_each(result["removed"])
    actual = dif.Retraining(solution, keep=folder / "retrained", strict=False).scores(test, removals).values

    def row(name: str, value: float, at: dif.Solution, estimator: Any, damping: float) -> dict[str, Any]:
        found = {} if estimator is None else cnn.agreement(estimator.scores(test, removals, assess=0).values, actual)
        return {
            "varied": name,
            "value": value,
            "residual": at.kkt.residual,
            "tangent_curvature": at.active.curvature,
            "binding": len(at.active.binding),
            "damping": damping,
            "DIF": found,
        }

    for damping in DAMPED:
        yield row("damping", damping, solution, derivative(solution, damping=damping), damping)
    batches = math.ceil(base.n / cnn.BATCH)
    only = [("mini-batches only, epochs", replace(base, epochs=e), {"max_iter": e * batches}) for e in EPOCHS]
    for name, setting, limits in [*only, *(("stopped at", base, {"tol": tol}) for tol in STOPPED)]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dif.NotConvergedWarning)
            early = cnn.fitted(stated, setting, show_progress, **limits)
        found = cnn.least_damped(
            lambda damping, at=early: derivative(at, damping=damping, strict=False), test, stated.train
        )
        value = limits.get("tol", setting.epochs)
        yield row(name, value, early, *(found or (None, float("nan"))))
