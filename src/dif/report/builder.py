"""The report on scores that were computed in Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dif.errors import DifError, InvalidInputError, count_words, few
from dif.estimators.directional import DirectionalInfluence
from dif.estimators.influence import Influence
from dif.optimality.active_set import Margin
from dif.optimality.solution import Solution, expect_solution
from dif.problem.perturbation import Perturbation
from dif.problem.term import Expression
from dif.report.column import expect_column, expect_features, list_entries
from dif.report.report import Report, select_samples, write_html
from dif.report.subjects import Subjects
from dif.runtime.file_path import expect_path
from dif.runtime.frames import is_numbering, is_reordered, is_same, read_labels, write_label
from dif.runtime.inputs import check_instance

_MOST_TARGETS = 20  # targets of one report at most
_AGREEING = 1e-6  # relative difference up to which scores count as the sum of their parts by term


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
    influence = check_instance(
        influence,
        Influence,
        "influence",
        meaning="A report shows the scores of an estimator.",
        cure="Pass the result of estimator.scores(target, perturbations).",
    )
    file, title = expect_path(path), _expect_title(title)
    solution = _find_solution(influence, solution)
    terms = _find_terms(influence, targets)
    if retrained is not None:
        _check_retrained(influence, retrained)
    plain = Subjects.of_perturbations(influence.carried_out, influence.perturbations, solution)
    lengths = {len(influence)} | ({len(plain.train)} if plain.train is not None else set())
    columns = {"names": names, "groups": groups, "images": images}
    shown: dict[str, Any] = {
        name: expect_column(column, f"`{name}`", lengths) for name, column in columns.items() if column is not None
    }
    given = {"names": names, "groups": groups, "features": features}
    if isinstance(features, Mapping):
        given |= {f"features[{key!r}]": column for key, column in features.items()}
    for name, column in given.items():
        _check_labels(column, name, influence, plain)
    if features is not None:
        shown["features"] = expect_features(features, "`features`", lengths)
    if names is None and influence.index is not None:
        shown["names"] = [write_label(label) for label in _find_labels(influence, plain)]
    subjects = replace(plain, **shown)
    subjects.check_display()
    explained = _Explanation.of(influence, solution)
    reports = [
        Report.of(
            subjects,
            influence,
            title=title,
            column=k,
            term=term,
            parts=explained.split(k, term),
            margins=explained.margins,
        )
        for k, term in enumerate(terms)
    ]
    if retrained is not None:
        places = {label: i for i, label in enumerate(influence.perturbations)}
        indices = [places[label] for label in retrained.perturbations]
        reports = [
            report.with_actual(indices, retrained) if report.target in retrained.targets else report
            for report in reports
        ]
    write_html(file, reports[::-1])  # the first target is shown first
    return file


def _check_labels(column: Any, name: str, influence: Influence, subjects: Subjects) -> None:
    """Refuse a data frame or a series whose index says that its rows are other samples than those of the scores."""
    index = read_labels(column)
    if index is None or influence.index is None:
        return
    everyone = _find_labels(influence, subjects)
    whole = subjects.train is not None and len(index) == len(everyone)  # then its rows are in the order of the data
    labels, source = (everyone, "X") if whole else (influence.index, "scores")
    if is_same(index, labels):
        return
    reordered = is_reordered(index, labels)
    unnamed = is_numbering(index) or (is_numbering(everyone) and set(everyone).isdisjoint(index))
    if reordered or not unnamed:
        known = set(labels)
        other = f"other labels than the scores: {few([x for x in index if x not in known], quoted=True)}"
        plain = ".to_dict('list')" if hasattr(column, "columns") else ".to_list()"
        raise InvalidInputError(
            f"`{name}` has {'the labels of the scores in another order' if reordered else other}.",
            "It must have the index of the data X, or of the selected scores, in its order.",
            "What is shown beside each score would belong to another sample.",
            f"Pass {name}.loc[{source}.index], or, if its rows are in order already, {name}{plain}.",
        )


def _find_labels(influence: Influence, subjects: Subjects) -> Any:
    """Return the labels of all samples in the index of the user's data; where unknown, those of the scores."""
    if subjects.train is None:
        return influence.index
    return subjects.train.population.storage.labels(torch.arange(len(subjects.train)))


