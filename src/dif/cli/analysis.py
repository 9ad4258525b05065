"""What the commands about a model compute: a verdict, scores of every sample, and retrainings of the strongest."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from warnings import simplefilter

import dif
from dif.cli.description import Description
from dif.cli.output import fail
from dif.cli.results_folder import ResultsFolder, fingerprint
from dif.derivatives.weight_change import Direction
from dif.errors import FirstOrderWarning
from dif.estimators.retraining import RetrainingCache
from dif.optimality.judgement import BAD, GOOD, NOTE, Certificate
from dif.optimality.solution import Solution
from dif.problem.perturbation import Perturbation
from dif.report.builder import Report, build_reports
from dif.report.words import Verdict
from dif.results.influence import Influence

_WRITING = "writing the report"  # stage of a run in which its answer is complete


class Estimator(StrEnum):
    """The methods that predict the effect of a removal."""

    dif = "dif"
    derivative = "derivative"
    switching = "switching"
    newton = "newton"
    classical = "classical"


@dataclass(frozen=True)
class Question:
    """What a user asks: how a target changes, predicted by which estimator, to which accuracy."""

    target: str | None  # None: the first target of the file
    estimator: Estimator = Estimator.dif
    accuracy: float | None = None

    @property
    def method(self) -> str:
        """Short name of the estimator and its setting."""
        return self.estimator.value if self.accuracy is None else f"accuracy {self.accuracy:g}"


class Analysis:
    """One run of a command on a model file and its folder of results; it knows how far it has come."""

    def __init__(self, file: Path, folder: ResultsFolder, silent: bool) -> None:
        self.file, self.folder, self.silent = file, folder, silent
        self.stage = "starting"
        self._retraining: tuple[RetrainingCache, Perturbation] | None = None

    def describe_interruption(self) -> str:
        """Say what is kept of a run that was interrupted, and how to continue."""
        fits = self.folder.fits
        kept, again = "Nothing new was kept.", "The same command starts again."
        if fits.unfinished is not None and fits.unfinished.exists():
            kept, again = "The unfinished fit is kept;", "the same command continues it."
        elif self._retraining is not None:
            cache, removals = self._retraining
            found = cache.load(Direction(cache.solution.program, removals)).values()
            kept = f"{sum(end.reached for end in found)} of {len(removals)} retrainings are kept."
            again = "The same command continues with the others."
        elif fits.kept:
            kept, again = "The fit is kept.", "The same command starts again with that fit."
        if self.stage == _WRITING:
            again = "Run the same command again to complete the report."
        return f"Interrupted while {self.stage}. {kept} {again}"

    def check(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the certificate of the solution, and the worst verdict on the scores of all samples on a target."""
        description = self._read(need_targets=False)
        self.stage, targets = "checking", description.targets
        certificate = Certificate.of(description.solution).to_dict()
        if not certificate["holds"]:
            return certificate, asdict(Verdict.of(certificate, None, None))
        if not targets or not description.train_is_known:
            missing = "`train`, and there are several Samples" if targets else "`targets`"
            words = f"This is a solution. No prediction was checked: the file names no {missing}."
            return certificate, asdict(Verdict(NOTE, words))
        scores = _score_all(description, targets, Question(None), silent=True)
        reports = build_reports(scores, description.subjects, list(targets.values()), title=self.file.stem)
        worst = max(reports, key=lambda report: [GOOD, NOTE, BAD].index(report.verdict["sign"]))
        return worst.certificate, worst.verdict

    def score(self, question: Question, top: int) -> Report:
        """Score every sample and add the answer to the folder.

        Where an accuracy was asked for, up to `top` of the samples that no method predicts are retrained.
        """
        return self._score(self._read(), question, top)

    def retrain(self, question: Question, top: int, jobs: int = 1) -> Report:
        """Retrain without each of the `top` most influential samples and add what is found to the folder."""
        description = self._read()
        name, term = description.target(question.target)
        known = self.folder.find(name, question.method, fingerprint(description, name))
        if known is None or len(known.samples) < min(top, known.total):  # not answered yet, or too few samples
            known = self._score(description, question, top)
        listed = [s["index"] for s in known.samples[:top] if s["index"] not in description.needed]
        return self._retrain(description, known, term, listed, jobs)

    def _read(self, *, need_targets: bool = True) -> Description:
        """Run the model file, reusing its fits if neither the file nor its data have changed.

        If targets are needed, the folder is for results on this file from now on.
        """
        self.stage = "running the model file"
        if need_targets:
            self.folder.check()
        description = Description.read(self.file, need_targets=need_targets, fit=self.folder.fits.fit)
        simplefilter("ignore", FirstOrderWarning)  # the printed verdict says the same
        self.folder.fits.prune()
        if need_targets:
            self.folder.claim()
        return description

    def _score(self, description: Description, question: Question, top: int) -> Report:
        self.stage = "scoring"
        name, term = description.target(question.target)
        scores = _score_all(description, {name: term}, question, self.silent)
        (report,) = build_reports(
            scores, description.subjects, [term], title=self.file.stem, method=question.method, top=top,
            model=self.folder.describe_model(description), mark=fingerprint(description, name), command=_command(),
        )  # fmt: skip
        self.stage = _WRITING
        report = self.folder.add(report, scores)
        unanswered = [s["index"] for s in report.samples if s["score"] is None and s.get("actual") is None]
        unanswered = [i for i in unanswered if i not in description.needed][:top]
        if question.accuracy is None or not unanswered:
            return report
        return self._retrain(description, report, term, unanswered)

    def _retrain(self, description: Description, known: Report, term: Any, listed: list[int], jobs: int = 1) -> Report:
        """Retrain without each of the listed samples and add what is found to an answer."""
        removals, keep = description.train.remove_each(listed), self.folder.path / "retrained"
        retraining = dif.Retraining(description.solution, keep=keep, strict=False)
        cache = RetrainingCache.open(keep, description.solution, retraining.tol)
        self.stage, self._retraining = "retraining", (cache, removals)
        actual = retraining.scores({known.target: term}, removals, jobs=jobs, show_progress=not self.silent)
        self.stage = _WRITING
        return self.folder.add(known.with_actual(listed, actual, command=_command()))


