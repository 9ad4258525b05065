"""The folder with all results on one model file: fits, scores, retrainings, and the report on every target."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dif.cli.description import Description
from dif.cli.kept_fit import KeptFits
from dif.cli.output import fail
from dif.derivatives.fingerprint import encode_tensor, hash_all
from dif.derivatives.targets import Targets
from dif.errors import InvalidInputError
from dif.report.builder import hash_data
from dif.report.report import Report, load_reports, save_reports, write_html
from dif.results.influence import Influence
from dif.runtime.archive import lock_folder, read_document, write_document

_OWNER = "model.json"  # file that says whose results these are
_KIND = "owner of results"  # of that file
_MAX_NAME = 40  # characters of a target's name in the name of a file


@dataclass(frozen=True, eq=False)
class ResultsFolder:
    """Results on one model file; several runs may work in the folder at the same time."""

    path: Path
    file: Path  # the model file
    fits: KeptFits
    shared: bool  # whether another run was using the folder when this one began

    @classmethod
    @contextmanager
    def open(cls, path: Path, file: Path) -> Iterator[ResultsFolder]:
        """Create the folder if it is missing, and use it."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            with lock_folder(path, ".in-use", wait=False) as alone:
                yield cls(path, file, KeptFits(path / "fits", file), shared=not alone)
        except OSError as error:
            if error.filename is None or not Path(error.filename).is_relative_to(path):
                raise
            fail(f"Cannot write into {str(path)!r} ({error.strerror}). Choose another folder with --out.", cause=error)

    def check(self) -> None:
        """Refuse, before any work is done, results on another model file and a report that cannot be read."""
        known, mine = self._read_owner(), self._describe_owner()
        occupied = self.shared or (self.path / "report.json").is_file()  # else no run came to an answer
        if known and occupied and known["place"] != mine["place"] and known["hash"] != mine["hash"]:
            raise InvalidInputError(
                f"Folder {str(self.path)!r} holds results on another model file, {known['file']!r}. Choose another "
                "folder with --out, or delete this one."
            )
        self.load_reports()

    def claim(self) -> None:
        """Note whose results these are, unless the folder holds results on another model file."""
        with lock_folder(self.path):
            self.check()
            if self._read_owner() != self._describe_owner():
                write_document(self.path / _OWNER, _KIND, self._describe_owner())

    def _read_owner(self) -> dict[str, str] | None:
        note, cure = self.path / _OWNER, "Choose another folder with --out, or delete this one."
        return read_document(note, _KIND, cure) if note.is_file() else None

    def _describe_owner(self) -> dict[str, str]:
        """Return the name of the model file, a hash of its place relative to the folder, and one of its bytes."""
        place = os.path.relpath(self.file.resolve(), self.path.resolve())
        hashed = hashlib.sha256(place.encode()).hexdigest()
        return {"file": self.file.name, "place": hashed, "hash": self.fits.bytes_hash}

    @property
    def page(self) -> Path:
        """Path of the HTML report."""
        return self.path / "report.html"

    def load_reports(self) -> list[Report]:
        """Return the answers in the folder, oldest first."""
        path = self.path / "report.json"
        return load_reports(path) if path.is_file() else []

    def find(self, target: str, method: str, mark: str) -> Report | None:
        """Return the answer about a target by one method, if it belongs to this solution and these data."""
        found = [r for r in self.load_reports() if (r.target, r.method, r.mark) == (target, method, mark)]
        return found[-1] if found else None

    def add(self, report: Report, scores: Influence | None = None) -> Report:
        """Add an answer to the report, or replace an older one to the same question; return it as it was added.

        What retraining found, in this run or another, is added to every answer about the same target and solution.
        """
        with lock_folder(self.path):
            known = self.load_reports()
            retrained = [entry for r in (*known, report) if r.mark == report.mark for entry in r.retrained]
            others = [r for r in known if (r.target, r.method) != (report.target, report.method)]
            reports = [
                r.with_retrained(retrained) if retrained and r.mark == report.mark else r for r in (*others, report)
            ]
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
            "solution": hash_all(map(encode_tensor, (description.solution.theta, description.solution.lam))).hex(),
        }


def fingerprint(description: Description, target: str) -> str:
    """Return a hash of the solution, a target and the displayed data; if it differs, an answer is out of date."""
    subjects, solution, program = description.subjects, description.solution, description.solution.program
    targets = Targets(description.targets[target], solution)
    numbers = [solution.theta, solution.lam, solution.f, program.tau, program.kinds.equal, *subjects.losses.values()]
    shown = target, targets.names, description.train.name, subjects.names, subjects.groups, subjects.features
    digest = hashlib.sha256(repr(shown).encode())
    for part in (*numbers, targets.values(solution.theta)):
        digest.update(part.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _file_name(text: str) -> str:
    """Return a text as part of a file name, with a hash where letters are lost."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:_MAX_NAME]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}".lstrip("-")
