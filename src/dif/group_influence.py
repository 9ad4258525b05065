"""Groups of samples: the first order where it can be trusted, and the next estimator where not."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dif.direction import Direction, chunks
from dif.errors import FirstOrderWarning, NotConvergedError, few
from dif.estimators.directional import DirectionalInfluence
from dif.estimators.following import PathInfluence
from dif.estimators.newton import NewtonInfluence
from dif.influence import Influence
from dif.linearisation import trust
from dif.nearby import Nearby
from dif.perturbation import Perturbation
from dif.progress import progress
from dif.reading import check_number
from dif.solution import Solution, expect_solution
from dif.targets import Targets

TRUSTED = 0.03  # predicted relative error beyond which the first order is said not to be trusted
_TOGETHER = 32  # groups at once
_SLOWEST = 0.9  # shrinking of successive steps that is reckoned with


@dataclass(frozen=True, eq=False)
class _Foreseen:
    """A prediction, and what further steps from where it ends would make of it."""

    values: Tensor  # (P, T) predicted
    remainder: Tensor  # (P,) relative error to be expected
    crossed: list[list[str]]  # constraints that switch on the way


class GroupInfluence:
    """Scores of groups, each with the error to be expected of it, from the first estimator that is good enough.

    DIF's answer is a derivative. What it leaves out is foreseen by two steps of Newton's method on the changed problem
    from where DIF ends, with the curvature at the solution: two gradients and solves per group, no Hessian. These
    steps also see constraints that let go or begin to bind. Where the error foreseen is larger than `accuracy`,
    Newton's whole step is taken, judged in the same way, and then the path is followed to the end.

    Args:
        solution: A certified solution.
        accuracy: Relative error that is wanted. None: DIF's answers, with a FirstOrderWarning where the error foreseen
            is above 3 %.
        strict: Raise where no estimator can answer (the changed constraints contradict each other, say); False answers
            NaN.
        show_progress: Show a bar on a terminal while scoring.
    """

    name = "group"

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
        self._nearby = Nearby(solution)

    def scores(self, target: Any, groups: Perturbation) -> Influence:
        """The change of each target under each group, by the first estimator whose error is within `accuracy`.

        Relative errors are taken over all targets of a group together. The diagnostics name for each group the
        estimator (`by`), the error foreseen (`remainders`) and the constraints that switch (`crossed`).
        """
        targets = Targets(target, self.solution)
        by, remainders, crossed, rows = [], [], {}, []
        with progress(self.name, len(groups), self.show_progress) as report:
            for some in chunks(groups, _TOGETHER):
                first = self._of_first_order(some, targets)
                for p, group in enumerate(some):
                    name, values = DirectionalInfluence.name, first.values[p]
                    remainder, switching = float(first.remainder[p]), first.crossed[p]
                    if self.accuracy is not None and not remainder <= self.accuracy:
                        name, values, remainder, switching = self._higher(group, targets)
                    by.append(name)
                    rows.append(values)
                    remainders.append(remainder)
                    if switching:
                        crossed[group.labels[0]] = switching
                    report(len(rows))
        diagnostics = {**trust(self.solution), "by": by, "remainders": remainders, "crossed": crossed}
        influence = Influence(torch.stack(rows).double().cpu(), groups, targets.names, self.name, diagnostics)
        if self.accuracy is None:
            _warn(groups, remainders)
        return influence

    def side_by_side(self, target: Any, groups: Perturbation) -> dict[str, Influence]:
        """DIF's, Newton's and the path's answers to the same groups."""
        return {
            "DIF": self._first.scores(target, groups, show_progress=self.show_progress),
            "Newton": self._newton.scores(target, groups),
            "path": self._path.scores(target, groups),
        }

    def _of_first_order(self, groups: Perturbation, targets: Targets) -> _Foreseen:
        direction, lin = Direction(self.solution.program, groups), self._first.linearisation
        omega, nu, _ = lin.moved(direction)
        values = omega @ targets.gradients(self.solution.theta)
        return self._foreseen(direction, omega, self.solution.lam + lin.multiplier_change(nu), values, targets)

    def _higher(self, group: Perturbation, targets: Targets) -> tuple[str, Tensor, float, list[str]]:
        """Newton's answer if that is good enough, else the path's."""
        assert self.accuracy is not None
        at, direction = self.solution, Direction(self.solution.program, group)
        step = self._newton.change(group)
        if bool(torch.isfinite(step.flat).all()):
            values = (targets.values(at.theta + step.flat) - targets.values(at.theta))[None]
            found = self._foreseen(direction, step.flat[None], (at.lam + step.multipliers.flat)[None], values, targets)
            if float(found.remainder[0]) <= self.accuracy:
                return NewtonInfluence.name, found.values[0], float(found.remainder[0]), found.crossed[0]
        try:
            path = self._path.follow(group)
        except NotConvergedError:
            if self.strict:
                raise
            return PathInfluence.name, torch.full_like(targets.values(at.theta), float("nan")), float("inf"), []
        switched = list(dict.fromkeys(event.name for event in path.events))
        return PathInfluence.name, targets.values(path.end.theta) - targets.values(at.theta), 0.0, switched

    def _foreseen(
        self, direction: Direction, omega: Tensor, lam: Tensor, values: Tensor, targets: Targets
    ) -> _Foreseen:
        """What further steps from (θ̄ + ω, λ) would change about the values: two are made, the rest follows in kind."""
        at, stack = self.solution, direction.stacked()
        before, theta = targets.values(at.theta), at.theta + omega
        nu = torch.where(at.program.equality, lam, lam.clamp(min=0))
        seen = [self._moved(targets, theta, before)]
        known = torch.isfinite(theta).all(1)
        theta = torch.where(known[:, None], theta, at.theta)
        nu = torch.where(known[:, None], nu, at.lam)
        for _ in range(2):
            further, multipliers = self._nearby.step(stack, theta, nu)
            known = known & torch.isfinite(further).all(1) & torch.isfinite(multipliers).all(1)
            theta = torch.where(known[:, None], theta + further, theta)
            nu = torch.where(known[:, None], multipliers, nu)
            seen.append(self._moved(targets, theta, before))
        first, second = (torch.linalg.vector_norm(b - a, dim=1) for a, b in pairwise(seen))
        shrinks = (second / first.clamp(min=torch.finfo(first.dtype).tiny)).clamp(max=_SLOWEST)
        size = torch.linalg.vector_norm(seen[-1], dim=1).clamp(min=torch.finfo(first.dtype).tiny)
        error = torch.linalg.vector_norm(seen[-1] - values, dim=1) + second * shrinks / (1 - shrinks)
        rounding = 1e3 * torch.finfo(first.dtype).eps * before.norm()
        remainder = torch.where(error > rounding, error / size, 0.0)
        active = at.active
        switched = ((nu > 0) != active.mask(active.binding)) & ~active.mask(active.weak) & ~at.program.equality
        names = at.program.names
        crossed = [[names[j] for j in torch.nonzero(row).reshape(-1).tolist()] for row in switched]
        return _Foreseen(values, torch.where(known & torch.isfinite(remainder), remainder, float("inf")), crossed)

    def _moved(self, targets: Targets, theta: Tensor, before: Tensor) -> Tensor:
        """How far the targets have moved at each θ, (P, T)."""
        return torch.stack([targets.values(t) - before for t in theta])


def _warn(groups: Perturbation, remainders: list[float]) -> None:
    doubtful = [p for p, remainder in enumerate(remainders) if not remainder <= TRUSTED]
    if doubtful:
        worst = max(doubtful, key=lambda p: remainders[p])
        warnings.warn(
            f"relative error to be expected of the first order: measured {remainders[worst]:.2g} at "
            f"{groups[worst].labels[0]!r}, allowed {TRUSTED:g} ({len(doubtful)} of {len(remainders)} groups are beyond "
            f"it: {few(doubtful)}). The change is too large for a derivative. Pass accuracy=0.01 to move up to "
            "Newton's step or the whole path where it is needed.",
            FirstOrderWarning,
            stacklevel=3,
        )
