"""Fits of a model file that are kept on disk and reused until the file or its data change."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch

import dif
from dif.derivatives.fingerprint import ObjectEncoder, encode_tensor, fingerprint_program, hash_all
from dif.derivatives.program import Program
from dif.errors import InvalidInputError, NotConvergedWarning, warn
from dif.optimality.solution import Solution
from dif.problem.parameters import Parameters
from dif.runtime.archive import read_archive, write_archive
from dif.solving.fit import fit

_KIND = "kept fit"  # of file


class KeptFits:
    """A folder with one file (npz, no pickle) per fit of a model file: θ, λ and the warnings of `fit`.

    The key of a fit is a hash of the bytes of the model file, of the whole problem (data, weights, bounds and code of
    the losses), of the start and of the options of `fit`. Only solutions are kept.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.name = folder, model.stem
        self.bytes_hash = hashlib.sha256(model.read_bytes() if model.is_file() else b"").hexdigest()
        self.kept: list[Path] = []  # files of the fits that the model file has made so far
        self.reused = 0  # how many of them were read
        self.unfinished: Path | None = None  # state of the fit that is running

    def fit(self, problem: Any, params: Any, **options: Any) -> Solution:
        """Return the kept solution of `dif.fit` with these arguments; if there is none, fit and keep it."""
        parameters, theta = Parameters.of(params)
        program = Program.of(problem, parameters, theta)
        given = {name: value for name, value in options.items() if name not in ("show_progress", "checkpoint")}
        about = f"{dif.__version__} {self.bytes_hash}".encode()
        parts = about, fingerprint_program(program), encode_tensor(theta), *ObjectEncoder().encode(given)
        key = hash_all(parts).hex()[:32]
        path = self.folder / f"{self.name}-{key}.npz"
        solution = self._load(path, key, program)
        if solution is not None:
            self.reused += 1
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.unfinished = self.folder / f"{self.name}-{key}-unfinished.npz"
            with catch_warnings(record=True) as caught:
                simplefilter("always")
                solution = fit(problem, params, **{"checkpoint": self.unfinished, **options})
            for warning in caught:
                warn(str(warning.message), warning.category)
            self.unfinished.unlink(missing_ok=True)
            self.unfinished = None
            if not solution.converged:
                return solution
            self._save(path, key, solution, [str(w.message) for w in caught if w.category is NotConvergedWarning])
        self.kept.append(path)
        return solution

    def prune(self) -> None:
        """Delete what was kept of earlier versions of the model file."""
        for path in self.folder.glob("*.npz"):
            ours = re.fullmatch(rf"{re.escape(self.name)}-[0-9a-f]{{32}}(-unfinished)?\.npz", path.name)
            if ours and path not in self.kept:
                path.unlink(missing_ok=True)

    def _save(self, path: Path, key: str, solution: Solution, warned: list[str]) -> None:
        write_archive(path, _KIND, {"theta": solution.theta, "lam": solution.lam}, {"key": key, "warned": warned})

    def _load(self, path: Path, key: str, program: Program) -> Solution | None:
        """Return the kept solution; None if there is no sound file of it."""
        try:
            arrays, about = read_archive(path, _KIND, key=key)
        except (FileNotFoundError, InvalidInputError):  # missing or damaged: the model is fitted again
            return None
        for text in about["warned"]:
            warn(text, NotConvergedWarning)
        like = program.parameters
        theta, lam = (torch.from_numpy(arrays[name]).to(like.device, like.dtype) for name in ("theta", "lam"))
        return Solution.of_program(program, theta, lam)
