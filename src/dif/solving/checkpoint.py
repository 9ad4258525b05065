"""A file that stores the state of an unfinished fit, so that it can be resumed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.derivatives.fingerprint import fingerprint_program
from dif.derivatives.program import Program
from dif.errors import InvalidInputError, warn
from dif.runtime.atomic_file import open_atomically

_FORMAT = "dif fit 2"  # name and version of the file format


@dataclass(frozen=True)
class FitState:
    """The state of a fit: θ, λ and the progress of each phase."""

    theta: Tensor
    lam: Tensor
    epochs: int = 0  # mini-batch epochs done
    penalty: float | None = None  # of the augmented Lagrangian; None before its first round
    accuracy: float | None = None  # of its next round


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A file (npz, no pickle) with the state of a fit of one program."""

    path: Path
    program: Program

    @classmethod
    def open(cls, path: str | os.PathLike[str], program: Program) -> Checkpoint:
        """Return the checkpoint at a path; its folder must exist, the file need not."""
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"The folder {os.fspath(path.parent)!r} for the checkpoint {path.name!r} does not exist. Create it."
            )
        return cls(path, program)

    def _description(self) -> dict[str, Any]:
        """Return what must agree between the file and the program."""
        parameters = self.program.parameters
        layout = [[name, list(shape)] for name, shape in zip(parameters.names, parameters.shapes, strict=True)]
        return {"format": _FORMAT, "params": layout, "constraints": list(self.program.names)}

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint_program(self.program).hex()

    def save(self, state: FitState) -> None:
        """Write the file atomically."""
        numbers = {"epochs": state.epochs, "penalty": state.penalty, "accuracy": state.accuracy}
        theta, lam = state.theta.cpu().numpy(), state.lam.cpu().numpy()
        about = json.dumps({**self._description(), **numbers, "problem": self._fingerprint})
        with open_atomically(self.path) as file:
            np.savez(file, theta=theta, lam=lam, about=np.array(about))

    def load(self) -> FitState | None:
        """Return the stored state; None if there is no file, or (with a warning) one of a changed problem."""
        if not self.path.exists():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                theta, lam = torch.as_tensor(file["theta"]), torch.as_tensor(file["lam"])
                about = json.loads(str(file["about"]))
            stored = {key: about[key] for key in self._description()}
            numbers = {key: about[key] for key in ("epochs", "penalty", "accuracy")}
            fingerprint = about["problem"]
        except Exception as error:
            raise self._unusable_error(f"{type(error).__name__}: {error}") from error
        different = [key for key, value in self._description().items() if stored[key] != value]
        if different:
            raise self._unusable_error(", ".join(f"{key} {stored[key]}" for key in different))
        if fingerprint != self._fingerprint:
            warn(
                f"The checkpoint {os.fspath(self.path)!r} belongs to another problem: its data, weights, bounds or "
                "code have changed. `fit` starts from the beginning and overwrites it.",
                UserWarning,
            )
            return None
        like = self.program.parameters
        return FitState(theta.to(like.device, like.dtype), lam.to(like.device, like.dtype), **numbers)

    def _unusable_error(self, reason: str) -> InvalidInputError:
        return InvalidInputError(
            f"The checkpoint {os.fspath(self.path)!r} cannot be resumed ({reason}).",
            "It must have been written by `fit` for the same parameters and constraints.",
            "It belongs to another model or problem, or is damaged.",
            "Name another file, or delete this one to start from the beginning.",
        )
