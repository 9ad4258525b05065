"""The report on one question, how removals change one target: numbers and text, saved as JSON and shown as HTML."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dif.errors import InvalidInputError, count_words
from dif.optimality.certificate import NOTE
from dif.report.page import render
from dif.report.words import Verdict
from dif.results.change import Agreement
from dif.results.influence import Influence
from dif.runtime.archive import damage_error, open_atomically, read_document, write_document

_ROUNDING = 1e-13  # scores below this are rounding errors, relative to the target or to the mean loss


@dataclass(frozen=True)
class Report:
    """Scores, certificate and verdict on one target, predicted by one estimator, as plain numbers and text."""

    title: str
    target: str
    value: float | None  # value of the target at the solution; None if it is not known
    estimator: str
    method: str  # short name of the estimator and its setting; with the target, it identifies the question
    certificate: dict[str, Any]
    total: int  # number of samples that were scored
    histogram: dict[str, list[float]]
    by_group: list[dict[str, Any]]
    terms: list[str]
    samples: list[dict[str, Any]]  # the most influential samples, in order
    run: dict[str, str]
    model: dict[str, str]  # hashes of the model file and of the data, and what else identifies the model
    mark: str  # fingerprint of the solution, the target and the displayed data; empty if nobody asks for it
    loss: bool  # whether the target is a loss, so that a higher value is worse
    assessment: dict[str, Any] | None  # error estimate of the scores
    unanswered: tuple[int, str] | None  # how many removals have no score, and why the first has none
    kinked: str  # where the target is not smooth; empty if it is smooth
    verdict: dict[str, str] = field(default_factory=dict)  # whether the scores can be trusted
    retrained: list[dict[str, Any]] = field(default_factory=list)  # changes found by retraining, also of others
    agreement: dict[str, Any] | None = None  # agreement of scores and retraining

    def with_actual(self, indices: Sequence[int], actual: Influence, command: str = "") -> Report:
        """Return the report with the changes that retraining without some of the samples gave."""
        failed = actual.diagnostics.get("failed", {})
        column = actual.targets.index(self.target) if self.target in actual.targets else 0
        rows = zip(indices, actual.perturbations, actual.values[:, column].tolist(), strict=True)
        retrained = [{"index": i, "actual": finite(x), "failed": failed.get(label, "")} for i, label, x in rows]
        run = self.run | ({"retraining command": command} if command else {})
        return replace(self, run=run).with_retrained(retrained)

    def with_retrained(self, retrained: Iterable[Mapping[str, Any]] = ()) -> Report:
        """Return the report with changes found by retraining added, and judged by all that is known.

        Changes of samples that it does not list are kept, for other reports on the target.
        """
        known = {entry["index"]: entry for entry in (*self.retrained, *retrained)}
        found = {i: {"actual": entry["actual"], "failed": entry["failed"]} for i, entry in known.items()}
        samples = [sample | found.get(sample["index"], {}) for sample in self.samples]
        pairs = [(s["score"], s["actual"]) for s in samples if s.get("actual") is not None and s["score"] is not None]
        predicted, actual = np.array(pairs, dtype=float).reshape(-1, 2).T
        agreement = compared = None
        if len(pairs) > 1 and not self.negligible:
            measured = asdict(Agreement.of(torch.tensor(predicted), torch.tensor(actual)))
            agreement = {key: finite(value) for key, value in measured.items()} | {"n": len(pairs)}
        if pairs:
            size, off = (float(np.linalg.norm(x)) for x in (actual, predicted - actual))
            wrong = int((np.sign(predicted) != np.sign(actual)).sum())
            error = off / size if size else float(off > 0)
            compared = {"n": len(pairs), "relative_error": error, "wrong_signs": wrong}
        verdict = Verdict.of(self.certificate, self.assessment, compared, self.unanswered, self.kinked)
        if self.certificate["holds"] and self.negligible and not self.kinked:
            text = f"No sample is predicted to change {self.target} by more than rounding error"
            verdict = Verdict(NOTE, f"{text}, so there is no ranking.")
        kept = [dict(entry) for entry in known.values()]
        return replace(self, samples=samples, agreement=agreement, retrained=kept, verdict=asdict(verdict))

    @property
    def negligible(self) -> bool:
        """Whether all scores are as small as rounding errors of the target."""
        largest = max((abs(sample["score"]) for sample in self.samples if sample["score"] is not None), default=0.0)
        losses = [abs(sample["loss"]) for sample in self.samples if sample["loss"] is not None]
        return largest <= _ROUNDING * max(abs(self.value or 0.0), float(np.mean(losses)) if losses else 0.0)

    @property
    def remarks(self) -> list[str]:
        """Notes that a reader of the ranking needs."""
        remarks = []
        if self.negligible:
            remarks.append(
                f"No sample is predicted to change {self.target} by more than rounding error (relative "
                f"{_ROUNDING:g}), so the order of the ranking means nothing."
            )
        for key, problem in (("why", "cannot be scored"), ("failed", "could not be retrained")):
            missing = [sample for sample in self.samples if sample.get(key)]
            if missing:
                first, number = missing[0], count_words(len(missing), "sample")
                remarks.append(f"{number} {problem}. The first is {first['name']}: {first[key]}")
        return remarks

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON; the file is complete or not written at all."""
        save_reports(path, [self])

    @classmethod
    def load(cls, path: str | os.PathLike[str], target: str | None = None) -> Report:
        """Read the newest report on a target (None: on any target) from a file that `save` or `dif score` wrote."""
        reports = [report for report in load_reports(path) if target in (None, report.target)]
        if not reports:
            raise InvalidInputError(
                f"Report file {os.fspath(path)!r} has no answer about {target!r}. Run `dif score` with that target."
            )
        return reports[-1]

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML file that works offline."""
        write_html(path, [self])


def save_reports(path: str | os.PathLike[str], reports: Sequence[Report]) -> None:
    """Write reports, oldest first, to one JSON file; the file is complete or not written at all."""
    write_document(path, "report", {"answers": [asdict(report) for report in reports]})


def load_reports(path: str | os.PathLike[str]) -> list[Report]:
    """Read the reports that `save_reports` wrote, oldest first."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"There is no report file {os.fspath(path)!r}. Write one with `dif score FILE`.")
    cure = "Delete it and run `dif score` again, or choose another folder with --out."
    content = read_document(path, "report", cure)
    try:
        reports = [Report(**answer) for answer in content["answers"]]
        _render(reports)  # fails if anything is missing
        return reports
    except Exception as error:
        raise damage_error(path, error, cure) from error


def write_html(path: str | os.PathLike[str], reports: Sequence[Report]) -> None:
    """Write one page about reports, oldest first; the newest is open."""
    with open_atomically(path) as file:
        file.write(_render(reports).encode())


def _render(reports: Sequence[Report]) -> str:
    return render([asdict(report) | {"remarks": report.remarks} for report in reports])


def finite(x: Any) -> float | None:
    """Return a number that JSON can hold: None for NaN and infinity."""
    value = float(x)
    return value if np.isfinite(value) else None
