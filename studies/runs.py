"""Compare the verdict on predictions through training with all removals trained again, for many runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import dif
from dif.runtime.work import progress
from studies import results

MEDIANS = ("r", "error", "derivative r", "derivative error")  # over the runs and targets of a family
COUNTS = ("targets", "off by more than 50 %", "of these not trusted", "off by less than 15 %", "of these trusted")
ACTIVATIONS = {"tanh": nn.Tanh, "GELU": nn.GELU, "ReLU": nn.ReLU}


@dataclass(frozen=True)
class Setting:
    """One run: the model, how it is trained, and how many members the bounded group has."""

    kind: str  # "logistic", or the activation of a network
    batch: int
    lr: float
    epochs: int
    members: int
    seed: int
    optimizer: str = "SGD"  # or "momentum", "Adam", "AdamW"
    n: int = 96

    @property
    def name(self) -> str:
        """The setting as text."""
        steps = f"{self.optimizer} {self.lr:g}, {self.epochs} epochs"
        return f"{self.kind}, batches of {self.batch}, {steps}, group of {self.members} of {self.n}, seed {self.seed}"

    @property
    def family(self) -> str:
        """The rows of the table that it counts to."""
        if self.kind == "logistic":
            return f"logistic, group of {self.members} of {self.n}"
        return f"{self.kind}, SGD" if self.optimizer == "SGD" else f"tanh and ReLU, {self.optimizer}"


def settings() -> Iterator[Setting]:
    """Yield 60 settings: networks by SGD, then by other optimisers, then convex models with minorities."""
    steps = [(4, 0.05, 6), (8, 0.2, 6), (8, 0.5, 12), (16, 0.1, 6), (32, 0.5, 12), (64, 0.2, 12)]
    for seed, (kind, (batch, lr, epochs), members) in enumerate(product(ACTIVATIONS, steps, (10, 30))):
        yield Setting(kind, batch, lr, epochs, members, seed)
    others = [("momentum", 0.1), ("Adam", 0.01), ("AdamW", 0.05)]
    for seed, (kind, (optimizer, lr)) in enumerate(product(("tanh", "ReLU"), others), 36):
        yield Setting(kind, 16, lr, 8, 30, seed, optimizer)
    for seed, (members, batch, _) in enumerate(product((10, 20, 40), (8, 16, 32), range(2)), 42):
        yield Setting("logistic", batch, 0.1, 8, members, seed, n=160)


def reproduce(out: Path, show_progress: bool = True) -> dict[str, Any]:
    """Train, predict and train again every setting, saving each in runs.json; return the rows and a summary."""
    path = out / "runs.json"
    known = results.load_finished(path)
    rows = [] if known is None else known["rows"]
    done = {row["name"] for row in rows}
    out.mkdir(parents=True, exist_ok=True)
    every = list(settings())
    with progress("runs", len(every), show_progress) as report:
        for setting in every:
            if setting.name not in done:
                rows.append({"name": setting.name, "family": setting.family, **measure(setting)})
                results.write(path, {"study": "runs", "version": dif.__version__, "rows": rows})
            report(len(rows))
    return {"rows": rows, **summary(rows)}


def measure(setting: Setting) -> dict[str, Any]:
    """Return, for each target of a run, r and the relative error over all removals, and the verdict given before."""
    train, targets, training = build_training(setting)
    removals = train.remove_each()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the result records what they say
        run = training.run(show_progress=False)
        estimator = dif.UnrolledInfluence(run, strict=False)
        scores = estimator.scores(targets, removals, show_progress=False)
        derivative = 2 * estimator.scores(targets, 0.5 * removals, probe=0, show_progress=False).values
        actual = dif.Retraining(run, strict=False).scores(targets, removals, show_progress=False).values
    pairs = list(zip(scores.values.T, actual.T, strict=True))
    found = [dif.Agreement.of(*pair) for pair in pairs]
    before = [dif.Agreement.of(*pair) for pair in zip(derivative.T, actual.T, strict=True)]
    numbers = {
        "r": [each.pearson for each in found],
        "error": [each.relative_error for each in found],
        "derivative r": [each.pearson for each in before],
        "derivative error": [each.relative_error for each in before],
        "estimated": scores.diagnostics["assessment"]["by_target"],
    }
    rounded = {key: [round(value, 4) for value in values] for key, values in numbers.items()}
    return {**rounded, "trusted": list(scores.trusted_by_target.values())}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count how often bad predictions of a target are not trusted, and good ones are; list the families."""
    verdicts = [pair for row in rows for pair in zip(row["error"], row["trusted"], strict=True)]
    bad = [not trusted for error, trusted in verdicts if error > 0.5]
    good = [trusted for error, trusted in verdicts if error < 0.15]
    families = []
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        medians = {key: median(value for row in mine for value in row[key]) for key in MEDIANS}
        trusted = [verdict for row in mine for verdict in row["trusted"]]
        families.append({"family": family, "runs": len(mine), **medians, "trusted": sum(trusted), "of": len(trusted)})
    counts = dict(zip(COUNTS, (len(verdicts), len(bad), sum(bad), len(good), sum(good)), strict=True))
    return {"families": families, **counts}


def format_families(families: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table as text."""
    for each in families:
        numbers = (f"{each[key]:.1%}" if "error" in key else f"{each[key]:.3f}" for key in MEDIANS)
        yield each["family"], str(each["runs"]), *numbers, f"{each['trusted']} of {each['of']}"


def build_training(setting: Setting) -> tuple[dif.Samples, dict[str, dif.Term], dif.Training]:
    """Return the training samples, the targets and the training."""
    generator = torch.Generator().manual_seed(setting.seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    network = setting.kind in ACTIVATIONS

    def sample(n: int, members: int) -> tuple[Tensor, Tensor, Tensor]:
        x, group = draw(n, 3), torch.zeros(n, dtype=torch.bool)
        group[torch.randperm(n, generator=generator)[:members]] = True
        signal = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] if network else x[:, 0] - 0.5 * x[:, 1] + 0.5
        signal = torch.where(group, -x[:, 1] - 0.5, signal)  # the group follows another rule
        return x, torch.where(signal + 0.5 * draw(n) > 0, 1.0, -1.0).double(), group

    X, y, group = sample(setting.n, setting.members)
    X_test, y_test, group_test = sample(200, 60)
    torch.manual_seed(setting.seed)
    start: Any = {"w": torch.zeros(3, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)}
    if network:
        start = nn.Sequential(nn.Linear(3, 6), ACTIVATIONS[setting.kind](), nn.Linear(6, 1)).double()

    def loss(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return softplus(-y * (model(x)[:, 0] if network else x @ model["w"] + model["b"]))

    train = dif.Samples(loss, (X, y), name="train")
    test = dif.Samples(loss, (X_test, y_test), name="test")
    risk, mean, mine = train.mean(), test.mean(), test.mean(where=group_test)
    problem = dif.Problem(risk + dif.ridge(0.01), [(train.mean(where=group) <= risk + 0.02).named("group")])
    optimizers = {
        "SGD": dif.SGD(setting.lr),
        "momentum": dif.SGD(setting.lr, momentum=0.9),
        "Adam": dif.Adam(setting.lr, eps_root=1e-6),
        "AdamW": dif.AdamW(setting.lr, eps_root=1e-6),
    }
    training = dif.Training(
        problem, start, optimizers[setting.optimizer], dif.Ascent(0.3), setting.batch, setting.epochs, setting.seed
    )
    return train, {"loss": mean, "loss of the group": mine, "gap": mine - mean}, training
