"""The one builder of reports, for Python and for the command line: it asks the estimator of the scores."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif.derivatives.fingerprint import READ, encode_tensor, hash_all
from dif.derivatives.program import Targets
from dif.errors import DifError, InvalidInputError, count_words
from dif.estimators.directional import DirectionalInfluence
from dif.optimality.judgement import BAD, NOTE, Certificate
from dif.optimality.solution import Solution, expect_solution
from dif.problem.data import leaves
from dif.problem.perturbation import Perturbation
from dif.problem.term import Expression
from dif.report.page import MAX_SAMPLES, render
from dif.report.subjects import Subjects, list_entries
from dif.report.words import Verdict, explain_constraint, write_formulas
from dif.results.change import Agreement
from dif.results.influence import TRUSTED, Influence
from dif.runtime.archive import damage_error, open_atomically, read_document, write_document
from dif.runtime.inputs import check_instance, expect_path

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
    samples: list[dict[str, Any]]  # those without a score, then the most influential, in order
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
        """Return the report with the changes that retraining without some of the samples gave, if of its target."""
        if self.target not in actual.targets:
            return self
        failed, column = actual.diagnostics.get("failed", {}), actual.targets.index(self.target)
        rows = zip(indices, actual.perturbations, actual.values[:, column].tolist(), strict=True)
        retrained = [{"index": i, "actual": finite(x), "failed": failed.get(label, "")} for i, label, x in rows]
        run = self.run | ({"retraining command": command} if command else {})
        return replace(self, run=run).with_retrained(retrained)

    def with_retrained(self, retrained: Iterable[Mapping[str, Any]] = ()) -> Report:
        """Return the report with changes found by retraining added, and judged by all that is known.

        Changes of samples that it does not list are kept, for other reports on the target.
        """
        known = {entry["index"]: dict(entry) for entry in (*self.retrained, *retrained)}
        samples = [sample | known.get(sample["index"], {}) for sample in self.samples]
        pairs = [(s["score"], s["actual"]) for s in samples if s.get("actual") is not None and s["score"] is not None]
        predicted, actual = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).T
        agreement = compared = None
        if len(pairs) > 1 and not self.negligible:
            agreement = {key: finite(value) for key, value in asdict(Agreement.of(predicted, actual)).items()}
            agreement |= {"n": len(pairs)}
        if pairs:
            size, off = float(actual.norm()), float((predicted - actual).norm())
            wrong = int((predicted.sign() != actual.sign()).sum())
            compared = {"n": len(pairs), "relative_error": off / size if size else float(off > 0), "wrong_signs": wrong}
        instead = sum(s["score"] is None and s.get("actual") is not None for s in samples)
        verdict = Verdict.of(self.certificate, self.assessment, compared, self.unanswered, self.kinked, instead)
        if self.certificate["holds"] and self.negligible and not self.kinked:
            text = f"No sample is predicted to change {self.target} by more than rounding error"
            verdict = Verdict(NOTE, f"{text}, so there is no ranking.")
        bad, kept = verdict.sign == BAD, list(known.values())
        samples = [s | {"doubtful": bad or (s["expected_error"] or 0.0) > TRUSTED} for s in samples]
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
        for key, problem in (("why", "cannot be scored"), ("failed", "could not be retrained")):
            missing = [sample for sample in self.samples if sample.get(key)]
            if missing:
                first, number = missing[0], count_words(len(missing), "sample")
                remarks.append(f"{number} {problem}. The first is {first['name']}: {first[key]}")
        return remarks

    @classmethod
    def load(cls, path: str | os.PathLike[str], target: str | None = None) -> Report:
        """Read the newest report on a target (None: on any target) from a file that `dif score` wrote."""
        reports = [report for report in load_reports(path) if target in (None, report.target)]
        if not reports:
            raise InvalidInputError(
                f"Report file {os.fspath(path)!r} has no answer about {target!r}. Run `dif score` with that target."
            )
        return reports[-1]


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


_MOST_TARGETS = 20  # targets of one report at most
_AGREEING = 1e-6  # relative difference up to which scores count as the sum of their parts by term
_MAX_IMAGES = 300  # listed samples with an image
_BINS = 41  # bins of the histogram


def write_report(
    path: str | os.PathLike[str],
    influence: Influence,
    solution: Solution | None = None,
    *,
    targets: Mapping[str, Expression] | Sequence[Expression] | None = None,
    retrained: Influence | None = None,
    names: Sequence[Any] | None = None,
    groups: Sequence[Any] | None = None,
    features: Mapping[str, Sequence[Any]] | None = None,
    images: Any = None,
    title: str = "Influence",
) -> Path:
    """Write one HTML file about scores: the verdict, the constraints, and every sample; one tab for each target.

    Args:
        path: The HTML file to write.
        influence: Scores of an estimator.
        solution: The solution that the estimator was built from. It may be left out, unless the scores were read from a
            file.
        targets: The targets of the scores, in their order, for their present values. They may be left out, likewise.
        retrained: Scores of `Retraining` for some of the perturbations; they are matched by label.
        names: One name per sample, or per perturbation.
        groups: One group per sample, or per perturbation.
        features: Columns with one entry per sample, or per perturbation: a dict or a data frame. Rows are taken by
            position; a frame with other labels than the data, or with these in another order, is refused.
        images: Pixels per sample, (n, height, width) or with three channels, or per perturbation.
        title: Heading of the page.

    Returns:
        The path of the file.
    """
    file = expect_path(path)
    check_instance(influence, Influence, "influence")
    check_instance(title, str, "title")
    if solution is None and influence.origin is None:
        raise InvalidInputError(
            f"These scores of {influence.estimator} do not know the solution that they were computed at. Call "
            "dif.report.write_report(path, influence, solution)."
        )
    at = expect_solution(influence.origin.solution if solution is None and influence.origin else solution)
    terms = _find_terms(influence, targets)
    rows = [] if retrained is None else _match_retrained(influence, retrained)
    subjects = Subjects.of(
        influence.carried_out, at, names=names, groups=groups, features=features, images=images, index=influence.index
    )
    reports = build_reports(influence, subjects, terms, title=title)
    if retrained is not None:
        reports = [report.with_actual(rows, retrained) for report in reports]
    write_html(file, reports[::-1])  # the first target is shown first
    return file


def build_reports(
    influence: Influence, subjects: Subjects, terms: Sequence[Expression | None], *, title: str, method: str = "",
    top: int = 1, model: Mapping[str, str] | None = None, mark: str = "", command: str = "",
) -> list[Report]:  # fmt: skip
    """Build the report on each target of some scores.

    Args:
        influence: The scores.
        subjects: What to show of each perturbation.
        terms: The targets, for their present values; None where one is unknown.
        title: Heading of the page.
        method: Short name of the estimator and its setting; by default the name of the estimator.
        top: How many samples to list at least; the 1000 strongest are listed in any case.
        model: What identifies the model: hashes of its file and its data.
        mark: Fingerprint by which a report is found again.
        command: The command line that was run.
    """
    solution = subjects.solution
    explainer = _find_explainer(influence, solution)
    common: dict[str, Any] = {
        "title": title,
        "estimator": influence.estimator,
        "method": method or influence.estimator,
        "certificate": _describe_certificate(influence, subjects, explainer),
        "total": len(influence),
        "run": _describe_run(command),
        "model": dict(model or {"data": hash_data(solution)}),
        "mark": mark,
        "unanswered": influence.unanswered,
    }
    reports = []
    for column, (target, term) in enumerate(zip(influence.targets, terms, strict=True)):
        listed = [entry.index for entry in influence.top(max(top, MAX_SAMPLES), column)]
        compiled = None if term is None else Targets(term, solution)
        names, parts = ([], {}) if term is None else _split_scores(influence, explainer, term, column, listed)
        report = Report(
            target=target,
            assessment=_clean_assessment(influence, column),
            value=None if compiled is None else float(compiled.values(solution.theta)[0]),
            histogram=_bin_scores(influence.values[:, column].double()),
            by_group=_summarize_groups(subjects, influence.values[:, column].tolist()),
            terms=names,
            samples=_describe_samples(influence, subjects, column, listed, parts),
            loss=term is not None and is_loss(term, solution),
            kinked="" if compiled is None else "; ".join(map(str, compiled.kinks(solution.theta))),
            **common,
        )
        reports.append(report.with_retrained())
    return reports


def _find_terms(influence: Influence, targets: Any) -> list[Expression | None]:
    """Return the target of each column: the given ones, or those that the scores know; None where it is unknown."""
    T, origin = len(influence.targets), influence.origin
    if T > _MOST_TARGETS:
        raise InvalidInputError(
            f"The scores have {T} targets; a report shows at most {_MOST_TARGETS}, each in a tab of its own. Score "
            "fewer, such as the mean over all test samples."
        )
    if targets is None:
        known = origin is not None and len(origin.targets.terms) == T
        return list(origin.targets.terms) if origin is not None and known else [None] * T
    listed = list_entries(list(targets.values()) if isinstance(targets, Mapping) else targets)
    terms: list[Any] = [targets] if listed is None else listed
    wrong = [type(term).__name__ for term in terms if not isinstance(term, Expression)]
    if len(terms) != T or wrong:
        given = f"it has an entry of type {wrong[0]}" if wrong else f"not {len(terms)}"
        raise InvalidInputError(f"`targets` must be the {T} Terms that were scored, one per column; {given}.")
    return terms


def _match_retrained(influence: Influence, retrained: Any) -> list[int]:
    """Return the row of each retrained perturbation among those that were scored; refuse others."""
    check_instance(retrained, Influence, "retrained")
    places = {label: row for row, label in enumerate(influence.perturbations)}
    known = [label for label in retrained.perturbations if label in places]
    if len(known) < len(retrained) or not set(influence.targets) & set(retrained.targets):
        raise InvalidInputError(
            f"`retrained` must be about the perturbations and targets that were scored: of its {len(retrained)} "
            f"perturbations {len(known)} were, and its targets are {', '.join(retrained.targets)}."
        )
    return [places[label] for label in known]


def _find_explainer(influence: Influence, solution: Solution) -> Any:
    """Return what can say how removals act: the estimator of the scores, or else the derivative at the solution.

    It is None where the perturbations are unknown, or the point has no derivative.
    """
    own = getattr(influence.origin, "estimator", None)
    if getattr(own, "solution", None) is solution and hasattr(own, "by_term") and hasattr(own, "margins"):
        return own
    with suppress(DifError):
        return DirectionalInfluence(solution) if isinstance(influence.carried_out, Perturbation) else None
    return None


def _split_scores(
    influence: Influence, explainer: Any, term: Expression, column: int, listed: list[int]
) -> tuple[list[str], dict[int, list[float]]]:
    """Return the names of the terms, and the parts of each listed score; nothing where they would not add up."""
    rows = [row for row in listed if bool(torch.isfinite(influence.values[row, column]))]
    with suppress(DifError):
        if explainer is not None and rows:
            known, parts = influence.values[rows, column].double(), explainer.by_term(term, influence[rows].carried_out)
            if bool(((parts.values.sum(1) - known).abs() <= _AGREEING * known.abs().max()).all()):
                return list(parts.targets), dict(zip(rows, parts.values.tolist(), strict=True))
    return [], {}


def _describe_certificate(influence: Influence, subjects: Subjects, explainer: Any) -> dict[str, Any]:
    """Return the certificate as plain numbers and text, with a formula and an explanation of each constraint."""
    answered, margins = torch.isfinite(influence.values).any(1), None
    with suppress(DifError):
        if explainer is not None and bool(answered.any()):
            margins = explainer.margins((influence if bool(answered.all()) else influence[answered]).carried_out)
    certificate = Certificate.of(subjects.solution, margins).to_dict()
    formulas = write_formulas(subjects.solution, subjects.sets)
    for row, formula in zip(certificate["constraints"], formulas, strict=True):
        row |= {"formula": formula, "words": explain_constraint(row, certificate["objective"])}
    return certificate


def _describe_samples(
    influence: Influence, subjects: Subjects, column: int, listed: Sequence[int], parts: Mapping[int, list[float]]
) -> list[dict[str, Any]]:
    """Return what the report says of each listed sample."""
    values, errors = influence.values[:, column].double(), influence.expected_error
    reasons = influence.diagnostics.get("unanswered", {})
    losses = [{name: finite(loss[i]) for name, loss in subjects.losses.items()} for i in listed]
    return [
        {
            "index": i,
            "name": subjects.name(i),
            "group": subjects.group(i),
            "score": finite(values[i]),
            "loss": next(iter(losses[k].values()), None),
            "losses": losses[k],
            "expected_error": finite(errors[i]),
            "why": reasons.get(influence.perturbations[i], ""),  # why it has no score
            "parts": [finite(x) for x in parts.get(i, ())],
            "features": subjects.feature(i),
            "image": subjects.image(i) if k < _MAX_IMAGES else None,
        }
        for k, i in enumerate(listed)
    ]


def is_loss(target: Expression, solution: Solution) -> bool:
    """Return whether a target is a nonnegative combination of losses that the objective also contains."""
    minimised = [s.samples for c, s in solution.problem.objective.sums if c > 0]
    term = target.as_term()
    return bool(term.sums) and all(f.ridge is not None and c >= 0 for c, f in term.functions) and all(
        c >= 0 and bool((s.weights >= 0).all()) and any(s.samples.same_loss(other) for other in minimised)
        for c, s in term.sums
    )  # fmt: skip


def hash_data(solution: Solution) -> str:
    """Return the SHA-256 of the data of all samples of the problem."""
    batches = (batch for samples in solution.problem.people for _, batch in samples.batches(at_most=READ))
    return hash_all(encode_tensor(leaf) for batch in batches for leaf in leaves(batch)).hex()


def _clean_assessment(influence: Influence, column: int) -> dict[str, Any] | None:
    """Return the error estimate of the scores on one target with numbers that JSON can hold."""
    assessment = influence.diagnostics.get("assessment")
    if assessment is None:
        return None
    pooled = [min(error, 1e300) for error in assessment["by_target"][column : column + 1]]
    errors = [finite(x) for x in assessment["errors"]]
    return assessment | {"errors": errors, "by_target": pooled, "pooled": next(iter(pooled), None)}


def _bin_scores(column: Tensor) -> dict[str, list[float]]:
    known = column[torch.isfinite(column)].numpy()
    counts, edges = np.histogram(known, bins=_BINS) if len(known) else (np.zeros(0), np.zeros(0))
    return {"counts": counts.astype(float).tolist(), "edges": edges.tolist()}


def _summarize_groups(subjects: Subjects, column: Sequence[float]) -> list[dict[str, Any]]:
    scores: dict[str, list[float]] = {}
    for i, value in enumerate(column if subjects.groups is not None else ()):
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
