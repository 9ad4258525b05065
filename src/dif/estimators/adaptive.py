"""Scores of a wanted accuracy: from DIF where it is accurate enough, else from Newton's step or the path."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.errors import FirstOrderWarning, NotConvergedError, few, warn
from dif.estimators.assessment import Assessor, ErrorEstimate, Goal, describe_failure
from dif.estimators.directional import DirectionalInfluence
from dif.estimators.newton import NewtonInfluence
from dif.estimators.path import PathInfluence
from dif.estimators.protocol import Out, Scored, by_chunk, describe_solution, fill_scores, resolve
from dif.optimality.solution import Solution, expect_solution
from dif.problem.perturbation import Perturbation
from dif.results.change import Change
from dif.results.influence import Influence
from dif.runtime.inputs import check_number

WARN_ABOVE = 0.03  # estimated relative error above which a warning is given if no accuracy is asked for
_CHUNK = 32  # perturbations in a chunk


class AdaptiveInfluence:
    """Scores from the cheapest estimator that is accurate enough, each with an estimate of its error.

    DIF predicts to first order. Its error is estimated by two Newton steps on the changed problem from where DIF ends,
    with the curvature at the solution: two gradients and solves per perturbation, no Hessian. These steps also see
    constraints that become active or inactive. Where the estimated error is larger than `accuracy`, a full Newton step
    is taken and assessed in the same way; where that is not enough either, the path is followed to the end.

    Args:
        solution: A certified solution.
        accuracy: Relative error that is wanted. None: DIF's answers, with a FirstOrderWarning where the estimated error
            is above 3 %.
        strict: Raise where no estimator has an answer (for example where the changed constraints contradict each
            other); False gives NaN.
    """

    name = "adaptive"

    def __init__(self, solution: Solution, *, accuracy: float | None = None, strict: bool = True) -> None:
        self.solution = expect_solution(solution)
        self.accuracy = None if accuracy is None else check_number(accuracy, "accuracy", zero=True)
        self.strict = strict
        self._first = DirectionalInfluence(solution, strict=strict)
        self._newton = NewtonInfluence(solution, strict=False)
        self._path = PathInfluence(solution, strict=strict)
        self._assessor = Assessor(solution)

    def change(self, perturbation: Perturbation) -> Change:
        """Predict Δθ and Δλ of one perturbation by the first estimator whose error is within `accuracy`.

        The error is the length of one more Newton step on the changed problem, relative to Δθ.
        """
        first = self._first.change(perturbation)
        if self.accuracy is None or self._next_step(perturbation, first) <= self.accuracy:
            return first
        step = self._newton.change(perturbation)
        if bool(torch.isfinite(step.flat).all()) and self._next_step(perturbation, step) <= self.accuracy:
            return step
        return self._path.change(perturbation)

    def _next_step(self, perturbation: Perturbation, change: Change) -> float:
        """Measure the Newton step on the changed problem from where a change ends, relative to that change."""
        at, stack = self.solution, Direction(self.solution.program, perturbation).stack_programs()
        lam = at.program.kinds.project(at.lam + change.multipliers.flat)
        omega, _ = self._assessor.newton.step(stack, (at.theta + change.flat)[None], lam[None])
        size, length = (float((at.scales.root * move).norm()) for move in (change.flat, omega[0]))
        return length / size if size > 0 else (0.0 if length == 0 else float("inf"))

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1, show_progress: bool = True
    ) -> Influence:
        """Predict the change of each target by the first estimator whose error is within `accuracy`.

        Keywords as in `dif.Estimator`. The relative error of a perturbation is taken over all targets, each in its own
        unit: `Influence.expected_error`. The diagnostics name the estimator of each perturbation (`by`) and the
        constraints that switch (`crossed`).
        """
        at, targets = self.solution, Targets(target, self.solution)
        goal, (direction, reasons) = self._assessor.prepare(targets), resolve(at.program, perturbations)
        about = {**describe_solution(at), "accuracy": self.accuracy, "strict": self.strict}
        score = by_chunk(partial(self._score, goal), direction, _CHUNK, jobs)
        return fill_scores(
            self, at, targets, direction, score, about, out=out, show_progress=show_progress,
            complete=partial(self._complete, goal), given=perturbations, reasons=reasons,
        )  # fmt: skip

    def _complete(self, goal: Goal, influence: Influence) -> None:
        """Judge the scores by the estimated errors of all of them, and warn where they are not to be trusted."""
        about = influence.diagnostics
        error, size = (torch.tensor(about.pop(part), dtype=goal.units.dtype) for part in ("error", "size"))
        answered = torch.isfinite(influence.values).all(1)
        errors = about["remainders"]
        parts = error[answered].to(goal.units), size[answered].to(goal.units)
        estimate = ErrorEstimate(*parts, goal.units, goal.targets.alike, [])
        about["assessment"] = describe_failure("no perturbation has an answer")
        if bool(answered.any()):
            found = self._assessor.describe(estimate, [], goal, influence.values[answered])
            about["assessment"] = found | {"rows": list(range(len(errors))), "errors": errors}
        inaccurate = [p for p, error in enumerate(errors) if error > WARN_ABOVE]
        if self.accuracy is None and inaccurate:
            worst = max(inaccurate, key=lambda p: errors[p])
            warn(
                f"The estimated relative error of the first-order prediction is above {WARN_ABOVE:g} for "
                f"{len(inaccurate)} of {len(errors)} perturbations ({few(inaccurate)}). It is largest, "
                f"{errors[worst]:.2g}, for {influence.perturbations[worst]!r}. Pass accuracy=0.01 to continue "
                "with a Newton step or the whole path where needed.",
                FirstOrderWarning,
            )

    def _score(self, goal: Goal, chunk: Direction) -> Scored:
        omega, lam = self._first.ends(self._first.linearise(chunk), chunk)
        first = omega @ goal.Q
        found = self._assessor.estimate_errors(goal, chunk, omega, lam, first)
        by, values, unanswered = [DirectionalInfluence.name] * chunk.P, first.clone(), {}
        inexact = ~(found.relative <= self.accuracy) if self.accuracy is not None else torch.zeros(chunk.P).bool()
        for p in torch.nonzero(inexact).reshape(-1).tolist():
            by[p], values[p], better = self._score_further(chunk.perturbation[p], goal, unanswered)
            found.error[p], found.size[p], found.switched[p] = better.error[0], better.size[0], better.switched[0]
        about = {
            "by": by,
            "remainders": found.relative.double().cpu().tolist(),
            "crossed": {
                label: names for label, names in zip(chunk.perturbation.labels, found.switched, strict=True) if names
            },
            "unanswered": unanswered,
            "error": found.error.double().cpu().tolist(),
            "size": found.size.double().cpu().tolist(),
        }
        return values.double().cpu(), about

    def _score_further(
        self, perturbation: Perturbation, goal: Goal, unanswered: dict[str, str]
    ) -> tuple[str, Tensor, ErrorEstimate]:
        """Score one perturbation by Newton's step if that is accurate enough, else by the path.

        Returns the name of the estimator, the scores, (T,), and their estimated errors. Where there is no answer the
        scores are NaN, and the reason is put into `unanswered`.
        """
        assert self.accuracy is not None
        at, direction = self.solution, Direction(self.solution.program, perturbation)
        targets, before = goal.targets, goal.before
        step = self._newton.change(perturbation)
        if bool(torch.isfinite(step.flat).all()):
            values = (targets.values(at.theta + step.flat) - before)[None]
            lam = (at.lam + step.multipliers.flat)[None]
            estimate = self._assessor.estimate_errors(goal, direction, step.flat[None], lam, values)
            if float(estimate.relative[0]) <= self.accuracy:
                return NewtonInfluence.name, values[0], estimate
        try:
            path = self._path.follow(perturbation)
        except NotConvergedError as error:
            if self.strict:
                raise
            unanswered[perturbation.labels[0]] = str(error)
            infinite = torch.full_like(before, float("inf"))[None]
            unknown = ErrorEstimate(infinite, 0 * before[None], goal.units, targets.alike, [[]])
            return PathInfluence.name, torch.full_like(before, float("nan")), unknown
        switched = list(dict.fromkeys(event.name for event in path.events))
        values = targets.values(path.thetas[-1]) - before
        exact = ErrorEstimate(0 * values[None], values.abs()[None], goal.units, targets.alike, [switched])
        return PathInfluence.name, values, exact
