"""Solve a problem: the augmented Lagrangian far from the solution, Newton's method on the KKT system near it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.hessian import Curvature
from dif.derivatives.kinks import explain
from dif.derivatives.loss_checks import check_derivatives
from dif.derivatives.program import Program
from dif.errors import DegenerateError, InvalidInputError, NotConvergedError, NotConvergedWarning, warn
from dif.linalg.conjugate_gradients import SolverSeries
from dif.linalg.lanczos import lanczos
from dif.optimality.kkt_system import kkt_step
from dif.optimality.residuals import KKT, Scales, residuals
from dif.optimality.solution import Solution, check_gradients, check_tolerance
from dif.problem.parameters import Parameters
from dif.problem.problem import Problem
from dif.runtime.inputs import as_index
from dif.runtime.limits import Limits
from dif.runtime.progress import Reporter, progress
from dif.solving.augmented_lagrangian import PATIENCE, AugmentedLagrangian
from dif.solving.checkpoint import Checkpoint, FitState
from dif.solving.minibatch import PrimalDual
from dif.solving.newton import damped_newton

_SHORTEST = 1e-3  # smallest fraction of a Newton step that is tried
_SLOW = 0.5  # factor by which a step must reduce the residual to continue where the Hessian is not assembled
_NEAR = 0.03  # relative KKT residual below which Newton's method is tried where the Hessian is not assembled
_NEARER = 1e-3  # the same for the stationarity alone, where L-BFGS has Gauss–Newton coordinates, in which it is fast
_SADDLE = -1e-6  # curvature in scaled coordinates below which a stationary point counts as a saddle


def fit(
    problem: Problem,
    params: Any,
    *,
    multipliers: Any = None,
    tol: float | None = None,
    max_iter: int = 20_000,
    max_seconds: float | None = None,
    epochs: int = 0,
    batch_size: int = 256,
    rate: float = 1e-3,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    show_progress: bool = True,
) -> Solution:
    """Solve a problem, starting from the given params, which are not changed.

    Far from the solution, the augmented Lagrangian is minimised by L-BFGS in coordinates scaled by the curvature, with
    trust-region steps where the curvature is negative or L-BFGS is slow. Near the solution, Newton's method on the
    optimality conditions takes over. An untrained network gets there sooner after some `epochs` on mini-batches.

    Args:
        problem: The problem to solve.
        params: Start: a dict of tensors or an `nn.Module`.
        multipliers: Start of λ (per constraint or flat); zero when left out.
        tol: Relative KKT residual to reach (None: 1e-10 in float64, 1e-5 in float32).
        max_iter: Limit on the iterations of all phases together: mini-batches, passes of L-BFGS over the data, and
            Newton steps.
        max_seconds: Time limit, checked between steps; a step that has begun (a Hessian, for example) is finished.
        epochs: Passes over the data in mini-batches before the other phases: Adam on θ, gradient ascent on λ.
        batch_size: Samples per mini-batch.
        rate: First step size of Adam; it falls to zero over the epochs.
        seed: Seed of the order of the mini-batches.
        checkpoint: A file in which the state is saved after each epoch, block of iterations and Newton step. Called
            again with the same file, `fit` resumes from there (Adam's moving averages start again).
        show_progress: Show a line with the residual on a terminal.

    Returns:
        The solution. If a limit was reached first, a `NotConvergedWarning` is given; `solution.converged` says whether
        the point is still accepted as a solution.

    Raises:
        InfeasibleError: No point satisfies the constraints.
        UnboundedError: The objective is unbounded below.
    """
    parameters, theta = Parameters.of(params)
    program = Program.of(problem, parameters, theta)
    lam = torch.zeros_like(program.tau) if multipliers is None else program.flatten_multipliers(multipliers)
    check_gradients(program, program.rows.gradients(theta)[1])
    check_limits(max_iter, max_seconds)
    _check_batches(epochs, batch_size, rate, seed)
    limits = Limits(max_iter, max_seconds)
    file = None if checkpoint is None else Checkpoint.open(checkpoint, program)
    start = (None if file is None else file.load()) or FitState(theta, lam)

    def save(theta: Tensor, lam: Tensor, epochs: int, *phase: float) -> None:
        if file is not None:
            file.save(FitState(theta, lam, epochs, *phase))

    with progress("fit", None, show_progress) as report:
        if start.penalty is None and start.epochs < epochs:
            mini_batches = PrimalDual(program, epochs, batch_size, rate, seed, limits, report)
            start = FitState(*mini_batches.run(start.theta, start.lam, start.epochs, save))
        result = solve(
            program,
            start,
            limits,
            tol=tol,
            report=report,
            save=lambda theta, lam, *phase: save(theta, lam, start.epochs, *phase),
        )
    solution = Solution.of_program(program, result.theta, result.lam)
    infeasible = solution.feasibility()
    if infeasible is not None:
        infeasible.check()
    if result.reached:
        for samples in {id(table.samples): table.samples for table in program.rows.tables}.values():
            check_derivatives(samples, parameters, solution.theta)
    else:
        warn(
            f"`fit` stopped after {result.iterations} iterations ({result.stopped_by}), before reaching its tolerance. "
            f"The KKT residual is {solution.kkt.residual:.3g} ({solution.kkt}); it must be at most {result.goal:.1g}. "
            f"The point is {_describe(result, solution)}. {_advise(solution)}",
            NotConvergedWarning,
        )
    return solution


def _describe(result: Found, solution: Solution) -> str:
    """Describe the point at which an unfinished solve ended."""
    if result.negative_curvature is not None:
        lowest = result.negative_curvature[0]
        return f"a saddle point (the curvature along one direction is {lowest:.3g} in scaled coordinates, below 0)"
    return "nearly a solution" if solution.converged else "not a solution"


def _advise(solution: Solution) -> str:
    """Say what to do about an unfinished solve."""
    if solution.kinks and not solution.converged:
        return explain(solution.kinks)
    kkt = solution.kkt
    advice = "Raise max_iter or max_seconds, start nearer to the solution, or add a ridge if the curvature vanishes."
    if solution.converged or kkt.feasibility < max(kkt.stationarity, kkt.complementarity):
        return advice
    program = solution.program
    row = int(program.kinds.violation(-solution.scales.slack(solution.c)).argmax())
    return (
        f"It violates {program.names[row]!r} by {float(solution.c[row].abs()):.3g}; if no point satisfies the "
        f"constraints, loosen that bound. {advice}"
    )


def resolve_tolerance(tol: float | None, theta: Tensor) -> float:
    """Return the relative KKT residual to reach; None: 1e-10 in float64, 1e-5 in float32."""
    if tol is None:
        return 1e-10 if theta.dtype == torch.float64 else 1e-5
    return check_tolerance(tol)


def check_limits(max_iter: int, max_seconds: float | None) -> None:
    """Refuse limits that are not positive numbers."""
    timed = max_seconds is None or (isinstance(max_seconds, int | float) and max_seconds > 0)
    if not timed or (as_index(max_iter) or 0) < 1:
        raise InvalidInputError(
            f"The limits are max_iter={max_iter}, max_seconds={max_seconds}.",
            "Both must be positive, and max_iter an integer.",
            "No iteration could be made within these limits.",
            "Leave them out for the defaults.",
        )


def _check_batches(epochs: int, batch_size: int, rate: float, seed: int) -> None:
    integers = all(as_index(number) is not None for number in (epochs, batch_size, seed)) and abs(seed) < 2**31
    if not integers or epochs < 0 or batch_size < 1 or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
        raise InvalidInputError(
            f"The mini-batch phase of `fit` has epochs={epochs}, batch_size={batch_size}, rate={rate}, seed={seed}.",
            "It needs integers epochs ≥ 0, batch_size ≥ 1 and |seed| < 2³¹, and a finite rate > 0.",
            "These numbers do not describe passes over the data in mini-batches.",
            "Leave them out for no mini-batch phase, or set only epochs=20.",
        )


@dataclass
class Found:
    """The state of a solve; at the end, its result."""

    theta: Tensor
    lam: Tensor
    residual: float = float("inf")
    goal: float = 0.0  # the tolerance, or what rounding allows
    iterations: int = 0
    stopped_by: str = "max_iter"
    negative_curvature: tuple[float, Tensor] | None = None  # at a saddle: the curvature and its direction in √D·θ

    @property
    def reached(self) -> bool:
        """Whether the residual is within the tolerance and the point is not a saddle."""
        return self.residual <= self.goal and self.negative_curvature is None


def solve(
    program: Program,
    start: FitState,
    limits: Limits,
    *,
    tol: float | None = None,
    report: Reporter = lambda done, text="": None,
    save: Callable[..., None] = lambda *state: None,
) -> Found:
    """Solve a compiled program: by Newton's method if the start is near, else after augmented-Lagrangian rounds.

    Args:
        program: The program.
        start: Where to start.
        limits: Limits on iterations and time.
        tol: Relative KKT residual to reach (None: the default).
        report: Called with the iterations used and a text.
        save: Called after every Newton step and every block of other iterations, with θ and λ, and with the penalty
            and accuracy of the augmented Lagrangian once it is used.
    """
    goal = resolve_tolerance(tol, start.theta)
    best, solver = Found(start.theta, start.lam), SolverSeries(_estimate_curvature)
    phase = () if start.penalty is None else (start.penalty, start.accuracy)
    _polish(program, best, goal, limits, report, solver, lambda at: save(at.theta, at.lam, *phase))
    rounds = None
    if not best.reached:
        rounds = AugmentedLagrangian(program, best.theta, best.lam, limits, report, save)
        rounds.penalty, rounds.accuracy = start.penalty or rounds.penalty, start.accuracy or rounds.accuracy
    waited = 0
    trial = best
    while rounds is not None and not best.reached and limits.find_reached() is None:
        if trial.negative_curvature is not None:
            rounds.escape(trial.negative_curvature[1])
        if not rounds.run_round():
            continue  # diverged; the next round has a larger penalty
        phase = rounds.penalty, rounds.accuracy
        save(rounds.theta, rounds.lam, *phase)
        trial = Found(rounds.theta, rounds.lam)
        _polish(program, trial, goal, limits, report, solver, lambda at, phase=phase: save(at.theta, at.lam, *phase))
        was_saddle, is_saddle = best.negative_curvature is not None, trial.negative_curvature is not None
        escaped = was_saddle and not is_saddle
        waited = 0 if escaped or trial.residual < 0.5 * best.residual else waited + 1
        if escaped or (trial.residual < best.residual and (was_saddle or not is_saddle)):
            best = trial
        if not best.reached and (waited > PATIENCE or rounds.raised > PATIENCE + 2):
            rounds.check_feasible(goal)
            best.stopped_by = "no further progress"
            break
    else:
        best.stopped_by = limits.find_reached() or "converged"
    best.iterations = limits.used
    if rounds is None or rounds.rounds == 0:
        save(best.theta, best.lam)
    elif best.reached:
        save(best.theta, best.lam, rounds.penalty, rounds.accuracy)
    else:  # a later call continues where the rounds stopped, even if an earlier point has a smaller residual
        save(rounds.theta, rounds.lam, rounds.penalty, rounds.accuracy)
    return best


def _estimate_curvature(H: Curvature) -> Tensor | None:
    """Return a matrix like H, (d, d), where there is a cheap one; else the solver chooses."""
    return H.metric_matrix(0) if H.has_gauss_newton else None


def _measure(program: Program, theta: Tensor, lam: Tensor, H: Curvature) -> tuple[KKT, Tensor, Tensor]:
    """Return the KKT residuals at (θ, λ), in the units of a Hessian nearby, with f and its gradients."""
    f, J = program.rows.gradients(theta)
    scales = Scales.of(theta, J, H.own, H.noise)
    kkt = residuals(scales, program.weights(lam) @ J, f[1:] - program.tau, lam, program.kinds)
    if not bool(torch.isfinite(f).all()):  # outside the domain, where derivatives may be finite all the same
        kkt = replace(kkt, stationarity=float("nan"))
    return kkt, f, J


def _newton(
    program: Program, at: Found, goal: float, limits: Limits, report: Reporter, solver: SolverSeries,
    save: Callable[[Found], None],
) -> bool:  # fmt: skip
    """Run Newton's method on the KKT system while the residual falls; `at` is moved to the best point.

    Where the Hessian is assembled it continues below the tolerance until rounding stops it, so that weak constraints
    can be told from nearly weak ones. Elsewhere that would be expensive, and it stops at the tolerance.

    Returns:
        Whether a factorisation has shown that the Lagrangian is convex along the active constraints.
    """
    units = H = Curvature(program.rows, at.theta, program.weights(at.lam))
    kkt, f, J = _measure(program, at.theta, at.lam, units)
    at.residual, at.goal = kkt.residual, max(goal, 16 * kkt.rounding)
    far = not H.cheap and (at.residual > _NEAR or (H.has_gauss_newton and kkt.stationarity > _NEARER))
    if far or not _is_finite(kkt):
        return False  # far away, where a step is expensive and seldom good
    finest, d, convex = torch.finfo(at.theta.dtype).eps ** 0.672, len(at.theta), False
    z, residual = torch.cat([at.theta, at.lam])[None], torch.tensor([kkt.residual], dtype=torch.float64)
    trial = kkt, f, J

    def step(_: Tensor) -> tuple[Tensor, Tensor]:
        no_step = torch.zeros_like(z), torch.tensor([False])
        if limits.find_reached() is not None:
            return no_step
        limits.used += 1
        report(limits.used, f"(Newton, residual {at.residual:.1e})")
        solver.tolerance = max(finest, min(1e-3, 1e-2 * at.residual))  # a rough step is enough far from the solution
        try:
            gradient, chosen = program.weights(at.lam) @ J, None if H.cheap else solver
            omega, lam = kkt_step(
                gradient, H, f[1:] - program.tau, J[1:], at.lam, program.kinds, program.kinds.has_force(at.lam), chosen
            )
        except DegenerateError:
            return no_step
        except NotConvergedError:
            solver.restart()
            return no_step
        return torch.cat([omega, lam - at.lam])[None], torch.tensor([True])

    def judge(_: Tensor, points: Tensor) -> Tensor:
        nonlocal trial
        trial = _measure(program, points[0, :d], points[0, d:], units)
        return torch.tensor([trial[0].residual if _is_finite(trial[0]) else float("inf")], dtype=torch.float64)

    def proceed(_: Tensor, moved: Tensor, length: Tensor) -> Tensor:
        nonlocal f, J, H, units, convex
        if not bool(moved):
            stop = float(length) < _SHORTEST or at.reached or limits.find_reached() is not None
            convex = stop and H.cheap
            return torch.tensor([not stop])
        kkt, f, J = trial
        slow = kkt.residual > _SLOW * at.residual
        at.theta, at.lam, at.residual = z[0, :d].clone(), z[0, d:].clone(), kkt.residual
        at.goal = max(goal, 16 * kkt.rounding)
        save(at)
        if not H.cheap and (at.reached or slow):
            return torch.tensor([False])
        H = Curvature(program.rows, at.theta, program.weights(at.lam), assumed=None if H.cheap else units.own)
        units = H if H.cheap else units
        return torch.tensor([True])

    damped_newton(z, residual, step, judge, proceed, sys.maxsize)
    return convex


def _polish(
    program: Program, at: Found, goal: float, limits: Limits, report: Reporter, solver: SolverSeries,
    save: Callable[[Found], None],
) -> None:  # fmt: skip
    """Run Newton's method from `at`; where it ends at a stationary point, check whether that is a saddle.

    `save(at)` is called after every step.
    """
    if _newton(program, at, goal, limits, report, solver, save) or not at.residual <= at.goal:
        return
    H = Curvature(program.rows, at.theta, program.weights(at.lam))
    G = program.rows.gradients(at.theta)[1][1:][program.kinds.has_force(at.lam)]
    lowest, direction = lanczos(H, G, H.scale().sqrt())
    if lowest < _SADDLE:
        at.negative_curvature = lowest, direction


def _is_finite(kkt: KKT) -> bool:
    return kkt.residual < float("inf")  # False for NaN too
