"""The ground truth: the changed problem solved again."""

from __future__ import annotations

from typing import Any

import torch

from dif.direction import Direction
from dif.errors import DifError, NotConvergedError
from dif.fit import default_tolerance, solve
from dif.influence import Change, Influence
from dif.linearisation import trust
from dif.perturbation import Perturbation
from dif.program import PerConstraint
from dif.solution import Solution, checked_tolerance, expect_solution
from dif.targets import Targets, actual_scores


class Retraining:
    """Solves each changed problem from θ̄, λ̄ to the same tolerance as `fit`, and keeps the residual as proof.

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
        self.max_iter = max_iter
        self.strict = strict
        self.show_progress = show_progress
        if strict:
            solution.check()
        self._diagnostics = {"kkt": trust(solution)["kkt"], "tol": self.tol, "strict": strict}

    def change(self, perturbation: Perturbation) -> Change:
        """Δθ and Δλ of one perturbation, by solving the changed problem."""
        at = self.solution
        direction = Direction.single(at.program, perturbation)
        direction.first_order(0, at.theta, at.p, at.Dp)  # refuses samples without a derivative
        try:
            found = solve(direction.carried_out(0), at.theta, at.lam, tol=self.tol, max_iter=self.max_iter)
            failure = None if found.reached else self._not_solved(perturbation, found.residual)
        except DifError as error:
            found, failure = None, error
        if failure is not None and self.strict:
            raise failure
        moved = torch.full_like(at.theta, float("nan")) if failure or found is None else found.theta - at.theta
        priced = torch.full_like(at.lam, float("nan")) if failure or found is None else found.lam - at.lam
        return Change(
            theta=at.program.parameters.tensors(moved),
            multipliers=PerConstraint.of(at.program, priced),
            flat=moved,
            diagnostics={
                **self._diagnostics,
                "residual": float("nan") if found is None else found.residual,
                "iterations": None if found is None else found.iterations,
                "failed": None if failure is None else str(failure),
            },
        )

    def _not_solved(self, perturbation: Perturbation, residual: float) -> NotConvergedError:
        return NotConvergedError(
            f"KKT residual after retraining ({perturbation.labels[0]})",
            measured=f"{residual:.3g}",
            threshold=f"{self.tol:.1g}",
            meaning="The changed problem was not solved, so its difference to the old solution means nothing.",
            cure="Raise max_iter, add a ridge, or perturb less.",
        )

    def scores(self, target: Any, perturbations: Perturbation) -> Influence:
        """The actual difference of each target after retraining."""
        targets = Targets(target, self.solution)
        residuals: list[float] = []
        failed: list[str] = []

        def move(one: Perturbation) -> torch.Tensor:
            change = self.change(one)
            residuals.append(change.diagnostics["residual"])
            if change.diagnostics["failed"]:
                failed.append(f"{one.labels[0]}: {change.diagnostics['failed']}")
            return change.flat

        values = actual_scores(self.solution, targets, perturbations, move, self.name, self.show_progress)
        diagnostics = {**self._diagnostics, "residuals": residuals, "failed": failed}
        return Influence(values, perturbations, targets.names, self.name, diagnostics)
