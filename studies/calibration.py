"""Compare the expected error of predictions with the actual one, for many models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import dif
from dif.runtime.work import progress
from studies import results

STRONGEST = 20  # removals retrained per model: those with the largest scores


@dataclass(frozen=True)
class Setting:
    """One model: its kind and size, the number of samples, the ridge and whether it has constraints."""

    kind: str  # linear, logistic, poisson or tanh
    n: int
    inputs: int
    hidden: tuple[int, ...] = ()
    ridge: float = 1e-2
    constrained: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """The setting as text."""
        layers = "-".join(map(str, (self.inputs, *self.hidden)))
        bound = ", a group bound" if self.constrained else ""
        return f"{self.kind} {layers}, n {self.n}, ridge {self.ridge:g}{bound}, seed {self.seed}"


def settings() -> Iterator[Setting]:
    """Yield all settings: convex models first, then networks."""
    for seed, (kind, n, inputs, ridge) in enumerate(
        (kind, n, inputs, ridge)
        for kind in ("linear", "logistic", "poisson")
        for n, inputs in ((50, 4), (50, 12), (300, 10), (2000, 20))
        for ridge in (1e-4, 1e-2)
    ):
        yield Setting(kind, n, inputs, ridge=ridge, constrained=seed % 2 == 1, seed=seed)
    small = [(100, 6, (12,)), (400, 6, (12,)), (2000, 6, (12,)), (200, 10, (20, 10)), (1000, 10, (20, 10))]
    large = [(400, 20, (40, 20)), (1500, 20, (60, 25))]
    networks = [(1e-1, small + large), (1e-2, small + large[:1]), (1e-3, small), (1e-4, small)]
    for seed, (ridge, (n, inputs, hidden)) in enumerate(
        (ridge, shape) for ridge, shapes in networks for shape in shapes
    ):
        yield Setting("tanh", n, inputs, hidden, ridge=ridge, constrained=seed % 2 == 1, seed=seed)


def reproduce(out: Path, show_progress: bool = True) -> dict[str, Any]:
    """Fit, assess and retrain every setting, saving each in calibration.json; return the rows and a summary."""
    path = out / "calibration.json"
    known = results.load_finished(path)
    rows = [] if known is None else known["rows"]
    done = {row["name"] for row in rows}
    out.mkdir(parents=True, exist_ok=True)
    every = list(settings())
    with progress("models", len(every), show_progress) as report:
        for setting in every:
            if setting.name not in done:
                rows.append({"name": setting.name, **asdict(setting), **measure(setting)})
                results.write(path, {"study": "calibration", "version": dif.__version__, "rows": rows})
            report(len(rows))
    return {"rows": rows, **summary(rows)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count how often bad predictions are not trusted and good ones are."""
    fitted = [row for row in rows if row["actual"] is not None]
    bad = [not row["trusted"] for row in fitted if row["actual"] > 0.5]
    good = [bool(row["trusted"]) for row in fitted if row["actual"] < 0.1]
    return {
        "models": len(fitted),
        "refused": len(rows) - len(fitted),
        "off by more than 50 %": len(bad),
        "of these not trusted": sum(bad),
        "off by less than 10 %": len(good),
        "of these trusted": sum(good),
    }


def measure(setting: Setting) -> dict[str, Any]:
    """Return the expected and actual relative error of the strongest removals; None if no solution was reached."""
    train, test, problem, start = build_problem(setting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the result records what they say
        solution = dif.fit(problem, start, show_progress=False)
        empty = {"parameters": solution.theta.numel(), "expected": None, "trusted": None, "actual": None, "failed": 0}
        try:
            estimator = dif.DirectionalInfluence(solution)
        except dif.DifError as error:
            return {**empty, "refused": str(error)}
        scores = estimator.scores(test.mean(), train.remove_each(), show_progress=False)
        top = [entry.index for entry in scores.top(STRONGEST)]
        retraining = dif.Retraining(solution, strict=False)
        actual = retraining.scores(test.mean(), train.remove_each(top)).values[:, 0]
    predicted, finished = scores.values[top, 0], torch.isfinite(actual)
    if not bool(finished.any()):
        return {**empty, "refused": "no retraining converged", "failed": len(top)}
    gap = (predicted - actual)[finished]
    return {
        **empty,
        "expected": scores.diagnostics["assessment"]["pooled"],
        "trusted": scores.trusted,
        "actual": float(gap.norm() / actual[finished].norm()),
        "failed": int((~finished).sum()),
        "refused": None,
    }


def build_problem(setting: Setting) -> tuple[dif.Samples, dif.Samples, dif.Problem, Any]:
    """Return training and test samples, the problem, and the initial parameters."""
    generator = torch.Generator().manual_seed(setting.seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    X, X_test = draw(setting.n, setting.inputs), draw(200, setting.inputs)
    teacher = draw(setting.inputs) / setting.inputs**0.5
    wave = draw(setting.inputs) / setting.inputs**0.5

    def labels(x: Tensor) -> Tensor:
        signal = x @ teacher + (torch.sin(2 * (x @ wave)) if setting.kind == "tanh" else 0.0)
        noise = draw(len(x))
        if setting.kind == "linear":
            return signal + 0.5 * noise
        if setting.kind == "poisson":
            return torch.poisson(signal.clamp(max=3).exp(), generator=generator)
        return torch.where(signal + 0.5 * noise > 0, 1.0, -1.0).double()

    start: Any = {"w": torch.zeros(setting.inputs, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
    if setting.kind == "tanh":
        torch.manual_seed(setting.seed)
        sizes = (setting.inputs, *setting.hidden)
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
        start = nn.Sequential(*layers, nn.Linear(sizes[-1], 1)).double()

    def loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        score = model(x)[:, 0] if setting.kind == "tanh" else x @ model["w"] + model["b"]
        if setting.kind == "linear":
            return 0.5 * (score - y) ** 2
        return score.exp() - y * score if setting.kind == "poisson" else softplus(-y * score)

    train = dif.Samples(loss, (X, labels(X)), name="train")
    test = dif.Samples(loss, (X_test, labels(X_test)), name="test")
    objective = train.mean() + dif.ridge(setting.ridge)
    group = X[:, 0] + 0.5 * draw(setting.n) > 0
    bounds = []
    if setting.constrained:
        bounds = [
            (train.mean(where=members) <= train.mean() + 0.02).named(f"group {g}")
            for g, members in enumerate((group, ~group))
        ]
    return train, test, dif.Problem(objective, bounds), start
