"""What the first-order estimators share: changes and scores from a linearised problem."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.weight_change import Direction, check_perturbation, split_perturbation
from dif.estimators.assessment import ASSESSED, Assessor, warn_unanswered
from dif.estimators.change import Change
from dif.estimators.influence import Influence
from dif.estimators.linearisation import Linearisation
from dif.estimators.scoring import Out, ScoredChunk, Scoring, chunk_size, differences
from dif.linalg.multiplier_qp import no_step_error
from dif.optimality.solution import Solution, expect_solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.runtime.inputs import check_number
from dif.runtime.workers import check_jobs, run_in_order

_SLOPES = 2**25  # slopes in memory at once: 256 MiB in double precision
_STEPS = 2**25  # entries of Δθ in memory at once: likewise
_CHUNKS = 64  # largest number of chunks, memory permitting: each is a sweep over the data
_SMALLEST = 2**14  # smallest number of perturbations in a chunk, memory permitting, so that few calls are made


class FirstOrderEstimator:
    """Abstract: estimators that answer from a linearised problem."""

    name = ""

    def __init__(self, solution: Solution, damping: float, strict: bool, **settings: Any) -> None:
        self.solution, self.strict = expect_solution(solution), strict
        self.title = self.name  # name and variant, shown in results
        self.damping = check_number(
            damping,
            "damping",
            zero=True,
            meaning="Damping, δ in H + δI, makes up for missing curvature and changes the answer.",
            cure="Use 0 for the exact answer.",
        )
        if strict:
            solution.check()
        self._assessor = Assessor(solution)
        self._diagnostics = {**describe_solution(solution), "damping": self.damping, **settings, "strict": strict}

    def linearise(self, perturbations: Perturbation) -> Linearisation:
        """Return the linearised problem that answers for these perturbations."""
        raise NotImplementedError

    def change(self, perturbation: Perturbation) -> Change:
        """Predict Δθ and Δλ of one perturbation, carried out in full."""
        direction = Direction.resolve_single(self.solution.program, perturbation)
        lin = self.linearise(perturbation)
        omega, response = lin.steps(direction)
        if self.strict and response.unanswered:
            raise no_step_error(*next(iter(response.unanswered.items())))
        diagnostics = {**self._describe(lin), **lin.work, "unanswered": response.unanswered}
        return Change.of(self.solution.program, omega[0], lin.multiplier_change(response.nu)[0], diagnostics)

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1,
        show_progress: bool = True, assess: int = ASSESSED,
    ) -> Influence:  # fmt: skip
        """Predict the change of each target under each perturbation, qᵀΔθ. Keywords as in `dif.Estimator`.

        Args:
            target: A Term, a list of Terms, a dict of Terms by name, or Samples (one target per sample).
            perturbations: One or many.
            out: File for the scores, ending in .npy or .zarr.
            jobs: Processes that share the work.
            show_progress: Show a progress bar on a terminal or in a notebook.
            assess: Number of the strongest predictions, and of random others, whose error is estimated:
                `Influence.expected_error` and `Influence.trusted`. A FirstOrderWarning is given where the predictions
                cannot be trusted. 0 skips this.
        """
        check_perturbation(perturbations, "perturbations")
        jobs, check, lin = check_jobs(jobs), self._assessor.assess(assess), self.linearise(perturbations)
        targets = Targets(target, lin.at)
        most = min(_SLOPES // (len(lin.rows) + len(targets.names)), max(_SMALLEST, len(perturbations) // _CHUNKS))
        size = chunk_size(len(perturbations), most, jobs)
        Q = targets.gradients(lin.at.theta)

        def score(begin: int) -> Iterator[ScoredChunk]:
            columns = torch.cat([lin.system.V, lin.system.solver.solve(Q)], 1)  # (d, k + T)
            return run_in_order(
                partial(self._score, lin, columns), split_perturbation(perturbations, size, begin), jobs
            )

        def finish(influence: Influence) -> None:
            influence.diagnostics.update(lin.work)
            if influence.diagnostics["unanswered"]:
                warn_unanswered(influence.diagnostics["unanswered"], len(perturbations))
            if check is not None:
                ends = lambda rows: self.ends(perturbations.pick(rows), lin)  # noqa: E731
                influence.diagnostics["assessment"] = check(targets, perturbations, influence.stored, ends)

        return Scoring(self.title, lin.at, targets, perturbations, self._describe(lin), out, show_progress).run(
            score, size, finish
        )

    def _score(self, lin: Linearisation, columns: Tensor, chunk: Perturbation) -> ScoredChunk:
        values, response = lin.scores(columns, Direction(self.solution.program, chunk))
        switched = self._find_switched(self.solution.lam + lin.multiplier_change(response.nu))
        about = {"switched": int(switched.sum()), "unanswered": response.unanswered}
        return ScoredChunk(values.double().cpu(), about)

    def reevaluated(self, target: Any, perturbations: Perturbation, *, show_progress: bool = True) -> Influence:
        """Return the difference of each target between θ̄ and θ̄ + Δθ; `scores` has its first-order part, qᵀΔθ."""
        lin = self.linearise(perturbations)
        targets, size = Targets(target, lin.at), max(1, _STEPS // lin.at.theta.numel())

        def work(chunk: Perturbation) -> ScoredChunk:
            omega, response = lin.steps(Direction(lin.at.program, chunk))
            return ScoredChunk(differences(lin.at, targets, omega), {"unanswered": response.unanswered})

        title = f"{self.title}, re-evaluated"
        scoring = Scoring(title, lin.at, targets, perturbations, self._describe(lin), None, show_progress)
        return scoring.run_chunks(work, size, 1, lambda influence: influence.diagnostics.update(lin.work))

    def ends(self, perturbations: Perturbation, lin: Linearisation | None = None) -> tuple[Tensor, Tensor]:
        """Return Δθ of each perturbation, (P, d), and the multipliers after it, (P, m)."""
        lin = self.linearise(perturbations) if lin is None else lin
        omega, response = lin.steps(Direction(lin.at.program, perturbations))
        lam = lin.at.lam.expand(len(omega), -1)
        return omega, lam + lin.multiplier_change(response.nu) if lin.has_multipliers else lam

    def _describe(self, lin: Linearisation) -> dict[str, Any]:
        """Return what results say about the point and the settings."""
        return self._diagnostics

    def _find_switched(self, lam: Tensor) -> Tensor:
        """Return for which perturbations a constraint has switched, (P,) bool, from λ after their steps, (P, m)."""
        return torch.zeros(len(lam), dtype=torch.bool)


def describe_residuals(solution: Solution) -> dict[str, float]:
    """Describe how far the point is from a solution."""
    kkt = solution.kkt
    return {
        "stationarity": kkt.stationarity,
        "feasibility": kkt.feasibility,
        "complementarity": kkt.complementarity,
    }


def describe_solution(solution: Solution) -> dict[str, Any]:
    """Describe the point on which an answer rests: residuals, active set, existence of the derivative."""
    active = solution.active
    return {
        "kkt": describe_residuals(solution),
        "binding": [active.names[j] for j in active.binding],
        "weak": [active.names[j] for j in active.weak],
        "uncertain": [active.names[j] for j in active.uncertain],
        "smallest_margin": float(active.margins.abs().min()) if len(active.names) else None,
        "licq": active.licq,
        "curvature": active.curvature,
    }
