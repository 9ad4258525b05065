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
    from dif.cli.results_folder import ResultsFolder
    from dif.estimators.directional import DirectionalInfluence
    from dif.estimators.influence import Influence
    from dif.estimators.retraining_cache import RetrainingCache
    from dif.problem.perturbation import Perturbation
    from dif.report.description import Description
    from dif.report.report import Report

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
            done = sum(end.reached for end in cache.load(removals).values())
            text = f"Interrupted while {self.stage}. {done} of {len(removals)} retrainings are kept."
            again = "The same command continues with the others."
        if self.stage == _WRITING:
            again = "Run the same command again to complete the report."
        return f"{text} {again}"

    def read(self, folder: ResultsFolder, *, need_targets: bool = True) -> Description:
        """Run the model file, reusing its fits if neither the file nor its data have changed.

        If targets are needed, the folder is for results on this file from now on.
        """
        from dif.report.description import Description

        self.folder, self.stage = folder, "running the model file"
        if need_targets:
            folder.check()
        description = Description.read(self.file, need_targets=need_targets, fit=folder.fits.fit)
        folder.fits.prune()
        if need_targets:
            folder.claim()
        return description

    def score(self, description: Description, question: Question, top: int) -> Report:
        """Score every sample and add the answer to the folder."""
        import torch

        import dif
        from dif.report.report import Report, select_samples

        folder, self.stage = self._get_folder(), "scoring"
        name, term = description.target(question.target)
        removals, needed = find_removals(description)
        with ignore_first_order_warning():
            scores, predictor = _predict(description, term, removals, question, self.silent)
        margins = (predictor or dif.DirectionalInfluence(description.solution)).margins(removals)
        if needed:
            scores = _add_unanswered(scores, description.train.remove_each(), needed)
        scores = replace(scores, targets=(name,))
        listed = select_samples(scores, top)
        answered = description.train.remove_each([i for i in listed if i not in needed])
        if predictor is not None:
            parts = predictor.by_term(term, answered)
        else:
            parts = dif.Influence(torch.zeros(len(answered), 0), answered, (), scores.estimator)
        report = Report.of(
            description.subjects, scores, title=self.file.stem, term=term, method=question.method, parts=parts,
            top=top, margins=margins, model=folder.describe_model(description), command=_command(),
        )  # fmt: skip
        self.stage = _WRITING
        return folder.add(report, scores)

    def retrain(self, description: Description, question: Question, top: int, jobs: int) -> Report:
        """Retrain without each of the `top` most influential samples and add what is found to the folder."""
        import dif
        from dif.estimators.retraining_cache import RetrainingCache
        from dif.report.report import fingerprint

        folder = self._get_folder()
        name, term = description.target(question.target)
        known = folder.find(name, question.method, fingerprint(description.subjects, name, term))
        if known is None or len(known.samples) < min(top, known.total):  # not answered yet, or too few samples
            known = self.score(description, question, top)
        listed = [sample["index"] for sample in known.samples[:top] if sample["score"] is not None]
        removals = description.train.remove_each(listed)
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
    from dif.optimality.targets import Targets

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
    from dif.derivatives.weight_change import find_indispensable

    needed = find_indispensable(description.solution.program, description.train)
    removable = [i for i in range(len(description.train)) if i not in needed]
    if not removable:
        fail(
            "No sample can be removed: each is the only sample in a term of the problem, which would be undefined "
            "without it."
        )
    return description.train.remove_each(removable if needed else None), needed


def _predict(
    description: Description, target: Any, removals: Perturbation, question: Question, silent: bool
) -> tuple[Influence, DirectionalInfluence | None]:
    """Return the scores, and the estimator if it can split them by term."""
    import dif

    solution, estimator, accuracy = description.solution, question.estimator, question.accuracy
    if accuracy is not None:
        if estimator is not Estimator.dif:
            fail(f"--accuracy selects the estimator itself, so leave out --estimator {estimator.value}.")
        adaptive = dif.AdaptiveInfluence(solution, accuracy=accuracy, strict=False)
        return adaptive.scores(target, removals, show_progress=not silent), None
    if estimator is Estimator.newton:
        return dif.NewtonInfluence(solution).scores(target, removals, show_progress=not silent), None
    if estimator is Estimator.classical:
        return dif.ClassicalInfluence(solution).scores(target, removals, show_progress=not silent), None
    switching: Any = {Estimator.dif: "auto", Estimator.derivative: False, Estimator.switching: True}[estimator]
    predictor = dif.DirectionalInfluence(solution, switching=switching)
    return predictor.scores(target, removals, show_progress=not silent), predictor


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
