"""The Python file with which a user describes a model to the command line, and the reading of it."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import dif
from dif.errors import DifError, InvalidInputError
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.samples import Samples
from dif.problem.term import Expression
from dif.report.column import expect_column, expect_features
from dif.report.subjects import Subjects

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
    def read(cls, path: Path, *, need_targets: bool = True, fit: Callable[..., Solution] = dif.fit) -> Description:
        """Run the user's file and read the variables that it defines.

        Args:
            path: The file.
            need_targets: Whether the file must define `targets` and, for several populations, `train`.
            fit: What `dif.fit` does while the file runs.
        """
        variables = _run(path, fit)
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
        shown = {name: variables.get(name) for name in ("names", "groups", "features", "images")}
        return cls.of(path, solution, targets, train, train_is_known, **shown)

    @classmethod
    def of(
        cls, path: Path, solution: Solution, targets: dict[str, Any], train: Samples, train_is_known: bool = True, *,
        names: Any, groups: Any, features: Any, images: Any,
    ) -> Description:  # fmt: skip
        """Build from what to show of each sample, after checking that there is one entry per sample."""
        lengths = {len(train)}
        names, groups, images = (
            None if column is None else expect_column(column, f"`{name}` in {path}", lengths)
            for name, column in (("names", names), ("groups", groups), ("images", images))
        )
        if features is not None:
            features = expect_features(features, f"`features` in {path}", lengths)
        description = cls(path, solution, targets, train, names, groups, features, images, train_is_known)
        description.subjects.check_display(f" in {path}")
        return description

    @cached_property
    def subjects(self) -> Subjects:
        """What the report shows of each sample."""
        features = None if self.features is None else dict(self.features)
        return Subjects(None, self.solution, self.train, None, self.names, self.groups, features, self.images)

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


def expect_file(path: Path) -> None:
    """Refuse a folder, and a file that does not exist."""
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder. Give the Python file that describes the model.")
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {str(path)!r}. Create one with `dif init {shlex.quote(path.name or 'model.py')}`."
        )


def _run(path: Path, fit: Callable[..., Solution]) -> dict[str, Any]:
    """Run the user's file and return its global variables."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # the file may import modules beside it, as when Python runs it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))  # for workers
    torch.manual_seed(0)  # for files that set no seed
    usual, dif.fit = dif.fit, fit
    try:
        with redirect_stdout(sys.stderr):  # keep what the file prints out of our output
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
    finally:
        dif.fit = usual


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
