"""Retrainings on disk: what was solved once is not solved again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dif.errors import InvalidInputError
from dif.estimators.fingerprint import of_direction, of_solution
from dif.evaluation.weight_change import Direction
from dif.optimality.solution import Solution
from dif.runtime.atomic_file import written
from dif.solving.fit import Found

_FORMAT = "dif retrainings 2"
Places = dict[str, list[tuple[Path, int]]]


@dataclass(frozen=True, eq=False)
class Kept:
    """A folder with one file (npz, no pickle) for what was solved together: θ, λ and residuals, for any target.

    A retraining is found by the fingerprint of the solution, of all that its problem consists of, the tolerance and
    the perturbation. What was solved together is kept together, complete or not at all, so that the rest of
    interrupted work is done exactly as it would have been. What did not reach the tolerance is kept as a start.
    """

    folder: Path
    solution: Solution
    tol: float

    @classmethod
    def at(cls, folder: str | os.PathLike[str], solution: Solution, tol: float) -> Kept:
        """The folder is made if it is missing."""
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise InvalidInputError(
                "keep=",
                measured=f"{os.fspath(folder)!r}, which is a file",
                threshold="a folder, there or not",
                meaning="Retrainings are kept in a folder, a file for those that are solved together.",
                cure="Name a folder.",
            )
        path.mkdir(parents=True, exist_ok=True)
        return cls(path, solution, tol)

    def load(self, direction: Direction, places: Places) -> dict[int, Found]:
        """Where those perturbations ended that are in the folder."""
        known: dict[int, Found] = {}
        for p in range(direction.P) if places else ():
            ends = [self._read(path, row) for path, row in places.get(self._name(direction, p), [])]
            if ends:
                known[p] = min(ends, key=lambda end: end.residual / end.goal)
        return known

    def save(self, direction: Direction, which: Sequence[int], ends: Sequence[Found]) -> None:
        """Write them, all or none."""
        about = {
            "format": _FORMAT,
            "names": [self._name(direction, p) for p in which],
            "perturbations": [direction.perturbation[p].labels[0] for p in which],
            "residual": [end.residual for end in ends],
            "goal": [end.goal for end in ends],
            "iterations": [end.iterations for end in ends],
        }
        theta, lam = (torch.stack([getattr(end, part) for end in ends]).cpu().numpy() for part in ("theta", "lam"))
        reached = "" if all(end.reached for end in ends) else "-begun"
        name = hashlib.sha256(" ".join(about["names"]).encode()).hexdigest()[:32]
        with written(self.folder / f"{name}{reached}.npz") as file:
            np.savez(file, theta=theta, lam=lam, about=np.array(json.dumps(about)))

    def places(self) -> Places:
        """In which file and row each retraining is, now."""
        found: Places = {}
        for path in sorted(self.folder.glob("*.npz")):
            for row, name in enumerate(_opened(path)[0]["names"]):
                found.setdefault(name, []).append((path, row))
        return found

    def _read(self, path: Path, row: int) -> Found:
        about, theta, lam = _opened(path)
        like = self.solution
        numbers = [about[key][row] for key in ("residual", "goal", "iterations")]
        return Found(torch.as_tensor(theta[row]).to(like.theta), torch.as_tensor(lam[row]).to(like.lam), *numbers)

    def _name(self, direction: Direction, p: int) -> str:
        seen = hashlib.sha256(f"{_FORMAT} {self.tol!r} {direction.perturbation[p].labels}".encode())
        seen.update(self._of_solution)
        for part in of_direction(direction, p):
            seen.update(part)
        return seen.hexdigest()[:32]

    @cached_property
    def _of_solution(self) -> bytes:
        return of_solution(self.solution)


def _opened(path: Path) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    return _content(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2)  # the retrainings of one file are asked for one by one
def _content(path: Path, written: int) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if "about" not in file.files:  # somebody else's
                return {"names": []}, np.zeros((0, 0)), np.zeros((0, 0))
            about, theta, lam = json.loads(str(file["about"])), file["theta"], file["lam"]
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']!r}")
        if not len(about["names"]) == len(about["residual"]) == len(theta) == len(lam):
            raise ValueError(f"θ of shape {theta.shape}")
    except Exception as error:
        raise InvalidInputError(
            f"retrainings kept in {str(path)!r}",
            measured=f"{type(error).__name__}: {error}",
            threshold=f"a file of format {_FORMAT!r}",
            meaning="It is damaged, or was written by another version.",
            cure="Delete it: those retrainings are then done again.",
        ) from error
    return about, theta, lam
