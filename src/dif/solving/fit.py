"""Solve a problem: the augmented Lagrangian far from the solution, Newton's method on the KKT system near it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.checks import check_derivatives, explain
from dif.derivatives.fingerprint import fingerprint_program
from dif.derivatives.hessian import Curvature
from dif.derivatives.program import Program
from dif.errors import DegenerateError, InfeasibleError, InvalidInputError, NotConvergedError, NotConvergedWarning, warn
from dif.linalg.anderson import Extrapolation
from dif.linalg.lanczos import lanczos
from dif.linalg.solvers import SolverSeries
from dif.optimality.judgement import ENDLESS, KKT, Scales, falls_without_end, judge_multipliers, residuals
from dif.optimality.kkt_system import KKTSystem, kkt_step
from dif.optimality.solution import Solution, check_gradients, describe_program
from dif.problem.parameters import Parameters
from dif.problem.problem import Problem
from dif.runtime.archive import check_folder, read_archive, write_archive
from dif.runtime.inputs import check_count, check_number, expect_path
from dif.runtime.work import Limits, Reporter, progress
from dif.solving.augmented_lagrangian import PATIENCE, AugmentedLagrangian
from dif.solving.batched_newton import DECREASE

_KIND = "fit checkpoint"  # of file


@dataclass(frozen=True)
class FitState:
    """The state of a fit: θ, λ and how far the augmented Lagrangian is."""

    theta: Tensor
    lam: Tensor
    penalty: float | None = None  # of the augmented Lagrangian; None before its first round
    accuracy: float | None = None  # of its next round


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A file with the state of a fit of one program."""

    path: Path
    program: Program

    @classmethod
    def open(cls, path: str | os.PathLike[str], program: Program) -> Checkpoint:
        """Return the checkpoint at a path; its folder must exist, the file need not."""
        check_folder(expect_path(path, "checkpoint"))
        return cls(Path(path), program)

    @cached_property
    def _about(self) -> dict[str, Any]:
        """What must agree between the file and the program."""
        return {**describe_program(self.program), "problem": fingerprint_program(self.program).hex()}

    def save(self, state: FitState) -> None:
        """Write the file."""
        numbers = {name: value for name, value in vars(state).items() if not isinstance(value, Tensor)}
        write_archive(self.path, _KIND, {"theta": state.theta, "lam": state.lam}, {**self._about, "state": numbers})

    def load(self) -> FitState | None:
        """Return the stored state; None if there is no file, or (with a warning) one of a changed problem."""
        if not self.path.exists():
            return None
        cure = "Name another file, or delete this one to start from the beginning."
        arrays, about = read_archive(self.path, _KIND, cure)
        different = [name for name, value in self._about.items() if about[name] != value]
        if different not in ([], ["problem"]):
            raise InvalidInputError(
                f"The checkpoint {os.fspath(self.path)!r} belongs to a fit with other {' and '.join(different)}. {cure}"
            )
        if different:
            warn(
                f"The checkpoint {os.fspath(self.path)!r} belongs to another problem: its data, weights, bounds or "
                "code have changed. `fit` starts from the beginning and overwrites it.",
                UserWarning,
            )
            return None
        like = self.program.parameters
        theta, lam = (torch.from_numpy(arrays[name]).to(like.device, like.dtype) for name in ("theta", "lam"))
        return FitState(theta, lam, **about["state"])


_SHORTEST = 1e-3  # smallest fraction of a Newton step that is tried
_WORTH = 1.5  # price of a new Hessian, in units of the steps that it should save
_RENEWED = 1e-6  # factor by which the residual must fall for the noise to be measured anew
_CLEAN = 0.83  # power of the rounding error that is the residual at which steps end: 1e-13 in float64
_SLOW = 0.5  # factor by which a step must reduce the residual to continue where the Hessian is not assembled
_NEAR = 0.03  # relative KKT residual below which Newton's method is tried where the Hessian is not assembled
_NEARER = 1e-3  # the same for the stationarity alone, where L-BFGS has Gauss–Newton coordinates, in which it is fast
_ROUNDING = 1e-6  # relative size of a negative multiplier of an inequality that counts as zero
_DESCENT = 200  # steps from the start, where the augmented Lagrangian has led nowhere
_DAMPED = 1e-4  # first damping of such a step, relative to the mean curvature; its inverse is the last
_SADDLE = -1e-6  # curvature in scaled coordinates below which a stationary point counts as a saddle


