"""The penalty-based influence function: soft penalties instead of constraints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dif.errors import NotConvergedError
from dif.estimators.assessment import ASSESSED, Assessor
from dif.estimators.influence import Change, Influence
from dif.estimators.linearisation import Linearisation, checked_damping, trust
from dif.estimators.scoring import Out
from dif.evaluation.hessian import Curvature
from dif.evaluation.program import Program
from dif.linalg.cholesky import DenseCholesky, prepare
from dif.linalg.operator import Matrix
from dif.optimality.residuals import Scales
from dif.optimality.solution import Solution, expect_solution
from dif.problem.perturbation import Perturbation
from dif.runtime.inputs import check_number


class PenaltyInfluence:
    """Classical influence on f₀ + ρ/2 Σ_eq (f − τ)² + k Σ_ineq (f − τ)₊³ (paper, appendix).

    As printed it is taken at the constrained solution θ̄, where an inequality's cubic term has no curvature: only
    equalities are felt. With `at_minimiser=True` it is taken at the minimiser of the penalised objective, where
    inequalities are violated a little and felt. Data in the constraints count too.

    Args:
        solution: A certified solution.
        rho: Weight of the equalities' squares.
        k: Weight of the inequalities' cubes.
        at_minimiser: Differentiate at the penalised minimiser instead of at θ̄.
        damping: δ in H + δI; changes the answer and is reported.
        strict: Raise where the point is not a solution; False records it instead.
    """

    name = "penalty IF"

    def __init__(
        self,
        solution: Solution,
        rho: float = 100.0,
        k: float = 100.0,
        *,
        at_minimiser: bool = False,
        damping: float = 0.0,
        strict: bool = True,
    ) -> None:
        for name, weight in (("rho", rho), ("k", k)):
            check_number(
                weight,
                f"penalty weight {name}",
                zero=False,
                meaning="A penalty of weight 0 is no penalty.",
                cure="Use ClassicalInfluence for no penalty at all.",
            )
        self.solution = expect_solution(solution)
        self.rho, self.k, damping = float(rho), float(k), checked_damping(damping)
        if strict:
            solution.check()
        theta = self._minimiser() if at_minimiser else solution.theta
        self.at = Solution.of_program(solution.program, theta, solution.lam) if at_minimiser else solution
        # at θ̄ inequalities are met, up to rounding: their cubes are not felt
        c = self.at.c if at_minimiser else torch.where(solution.program.kinds.equal, self.at.c, 0.0)
        weights, stiffness = self._forces(c)
        felt = bool((weights[1:] != 0).any())
        plain = Curvature(solution.program.rows, theta, weights) if felt else self.at.objective_curvature
        H = plain.with_rows(self.at.G, stiffness)
        kept = torch.arange(solution.program.m, device=theta.device)
        prepared, none = prepare(H, self.at.G[:0], damping=damping)[0], torch.zeros_like(kept).bool()
        self.linearisation = Linearisation(self.at, weights, prepared, kept, none, stiffness, priced=False)
        self._assessor = Assessor(solution)
        self._diagnostics = {
            **trust(solution),
            "rho": self.rho,
            "k": self.k,
            "at_minimiser": at_minimiser,
            "damping": damping,
        }

    def change(self, perturbation: Perturbation) -> Change:
        """Δθ of one perturbation; Δλ is the change of the penalties' forces."""
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

    def _forces(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """First derivative of the penalties (behind a 1 for f₀), (1 + m,), and the second, (m,)."""
        _, first, second = self.solution.program.kinds.penalty(c, self.rho, self.k)
        return self.solution.program.weights(first), second

    def _minimiser(self) -> Tensor:
        """Newton with halving on the penalised objective, from θ̄."""
        program, theta = self.solution.program, self.solution.theta
        tolerance = 1e-11 if theta.dtype == torch.float64 else 1e-5
        residual = float("inf")
        for _ in range(200):
            f, J = program.rows.gradients(theta)
            weights, stiffness = self._forces(f[1:] - program.tau)
            gradient = weights @ J
            H = program.rows.hessian(theta, weights) + J[1:].T @ (stiffness[:, None] * J[1:])
            residual = Scales.of(theta, J, Matrix(H).scale(), self.solution.curvature.noise).gradient(gradient)
            if residual <= tolerance:
                return theta
            step = -DenseCholesky(H).solve(gradient[:, None])[:, 0]
            value, slope, length = self._value(program, theta), float(gradient @ step), 1.0
            while not self._value(program, theta + length * step) <= value + 1e-4 * length * slope + 1e-15 * abs(value):
                length *= 0.5
                if length < 1e-12:
                    raise _stalled(residual, tolerance)
            theta = theta + length * step
        raise _stalled(residual, tolerance)

    def _value(self, program: Program, theta: Tensor) -> float:
        f = program.rows.values(theta)
        c = f[1:] - program.tau
        penalty, _, _ = program.kinds.penalty(c, self.rho, self.k)
        return float(f[0] + penalty.sum())


def _stalled(residual: float, tolerance: float) -> NotConvergedError:
    return NotConvergedError(
        "gradient of the penalised objective at its minimiser",
        measured=f"{residual:.3g}",
        threshold=f"{tolerance:.0e}",
        meaning="The penalised objective was not minimised: large penalties are badly conditioned.",
        cure="Use smaller rho and k, or at_minimiser=False for the formula as printed.",
    )
