"""Solving a problem: augmented Lagrangian with L-BFGS from afar, Newton on the KKT system near the solution."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dif.conjugate_gradients import ConjugateGradients
from dif.curvature import DENSE_LIMIT, Curvature
from dif.errors import (
    DegenerateError,
    InfeasibleError,
    InvalidInputError,
    NotConvergedError,
    NotConvergedWarning,
    UnboundedError,
)
from dif.kkt import KKT, Scales, residuals
from dif.kkt_step import kkt_step
from dif.linear_solve import Solver
from dif.parameters import Parameters
from dif.problem import Problem
from dif.program import Program
from dif.progress import Reporter, progress
from dif.solution import Solution, check_gradients, checked_tolerance

_PATIENCE = 8  # rounds that may pass without the residual halving
_FAR = 1e9  # ‖θ‖ relative to the start: beyond it a problem counts as unbounded


def fit(
    problem: Problem,
    params: Any,
    *,
    multipliers: Any = None,
    tol: float | None = None,
    max_iter: int = 20_000,
    max_seconds: float | None = None,
    show_progress: bool = True,
) -> Solution:
    """Solve the problem from the given params, which are not changed.

    Args:
        problem: What to solve.
        params: Start: a dict of tensors or an `nn.Module`.
        multipliers: Start of λ (per constraint or flat); zero when left out.
        tol: Relative KKT residual to reach (None: 1e-10 in float64, 1e-5 in float32).
        max_iter: Limit on iterations, all phases together: sweeps of L-BFGS over the data, and Newton steps.
        max_seconds: Limit on time.
        show_progress: Show a line with the residual on a terminal.

    Returns:
        The solution. Where a limit came first a `NotConvergedWarning` says so; `solution.converged` says whether the
        point still passes as a solution.

    Raises:
        InfeasibleError: No point satisfies the constraints.
        UnboundedError: The objective falls without end.
    """
    parameters, theta = Parameters.of(params)
    program = Program.of(problem, parameters, theta)
    lam = torch.zeros_like(program.tau) if multipliers is None else program.flat_multipliers(multipliers)
    check_gradients(program, program.rows.gradients(theta)[1])
    with progress("fit", None, show_progress) as report:
        found = solve(program, theta, lam, tol=tol, max_iter=max_iter, max_seconds=max_seconds, report=report)
    solution = Solution.of_program(program, found.theta, found.lam)
    if not found.reached:
        warnings.warn(
            f"fit stopped before its tolerance: measured residual {solution.kkt.residual:.3g} ({solution.kkt}), "
            f"allowed {found.goal:.1g}, after {found.iterations} iterations ({found.stopped_by}). The point is "
            f"{'nearly' if solution.converged else 'not'} a solution. Raise max_iter or max_seconds, start nearer, "
            "or add a ridge if the curvature vanishes.",
            NotConvergedWarning,
            stacklevel=2,
        )
    return solution


def default_tolerance(theta: Tensor) -> float:
    """1e-10 in float64, 1e-5 in float32."""
    return 1e-10 if theta.dtype == torch.float64 else 1e-5


def check_limits(max_iter: int, max_seconds: float | None) -> None:
    """Refuse limits within which nothing could be done."""
    numbers = isinstance(max_iter, int) and (max_seconds is None or isinstance(max_seconds, int | float))
    if not numbers or max_iter < 1 or (max_seconds is not None and not max_seconds > 0):
        raise InvalidInputError(
            "limits of fit",
            measured=f"max_iter={max_iter}, max_seconds={max_seconds}",
            threshold="both positive",
            meaning="Nothing could be done within them.",
            cure="Leave them out for the defaults.",
        )


@dataclass
class Found:
    """Where a solve stands."""

    theta: Tensor
    lam: Tensor
    residual: float = float("inf")
    goal: float = 0.0  # the tolerance, or what rounding allows
    iterations: int = 0
    stopped_by: str = "max_iter"

    @property
    def reached(self) -> bool:
        """Whether the residual is within the tolerance."""
        return self.residual <= self.goal


@dataclass
class _Limits:
    max_iter: int
    max_seconds: float | None
    begun: float = field(default_factory=time.monotonic)
    used: int = 0

    def spent(self) -> str | None:
        if self.used >= self.max_iter:
            return "max_iter"
        late = self.max_seconds is not None and time.monotonic() - self.begun > self.max_seconds
        return "max_seconds" if late else None


def solve(
    program: Program,
    theta: Tensor,
    lam: Tensor,
    *,
    tol: float | None = None,
    max_iter: int = 20_000,
    max_seconds: float | None = None,
    report: Reporter = lambda done, text="": None,
) -> Found:
    """(θ, λ) of a compiled program: Newton at once if the start is near, else augmented-Lagrangian rounds before it."""
    check_limits(max_iter, max_seconds)
    goal = default_tolerance(theta) if tol is None else checked_tolerance(tol)
    limits = _Limits(max_iter, max_seconds)
    best = Found(theta, lam)
    _newton(program, best, goal, limits, report)
    rounds = _AugmentedLagrangian(program, best.theta, best.lam, limits, report) if not best.reached else None
    waited = 0
    while rounds is not None and not best.reached and limits.spent() is None:
        if not rounds.round():
            continue  # ran away; the next round has a stiffer penalty
        trial = Found(rounds.theta, rounds.lam)
        _newton(program, trial, goal, limits, report)
        waited = 0 if trial.residual < 0.5 * best.residual else waited + 1
        if trial.residual < best.residual:
            best = trial
        if not best.reached and (waited > _PATIENCE or rounds.raised > _PATIENCE + 2):
            rounds.judge(goal)
            best.stopped_by = "no further progress"
            break
    else:
        best.stopped_by = limits.spent() or "converged"
    best.iterations = limits.used
    return best


def _judge(program: Program, theta: Tensor, lam: Tensor, H: Curvature) -> tuple[KKT, Tensor, Tensor]:
    """The residuals at (θ, λ), f and its gradients, in the units of a Hessian nearby."""
    f, J = program.rows.gradients(theta)
    scales = Scales.of(theta, J, H.own, H.noise)
    kkt = residuals(scales, program.weights(lam) @ J, f[1:] - program.tau, lam, program.equality)
    if not bool(torch.isfinite(f).all()):  # outside the domain, where derivatives may well be finite
        kkt = replace(kkt, stationarity=float("nan"))
    return kkt, f, J


def _newton(program: Program, at: Found, goal: float, limits: _Limits, report: Reporter) -> None:
    """Newton on the KKT system while the residual falls; `at` is moved to the best point.

    After the tolerance is reached it goes on until rounding stops it, so that weak constraints can be told from
    nearly weak ones.
    """
    H = Curvature(program.rows, at.theta, program.weights(at.lam))
    kkt, f, J = _judge(program, at.theta, at.lam, H)
    at.residual, at.goal = kkt.residual, max(goal, 16 * kkt.rounding)
    while limits.spent() is None and _finite(kkt):
        limits.used += 1
        report(limits.used, f"(Newton, residual {at.residual:.1e})")
        try:
            step = kkt_step(J[0], H, f[1:] - program.tau, J[1:], program.equality, at.lam > 0, _solver(H, at.residual))
        except (DegenerateError, NotConvergedError):
            return
        length = 1.0
        while True:
            theta = at.theta + length * step.omega
            lam = at.lam + length * (step.lam - at.lam)
            kkt, f, J = _judge(program, theta, lam, H)
            if _finite(kkt) and kkt.residual < (1 - 0.1 * length) * at.residual:
                break
            length *= 0.5
            if length < 1e-3 or at.reached or limits.spent():
                return
        at.theta, at.lam, at.residual = theta, lam, kkt.residual
        at.goal = max(goal, 16 * kkt.rounding)
        H = Curvature(program.rows, theta, program.weights(lam))


def _solver(H: Curvature, residual: float) -> Solver:
    """Cholesky where H is assembled; else conjugate gradients, only as exact as the step deserves."""
    if H.d <= DENSE_LIMIT:
        return None
    exact = torch.finfo(H.theta.dtype).eps ** 0.672
    return lambda shifted: ConjugateGradients(shifted, tolerance=max(exact, min(1e-3, 1e-2 * residual)))


def _finite(kkt: KKT) -> bool:
    return kkt.residual < float("inf")  # false for NaN too


class _AugmentedLagrangian:
    """Rounds of L-BFGS on f₀ + Σ ψ(cⱼ, λⱼ, ρⱼ), each to a tighter tolerance, with λ and ρ updated in between."""

    def __init__(self, program: Program, theta: Tensor, lam: Tensor, limits: _Limits, report: Reporter) -> None:
        self.program, self.limits, self.report = program, limits, report
        self.theta, self.lam = theta.clone(), lam.clone()
        f, J = program.rows.gradients(theta)
        H0 = Curvature(program.rows, theta, program.weights(torch.zeros_like(lam)))
        self.root = H0.scale().sqrt()  # θ = u / root: the coordinates of u curve alike
        norms = torch.linalg.vector_norm(J[1:] / self.root, dim=1)
        self.row_scale = torch.where(norms > 0, norms, torch.ones_like(norms)) ** 2
        self.penalty = 10.0  # ρⱼ = penalty / ‖∇fⱼ‖², in u
        self.accuracy = 1e-3
        self.violation = float("inf")
        self.start_size = max(float((self.root * theta).norm()), H0.noise, float((J[0] / self.root).norm())) or 1.0
        gaps = self._gaps(f, J)[1]
        self.nearest = float(gaps.max()) if len(gaps) else 0.0  # least violation seen, as a step in u
        self.gap, self.stuck = float("inf"), False
        self.raised = 0
        self.ran = ""  # where θ ran to, if it ran away
        self.rounds = 0

    def _shifted(self, f: Tensor) -> Tensor:
        ahead = self.lam + self.penalty / self.row_scale * (f[1:] - self.program.tau)
        return torch.where(self.program.equality, ahead, ahead.clamp(min=0))

    def _value(self, f: Tensor) -> Tensor:
        force = self._shifted(f)
        return f[0] + ((force**2 - self.lam**2) * self.row_scale).sum() / (2 * self.penalty)

    def round(self) -> bool:
        """Minimise over θ, then move λ, then ρ where the violation did not fall; False if θ ran away."""
        self.rounds += 1
        outcome = self._minimise()
        if outcome is None:  # ran away: a stiffer penalty may hold it
            if len(self.lam) == 0 or self.raised > _PATIENCE:
                self._unbounded()
            self.penalty *= 10.0
            self.raised += 1
            return False
        self.theta = outcome
        f, J = self.program.rows.gradients(self.theta)
        c = f[1:] - self.program.tau
        self.lam = self._shifted(f)
        reach = self.row_scale.sqrt()
        gap = torch.where(self.program.equality, c.abs(), torch.maximum(c, -self.lam * self.row_scale / self.penalty))
        violation = float((gap.abs() / reach).max()) if len(c) else 0.0
        if violation > 0.25 * self.violation:
            self.penalty *= 10.0
            self.raised += 1
        self.violation = min(violation, self.violation)
        gap, scaled = self._gaps(f, J)
        self.nearest = min(self.nearest, float(scaled.max()) if len(c) else 0.0)
        self.stuck = len(c) > 0 and float(gap.max()) > 0.8 * self.gap  # a stiffer penalty no longer brings it nearer
        self.gap = float(gap.max()) if len(c) else 0.0
        self.accuracy = max(self.accuracy * 0.1, 1e-12)
        return True

    def _minimise(self) -> Tensor | None:
        """L-BFGS on the augmented Lagrangian from θ, in u; None if it runs away."""
        point = self.root * self.theta
        optimiser = torch.optim.LBFGS(
            [point], max_iter=50, max_eval=100, history_size=20, tolerance_grad=0.0, tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )  # fmt: skip
        seen: dict[str, Any] = {}

        def closure() -> Tensor:
            self.limits.used += 1
            theta = point / self.root
            f, gradient = self.program.rows.pullback(theta, lambda f: self.program.weights(self._shifted(f)))
            gradient = gradient / self.root
            value = self._value(f)
            if not (bool(torch.isfinite(value)) and bool(torch.isfinite(gradient).all())) and seen:
                # outside the domain of the objective: a wall, so that the line search turns back
                return seen["first"] + 1e10 * (1 + seen["first"].abs())
            point.grad = gradient
            seen["gradient"], seen["value"] = gradient, value
            seen.setdefault("first", value)
            return value

        closure()
        for _ in range(40):
            if self.limits.spent():
                break
            before = point.clone()
            optimiser.step(closure)
            closure()
            size = float(point.norm())
            step = float(seen["gradient"].norm()) / max(self.start_size, size)
            self.report(self.limits.used, f"(augmented Lagrangian {self.rounds}, gradient {step:.1e})")
            if float(seen["value"]) < -1e15 * (1 + abs(float(seen["first"]))):
                self.ran = f"still falling at a value of {float(seen['value']):.3g}"
                return None
            if not size < _FAR * self.start_size:
                self.ran = f"still falling at ‖θ‖ > {_FAR:.0e} times the start"
                return None
            if step <= self.accuracy or torch.equal(before, point):
                break
        return point.detach() / self.root

    def _unbounded(self) -> None:
        raise UnboundedError(
            "objective of the problem",
            measured=f"{self.ran}, penalty raised {self.raised} times",
            threshold="a minimum at finite θ",
            meaning="The objective falls without end inside the constraints (or on its way to them).",
            cure="Add a ridge, or constraints that hold the free directions; check the sign of the objective.",
        )

    def judge(self, goal: float) -> None:
        """Say so if what stopped us is an empty feasible set."""
        f, J = self.program.rows.gradients(self.theta)
        gap, scaled = self._gaps(f, J)
        if len(gap) == 0:
            return
        worst = int(scaled.argmax())
        allowed = max(1e-5, 1e3 * goal) * max(self.start_size, float((self.root * self.theta).norm()))
        if self.stuck and float(scaled[worst]) > allowed and self.nearest > allowed:
            raise InfeasibleError(
                f"violation of {self.program.names[worst]} at the point that violates the constraints least",
                measured=f"{float(gap[worst]):.4g}",
                threshold="0",
                meaning="The constraints contradict each other (or no point near the start meets them).",
                cure="Loosen that bound, or drop one of the constraints in conflict with it.",
            )

    def _gaps(self, f: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
        """How far each row is from being met, as it is and as a step in u."""
        c = f[1:] - self.program.tau
        gap = torch.where(self.program.equality, c.abs(), c.clamp(min=0))
        reach = torch.linalg.vector_norm(J[1:] / self.root, dim=1)
        return gap, gap / torch.where(reach > 0, reach, 1.0)
