"""The penalty-based influence function: soft penalties instead of constraints."""

from __future__ import annotations

import torch
from torch import Tensor

from dif.derivatives.hessian import Curvature
from dif.errors import DegenerateError, NotConvergedError
from dif.estimators.first_order import FirstOrderEstimator
from dif.linalg.solvers import DenseCholesky, Matrix, Solver
from dif.optimality.judgement import Scales
from dif.optimality.kkt_system import KKTSystem
from dif.optimality.solution import Solution
from dif.runtime.inputs import check_number

_ITERATIONS = 400  # largest number of Newton steps, halved ones included; ill-conditioned penalties need many
_SHORTEST = 1e-12  # smallest fraction of a Newton step that is tried
_DECREASE = 0.1  # share of the residual by which a whole step must lower it


class PenaltyInfluence(FirstOrderEstimator):
    """Classical influence on f₀ + ρ/2 Σ_eq (f − τ)² + k Σ_ineq (f − τ)₊³ (paper, appendix).

    As printed it is taken at the constrained solution θ̄. There the cubic term of an inequality has no curvature, so
    only equalities contribute. With `at_minimiser=True` it is taken at the minimiser of the penalised objective, where
    inequalities are slightly violated and contribute too. Samples in constraints contribute as well.

    Its Δλ is the change of the first derivatives of the penalties.

    Args:
        solution: A certified solution.
        rho: Weight of the equalities' squares.
        k: Weight of the inequalities' cubes.
        at_minimiser: Differentiate at the penalised minimiser instead of at θ̄.
        damping: δ in H + δI. It changes the answer and is reported.
        strict: Raise where the point is not a solution; False records it instead.
        solver: Builds a solver for H (None: Cholesky up to a few thousand parameters, conjugate gradients above).
    """

    name = "penalty IF"

    def __init__(
        self, solution: Solution, rho: float = 100.0, k: float = 100.0, *, at_minimiser: bool = False,
        damping: float = 0.0, strict: bool = True, solver: Solver = None,
    ) -> None:  # fmt: skip
        for name, weight in (("rho", rho), ("k", k)):
            check_number(weight, f"penalty weight {name}")
        self.rho, self.k = float(rho), float(k)
        super().__init__(solution, damping, strict, rho=self.rho, k=self.k, at_minimiser=at_minimiser)
        program = solution.program
        if at_minimiser:
            self.at = Solution.of_program(program, self._minimiser(), solution.lam)
        at = self.at
        # at θ̄ inequalities are met, up to rounding, so that their cubes vanish
        c = at.c if at_minimiser else torch.where(program.kinds.equal, at.c, 0.0)
        self.weights, stiffness = self._forces(c)
        constrained = bool(self.weights[1:].any())
        H = Curvature(program.rows, at.theta, self.weights) if constrained else at.objective_curvature
        every, options = torch.arange(program.m, device=at.theta.device), {"damping": self.damping, "solver": solver}
        system = KKTSystem.prepare(H, at.G, torch.ones_like(every).bool(), rho=stiffness, **options)
        self.system = system.start(every, system.firm, soft=True)

    def _forces(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of the rows, (1 + m,), and the second derivatives of the penalties, (m,).

        The weight of f₀ is 1, that of each constraint the first derivative of its penalty.
        """
        first, second = self.solution.program.kinds.penalty(c, self.rho, self.k)
        return self.solution.program.weights(first), second

    def _minimiser(self) -> Tensor:
        """Minimise the penalised objective by Newton's method, from θ̄."""
        theta, direction, length, least = self.solution.theta, torch.zeros(()), 0.0, float("inf")
        tolerance = 1e-11 if theta.dtype == torch.float64 else 1e-5
        for _ in range(_ITERATIONS):
            f, J = self.solution.program.rows.gradients(theta + length * direction)
            weights, stiffness = self._forces(f[1:] - self.solution.program.tau)
            H = self.solution.program.rows.hessian(theta + length * direction, weights)
            H = H + J[1:].T @ (stiffness[:, None] * J[1:])
            scales = Scales.of(theta + length * direction, J, Matrix(H).scale(), self.solution.curvature.noise)
            residual = float((weights @ J / scales.root).norm()) / scales.size
            if residual < (1 - _DECREASE * length) * least:  # a Newton step from there
                theta, least = theta + length * direction, residual
                if least <= tolerance:
                    return theta
                try:
                    direction, length = -DenseCholesky(H).solve((weights @ J)[:, None])[:, 0], 1.0
                except DegenerateError:
                    break
            else:
                length *= 0.5
            if length < _SHORTEST:
                break
        raise NotConvergedError(
            f"The gradient of the penalised objective is {least:.3g} where its minimisation stopped.",
            f"It must be at most {tolerance:.0e}.",
            "The penalised objective was not minimised: large penalties are badly conditioned.",
            "Use smaller rho and k, or at_minimiser=False for the formula as printed.",
        )