def fit(
    problem: Problem,
    params: Any,
    *,
    multipliers: Any = None,
    tol: float | None = None,
    max_iter: int = 20_000,
    max_seconds: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    show_progress: bool = True,
) -> Solution:
    """Solve a problem, starting from the given params, which are not changed.

    Far from the solution, the augmented Lagrangian is minimised by L-BFGS in coordinates scaled by the curvature, with
    trust-region steps where the curvature is negative or L-BFGS is slow. Near the solution, Newton's method on the
    optimality conditions takes over. Where that ends infeasible, or worse than a feasible start, steps of sequential
    quadratic programming are made from the start. A network that is trained on mini-batches first gets there sooner:
    `run = dif.Training(problem, model, dif.Adam(0.01), epochs=20).run()`, then
    `dif.fit(problem, run.params, multipliers=run.multipliers)`.

    Args:
        problem: The problem to solve.
        params: Start: a dict of tensors or an `nn.Module`.
        multipliers: Start of λ (per constraint or flat), ≥ 0 for inequalities; zero when left out.
        tol: Relative KKT residual to reach (None: 1e-10 in float64, 1e-5 in float32).
        max_iter: Limit on the iterations of both phases together: passes of L-BFGS over the data, and Newton steps.
        max_seconds: Time limit, checked between steps; a step that has begun (a Hessian, for example) is finished.
        checkpoint: A file in which the state is saved after each block of iterations and each Newton step. Called
            again with the same file, `fit` resumes from there.
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
    lam = read_multipliers(program, multipliers)
    known = program.rows.gradients(theta)
    check_gradients(program, known[1])
    check_limits(max_iter, max_seconds)
    limits = Limits(max_iter, max_seconds)
    file = None if checkpoint is None else Checkpoint.open(checkpoint, program)
    loaded = None if file is None else file.load()
    start, known = loaded or FitState(theta, lam), None if loaded else known

    def save(theta: Tensor, lam: Tensor, *phase: float) -> None:
        if file is not None:
            file.save(FitState(theta, lam, *phase))

    with progress("fit", None, show_progress) as report:
        result = solve(program, start, limits, tol=tol, report=report, save=save, known=known)
    solution = Solution.of_program(program, result.theta, result.lam)
    if program.m and (multipliers := judge_multipliers(solution)).error is InfeasibleError:
        raise multipliers.refusal()
    if result.reached:
        for samples in {id(table.samples): table.samples for table in program.rows.tables}.values():
            check_derivatives(samples, parameters, solution.theta, points=2)
    else:
        _warn_unfinished(result, solution)
    return solution


def _warn_unfinished(result: Found, solution: Solution) -> None:
    """Say where a solve ended that has not reached its tolerance, and what to do about it."""
    kkt, program, point = solution.kkt, solution.program, "not a solution"
    advice = "Raise max_iter or max_seconds, start nearer to the solution, or add a ridge if the curvature vanishes."
    if solution.converged:
        point = "nearly a solution"
    elif falls_without_end(solution):
        advice = f"{ENDLESS}: there is no minimum. Add a ridge, or bounds on the parameters."
    elif solution.kinks:
        advice = explain(solution.kinks)
    elif kkt.feasibility >= max(kkt.stationarity, kkt.complementarity):
        row = int(program.kinds.violation(-solution.scales.steps(solution.c, solution.lam)[0]).argmax())
        violated = f"It violates {program.names[row]!r} by {float(solution.c[row].abs()):.3g}"
        advice = f"{violated}; if no point satisfies the constraints, loosen that bound. {advice}"
    if result.negative_curvature is not None:
        lowest = result.negative_curvature[0]
        point = f"a saddle point (the curvature along one direction is {lowest:.3g} in scaled coordinates, below 0)"
    warn(
        f"`fit` stopped after {result.iterations} iterations ({result.stopped_by}), before reaching its tolerance. "
        f"The KKT residual is {kkt.residual:.3g} ({kkt}); it must be at most {result.goal:.1g}. "
        f"The point is {point}. {advice}",
        NotConvergedWarning,
    )


def resolve_tolerance(tol: float | None, theta: Tensor) -> float:
    """Return the relative KKT residual to reach; None: 1e-10 in float64, 1e-5 in float32."""
    default = 1e-10 if theta.dtype == torch.float64 else 1e-5
    return default if tol is None else check_number(tol, "tol")


def check_limits(max_iter: int, max_seconds: float | None) -> None:
    """Refuse limits that are not positive numbers."""
    check_count(max_iter, "max_iter")
    if max_seconds is not None and max_seconds != float("inf"):
        check_number(max_seconds, "max_seconds")


def read_multipliers(program: Program, multipliers: Any) -> Tensor:
    """Return the λ to start from, (m,): zero for None; refuse negative ones of inequalities, except for rounding."""
    if multipliers is None:
        return torch.zeros_like(program.tau)
    lam = program.flatten_multipliers(multipliers)
    negative = program.kinds.inadmissible(lam) & (lam < -_ROUNDING * (1 + lam.norm()))
    if bool(negative.any()):
        row = int(negative.nonzero()[0])
        raise InvalidInputError(
            f"The multiplier of the inequality {program.names[row]!r} must be ≥ 0, not {float(lam[row]):g}."
        )
    return program.kinds.project(lam)


@dataclass
class Found:
    """The state of a solve; at the end, its result."""

    theta: Tensor
    lam: Tensor
    residual: float = float("inf")
    goal: float = 0.0  # the tolerance, or what rounding allows
    iterations: int = 0
    stopped_by: str = ""
    negative_curvature: tuple[float, Tensor] | None = None  # at a saddle: the curvature and its direction in √D·θ
    f: Tensor = field(init=False, repr=False, compare=False)  # the rows at θ, once they are measured

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
    known: tuple[Tensor, Tensor] | None = None,
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
        known: The rows and their gradients at the start, if they were computed before.
    """
    known = known or program.rows.gradients(start.theta)
    phase = () if start.penalty is None else (start.penalty, start.accuracy)
    newton = Newton(program, resolve_tolerance(tol, start.theta), limits, report, save, phase)
    end = best = newton.polish(Found(start.theta, start.lam), known)
    if not best.reached:
        rounds = AugmentedLagrangian(program, best.theta, best.lam, newton.H, limits, report, save)
        rounds.penalty, rounds.accuracy = start.penalty or rounds.penalty, start.accuracy or rounds.accuracy
        best = _alternate(newton, rounds, best)
        # a later call continues where the rounds stopped, even if an earlier point has a smaller residual
        end = best if best.reached else rounds
    if limits.find_reached() is None and newton.H.cheap and _ended_badly(program, known[0], best):
        descent = newton.polish(newton.descend(Found(start.theta, start.lam), *known))
        if descent.reached or descent.residual < best.residual:
            end = best = descent
    best.iterations, best.stopped_by = limits.used, best.stopped_by or limits.find_reached() or "converged"
    save(end.theta, end.lam, *newton.phase)
    return best


