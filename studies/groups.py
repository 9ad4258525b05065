"""Remove groups of digits at once, and move a bound: DIF, Newton and the path against fitting from scratch."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dif
from dif.derivatives.program import Targets
from dif.estimators.adaptive import WARN_ABOVE
from dif.report import plots
from dif.runtime.work import progress
from studies import results
from studies.digits import Task, build_task

SHARES = (0.01, 0.05, 0.1, 0.2)  # sizes of the removed groups, as shares of the data
BOUNDS = (-0.003, 0.02, 24)  # first bound, last bound, number of bounds
ACCURACY = 0.01  # relative error asked of dif.AdaptiveInfluence


def choose_groups(task: Task, seed: int = 0) -> list[tuple[str, float, list[int]]]:
    """Return kind, share and samples of groups: random, from one class (then the next), from one protected group."""
    n = len(task.train)
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for share in SHARES:
        k = int(share * n)
        for _ in range(3):
            groups.append(("random", share, torch.randperm(n, generator=generator)[:k].tolist()))
        for digit in (3, 8):
            order = torch.argsort((task.labels - digit) % 10, stable=True)
            groups.append(("one class", share, order[:k].tolist()))
        for g in (0, 1):
            members = torch.nonzero(task.group == g).reshape(-1)
            members = members[torch.randperm(len(members), generator=generator)]
            groups.append(("protected group", share, members[:k].tolist()))
    return groups


def run(show_progress: bool = True) -> dict[str, Any]:
    """Run all parts of the study and return the numbers."""
    task = build_task()
    solution = task.fit()
    result: dict[str, Any] = {"multipliers": solution.lam.tolist(), "parameters": solution.theta.numel()}
    with progress("groups of digits", 4, show_progress) as report:
        result |= compare_removals(task, solution)
        report(2)
        result |= sweep_bound(task, solution)
        report(3)
        result |= compare_unconstrained()
    return result


def compare_removals(task: Task, solution: dif.Solution) -> dict[str, Any]:
    """Remove each group with each estimator and by fitting from scratch; return errors, times and warnings."""
    groups = choose_groups(task)
    removals = task.train.remove_groups([index for _, _, index in groups])
    targets = list(task.targets.values())
    seconds: dict[str, float] = {}
    seconds_each: dict[str, list[float]] = {}

    def measure_time(name: str, make: Any) -> Any:
        """Call `make` and record its seconds under the name."""
        start = time.perf_counter()
        result = make()
        seconds[name] = time.perf_counter() - start
        return result

    def measure_each(name: str, make: Any, inputs: Any) -> list[Any]:
        """Call `make` on each input and record the seconds of each call and their sum."""
        outputs = [measure_time(f"{name}, {k}", lambda x=x: make(x)) for k, x in enumerate(inputs)]
        seconds_each[name] = [seconds.pop(f"{name}, {k}") for k in range(len(outputs))]
        seconds[name] = sum(seconds_each[name])
        return outputs

    scratch = measure_each("from scratch", task.fit_without, [index for _, _, index in groups])
    actual_changes = torch.stack([s.theta - solution.theta for s in scratch])
    estimators = {
        "DIF": dif.DirectionalInfluence(solution, switching=False),  # as in the paper
        "Newton": dif.NewtonInfluence(solution),
        "path": dif.PathInfluence(solution),
    }
    changes = {name: measure_each(name, e.change, removals) for name, e in estimators.items()}
    measure_time("warm retraining", lambda: [dif.Retraining(solution).change(r) for r in removals])
    errors = {
        name: [
            float((c.flat - actual).norm() / actual.norm()) for c, actual in zip(predicted, actual_changes, strict=True)
        ]
        for name, predicted in changes.items()
    }
    truth = torch.stack([_evaluate(targets, s) for s in scratch]) - _evaluate(targets, solution)
    adaptive = dif.AdaptiveInfluence(solution, accuracy=ACCURACY)
    answers = [measure_time(f"accuracy {ACCURACY:g}, {name}", lambda target=target: adaptive.scores(target, removals))
               for name, target in task.targets.items()]  # fmt: skip
    largest_errors = [((a.values[:, 0] - truth[:, t]) / truth[:, t]).abs().max().item() for t, a in enumerate(answers)]
    return {
        "groups": [{"kind": kind, "share": share, "size": len(index)} for kind, share, index in groups],
        "errors": errors,
        "events": [c.diagnostics["events"] for c in changes["path"]],
        "seconds": seconds,
        "seconds_each": seconds_each,
        "warning": count_warnings(task, solution, removals, truth),
        "accuracy": {
            "wanted": ACCURACY,
            "largest error": dict(zip(task.targets, largest_errors, strict=True)),
            "by": {name: _count(a.diagnostics["by"]) for name, a in zip(task.targets, answers, strict=True)},
        },
    }


def count_warnings(task: Task, solution: dif.Solution, removals: dif.Perturbation, truth: Tensor) -> dict[str, Any]:
    """Count how often the warning is given where DIF is inaccurate and where it is accurate.

    No complete removal of a group leaves DIF accurate to 1 %, so the same groups are also down-weighted by 1 % only.
    """
    targets = list(task.targets.values())
    partial = 0.01 * removals
    retrained = dif.Retraining(solution, tol=1e-13).scores(targets, partial).values
    grouped = dif.AdaptiveInfluence(solution)
    expected, error = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dif.FirstOrderWarning)  # counted below
        for t, target in enumerate(targets):
            for perturbation, actual in ((removals, truth[:, t]), (partial, retrained[:, t])):
                scores = grouped.scores(target, perturbation)
                expected += scores.diagnostics["remainders"]
                error += ((scores.values[:, 0] - actual) / actual).abs().tolist()
    off, fired = torch.tensor(error), torch.tensor(expected) > WARN_ABOVE
    return {
        "threshold": WARN_ABOVE,
        "beyond 10 %": int((off > 0.1).sum()),
        "fired beyond 10 %": float(fired[off > 0.1].double().mean()),
        "below 1 %": int((off < 0.01).sum()),
        "fired below 1 %": float(fired[off < 0.01].double().mean()),
        "foreseen": expected,
        "actual": error,
    }


def sweep_bound(task: Task, solution: dif.Solution) -> dict[str, Any]:
    """Sweep the bound of group 0 and compare the curve with fitting from scratch at each bound."""
    bounds = torch.linspace(*BOUNDS, dtype=torch.float64)  # type: ignore[arg-type]
    start = time.perf_counter()
    curve = dif.bound_curve(solution, task.problem.constraints[0], bounds, list(task.targets.values()))
    seconds_curve = time.perf_counter() - start
    start = time.perf_counter()
    refitted = [_fit_at_bound(task, float(b)) for b in curve.bounds]
    seconds_scratch = time.perf_counter() - start
    difference = max(
        float((torch.stack([_evaluate(list(task.targets.values()), s) for s in refitted]) - curve.values).abs().max()),
        max(abs(s.objective - float(v)) for s, v in zip(refitted, curve.objective, strict=True)),
        max(abs(float(s.lam[0]) - float(v)) for s, v in zip(refitted, curve.price, strict=True)),
    )
    kinks = []
    for kink in curve.kinks:
        row = solution.program.names.index(kink.name)
        below, above = (float(_fit_at_bound(task, kink.bound + side).lam[row]) for side in (-1e-6, 1e-6))
        confirmed = (below > 0) == (kink.binds == "below") and (above > 0) == (kink.binds == "above")
        kinks.append({"bound": kink.bound, "name": kink.name, "binds": kink.binds, "confirmed": confirmed,
                      "multiplier 1e-6 below": below, "multiplier 1e-6 above": above})  # fmt: skip
    return {
        "curve": {
            "bounds": curve.bounds.tolist(), "price": curve.price.tolist(), "objective": curve.objective.tolist(),
            "values": curve.values.tolist(), "targets": list(task.targets), "kinks": kinks, "lost": list(curve.lost),
            "largest_difference": difference, "seconds": seconds_curve, "seconds_from_scratch": seconds_scratch,
        },
    }  # fmt: skip


def compare_unconstrained(count: int = 20) -> dict[str, Any]:
    """Remove random groups of 5 % without constraints: classical influence, one Newton step and the path."""
    task = build_task(constrained=False)
    solution, n = task.fit(), len(task.train)
    generator = torch.Generator().manual_seed(1)
    groups = [torch.randperm(n, generator=generator)[: int(0.05 * n)].tolist() for _ in range(count)]
    removals, target = task.train.remove_groups(groups), task.test.mean()
    refitted = [task.fit_without(group) for group in groups]
    truth = torch.stack([_evaluate([target], s) for s in refitted]) - _evaluate([target], solution)
    estimators: dict[str, Any] = {
        "plain IF": dif.ClassicalInfluence(solution),
        "Newton": dif.NewtonInfluence(solution),
        "path": dif.PathInfluence(solution),
    }
    agreement = {name: dif.Agreement.of(e.scores(target, removals).values, truth) for name, e in estimators.items()}
    return {"unconstrained": {name: {"relative_error": a.relative_error, "pearson": a.pearson}
                              for name, a in agreement.items()}}  # fmt: skip


def _fit_at_bound(task: Task, bound: float) -> dif.Solution:
    first, second = task.problem.constraints
    moved = (first.term <= bound).named("group 0")
    return dif.fit(dif.Problem(task.problem.objective, [moved, second]), task.start, show_progress=False)


def _evaluate(targets: list[dif.Term], solution: dif.Solution) -> Tensor:
    return Targets(targets, solution).values(solution.theta)


def _count(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}


def reproduce(out: Path, show_progress: bool = True) -> dict[str, Any]:
    """Run the study, write groups.json and groups.png, and return the numbers; reload them if they exist."""
    known = results.load_finished(out / "groups.json", out / "groups.png")
    if known is not None:
        return known
    out.mkdir(parents=True, exist_ok=True)
    result = {"study": "groups", "version": dif.__version__, **run(show_progress)}
    results.write(out / "groups.json", result)
    draw_figure(out / "groups.png", result)
    return result


def draw_figure(path: Path, result: dict[str, Any]) -> None:
    """Draw errors by share, expected against actual errors, and the price of the constraint against its bound."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(14.4, 4.4), layout="constrained")
    left, middle, right = canvas.subplots(1, 3)
    shares = [100 * group["share"] for group in result["groups"]]
    for name, colour in (("DIF", plots.ORANGE), ("Newton", plots.GREEN), ("path", plots.BLUE)):
        left.loglog(shares, result["errors"][name], "o", color=colour, alpha=0.6, label=name)
    left.set_xlabel("removed share of the data (%)")
    left.set_ylabel("relative error of Δθ against fitting from scratch")
    left.legend(frameon=False)
    warning = result["warning"]
    middle.loglog(warning["actual"], warning["foreseen"], "o", color=plots.ORANGE, alpha=0.6)
    middle.axline((0.1, 0.1), (1.0, 1.0), color=plots.GREY, linewidth=1, linestyle="--")
    middle.axhline(warning["threshold"], color=plots.GREY, linewidth=1, linestyle=":")
    middle.set_xlabel("actual relative error of DIF")
    middle.set_ylabel("expected relative error of DIF")
    curve = result["curve"]
    right.plot(curve["bounds"], curve["price"], "o-", markersize=3, color=plots.BLUE)
    for kink in curve["kinks"]:
        right.axvline(kink["bound"], color=plots.GREY, linestyle=":", linewidth=1)
    right.set_xlabel("bound τ of group 0")
    right.set_ylabel("price λ")
    canvas.savefig(path, dpi=130)
