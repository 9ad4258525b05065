"""The Python file with which a user describes a model to the command line, and the reading of it."""

from __future__ import annotations

import math
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from dif.errors import DifError, InvalidInputError, NotConvergedWarning
from dif.evaluation.sweeps import sample_losses
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.samples import Samples
from dif.problem.structure import leaves
from dif.problem.term import Expression

# Written by `dif init`
TEMPLATE = '''"""Describes a model to dif. Use it with `dif check FILE`, `dif score FILE` and `dif retrain FILE`."""

import torch

import dif

torch.manual_seed(0)
X, group = torch.randn(600, 3).double(), torch.arange(600) % 2
y = torch.where(X[:, 0] + 0.8 * group + 0.3 * torch.randn(600) > 0.4, 1.0, -1.0).double()


def loss(params, batch):  # returns one loss per sample, not their mean
    x, label = batch
    return torch.nn.functional.softplus(-label * (x @ params["w"]))


def rate(params, batch):  # constraints may use other quantities: here the predicted probability of label +1
    return torch.sigmoid(batch[0] @ params["w"])


train = dif.Samples(loss, (X, y), name="train")
rates = train.view(rate, name="rates")  # the same samples: a removal affects both the loss and the rates
risk = train.mean()
problem = dif.Problem(
    risk + dif.ridge(1e-2),  # minimise this, with each group's risk ≤ the mean risk + 0.02 and similar rates
    [(train.mean(where=group == g) <= risk + 0.02).named(f"group {g}") for g in (0, 1)]
    + [(rates.mean(where=group == 1) - rates.mean(where=group == 0) <= 0.1).named("parity")],
)

# Required: the solution (fitted here; for a model that you trained: dif.Solution(problem, model, multipliers)),
# and the targets: the numbers whose change you want to predict.
solution = dif.fit(problem, {"w": torch.zeros(3).double()})
targets = {
    "risk": risk,
    "gap": train.mean(where=group == 1) - train.mean(where=group == 0),
}

# Optional, shown in the report: one entry per sample of `train`.
names = [f"person {i}" for i in range(len(train))]
groups = [f"group {int(g)}" for g in group]
features = {"x0": X[:, 0], "x1": X[:, 1], "x2": X[:, 2], "label": y}
# images = pixels  # (n, height, width)
'''
_MAX_FEATURES = 24  # features shown per sample
_MAX_LENGTH = 160  # characters shown per feature value
_MAX_PIXELS = 40  # pixels shown along each side of an image
_EXAMPLE_TARGETS = '{"risk": train.mean()}'  # suggested in error messages


