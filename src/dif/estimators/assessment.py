"""Estimated errors of predictions: what a few more Newton steps on the changed problems would correct."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.program import Targets
from dif.derivatives.weight_change import BatchedProgram, Direction
from dif.errors import DifError, FirstOrderWarning, few, warn
from dif.optimality.solution import Solution
from dif.results.influence import TRUSTED, Influence
from dif.solving.batched_newton import BatchedNewton, programs_at_once

ASSESSED = 20  # strongest perturbations that are assessed by default; as many random ones are added
_ASSESSED_WITHOUT_HESSIAN = 4  # the same, at most, where each step is solved by conjugate gradients
_PROBES = 4  # random steps along which the curvature that each perturbation changes is estimated
_STEEP = 0.1  # share of the curvature from which a perturbation is assessed, however small its prediction
_LENGTH = 1e-4  # curvature of the Lagrangian along these steps
_SCORES_READ = 2**20  # scores read at once: 8 MiB
_LARGEST_RATIO = 0.9  # largest ratio of successive steps in their extrapolation, which is finite only below 1
_SMALL_STEP = 0.1  # first step, relative to the change, up to which one step is enough (unless thorough)
_SETTLED_RATIO = 0.3  # ratio of the second step to the first up to which two steps are enough
_MORE_STEPS = 12  # steps at most where two are not enough
_MORE_TOLERANCE = 1e-6  # relative KKT residual at which these stop
_ROUNDING = 32  # differences of a target below this many eps · (its value, or |q|ᵀ|θ|) count as rounding
_NO_CHANGE = 0.5  # predictions of less than this share of the changes say that a target without a gradient stays
_CURE = (
    "Use dif.AdaptiveInfluence(solution, accuracy=0.05), which continues with a Newton step or the whole path where "
    "needed, or dif.Retraining. A larger ridge or more samples make first-order predictions more accurate."
)

# rows, and their perturbations → Δθ, (P, d), and the multipliers after it, (P, m)
Ends = Callable[[list[int], Direction], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class ErrorEstimate:
    """Estimated errors of the predictions for P perturbations and T targets."""

    error: Tensor  # (P, T) absolute; inf where it could not be estimated
    size: Tensor  # (P, T) absolute value of the change itself
    units: Tensor  # (T,) unit of each target
    alike: bool  # whether all targets have the same unit, so that they are pooled
    switched: list[list[str]]  # names of the constraints that switch, for each perturbation

    @property
    def relative(self) -> Tensor:
        """Relative error of each perturbation's predictions over all targets, each in its own unit, (P,)."""
        return _ratio(*(torch.linalg.vector_norm(x / self.units, dim=1) for x in (self.error, self.size)))

    @property
    def pooled(self) -> Tensor:
        """Relative error of all predictions of each target together, (T,); targets in one unit are pooled, too."""
        over = (0, 1) if self.alike else 0
        return _ratio(*(torch.linalg.vector_norm(x, dim=over) for x in (self.error, self.size))).expand(len(self.units))

    def describe(self, rows: list[int]) -> dict[str, Any]:
        """Return the entry "assessment" of `Influence.diagnostics`, for estimates of the perturbations `rows`.

        "errors" has an entry for each of them, "by_target" one for each target; "pooled" is that of the worst target.
        """
        errors, pooled = (x.double().cpu().tolist() for x in (self.relative, self.pooled))
        return {"rows": rows, "errors": errors, "by_target": pooled, "pooled": max(pooled), "failed": None}


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """Divide errors by sizes: 0 where the error is 0; inf where the error is positive and the size is 0."""
    ratio = error / size.clamp(min=torch.finfo(size.dtype).tiny)
    return torch.where(error > 0, torch.nan_to_num(ratio, nan=float("inf")), 0.0)