def _ended_badly(program: Program, before: Tensor, end: Found) -> bool:
    """Return whether a solve ended unfinished and infeasible, or worse than at a feasible start with rows `before`."""
    if not program.m:
        return False
    rounding = torch.finfo(before.dtype).eps ** 0.5 * (1 + program.tau.abs())
    feasible, met = (bool((program.kinds.violation(f[1:] - program.tau) <= rounding).all()) for f in (before, end.f))
    worse = float(end.f[0] - before[0]) > float(rounding.min()) * float(before[0].abs())
    return (not end.reached and not met) or (feasible and (worse or not met))


def _alternate(newton: Newton, rounds: AugmentedLagrangian, best: Found) -> Found:
    """Alternate rounds of the augmented Lagrangian and Newton's method; return the best point."""
    waited, trial = 0, best
    while not best.reached and newton.limits.find_reached() is None:
        if trial.negative_curvature is not None:
            rounds.escape(trial.negative_curvature[1])
        finished, newton.phase = rounds.run_round(), (rounds.penalty, rounds.accuracy)
        if not finished:
            continue  # diverged; the next round has a larger penalty
        newton.save(rounds.theta, rounds.lam, *newton.phase)
        trial = newton.polish(Found(rounds.theta, rounds.lam))
        was_saddle, is_saddle = best.negative_curvature is not None, trial.negative_curvature is not None
        escaped = was_saddle and not is_saddle
        waited = 0 if escaped or trial.residual < 0.5 * best.residual else waited + 1
        if escaped or (trial.residual < best.residual and (was_saddle or not is_saddle)):
            best = trial
        if not best.reached and (waited > PATIENCE or rounds.raised > PATIENCE + 2):
            rounds.check_feasible(newton.goal)
            best.stopped_by = "no further progress"
            break
    return best