@dataclass(frozen=True, eq=False)
class Description:
    """What the file defines: the solution, the targets, and what to show of each sample."""

    path: Path
    solution: Solution
    targets: dict[str, Any]
    train: Samples
    names: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    features: Mapping[str, Any] | None = None
    images: Any = None
    train_is_known: bool = True  # False: the file defines no `train` and the problem has several Samples

    @classmethod
    def read(cls, path: Path, *, need_targets: bool = True) -> Description:
        """Run the user's file and read the variables that it defines.

        With `need_targets=False`, the file may leave out `targets` and `train`.
        """
        variables = _run(path)
        solution = variables.get("solution")
        if not isinstance(solution, Solution):
            raise _wrong_variable_error(path, "solution", solution, "a dif.Solution", "dif.fit(problem, params)")
        targets = variables.get("targets") if need_targets else variables.get("targets", {})
        if not isinstance(targets, Mapping) or (need_targets and not targets):
            raise _wrong_variable_error(path, "targets", targets, "a dict of names and targets", _EXAMPLE_TARGETS)
        targets = {str(name): t.mean() if isinstance(t, Samples) else t for name, t in targets.items()}
        for name, target in targets.items():
            if not isinstance(target, Expression) or len(Targets(target, solution).names) != 1:
                wanted = "a dif.Term with one value, or dif.Samples"
                raise _wrong_variable_error(path, f"targets[{name!r}]", target, wanted, _EXAMPLE_TARGETS)
        train = variables.get("train")
        populations = solution.problem.people
        train_is_known = train is not None or len(populations) == 1
        if train is None:
            train = populations[0] if len(populations) == 1 or (populations and not need_targets) else None
        if not isinstance(train, Samples):
            wanted = "the dif.Samples from which samples are removed"
            raise _wrong_variable_error(path, "train", train, wanted, "dif.Samples(loss, data)")
        names, groups = (_read_column(path, name, variables.get(name), len(train)) for name in ("names", "groups"))
        features = variables.get("features")
        if features is not None:
            if not hasattr(features, "items"):
                wanted = "a dict of columns, or a data frame"
                raise _wrong_variable_error(path, "features", features, wanted, '{"age": ages}')
            features = {
                str(name): _read_column(path, f"features[{name!r}]", column, len(train))
                for name, column in features.items()
            }
        images = variables.get("images")
        _read_column(path, "images", images, len(train))
        description = cls(path, solution, targets, train, names, groups, features, images, train_is_known)
        description._check_display()
        return description

    def _check_display(self) -> None:
        """Raise an error if the features or the image of the first sample cannot be displayed."""
        displays: list[tuple[str, str, Callable[[], object]]] = [
            ("features", "numbers or words", lambda: self.feature([0])),
            ("images", "numeric pixels of shape (n, height, width)", lambda: self.image(0)),
        ]
        for name, wanted, display in displays:
            try:
                display()
            except Exception as error:
                raise InvalidInputError(
                    f"`{name}` in {self.path} cannot be displayed ({type(error).__name__}: {error}).",
                    f"It must hold {wanted}.",
                    "The report shows it for each sample.",
                    "Give one number or word per sample and feature, and one array per image; or leave it out.",
                ) from error

    @cached_property
    def losses(self) -> dict[str, Tensor]:
        """Loss of every sample at the solution, (n,), by name: first `train`, then each view of it in the problem."""
        parameters, theta = self.solution.program.parameters, self.solution.theta
        views = [
            s for s in self.solution.problem.samples if s.population is self.train.population and s is not self.train
        ]
        return {s.name: sample_losses(s, parameters, theta).double().cpu() for s in (self.train, *views)}

    def is_loss(self, target: Expression) -> bool:
        """Return whether a target is a nonnegative combination of losses that the objective also contains."""
        minimised = [s.samples for c, s in self.solution.problem.objective.sums if c > 0]
        term = target.as_term()
        return bool(term.sums) and all(f.ridge is not None and c >= 0 for c, f in term.functions) and all(
            c >= 0 and bool((s.weights >= 0).all()) and any(s.samples.same_loss(other) for other in minimised)
            for c, s in term.sums
        )  # fmt: skip

    def target(self, name: str | None) -> tuple[str, Any]:
        """Return the name and the term of a target; of the first one if `name` is None."""
        if name is None:
            return next(iter(self.targets.items()))
        if name not in self.targets:
            raise InvalidInputError(
                f"{self.path} defines no target {name!r}.",
                f"Its targets are {', '.join(map(repr, self.targets))}.",
                "Scores are predicted changes of one of these targets.",
                "Use one of these names, or add yours to `targets` in the file.",
            )
        return name, self.targets[name]

    def name(self, i: int) -> str:
        """Return the name of sample i."""
        return f"{self.train.name}[{i}]" if self.names is None else str(self.names[i])

    def group(self, i: int) -> str | None:
        """Return the group of sample i, or None."""
        return None if self.groups is None else str(self.groups[i])

    def feature(self, indices: Sequence[int]) -> list[dict[str, str]]:
        """Return the features of the samples as text; by default, the numbers that a small sample consists of."""
        if self.features is not None:
            columns = list(self.features.items())[:_MAX_FEATURES]
            return [{str(name): _as_text(column[i]) for name, column in columns} for i in indices]
        rows = []
        for i in indices:
            _, batch = next(self.train.batches(torch.tensor([i])))
            small = [leaf[0] for leaf in leaves(batch) if leaf[0].numel() <= _MAX_FEATURES]
            rows.append(
                {
                    f"z{k}" + (f"[{j}]" if part.numel() > 1 else ""): _as_text(value)
                    for k, part in enumerate(small)
                    for j, value in enumerate(part.reshape(-1).tolist())
                }
            )
        return rows

    def image(self, i: int) -> Tensor | None:
        """Return the pixels of sample i, (height, width) or (height, width, 3), 0 … 255; None if it has no image."""
        if self.images is not None:
            return _as_bytes(torch.as_tensor(self.images[i]).detach().cpu())
        _, batch = next(self.train.batches(torch.tensor([i])))
        candidates = [leaf[0].detach().cpu() for leaf in leaves(batch) if leaf[0].dim() in (2, 3)]
        images = [leaf for leaf in candidates if min(leaf.shape[-2:]) >= 5 or min(leaf.shape[:2]) >= 5]
        return _as_bytes(images[0]) if images else None


