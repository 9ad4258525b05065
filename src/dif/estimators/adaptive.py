"""Answers of a wanted accuracy: the first order where it is good enough, and the next estimator where not."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dif.errors import FirstOrderWarning, NotConvergedError, few, warn
from dif.estimators.assessment import Assessor, Expectation, warn_unanswered
from dif.estimators.directional import DirectionalInfluence
from dif.estimators.first_order import trust
from dif.estimators.influence import Change, Influence
from dif.estimators.newton import NewtonInfluence
from dif.estimators.path import PathInfluence
from dif.estimators.scoring import Out, ScoredChunk, Scoring, join
from dif.evaluation.weight_change import Direction
from dif.optimality.solution import Solution, expect_solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.runtime.inputs import check_number
from dif.runtime.workers import checked_jobs

SAID = 0.03  # relative error to be expected beyond which a warning is given where no accuracy is asked for
_TOGETHER = 32  # perturbations at once


class AdaptiveInfluence:
    """Scores of any perturbations from the first estimator that is good enough, each with the error to be expected.

    DIF's answer is a first-order one. What it leaves out is estimated by two Newton steps on the changed problem from
    where DIF ends, with the curvature at the solution: two gradients and solves per perturbation, no Hessian. These
    steps also see constraints that let go or begin to bind. Where the error to be expected is larger than `accuracy`,
    Newton's whole step is taken, judged in the same way, and then the path is followed to the end.

    Args:
        solution: A certified solution.
        accuracy: Relative error that is wanted. None: DIF's answers, with a FirstOrderWarning where the error to be
            expected is above 3 %.
        strict: Raise where no estimator can answer (the changed constraints contradict each other, say); False answers
            NaN.
        show_progress: Default of `scores`.
    """

    name = "adaptive"

    def __init__(
        self, solution: Solution, *, accuracy: float | None = None, strict: bool = True, show_progress: bool = True
    ) -> None:
        self.solution = expect_solution(solution)
        self.accuracy = accuracy
        if accuracy is not None:
            self.accuracy = check_number(
                accuracy,
                "accuracy",
                zero=True,
                meaning="It is the relative error that is wanted of each answer.",
                cure="Use 0.01 for one percent, 0 to follow every path to its end.",
            )
        self.strict, self.show_progress = strict, show_progress
        self._first = DirectionalInfluence(solution)
        self._newton = NewtonInfluence(solution, strict=False, show_progress=False)
        self._path = PathInfluence(solution, show_progress=False)
        self._assessor = Assessor(solution)

    def change(self, perturbation: Perturbation) -> Change:
        """Δθ and Δλ of one perturbation, by the first estimator whose error is within `accuracy`.

        The error is how far one Newton step on the changed problem would still go, of the change itself.
        """
        first = self._first.change(perturbation)
        if self.accuracy is None or self._left(perturbation, first) <= self.accuracy:
            return first
        step = self._newton.change(perturbation)
        if bool(torch.isfinite(step.flat).all()) and self._left(perturbation, step) <= self.accuracy:
            return step
        return self._path.change(perturbation)

    def _left(self, perturbation: Perturbation, change: Change) -> float:
        """How far a Newton step on the changed problem goes from where a change ends, relative, in units of θ."""
        at, stack = self.solution, Direction(self.solution.program, perturbation).stacked()
        lam = at.lam + change.multipliers.flat
        lam = at.program.kinds.project(lam)
        omega, _ = self._assessor.newton.step(stack, (at.theta + change.flat)[None], lam[None])
        size = float((at.scales.root * change.flat).norm())
        left = float((at.scales.root * omega[0]).norm())
        return left / size if size > 0 else (0.0 if left == 0 else float("inf"))

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1,
        show_progress: bool | None = None,
    ) -> Influence:  # fmt: skip
        """The change of each target under each perturbation, by the first estimator whose error is within `accuracy`.

        Keywords as in `dif.Estimator`. Relative errors are taken over all targets of a perturbation together, each in
        its own unit: `Influence.expected_error`. The diagnostics name for each perturbation the estimator (`by`) and
        the constraints that switch (`crossed`).
        """
        at, shown = self.solution, self.show_progress if show_progress is None else show_progress
        targets, jobs = Targets(target, at), checked_jobs(jobs)
        units = self._assessor.units(targets)

        def finish(influence: Influence, parts: list[dict[str, Any]]) -> None:
            lost, errors = join(parts, "unanswered"), join(parts, "remainders")
            influence.diagnostics.update({part: join(parts, part) for part in ("by", "crossed")})
            influence.diagnostics.update(remainders=errors, unanswered=lost)
            error, size = (torch.tensor(join(parts, part), dtype=units.dtype) for part in ("error", "size"))
            answered = torch.isfinite(influence.values).all(1)
            every = Expectation(error[answered], size[answered], units.cpu(), targets.alike, [])
            influence.diagnostics["assessment"] = {
                "rows": list(range(len(errors))),
                "errors": errors,
                "pooled": every.pooled if bool(answered.any()) else None,
                "failed": None,
            }
            if lost:
                warn_unanswered(lost, len(perturbations))
            if self.accuracy is None:
                _warn(perturbations, errors)

        about = {**trust(at), "accuracy": self.accuracy, "strict": self.strict}
        scoring = Scoring(self.name, at, targets, perturbations, about, out, shown)
        return scoring.run_chunks(partial(self._score, targets, units), _TOGETHER, jobs, finish)

    def _score(self, targets: Targets, units: Tensor, some: Perturbation) -> ScoredChunk:
        first, found = self._of_first_order(some, targets, units)
        by, rows, judged, lost = [], [], [], {}
        for p, one in enumerate(some):
            name, values, judgement = DirectionalInfluence.name, first[p], found[p]
            if self.accuracy is not None and not float(judgement.relative[0]) <= self.accuracy:
                name, values, judgement = self._higher(one, targets, units, lost)
            by.append(name)
            rows.append(values)
            judged.append(judgement)
        every = Expectation.of(judged)
        about = {
            "by": by,
            "remainders": every.relative.double().cpu().tolist(),
            "crossed": {one.labels[0]: names for one, names in zip(some, every.crossed, strict=True) if names},
            "unanswered": lost,
            "error": every.error.double().cpu().tolist(),
            "size": every.size.double().cpu().tolist(),
        }
        return ScoredChunk(torch.stack(rows).double().cpu(), about)

    def side_by_side(self, target: Any, perturbations: Perturbation) -> dict[str, Influence]:
        """DIF's, Newton's and the path's answers to the same perturbations."""
        return {
            "DIF": self._first.scores(target, perturbations, show_progress=self.show_progress, assess=0),
            "Newton": self._newton.scores(target, perturbations, assess=0),
            "path": self._path.scores(target, perturbations),
        }

    def _of_first_order(self, some: Perturbation, targets: Targets, units: Tensor) -> tuple[Tensor, Expectation]:
        """DIF's answers, (P, T), and what is to be expected of them."""
        direction = Direction(self.solution.program, some)
        omega, lam = self._first.ends(some)
        values = omega @ targets.gradients(self.solution.theta)
        return values, self._assessor.expect(targets, units, direction, omega, lam, values)

    def _higher(
        self, one: Perturbation, targets: Targets, units: Tensor, lost: dict[str, str]
    ) -> tuple[str, Tensor, Expectation]:
        """Newton's answer if that is good enough, else the path's."""
        assert self.accuracy is not None
        at, direction = self.solution, Direction(self.solution.program, one)
        before = targets.values(at.theta)
        step = self._newton.change(one)
        if bool(torch.isfinite(step.flat).all()):
            values = (targets.values(at.theta + step.flat) - before)[None]
            lam = (at.lam + step.multipliers.flat)[None]
            found = self._assessor.expect(targets, units, direction, step.flat[None], lam, values)
            if float(found.relative[0]) <= self.accuracy:
                return NewtonInfluence.name, values[0], found
        try:
            path = self._path.follow(one)
        except NotConvergedError as error:
            if self.strict:
                raise
            lost[one.labels[0]] = str(error)
            nothing = torch.full_like(before, float("nan"))
            none = Expectation(
                torch.full_like(before, float("inf"))[None], 0 * before[None], units, targets.alike, [[]]
            )
            return PathInfluence.name, nothing, none
        switched = list(dict.fromkeys(event.name for event in path.events))
        values = targets.values(path.thetas[-1]) - before
        exact = Expectation(0 * values[None], values.abs()[None], units, targets.alike, [switched])
        return PathInfluence.name, values, exact


def _warn(perturbations: Perturbation, errors: list[float]) -> None:
    doubtful = [p for p, error in enumerate(errors) if not error <= SAID]
    if doubtful:
        worst = max(doubtful, key=lambda p: errors[p])
        warn(
            f"relative error to be expected of the first order: measured {errors[worst]:.2g} at "
            f"{perturbations[worst].labels[0]!r}, allowed {SAID:g} ({len(doubtful)} of {len(errors)} perturbations are "
            f"beyond it: {few(doubtful)}). The change is too large for a first-order answer. Pass accuracy=0.01 to "
            "move up to Newton's step or the whole path where it is needed.",
            FirstOrderWarning,
        )
