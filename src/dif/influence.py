"""The results: what one perturbation changes, and the scores of many."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.agreement import Agreement
from dif.errors import InvalidInputError
from dif.files import written
from dif.perturbation import Perturbation
from dif.program import PerConstraint
from dif.reading import as_index

_FORMAT = "dif influence 1"
_LABELS = 4096  # written at once


@dataclass(frozen=True, eq=False)
class Change:
    """Δθ and Δλ of one perturbation."""

    theta: dict[str, Tensor]  # Δθ as the params' own structure
    multipliers: PerConstraint  # Δλ per constraint
    flat: Tensor  # Δθ as one vector
    diagnostics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranked:
    """One perturbation of a ranking: its row, its words, its score."""

    index: int
    label: str
    value: float


@dataclass(frozen=True, eq=False)
class Influence:
    """The change of T targets under P perturbations, each carried out in full, in the target's own units.

    A score of +0.02 on a test loss says: carrying the perturbation out raises that loss by about 0.02.
    """

    values: Tensor  # (P, T), on the CPU
    carried_out: Perturbation | tuple[str, ...]  # what was done, or its labels where it was read from a file
    targets: tuple[str, ...]
    estimator: str
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def perturbations(self) -> tuple[str, ...]:
        """Each perturbation in words."""
        return tuple(self.carried_out.labels) if isinstance(self.carried_out, Perturbation) else self.carried_out

    def top(self, k: int = 10, target: int | str = 0) -> list[Ranked]:
        """The k perturbations that change a target most, in absolute value, largest first."""
        if isinstance(target, str) and target in self.targets:
            target = self.targets.index(target)
        number, place, T = as_index(k), as_index(target), len(self.targets)
        if number is None or number < 1 or place is None or not -T <= place < T:
            raise InvalidInputError(
                "top(k, target)",
                measured=f"k = {k}, target {target!r}",
                threshold=f"k ≥ 1, a target among 0 … {len(self.targets) - 1} or its name",
                meaning="There is no such ranking.",
                cure=f"The targets are {', '.join(self.targets[:5])}{', …' if len(self.targets) > 5 else ''}.",
            )
        column = self.values[:, place]
        size = torch.nan_to_num(column.abs(), nan=-1.0)  # what could not be answered comes last
        order = torch.argsort(size, descending=True, stable=True)[:number].tolist()
        return [Ranked(i, self.perturbations[i], float(column[i])) for i in order]

    def compare(self, other: Influence) -> Agreement:
        """How these predictions agree with another estimator's (retraining, say) on the same perturbations."""
        same = isinstance(other, Influence) and self.targets == other.targets
        if not same or self.perturbations != other.perturbations:
            known = isinstance(other, Influence)
            found = f"{len(other)} × {len(other.targets)} entries, labels differ" if known else type(other).__name__
            raise InvalidInputError(
                "influences to compare",
                measured=f"{len(self)} × {len(self.targets)} and {found}",
                threshold="the same perturbations and targets in the same order",
                meaning="Agreement is taken entry by entry.",
                cure="Score the same perturbations and targets with both estimators.",
            )
        return Agreement.of(self.values, other.values)

    def to_frame(self) -> Any:
        """A pandas DataFrame: one row per perturbation, one column per target."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError('to_frame needs pandas: pip install "dif[pandas]"') from error
        index = pandas.Index(self.perturbations, name="perturbation")
        return pandas.DataFrame(self.values.numpy(), index=index, columns=list(self.targets))

    def metrics(self) -> dict[str, float]:
        """A few plain numbers about the scores and what they rest on, for whatever logs numbers (MLflow, say)."""
        sizes = self.values[torch.isfinite(self.values)].abs()
        found = {
            "perturbations": float(len(self)),
            "unanswered": float(self.values.numel() - len(sizes)),
            "largest": float(sizes.max()) if len(sizes) else 0.0,
            "mean_size": float(sizes.mean()) if len(sizes) else 0.0,
            "kkt_residual": max(self.diagnostics.get("kkt", {"": 0.0}).values()),
        }
        for name in ("curvature", "licq", "smallest_margin", "damping", "solver_residual"):
            value = self.diagnostics.get(name)
            if isinstance(value, int | float) and np.isfinite(value):
                found[name] = float(value)
        return found

    def _about(self) -> Iterator[str]:
        """Everything but the values as JSON, piece by piece: the words of a million removals are never held."""
        about = {"format": _FORMAT, "estimator": self.estimator, "diagnostics": self.diagnostics}
        yield json.dumps(about | {"targets": self.targets})[:-1] + ', "perturbations": ['
        done = self.carried_out
        for begin in range(0, len(self), _LABELS):
            some = done[begin : min(begin + _LABELS, len(self))]
            labels = some.labels if isinstance(some, Perturbation) else list(some)
            yield (", " if begin else "") + json.dumps(labels)[1:-1]
        yield "]}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to one file (npz, no pickle), complete or not at all."""
        with written(path) as file:
            np.savez(file, values=self.values.numpy(), about=np.array("".join(self._about())))

    def describe(self, path: str | os.PathLike[str]) -> None:
        """Write everything but the values beside the file of values that was filled during scoring."""
        with written(_beside(path)) as file:
            file.writelines(piece.encode() for piece in self._about())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Influence:
        """Read what `save` wrote, or `scores(..., out=path)`; the latter stays on disk and is read as needed."""
        try:
            if os.fspath(path).endswith(".npy"):
                values = torch.from_numpy(np.lib.format.open_memmap(os.fspath(path), mode="r+"))
                about = json.loads(_beside(path).read_text())
            else:
                with np.load(path, allow_pickle=False) as file:
                    values, about = torch.as_tensor(file["values"]), json.loads(str(file["about"]))
            found, shape = about["format"], (len(about["perturbations"]), len(about["targets"]))
            about = {key: about[key] for key in ("perturbations", "targets", "estimator", "diagnostics")}
        except FileNotFoundError:
            raise
        except Exception as error:
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error
        if found != _FORMAT or values.shape != shape:
            raise _unreadable(path, f"format {found!r}, values of shape {tuple(values.shape)}")
        return cls(
            values, tuple(about["perturbations"]), tuple(about["targets"]), about["estimator"], about["diagnostics"]
        )

    def __repr__(self) -> str:
        return f"Influence({self.estimator}: {len(self)} perturbations × {len(self.targets)} targets)"


def values_on_disk(path: str | os.PathLike[str], shape: tuple[int, int]) -> Tensor:
    """A tensor (P, T) that lives in a file, NaN to begin with."""
    name = os.fspath(path)
    if not name.endswith(".npy"):
        raise InvalidInputError(
            "out=",
            measured=repr(name),
            threshold="a file name ending in .npy",
            meaning="The scores are written as one array of numpy, what they are about into a .npy.json beside it.",
            cure="Name it scores.npy, say.",
        )
    if not Path(name).parent.is_dir():
        raise FileNotFoundError(f"no folder {str(Path(name).parent)!r} to save {Path(name).name!r} in: make it first")
    _beside(path).unlink(missing_ok=True)
    values = np.lib.format.open_memmap(name, mode="w+", dtype=np.float64, shape=shape)
    values[:] = np.nan
    return torch.from_numpy(values)


def _beside(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.json")


def _unreadable(path: str | os.PathLike[str], found: str) -> InvalidInputError:
    return InvalidInputError(
        f"influence file {os.fspath(path)!r}",
        measured=found,
        threshold=f"a file of format {_FORMAT!r}",
        meaning="It was not written by Influence.save, is damaged, or comes from a newer version.",
        cure="Save the influence again, or update dif.",
    )
