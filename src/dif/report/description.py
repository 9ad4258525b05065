"""A file in which a user describes a model to the command line: its solution, its targets, what to show of samples."""

from __future__ import annotations

import math
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
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

TEMPLATE = '''"""What dif is to look at: `dif check FILE`, `dif score FILE`, `dif retrain FILE`."""

import torch

import dif

torch.manual_seed(0)
X, group = torch.randn(600, 3).double(), torch.arange(600) % 2
y = torch.where(X[:, 0] + 0.8 * group + 0.3 * torch.randn(600) > 0.4, 1.0, -1.0).double()


def loss(params, batch):  # one number per sample, not reduced
    x, label = batch
    return torch.nn.functional.softplus(-label * (x @ params["w"]))


def rate(params, batch):  # what a constraint may be about instead: here the predicted probability of label +1
    return torch.sigmoid(batch[0] @ params["w"])


train = dif.Samples(loss, (X, y), name="train")
rates = train.view(rate, name="rates")  # the same people: who is removed leaves the loss and the rates
risk = train.mean()
problem = dif.Problem(
    risk + dif.ridge(1e-2),  # each group's risk at most the mean risk + 0.02, and rates that do not differ too much
    [(train.mean(where=group == g) <= risk + 0.02).named(f"group {g}") for g in (0, 1)]
    + [(rates.mean(where=group == 1) - rates.mean(where=group == 0) <= 0.1).named("parity")],
)

# Required: the solution (fitted here, or your own: dif.Solution(problem, model, multipliers)), and what may change.
solution = dif.fit(problem, {"w": torch.zeros(3).double()})
targets = {
    "risk": risk,
    "gap": train.mean(where=group == 1) - train.mean(where=group == 0),
}

# Optional, for the report: one entry per sample of `train`.
names = [f"person {i}" for i in range(len(train))]
groups = [f"group {int(g)}" for g in group]
features = {"x0": X[:, 0], "x1": X[:, 1], "x2": X[:, 2], "label": y}
# images = pixels  # (n, height, width), shown beside the scores
'''
_SHOWN = 24  # features of a sample
_LONGEST = 160  # letters of one
_PIXELS = 40  # of an image along each side
_EXAMPLE = '{"risk": train.mean()}'


