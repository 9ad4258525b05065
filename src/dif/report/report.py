"""The report on one question, how removals change one target: numbers and text, saved as JSON and shown as HTML."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif.analyses.verdict import Verdict
from dif.derivatives.fingerprint import READ, encode_tensor, hash_all
from dif.errors import InvalidInputError, count_words
from dif.estimators.agreement import Agreement
from dif.estimators.influence import Influence
from dif.optimality.active_set import Margin
from dif.optimality.certificate import NOTE, Certificate
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.structure import leaves
from dif.problem.term import Expression
from dif.report.constraints import explain_constraint, write_formulas
from dif.report.page import render
from dif.report.sample_sets import SampleSets
from dif.report.subjects import Subjects
from dif.runtime.atomic_file import open_atomically

_FORMAT = "dif report 3"  # written to and expected in every report.json
MAX_LISTED = 1000  # samples listed on the page
_MAX_IMAGES = 300  # listed samples with an image
_BINS = 41  # bins of the histogram
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
    mark: str  # fingerprint of the solution, the target and the displayed data
    loss: bool  # whether the target is a loss, so that a higher value is worse
    assessment: dict[str, Any] | None  # error estimate of the scores
    unanswered: tuple[int, str] | None  # how many removals have no score, and why the first has none
    kinked: str  # where the target is not smooth; empty if it is smooth
    verdict: dict[str, str]  # whether the scores can be trusted
    retrained: list[dict[str, Any]] = field(default_factory=list)  # changes found by retraining, also of others
    agreement: dict[str, Any] | None = None  # agreement of scores and retraining

    @classmethod
    def of(
        cls, subjects: Subjects, scores: Influence, *, title: str, column: int = 0, term: Expression | None = None,
        method: str = "", parts: Influence | None = None, top: int = MAX_LISTED,
        margins: Sequence[Margin | None] | None = None, model: Mapping[str, str] | None = None, command: str = "",
    ) -> Report:  # fmt: skip
        """Build the report from the scores of all samples.

        Args:
            subjects: What to show of each sample.
            scores: Scores of all samples.
            title: Heading of the page.
            column: Which of the targets the report is about.
            term: That target, for its present value; it may be unknown.
            method: Short name of the estimator and its setting.
            parts: Scores of the listed samples split by term, one column per term.
            top: How many samples to list at least; MAX_LISTED are listed in any case.
            margins: How much removals change each constraint, for the certificate.
            model: What identifies the model: hashes of its file and its data.
            command: The command line that was run.
        """
        solution, target = subjects.solution, scores.targets[column]
        values = scores.values[:, column].double()
        reasons, listed = scores.diagnostics.get("unanswered", {}), select_samples(scores, top, column)
        features, errors = subjects.feature(listed), scores.expected_error
        losses = subjects.losses
        first = next(iter(losses.values()), torch.full((len(values),), float("nan")))
        samples = [
            {
                "index": i,
                "name": subjects.name(i),
                "group": subjects.group(i),
                "score": _number(values[i]),
                "loss": _number(first[i]),
                "losses": {name: _number(column[i]) for name, column in losses.items()},
                "expected_error": _number(errors[i]),
                "why": reasons.get(scores.perturbations[i], ""),  # why it has no score
                "parts": [_number(x) for x in parts.values[k]] if parts is not None and k < len(parts) else [],
                "features": features[k],
                "image": subjects.encode_image(i) if k < _MAX_IMAGES else None,
            }
            for k, i in enumerate(listed)
        ]
        known = None if term is None else Targets(term, solution)
        report = cls(
            title=title,
            target=target,
            value=None if known is None else float(known.values(solution.theta)[0]),
            estimator=scores.estimator,
            method=method or scores.estimator,
            certificate=_describe_certificate(solution, margins, subjects.sets),
            total=len(values),
            histogram=_bin_scores(values),
            by_group=_summarize_groups(subjects, values),
            terms=[] if parts is None else list(parts.targets),
            samples=samples,
            run=_describe_run(command),
            model=dict(model or {"data": hash_data(solution)}),
            mark=fingerprint(subjects, target, term),
            loss=term is not None and is_loss(term, solution),
            assessment=_clean_assessment(scores),
            unanswered=scores.unanswered,
            kinked="" if known is None else "; ".join(map(str, known.kinks(solution.theta))),
            verdict={},
        )
        return replace(report, verdict=report._judge())

    def with_actual(self, indices: Sequence[int], actual: Influence, command: str = "") -> Report:
        """Return the report with the changes that retraining without some of the samples gave."""
        failed = actual.diagnostics.get("failed", {})
        column = actual.targets.index(self.target) if self.target in actual.targets else 0
        rows = zip(indices, actual.perturbations, actual.values[:, column].tolist(), strict=True)
        retrained = [{"index": i, "actual": _number(x), "failed": failed.get(label, "")} for i, label, x in rows]
        run = self.run | ({"retraining command": command} if command else {})
        return replace(self, run=run).with_retrained(retrained)

    def with_retrained(self, retrained: Iterable[Mapping[str, Any]]) -> Report:
        """Return the report with changes found by retraining added; those of samples that it does not list are kept."""
        known = {entry["index"]: entry for entry in (*self.retrained, *retrained)}
        found = {i: {"actual": entry["actual"], "failed": entry["failed"]} for i, entry in known.items()}
        samples = [sample | found.get(sample["index"], {}) for sample in self.samples]
        predicted, changes = _retrained_pairs(samples)
        agreement = None
        if len(predicted) > 1 and not self.negligible:
            measured = asdict(Agreement.of(torch.from_numpy(predicted), torch.from_numpy(changes)))
            agreement = {key: _number(value) for key, value in measured.items()} | {"n": len(predicted)}
        report = replace(self, samples=samples, agreement=agreement, retrained=[dict(e) for e in known.values()])
        return replace(report, verdict=report._judge())

    def _judge(self) -> dict[str, str]:
        """Return the verdict on the scores, using the retrainings if there are any."""
        predicted, actual = _retrained_pairs(self.samples)
        retrained = None
        if len(predicted):
            size, off = (float(np.linalg.norm(x)) for x in (actual, predicted - actual))
            wrong = int((np.sign(predicted) != np.sign(actual)).sum())
            error = off / size if size else float(off > 0)
            retrained = {"n": len(predicted), "relative_error": error, "wrong_signs": wrong}
        verdict = Verdict.of(self.certificate, self.assessment, retrained, self.unanswered, self.kinked)
        if self.certificate["holds"] and self.negligible and not self.kinked:
            text = f"No sample changes {self.target} by more than rounding error, so the samples cannot be ranked."
            verdict = Verdict(NOTE, text)
        return asdict(verdict)

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
                f"No sample changes {self.target} by more than rounding error (relative {_ROUNDING:g}), so the order "
                "of the ranking means nothing."
            )
        for key, problem in (("why", "cannot be scored"), ("failed", "could not be retrained")):
            missing = [sample for sample in self.samples if sample.get(key)]
            if missing:
                first, number = missing[0], count_words(len(missing), "sample")
                remarks.append(f"{number} {problem}. The first is {first['name']}: {first[key]}")
        return remarks

    def answers_same(self, other: Report) -> bool:
        """Return whether another report is about the same target and estimator."""
        return (self.target, self.method) == (other.target, other.method)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON; the file is complete or not written at all."""
        save_reports(path, [self])

    @classmethod
    def load(cls, path: str | os.PathLike[str], target: str | None = None) -> Report:
        """Read the newest report on a target (None: on any target) from a file that `save` or `dif score` wrote."""
        reports = [report for report in load_reports(path) if target in (None, report.target)]
        if not reports:
            raise InvalidInputError(
                f"Report file {os.fspath(path)!r} has no answer about {target!r}.",
                "It must be one of the targets that were scored.",
                "The file holds one answer for each target and estimator.",
                "Run `dif score` with that target.",
            )
        return reports[-1]

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML file that works offline."""
        write_html(path, [self])


def save_reports(path: str | os.PathLike[str], reports: Sequence[Report]) -> None:
    """Write reports, oldest first, to one JSON file; the file is complete or not written at all."""
    content = {"format": _FORMAT, "answers": [asdict(report) for report in reports]}
    with open_atomically(path) as file:
        file.write((json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def load_reports(path: str | os.PathLike[str]) -> list[Report]:
    """Read the reports that `save_reports` wrote, oldest first."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"There is no report file {os.fspath(path)!r}. Write one with `dif score FILE`.")
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        reports = [Report(**answer) for answer in content["answers"]]
        _render(reports)  # fails if anything is missing
        return reports
    except Exception as error:
        raise InvalidInputError(
            f"Report file {os.fspath(path)!r} cannot be read ({type(error).__name__}: {error}).",
            f"It must be a file of format {_FORMAT!r}.",
            "It is damaged, was not written by `dif score`, or comes from another version.",
            "Delete it and run `dif score` again, or choose another folder with --out.",
        ) from error


