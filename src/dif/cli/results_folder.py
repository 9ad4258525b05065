"""The folder with all results on one model file: fits, scores, retrainings, and the report on every target."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch

import dif
from dif.cli.description import Description
from dif.derivatives.fingerprint import ObjectEncoder, encode_tensor, fingerprint_program, hash_all, hash_targets
from dif.derivatives.program import Program, Targets
from dif.errors import InvalidInputError, NotConvergedWarning, warn
from dif.optimality.solution import Solution
from dif.problem.parameters import Parameters
from dif.report.builder import Report, finite, hash_data, load_reports, save_reports, write_html
from dif.results.influence import Influence
from dif.runtime.archive import lock_folder, read_archive, read_document, write_archive, write_document
from dif.solving.fit import fit

_OWNER = "model.json"  # file that says whose results these are
_OWNER_KIND = "owner of results"  # of that file
_MAX_NAME = 40  # characters of a target's name in the name of a file


class ResultsFolder:
    """Results on one model file; several runs may work in the folder at the same time."""

    def __init__(self, path: Path, file: Path) -> None:
        self.path, self.file, self.page, self.fits = path, file, path / "report.html", KeptFits(path / "fits", file)
        self.shared = False  # whether another run was using the folder when this one began

    @contextmanager
    def use(self) -> Iterator[None]:
        """Create the folder if it is missing, and tell other runs that it is in use."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with lock_folder(self.path, ".in-use", wait=False) as alone:
                self.shared = not alone
                yield
        except OSError as error:
            if error.filename is None or not Path(error.filename).is_relative_to(self.path):
                raise
            where = f"{str(self.path)!r} ({error.strerror})"
            raise OSError(f"Cannot write into {where}. Choose another folder with --out.") from error

    @cached_property
    def owner(self) -> dict[str, str]:
        """Name of the model file, a hash of its place relative to the folder, and one of its bytes."""
        place = hashlib.sha256(os.path.relpath(self.file.resolve(), self.path.resolve()).encode()).hexdigest()
        return {"file": self.file.name, "place": place, "hash": self.fits.bytes_hash}

    def check(self) -> None:
        """Refuse, before any work is done, results on another model file and a report that cannot be read."""
        note, cure = self.path / _OWNER, "Choose another folder with --out, or delete this one."
        known = read_document(note, _OWNER_KIND, cure) if note.is_file() else self.owner
        occupied = self.shared or (self.path / "report.json").is_file()  # else no run came to an answer
        if occupied and known["place"] != self.owner["place"] and known["hash"] != self.owner["hash"]:
            raise InvalidInputError(
                f"Folder {str(self.path)!r} holds results on another model file, {known['file']!r}. {cure}"
            )
        self.load_reports()

    def claim(self) -> None:
        """Note whose results these are, unless the folder holds results on another model file."""
        with lock_folder(self.path):
            self.check()
            write_document(self.path / _OWNER, _OWNER_KIND, self.owner)

    def load_reports(self) -> list[Report]:
        """Return the answers in the folder, oldest first."""
        path = self.path / "report.json"
        return load_reports(path) if path.is_file() else []

    def find(self, target: str, method: str, mark: str) -> Report | None:
        """Return the answer about a target by one method, if it belongs to this solution and these data.

        The scores beside it must be there, and those that it lists.
        """
        for report in self.load_reports():
            if (report.target, report.method, report.mark) == (target, method, mark) and self._has_scores(report):
                return report
        return None

    def _has_scores(self, report: Report) -> bool:
        with suppress(FileNotFoundError, InvalidInputError):
            scores = Influence.load(self.scores_path(report))
            values = scores.values[:, 0].tolist() if scores.targets == (report.target,) else []
            listed = {sample["index"]: sample["score"] for sample in report.samples}
            return len(values) == report.total and all(finite(values[i]) == score for i, score in listed.items())
        return False

    def add(self, report: Report, scores: Influence | None = None) -> Report:
        """Add an answer to the report, or replace an older one to the same question; return it as it was added.

        What retraining found, in this run or another, is added to every answer about the same target and solution.
        """
        with lock_folder(self.path):
            known = self.load_reports()
            retrained = [entry for r in (*known, report) if r.mark == report.mark for entry in r.retrained]
            others = [r for r in known if (r.target, r.method) != (report.target, report.method)]
            reports = [r.with_retrained(retrained) if r.mark == report.mark else r for r in (*others, report)]
            if scores is not None:
                path = self.scores_path(report)
                path.parent.mkdir(exist_ok=True)
                scores.save(path)
            save_reports(self.path / "report.json", reports)
            write_html(self.page, reports)
        return reports[-1]

    def scores_path(self, report: Report) -> Path:
        """Return the path of the scores of all samples that belong to an answer."""
        return self.path / "scores" / f"{_file_name(report.target)}-{_file_name(report.method)}.npz"

    def describe_model(self, description: Description) -> dict[str, str]:
        """Return what identifies the model: hashes of its file, its data and its solution."""
        return {
            "file": self.file.name,
            "file hash": self.fits.bytes_hash,
            "data": hash_data(description.solution),
            "solution": description.solution.identity.hex(),
        }


