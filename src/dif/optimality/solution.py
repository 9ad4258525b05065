"""A point (θ̄, λ̄) and its judgement."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.errors import DegenerateError, InfeasibleError, InvalidInputError, NotASolutionError, few
from dif.evaluation.hessian import Curvature
from dif.evaluation.kinks import Kink, explain, find_kinks
from dif.evaluation.loss_checks import check_slopes
from dif.evaluation.program import PerConstraint, Program
from dif.optimality.active_set import ActiveSet
from dif.optimality.residuals import KKT, Scales, complementarity, residuals, violations
from dif.problem.parameters import Parameters
from dif.problem.problem import Problem
from dif.runtime.inputs import check_number

_MODERATE = 1e3  # times what it weighs in the objective: a sample may weigh so much in the Lagrangian, unlooked at
_UNBOUNDED = 1e7  # times the objective's curvature, beyond which a multiplier has no bound
_BENT = 10.0  # times what the second derivative says, beyond which differences see a kink
_OFF = 10.0  # steps of a difference, by which slope and gradient may differ where the curvature is 1
_NOISE = 50.0  # times eps, what rounding makes of a sum of losses
_CANCELLING = 1e6  # times the objective's gradient, beyond which forces of constraints can only cancel each other


class Solution:
    """θ̄ and λ̄ of a problem, with how well they solve it.

    Args:
        problem: The problem it should solve.
        params: A dict of tensors or an `nn.Module`; copied, never changed.
        multipliers: Per constraint (a list, a dict by name) or flat; recovered from the params when left out.
        tol: Largest relative KKT residual that counts as a solution (None: 1e-4 in float64, 1e-2 in float32).

    A solution is judged as it is given: `kkt` and `active` say what was found, and estimators refuse a point that is
    not a solution unless told `strict=False`.
    """

    def __init__(self, problem: Problem, params: Any, multipliers: Any = None, *, tol: float | None = None) -> None:
        parameters, theta = Parameters.of(params)
        program = Program.of(problem, parameters, theta)
        lam = None if multipliers is None else program.flat_multipliers(multipliers)
        self._set(program, theta, lam, tol)

    @classmethod
    def from_params(cls, problem: Problem, params: Any, *, tol: float | None = None) -> Solution:
        """From parameters alone: the multipliers that fit them best are recovered."""
        return cls(problem, params, tol=tol)

    @classmethod
    def of_program(cls, program: Program, theta: Tensor, lam: Tensor | None, tol: float | None = None) -> Solution:
        """From a compiled program and flat vectors."""
        solution = cls.__new__(cls)
        solution._set(program, theta, lam, tol)
        return solution

    def _set(self, program: Program, theta: Tensor, lam: Tensor | None, tol: float | None) -> None:
        self.program = program
        self.theta = theta.detach()
        self.p, self.Dp = program.rows.part_gradients(self.theta)  # parts and their gradients
        self.f, self.J = program.rows.C @ self.p, program.rows.C @ self.Dp  # rows and their gradients
        check_gradients(program, self.J)
        self.c, self.G = self.f[1:] - program.tau, self.J[1:]
        self.lam = self._recovered_multipliers() if lam is None else lam
        eps = torch.finfo(self.theta.dtype).eps
        self.tol = (1e-4 if eps < 1e-12 else 1e-2) if tol is None else checked_tolerance(tol)

    def _recovered_multipliers(self) -> Tensor:
        """The multipliers that come nearest to stationarity: least squares over the rows at their bound, λ ≥ 0."""
        from scipy.optimize import nnls  # slow to import, seldom needed

        kinds, lam = self.program.kinds, torch.zeros_like(self.c)
        if len(lam) == 0:
            return lam
        alone = self.objective_curvature
        scales = Scales.of(self.theta, self.J, alone.own, alone.noise)
        reach = torch.finfo(self.theta.dtype).eps ** 0.25  # 1e-4 in float64, in units
        rows = torch.nonzero(kinds.at_bound(scales.slack(self.c), reach) & (scales.norms > 0)).reshape(-1)
        if len(rows) == 0:
            return lam
        A = (self.G[rows] / scales.root / scales.norms[rows, None]).double().cpu().numpy().T  # (d, k)
        free = kinds.equal[rows].cpu().numpy()
        goal = (-self.J[0] / scales.root).double().cpu().numpy()
        found = np.zeros(len(rows))
        Q = np.linalg.qr(A[:, free])[0]
        inside, left = A[:, ~free] - Q @ (Q.T @ A[:, ~free]), goal - Q @ (Q.T @ goal)
        size = float(np.linalg.norm(left))
        if size > 1e-14 * float(np.linalg.norm(goal)) and inside.shape[1]:
            found[~free] = nnls(inside, left / size)[0] * size
        found[free] = np.linalg.lstsq(A[:, free], goal - A[:, ~free] @ found[~free], rcond=None)[0]
        lam[rows] = torch.as_tensor(found).to(lam) / scales.norms[rows]
        return lam

    @cached_property
    def objective_curvature(self) -> Curvature:
        """∇²f₀(θ̄) as an operator."""
        return Curvature(self.program.rows, self.theta, self.program.weights(torch.zeros_like(self.c)))

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.program.problem

    @property
    def params(self) -> dict[str, Tensor]:
        """θ̄ as the params' own structure."""
        parameters = self.program.parameters
        return parameters.bind({name: t.clone() for name, t in parameters.tensors(self.theta).items()})

    @property
    def multipliers(self) -> PerConstraint:
        """λ̄ per constraint: by position, by name or by the Constraint."""
        return PerConstraint.of(self.program, self.lam)

    @property
    def objective(self) -> float:
        """f₀(θ̄)."""
        return float(self.f[0]) + float(self.problem.objective.constant)

    @cached_property
    def curvature(self) -> Curvature:
        """∇²θθ L(θ̄, λ̄) as an operator."""
        return Curvature(self.program.rows, self.theta, self.program.weights(self.lam))

    @property
    def hessian(self) -> Tensor:
        """∇²θθ L(θ̄, λ̄), assembled, (d, d)."""
        return self.curvature.dense()

    @cached_property
    def scales(self) -> Scales:
        """The units of rows and multipliers here."""
        if not bool(torch.isfinite(self.curvature.own).all()):
            raise InvalidInputError(
                "curvature at the given parameters",
                measured="NaN or infinite",
                threshold="finite",
                meaning="The point has no second derivative there (a norm or a root at 0), so it cannot be judged.",
                cure="Start elsewhere, or smooth the loss.",
            )
        return Scales.of(self.theta, self.J, self.curvature.own, self.curvature.noise)

    @cached_property
    def kkt(self) -> KKT:
        """Residuals of the optimality conditions."""
        gradient = self.program.weights(self.lam) @ self.J
        return residuals(self.scales, gradient, self.c, self.lam, self.program.kinds)

    @property
    def converged(self) -> bool:
        """Whether the KKT residual is within the tolerance."""
        return self.kkt.residual <= max(self.tol, 16 * self.kkt.rounding)

    @cached_property
    def kinks(self) -> tuple[Kink, ...]:
        """Where losses are not smooth near this point, found by probing them."""
        return find_kinks(self.program.rows, self.theta)

    @cached_property
    def active(self) -> ActiveSet:
        """Binding, weak and inactive rows, and whether the derivative exists."""
        eps = torch.finfo(self.theta.dtype).eps
        tolerance = max(eps**0.447, min(10 * self.kkt.residual, eps**0.25))  # 1e-7 in float64 at a clean solution
        return ActiveSet.read(
            self.program.names, self.scales, self.c, self.lam, self.program.kinds, self.G, self.curvature, tolerance
        )

    def check(self) -> None:
        """Raise where this is not a solution."""
        kkt = self.kkt
        if not self.converged:
            worst = max(("stationarity", "feasibility", "complementarity"), key=lambda part: getattr(kkt, part))
            detail = ""
            if worst == "feasibility":
                row = int(violations(self.scales, self.c, self.program.kinds).argmax())
                detail = f" (worst at {self.program.names[row]})"
            elif worst == "complementarity":
                row = int(complementarity(self.scales, self.c, self.lam, self.program.kinds).argmax())
                detail = f" (worst at {self.program.names[row]})"
            cure = explain(self.kinks) if self.kinks else "Train on, or polish it: dif.fit(problem, solution.params)."
            raise NotASolutionError(
                f"KKT residual of the given point: {worst}{detail}",
                measured=f"{kkt.residual:.3g} ({kkt}; ‖∇L‖ = {kkt.gradient_norm:.3g})",
                threshold=f"{self.tol:.1g}",
                meaning="The point does not solve the problem, so there is no solution to predict a change of.",
                cure=f"{cure} strict=False goes on regardless, and records the residual.",
            )

        self._check_multipliers()
        self._check_differences()

    def _check_differences(self) -> None:
        """Compare the gradient and the curvature with differences of the Lagrangian along a direction."""
        eps = torch.finfo(self.theta.dtype).eps
        h, weights = eps**0.25, self.program.weights(self.lam)
        draw = torch.randn(self.theta.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        v = draw.to(self.theta) * torch.minimum(1 / self.scales.root, 1 + self.theta.abs())
        for table in self.program.rows.tables:
            check_slopes(table.samples, self.program.parameters, self.theta, v)
        before, after = (float(weights @ self.program.rows.values(self.theta + sign * h * v)) for sign in (-1, 1))
        slope, bend = (after - before) / (2 * h), (before - 2 * float(weights @ self.f) + after) / h**2
        H = self.curvature
        along, curved = (
            float(weights @ self.J @ v),
            float(v @ (H.dense() @ v if H.cheap else H.product(v[:, None])[:, 0])),
        )
        noise = _NOISE * eps * float(weights.abs() @ self.f.abs())
        if abs(bend) > _BENT * abs(curved) + noise / h**2:
            raise DegenerateError(
                "curvature along a random direction",
                measured=f"{bend:.3g} by differences of the Lagrangian, {curved:.3g} by its second derivative",
                threshold=f"less than {_BENT:g} times apart",
                meaning="It lies on a kink of a loss (absolute value, hinge, ReLU): there is no derivative there.",
                cure="Use a smooth loss or activation (a smoothed absolute value, softplus, GELU) and fit again.",
            )
        if abs(slope - along) > _OFF * h * max(abs(curved), abs(bend)) + noise / h:
            raise InvalidInputError(
                "slope of the Lagrangian along a random direction",
                measured=f"{slope:.3g} by differences, {along:.3g} by its gradient",
                threshold=f"less than {_OFF * h:.1g} of its curvature apart",
                meaning="What torch returns as the gradient of all samples is not the derivative of their losses.",
                cure="Look for .detach(), torch.no_grad() or a custom backward in the losses.",
            )

    def check_feasible(self) -> None:
        """Raise where multipliers without bound make a violation look small: samples weighed by them set the units."""
        forces = self.lam.abs() * torch.linalg.vector_norm(self.G, dim=1)
        if not bool((forces > _CANCELLING * self.J[0].norm()).any()):
            return
        alone = self.objective_curvature
        scales = Scales.of(self.theta, self.J, alone.own, alone.noise)
        found = violations(scales, self.c, self.program.kinds)
        worst = int(found.argmax())
        if float(found[worst]) > self.tol:
            raise InfeasibleError(
                f"violation of {self.program.names[worst]}, whose multiplier is {float(self.lam[worst]):.1e}",
                measured=f"{float(self.c[worst].abs()):.4g}",
                threshold="0",
                meaning="The constraints contradict each other: their forces cancel, and grow without bound.",
                cure="Loosen that bound, or drop one of the constraints in conflict with it.",
            )

    def _check_multipliers(self) -> None:
        """Multipliers without bound (no point strictly inside the constraints) hide every residual."""
        self.check_feasible()
        if not bool(((self.lam != 0) & self.program.rows.curved()[1:]).any()):
            return
        nothing, weights = torch.zeros_like(self.lam), self.program.weights
        if self.program.rows.outweighs(weights(self.lam), than=weights(nothing)) < _MODERATE:
            return
        ratio = float(self.curvature.scale().max() / self.objective_curvature.scale().max())
        if ratio > _UNBOUNDED:
            row = int(self.lam.abs().argmax())
            raise DegenerateError(
                f"multiplier of {self.program.names[row]}",
                measured=f"{float(self.lam[row]):.3g}, its curvature {ratio:.1e} times the objective's",
                threshold="below 1e+07 times",
                meaning="Multipliers grow without bound where no point lies strictly inside the constraint (no Slater "
                "point): the solution has no derivative there.",
                cure="Loosen the bound, or state what it fixes as equalities.",
            )

    def __repr__(self) -> str:
        state = "solution" if self.converged else "NOT a solution"
        return f"Solution({state}: objective {self.objective:.6g}, {self.kkt})"


def expect_solution(thing: object) -> Solution:
    """What estimators are built from."""
    if not isinstance(thing, Solution):
        raise InvalidInputError(
            "what an estimator is built from",
            measured=type(thing).__name__,
            threshold="a Solution",
            meaning="Influence is taken at a solution of a problem.",
            cure="Solve it with dif.fit(problem, params), or hand in your own as dif.Solution(problem, params).",
        )
    thing.program.parameters.check_mode()
    return thing


def checked_tolerance(tol: float) -> float:
    """A tolerance that can be reached or missed."""
    return check_number(
        tol,
        "tol",
        zero=False,
        meaning="It is the relative KKT residual that counts as solved.",
        cure="Leave it out for the default.",
    )


def check_gradients(program: Program, J: Tensor) -> None:
    """Refuse a point where a row has no derivative."""
    bad = torch.nonzero(~torch.isfinite(J).all(1)).reshape(-1).tolist()
    if bad:
        names = ["the objective", *program.names]
        raise InvalidInputError(
            "gradients at the given parameters",
            measured=f"NaN or infinite for {few([names[j] for j in bad])}",
            threshold="all finite",
            meaning="The point has no derivative there (sqrt or log at 0, a norm at its kink), so it cannot be judged.",
            cure="Start elsewhere, or smooth the loss.",
        )
