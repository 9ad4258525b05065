"""Score many perturbations chunk by chunk, into memory or a file. Estimators provide the arithmetic."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.fingerprint import hash_all
from dif.derivatives.weight_change import Direction, split_perturbation
from dif.errors import InvalidInputError
from dif.estimators.fingerprint import hash_direction, hash_solution, hash_targets
from dif.estimators.influence import Influence, Origin
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.runtime.distributed import is_single_process
from dif.runtime.progress import progress
from dif.runtime.score_file import FileScores, MemoryScores
from dif.runtime.workers import check_jobs, run_in_order

Out = str | os.PathLike[str] | None  # a file for scores, ending in .npy or .zarr
ONE_BY_ONE = 16  # perturbations in a chunk, for estimators that solve them one by one: little is lost on interruption
_SHARES = 4  # chunks per job, so that jobs finish at about the same time


@dataclass(frozen=True)
class ScoredChunk:
    """The scores of consecutive perturbations."""

    values: Tensor  # (P, T), float64, on the CPU
    about: dict[str, Any]  # diagnostics of the chunk: numbers, lists and dicts, see `_join`


Finish = Callable[[Influence], None]  # completes the diagnostics of a result


@dataclass(frozen=True)
class Scoring:
    """What is to be scored, and where the scores go."""

    name: str
    at: Solution
    targets: Targets
    perturbations: Perturbation
    diagnostics: dict[str, Any]
    out: Out
    show_progress: bool

    def run_chunks(
        self, work: Callable[[Perturbation], ScoredChunk], most: int, jobs: int, finish: Finish | None = None
    ) -> Influence:
        """Score chunks of at most `most` perturbations, each by one call of `work`."""
        jobs = check_jobs(jobs)
        self.check()
        size = chunk_size(len(self.perturbations), most, jobs)
        score = lambda begin: run_in_order(work, split_perturbation(self.perturbations, size, begin), jobs)  # noqa: E731
        return self.run(score, size, finish)

    def check(self) -> None:
        """Refuse malformed perturbations before any work is done."""
        for chunk in split_perturbation(self.perturbations):
            Direction(self.at.program, chunk)

    def run(self, score: Callable[[int], Iterator[ScoredChunk]], size: int, finish: Finish | None = None) -> Influence:
        """Collect the scores; rows that a file has already are not computed again.

        Args:
            score: Yields the chunks from a given row on.
            size: Perturbations in a chunk, at most.
            finish: Adds to the diagnostics of the result, which has those of all chunks by then.
        """
        count = len(self.perturbations)
        shape = (count, len(self.targets.names))
        sheet = MemoryScores(shape) if self.out is None else FileScores(self.out, shape, self._fingerprint(), size)
        influence = Influence(
            sheet.values,
            self.perturbations,
            self.targets.names,
            self.name,
            dict(self.diagnostics),
            origin=Origin(self.at, self.targets),
        )
        if sheet.done < count:
            if isinstance(sheet, FileScores):
                influence.describe(sheet.path)  # so that the file can be read while it grows
            with progress(self.name, count, self.show_progress) as report:
                for chunk in score(sheet.done):
                    sheet.write(chunk.values, **chunk.about)
                    report(sheet.done)
        for key in sheet.pieces[0].keys() - {"end", "checksum"}:
            influence.diagnostics[key] = _join([piece[key] for piece in sheet.pieces])
        if finish is not None:
            finish(influence)
        if isinstance(sheet, FileScores):
            influence.describe(sheet.path, sheet.record)
            sheet.finish()
        return influence

    def _fingerprint(self) -> str:
        """Hash everything that the scores depend on; malformed perturbations are refused before a file is touched."""
        if not is_single_process():
            raise InvalidInputError(
                f"`out` is {str(self.out)!r} inside dif.sharded().",
                "It must be None there.",
                "All processes would write the same file.",
                "Leave out= away and save the result in one process, or share the work by jobs=.",
            )
        about = f"{self.name} {self.targets.names} {json.dumps(self.diagnostics, sort_keys=True)}"
        directions = (Direction(self.at.program, chunk) for chunk in split_perturbation(self.perturbations))
        changes = chain.from_iterable(map(hash_direction, directions))
        return hash_all(chain([about.encode()], changes, [hash_solution(self.at)], hash_targets(self.targets))).hex()


def _join(entries: list[Any]) -> Any:
    """Combine one entry of the diagnostics of all chunks: merge dicts, concatenate lists, add numbers."""
    if all(isinstance(entry, dict) for entry in entries):
        return {label: value for entry in entries for label, value in entry.items()}
    if all(isinstance(entry, list) for entry in entries):
        return [value for entry in entries for value in entry]
    return sum(entries)


def chunk_size(count: int, most: int, jobs: int) -> int:
    """Return how many of `count` perturbations make a chunk: at most `most`, and several chunks for each job."""
    return max(1, most if jobs == 1 else min(most, -(-count // (_SHARES * abs(jobs)))))


def differences(at: Solution, targets: Targets, moves: Iterable[Tensor]) -> Tensor:
    """Return the difference of each target between θ̄ and θ̄ + Δθ, for each Δθ, (P, T)."""
    before = targets.values(at.theta)
    return torch.stack([targets.values(at.theta + move) - before for move in moves]).double().cpu()
