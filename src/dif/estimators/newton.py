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
from dif.estimators.assessment import ASSESSED, Assessor
from dif.estimators.protocol import Out, Scored, by_chunk, describe_solution, differences, fill_scores, resolve
from dif.linalg.solvers import Matrix, SolverSeries
from dif.optimality.kkt_system import kkt_step
from dif.optimality.solution import Solution, expect_solution
from dif.problem.perturbation import Perturbation
from dif.results.change import Change
from dif.results.influence import Influence
from dif.runtime.inputs import check_count

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
            solution.check(independent=True, minimum=True)
        self._diagnostics = {**describe_solution(solution), "strict": strict}
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
        at, count = self.solution, check_count(assess, "assess", zero=True)
        (direction, reasons), targets = resolve(at.program, perturbations), Targets(target, at)
        kept: list[_Step] = []  # the steps, for their assessment
        keep = bool(count) and jobs == 1 and out is None and direction.P * at.theta.numel() <= _STEPS

        def work(chunk: Direction) -> Scored:
            steps = self._steps(chunk)
            kept.extend(steps if keep else ())
            reasons = {chunk.perturbation[p].labels[0]: reason for p, (_, _, reason) in enumerate(steps) if reason}
            return differences(at, targets, [omega for omega, _, _ in steps]), {"unanswered": reasons}

        def ends(rows: list[int], chunk: Direction) -> tuple[Tensor, Tensor]:
            steps = [kept[p] for p in rows] if keep else self._steps(chunk)
            return torch.stack([omega for omega, _, _ in steps]), torch.stack([lam for _, lam, _ in steps])

        assessment = partial(self._assessor.assess, count, targets, direction, ends) if count else None
        return fill_scores(
            self, at, targets, direction, by_chunk(work, direction, jobs=jobs), self._diagnostics, out=out,
            show_progress=show_progress, complete=assessment, given=perturbations, reasons=reasons,
        )  # fmt: skip

    def _steps(self, direction: Direction) -> list[_Step]:
        return [self._step(direction[p : p + 1]) for p in range(direction.P)]

    def _step(self, direction: Direction) -> _Step:
        """Take the step of one perturbation; NaN where it does not exist (unless strict)."""
        at = self.solution
        weights = at.program.weights(at.lam)
        df, DJ = direction.first_order(0, at.theta, at.parts, at.part_gradients)
        J, c = at.J + DJ, at.c + df[1:] - direction.dtau[0]
        if at.curvature.assembled:
            touched = direction.changed_samples(0).hessian(at.theta, weights)
            H, solver = Matrix(at.hessian + touched + self._scaled_hessian(weights @ direction.rescaling(0))), None
        else:
            rows = direction.perturbed_program(0).rows
            H, solver = Curvature(rows, at.theta, weights, assumed=at.curvature.own), self._solver
        try:
            return *kkt_step(weights @ J, H, c, J[1:], at.lam, at.program.kinds, at.active.is_binding, solver)[:2], ""
        except DegenerateError as error:
            if self.strict:
                error.add_note(f"This is the step of the perturbation {direction.perturbation.labels[0]!r}.")
                raise
            nan = float("nan")
            return torch.full_like(at.theta, nan), torch.full_like(at.lam, nan), str(error)

    def _scaled_hessian(self, scale: Tensor) -> Tensor | float:
        """Return Σₖ scaleₖ ∇²pₖ over the sums; the Hessian of each is computed once."""
        if self.solution.part_hessians is not None:
            return torch.tensordot(scale, self.solution.part_hessians[: len(scale)], 1)
        total: Tensor | float = 0.0
        for k in torch.nonzero(scale).reshape(-1).tolist():
            if k not in self._part_hessians:
                unit = torch.zeros_like(self.solution.parts)
                unit[k] = 1.0
                self._part_hessians[k] = self.solution.program.rows.part_hessian(self.solution.theta, unit)
            total = total + scale[k] * self._part_hessians[k]
        return total
