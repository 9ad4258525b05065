"""The results: what one perturbation changes, and the scores of many."""

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
from dif.evaluation.program import PerConstraint
from dif.problem.perturbation import Perturbation
from dif.runtime.atomic_file import written
from dif.runtime.inputs import as_index
from dif.runtime.score_file import Values, beside, journal_of, opened, streamed, whole_pieces

_FORMAT = "dif influence 1"
_LABELS = 4096  # written at once
TRUSTED = 0.25  # pooled relative error up to which predictions count as trusted


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

    stored: Values  # (P, T), on the CPU or on disk
    carried_out: Perturbation | tuple[str, ...]  # what was done, or its labels where it was read from a file
    targets: tuple[str, ...]
    estimator: str
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def values(self) -> Tensor:
        """All scores, (P, T). Those of a .npy are read from disk as needed; those of a .zarr are read whole."""
        return self.stored[:]

    def rows(self, begin: int, end: int) -> Tensor:
        """The scores of some perturbations, (end − begin, T); of a .zarr nothing else is read."""
        return self.stored[begin:end]

    @property
    def expected_error(self) -> Tensor:
        """The relative error to be expected of each perturbation's scores, (P,); NaN where it was not assessed."""
        errors = torch.full((len(self),), float("nan"), dtype=torch.float64)
        found = self.diagnostics.get("assessment")
        if found is not None:
            errors[found["rows"]] = torch.tensor(found["errors"], dtype=torch.float64)
        return errors

    @property
    def trusted(self) -> bool | None:
        """Whether the scores assessed are to be expected within 25 % of what happens; None where none was assessed."""
        found = self.diagnostics.get("assessment")
        return None if found is None else found["pooled"] is not None and found["pooled"] <= TRUSTED

    @property
    def unanswered(self) -> tuple[int, str] | None:
        """How many perturbations have no answer, and why the first has none; None where all are answered."""
        why = self.diagnostics.get("unanswered")
        return (len(why), next(iter(why.values()))) if why else None

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
        column = self.stored[:, place]
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
        values = self.values
        sizes = values[torch.isfinite(values)].abs()
        found = {
            "perturbations": float(len(self)),
            "unanswered": float(values.numel() - len(sizes)),
            "largest": float(sizes.max()) if len(sizes) else 0.0,
            "mean_size": float(sizes.mean()) if len(sizes) else 0.0,
            "kkt_residual": max(self.diagnostics.get("kkt", {"": 0.0}).values()),
        }
        for name in ("curvature", "licq", "smallest_margin", "damping", "solver_residual"):
            value = self.diagnostics.get(name)
            if isinstance(value, int | float) and np.isfinite(value):
                found[name] = float(value)
        return found

    def _about(self, **more: Any) -> Iterator[str]:
        """Everything but the values as JSON, piece by piece: the words of a million removals are never held."""
        about = {"format": _FORMAT, "estimator": self.estimator, "diagnostics": self.diagnostics, **more}
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

    def describe(self, path: str | os.PathLike[str], record: dict[str, Any] | None = None) -> None:
        """Write everything but the values beside a file of values that is filled during scoring."""
        with written(beside(path)) as file:
            file.writelines(piece.encode() for piece in self._about(streamed=record))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Influence:
        """Read what `save` wrote, or `scores(..., out=path)`.

        The latter stays on disk and is read as needed. It may still be growing: rows to come are NaN, and
        `diagnostics["rows"]` says how many are there.
        """
        if not os.path.exists(path):
            raise FileNotFoundError(f"no influence file {os.fspath(path)!r}")
        try:
            if streamed(path):
                about = json.loads(beside(path).read_text())
                values = opened(path)
            else:
                with np.load(path, allow_pickle=False) as file:
                    values, about = torch.as_tensor(file["values"]), json.loads(str(file["about"]))
            found, shape = about["format"], (len(about["perturbations"]), len(about["targets"]))
            known = {key: about[key] for key in ("perturbations", "targets", "estimator", "diagnostics")}
        except ImportError:
            raise
        except Exception as error:
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error
        if found != _FORMAT or tuple(values.shape) != shape:
            raise _unreadable(path, f"format {found!r}, values of shape {tuple(values.shape)}")
        if streamed(path):
            _, pieces = journal_of(path) or ({}, [])
            good = whole_pieces(values, pieces)
            rows = good[-1]["end"] if good else 0
            if len(good) < len(pieces):
                raise _unreadable(path, f"values that are not those written, from row {rows} on")
            known["diagnostics"] = {**known["diagnostics"], "rows": rows}
        return cls(
            values, tuple(known["perturbations"]), tuple(known["targets"]), known["estimator"], known["diagnostics"]
        )

    def __repr__(self) -> str:
        return f"Influence({self.estimator}: {len(self)} perturbations × {len(self.targets)} targets)"


def _unreadable(path: str | os.PathLike[str], found: str) -> InvalidInputError:
    return InvalidInputError(
        f"influence file {os.fspath(path)!r}",
        measured=found,
        threshold=f"a file of format {_FORMAT!r}",
        meaning="It was not written by Influence.save, is damaged, or comes from a newer version.",
        cure="Save the influence again, or update dif.",
    )
