"""Scores of many perturbations, piece by piece, into memory or a file: everything but the arithmetic."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.estimators.fingerprint import of_direction, of_solution, of_targets
from dif.estimators.influence import Influence
from dif.evaluation.weight_change import Direction, check_kind, chunks
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.runtime.distributed import alone
from dif.runtime.progress import progress
from dif.runtime.score_file import Held, Streamed
from dif.runtime.workers import in_order

Out = str | os.PathLike[str] | None  # a file for scores, ending in .npy or .zarr
_TOGETHER = 16  # perturbations in a piece, of an estimator that takes them one by one
_SHARES = 4  # pieces of work per job


@dataclass(frozen=True)
class Piece:
    """The scores of some perturbations in a row."""

    values: Tensor  # (P, T), float64, on the CPU
    about: dict[str, Any]  # what else is known of them: numbers, lists and dicts, which are added up over the pieces


@dataclass(frozen=True)
class Scoring:
    """What is to be scored, and where the scores go."""

    name: str
    at: Solution
    targets: Targets
    perturbations: Perturbation
    diagnostics: dict[str, Any]
    out: str | os.PathLike[str] | None
    show_progress: bool

    def __post_init__(self) -> None:
        check_kind(self.perturbations)

    def one_by_one(self, work: Callable[[Perturbation], Piece], jobs: int, complete: Complete) -> Influence:
        """Score with an estimator that takes one perturbation after the other."""
        size = max(1, min(_TOGETHER, -(-len(self.perturbations) // (_SHARES * abs(jobs)))))
        return self.run(lambda begin: in_order(work, chunks(self.perturbations[begin:], size), jobs), size, complete)

    def run(self, pieces: Callable[[int], Iterator[Piece]], size: int, complete: Complete) -> Influence:
        """Take the pieces from row `begin` on, as they come; what a file has already is not done again.

        Args:
            pieces: Makes them, from a row on.
            size: Perturbations in a piece, at most.
            complete: Adds to the diagnostics of the result what is known once everything is scored.
        """
        shape = (len(self.perturbations), len(self.targets.names))
        fingerprint = self._checked()
        sheet = Held(shape) if self.out is None else Streamed(self.out, shape, fingerprint, size)
        influence = Influence(sheet.values, self.perturbations, self.targets.names, self.name, dict(self.diagnostics))
        if isinstance(sheet, Streamed) and sheet.done < len(self.perturbations):
            influence.describe(sheet.path)  # for whoever reads it while it grows
        if sheet.done < len(self.perturbations):
            with progress(self.name, len(self.perturbations), self.show_progress) as report:
                for piece in pieces(sheet.done):
                    sheet.write(piece.values, **piece.about)
                    report(sheet.done)
        complete(influence, sheet.pieces)
        if isinstance(sheet, Streamed):
            influence.describe(sheet.path, sheet.record)
            sheet.finish()
        return influence

    def _checked(self) -> str:
        """Refuse malformed perturbations before any file is touched; the fingerprint of the work."""
        if self.out is not None and not alone():
            raise InvalidInputError(
                "out= inside dif.sharded()",
                measured=os.fspath(self.out),
                threshold="None",
                meaning="All processes would write the same file.",
                cure="Leave out= away and save the result in one process, or share the work by jobs=.",
            )
        about = f"{self.name} {self.targets.names} {json.dumps(self.diagnostics, sort_keys=True)}"
        seen = hashlib.sha256(about.encode())
        for some in chunks(self.perturbations):
            direction = Direction(self.at.program, some)
            for part in of_direction(direction) if self.out is not None else ():
                seen.update(part)
        for part in (of_solution(self.at), *of_targets(self.targets)) if self.out is not None else ():
            seen.update(part)
        return seen.hexdigest()


Complete = Callable[[Influence, list[dict[str, Any]]], None]


def joined(pieces: list[dict[str, Any]], key: str) -> Any:
    """What the pieces know under a name, added up: dicts merged, lists one after the other, numbers summed."""
    found = [piece[key] for piece in pieces]
    if all(isinstance(one, dict) for one in found):
        return {label: value for one in found for label, value in one.items()}
    if all(isinstance(one, list) for one in found):
        return [value for one in found for value in one]
    return sum(found)


def differences(at: Solution, targets: Targets, moves: Iterable[Tensor]) -> Tensor:
    """The difference of each target between θ̄ and θ̄ + Δθ, for each Δθ, (P, T)."""
    before = targets.values(at.theta)
    return torch.stack([targets.values(at.theta + move) - before for move in moves]).double().cpu()