def _score_all(description: Description, targets: dict[str, Any], question: Question, silent: bool) -> Influence:
    """Return the scores of all samples: NaN and a reason for those that cannot be removed."""
    removals, needed = description.train.remove_each(), description.needed
    if len(needed) == len(removals):
        fail(
            "No sample can be removed: each is the only sample in a term of the problem, which would be undefined "
            "without it."
        )
    scores = _choose_estimator(description.solution, question).scores(targets, removals, show_progress=not silent)
    for i, term in needed.items():
        why = f"It is the only sample in {term}, which would be undefined without it."
        scores.diagnostics["unanswered"][scores.perturbations[i]] = why
    return scores


def _choose_estimator(solution: Solution, question: Question) -> dif.Estimator:
    """Return the estimator that the question names."""
    if question.accuracy is not None and question.estimator is not Estimator.dif:
        fail(f"--accuracy selects the estimator itself, so leave out --estimator {question.estimator.value}.")
    if question.accuracy is not None:
        return dif.AdaptiveInfluence(solution, accuracy=question.accuracy, strict=False)
    if question.estimator is Estimator.newton:
        return dif.NewtonInfluence(solution)
    if question.estimator is Estimator.classical:
        return dif.ClassicalInfluence(solution)
    switching: Any = {Estimator.dif: "auto", Estimator.derivative: False, Estimator.switching: True}
    return dif.DirectionalInfluence(solution, switching=switching[question.estimator])


def _command() -> str:
    return shlex.join(["dif", *sys.argv[1:]])
