"""One Newton step on the changed problem."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.hessian import Curvature
from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.errors import DegenerateError
from dif.estimators.assessment import ASSESSED, Assessor, check_assessed
from dif.estimators.protocol import Out, Scored, by_chunk, describe_solution, differences, fill_scores
from dif.linalg.solvers import Matrix, Operator, Solver, SolverSeries
from dif.optimality.kkt_system import kkt_step
from dif.optimality.solution import Solution, expect_solution
from dif.problem.perturbation import Perturbation
from dif.results.change import Change
from dif.results.influence import Influence

_STEPS = 2**25  # entries of steps that are kept in memory until they have been assessed: 256 MiB

_Step = tuple[Tensor, Tensor, str]  # ω, (d,); the multipliers after it, (m,); why there is no step, if it is NaN


class NewtonInfluence:
    """One SQP step from (θ̄, λ̄) on the problem with the changed weights, with its own Hessian and every inequality.

    Exact on quadratic objectives with linear constraints, also where constraints become active or inactive. Costs the
    Hessian of the perturbed samples and one factorisation per perturbation; where the Hessian is not assembled, one
    solve by conjugate gradients.

    Args:
        solution: A certified solution.
        strict: Raise where the point is not a solution or is degenerate, or where a step does not exist. False records
            the former and gives NaN for the latter.
    """

    name = "Newton"

    def __init__(self, solution: Solution, *, strict: bool = True) -> None:
        self.solution = expect_solution(solution)
        self.strict = strict
        if strict:
            solution.check()
            solution.active.check()
        self._diagnostics = {**describe_solution(solution), "strict": strict}
        self._binding = solution.active.mask(solution.active.binding)
        self._part_hessians: dict[int, Tensor] = {}
        self._solver = SolverSeries()
        self._assessor = Assessor(solution)

    def change(self, perturbation: Perturbation) -> Change:
        """Predict Δθ and Δλ of one perturbation, carried out in full."""
        omega, lam, reason = self._step(Direction.resolve_single(self.solution.program, perturbation))
        diagnostics = {**self._diagnostics, "unanswered": reason}
        return Change.of(self.solution.program, omega, lam - self.solution.lam, diagnostics)

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1,
        show_progress: bool = True, assess: int = ASSESSED,
    ) -> Influence:  # fmt: skip
        """Return the difference of each target between θ̄ and the end of the step.

        Keywords as in `dif.Estimator`, `assess` as in `DirectionalInfluence.scores`.
        """
        at, assessed = self.solution, check_assessed(assess)
        direction, targets = Direction(at.program, perturbations), Targets(target, at)
        fits = direction.P * at.theta.numel() <= _STEPS
        taken: list[_Step] | None = [] if assessed and fits and jobs == 1 and out is None else None

        def ends(rows: list[int], chunk: Direction) -> tuple[Tensor, Tensor]:
            steps = self._steps(chunk) if taken is None else [taken[p] for p in rows]
            return torch.stack([omega for omega, _, _ in steps]), torch.stack([lam for _, lam, _ in steps])

        score = by_chunk(partial(self._score, targets, taken), direction, jobs=jobs)
        complete = self._assessor.completion(assessed, targets, direction, ends)
        return fill_scores(
            self, at, targets, direction, score, self._diagnostics, out=out, show_progress=show_progress,
            complete=complete,
        )  # fmt: skip

    def _score(self, targets: Targets, taken: list[_Step] | None, direction: Direction) -> Scored:
        """Score a chunk of perturbations; the steps are added to the list `taken`, where given."""
        steps = self._steps(direction)
        if taken is not None:
            taken.extend(steps)
        labels = direction.perturbation.labels
        reasons = {label: reason for label, (_, _, reason) in zip(labels, steps, strict=True) if reason}
        values = differences(self.solution, targets, [omega for omega, _, _ in steps])
        return values, {"unanswered": reasons}

    def _steps(self, direction: Direction) -> list[_Step]:
        return [self._step(direction[p : p + 1]) for p in range(direction.P)]

    def _step(self, direction: Direction) -> _Step:
        """Take the step of one perturbation; NaN where it does not exist (unless strict)."""
        at = self.solution
        weights = at.program.weights(at.lam)
        df, DJ = direction.first_order(0, at.theta, at.parts, at.part_gradients)
        J, c = at.J + DJ, at.c + df[1:] - direction.dtau[0]
        H, solver = self._curvature(direction, weights)
        try:
            return *kkt_step(weights @ J, H, c, J[1:], at.lam, at.program.kinds, self._binding, solver), ""
        except DegenerateError as error:
            if self.strict:
                error.add_note(f"This is the step of the perturbation {direction.perturbation.labels[0]!r}.")
                raise
            nan = float("nan")
            return torch.full_like(at.theta, nan), torch.full_like(at.lam, nan), str(error)

    def _curvature(self, direction: Direction, weights: Tensor) -> tuple[Operator, Solver]:
        """Return ∇²L of the changed problem, assembled where that of the old problem is, and its linear solver."""
        at = self.solution
        if at.curvature.assembled:
            touched = direction.changed_samples(0).hessian(at.theta, weights)
            return Matrix(at.hessian + touched + self._scaled_hessian(weights @ direction.rescaling(0))), None
        return Curvature(direction.perturbed_program(0).rows, at.theta, weights, assumed=at.curvature.own), self._solver

    def _scaled_hessian(self, scale: Tensor) -> Tensor | float:
        """Return Σₖ scaleₖ ∇²pₖ; the Hessian of each part pₖ is computed once."""
        if self.solution.part_hessians is not None:
            return torch.tensordot(scale, self.solution.part_hessians, 1)
        total: Tensor | float = 0.0
        for k in torch.nonzero(scale).reshape(-1).tolist():
            if k not in self._part_hessians:
                unit = torch.zeros_like(scale)
                unit[k] = 1.0
                self._part_hessians[k] = self.solution.program.rows.part_hessian(self.solution.theta, unit)
            total = total + scale[k] * self._part_hessians[k]
        return total
