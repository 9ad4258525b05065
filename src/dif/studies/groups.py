"""Groups of digits removed at once, and a bound that moves: DIF, Newton and the path against training from scratch."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dif
from dif import plots
from dif.estimators.adaptive import SAID
from dif.optimality.targets import Targets
from dif.runtime.progress import progress
from dif.studies import results
from dif.studies.digits import Digits, posed

SHARES = (0.01, 0.05, 0.1, 0.2)
BOUNDS = (-0.003, 0.02, 24)  # from, to, how many
ACCURACY = 0.01


def chosen_groups(stated: Digits, seed: int = 0) -> list[tuple[str, float, list[int]]]:
    """Kind, share and samples of each group: random ones, those of one class (then another), of one protected group."""
    n = len(stated.train)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for share in SHARES:
        k = int(share * n)
        for _ in range(3):
            found.append(("random", share, torch.randperm(n, generator=generator)[:k].tolist()))
        for digit in (3, 8):
            order = torch.argsort((stated.labels - digit) % 10, stable=True)
            found.append(("one class", share, order[:k].tolist()))
        for g in (0, 1):
            mine = torch.nonzero(stated.group == g).reshape(-1)
            mine = mine[torch.randperm(len(mine), generator=generator)]
            found.append(("protected group", share, mine[:k].tolist()))
    return found


def run(show_progress: bool = True) -> dict[str, Any]:
    """Everything that the page says."""
    stated = posed()
    solution = stated.solved()
    found: dict[str, Any] = {"multipliers": solution.lam.tolist(), "parameters": solution.theta.numel()}
    with progress("groups of digits", 4, show_progress) as report:
        found |= removed_groups(stated, solution)
        report(2)
        found |= moved_bound(stated, solution)
        report(3)
        found |= unconstrained()
    return found


def removed_groups(stated: Digits, solution: dif.Solution) -> dict[str, Any]:
    """Each group by each estimator and from scratch: errors, times, warnings."""
    groups = chosen_groups(stated)
    removals = stated.train.remove_groups([index for _, _, index in groups])
    targets = list(stated.targets.values())
    seconds: dict[str, float] = {}

    def timed(name: str, make: Any) -> Any:
        begin = time.perf_counter()
        result = make()
        seconds[name] = time.perf_counter() - begin
        return result

    def each(name: str, make: Any, over: Any) -> list[Any]:
        """One after the other, with the seconds of each."""
        made = [timed(f"{name}, {number}", lambda one=one: make(one)) for number, one in enumerate(over)]
        taken[name] = [seconds.pop(f"{name}, {number}") for number in range(len(made))]
        seconds[name] = sum(taken[name])
        return made

    taken: dict[str, list[float]] = {}
    scratch = each("from scratch", stated.scratch, [index for _, _, index in groups])
    moves = torch.stack([s.theta - solution.theta for s in scratch])
    made = {
        "DIF": dif.DirectionalInfluence(solution, switching=False),  # the paper's derivative
        "Newton": dif.NewtonInfluence(solution),
        "path": dif.PathInfluence(solution),
    }
    changes = {name: each(name, one.change, removals) for name, one in made.items()}
    timed("warm retraining", lambda: [dif.Retraining(solution).change(r) for r in removals])
    errors = {
        name: [float((c.flat - move).norm() / move.norm()) for c, move in zip(listed, moves, strict=True)]
        for name, listed in changes.items()
    }
    truth = torch.stack([_values(targets, s) for s in scratch]) - _values(targets, solution)
    careful = dif.GroupInfluence(solution, accuracy=ACCURACY, show_progress=False)
    answers = [timed(f"accuracy {ACCURACY:g}, {name}", lambda target=target: careful.scores(target, removals))
               for name, target in stated.targets.items()]  # fmt: skip
    reached = [((a.values[:, 0] - truth[:, t]) / truth[:, t]).abs().max().item() for t, a in enumerate(answers)]
    return {
        "groups": [{"kind": kind, "share": share, "size": len(index)} for kind, share, index in groups],
        "errors": errors,
        "events": [c.diagnostics["events"] for c in changes["path"]],
        "seconds": seconds,
        "seconds_each": taken,
        "warning": warned(stated, solution, removals, truth),
        "accuracy": {
            "wanted": ACCURACY,
            "largest error": dict(zip(stated.targets, reached, strict=True)),
            "by": {name: _counted(a.diagnostics["by"]) for name, a in zip(stated.targets, answers, strict=True)},
        },
    }


def warned(stated: Digits, solution: dif.Solution, removals: dif.Perturbation, truth: Tensor) -> dict[str, Any]:
    """How often the warning fires where DIF is wrong and where it is right: the groups, whole and a hundredth of each.

    Nothing that is removed whole leaves DIF within 1 % here, so the same groups are also weighed down by 1 % only.
    """
    targets = list(stated.targets.values())
    light = 0.01 * removals
    retrained = dif.Retraining(solution, tol=1e-13, show_progress=False).scores(targets, light).values
    grouped = dif.GroupInfluence(solution, show_progress=False)
    foreseen, error = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dif.FirstOrderWarning)  # counted here
        for t, target in enumerate(targets):
            for done, actual in ((removals, truth[:, t]), (light, retrained[:, t])):
                scores = grouped.scores(target, done)
                foreseen += scores.diagnostics["remainders"]
                error += ((scores.values[:, 0] - actual) / actual).abs().tolist()
    off, fired = torch.tensor(error), torch.tensor(foreseen) > SAID
    return {
        "threshold": SAID,
        "beyond 10 %": int((off > 0.1).sum()),
        "fired beyond 10 %": float(fired[off > 0.1].double().mean()),
        "below 1 %": int((off < 0.01).sum()),
        "fired below 1 %": float(fired[off < 0.01].double().mean()),
        "foreseen": foreseen,
        "actual": error,
    }


def moved_bound(stated: Digits, solution: dif.Solution) -> dict[str, Any]:
    """The bound of group 0 swept, against training from scratch at each of its values."""
    bounds = torch.linspace(*BOUNDS, dtype=torch.float64)  # type: ignore[arg-type]
    begin = time.perf_counter()
    curve = dif.bound_curve(solution, stated.problem.constraints[0], bounds, list(stated.targets.values()))
    followed = time.perf_counter() - begin
    begin = time.perf_counter()
    again = [_at_bound(stated, float(b)) for b in curve.bounds]
    scratch = time.perf_counter() - begin
    difference = max(
        float((torch.stack([_values(list(stated.targets.values()), s) for s in again]) - curve.values).abs().max()),
        max(abs(s.objective - float(v)) for s, v in zip(again, curve.objective, strict=True)),
        max(abs(float(s.lam[0]) - float(v)) for s, v in zip(again, curve.price, strict=True)),
    )
    kinks = []
    for kink in curve.kinks:
        row = solution.program.names.index(kink.name)
        below, above = (float(_at_bound(stated, kink.bound + side).lam[row]) for side in (-1e-6, 1e-6))
        confirmed = (below > 0) == (kink.binds == "below") and (above > 0) == (kink.binds == "above")
        kinks.append({"bound": kink.bound, "name": kink.name, "binds": kink.binds, "confirmed": confirmed,
                      "multiplier 1e-6 below": below, "multiplier 1e-6 above": above})  # fmt: skip
    return {
        "curve": {
            "bounds": curve.bounds.tolist(), "price": curve.price.tolist(), "objective": curve.objective.tolist(),
            "values": curve.values.tolist(), "targets": list(stated.targets), "kinks": kinks, "lost": list(curve.lost),
            "largest_difference": difference, "seconds": followed, "seconds_from_scratch": scratch,
        },
    }  # fmt: skip


def unconstrained(count: int = 20) -> dict[str, Any]:
    """Random groups of 5 % of the problem without constraints: plain influence, one Newton step, the path."""
    stated = posed(constrained=False)
    solution, n = stated.solved(), len(stated.train)
    generator = torch.Generator().manual_seed(1)
    groups = [torch.randperm(n, generator=generator)[: int(0.05 * n)].tolist() for _ in range(count)]
    removals, target = stated.train.remove_groups(groups), stated.test.mean()
    truth = torch.stack([_values([target], stated.scratch(group)) for group in groups]) - _values([target], solution)
    made: dict[str, Any] = {
        "plain IF": dif.ClassicalInfluence(solution),
        "Newton": dif.NewtonInfluence(solution, show_progress=False),
        "path": dif.PathInfluence(solution, show_progress=False),
    }
    agreement = {name: dif.Agreement.of(one.scores(target, removals).values, truth) for name, one in made.items()}
    return {"unconstrained": {name: {"relative_error": a.relative_error, "pearson": a.pearson}
                              for name, a in agreement.items()}}  # fmt: skip


def _at_bound(stated: Digits, bound: float) -> dif.Solution:
    first, second = stated.problem.constraints
    moved = (first.term <= bound).named("group 0")
    return dif.fit(dif.Problem(stated.problem.objective, [moved, second]), stated.start, show_progress=False)


def _values(targets: list[dif.Term], solution: dif.Solution) -> Tensor:
    return Targets(targets, solution).values(solution.theta)


def _counted(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in dict.fromkeys(names)}


def reproduce(out: Path, show_progress: bool = True) -> dict[str, Any]:
    """Run it once, write groups.json and groups.png, return the numbers."""
    known = results.finished(out / "groups.json", out / "groups.png")
    if known is not None:
        return known
    out.mkdir(parents=True, exist_ok=True)
    result = {"study": "groups", "version": dif.__version__, **run(show_progress)}
    results.write(out / "groups.json", result)
    figure(out / "groups.png", result)
    return result


def figure(path: Path, result: dict[str, Any]) -> None:
    """Errors by share, the errors foreseen against those found, and the price of the constraint against its bound."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(14.4, 4.4), layout="constrained")
    left, middle, right = canvas.subplots(1, 3)
    shares = [100 * group["share"] for group in result["groups"]]
    for name, colour in (("DIF", plots.ORANGE), ("Newton", plots.GREEN), ("path", plots.BLUE)):
        left.loglog(shares, result["errors"][name], "o", color=colour, alpha=0.6, label=name)
    left.set_xlabel("per cent of the data removed")
    left.set_ylabel("relative error of Δθ against training from scratch")
    left.legend(frameon=False)
    warning = result["warning"]
    middle.loglog(warning["actual"], warning["foreseen"], "o", color=plots.ORANGE, alpha=0.6)
    middle.axline((0.1, 0.1), (1.0, 1.0), color=plots.GREY, linewidth=1, linestyle="--")
    middle.axhline(warning["threshold"], color=plots.GREY, linewidth=1, linestyle=":")
    middle.set_xlabel("relative error of DIF")
    middle.set_ylabel("relative error that was foreseen")
    curve = result["curve"]
    right.plot(curve["bounds"], curve["price"], "o-", markersize=3, color=plots.BLUE)
    for kink in curve["kinks"]:
        right.axvline(kink["bound"], color=plots.GREY, linestyle=":", linewidth=1)
    right.set_xlabel("bound τ of group 0")
    right.set_ylabel("price λ")
    canvas.savefig(path, dpi=130)