@dataclass(frozen=True, eq=False)
class Goal:
    """Targets at a solution, with the units in which their changes are measured."""

    targets: Targets
    before: Tensor  # (T,) values
    Q: Tensor  # (d, T) gradients
    size: Tensor  # (T,) of each value, or of its terms, where it is a sum near 0
    units: Tensor  # (T,) √(qᵀH⁻¹q): how much the target moves if θ moves by 1 in the norm of the curvature


@dataclass
class Assessor:
    """Estimates the errors of predictions at one solution.

    From where a prediction ends, two Newton steps are taken on the KKT system of the changed problem, with the
    curvature at the solution: two gradients and solves each, no Hessian. They also see constraints that become active
    or inactive. The estimated error is what these steps change about the targets, plus what further steps would change
    if they went on shrinking at the same rate. Where they shrink slowly, a few more steps are taken.
    """

    solution: Solution

    @cached_property
    def newton(self) -> BatchedNewton:
        """Solver that takes the steps, prepared at the solution."""
        return BatchedNewton(self.solution)

    def prepare(self, targets: Targets, Q: Tensor | None = None) -> Goal:
        """Evaluate the targets at the solution, where their gradients Q, (d, T), may be known.

        Targets of one kind share the largest unit. The unit of a target without a gradient is at least its rounding.
        """
        at = self.solution.theta
        before, eps, Q = targets.values(at), torch.finfo(at.dtype).eps, targets.gradients(at) if Q is None else Q
        units = self._measure(Q[:, Q.square().sum(0).argmax()][:, None] if targets.alike else Q).expand(Q.shape[1])
        units = torch.maximum(units, eps**0.375 * before.abs()).clamp(min=torch.finfo(at.dtype).tiny ** 0.5)
        return Goal(targets, before, Q, torch.maximum(before.abs(), at.abs() @ Q.abs()), units)

    def _measure(self, Q: Tensor) -> Tensor:
        """Return √(qᵀH⁻¹q) of each column."""
        return (Q * self.newton.solver.approximate(Q)).sum(0).clamp(min=0).sqrt()

    def estimate_errors(
        self, goal: Goal, direction: Direction, omega: Tensor, lam: Tensor, values: Tensor, thorough: bool = True
    ) -> ErrorEstimate:
        """Estimate the errors of `values`, (P, T), predicted by steps that end at θ̄ + ω with multipliers λ.

        Unless `thorough`, a single step is taken where it changes little.
        """
        at = self.solution
        theta, nu = at.theta + omega, at.program.kinds.project(lam)
        known = torch.isfinite(theta).all(1) & torch.isfinite(nu).all(1)
        theta, nu = torch.where(known[:, None], theta, at.theta), torch.where(known[:, None], nu, at.lam)
        change, remainder = self._correct(goal, direction.stack_programs(), theta, nu, known, thorough)

        error, size = (change - values).abs() + remainder, change.abs()
        eps = torch.finfo(error.dtype).eps
        largest = torch.maximum(size, values.abs())
        rounding = _ROUNDING * eps * goal.size
        nothing = largest <= torch.minimum(
            eps**0.625 * goal.units, rounding
        )  # no change was predicted, and none happens
        error = torch.where(nothing, 0.0, torch.maximum(error, rounding))  # at least the rounding of the target
        size = torch.where(nothing, 0.0, torch.maximum(size, rounding))
        known = (known & torch.isfinite(error).all(1) & torch.isfinite(size).all(1))[:, None]
        error, size = torch.where(known, error, float("inf")), torch.where(known, size, 0.0)
        return ErrorEstimate(error, size, goal.units, goal.targets.alike, self._name_switched(nu))

    def _correct(
        self, goal: Goal, stack: BatchedProgram, theta: Tensor, nu: Tensor, known: Tensor, thorough: bool
    ) -> tuple[Tensor, Tensor]:
        """Take Newton steps from (θ, ν) of each program; θ, ν and `known` (whether all steps exist) are updated.

        Returns the changes of the targets from θ̄, and what further steps would still change, (P, T) each.
        """
        values, before, units = goal.targets.stacked_values, goal.before, goal.units
        change = values(theta) - before
        remainder, last = torch.zeros_like(change), torch.full_like(change[:, 0], float("nan"))  # last step, in units
        which = torch.arange(len(theta), device=theta.device)
        for number in range(2):
            omega, multipliers = self.newton.step(stack.take(which), theta[which], nu[which])
            exists = torch.isfinite(omega).all(1) & torch.isfinite(multipliers).all(1)
            known[which] &= exists
            which, omega, multipliers = which[exists], omega[exists], multipliers[exists]
            if len(which) == 0:
                break
            theta[which] += omega
            nu[which] = multipliers
            now = values(theta[which]) - before
            step = (now - change[which]).abs()
            length, size = (torch.linalg.vector_norm(x / units, dim=1) for x in (step, now))
            ratio = length / (last[which] if number else size).clamp(min=torch.finfo(length.dtype).tiny)
            slow = ratio.clamp(max=_LARGEST_RATIO)[:, None]
            change[which], last[which], remainder[which] = now, length, step * slow / (1 - slow)
            which = which[ratio > (_SETTLED_RATIO if number else 0.0 if thorough else _SMALL_STEP)]
            if len(which) == 0:
                break
        which = which[known[which]]
        if len(which):
            ends = self.newton.settle(stack.take(which), theta[which], nu[which], _MORE_TOLERANCE, _MORE_STEPS)
            reached = ends.reached.to(theta.device)
            solved = which[reached]
            if len(solved):
                change[solved] = values(ends.theta[reached]) - before
                nu[solved], remainder[solved] = ends.lam[reached], 0.0
        return change, remainder

    def _name_switched(self, nu: Tensor) -> list[list[str]]:
        """Name the constraints that are active at θ̄ but not under multipliers ν, (P, m), or the reverse."""
        active, program = self.solution.active, self.solution.program
        weak = active.is_active & ~active.is_binding
        switched = (program.kinds.has_force(nu) != active.is_binding) & ~weak & program.kinds.one_sided
        return [[program.names[j] for j in torch.nonzero(row).reshape(-1).tolist()] for row in switched]

    def assess(
        self, count: int, targets: Targets, direction: Direction, ends: Ends, influence: Influence,
        Q: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Estimate the errors of the `count` strongest scores and of as many random ones; warn if they are large.

        `ends` returns where the predictions of some perturbations end; the gradients of the targets Q may be known. The
        estimates are the entry "assessment" of `Influence.diagnostics`.
        """
        scores, about = influence.stored, influence.diagnostics
        try:
            goal = self.prepare(targets, Q)
            count = count if self.solution.curvature.assembled else min(count, _ASSESSED_WITHOUT_HESSIAN)
            rows = _choose(scores, goal.units.double().cpu(), count)
            rows += [p for p in self._find_steep(direction) if p not in rows][: count // 4]
            if not rows:
                about["assessment"] = describe_failure("there is no score to assess")
                return
            values, parts = torch.stack([scores[p : p + 1][0] for p in rows]).to(goal.units), []
            for place in torch.arange(len(rows)).split(programs_at_once(self.solution)):
                chunk = [rows[k] for k in place]
                some = direction.pick(chunk)
                found = self.estimate_errors(goal, some, *ends(chunk, some), values[place], thorough=False)
                parts.append((found.error, found.size))
            error, size = map(torch.cat, zip(*parts, strict=True))
            estimate = ErrorEstimate(error, size, goal.units, targets.alike, [])
            about["assessment"] = self.describe(estimate, rows, goal, values)
        except DifError as error:
            about["assessment"] = describe_failure(str(error))
            words = f"Their error could not be estimated: {error}"
            warn(f"These predictions cannot be trusted. {words} {_CURE}", FirstOrderWarning)
            return
        if not max(about["assessment"]["by_target"]) <= TRUSTED:
            worst = rows[int((error / goal.units).sum(1).argmax())]
            warn_assessed(about["assessment"], targets.names, direction.perturbation[worst].labels[0])

    def _find_steep(self, direction: Direction) -> list[int]:
        """Return the perturbations that change much of the curvature along some directions, the steepest first.

        The solution follows a sample that alone decides a direction (the only member of a category), so that its own
        gradient, and with it the prediction, is small, while its removal is not.
        """
        at = self.solution
        if not at.curvature.assembled:
            return []
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(len(at.theta), _PROBES, generator=generator, dtype=torch.float64).to(at.theta)
        steps = self.newton.solver.approximate(noise * at.curvature.scale().sqrt()[:, None])
        steps = steps * (_LENGTH / (steps * at.curvature.product(steps)).sum(0).abs()).sqrt()
        shares = direction.bend(at.theta, steps.T, at.program.weights(at.lam)).abs().mean(1) / _LENGTH
        order = torch.argsort(torch.nan_to_num(shares), descending=True).tolist()
        return order[: int((shares > _STEEP).sum())]

    def describe(self, estimate: ErrorEstimate, rows: list[int], goal: Goal, values: Tensor) -> dict[str, Any]:
        """Return the entry "assessment" of `Influence.diagnostics`, for the predictions `values` of some rows.

        Among its "moves", one for each target, those are False that do not move to first order: θ̄ is a minimum, or a
        saddle, of the target along the active constraints, and hardly a change is predicted. Where other targets move,
        "pooled" is the error of the worst of these.
        """
        about, at = estimate.describe(rows), self.solution
        Q, eps = goal.Q, torch.finfo(at.theta.dtype).eps
        A = at.G[at.active.is_active].T
        rest = Q - A @ torch.linalg.lstsq(A, Q).solution if A.shape[1] else Q  # along the constraints
        moves = self._measure(rest) > eps**0.375 * torch.maximum(self._measure(Q), goal.before.abs())
        changes, predicted = (torch.linalg.vector_norm(x.to(Q), dim=0) for x in (estimate.size, values))
        moves |= (predicted >= _NO_CHANGE * changes) | torch.tensor(goal.targets.alike)
        pooled = [error for error, one in zip(about["by_target"], moves.tolist(), strict=True) if one]
        return about | {"moves": moves.tolist(), "pooled": max(pooled or about["by_target"])}


def describe_failure(reason: str) -> dict[str, Any]:
    """Return the entry "assessment" of `Influence.diagnostics` where no error could be estimated."""
    return {"rows": [], "errors": [], "by_target": [], "pooled": None, "failed": reason}


def warn_assessed(assessment: Mapping[str, Any], names: Sequence[str], worst: str, cure: str = _CURE) -> None:
    """Warn about the targets whose assessed predictions are not trusted; `worst` is the perturbation most off."""
    bad = [name for name, pooled in zip(names, assessment["by_target"], strict=True) if not pooled <= TRUSTED]
    which, others = "These predictions", ""
    if len(bad) < len(names):
        which, others = f"The predictions for {few(bad)}", " The predictions for the other targets can be trusted."
    warn(
        f"{which} cannot be trusted. Their estimated relative error is {max(assessment['by_target']):.2g} over the "
        f"{len(assessment['rows'])} perturbations that were assessed (at most {TRUSTED:g} is accepted), and largest "
        f"for {worst!r}: the first order leaves out too much of the change.{others} {cure}",
        FirstOrderWarning,
    )


def _choose(scores: Tensor, units: Tensor, count: int) -> list[int]:
    """Return the rows with the `count` largest scores, each target in its own unit, then as many random others."""
    step = max(1, _SCORES_READ // max(1, scores.shape[1]))
    sizes = torch.cat(
        [torch.linalg.vector_norm(scores[i : i + step] / units, dim=1) for i in range(0, len(scores), step)]
    )
    answered = torch.nonzero(torch.isfinite(sizes)).reshape(-1)
    order = answered[torch.argsort(sizes[answered], descending=True, stable=True)]
    strongest, others = order[:count], order[count:]
    random = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[:count]]
    return torch.cat([strongest, random]).tolist()
