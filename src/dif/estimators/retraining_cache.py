"""Retrainings on disk, so that none is solved twice."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dif.derivatives.fingerprint import hash_all
from dif.derivatives.weight_change import Direction, split_perturbation
from dif.errors import InvalidInputError
from dif.estimators.fingerprint import hash_direction, hash_solution
from dif.optimality.solution import Solution
from dif.problem.perturbation import Perturbation
from dif.runtime.atomic_file import open_atomically
from dif.solving.fit import Found

_FORMAT = "dif retrainings 2"  # name and version of the file format


@dataclass(frozen=True, eq=False)
class RetrainingCache:
    """A folder with one file (npz, no pickle) per chunk of retrainings: θ, λ and residuals, for any target.

    The key of a retraining is a hash of the solution, its problem, the tolerance and the perturbation. A chunk that was
    solved together is written to one file, complete or not at all, so that interrupted runs resume with bit-identical
    results. Where some of a chunk need further stages, the others are written before that. Retrainings that did not
    reach the tolerance are kept as warm starts.
    """

    folder: Path
    solution: Solution
    tol: float

    @classmethod
    def open(cls, folder: str | os.PathLike[str], solution: Solution, tol: float) -> RetrainingCache:
        """Open the cache in a folder, which is created if it is missing."""
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise InvalidInputError(
                f"`keep` is {os.fspath(folder)!r}, which is a file.",
                "It must be a folder; it is created if it is missing.",
                "Retrainings are kept in a folder, with one file for each chunk that is solved together.",
                "Choose another name.",
            )
        path.mkdir(parents=True, exist_ok=True)
        return cls(path, solution, tol)

    def load(self, perturbations: Perturbation) -> dict[int, Found]:
        """Return the cached retrainings of these perturbations by their number, finished or not."""
        cached: dict[int, Found] = {}
        begin, index = 0, self._build_index()
        for chunk in split_perturbation(perturbations) if index else ():
            direction = Direction(self.solution.program, chunk)
            for p in range(direction.P):
                ends = [self._read(path, row) for path, row in index.get(self._key(direction, p), [])]
                if ends:
                    cached[begin + p] = min(ends, key=lambda end: end.residual / end.goal)
            begin += direction.P
        return cached

    def save(self, direction: Direction, numbers: Sequence[int], ends: Sequence[Found]) -> None:
        """Write the retrainings of the perturbations with these numbers to one file, all or none."""
        about = {
            "format": _FORMAT,
            "names": [self._key(direction, p) for p in numbers],
            "perturbations": [direction.perturbation[p].labels[0] for p in numbers],
            "residual": [end.residual for end in ends],
            "goal": [end.goal for end in ends],
            "iterations": [end.iterations for end in ends],
        }
        theta, lam = (torch.stack([getattr(end, part) for end in ends]).cpu().numpy() for part in ("theta", "lam"))
        suffix = "" if all(end.reached for end in ends) else "-unfinished"
        name = hash_all([" ".join(about["names"]).encode()]).hex()[:32]
        with open_atomically(self.folder / f"{name}{suffix}.npz") as file:
            np.savez(file, theta=theta, lam=lam, about=np.array(json.dumps(about)))

    def _build_index(self) -> dict[str, list[tuple[Path, int]]]:
        """List the retrainings that are in the folder now: key → files and rows that hold it."""
        index: dict[str, list[tuple[Path, int]]] = {}
        for path in sorted(self.folder.glob("*.npz")):
            for row, key in enumerate(_load_file(path)[0]["names"]):
                index.setdefault(key, []).append((path, row))
        return index

    def _read(self, path: Path, row: int) -> Found:
        """Read one retraining."""
        about, theta, lam = _load_file(path)
        like = self.solution
        numbers = [about[name][row] for name in ("residual", "goal", "iterations")]
        return Found(torch.as_tensor(theta[row]).to(like.theta), torch.as_tensor(lam[row]).to(like.lam), *numbers)

    def _key(self, direction: Direction, p: int) -> str:
        """Hash everything that the retraining of perturbation p depends on."""
        about = f"{_FORMAT} {self.tol!r} {direction.perturbation[p].labels}"
        return hash_all((about.encode(), self._solution_hash, *hash_direction(direction, p))).hex()[:32]

    @cached_property
    def _solution_hash(self) -> bytes:
        return hash_solution(self.solution)


def _load_file(path: Path) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Return the description, θ, (P, d), and λ, (P, m), of a file."""
    return _load_version(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=2)  # the retrainings of a file are asked for one after the other
def _load_version(path: Path, modified: int) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Read a file as it was modified at that time; other programs' files count as empty."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if "about" not in file.files:
                return {"names": []}, np.zeros((0, 0)), np.zeros((0, 0))
            about, theta, lam = json.loads(str(file["about"])), file["theta"], file["lam"]
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']!r}")
        if not len(about["names"]) == len(about["residual"]) == len(theta) == len(lam):
            raise ValueError(f"θ of shape {theta.shape}")
    except Exception as error:
        raise InvalidInputError(
            f"The retrainings kept in {str(path)!r} cannot be read ({type(error).__name__}: {error}).",
            f"The file must have the format {_FORMAT!r}.",
            "It is damaged, or was written by another version.",
            "Delete the file; its retrainings are then solved again.",
        ) from error
    return about, theta, lam
