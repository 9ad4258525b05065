"""The ground truth: the changed problem solved again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dif.checkpoint import Standing
from dif.derivatives import in_flight, unsupported
from dif.direction import Direction, chunks
from dif.errors import DifError, NotConvergedError
from dif.fit import Found, check_limits, default_tolerance, solve
from dif.influence import Change, Influence
from dif.limits import Limits
from dif.linearisation import trust
from dif.nearby import Nearby
from dif.perturbation import Perturbation
from dif.program import PerConstraint
from dif.solution import Solution, checked_tolerance, expect_solution
from dif.targets import Targets, actual_scores

_HELD = 2**25  # numbers of θ and gradients held at once on the CPU


class Retraining:
    """Solves each changed problem from θ̄, λ̄ to the same tolerance as `fit`, and keeps the residual as proof.

    Many are solved at once where the model can be mapped over parameters: by Newton steps that use the curvature
    prepared at θ̄ as a preconditioner. Those that resist go through `fit` one by one, from where they stopped.

    Args:
        solution: Where to start; should be a solution, so that the difference is the perturbation's.
        tol: Relative KKT residual to reach (None: 1e-10 in float64, 1e-5 in float32).
        max_iter: Limit per perturbation.
        strict: Raise where the point is not a solution, or a retraining fails; False records it and answers NaN.
        show_progress: Show a bar on a terminal while scoring.
    """

    name = "retraining"

    def __init__(
        self,
        solution: Solution,
        *,
        tol: float | None = None,
        max_iter: int = 20_000,
        strict: bool = True,
        show_progress: bool = True,
    ) -> None:
        self.solution = expect_solution(solution)
        self.tol = default_tolerance(solution.theta) if tol is None else checked_tolerance(tol)
        check_limits(max_iter, None)
        self.max_iter = max_iter
        self.strict = strict
        self.show_progress = show_progress
        if strict:
            solution.check()
        self._diagnostics = {"kkt": trust(solution)["kkt"], "tol": self.tol, "strict": strict}

    @cached_property
    def _nearby(self) -> Nearby | None:
        """What many are solved with; None where the solution has no curvature to start from."""
        try:
            return Nearby(self.solution)
        except DifError:
            return None

    def change(self, perturbation: Perturbation) -> Change:
        """Δθ and Δλ of one perturbation, by solving the changed problem."""
        at = self.solution
        Direction.single(at.program, perturbation)  # refuses more than one
        ((found, failure),) = self._retrained(perturbation)
        nothing = float("nan")
        moved = torch.full_like(at.theta, nothing) if failure or found is None else found.theta - at.theta
        priced = torch.full_like(at.lam, nothing) if failure or found is None else found.lam - at.lam
        return Change(
            theta=at.program.parameters.tensors(moved),
            multipliers=PerConstraint.of(at.program, priced),
            flat=moved,
            diagnostics={
                **self._diagnostics,
                "residual": nothing if found is None else found.residual,
                "iterations": None if found is None else found.iterations,
                "failed": None if failure is None else str(failure),
            },
        )

    def scores(self, target: Any, perturbations: Perturbation) -> Influence:
        """The actual difference of each target after retraining."""
        targets = Targets(target, self.solution)
        residuals: list[float] = []
        failed: list[str] = []

        def moves() -> Iterator[Tensor]:
            for one, (found, failure) in zip(perturbations, self._retrained(perturbations), strict=True):
                residuals.append(float("nan") if found is None else found.residual)
                if failure is not None or found is None:
                    failed.append(f"{one.labels[0]}: {failure}")
                    yield torch.full_like(self.solution.theta, float("nan"))
                else:
                    yield found.theta - self.solution.theta

        values = actual_scores(self.solution, targets, perturbations, moves(), self.name, self.show_progress)
        diagnostics = {**self._diagnostics, "residuals": residuals, "failed": failed}
        return Influence(values, perturbations, targets.names, self.name, diagnostics)

    def _retrained(self, perturbations: Perturbation) -> Iterator[tuple[Found | None, DifError | None]]:
        """Where each changed problem ended, in order; or why it did not. With strict, failures are raised."""
        at = self.solution
        vectors = 2 * (2 + at.program.m)  # of the length of θ, or of the data, per perturbation
        longest = at.theta.numel() + sum(len(table.samples) for table in at.program.rows.tables)
        for some in chunks(perturbations, max(1, in_flight(at.theta, _HELD) // (vectors * longest))):
            direction = Direction(at.program, some)
            for p in range(direction.P):
                direction.first_order(p, at.theta, at.p, at.Dp)  # refuses samples without a derivative
            for p, begun in enumerate(self._together(direction)):
                yield (begun, None) if begun.reached else self._alone(direction, p, begun)

    def _together(self, direction: Direction) -> list[Found]:
        """Newton on all of them at once; from the start where the model does not allow that."""
        at, nearby = self.solution, self._nearby
        start = Found(at.theta, at.lam)
        if nearby is None or any(table.samples.fallbacks for table in at.program.rows.tables):
            return [start] * direction.P
        try:
            ends = nearby.solve(direction.stacked(), self.tol, self.max_iter)
        except (RuntimeError, NotImplementedError) as error:
            if not unsupported(error):
                raise
            return [start] * direction.P
        numbers = zip(ends.residual.tolist(), ends.goal.tolist(), ends.steps.tolist(), strict=True)
        return [Found(ends.theta[p], ends.lam[p], *several) for p, several in enumerate(numbers)]

    def _alone(self, direction: Direction, p: int, begun: Found) -> tuple[Found | None, DifError | None]:
        """One problem, by all means of `fit`."""
        found, failure = None, None
        try:
            start = Standing(begun.theta, begun.lam)
            found = solve(direction.carried_out(p), start, Limits(self.max_iter), tol=self.tol)
            if not found.reached:
                failure = self._not_solved(direction.perturbation[p], found.residual)
        except DifError as error:
            failure = error
        if found is not None:
            found.iterations += begun.iterations
        if failure is not None and self.strict:
            raise failure
        return found, failure

    def _not_solved(self, perturbation: Perturbation, residual: float) -> NotConvergedError:
        return NotConvergedError(
            f"KKT residual after retraining ({perturbation.labels[0]})",
            measured=f"{residual:.3g}",
            threshold=f"{self.tol:.1g}",
            meaning="The changed problem was not solved, so its difference to the old solution means nothing.",
            cure="Raise max_iter, add a ridge, or perturb less.",
        )
