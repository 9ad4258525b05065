"""The classical influence function: constraints ignored."""

from __future__ import annotations

from dataclasses import replace

import torch

from dif.estimators.first_order import FirstOrderEstimator
from dif.linalg.solvers import Solver
from dif.optimality.kkt_system import KKTSystem
from dif.optimality.solution import Solution


class ClassicalInfluence(FirstOrderEstimator):
    """Δθ = −H⁻¹ b with the Hessian and the data of the objective only; Δλ = 0.

    The baseline that DIF is compared with: at a constrained solution its step leaves the feasible set. With
    `renormalise=False` it is the paper's (removal: +H⁻¹∇ℓ/n).

    Args:
        solution: A certified solution.
        damping: δ in H + δI. It changes the answer and is reported.
        gauss_newton: Use the Gauss–Newton matrix instead of H (the Samples must define `outputs`): it is never
            negative. It changes the answer and is reported.
        solver: Builds a solver for H (None: Cholesky up to a few thousand parameters, conjugate gradients above).
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
        super().__init__(solution, damping, strict, gauss_newton=gauss_newton)
        self.weights = solution.program.weights(torch.zeros_like(solution.lam))
        H = replace(solution.objective_curvature, gauss_newton=True) if gauss_newton else solution.objective_curvature
        none = torch.zeros(0, dtype=torch.long, device=solution.theta.device)
        system = KKTSystem.prepare(H, solution.G[:0], none.bool(), damping=self.damping, solver=solver)
        self.system = system.start(none, none.bool())
