"""Answers of a wanted accuracy: the first order where it is good enough, and the next estimator where not."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from dif.errors import FirstOrderWarning, NotConvergedError, few
from dif.estimators.assessment import Assessor, Expectation, warn_unanswered
from dif.estimators.directional import DirectionalInfluence
from dif.estimators.influence import Influence
from dif.estimators.linearisation import trust
from dif.estimators.newton import NewtonInfluence
from dif.estimators.path import PathInfluence
from dif.evaluation.weight_change import Direction, chunks
from dif.optimality.solution import Solution, expect_solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.runtime.inputs import check_number
from dif.runtime.progress import progress

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
        show_progress: Show a bar on a terminal while scoring.
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

    def scores(self, target: Any, perturbations: Perturbation) -> Influence:
        """The change of each target under each perturbation, by the first estimator whose error is within `accuracy`.

        Relative errors are taken over all targets of a perturbation together, each in its own unit:
        `Influence.expected_error`. The diagnostics name for each perturbation the estimator (`by`) and the constraints
        that switch (`crossed`).
        """
        targets = Targets(target, self.solution)
        units = self._assessor.units(targets)
        self._lost: dict[str, str] = {}
        by, rows, judged = [], [], []
        with progress(self.name, len(perturbations), self.show_progress) as report:
            for some in chunks(perturbations, _TOGETHER):
                first, found = self._of_first_order(some, targets, units)
                for p, one in enumerate(some):
                    name, values, judgement = DirectionalInfluence.name, first[p], found[p]
                    if self.accuracy is not None and not float(judgement.relative[0]) <= self.accuracy:
                        name, values, judgement = self._higher(one, targets, units)
                    by.append(name)
                    rows.append(values)
                    judged.append(judgement)
                    report(len(rows))
        every = Expectation.of(judged)
        kept = [one for one, values in zip(judged, rows, strict=True) if bool(torch.isfinite(values).all())]
        answered = Expectation.of(kept or judged)
        errors = every.relative.double().cpu().tolist()
        crossed = {one.labels[0]: names for one, names in zip(perturbations, every.crossed, strict=True) if names}
        diagnostics = {**trust(self.solution), "by": by, "remainders": errors, "crossed": crossed}
        diagnostics["unanswered"] = self._lost
        diagnostics["assessment"] = {
            "rows": list(range(len(rows))),
            "errors": errors,
            "pooled": answered.pooled if len(kept) else None,
            "failed": None,
        }
        values = torch.stack(rows).double().cpu()
        if self._lost:
            warn_unanswered(self._lost, len(perturbations))
        if self.accuracy is None:
            _warn(perturbations, errors)
        return Influence(values, perturbations, targets.names, self.name, diagnostics)

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

    def _higher(self, one: Perturbation, targets: Targets, units: Tensor) -> tuple[str, Tensor, Expectation]:
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
            self._lost[one.labels[0]] = str(error)
            nothing = torch.full_like(before, float("nan"))
            lost = Expectation(
                torch.full_like(before, float("inf"))[None], 0 * before[None], units, targets.alike, [[]]
            )
            return PathInfluence.name, nothing, lost
        switched = list(dict.fromkeys(event.name for event in path.events))
        values = targets.values(path.end.theta) - before
        exact = Expectation(0 * values[None], values.abs()[None], units, targets.alike, [switched])
        return PathInfluence.name, values, exact


def _warn(perturbations: Perturbation, errors: list[float]) -> None:
    doubtful = [p for p, error in enumerate(errors) if not error <= SAID]
    if doubtful:
        worst = max(doubtful, key=lambda p: errors[p])
        warnings.warn(
            f"relative error to be expected of the first order: measured {errors[worst]:.2g} at "
            f"{perturbations[worst].labels[0]!r}, allowed {SAID:g} ({len(doubtful)} of {len(errors)} perturbations are "
            f"beyond it: {few(doubtful)}). The change is too large for a first-order answer. Pass accuracy=0.01 to "
            "move up to Newton's step or the whole path where it is needed.",
            FirstOrderWarning,
            stacklevel=3,
        )