@dataclass(frozen=True, eq=False)
class Description:
    """What a file says."""

    path: Path
    solution: Solution
    targets: dict[str, Any]
    train: Samples
    names: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    features: Mapping[str, Any] | None = None
    images: Any = None
    chosen: bool = True  # whether it is said, or plain, whose members are removed

    @classmethod
    def read(cls, path: Path, *, aimed: bool = True) -> Description:
        """Run the file, which is the user's own, and take from it what it must and may define.

        Targets and samples may be missing where nothing is scored (`aimed=False`).
        """
        if path.is_dir():
            raise IsADirectoryError(f"{str(path)!r} is a folder: name the Python file that describes the model")
        if not path.is_file():
            raise FileNotFoundError(f"no file {str(path)!r}: write one with `dif init {path.name or 'model.py'}`")
        folder = str(
            path.resolve().parent
        )  # modules beside the file can be imported, as when it is run; by workers too
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        torch.manual_seed(0)  # for files that set no seed of their own
        try:
            with redirect_stdout(sys.stderr), catch_warnings():  # what it prints is not the answer
                simplefilter("ignore", NotConvergedWarning)  # the certificate says so
                said = runpy.run_path(str(path), run_name="__dif__")
        except (DifError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            raise InvalidInputError(
                f"file {str(path)!r}",
                measured=f"{type(error).__name__}: {error}{_line(error, path)}",
                threshold="a Python file that runs",
                meaning="It describes the model to dif, and is run for that.",
                cure=f"Mend it: `python {path}` should run without an error.",
            ) from error
        solution = said.get("solution")
        if not isinstance(solution, Solution):
            raise _missing(path, "solution", solution, "a dif.Solution", "dif.fit(problem, params)")
        targets = said.get("targets") if aimed else said.get("targets", {})
        if not isinstance(targets, Mapping) or (aimed and not targets):
            raise _missing(path, "targets", targets, "a dict of names and targets", _EXAMPLE)
        targets = {str(name): t.mean() if isinstance(t, Samples) else t for name, t in targets.items()}
        for name, target in targets.items():
            if not isinstance(target, Expression) or len(Targets(target, solution).names) != 1:
                raise _missing(path, f"targets[{name!r}]", target, "a Term that is one number, or Samples", _EXAMPLE)
        train = said.get("train")
        every = solution.problem.people
        chosen = train is not None or len(every) == 1
        if train is None:
            train = every[0] if len(every) == 1 or (every and not aimed) else None
        if not isinstance(train, Samples):
            raise _missing(path, "train", train, "the dif.Samples whose members are removed", "dif.Samples(loss, data)")
        names, groups = (_column(path, name, said.get(name), len(train)) for name in ("names", "groups"))
        features = said.get("features")
        if features is not None:
            if not hasattr(features, "items"):
                raise _missing(path, "features", features, "a dict of columns, or a data frame", '{"age": ages}')
            features = {str(name): _column(path, f"features[{name!r}]", c, len(train)) for name, c in features.items()}
        images = said.get("images")
        _column(path, "images", images, len(train))
        told = cls(path, solution, targets, train, names, groups, features, images, chosen)
        for name, show in (("features", lambda: told.feature([0])), ("images", lambda: told.image(0))):
            try:
                show()
            except Exception as error:
                raise InvalidInputError(
                    f"`{name}` in {str(path)!r}",
                    measured=f"{type(error).__name__}: {error}",
                    threshold="numbers or words" if name == "features" else "pixels as numbers, (n, height, width)",
                    meaning="Each sample is shown by them.",
                    cure="Give one number or word per sample and feature, one array per image; or leave it out.",
                ) from error
        return told

    @cached_property
    def losses(self) -> dict[str, Tensor]:
        """Of every sample at the solution, (n,), in each view of them that the problem uses; `train`'s own first."""
        parameters, theta = self.solution.program.parameters, self.solution.theta
        views = [s for s in self.solution.problem.samples if s.people is self.train.people and s is not self.train]
        return {s.name: sample_losses(s, parameters, theta).double().cpu() for s in (self.train, *views)}

    def is_loss(self, target: Expression) -> bool:
        """Whether a target is a loss like those that were minimised: a sum of them without any minus."""
        minimised = [s.samples for c, s in self.solution.problem.objective.sums if c > 0]
        term = target.as_term()
        return bool(term.sums) and all(f.ridge is not None and c >= 0 for c, f in term.functions) and all(
            c >= 0 and bool((s.weights >= 0).all()) and any(s.samples.same_loss(one) for one in minimised)
            for c, s in term.sums
        )  # fmt: skip

    def target(self, name: str | None) -> tuple[str, Any]:
        """The one that is asked for; the first where none is."""
        if name is None:
            return next(iter(self.targets.items()))
        if name not in self.targets:
            raise InvalidInputError(
                "target",
                measured=repr(name),
                threshold=f"one of {', '.join(map(repr, self.targets))}",
                meaning="The file defines no such target.",
                cure="Name one of those, or add it to `targets` there.",
            )
        return name, self.targets[name]

    def name(self, i: int) -> str:
        """A sample in words."""
        return f"{self.train.name}[{i}]" if self.names is None else str(self.names[i])

    def group(self, i: int) -> str | None:
        """Its group in words."""
        return None if self.groups is None else str(self.groups[i])

    def feature(self, indices: Sequence[int]) -> list[dict[str, str]]:
        """What the samples consist of, in words: what the file says, or their numbers where these are few."""
        if self.features is not None:
            columns = list(self.features.items())[:_SHOWN]
            return [{str(name): _words(column[i]) for name, column in columns} for i in indices]
        found = []
        for i in indices:
            _, batch = next(self.train.batches(torch.tensor([i])))
            numbers = [leaf[0] for leaf in leaves(batch) if leaf[0].numel() <= _SHOWN]
            found.append(
                {
                    f"z{k}" + (f"[{j}]" if part.numel() > 1 else ""): _words(value)
                    for k, part in enumerate(numbers)
                    for j, value in enumerate(part.reshape(-1).tolist())
                }
            )
        return found

    def image(self, i: int) -> Tensor | None:
        """Its pixels, (height, width) or (height, width, 3), 0 … 255; None where a sample is no image."""
        if self.images is not None:
            pixels = torch.as_tensor(self.images[i]).detach().cpu()
        else:
            _, batch = next(self.train.batches(torch.tensor([i])))
            square = [leaf[0].detach().cpu() for leaf in leaves(batch) if leaf[0].dim() in (2, 3)]
            square = [leaf for leaf in square if min(leaf.shape[-2:]) >= 5 or min(leaf.shape[:2]) >= 5]
            if not square:
                return None
            pixels = square[0]
        return _bytes(pixels)


def _bytes(pixels: Tensor) -> Tensor | None:
    if pixels.dim() == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        pixels = pixels.movedim(0, 2)
    if pixels.dim() == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dim() not in (2, 3) or (pixels.dim() == 3 and pixels.shape[2] != 3):
        return None
    step = max(1, math.ceil(max(pixels.shape[:2]) / _PIXELS))
    pixels = pixels[::step, ::step]
    if pixels.numel() == 0 or pixels.dtype == torch.uint8:
        return pixels if pixels.numel() else None
    low, high = float(pixels.min()), float(pixels.max())
    return (255 * (pixels.double() - low) / ((high - low) or 1.0)).round().to(torch.uint8)


def _words(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    words = f"{value:.6g}" if isinstance(value, float) else str(value)
    return words if len(words) <= _LONGEST else words[:_LONGEST] + "…"


def _column(path: Path, name: str, column: Any, n: int) -> list[Any] | None:
    """One entry per sample, by position, whatever holds them."""
    if column is None:
        return None
    ordered = hasattr(column, "__len__") and hasattr(column, "__getitem__") and not isinstance(column, Mapping | str)
    if not ordered or len(column) != n:
        raise InvalidInputError(
            f"`{name}` in {str(path)!r}",
            measured=f"{len(column)} entries" if ordered else type(column).__name__,
            threshold=f"{n}, one per sample of train, in a list, an array or a column",
            meaning="They are shown beside the samples.",
            cure="Give one entry per sample, in their order, or leave it out.",
        )
    return list(column)  # the values of a pandas column, not its index


def _line(error: BaseException, path: Path) -> str:
    """Where in the file it was raised."""
    if isinstance(error, SyntaxError):
        return ""  # says so itself
    mine = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" (line {mine[-1]})" if mine else ""


def _missing(path: Path, name: str, found: Any, wanted: str, example: str) -> InvalidInputError:
    return InvalidInputError(
        f"`{name}` in {str(path)!r}",
        measured="missing" if found is None else "an empty dict" if isinstance(found, dict) else type(found).__name__,
        threshold=wanted,
        meaning="The file describes the model to dif.",
        cure=f"Define it at the top level, {name.split('[')[0]} = {example}; `dif init` writes an example.",
    )