def write_html(path: str | os.PathLike[str], reports: Sequence[Report]) -> None:
    """Write one page about reports, oldest first; the newest is open."""
    with open_atomically(path) as file:
        file.write(_render(reports).encode())


def _render(reports: Sequence[Report]) -> str:
    return render([asdict(report) | {"remarks": report.remarks} for report in reports])


def fingerprint(subjects: Subjects, target: str, term: Expression | None) -> str:
    """Return a hash of the solution, the target and the displayed data; if it differs, the report is out of date."""
    solution, program = subjects.solution, subjects.solution.program
    targets = None if term is None else Targets(term, solution)
    numbers = [solution.theta, solution.lam, solution.f, program.tau, program.kinds.equal, *subjects.losses.values()]
    numbers += [] if targets is None else [targets.values(solution.theta)]
    train = None if subjects.train is None else subjects.train.name
    about = target, None if targets is None else targets.names, train, subjects.labels
    shown = subjects.names, subjects.groups, subjects.features
    digest = hashlib.sha256(repr((about, shown)).encode())
    for part in numbers:
        digest.update(part.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def hash_data(solution: Solution) -> str:
    """Return the SHA-256 of the data of all samples of the problem."""
    people = solution.problem.people
    batches = (batch for samples in people for _, batch in samples.batches(at_most=READ))
    return hash_all(encode_tensor(leaf) for batch in batches for leaf in leaves(batch)).hex()


def select_samples(scores: Influence, top: int, column: int = 0) -> list[int]:
    """Return the indices of the samples that a report lists: the most influential, `top` or MAX_LISTED if larger."""
    return [entry.index for entry in scores.top(max(top, min(MAX_LISTED, len(scores))), column)]


def _describe_certificate(
    solution: Solution, margins: Sequence[Margin | None] | None, sets: SampleSets
) -> dict[str, Any]:
    """Return the certificate as plain numbers and text, with a formula and an explanation of each constraint."""
    certificate = Certificate.of(solution, margins).to_dict()
    formulas = write_formulas(solution, sets)
    for row, formula in zip(certificate["constraints"], formulas, strict=True):
        row |= {"formula": formula, "words": explain_constraint(row, certificate["objective"])}
    return certificate


def is_loss(target: Expression, solution: Solution) -> bool:
    """Return whether a target is a nonnegative combination of losses that the objective also contains."""
    minimised = [s.samples for c, s in solution.problem.objective.sums if c > 0]
    term = target.as_term()
    return bool(term.sums) and all(f.ridge is not None and c >= 0 for c, f in term.functions) and all(
        c >= 0 and bool((s.weights >= 0).all()) and any(s.samples.same_loss(other) for other in minimised)
        for c, s in term.sums
    )  # fmt: skip


def _retrained_pairs(samples: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return predicted and actual changes of the samples that have both."""
    known = [sample for sample in samples if sample.get("actual") is not None and sample["score"] is not None]
    predicted, actual = (np.array([sample[key] for sample in known], dtype=float) for key in ("score", "actual"))
    return predicted, actual


def _number(x: Any) -> float | None:
    value = float(x)
    return value if np.isfinite(value) else None  # JSON has no NaN


def _clean_assessment(scores: Influence) -> dict[str, Any] | None:
    """Return the error estimate of the scores with numbers that JSON can hold."""
    assessment = scores.diagnostics.get("assessment")
    if assessment is None:
        return None
    errors, pooled = [_number(x) for x in assessment["errors"]], assessment["pooled"]
    return assessment | {"errors": errors, "pooled": pooled and min(pooled, 1e300)}


def _bin_scores(column: Tensor) -> dict[str, list[float]]:
    finite = column[torch.isfinite(column)].numpy()
    counts, edges = np.histogram(finite, bins=_BINS) if len(finite) else (np.zeros(0), np.zeros(0))
    return {"counts": [float(c) for c in counts], "edges": [float(e) for e in edges]}


def _summarize_groups(subjects: Subjects, column: Tensor) -> list[dict[str, Any]]:
    if subjects.groups is None:
        return []
    scores: dict[str, list[float]] = {}
    for i, value in enumerate(column.tolist()):
        if np.isfinite(value):
            scores.setdefault(str(subjects.group(i)), []).append(value)
    return [
        {"group": name, "samples": len(values), "sum": float(np.sum(values)), "size": float(np.mean(np.abs(values)))}
        for name, values in sorted(scores.items())
    ]


def _describe_run(command: str) -> dict[str, str]:
    return ({"command": command} if command else {}) | {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dif": dif.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "seed": str(torch.initial_seed()),
    }