def _find_solution(influence: Influence, solution: Solution | None) -> Solution:
    """Return the solution of the scores: the given one, or the one that they know."""
    if solution is not None:
        return expect_solution(solution)
    if influence.origin is None:
        raise InvalidInputError(
            f"These scores of {influence.estimator} do not know the solution that they were computed at.",
            "They must come from an estimator of a solution, in this process, or the solution must be given.",
            "A report shows the certificate of that solution, which neither a file nor a training run has.",
            "Call dif.report.write_report(path, influence, solution).",
        )
    return expect_solution(influence.origin.solution)


def _find_terms(influence: Influence, targets: Any) -> list[Expression | None]:
    """Return the target of each column: the given ones, or those that the scores know; None where it is unknown."""
    T, origin = len(influence.targets), influence.origin
    if T > _MOST_TARGETS:
        raise InvalidInputError(
            f"The scores have {T} targets.",
            f"A report shows at most {_MOST_TARGETS}.",
            "Each target has a tab of its own.",
            "Score fewer targets, such as the mean over all test samples.",
        )
    if targets is None:
        known = origin is not None and len(origin.targets.terms) == T
        return list(origin.targets.terms) if origin is not None and known else [None] * T
    listed = list_entries(list(targets.values()) if isinstance(targets, Mapping) else targets)
    terms: list[Any] = [targets] if listed is None else listed
    if len(terms) != T or not all(isinstance(term, Expression) for term in terms):
        kinds = {type(term).__name__ for term in terms if not isinstance(term, Expression)}
        raise InvalidInputError(
            f"`targets` has {count_words(len(terms), 'target')}{f', some of type {min(kinds)}' if kinds else ''}.",
            f"It must have {T} Terms, one per column of the scores.",
            "The report shows the present value of each target beside its scores.",
            "Pass the targets that were scored, in their order, or leave them out.",
        )
    return terms


def _check_retrained(influence: Influence, retrained: Any) -> None:
    """Refuse retrained scores that do not belong to the scores."""
    retrained = check_instance(
        retrained,
        Influence,
        "retrained",
        meaning="It holds the retrained change of a target, which the report shows beside the predicted one.",
        cure="Pass dif.Retraining(solution).scores(target, perturbations), or leave it out.",
    )
    known = set(influence.perturbations) & set(retrained.perturbations)
    if len(known) < len(retrained) or not set(influence.targets) & set(retrained.targets):
        raise InvalidInputError(
            f"Of {len(retrained)} retrained perturbations, {len(known)} were scored; the retrained targets are "
            f"{', '.join(retrained.targets)}.",
            "Each must be among the scored perturbations, and some target among the scored targets.",
            "The report shows the retrained change of a target beside the predicted one.",
            "Retrain some of the perturbations that were scored, for the same targets.",
        )


@dataclass(frozen=True, eq=False)
class _Explanation:
    """How removals act: through which terms, and how far they move the constraints. Nothing where that is unknown."""

    influence: Influence
    estimator: DirectionalInfluence | None  # None where the point has no derivative, or the perturbations are unknown
    margins: Sequence[Margin | None] | None

    @classmethod
    def of(cls, influence: Influence, solution: Solution) -> _Explanation:
        """Prepare the derivative at the solution."""
        if isinstance(influence.carried_out, Perturbation):
            with suppress(DifError):
                estimator = DirectionalInfluence(solution)
                return cls(influence, estimator, estimator.margins(influence.carried_out))
        return cls(influence, None, None)

    def split(self, column: int, term: Expression | None) -> Influence | None:
        """Return the scores of the listed samples by term; None where they would not add up to the scores shown."""
        removals = self.influence.carried_out
        if self.estimator is None or term is None or not isinstance(removals, Perturbation):
            return None
        listed = select_samples(self.influence, 0, column)
        known = self.influence.values[listed, column].double()
        if not listed or not bool(torch.isfinite(known).all()):
            return None
        with suppress(DifError):
            parts = self.estimator.by_term(term, removals.pick(listed))
            if bool(((parts.values.sum(1) - known).abs() <= _AGREEING * known.abs().max()).all()):
                return parts
        return None


def _expect_title(title: Any) -> str:
    """Return the heading of the page; refuse what is not text."""
    if not isinstance(title, str):
        raise InvalidInputError(
            f"`title` is of type {type(title).__name__}.",
            "It must be text.",
            "It is the heading of the page.",
            'Pass title="Credit score", say, or leave it out.',
        )
    return title
