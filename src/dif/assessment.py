"""How far predictions can be trusted: what further Newton steps on the changed problems would make of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from dif.direction import Direction
from dif.errors import DifError, FirstOrderWarning, InvalidInputError
from dif.influence import TRUSTED
from dif.nearby import Nearby, programs_at_once
from dif.perturbation import Perturbation
from dif.reading import as_index
from dif.solution import Solution
from dif.streamed import Values
from dif.targets import Targets

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
    """What is to be expected of the predictions for P perturbations, each target in its own unit."""

    error: Tensor  # (P,) absolute, over all targets together; inf where nothing could be expected
    size: Tensor  # (P,) of the change itself
    crossed: list[list[str]]  # constraints that switch on the way

    @property
    def relative(self) -> Tensor:
        """Relative error of each prediction, (P,): 0 where nothing changes and nothing was predicted."""
        return torch.where(self.error > 0, self.error / self.size.clamp(min=torch.finfo(self.size.dtype).tiny), 0.0)

    @property
    def pooled(self) -> float:
        """Relative error of all predictions together."""
        size = float(torch.linalg.vector_norm(self.size))
        error = float(torch.linalg.vector_norm(self.error))
        return 0.0 if error == 0 else error / size if size > 0 else float("inf")

    def __getitem__(self, p: int) -> Expectation:
        return Expectation(self.error[p : p + 1], self.size[p : p + 1], self.crossed[p : p + 1])

    @classmethod
    def of(cls, parts: Sequence[Expectation]) -> Expectation:
        """Several as one."""
        return cls(
            torch.cat([part.error for part in parts]),
            torch.cat([part.size for part in parts]),
            [names for part in parts for names in part.crossed],
        )


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
    def nearby(self) -> Nearby:
        """What the steps are made with."""
        return Nearby(self.solution)

    def units(self, targets: Targets) -> Tensor:
        """√(qᵀH⁻¹q) of each target, (T,): how much it moves where θ moves by as much as the curvature lets it."""
        if targets.alike:
            return torch.ones(len(targets.names), dtype=self.solution.theta.dtype, device=self.solution.theta.device)
        Q = targets.gradients(self.solution.theta)
        units = (Q * self.nearby.solver.solve(Q)).sum(0).clamp(min=0).sqrt()
        return units.clamp(min=torch.finfo(Q.dtype).tiny)

    def expect(
        self, targets: Targets, units: Tensor, direction: Direction, omega: Tensor, lam: Tensor, values: Tensor,
        thorough: bool = True,
    ) -> Expectation:  # fmt: skip
        """The error of `values` (P, T), predicted by steps that end at θ̄ + ω with multipliers λ.

        Unless `thorough`, one step is enough where it changes little.
        """
        at, stack = self.solution, direction.stacked()
        before, theta = targets.values(at.theta), at.theta + omega
        nu = torch.where(at.program.equality, lam, lam.clamp(min=0))
        known = torch.isfinite(theta).all(1) & torch.isfinite(nu).all(1)
        theta, nu = torch.where(known[:, None], theta, at.theta), torch.where(known[:, None], nu, at.lam)

        def moved(some: Tensor) -> Tensor:
            return (targets.stacked_values(some) - before) / units

        last = moved(theta)
        change = torch.full_like(last[:, 0], float("nan"))  # of the last step
        left = torch.zeros_like(change)  # what further steps would still change
        which = torch.arange(len(theta), device=theta.device)
        for number in range(2):
            further, multipliers = self.nearby.step(stack.take(which), theta[which], nu[which])
            exists = torch.isfinite(further).all(1) & torch.isfinite(multipliers).all(1)
            known[which] &= exists
            which, further, multipliers = which[exists], further[exists], multipliers[exists]
            if len(which) == 0:
                break
            theta[which] += further
            nu[which] = multipliers
            now = moved(theta[which])
            by, size = torch.linalg.vector_norm(now - last[which], dim=1), torch.linalg.vector_norm(now, dim=1)
            shrinks = by / (change[which] if number else size).clamp(min=torch.finfo(by.dtype).tiny)
            slow = shrinks.clamp(max=_SLOWEST)
            last[which], change[which], left[which] = now, by, by * slow / (1 - slow)
            which = which[shrinks > (_SETTLED if number else 0.0 if thorough else _SMALL)]
            if len(which) == 0:
                break
        which = which[known[which]]
        if len(which):  # more steps where two do not show where they lead
            ends = self.nearby.settle(stack.take(which), theta[which], nu[which], _REACHED, _FURTHER)
            reached = ends.reached.to(theta.device)
            there = which[reached]
            if len(there):
                last[there], nu[there], left[there] = moved(ends.theta[reached]), ends.lam[reached], 0.0
        size = torch.linalg.vector_norm(last, dim=1)
        error = torch.linalg.vector_norm(last - values / units, dim=1) + left
        rounding = float(_ROUNDING * torch.finfo(error.dtype).eps * torch.linalg.vector_norm(before / units))
        error = torch.where((error > 0) | (size > 0), error.clamp(min=rounding), 0.0)
        known = known & torch.isfinite(error) & torch.isfinite(size)
        error = torch.where(known, error, float("inf"))
        return Expectation(error, torch.where(known, size.clamp(min=rounding), 0.0), self._crossed(nu))

    def _crossed(self, nu: Tensor) -> list[list[str]]:
        """The constraints that have switched, where the multipliers are these (P, m)."""
        active, program = self.solution.active, self.solution.program
        switched = ((nu > 0) != active.mask(active.binding)) & ~active.mask(active.weak) & ~program.equality
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
            warn(f"they could not be assessed ({error})")
            return {"rows": [], "errors": [], "pooled": None, "failed": str(error)}
        if not found.pooled <= TRUSTED:
            worst = int(found.error.argmax())
            warn(
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


def warn(why: str) -> None:
    """Say that predictions are not to be trusted, and what can be done."""
    warnings.warn(
        f"These predictions cannot be trusted: {why}. Use dif.AdaptiveInfluence(solution, accuracy=0.05), which goes "
        "on to Newton's step or the whole path where that is needed, or Retraining; a larger ridge or more samples "
        "make the first order reach further.",
        FirstOrderWarning,
        stacklevel=5,
    )
