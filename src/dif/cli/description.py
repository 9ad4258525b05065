"""The Python file with which a user describes a model to the command line, and the reading of it."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import dif
from dif.derivatives.program import Targets
from dif.errors import DifError, InvalidInputError
from dif.optimality.solution import Solution
from dif.problem.samples import Samples
from dif.problem.term import Expression
from dif.problem.weights import find_indispensable
from dif.report.subjects import Subjects

EXAMPLES = Path(dif.__file__).parent / "examples"  # model files that come with dif
TEMPLATE = (EXAMPLES / "model.py").read_text("utf-8")  # written by `dif init`
_EXAMPLE_TARGETS = '{"risk": train.mean()}'  # suggested in error messages


@dataclass(frozen=True, eq=False)
class Description:
    """What the file defines: the solution, the targets, and what to show of each sample."""

    path: Path
    solution: Solution
    targets: dict[str, Any]
    train: Samples
    subjects: Subjects  # what the report shows of each sample
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
        train, populations = variables.get("train"), solution.problem.people
        train_is_known = train is not None or len(populations) == 1
        if train is None:
            train = populations[0] if len(populations) == 1 or (populations and not need_targets) else None
        if not isinstance(train, Samples):
            wanted = "the dif.Samples from which samples are removed"
            raise _wrong_variable_error(path, "train", train, wanted, "dif.Samples(loss, data)")
        shown = {name: variables.get(name) for name in ("names", "groups", "features", "images")}
        removals = train.remove_each()
        subjects = Subjects.of(removals, solution, index=removals.index, where=f" in {path}", **shown)
        return cls(path, solution, targets, train, subjects, train_is_known)

    @cached_property
    def needed(self) -> dict[int, str]:
        """The samples that cannot be removed, and for each the term that would be undefined without it."""
        return find_indispensable(self.solution.problem, self.train)

    def target(self, name: str | None) -> tuple[str, Any]:
        """Return the name and the term of a target; of the first one if `name` is None."""
        if name is None:
            return next(iter(self.targets.items()))
        if name not in self.targets:
            raise InvalidInputError(
                f"{self.path} defines no target {name!r}. Its targets are {', '.join(map(repr, self.targets))}; use "
                "one of these, or add yours to `targets` in the file."
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
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        text = f"{type(error).__name__}: {str(error).rstrip('.')}{f' (line {lines[-1]})' if lines else ''}"
        raise InvalidInputError(f"Running {path} failed: {text}. Correct it until `python {path}` succeeds.") from error
    finally:
        dif.fit = usual


def _wrong_variable_error(path: Path, name: str, value: Any, wanted: str, example: str) -> InvalidInputError:
    """Return the error for a variable of the file that is missing or has the wrong type."""
    kind = "is an empty dict" if isinstance(value, dict) and not value else f"has type {type(value).__name__}"
    found = f"{path} defines no `{name}`" if value is None else f"`{name}` in {path} {kind}"
    add = f"Add `{name.split('[')[0]} = {example}` at the top level; `dif init` writes an example."
    return InvalidInputError(f"{found}; it must be {wanted}. {add}")