def fingerprint(description: Description, target: str) -> str:
    """Return a hash of the solution, a target and the displayed data; if it differs, an answer is out of date."""
    subjects, solution = description.subjects, description.solution
    shown = repr((target, description.train.name, subjects.names, subjects.groups, subjects.features))
    targets = hash_targets(Targets(description.targets[target], solution))
    return hash_all([shown.encode(), solution.identity, *targets]).hex()[:32]


def _file_name(text: str) -> str:
    """Return a text as part of a file name, with a hash where letters are lost."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:_MAX_NAME]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}".lstrip("-")


_KIND = "kept fit"  # of file


class KeptFits:
    """A folder with one file (npz, no pickle) per fit of a model file: θ, λ and the warnings of `fit`.

    The key of a fit is a hash of the bytes of the model file, of the whole problem (data, weights, bounds and code of
    the losses), of the start and of the options of `fit`. Only solutions are kept.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.kept: list[Path] = []  # files of the fits that the model file has made so far
        self.reused = 0  # how many of them were read
        self.unfinished: Path | None = None  # state of the fit that is running

    @cached_property
    def bytes_hash(self) -> str:
        """Hash of the bytes of the model file."""
        return hashlib.sha256(self.model.read_bytes()).hexdigest()

    def fit(self, problem: Any, params: Any, **options: Any) -> Solution:
        """Return the kept solution of `dif.fit` with these arguments; if there is none, fit and keep it."""
        parameters, theta = Parameters.of(params)
        program = Program.of(problem, parameters, theta)
        given = {name: value for name, value in options.items() if name not in ("show_progress", "checkpoint")}
        about = f"{dif.__version__} {self.bytes_hash}".encode()
        parts = about, fingerprint_program(program), encode_tensor(theta), *ObjectEncoder().encode(given)
        key = hash_all(parts).hex()[:32]
        path = self.folder / f"{self.model.stem}-{key}.npz"
        solution = self._load(path, key, program)
        if solution is not None:
            self.reused += 1
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.unfinished = self.folder / f"{self.model.stem}-{key}-unfinished.npz"
            with catch_warnings(record=True) as caught:
                simplefilter("always")
                solution = fit(problem, params, **{"checkpoint": self.unfinished, **options})
            for warning in caught:
                warn(str(warning.message), warning.category)
            self.unfinished.unlink(missing_ok=True)
            self.unfinished = None
            if not solution.converged:
                return solution
            warned = [str(w.message) for w in caught if w.category is NotConvergedWarning]
            arrays = {"theta": solution.theta, "lam": solution.lam}
            write_archive(path, _KIND, arrays, {"key": key, "warned": warned})
        self.kept.append(path)
        return solution

    def prune(self) -> None:
        """Delete what was kept of earlier versions of the model file."""
        for path in self.folder.glob("*.npz"):
            ours = re.fullmatch(rf"{re.escape(self.model.stem)}-[0-9a-f]{{32}}(-unfinished)?\.npz", path.name)
            if ours and path not in self.kept:
                path.unlink(missing_ok=True)

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
