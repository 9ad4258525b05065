"""Where a fit stands, on disk: interrupted work goes on from there."""

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

from dif.errors import InvalidInputError, warn
from dif.evaluation.fingerprint import of_program
from dif.evaluation.program import Program
from dif.runtime.atomic_file import written

_FORMAT = "dif fit 2"


@dataclass(frozen=True)
class Standing:
    """θ, λ and how far the phases have come."""

    theta: Tensor
    lam: Tensor
    epochs: int = 0  # of the mini-batch phase
    penalty: float | None = None  # of the augmented Lagrangian; None: not begun
    accuracy: float | None = None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A file (npz, no pickle) for one problem and model."""

    path: Path
    program: Program

    @classmethod
    def at(cls, path: str | os.PathLike[str], program: Program) -> Checkpoint:
        """The file need not exist yet; its folder must."""
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"no folder {os.fspath(path.parent)!r} for the checkpoint {path.name!r}: make it")
        return cls(path, program)

    def _about(self) -> dict[str, Any]:
        parameters = self.program.parameters
        layout = [[name, list(shape)] for name, shape in zip(parameters.names, parameters.shapes, strict=True)]
        return {"format": _FORMAT, "params": layout, "constraints": list(self.program.names)}

    @cached_property
    def _problem(self) -> str:
        return of_program(self.program).hex()

    def save(self, standing: Standing) -> None:
        """Write, complete or not at all."""
        numbers = {"epochs": standing.epochs, "penalty": standing.penalty, "accuracy": standing.accuracy}
        theta, lam = standing.theta.cpu().numpy(), standing.lam.cpu().numpy()
        with written(self.path) as file:
            np.savez(
                file,
                theta=theta,
                lam=lam,
                about=np.array(json.dumps({**self._about(), **numbers, "problem": self._problem})),
            )

    def load(self) -> Standing | None:
        """Where the work stood; None if it has not begun."""
        if not self.path.exists():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                theta, lam = torch.as_tensor(file["theta"]), torch.as_tensor(file["lam"])
                about = json.loads(str(file["about"]))
            found = {key: about[key] for key in self._about()}
            numbers = {key: about[key] for key in ("epochs", "penalty", "accuracy")}
            problem = about["problem"]
        except Exception as error:
            raise self._foreign(f"{type(error).__name__}: {error}") from error
        other = [key for key, value in self._about().items() if found[key] != value]
        if other:
            raise self._foreign(", ".join(f"{key} {found[key]}" for key in other))
        if problem != self._problem:
            warn(
                f"The checkpoint {os.fspath(self.path)!r} is of another problem (its data, weights, bounds or code "
                "have changed), so fit begins anew and overwrites it.",
                UserWarning,
            )
            return None
        like = self.program.parameters
        return Standing(theta.to(like.device, like.dtype), lam.to(like.device, like.dtype), **numbers)

    def _foreign(self, found: str) -> InvalidInputError:
        return InvalidInputError(
            f"checkpoint {os.fspath(self.path)!r}",
            measured=found,
            threshold="a file of fit for the same parameters and constraints",
            meaning="It belongs to another model or problem, or is damaged, so there is nothing to go on from.",
            cure="Name another file, or delete this one to begin anew.",
        )
