"""Results: the change under one perturbation, and the scores of many."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.estimators.agreement import Agreement
from dif.evaluation.program import PerConstraint, Program
from dif.problem.perturbation import Perturbation
from dif.runtime.atomic_file import open_atomically
from dif.runtime.inputs import as_index
from dif.runtime.score_file import Values, companion_path, intact_chunks, is_filled_in_chunks, open_values, read_journal

_FORMAT = "dif influence 1"  # name and version of the file format
_LABELS = 4096  # labels written at once, to save memory
TRUSTED = 0.25  # estimated relative error of all predictions together up to which they count as trusted


@dataclass(frozen=True, eq=False)
class Change:
    """The change of the parameters and multipliers, Δθ and Δλ, under one perturbation."""

    theta: dict[str, Tensor]  # Δθ in the structure of the params
    multipliers: PerConstraint  # Δλ per constraint
    flat: Tensor  # Δθ as one vector
    diagnostics: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, moved: Tensor, priced: Tensor, diagnostics: dict[str, Any]) -> Change:
        """Build from Δθ, (d,), and Δλ, (m,)."""
        return cls(program.parameters.tensors(moved), PerConstraint.of(program, priced), moved, diagnostics)


@dataclass(frozen=True)
class Ranked:
    """One perturbation of a ranking: its row, its label and its score."""

    index: int
    label: str
    value: float


@dataclass(frozen=True, eq=False)
class Influence:
    """The change of T targets under P perturbations, each carried out in full, in the target's own units.

    A score of +0.02 on a test loss says that the perturbation raises that loss by about 0.02.
    """

    stored: Values  # (P, T), on the CPU or on disk
    carried_out: Perturbation | tuple[str, ...]  # the perturbations; their labels where read from a file
    targets: tuple[str, ...]
    estimator: str
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def values(self) -> Tensor:
        """All scores, (P, T). A .npy file is read as needed, a .zarr as a whole."""
        return self.stored[:]

    def rows(self, begin: int, end: int) -> Tensor:
        """Return the scores of consecutive perturbations, (end − begin, T); of a .zarr only these are read."""
        return self.stored[begin:end]

    @property
    def expected_error(self) -> Tensor:
        """Estimated relative error of each perturbation's scores, (P,); NaN where it was not assessed."""
        errors = torch.full((len(self),), float("nan"), dtype=torch.float64)
        assessment = self.diagnostics.get("assessment")
        if assessment is not None:
            errors[assessment["rows"]] = torch.tensor(assessment["errors"], dtype=torch.float64)
        return errors

    @property
    def trusted(self) -> bool | None:
        """Whether the estimated relative error of the assessed scores is at most 25 %; None if none was assessed."""
        assessment = self.diagnostics.get("assessment")
        return None if assessment is None else assessment["pooled"] is not None and assessment["pooled"] <= TRUSTED

    @property
    def unanswered(self) -> tuple[int, str] | None:
        """Number of perturbations without an answer, and the reason of the first; None where all have one."""
        reasons = self.diagnostics.get("unanswered")
        return (len(reasons), next(iter(reasons.values()))) if reasons else None

    @cached_property
    def perturbations(self) -> tuple[str, ...]:
        """Label of each perturbation."""
        return tuple(self.carried_out.labels) if isinstance(self.carried_out, Perturbation) else self.carried_out

    def top(self, k: int = 10, target: int | str = 0) -> list[Ranked]:
        """Return the k perturbations that change a target most, in absolute value, largest first."""
        if isinstance(target, str) and target in self.targets:
            target = self.targets.index(target)
        number, position, T = as_index(k), as_index(target), len(self.targets)
        if number is None or number < 1 or position is None or not -T <= position < T:
            raise InvalidInputError(
                f"`top` was called with k = {k} and target {target!r}.",
                f"`k` must be an integer of at least 1, and `target` a number from 0 to {T - 1} or a name.",
                "There is no such ranking.",
                f"Choose one of the targets {', '.join(self.targets[:5])}{', …' if T > 5 else ''}.",
            )
        column = self.stored[:, position]
        size = torch.nan_to_num(column.abs(), nan=-1.0)  # perturbations without an answer come last
        order = torch.argsort(size, descending=True, stable=True)[:number].tolist()
        return [Ranked(i, self.perturbations[i], float(column[i])) for i in order]

    def compare(self, other: Influence) -> Agreement:
        """Measure the agreement with the scores of another estimator (for example `Retraining`)."""
        same = isinstance(other, Influence) and self.targets == other.targets
        if not same or self.perturbations != other.perturbations:
            found = f"The object to compare with is of type {type(other).__name__}."
            if isinstance(other, Influence):
                shapes = [f"{len(influence)} × {len(influence.targets)}" for influence in (self, other)]
                found = f"One influence has {shapes[0]} scores, the other has {shapes[1]}, and their labels differ."
            raise InvalidInputError(
                found,
                "Both must be an Influence of the same perturbations and targets in the same order.",
                "Agreement is measured score by score.",
                "Score the same perturbations and targets with both estimators.",
            )
        return Agreement.of(self.values, other.values)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per perturbation and one column per target."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError('to_frame needs pandas. Install it: pip install "dif[pandas]"') from error
        index = pandas.Index(self.perturbations, name="perturbation")
        return pandas.DataFrame(self.values.numpy(), index=index, columns=list(self.targets))

    def metrics(self) -> dict[str, float]:
        """Return a few numbers about the scores and the solution, for experiment trackers such as MLflow."""
        values = self.values
        sizes = values[torch.isfinite(values)].abs()
        numbers = {
            "perturbations": float(len(self)),
            "unanswered": float(values.numel() - len(sizes)),
            "largest": float(sizes.max()) if len(sizes) else 0.0,
            "mean_size": float(sizes.mean()) if len(sizes) else 0.0,
            "kkt_residual": max(self.diagnostics.get("kkt", {"": 0.0}).values()),
        }
        for name in ("curvature", "licq", "smallest_margin", "damping", "solver_residual"):
            value = self.diagnostics.get(name)
            if isinstance(value, int | float) and np.isfinite(value):
                numbers[name] = float(value)
        return numbers

    def _about(self, **more: Any) -> Iterator[str]:
        """Yield everything but the values as JSON, chunk by chunk, so that a million labels need little memory."""
        about = {"format": _FORMAT, "estimator": self.estimator, "diagnostics": self.diagnostics, **more}
        yield json.dumps(about | {"targets": self.targets})[:-1] + ', "perturbations": ['
        for begin in range(0, len(self), _LABELS):
            chunk = self.carried_out[begin : min(begin + _LABELS, len(self))]
            labels = chunk.labels if isinstance(chunk, Perturbation) else list(chunk)
            yield (", " if begin else "") + json.dumps(labels)[1:-1]
        yield "]}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all to one file (npz, no pickle); an interrupted write leaves the old file as it is."""
        with open_atomically(path) as file:
            np.savez(file, values=self.values.numpy(), about=np.array("".join(self._about())))

    def describe(self, path: str | os.PathLike[str], record: dict[str, Any] | None = None) -> None:
        """Write everything but the values to a JSON file next to the file of values, which scoring fills."""
        with open_atomically(companion_path(path)) as file:
            file.writelines(chunk.encode() for chunk in self._about(streamed=record))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Influence:
        """Read a file that `save` or `scores(..., out=path)` wrote.

        The latter stays on disk and is read as needed. It may be read while scoring still fills it: rows to come are
        NaN, and `diagnostics["rows"]` is the number of finished rows.
        """
        if not os.path.exists(path):
            raise FileNotFoundError(f"There is no influence file {os.fspath(path)!r}.")
        try:
            if is_filled_in_chunks(path):
                about = json.loads(companion_path(path).read_text())
                values = open_values(path)
            else:
                with np.load(path, allow_pickle=False) as file:
                    values, about = torch.as_tensor(file["values"]), json.loads(str(file["about"]))
            written_as, shape = about["format"], (len(about["perturbations"]), len(about["targets"]))
            fields = {key: about[key] for key in ("perturbations", "targets", "estimator", "diagnostics")}
        except ImportError:
            raise
        except Exception as error:
            raise _unreadable_error(path, f"{type(error).__name__}: {error}") from error
        if written_as != _FORMAT or tuple(values.shape) != shape:
            raise _unreadable_error(path, f"format {written_as!r} with values of shape {tuple(values.shape)}")
        if is_filled_in_chunks(path):
            _, pieces = read_journal(path) or ({}, [])
            good = intact_chunks(values, pieces)
            rows = good[-1]["end"] if good else 0
            if len(good) < len(pieces):
                raise _unreadable_error(path, f"values from row {rows} on differ from those that were written")
            fields["diagnostics"] = {**fields["diagnostics"], "rows": rows}
        return cls(
            values, tuple(fields["perturbations"]), tuple(fields["targets"]), fields["estimator"], fields["diagnostics"]
        )

    def __repr__(self) -> str:
        return f"Influence({self.estimator}: {len(self)} perturbations × {len(self.targets)} targets)"


def _unreadable_error(path: str | os.PathLike[str], reason: str) -> InvalidInputError:
    """Build the error for a file that is no sound influence file."""
    return InvalidInputError(
        f"The influence file {os.fspath(path)!r} cannot be read ({reason}).",
        f"It must have the format {_FORMAT!r}.",
        "It was not written by Influence.save, is damaged, or comes from a newer version.",
        "Save the influence again, or update dif.",
    )
