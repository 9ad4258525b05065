"""How far predictions can be trusted: what further Newton steps on the changed problems would make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from dif.errors import DifError, FirstOrderWarning, InvalidInputError, warn
from dif.estimators.influence import TRUSTED
from dif.evaluation.weight_change import Direction
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.runtime.inputs import as_index
from dif.runtime.score_file import Values
from dif.solving.batched_newton import BatchedNewton, programs_at_once

ASSESSED = 20  # strongest perturbations that are looked at by default, and as many random ones
_DEAR = 4  # so many where each step is solved by conjugate gradients
_READ = 2**20  # scores read at once
_SLOWEST = 0.9  # shrinking of successive steps that is reckoned with
_SMALL = 0.1  # share of the change that one step may move: then a second one is made only where it matters
_SETTLED = 0.3  # shrinking of steps: above it two steps do not show where they lead: up to so many more are made,
_FURTHER = 12
_REACHED = 1e-6  # until this relative KKT residual
_ROUNDING = 32  # times eps · |target|: differences of a target below it are rounding

Ends = Callable[[list[int]], tuple[Tensor, Tensor]]  # rows → where their steps end: ω (P, d), multipliers (P, m)
Assess = Callable[[Targets, Perturbation, Values, Ends], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Expectation:
    """What is to be expected of the predictions for P perturbations of T targets."""

    error: Tensor  # (P, T) absolute; inf where nothing could be expected
    size: Tensor  # (P, T) of the change itself
    units: Tensor  # (T,) of the targets
    alike: bool  # whether all targets are in one unit, and pooled
    crossed: list[list[str]]  # constraints that switch on the way

    def __getitem__(self, p: int) -> Expectation:
        return Expectation(self.error[p : p + 1], self.size[p : p + 1], self.units, self.alike, self.crossed[p : p + 1])

    @property
    def relative(self) -> Tensor:
        """Relative error of each prediction, all targets together, each in its own unit, (P,)."""
        return _ratio(*(torch.linalg.vector_norm(x / self.units, dim=1) for x in (self.error, self.size)))

    @property
    def pooled(self) -> float:
        """Relative error of all predictions together: of the worst target, where they are in different units."""
        error, size = self.error, self.size
        if self.alike:
            error, size = error.reshape(-1, 1), size.reshape(-1, 1)
        return float(_ratio(*(torch.linalg.vector_norm(x, dim=0) for x in (error, size))).max())

    @classmethod
    def of(cls, parts: Sequence[Expectation]) -> Expectation:
        """Several as one."""
        first = parts[0]
        return cls(
            torch.cat([part.error for part in parts]),
            torch.cat([part.size for part in parts]),
            first.units,
            first.alike,
            [names for part in parts for names in part.crossed],
        )


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """Relative errors: 0 where nothing changes and nothing was predicted, inf where something was."""
    found = error / size.clamp(min=torch.finfo(size.dtype).tiny)
    return torch.where(error > 0, torch.nan_to_num(found, nan=float("inf")), 0.0)


class Assessor:
    """Expects the error of predictions at one solution.

    From where a prediction ends, two steps of Newton's method are made on the KKT system of the changed problem, with
    the curvature at the solution: two gradients and solves each, no Hessian. They also see constraints that let go or
    begin to bind. What they change about the targets, and would still change if they went on shrinking at the same
    rate, is the error to be expected. Where they shrink slowly, a few more are made.
    """

    def __init__(self, solution: Solution) -> None:
        self.solution = solution

    @cached_property
    def newton(self) -> BatchedNewton:
        """What the steps are made with."""
        return BatchedNewton(self.solution)

    def units(self, targets: Targets) -> Tensor:
        """√(qᵀH⁻¹q) of each target, (T,): how much it moves where θ moves by as much as the curvature lets it.

        Targets in one unit share the largest. One without a gradient has at least what rounding would make of it.
        """
        at = self.solution.theta
        Q, eps = targets.gradients(at), torch.finfo(at.dtype).eps
        some = Q[:, Q.square().sum(0).argmax()][:, None] if targets.alike else Q
        units = (some * self.newton.solver.approximate(some)).sum(0).clamp(min=0).sqrt()
        units = units.expand(Q.shape[1]) if targets.alike else units
        return torch.maximum(units, eps**0.375 * targets.values(at).abs()).clamp(min=torch.finfo(at.dtype).tiny ** 0.5)

    def expect(
        self, targets: Targets, units: Tensor, direction: Direction, omega: Tensor, lam: Tensor, values: Tensor,
        thorough: bool = True,
    ) -> Expectation:  # fmt: skip
        """The error of `values` (P, T), predicted by steps that end at θ̄ + ω with multipliers λ.

        Unless `thorough`, one step is enough where it changes little.
        """
        at, stack = self.solution, direction.stacked()
        before, theta = targets.values(at.theta), at.theta + omega
        nu = at.program.kinds.project(lam)
        known = torch.isfinite(theta).all(1) & torch.isfinite(nu).all(1)
        theta, nu = torch.where(known[:, None], theta, at.theta), torch.where(known[:, None], nu, at.lam)

        def moved(some: Tensor) -> Tensor:
            return targets.stacked_values(some) - before

        last = moved(theta)
        change = torch.full_like(last[:, 0], float("nan"))  # of the last step, in units
        left = torch.zeros_like(last)  # what further steps would still change
        which = torch.arange(len(theta), device=theta.device)
        for number in range(2):
            further, multipliers = self.newton.step(stack.take(which), theta[which], nu[which])
            exists = torch.isfinite(further).all(1) & torch.isfinite(multipliers).all(1)
            known[which] &= exists
            which, further, multipliers = which[exists], further[exists], multipliers[exists]
            if len(which) == 0:
                break
            theta[which] += further
            nu[which] = multipliers
            now = moved(theta[which])
            step = (now - last[which]).abs()
            by, size = (torch.linalg.vector_norm(x / units, dim=1) for x in (step, now))
            shrinks = by / (change[which] if number else size).clamp(min=torch.finfo(by.dtype).tiny)
            slow = shrinks.clamp(max=_SLOWEST)[:, None]
            last[which], change[which], left[which] = now, by, step * slow / (1 - slow)
            which = which[shrinks > (_SETTLED if number else 0.0 if thorough else _SMALL)]
            if len(which) == 0:
                break
        which = which[known[which]]
        if len(which):  # more steps where two do not show where they lead
            ends = self.newton.settle(stack.take(which), theta[which], nu[which], _REACHED, _FURTHER)
            reached = ends.reached.to(theta.device)
            there = which[reached]
            if len(there):
                last[there], nu[there], left[there] = moved(ends.theta[reached]), ends.lam[reached], 0.0
        error, size = (last - values).abs() + left, last.abs()
        eps = torch.finfo(error.dtype).eps
        largest, rounding = torch.maximum(size, values.abs()), _ROUNDING * eps * before.abs()
        nothing = largest <= torch.minimum(eps**0.625 * units, rounding)  # neither predicted nor happening
        error = torch.where(nothing, 0.0, torch.maximum(error, rounding))  # what rounding hides is not resolved
        size = torch.where(nothing, 0.0, torch.maximum(size, rounding))
        known = (known & torch.isfinite(error).all(1) & torch.isfinite(size).all(1))[:, None]
        error, size = torch.where(known, error, float("inf")), torch.where(known, size, 0.0)
        return Expectation(error, size, units, targets.alike, self._crossed(nu))

    def _crossed(self, nu: Tensor) -> list[list[str]]:
        """The constraints that have switched, where the multipliers are these (P, m)."""
        active, program = self.solution.active, self.solution.program
        switched = ((nu > 0) != active.mask(active.binding)) & ~active.mask(active.weak) & program.kinds.one_sided
        return [[program.names[j] for j in torch.nonzero(row).reshape(-1).tolist()] for row in switched]

    def assess(self, count: object) -> Assess | None:
        """What looks at so many of the strongest scores, and as many others; None for 0."""
        number = _checked(count)
        return partial(self._assess, number) if number else None

    def _assess(
        self, count: int, targets: Targets, perturbations: Perturbation, scores: Values, ends: Ends
    ) -> dict[str, Any]:
        """The error to be expected of the strongest scores and of as many random ones.

        What it says is kept in `Influence.diagnostics["assessment"]`; a FirstOrderWarning is given where the scores
        are not to be trusted.
        """
        try:
            units = self.units(targets)
            count = count if self.solution.curvature.assembled else min(count, _DEAR)
            rows = _chosen(scores, units.double().cpu(), count)
            if not rows:
                return {"rows": [], "errors": [], "pooled": None, "failed": "there is no score to assess"}
            parts = []
            together = programs_at_once(self.solution)
            for begin in range(0, len(rows), together):
                mine = rows[begin : begin + together]
                some = perturbations.pick(mine)
                values = torch.stack([scores[p : p + 1][0] for p in mine]).to(units)
                direction = Direction(self.solution.program, some)
                parts.append(self.expect(targets, units, direction, *ends(mine), values, thorough=False))
            found = Expectation.of(parts)
        except DifError as error:
            warn_untrusted(f"they could not be assessed ({error})")
            return {"rows": [], "errors": [], "pooled": None, "failed": str(error)}
        if not found.pooled <= TRUSTED:
            worst = int((found.error / found.units).sum(1).argmax())
            warn_untrusted(
                f"the relative error to be expected is {found.pooled:.2g} over the {len(rows)} perturbations looked "
                f"at, allowed is {TRUSTED:g} (largest at {perturbations[rows[worst]].labels[0]!r}). The first order "
                "does not reach that far"
            )
        return {"rows": rows, "errors": found.relative.double().cpu().tolist(), "pooled": found.pooled, "failed": None}


def _chosen(scores: Values, units: Tensor, count: int) -> list[int]:
    """The rows with the largest scores, each target in its own unit, then as many of the others at random."""
    step = max(1, _READ // max(1, scores.shape[1]))
    sizes = torch.cat(
        [torch.linalg.vector_norm(scores[i : i + step] / units, dim=1) for i in range(0, len(scores), step)]
    )
    answered = torch.nonzero(torch.isfinite(sizes)).reshape(-1)
    order = answered[torch.argsort(sizes[answered], descending=True, stable=True)]
    strongest, others = order[:count], order[count:]
    random = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[:count]]
    return torch.cat([strongest, random]).tolist()


def _checked(assess: object) -> int:
    """How many of the strongest perturbations are looked at."""
    count = as_index(assess)
    if count is None or count < 0:
        raise InvalidInputError(
            "assess",
            measured=repr(assess),
            threshold="an integer ≥ 0",
            meaning="The error to be expected is found for so many of the strongest perturbations, and as many others.",
            cure=f"Leave it out for {ASSESSED}, or pass 0 to skip it.",
        )
    return count


def warn_unanswered(unanswered: Mapping[str, str], count: int) -> None:
    """Say which perturbations have no answer."""
    label, why = next(iter(unanswered.items()))
    warn(f"{len(unanswered)} of {count} perturbations have no answer (NaN), first {label!r}: {why}", FirstOrderWarning)


def warn_untrusted(why: str) -> None:
    """Say that predictions are not to be trusted, and what can be done."""
    warn(
        f"These predictions cannot be trusted: {why}. Use dif.AdaptiveInfluence(solution, accuracy=0.05), which goes "
        "on to Newton's step or the whole path where that is needed, or Retraining; a larger ridge or more samples "
        "make the first order reach further.",
        FirstOrderWarning,
    )
