"""Finished retrainings on disk: what was solved once is not solved again."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from dif.direction import Direction
from dif.errors import InvalidInputError
from dif.files import written
from dif.fingerprint import of_direction, of_solution
from dif.fit import Found
from dif.solution import Solution

_FORMAT = "dif retraining 1"


@dataclass(frozen=True, eq=False)
class Kept:
    """A folder with one file (npz, no pickle) per retraining: θ, λ and the residual, so that any target can be read.

    The name of a file is the fingerprint of the solution, the values and bounds of its problem, the tolerance and the
    perturbation: others are not found.
    """

    folder: Path
    solution: Solution
    tol: float

    @classmethod
    def at(cls, folder: str | os.PathLike[str], solution: Solution, tol: float) -> Kept:
        """The folder is made if it is missing."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        return cls(path, solution, tol)

    def load(self, direction: Direction, p: int) -> Found | None:
        """Where perturbation p ended, if it was kept."""
        path = self._path(direction, p)
        if not path.exists():
            return None
        like = self.solution
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                theta, lam = (torch.as_tensor(file[name]).to(like.theta) for name in ("theta", "lam"))
            known = about["format"] == _FORMAT and theta.shape == like.theta.shape and lam.shape == like.lam.shape
            numbers = [float(about["residual"]), float(about["goal"]), int(about["iterations"])]
        except Exception as error:
            raise self._damaged(path, f"{type(error).__name__}: {error}") from error
        if not known:
            raise self._damaged(path, f"format {about['format']!r}, θ of shape {tuple(theta.shape)}")
        return Found(theta, lam, *numbers)  # type: ignore[arg-type]

    def save(self, direction: Direction, p: int, found: Found) -> None:
        """Write, complete or not at all."""
        about = {
            "format": _FORMAT,
            "perturbation": direction.perturbation[p].labels[0],
            "residual": found.residual,
            "goal": found.goal,
            "iterations": found.iterations,
        }
        theta, lam = found.theta.cpu().numpy(), found.lam.cpu().numpy()
        with written(self._path(direction, p)) as file:
            np.savez(file, theta=theta, lam=lam, about=np.array(json.dumps(about)))

    def _path(self, direction: Direction, p: int) -> Path:
        seen = hashlib.sha256(f"{_FORMAT} {self.tol!r} {direction.perturbation[p].labels}".encode())
        seen.update(self._of_solution)
        for part in of_direction(direction, p):
            seen.update(part)
        return self.folder / f"{seen.hexdigest()[:32]}.npz"

    @cached_property
    def _of_solution(self) -> bytes:
        return of_solution(self.solution)

    def _damaged(self, path: Path, found: str) -> InvalidInputError:
        return InvalidInputError(
            f"retraining kept in {str(path)!r}",
            measured=found,
            threshold=f"a file of format {_FORMAT!r} for this model",
            meaning="It is damaged, or was written by another version.",
            cure="Delete it: that one retraining is then done again.",
        )
