"""The classical influence function: the objective alone, as if there were no constraints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dif.estimators.assessment import ASSESSED, Assessor
from dif.estimators.influence import Change, Influence
from dif.estimators.linearisation import Linearisation, checked_damping, trust
from dif.estimators.scoring import Out
from dif.linalg.cholesky import Solver, prepare
from dif.optimality.solution import Solution, expect_solution
from dif.problem.perturbation import Perturbation


class ClassicalInfluence:
    """Δθ = −H⁻¹ b with the Hessian and the data of the objective only; Δλ = 0.

    The baseline that DIF is compared with: at a constrained solution its step leaves the feasible set. With
    `renormalise=False` it is the paper's (removal: +H⁻¹∇ℓ/n).

    Args:
        solution: A certified solution.
        damping: δ in H + δI. It changes the answer, and is reported.
        gauss_newton: Leave the curvature of the model out of H (the Samples must know their `outputs`): positive where
            H is not. It changes the answer, and is reported.
        solver: Prepares a solver for H (None: Cholesky up to a few thousand parameters, conjugate gradients above).
        strict: Raise where the point is not a solution; False records it instead.
    """

    name = "classical IF"

    def __init__(
        self,
        solution: Solution,
        *,
        damping: float = 0.0,
        gauss_newton: bool = False,
        solver: Solver = None,
        strict: bool = True,
    ) -> None:
        self.solution = expect_solution(solution)
        damping = checked_damping(damping)
        if strict:
            solution.check()
        weights = solution.program.weights(torch.zeros_like(solution.lam))
        H = replace(solution.objective_curvature, gauss_newton=True) if gauss_newton else solution.objective_curvature
        prepared, none = prepare(H, solution.G[:0], damping=damping, solver=solver)
        rows = torch.zeros(0, dtype=torch.long, device=solution.theta.device)
        self.linearisation = Linearisation(solution, weights, prepared, rows, rows.bool(), none)
        self._assessor = Assessor(solution)
        self._diagnostics = {**trust(solution), "damping": damping, "gauss_newton": gauss_newton, "strict": strict}

    def change(self, perturbation: Perturbation) -> Change:
        """Δθ of one perturbation, constraints ignored."""
        return self.linearisation.change(perturbation, self._diagnostics)

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1,
        show_progress: bool = True, assess: int = ASSESSED,
    ) -> Influence:  # fmt: skip
        """Predict qᵀΔθ. Keywords as in `dif.Estimator`, `assess` as in `DirectionalInfluence.scores`."""
        look = self._assessor.assess(assess)
        return self.linearisation.influence(
            self.name, target, perturbations, self._diagnostics, out, jobs, show_progress, look
        )

    def reevaluated(self, target: Any, perturbations: Perturbation, *, show_progress: bool = True) -> Influence:
        """The difference of each target between θ̄ and θ̄ + Δθ, where `scores` has its first-order part qᵀΔθ."""
        return self.linearisation.reevaluated(self.name, target, perturbations, self._diagnostics, show_progress)