def _run(path: Path) -> dict[str, Any]:
    """Run the user's file and return its global variables."""
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder. Give the Python file that describes the model.")
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {str(path)!r}. Create one with `dif init {path.name or 'model.py'}`."
        )
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # the file may import modules beside it, as when Python runs it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))  # for workers
    torch.manual_seed(0)  # for files that set no seed
    try:
        with redirect_stdout(sys.stderr), catch_warnings():  # keep what the file prints out of our output
            simplefilter("ignore", NotConvergedWarning)  # the certificate says so
            return runpy.run_path(str(path), run_name="__dif__")
    except (DifError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        raise InvalidInputError(
            f"Running {path} failed: {type(error).__name__}: {str(error).rstrip('.')}{_find_line(error, path)}.",
            "It must run without an error.",
            "dif runs this file to read the model from it.",
            f"Correct it until `python {path}` succeeds.",
        ) from error


def _as_bytes(pixels: Tensor) -> Tensor | None:
    """Return pixels as uint8 with the channels last, reduced to at most _MAX_PIXELS per side."""
    if pixels.dim() == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        pixels = pixels.movedim(0, 2)
    if pixels.dim() == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dim() not in (2, 3) or (pixels.dim() == 3 and pixels.shape[2] != 3):
        return None
    step = max(1, math.ceil(max(pixels.shape[:2]) / _MAX_PIXELS))
    pixels = pixels[::step, ::step]
    if pixels.numel() == 0 or pixels.dtype == torch.uint8:
        return pixels if pixels.numel() else None
    low, high = float(pixels.min()), float(pixels.max())
    return (255 * (pixels.double() - low) / ((high - low) or 1.0)).round().to(torch.uint8)


def _as_text(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_LENGTH else text[:_MAX_LENGTH] + "…"


def _read_column(path: Path, name: str, column: Any, n: int) -> list[Any] | None:
    """Return a column as a list, after checking that it has one entry per sample."""
    if column is None:
        return None
    ordered = hasattr(column, "__len__") and hasattr(column, "__getitem__") and not isinstance(column, Mapping | str)
    if not ordered or len(column) != n:
        raise InvalidInputError(
            f"`{name}` in {path} has {f'{len(column)} entries' if ordered else f'type {type(column).__name__}'}.",
            f"It must be a list, an array or a column with {n} entries, one per sample of `train`.",
            "The report shows one entry beside each sample.",
            "Give one entry per sample, in the order of the samples, or leave it out.",
        )
    return list(column)  # for a pandas column: its values by position, whatever its index


def _find_line(error: BaseException, path: Path) -> str:
    """Return where in the file the error was raised, as text."""
    if isinstance(error, SyntaxError):
        return ""  # its message names the line
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""


def _wrong_variable_error(path: Path, name: str, value: Any, wanted: str, example: str) -> InvalidInputError:
    """Return the error for a variable of the file that is missing or has the wrong type."""
    kind = "is an empty dict" if isinstance(value, dict) and not value else f"has type {type(value).__name__}"
    return InvalidInputError(
        f"{path} defines no `{name}`." if value is None else f"`{name}` in {path} {kind}.",
        f"It must be {wanted}.",
        "dif reads the model from the variables of this file.",
        f"Add `{name.split('[')[0]} = {example}` at the top level; `dif init` writes an example.",
    )
