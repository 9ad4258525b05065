"""What the first-order estimators share: changes and scores from a linearised problem."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.errors import DegenerateError
from dif.estimators.assessment import ASSESSED, Assessor
from dif.estimators.protocol import Out, Scored, by_chunk, describe_solution, fill_scores, resolve
from dif.linalg.multiplier_qp import no_step_error
from dif.optimality.kkt_system import KKTSystem, Response
from dif.optimality.solution import Solution, expect_solution
from dif.problem.perturbation import Perturbation
from dif.results.change import Change
from dif.results.influence import Influence
from dif.runtime.inputs import check_count, check_number

_SLOPES = 2**25  # slopes in memory at once: 256 MiB in double precision
_CHUNKS = 64  # largest number of chunks, memory permitting: each is a sweep over the data
_SMALLEST = 2**17  # smallest number of perturbations in a chunk, memory permitting, so that few calls are made
_SWEEP_OVERHEAD = 500  # samples whose gradients cost as much as starting a sweep over the data


class FirstOrderEstimator:
    """Abstract: estimators that answer from a linearised problem.

    min (b − Gᵀλ₀)ᵀω + ½ωᵀHω  s.t.  c₀ + r + Gω = 0 on equal rows, ≤ 0 on the other rows, where b and r are linear in
    the perturbation. An estimator sets `system` (H, G and where the rows start) and `weights`, (1 + m,): the weight of
    each row in b, (1, λ̄) for the Lagrangian. `at` is the point of linearisation.
    """

    name = ""
    system: KKTSystem
    weights: Tensor
    switching: bool | str = False  # whether constraints may become active or inactive within the step

    def __init__(self, solution: Solution, damping: float, strict: bool, **settings: Any) -> None:
        self.solution = self.at = expect_solution(solution)
        self.strict = strict
        self.title = self.name  # name and variant, shown in results
        self.damping = check_number(damping, "damping", zero=True)
        if strict:
            solution.check()
        self._assessor = Assessor(solution)
        self._notes: dict[KKTSystem, dict[str, Any]] = {}  # what results say about a linearised problem
        self._diagnostics = {**describe_solution(solution), "damping": self.damping, **settings, "strict": strict}

    def linearise(self, direction: Direction) -> KKTSystem:
        """Return the linearised problem that answers for these perturbations."""
        return self.system

    def change(self, perturbation: Perturbation) -> Change:
        """Predict Δθ and Δλ of one perturbation, carried out in full."""
        direction = Direction.resolve_single(self.at.program, perturbation)
        system = self.linearise(direction)
        omega, response, about = self.answer(system, direction)
        if self.strict and response.failed:
            raise no_step_error(perturbation.labels[0], response.failed[0])
        diagnostics = {**self._describe(system), "unanswered": about["unanswered"]}
        if self.switching:
            diagnostics["switched"] = bool(about["switched"])
        return Change.of(self.at.program, omega[0], response.dlam[0], diagnostics)

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1,
        show_progress: bool = True, assess: int = ASSESSED,
    ) -> Influence:  # fmt: skip
        """Predict the change of each target under each perturbation, qᵀΔθ. Keywords as in `dif.Estimator`.

        Args:
            target: A Term, a list of Terms, a dict of Terms by name, or Samples (one target per sample).
            perturbations: One or many.
            out: File for the scores, ending in .npy.
            jobs: Processes that share the work.
            show_progress: Show a progress bar on a terminal or in a notebook.
            assess: Number of the strongest predictions, and of random others, whose error is estimated:
                `Influence.expected_error` and `Influence.trusted`. A FirstOrderWarning is given where the predictions
                cannot be trusted. 0 skips this.
        """
        count, (direction, reasons) = check_count(assess, "assess", zero=True), resolve(self.at.program, perturbations)
        system, targets = self.linearise(direction), Targets(target, self.at)
        Q = targets.gradients(self.at.theta)
        columns = torch.cat([system.V, system.solver.solve(Q)], 1)  # (d, k + T)
        most = min(_SLOPES // columns.shape[1], max(_SMALLEST, direction.P // _CHUNKS))

        def work(chunk: Direction) -> Scored:
            values, _, about = self.answer(system, chunk, columns)
            return values.double().cpu(), about

        def complete(influence: Influence) -> None:
            influence.diagnostics.update(self._describe(system))
            if count:
                ends, known = lambda _, some: self.ends(system, some), Q if self.at is self.solution else None
                self._assessor.assess(count, targets, direction, ends, influence, known)

        return fill_scores(
            self, self.at, targets, direction, by_chunk(work, direction, most, jobs), self._diagnostics,
            name=self.title, out=out, show_progress=show_progress, complete=complete, given=perturbations,
            reasons=reasons,
        )  # fmt: skip

    def answer(
        self, system: KKTSystem, direction: Direction, columns: Tensor | None = None
    ) -> tuple[Tensor, Response, dict[str, Any]]:
        """Return Δθ of each perturbation, (P, d), or qᵀΔθ, (P, T), for columns (V, H_ρ⁻¹q₁ … H_ρ⁻¹q_T).

        They are NaN where there is no answer. Also return the response of the rows; and in how many answers a
        constraint switches, and why others have none, by label. With strict, raise where the system of all
        perturbations has no answer.
        """
        at, P, k = self.at, direction.P, len(system.G)
        point = at.theta, self.weights, at.parts, at.part_gradients
        if columns is not None:
            b, df = direction.first_order_effects(*point, columns)
            response = system.respond(b[:, :k], df[:, 1:] - direction.dtau)
        else:
            b = df = torch.full((), float("nan"))  # not known yet
            if P == 1 or sum(len(block.index) for block in direction.blocks) <= _SWEEP_OVERHEAD:  # one sweep for all
                b, df = direction.combine(torch.eye(P).to(at.theta), *point)
            if not bool(torch.isfinite(b).all() and torch.isfinite(df[..., 1:]).all()):  # singly: names the sample
                first = [direction.first_order(p, at.theta, at.parts, at.part_gradients) for p in range(P)]
                b, df = torch.stack([self.weights @ DJ for _, DJ in first]), torch.stack([df for df, _ in first])
            response = system.respond(b @ system.V, df[:, 1:] - direction.dtau)

        strict, labels = self.strict and system is self.system, direction.perturbation
        if strict and response.failed:
            p, reason = next(iter(response.failed.items()))
            raise no_step_error(labels[p].labels[0], reason)
        for p in torch.nonzero((response.nu[:, system.sign_checked] < 0).any(1)).reshape(-1).tolist():
            error = self._released_error(system, response.nu[p])
            if strict:
                raise error
            response.w[p] = response.dlam[p] = float("nan")
            response.failed[p] = str(error)
        switched = 0
        if self.switching:
            forced, active = at.program.kinds.has_force(at.lam + response.dlam), at.active
            switched = int(((active.is_binding & ~forced) | (~active.is_active & forced)).any(1).sum())
        unanswered = {labels[p].labels[0]: reason for p, reason in response.failed.items()}
        about = {"switched": switched, "unanswered": unanswered}

        if columns is not None:
            return -b[:, k:] - response.w @ (system.G @ columns[:, k:]), response, about
        omega, answered = torch.full_like(b, float("nan")), torch.isfinite(response.w).all(1)
        omega[answered] = -system.solver.solve((b + response.w @ system.G)[answered].T).T
        return omega, response, about

    def _released_error(self, system: KKTSystem, nu: Tensor) -> DegenerateError:
        j = int(torch.where(system.sign_checked, nu, float("inf")).argmin())
        return DegenerateError(
            f"The multiplier of {self.at.program.names[int(system.rows[j])]} would be {float(nu[j]):.3g} after the "
            "step.",
            "The multiplier of an inequality must be at least 0.",
            "The constraint becomes inactive, but the Lagrangian is convex only while it holds, so the linearised "
            "problem has no minimum.",
            "Use switching=False for the derivative, or Retraining for the change itself.",
        )

    def ends(self, system: KKTSystem, direction: Direction) -> tuple[Tensor, Tensor]:
        """Return Δθ of each perturbation, (P, d), and the multipliers after it, (P, m)."""
        omega, response, _ = self.answer(system, direction)
        lam = self.at.lam.expand(len(omega), -1)
        return omega, lam if system.soft else lam + response.dlam

    def _describe(self, system: KKTSystem) -> dict[str, Any]:
        """Return what results say about the point, the settings, the solves, and what torch could not do."""
        solver = system.solver
        return {
            **self._diagnostics,
            **self._notes.get(system, {}),
            "solver": type(solver).__name__,
            "solver_residual": solver.residual,
            "solver_steps": solver.steps,
            "fallbacks": sorted(self.at.program.rows.fallbacks),
        }
