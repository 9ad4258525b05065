"""What the commands about a model compute: scores of every sample, and retrainings of the strongest."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

from dif.cli.output import fail

if TYPE_CHECKING:
    from dif.cli.description import Description
    from dif.cli.results_folder import ResultsFolder
    from dif.estimators.retraining import RetrainingCache
    from dif.optimality.solution import Solution
    from dif.problem.perturbation import Perturbation
    from dif.report.builder import Report
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

    def __init__(self, file: Path, silent: bool) -> None:
        self.file, self.silent = file, silent
        self.folder: ResultsFolder | None = None
        self.stage = "starting"
        self._retraining: tuple[RetrainingCache, Perturbation] | None = None

    def describe_interruption(self) -> str:
        """Say what is kept of a run that was interrupted, and how to continue."""
        text = f"Interrupted while {self.stage}."
        fits = None if self.folder is None else self.folder.fits
        if fits is not None and fits.unfinished is not None and fits.unfinished.exists():
            return f"{text} The unfinished fit is kept; the same command continues it."
        if fits is None or not fits.kept:
            text, again = f"{text} Nothing new was kept.", "The same command starts again."
        else:
            text, again = f"{text} The fit is kept.", "The same command starts again with that fit."
        if self._retraining is not None:
            cache, removals = self._retraining
            from dif.derivatives.weight_change import Direction

            direction = Direction(cache.solution.program, removals)
            done = sum(end.reached for end in cache.load(direction).values())
            text = f"Interrupted while {self.stage}. {done} of {len(removals)} retrainings are kept."
            again = "The same command continues with the others."
        if self.stage == _WRITING:
            again = "Run the same command again to complete the report."
        return f"{text} {again}"

    def read(self, folder: ResultsFolder, *, need_targets: bool = True) -> Description:
        """Run the model file, reusing its fits if neither the file nor its data have changed.

        If targets are needed, the folder is for results on this file from now on.
        """
        from dif.cli.description import Description

        self.folder, self.stage = folder, "running the model file"
        if need_targets:
            folder.check()
        description = Description.read(self.file, need_targets=need_targets, fit=folder.fits.fit)
        folder.fits.prune()
        if need_targets:
            folder.claim()
        return description

    def score(self, description: Description, question: Question, top: int) -> Report:
        """Score every sample and add the answer to the folder.

        Where an accuracy was asked for, up to `top` of the samples that no method predicts are retrained.
        """
        from dif.cli.results_folder import fingerprint
        from dif.report.builder import build_reports

        folder, self.stage = self._get_folder(), "scoring"
        name, term = description.target(question.target)
        removals, needed = find_removals(description)
        with ignore_first_order_warning():
            scores = _predict(description.solution, {name: term}, removals, question, self.silent)
        if needed:
            scores = _add_unanswered(scores, description.train.remove_each(), needed)
        (report,) = build_reports(
            scores, description.subjects, [term], title=self.file.stem, method=question.method, top=top,
            model=folder.describe_model(description), mark=fingerprint(description, name), command=_command(),
        )  # fmt: skip
        self.stage = _WRITING
        report = folder.add(report, scores)
        unanswered = [s["index"] for s in report.samples if s["score"] is None and s.get("actual") is None]
        unanswered = [i for i in unanswered if i not in needed][:top]
        if question.accuracy is None or not unanswered:
            return report
        return self._retrain(description, report, term, unanswered, jobs=1)

    def retrain(self, description: Description, question: Question, top: int, jobs: int) -> Report:
        """Retrain without each of the `top` most influential samples and add what is found to the folder."""
        from dif.cli.results_folder import fingerprint

        folder = self._get_folder()
        name, term = description.target(question.target)
        known = folder.find(name, question.method, fingerprint(description, name))
        if known is None or len(known.samples) < min(top, known.total):  # not answered yet, or too few samples
            known = self.score(description, question, top)
        needed = find_removals(description)[1]
        listed = [sample["index"] for sample in known.samples[:top] if sample["index"] not in needed]
        return self._retrain(description, known, term, listed, jobs)

    def _retrain(self, description: Description, known: Report, term: Any, listed: list[int], jobs: int) -> Report:
        """Retrain without each of the listed samples and add what is found to an answer."""
        import dif
        from dif.estimators.retraining import RetrainingCache

        folder, removals = self._get_folder(), description.train.remove_each(listed)
        retraining = dif.Retraining(description.solution, keep=folder.path / "retrained", strict=False)
        cache = RetrainingCache.open(folder.path / "retrained", description.solution, retraining.tol)
        self.stage, self._retraining = "retraining", (cache, removals)
        actual = retraining.scores(term, removals, jobs=jobs, show_progress=not self.silent)
        self.stage = _WRITING
        return folder.add(known.with_actual(listed, actual, command=_command()))

    def _get_folder(self) -> ResultsFolder:
        assert self.folder is not None, "the model file is read first"
        return self.folder


def assess(description: Description) -> tuple[Any, dict[str, Any], tuple[int, str] | None, str]:
    """Return the constraint margins, the error estimate of the scores, the unanswered removals and the kinks."""
    import dif
    from dif.derivatives.program import Targets

    predictor, (removals, _) = dif.DirectionalInfluence(description.solution), find_removals(description)
    targets = description.targets
    with ignore_first_order_warning():
        scores = predictor.scores(targets, removals, show_progress=False)
    kinks = Targets(targets, description.solution).kinks(description.solution.theta)
    assessment = scores.diagnostics["assessment"]
    return predictor.margins(removals), assessment, scores.unanswered, "; ".join(map(str, kinks))


@contextmanager
def ignore_first_order_warning() -> Iterator[None]:
    """Suppress FirstOrderWarning: the printed verdict says the same."""
    from dif.errors import FirstOrderWarning

    with catch_warnings():
        simplefilter("ignore", FirstOrderWarning)
        yield


def find_removals(description: Description) -> tuple[Perturbation, dict[int, str]]:
    """Return the removal of each sample that can be removed, and for the others the term that needs them."""
    from dif.problem.weights import find_indispensable

    needed = find_indispensable(description.solution.problem, description.train)
    removable = [i for i in range(len(description.train)) if i not in needed]
    if not removable:
        fail(
            "No sample can be removed: each is the only sample in a term of the problem, which would be undefined "
            "without it."
        )
    return description.train.remove_each(removable if needed else None), needed


def _predict(
    solution: Solution, targets: dict[str, Any], removals: Perturbation, question: Question, silent: bool
) -> Influence:
    """Return the scores by the method that the question names."""
    import dif

    estimator: Any
    if question.accuracy is not None:
        if question.estimator is not Estimator.dif:
            fail(f"--accuracy selects the estimator itself, so leave out --estimator {question.estimator.value}.")
        estimator = dif.AdaptiveInfluence(solution, accuracy=question.accuracy, strict=False)
    elif question.estimator is Estimator.newton:
        estimator = dif.NewtonInfluence(solution)
    elif question.estimator is Estimator.classical:
        estimator = dif.ClassicalInfluence(solution)
    else:
        switching: Any = {Estimator.dif: "auto", Estimator.derivative: False, Estimator.switching: True}
        estimator = dif.DirectionalInfluence(solution, switching=switching[question.estimator])
    return estimator.scores(targets, removals, show_progress=not silent)


def _add_unanswered(scores: Influence, removals: Perturbation, needed: dict[int, str]) -> Influence:
    """Return scores of all samples: NaN and a reason for those that cannot be removed."""
    import torch

    values = torch.full((len(removals), 1), float("nan"), dtype=scores.values.dtype)
    removable = [i for i in range(len(removals)) if i not in needed]
    values[removable] = scores.values
    assessment = dict(scores.diagnostics["assessment"])
    assessment["rows"] = [removable[row] for row in assessment["rows"]]
    reasons = {
        removals[i].labels[0]: f"It is the only sample in {term}, which would be undefined without it."
        for i, term in needed.items()
    }
    unanswered = scores.diagnostics.get("unanswered", {}) | reasons
    diagnostics = scores.diagnostics | {"unanswered": unanswered, "assessment": assessment}
    return replace(scores, stored=values, carried_out=removals, diagnostics=diagnostics)


def _command() -> str:
    return shlex.join(["dif", *sys.argv[1:]])
