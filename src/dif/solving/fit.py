"""Solving a problem: augmented Lagrangian with L-BFGS from afar, Newton on the KKT system near the solution."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dif.errors import DegenerateError, InvalidInputError, NotConvergedError, NotConvergedWarning, warn
from dif.evaluation.hessian import Curvature
from dif.evaluation.kinks import explain
from dif.evaluation.loss_checks import check_derivatives
from dif.evaluation.program import Program
from dif.linalg.conjugate_gradients import SolverSeries
from dif.linalg.lanczos import lanczos
from dif.optimality.kkt_system import kkt_step
from dif.optimality.residuals import KKT, Scales, residuals, violations
from dif.optimality.solution import Solution, check_gradients, checked_tolerance
from dif.problem.parameters import Parameters
from dif.problem.problem import Problem
from dif.runtime.inputs import as_index
from dif.runtime.limits import Limits
from dif.runtime.progress import Reporter, progress
from dif.solving.augmented_lagrangian import PATIENCE, AugmentedLagrangian
from dif.solving.checkpoint import Checkpoint, Standing
from dif.solving.minibatch import PrimalDual
from dif.solving.newton import damped_newton

_SHORTEST = 1e-3  # of a Newton step
_SLOW = 0.5  # by which a step must shrink the residual to be worth its price there
_NEAR = 1e-3  # residual, in units, below which Newton's method is tried where the Hessian is not assembled


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
    """Solve the problem from the given params, which are not changed.

    From afar the augmented Lagrangian is minimised by L-BFGS in coordinates that curve alike, with trust-region steps
    where the curvature is negative or the descent slow; near the solution Newton's method on the optimality conditions
    takes over. A network that was never trained gets there sooner after some `epochs` on mini-batches.

    Args:
        problem: What to solve.
        params: Start: a dict of tensors or an `nn.Module`.
        multipliers: Start of λ (per constraint or flat); zero when left out.
        tol: Relative KKT residual to reach (None: 1e-10 in float64, 1e-5 in float32).
        max_iter: Limit on iterations, all phases together: sweeps of L-BFGS over the data, and Newton steps.
        max_seconds: Limit on time, looked at between steps: one that has begun (a Hessian, say) is finished.
        epochs: Passes over the data in mini-batches before all that: Adam on θ, ascent on λ.
        batch_size: Samples per mini-batch.
        rate: First step size of Adam; it falls to zero over the epochs.
        seed: Of the order of the mini-batches.
        checkpoint: A file that keeps where the work stands (after each epoch and round). Called again with the same
            file, `fit` goes on from there (Adam's averages begin anew).
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
    check_limits(max_iter, max_seconds)
    _check_batches(epochs, batch_size, rate, seed)
    limits = Limits(max_iter, max_seconds)
    file = None if checkpoint is None else Checkpoint.at(checkpoint, program)
    begun = (None if file is None else file.load()) or Standing(theta, lam)

    def keep(theta: Tensor, lam: Tensor, epochs: int, *others: float) -> None:
        if file is not None:
            file.save(Standing(theta, lam, epochs, *others))

    with progress("fit", None, show_progress) as report:
        if begun.penalty is None and begun.epochs < epochs:
            warm = PrimalDual(program, epochs, batch_size, rate, seed, limits, report)
            begun = Standing(*warm.run(begun.theta, begun.lam, begun.epochs, keep))
        found = solve(
            program,
            begun,
            limits,
            tol=tol,
            report=report,
            keep=lambda *now: keep(now[0], now[1], begun.epochs, *now[2:]),
        )
    solution = Solution.of_program(program, found.theta, found.lam)
    solution.check_feasible()
    if found.reached:
        for samples in {id(table.samples): table.samples for table in program.rows.tables}.values():
            check_derivatives(samples, parameters, solution.theta)
    else:
        warn(
            f"fit stopped before its tolerance: measured residual {solution.kkt.residual:.3g} ({solution.kkt}), "
            f"allowed {found.goal:.1g}, after {found.iterations} iterations ({found.stopped_by}). The point is "
            f"{_verdict(found, solution)}. {_cure(solution)}",
            NotConvergedWarning,
        )
    return solution


def _verdict(found: Found, solution: Solution) -> str:
    if found.down is not None:
        return f"a saddle (curvature {found.down[0]:.3g} along one direction, in scaled coordinates; allowed ≥ 0)"
    return "nearly a solution" if solution.converged else "not a solution"


def _cure(solution: Solution) -> str:
    if solution.kinks and not solution.converged:
        return explain(solution.kinks)
    kkt, again = solution.kkt, "Raise max_iter or max_seconds, start nearer, or add a ridge if the curvature vanishes."
    if solution.converged or kkt.feasibility < max(kkt.stationarity, kkt.complementarity):
        return again
    program = solution.program
    row = int(violations(solution.scales, solution.c, program.kinds).argmax())
    return (
        f"It violates {program.names[row]} by {float(solution.c[row].abs()):.3g}: perhaps no point satisfies the "
        f"constraints (loosen that bound). {again}"
    )


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


def _check_batches(epochs: int, batch_size: int, rate: float, seed: int) -> None:
    whole = all(as_index(number) is not None for number in (epochs, batch_size, seed)) and abs(seed) < 2**31
    if not whole or epochs < 0 or batch_size < 1 or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
        raise InvalidInputError(
            "mini-batch phase of fit",
            measured=f"epochs={epochs}, batch_size={batch_size}, rate={rate}, seed={seed}",
            threshold="epochs ≥ 0, batch_size ≥ 1, rate > 0, an integer seed",
            meaning="There is no such phase.",
            cure="Leave them out for none at all, or say epochs=20.",
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
    down: tuple[float, Tensor] | None = None  # at a saddle: the curvature that is negative, and along what in √D·θ

    @property
    def reached(self) -> bool:
        """Whether the residual is within the tolerance, at what may be a minimum."""
        return self.residual <= self.goal and self.down is None


def solve(
    program: Program,
    begun: Standing,
    limits: Limits,
    *,
    tol: float | None = None,
    report: Reporter = lambda done, text="": None,
    keep: Callable[..., None] = lambda *standing: None,
) -> Found:
    """(θ, λ) of a compiled program: Newton at once if the start is near, else augmented-Lagrangian rounds before it."""
    goal = default_tolerance(begun.theta) if tol is None else checked_tolerance(tol)
    best, solver = Found(begun.theta, begun.lam), SolverSeries()
    _approach(program, best, goal, limits, report, solver)
    rounds = None
    if not best.reached:
        rounds = AugmentedLagrangian(program, best.theta, best.lam, limits, report, keep)
        rounds.penalty, rounds.accuracy = begun.penalty or rounds.penalty, begun.accuracy or rounds.accuracy
    waited = 0
    trial = best
    while rounds is not None and not best.reached and limits.spent() is None:
        if trial.down is not None:
            rounds.escape(trial.down[1])
        if not rounds.round():
            continue  # ran away; the next round has a stiffer penalty
        keep(rounds.theta, rounds.lam, rounds.penalty, rounds.accuracy)
        trial = Found(rounds.theta, rounds.lam)
        _approach(program, trial, goal, limits, report, solver)
        left = best.down is not None and trial.down is None
        waited = 0 if left or trial.residual < 0.5 * best.residual else waited + 1
        if left or (trial.residual < best.residual and (trial.down is None or best.down is not None)):
            best = trial
        if not best.reached and (waited > PATIENCE or rounds.raised > PATIENCE + 2):
            rounds.judge(goal)
            best.stopped_by = "no further progress"
            break
    else:
        best.stopped_by = limits.spent() or "converged"
    best.iterations = limits.used
    others = (rounds.penalty, rounds.accuracy) if rounds is not None and rounds.rounds > 0 else ()
    keep(best.theta, best.lam, *others)
    return best


def _judge(program: Program, theta: Tensor, lam: Tensor, H: Curvature) -> tuple[KKT, Tensor, Tensor]:
    """The residuals at (θ, λ), f and its gradients, in the units of a Hessian nearby."""
    f, J = program.rows.gradients(theta)
    scales = Scales.of(theta, J, H.own, H.noise)
    kkt = residuals(scales, program.weights(lam) @ J, f[1:] - program.tau, lam, program.kinds)
    if not bool(torch.isfinite(f).all()):  # outside the domain, where derivatives may well be finite
        kkt = replace(kkt, stationarity=float("nan"))
    return kkt, f, J


def _newton(program: Program, at: Found, goal: float, limits: Limits, report: Reporter, solver: SolverSeries) -> bool:
    """Newton's method on the KKT system while the residual falls; `at` is moved to the best point.

    After the tolerance is reached it goes on until rounding stops it, so that weak constraints can be told from
    nearly weak ones; where the Hessian is not assembled that would be expensive, and it stops.

    Returns:
        Whether a factorisation has shown that the Lagrangian is convex along the rows that hold.
    """
    units = H = Curvature(program.rows, at.theta, program.weights(at.lam))
    kkt, f, J = _judge(program, at.theta, at.lam, units)
    at.residual, at.goal = kkt.residual, max(goal, 16 * kkt.rounding)
    if (not H.cheap and at.residual > _NEAR) or not _finite(kkt):
        return False  # far away, where a step is expensive and seldom good
    exact, d, convex = torch.finfo(at.theta.dtype).eps ** 0.672, len(at.theta), False
    z, residual = torch.cat([at.theta, at.lam])[None], torch.tensor([kkt.residual], dtype=torch.float64)
    trial = kkt, f, J

    def step(_: Tensor) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros_like(z), torch.tensor([False])
        if limits.spent() is not None:
            return nothing
        limits.used += 1
        report(limits.used, f"(Newton, residual {at.residual:.1e})")
        solver.tolerance = max(exact, min(1e-3, 1e-2 * at.residual))  # only as exact as the step deserves
        try:
            gradient, chosen = program.weights(at.lam) @ J, None if H.cheap else solver
            made = kkt_step(gradient, H, f[1:] - program.tau, J[1:], at.lam, program.kinds, at.lam > 0, chosen)
        except DegenerateError:
            return nothing
        except NotConvergedError:
            solver.restart()
            return nothing
        return torch.cat([made.omega, made.lam - at.lam])[None], torch.tensor([True])

    def judge(_: Tensor, points: Tensor) -> Tensor:
        nonlocal trial
        trial = _judge(program, points[0, :d], points[0, d:], units)
        return torch.tensor([trial[0].residual if _finite(trial[0]) else float("inf")], dtype=torch.float64)

    def proceed(_: Tensor, moved: Tensor, length: Tensor) -> Tensor:
        nonlocal f, J, H, units, convex
        if not bool(moved):
            stop = float(length) < _SHORTEST or at.reached or limits.spent() is not None
            convex = stop and H.cheap
            return torch.tensor([not stop])
        kkt, f, J = trial
        slow = kkt.residual > _SLOW * at.residual
        at.theta, at.lam, at.residual = z[0, :d].clone(), z[0, d:].clone(), kkt.residual
        at.goal = max(goal, 16 * kkt.rounding)
        if not H.cheap and (at.reached or slow):
            return torch.tensor([False])
        H = Curvature(program.rows, at.theta, program.weights(at.lam), assumed=None if H.cheap else units.own)
        units = H if H.cheap else units
        return torch.tensor([True])

    damped_newton(z, residual, step, judge, proceed, sys.maxsize)
    return convex


def _approach(program: Program, at: Found, goal: float, limits: Limits, report: Reporter, solver: SolverSeries) -> None:
    """Newton; and where it ends with the conditions of first order alone, a look whether that is a saddle."""
    if _newton(program, at, goal, limits, report, solver) or not at.residual <= at.goal:
        return
    H = Curvature(program.rows, at.theta, program.weights(at.lam))
    G = program.rows.gradients(at.theta)[1][1:][program.kinds.pushing(at.lam)]
    lowest, direction = lanczos(H, G, H.scale().sqrt())
    if lowest < -1e-6:
        at.down = lowest, direction


def _finite(kkt: KKT) -> bool:
    return kkt.residual < float("inf")  # false for NaN too