@dataclass
class Newton:
    """Newton's method on the KKT system of a program, from points near a solution."""

    program: Program
    goal: float  # relative KKT residual to reach
    limits: Limits
    report: Reporter
    save: Callable[..., None]  # called after every step with θ, λ and `phase`
    phase: tuple[float | None, ...] = ()  # the penalty and accuracy of the augmented Lagrangian, once it is used
    solver: SolverSeries = field(
        default_factory=lambda: SolverSeries(lambda H: H.metric_matrix(0) if H.has_gauss_newton else None)
    )
    H: Curvature = field(init=False)  # where the last steps began
    own: Tensor = field(init=False)  # (d,) the curvature of each coordinate at a point nearby, in which, together with
    noise: float = field(init=False)  # the noise there, residuals are measured
    system: KKTSystem | None = field(default=None, init=False)  # of the last step

    def polish(self, at: Found, known: tuple[Tensor, Tensor] | None = None) -> Found:
        """Iterate from `at`; return the best point, and whether that is a saddle where it is stationary.

        `known` has the rows and their gradients at the start, if they were computed before.
        """
        at, convex = self._iterate(at, known)
        if not convex and at.residual <= at.goal:
            H = self._curvature(at)
            G = self.program.rows.gradients(at.theta)[1][1:][self.program.kinds.has_force(at.lam)]
            lowest, direction = lanczos(H.product, G, H.scale().sqrt())
            at.negative_curvature = (lowest, direction) if lowest < _SADDLE else None
        return at

    def descend(self, at: Found, f: Tensor, J: Tensor) -> Found:
        """Go from a point with rows f towards a solution by sequential quadratic programming; return where it ends.

        The steps stay near the linearised constraints. They are damped until the model is convex, and shortened until
        the objective, with a price on violations above the multipliers, falls as predicted (Han and Powell). From a
        feasible point a step always exists.
        """
        program, kinds, damping = self.program, self.program.kinds, 0.0
        price, H = torch.zeros_like(at.lam), self._curvature(at)
        for _ in range(_DESCENT):
            at.f, unit = f, float(H.scale().mean())
            move = self._step(at, J, H.with_rows(J[:0], J[:0, 0], damping))
            if move is None:
                damping = max(10 * damping, _DAMPED * unit)
                if damping > unit / _DAMPED:
                    break
                continue
            omega, change = move.tensor_split([len(at.theta)])
            price = torch.maximum(price, 2 * (at.lam + change).abs())
            cost, length = price @ kinds.violation(f[1:] - program.tau), 1.0
            before, predicted = f[0] + cost, float(J[0] @ omega - cost)
            while length > _SHORTEST:
                trial = program.rows.values(at.theta + length * omega)
                merit = trial[0] + price @ kinds.violation(trial[1:] - program.tau)
                if float(merit - before) <= 1e-4 * length * predicted:
                    break
                length *= 0.5
            else:
                break
            at = Found(at.theta + length * omega, kinds.project(at.lam + length * change))
            if -predicted <= torch.finfo(f.dtype).eps ** 0.75 * (1 + float(before.abs())):
                break
            if length == 1.0:
                damping = 0.1 * damping if damping > _DAMPED * unit else 0.0
            (f, J), H = program.rows.gradients(at.theta), self._curvature(at)
        return at

    def _curvature(self, at: Found, **options: Any) -> Curvature:
        return Curvature(self.program.rows, at.theta, self.program.weights(at.lam), **options)

    def _iterate(self, at: Found, known: tuple[Tensor, Tensor] | None) -> tuple[Found, bool]:
        """Make steps while the residual falls.

        Where the Hessian is assembled, it is kept while the steps still expected with it cost less than a new one, and
        the steps continue below the tolerance, so that weak constraints can be told from nearly weak ones. Elsewhere
        that would be expensive, and they stop at the tolerance.

        Returns:
            The best point, and whether a factorisation has shown that the Lagrangian is convex there along the active
            constraints.
        """
        only, past = torch.tensor([0]), None  # `past` has the steps with a Hessian that is kept
        clean = torch.finfo(at.theta.dtype).eps ** _CLEAN
        self.H = H = self._curvature(at)
        self.own, self.noise = H.own, H.noise
        kkt, scales, J = self._measure(at, known)
        far = not H.cheap and (at.residual > _NEAR or (H.has_gauss_newton and kkt.stationarity > _NEARER))
        if far or not at.residual < float("inf"):
            return at, False  # far away, where a step is expensive and seldom good
        mark = at.residual  # when the noise was measured last
        while True:
            z, move = torch.cat([at.theta, at.lam])[None], self._step(at, J, H, past is not None)
            step = move if past is None or move is None else past.combine(only, z, move[None])[0]
            if step is not None and move is not None:  # a multiplier that should be 0 is not left at its rounding
                step[len(J[0]) :] = torch.where(z[0] + move == 0, -z[0], step)[len(J[0]) :]
            found = None if step is None else self._search(at, step, whole=past is not None or at.reached)
            if found is not None:
                before, (at, scales, J) = at.residual, found
                self.save(at.theta, at.lam, *self.phase)
                if at.residual <= _RENEWED * mark:
                    self.noise = H.noise
                    _, scales, J = self._measure(at, (at.f, J))
                    if at.residual > 0.5 * mark:  # it only fell in the old units, as on the way to infinity
                        return at, False
                    mark = at.residual
                if H.cheap and at.residual <= max(scales.floor, clean):
                    return at, True
                if not H.cheap and (at.reached or at.residual > _SLOW * before):
                    return at, False
                steps = math.log(clean / at.residual) / math.log(min(at.residual / before, 0.999))  # at this rate
                if H.cheap and steps < _WORTH * H.price:
                    if past is None and move is not None:
                        past = Extrapolation(1, z.shape[1], partial(scales.lengths, G=J[1:]))
                        past.combine(only, z, move[None])
                    continue
            elif past is None or at.reached or self.limits.find_reached() is not None:
                return at, move is not None and H.cheap
            H, past = self._curvature(at, assumed=None if H.cheap else self.own, compared=False), None
            self.own = H.own

    def _measure(self, at: Found, known: tuple[Tensor, Tensor] | None = None) -> tuple[KKT, Scales, Tensor]:
        """Measure the rows and residuals of a point; return the residuals, their scales and the rows' gradients."""
        program = self.program
        at.f, J = known or program.rows.gradients(at.theta)
        scales = Scales.of(at.theta, J, self.own, self.noise)
        kkt = residuals(scales, program.weights(at.lam) @ J, at.f[1:] - program.tau, at.lam, program.kinds, self.goal)
        inside = bool(torch.isfinite(at.f).all())  # of the domain; outside, derivatives may be finite all the same
        at.residual, at.goal = kkt.residual if inside else float("nan"), kkt.goal
        return kkt, scales, J

    def _search(self, at: Found, step: Tensor, whole: bool) -> tuple[Found, Scales, Tensor] | None:
        """Return the point after a step, shortened until the residual falls, with its scales and gradients, or None.

        With `whole`, only the whole step is tried.
        """
        length = 1.0
        while length >= _SHORTEST and self.limits.find_reached() is None:
            theta, lam = (torch.cat([at.theta, at.lam]) + length * step).tensor_split([len(at.theta)])
            trial = Found(theta.clone(), self.program.kinds.project(lam).clone())
            _, scales, J = self._measure(trial)
            if trial.residual < (1 - DECREASE * length) * at.residual:
                return trial, scales, J
            length *= 0.0 if whole else 0.5
        return None

    def _step(self, at: Found, J: Tensor, H: Curvature, kept: bool = False) -> Tensor | None:
        """Return a step of (θ, λ) from a measured point with the rows' gradients J; None where there is none.

        With `kept`, the system of the last step is solved again, for the residuals of this point.
        """
        if self.limits.find_reached() is not None:
            return None
        self.limits.used += 1
        self.report(self.limits.used, f"(Newton, residual {at.residual:.1e})")
        kinds, finest = self.program.kinds, torch.finfo(at.theta.dtype).eps ** 0.672
        # a rough step is enough far from the solution
        self.solver.tolerance = max(finest, min(1e-3, 1e-2 * at.residual))
        gradient, c = self.program.weights(at.lam) @ J, at.f[1:] - self.program.tau
        try:
            if kept and self.system is not None:
                firm, rows = self.system.firm, torch.arange(len(c), device=c.device)
                solve = self.system.solver.approximate
                (omega,), (lam,), failed = self.system.step(gradient[None], c[None], at.lam[None], rows, firm, solve)
                if failed or bool((firm & kinds.inadmissible(lam)).any()):
                    return None
            else:
                force, solver = kinds.has_force(at.lam), None if H.cheap else self.solver
                omega, lam, self.system = kkt_step(gradient, H, c, J[1:], at.lam, kinds, force, solver)
        except DegenerateError:
            return None
        except NotConvergedError:
            self.solver.restart()
            return None
        return torch.cat([omega, lam - at.lam])
