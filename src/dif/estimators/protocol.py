"""The interface of every estimator, and the loop that fills its scores chunk by chunk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dif.derivatives.fingerprint import hash_all, hash_direction, hash_targets
from dif.derivatives.program import Program, Targets
from dif.derivatives.weight_change import Direction
from dif.errors import FirstOrderWarning, InvalidInputError, warn
from dif.optimality.solution import Solution
from dif.problem.perturbation import Perturbation
from dif.results.change import Change
from dif.results.influence import Influence, Origin, distinguish_targets
from dif.runtime.guard import is_single_process
from dif.runtime.score_array import FileScores
from dif.runtime.work import check_jobs, progress, run_in_order

Out = str | os.PathLike[str] | None  # a file for scores, ending in .npy
ONE_BY_ONE = 16  # perturbations in a chunk, for estimators that solve them one by one: little is lost on interruption
_SHARES = 4  # chunks per job, so that jobs finish at about the same time
_HASHED = 2**14  # perturbations hashed at once


@runtime_checkable
class Estimator(Protocol):
    """Predicts what perturbations change. Any object with these three members can be used as an estimator.

    Examples:
        >>> import dif
        >>> all(hasattr(dif.Retraining, part) for part in ("name", "change", "scores"))
        True
    """

    @property
    def name(self) -> str:
        """Name of the estimator in results and reports."""
        ...

    def change(self, perturbation: Perturbation) -> Change:
        """Predict Δθ and Δλ of one perturbation, carried out in full."""
        ...

    def scores(
        self,
        target: Any,
        perturbations: Perturbation,
        *,
        out: str | os.PathLike[str] | None = None,
        jobs: int = 1,
        show_progress: bool = True,
    ) -> Influence:
        """Predict the change of each target under each perturbation.

        Args:
            target: A Term, a list of Terms, a dict of Terms by name, or Samples (one target per sample).
            perturbations: One or many.
            out: File for the scores, ending in .npy, filled as they are computed. After an interruption the same call
                resumes.
            jobs: Processes that share the work (joblib; its `parallel_config` chooses the backend).
            show_progress: Show a progress bar on a terminal or in a notebook.
        """
        ...


Scored = tuple[Tensor, dict[str, Any]]  # scores (P, T) of consecutive perturbations, and their diagnostics


def resolve(program: Program, perturbations: Perturbation) -> tuple[Direction, dict[int, str]]:
    """Resolve perturbations, and find those that have no answer, as they leave a term without samples.

    In the directions another perturbation takes the place of each of these. Where there is no other, they are refused.

    Returns:
        The directions; and why perturbations have no answer, by number.
    """
    reasons: dict[int, str] = {}
    while True:
        others = perturbations
        if reasons:
            known = next(p for p in range(len(perturbations)) if p not in reasons)
            others = perturbations.pick([known if p in reasons else p for p in range(len(perturbations))])
        try:
            return Direction(program, others), reasons
        except InvalidInputError as error:
            reasons = error.reasons | reasons
            if not error.reasons or len(reasons) == len(perturbations):
                raise


def fill_scores(
    estimator: Estimator, at: Solution, targets: Targets, direction: Direction,
    score: Callable[[int], Iterable[Scored]],
    diagnostics: dict[str, Any], *, name: str = "", out: Out = None, show_progress: bool = True,
    complete: Callable[[Influence], None] | None = None, given: Perturbation | None = None,
    reasons: Mapping[int, str] | None = None,
) -> Influence:  # fmt: skip
    """Score all perturbations; rows that the file `out` has already are not computed again.

    Args:
        estimator: The result remembers it.
        at: The point of which the scores are.
        targets: Targets.
        direction: The perturbations, resolved.
        score: Yields the scores from a given row on, see `by_chunk`.
        diagnostics: What the result says about the point and the settings.
        name: What results show as the name of the estimator; empty for the estimator's own.
        out: File for the scores; None keeps them in memory.
        show_progress: Show a progress bar.
        complete: Adds to the diagnostics of the result what is known when all rows are there.
        given: The perturbations, where others take the place of some in `direction`, see `resolve`.
        reasons: Why these have no answer, by number.
    """
    perturbations, reasons = given or direction.perturbation, reasons or {}
    name, names = name or estimator.name, targets.names
    if len(set(names)) < len(names):
        names = distinguish_targets(names, targets.terms)
    shape, file, done, pieces = (direction.P, len(names)), None, 0, []
    unknown = torch.tensor([p in reasons for p in range(direction.P)])
    values = torch.full(shape if out is None else (0, 0), float("nan"), dtype=torch.float64)
    origin = Origin(at, targets, estimator)
    influence = Influence(values, perturbations, names, name, dict(diagnostics), origin=origin)
    if out is not None:
        settings = f"{name} {names} {json.dumps(diagnostics, sort_keys=True)} {sorted(reasons)}"
        file = _open(out, shape, settings, at, targets, direction, influence.describe())
        values, pieces, done = file.values, file.pieces, file.done
        influence = replace(influence, stored=values)
    if done < direction.P:
        with progress(name, direction.P, show_progress) as report:
            for block, about in score(done):
                begin, done = done, done + len(block)
                block[unknown[begin:done]] = float("nan")
                if file is None:
                    values[begin:done] = block
                    pieces.append(about)
                else:
                    file.write(block, **about)
                report(done)
    for key in pieces[0].keys() - {"end", "checksum"}:
        entries = [piece[key] for piece in pieces]
        if isinstance(entries[0], dict):
            influence.diagnostics[key] = {label: value for entry in entries for label, value in entry.items()}
        else:
            joined = isinstance(entries[0], list)
            influence.diagnostics[key] = list(chain.from_iterable(entries)) if joined else sum(entries)
    if reasons:
        found = {perturbations[p].labels[0]: reason for p, reason in reasons.items()}
        influence.diagnostics["unanswered"] = found | influence.diagnostics.get("unanswered", {})
        for key in influence.diagnostics.keys() & {"residuals", "remainders"}:
            for p in reasons:
                influence.diagnostics[key][p] = float("nan")
    unanswered = influence.diagnostics.get("unanswered")
    if unanswered:
        label, reason = next(iter(unanswered.items()))
        count = f"{len(unanswered)} of {direction.P} perturbations"
        warn(f"{count} have no answer (NaN). The first is {label!r}: {reason}", FirstOrderWarning)
    if complete is not None:
        complete(influence)
    if file is not None:
        file.finish(influence.describe())
    return influence


def by_chunk(
    work: Callable[[Direction], Scored], direction: Direction, most: int = ONE_BY_ONE, jobs: int = 1
) -> Callable[[int], Iterable[Scored]]:
    """Score perturbations in chunks of at most `most`, each by one call of `work`."""
    jobs = check_jobs(jobs)
    size = max(1, most) if jobs == 1 else chunk_size(direction.P, most, jobs)
    chunks = lambda begin: [direction[start : start + size] for start in range(begin, direction.P, size)]  # noqa: E731
    return lambda begin: map(work, chunks(begin)) if jobs == 1 else run_in_order(work, chunks(begin), jobs)


def _open(
    out: str | os.PathLike[str], shape: tuple[int, int], settings: str, at: Solution, targets: Targets,
    direction: Direction, about: Iterable[Any],
) -> FileScores:  # fmt: skip
    """Open the file of the scores; its fingerprint is a hash of all that they depend on."""
    if not is_single_process():
        raise InvalidInputError(
            "`out` must be None inside dif.sharded(), where all processes would write the same file; save the "
            "result in one process, or share the work by jobs=."
        )
    chunks = (direction[begin : begin + _HASHED] for begin in range(0, direction.P, _HASHED))
    changes = chain.from_iterable(map(hash_direction, chunks))
    digest = hash_all(chain([settings.encode()], changes, [at.identity], hash_targets(targets))).hex()
    return FileScores(out, shape, digest, about)


def chunk_size(count: int, most: int, jobs: int) -> int:
    """Return how many of `count` perturbations make a chunk, so that each of several jobs has several chunks."""
    return max(1, min(most, -(-count // (_SHARES * abs(jobs)))))


def differences(at: Solution, targets: Targets, moves: Iterable[Tensor]) -> Tensor:
    """Return the difference of each target between θ̄ and θ̄ + Δθ, for each Δθ, (P, T)."""
    before = targets.values(at.theta)
    return torch.stack([targets.values(at.theta + move) - before for move in moves]).double().cpu()


def describe_solution(solution: Solution) -> dict[str, Any]:
    """Describe the point on which an answer rests: residuals, active set, existence of the derivative."""
    active = solution.active
    return {
        "kkt": solution.kkt.parts,
        "binding": [active.names[j] for j in active.binding],
        "weak": [active.names[j] for j in active.weak],
        "uncertain": [active.names[j] for j in active.uncertain],
        "smallest_margin": float(active.margins.abs().min()) if len(active.names) else None,
        "licq": active.licq,
        "curvature": active.curvature,
    }
