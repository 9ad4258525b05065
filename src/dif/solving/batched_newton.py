"""Solve many problems similar to a solved one at once, by Newton's method on their KKT systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dif.derivatives.weight_change import BatchedProgram
from dif.linalg.anderson import Extrapolation
from dif.linalg.conjugate_gradients import conjugate_gradients
from dif.linalg.solvers import ConjugateGradients
from dif.optimality.judgement import residuals
from dif.optimality.kkt_system import KKTSystem, Solve, complete_step
from dif.optimality.solution import Solution
from dif.runtime.guard import numbers_at_once

DECREASE = 0.1  # fraction of the decrease predicted by Newton's model that a step must achieve (Armijo's condition)


_IN_MEMORY = 2**25  # entries of θ, weights and gradients in memory at once on the CPU: 256 MiB
_TRIALS = 30  # Newton steps tried per program, shortened ones included
_INNER = 200  # iterations of conjugate gradients per Newton step
_SHORTEST = 1 / 64  # smallest fraction of a Newton step that is tried
_HALVED = 6  # chord steps within which the residual must halve; else each program's own curvature is used
_SHARES = (0.2, 0.4, 0.6, 0.8)  # fractions of a large perturbation that are solved on the way to it
_ROUGH = 1e-4  # relative KKT residual to reach at these fractions: they are only starting points
_COST = 2.0  # λ̄ · violation at θ̄, times this, may be added to the objective by meeting the constraints
_WORSE = 0.01  # share of the objective that may be added besides
_LOOSE = 1e-3  # relative residual of solves with the curvature at the solution, where it is not assembled


@dataclass
class Ends:
    """The points at which the programs of a stack ended."""

    theta: Tensor  # (P, d)
    lam: Tensor  # (P, m)
    objective: Tensor  # (P,)
    residual: Tensor  # (P,)
    goal: Tensor  # (P,) the tolerance, or what rounding allows
    steps: Tensor  # (P,) Newton steps tried

    @property
    def reached(self) -> Tensor:
        """Which of them are solved, (P,) bool."""
        return self.residual <= self.goal

    def improve(self, which: Tensor, theta: Tensor, lam: Tensor, objective: Tensor, residual: Tensor) -> None:
        """Move the programs `which` to these points where their residuals fall."""
        better = residual < self.residual[which]
        moved = which[better]
        self.theta[moved], self.lam[moved] = theta[better], lam[better]
        self.objective[moved], self.residual[moved] = objective[better], residual[better]


class BatchedNewton:
    """Solver for stacks of programs that differ little from the one solved at `at`.

    Chord steps come first: they use the curvature and the gradients of the rows at the solution, prepared once, and
    cost one gradient and one solve each (where the matrix is not assembled, steps with its preconditioner come before
    them). Anderson's acceleration combines each with those before it. Programs that do not converge are approached
    through smaller perturbations, and then solved by Newton's method with their own curvature: conjugate gradients,
    preconditioned by what was prepared. Programs that still do not converge are returned unsolved.
    """

    def __init__(self, at: Solution) -> None:
        self.at = at
        solver = None if at.curvature.assembled else partial(ConjugateGradients, tolerance=_LOOSE)
        rows = at.program.kinds, at.active.is_binding
        self.system = KKTSystem.prepare_convex(at.curvature, at.G, *rows, solver=solver)
        self.solver = self.system.solver
        self.rows = self.system.firm | at.active.is_active  # rows that take part in the steps, (m,) bool

    def solve(
        self, stack: BatchedProgram, tol: float, max_iter: int, scaled: Callable[[float], BatchedProgram]
    ) -> Iterator[Ends]:
        """Solve every program of the stack from (θ̄, λ̄); yield the points reached after each stage.

        `scaled(share)` returns the same programs with their perturbations multiplied by a share in (0, 1).
        """
        ends = self._start(len(stack), tol)
        if not self.at.curvature.assembled:
            self._iterate_chord(stack, ends, max_iter, self.solver.approximate)
        self._iterate_chord(stack, ends, max_iter, None)
        yield ends
        if not bool(ends.reached.all()):
            self._approach(stack, scaled, ends, tol, max_iter)
            yield ends
        if not bool(ends.reached.all()):
            self._iterate_newton(stack, ends, max_iter)
            yield ends

    def find_worse(self, stack: BatchedProgram, ends: Ends, before: Tensor) -> Tensor:
        """Return which programs are solved, but at a point clearly worse than θ̄, (P,) bool.

        That is another minimum, to which the solution may lead where the problem is not convex. `before`, (P, 1 + m),
        has the rows of the programs at θ̄. Meeting the constraints from there should cost about λ̄ · violation.
        """
        violation = self.at.program.kinds.violation(before[:, 1:] - stack.tau)
        allowed = before[:, 0] + _COST * (violation @ self.at.lam.abs()) + _WORSE * before[:, 0].abs()
        return ends.reached & (ends.objective > allowed).cpu()

    def step(self, stack: BatchedProgram, theta: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        """Make one chord step from a point (θ, λ) of each program; return ω, (P, d), and the multipliers, (P, m)."""
        f, g = stack.gradients(theta, self.at.program.weights(lam))
        solve = self.solver.approximate if self.at.curvature.assembled else None  # exact, by factorisation
        return self._chord_step(f[:, 1:] - stack.tau, g, lam, solve)

    def settle(
        self, stack: BatchedProgram, theta: Tensor, lam: Tensor, tol: float, max_iter: int, solve: Solve | None = None
    ) -> Ends:
        """Make a few chord steps from a point (θ, λ) of each program, H_ρ inverted by `solve`."""
        ends = self._start(len(stack), tol)
        ends.theta, ends.lam = theta.clone(), lam.clone()
        self._iterate_chord(stack, ends, max_iter, solve)
        return ends

    def _start(self, P: int, tol: float) -> Ends:
        theta, lam = self.at.theta.expand(P, -1).clone(), self.at.lam.expand(P, -1).clone()
        goal = torch.full((P,), max(tol, self.at.scales.floor), dtype=torch.float64)
        objective = theta.new_full((P,), float("nan"))  # not measured yet
        return Ends(theta, lam, objective, torch.full_like(goal, float("inf")), goal, torch.zeros(P, dtype=torch.long))

    def _approach(
        self, stack: BatchedProgram, scaled: Callable[[float], BatchedProgram], ends: Ends, tol: float, max_iter: int
    ) -> None:
        """Solve the programs not solved yet by way of smaller perturbations."""
        which = torch.nonzero(~ends.reached).reshape(-1)
        now = self._start(len(which), tol)
        stages = [*((scaled(share).take(which), _ROUGH) for share in _SHARES), (stack.take(which), tol)]
        solve = None if self.at.curvature.assembled else self.solver.approximate
        for programs, goal in stages:
            now = self.settle(programs, now.theta, now.lam, goal, max_iter, solve)
            ends.steps[which] += now.steps
        ends.improve(which, now.theta, now.lam, now.objective, now.residual)

    def _judge(self, c: Tensor, g: Tensor, lam: Tensor) -> Tensor:
        """Measure the KKT residuals, (P,), in the units of the solution; inf where they are not finite."""
        scales, kinds = self.at.scales, self.at.program.kinds
        values = [residuals(scales, g[p], c[p], lam[p], kinds).residual for p in range(len(g))]
        sizes = torch.tensor(values, dtype=torch.float64)
        return torch.where(torch.isfinite(sizes) & torch.isfinite(c).all(1).cpu(), sizes, float("inf"))

    # Steps with what was prepared at the solution

    def _iterate_chord(self, stack: BatchedProgram, ends: Ends, max_iter: int, solve: Solve | None) -> None:
        """Make chord steps, H_ρ inverted by `solve`, while the residuals keep halving; `ends` keeps the best points."""
        live = torch.nonzero(~ends.reached).reshape(-1)
        d, m = ends.theta.shape[1], ends.lam.shape[1]
        past = Extrapolation(len(stack), d + m, partial(self.at.scales.lengths, G=self.at.G))
        mark = torch.full_like(ends.residual, float("inf"))  # last residual that was at most half of the previous mark
        since = torch.zeros_like(ends.steps)  # steps since then
        had_force = torch.zeros((len(stack), m), dtype=torch.bool, device=ends.lam.device)  # rows with a positive λ
        further = 1e-3 if self.at.curvature.cheap else 1.0  # continue this far below the goal where steps are cheap
        aim = (further * ends.goal).clamp(min=self.at.scales.floor)
        theta, lam = ends.theta.clone(), ends.lam.clone()
        for _ in range(max_iter):
            if len(live) == 0:
                return
            programs = stack.take(live)
            f, g = programs.gradients(theta[live], self.at.program.weights(lam[live]))
            c = f[:, 1:] - programs.tau
            residual = self._judge(c, g, lam[live])
            ends.improve(live, theta[live], lam[live], f[:, 0], residual)
            halved = residual < 0.5 * mark[live]
            mark[live] = torch.where(halved, residual, mark[live])
            since[live] = torch.where(halved, 0, since[live] + 1)
            going = (since[live] < _HALVED) & (residual > aim[live]) & torch.isfinite(residual)
            live, c, g = live[going], c[going], g[going]
            if len(live) == 0:
                return
            ends.steps[live] += 1
            omega, nu = self._chord_step(c, g, lam[live], solve)
            exists = torch.isfinite(omega).all(1) & torch.isfinite(nu).all(1)
            live, omega, nu = live[exists.to(live.device)], omega[exists], nu[exists]
            has_force = self.at.program.kinds.has_force(nu)
            past.forget(live[(has_force != had_force[live]).any(1).to(live.device)])
            had_force[live] = has_force
            here = torch.cat([theta[live], lam[live]], 1)
            there = here + past.combine(live, here, torch.cat([omega, nu - lam[live]], 1))
            theta[live], lam[live] = there[:, :d], self.at.program.kinds.project(there[:, d:])

    def _chord_step(self, c: Tensor, g: Tensor, lam: Tensor, solve: Solve | None) -> tuple[Tensor, Tensor]:
        """Solve for ω, (P, d), and the multipliers, (P, m), with H and G at the solution."""

        def step(rows: Tensor) -> tuple[Tensor, Tensor]:
            omega, nu, _ = self.system.step(g, c, lam, rows, self.system.firm, solve)
            return omega, nu

        return self._with_violated_rows(step, lambda omega: c + omega @ self.at.G.T)

    def _with_violated_rows(
        self, step: Callable[[Tensor], tuple[Tensor, Tensor]], values: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute steps, adding the rows that they violate until there are none; NaN where convexity would be lost.

        Args:
            step: For the rows that take part: ω, (P, d), and the multipliers, (P, m).
            values: f − τ of all rows after steps ω, linearised, (P, m).
        """
        while True:
            omega, nu = step(torch.nonzero(self.rows).reshape(-1))
            released = self.system.firm & self.at.program.kinds.inadmissible(nu)
            omega[released.any(1)] = float("nan")  # the problem is convex only while its firm rows hold
            violated = (values(omega) > 0).any(0) & ~self.rows
            if not bool(violated.any()):
                return omega, nu
            self.rows = self.rows | violated

    # Steps with each program's own curvature

    def _iterate_newton(self, stack: BatchedProgram, ends: Ends, max_iter: int) -> None:
        """Run Newton's method on the programs not solved yet; steps are shortened until the residual falls."""
        (P, d), m = ends.theta.shape, ends.lam.shape[1]
        live = torch.nonzero(~ends.reached).reshape(-1)
        f, J = ends.lam.new_zeros((P, 1 + m)), ends.lam.new_zeros((P, 1 + m, d))
        f[live], J[live] = stack.take(live).gradients(ends.theta[live])
        moves, length = ends.lam.new_zeros((P, d + m)), torch.ones(P, dtype=torch.float64)
        due = torch.ones(P, dtype=torch.bool)  # where a new step must be computed
        for _ in range(min(_TRIALS, max_iter)):
            fresh = live[due[live]]
            if len(fresh):
                omega, nu = self._newton_step(stack.take(fresh), ends, fresh, f[fresh], J[fresh])
                moves[fresh], length[fresh], due[fresh] = torch.cat([omega, nu - ends.lam[fresh]], 1), 1.0, False
                live = live[torch.isfinite(moves[live]).all(1).cpu()]
            if len(live) == 0:
                return
            ends.steps[live] += 1
            step, programs = length[live, None].to(moves) * moves[live], stack.take(live)
            theta, lam = ends.theta[live] + step[:, :d], ends.lam[live] + step[:, d:]
            f_there, J_there = programs.gradients(theta)
            gradient = torch.einsum("pj,pjd->pd", self.at.program.weights(lam), J_there)
            residual = self._judge(f_there[:, 1:] - programs.tau, gradient, lam)
            moved = residual < (1 - DECREASE * length[live]) * ends.residual[live]
            there = live[moved]
            f[there], J[there] = f_there[moved], J_there[moved]
            ends.improve(there, theta[moved], lam[moved], f_there[moved, 0], residual[moved])
            length[live], due[there] = torch.where(moved, 1.0, 0.5 * length[live]), True
            live = live[~ends.reached[live] & (length[live] >= _SHORTEST)]

    def _newton_step(
        self, stack: BatchedProgram, ends: Ends, which: Tensor, f: Tensor, J: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Solve for ω, (P, d), and the multipliers, (P, m), of the given programs, with H and G of their own."""
        theta, lam = ends.theta[which], ends.lam[which]
        weights, c, G = self.at.program.weights(lam), f[:, 1:] - stack.tau, J[:, 1:]
        eps = torch.finfo(theta.dtype).eps
        accuracy = (1e-2 * ends.residual[which]).clamp(min=eps**0.672, max=1e-3).to(theta)
        b = torch.einsum("pj,pjd->pd", weights, J) + torch.einsum("pj,pjd->pd", self.system.R * c, G)

        def step(rows: Tensor) -> tuple[Tensor, Tensor]:
            B = torch.cat([b[:, :, None], G[:, rows].mT], 2)
            X, solved = self._solve_each(stack, theta, weights, G, B, accuracy)
            omega, nu_rows, _ = complete_step(
                -X[:, :, 0], X[:, :, 1:], G[:, rows], c[:, rows], lam[:, rows], self.system.firm[rows]
            )
            nu = torch.zeros_like(lam)
            nu[:, rows] = nu_rows
            omega[~solved], nu[~solved] = float("nan"), float("nan")
            return omega, nu

        return self._with_violated_rows(step, lambda omega: c + torch.einsum("pjd,pd->pj", G, omega))

    def _solve_each(
        self, stack: BatchedProgram, theta: Tensor, weights: Tensor, G: Tensor, B: Tensor, accuracy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Solve H_p X_p = B_p, (P, d, k), for each program, and say for which that succeeded, (P,) bool."""
        P, d, k = B.shape
        root = self.at.curvature.scale().sqrt()[:, None]  # scales residuals, so that their norms are comparable

        def product(D: Tensor, columns: Tensor) -> Tensor:
            programs, place = torch.unique(columns // k, return_inverse=True)
            V = D.new_zeros((len(programs), k, d))
            V[place, columns % k] = (D / root).T
            V, every = V.mT, len(programs) == P
            chunk, G_chunk = (stack, G) if every else (stack.take(programs), G[programs])
            products = chunk.products(theta[programs], weights[programs], V)
            products = products + G_chunk.mT @ (self.system.R[:, None] * (G_chunk @ V))
            return products.mT[place, columns % k].T / root

        precondition = lambda R: self.solver.approximate(R * root) * root  # noqa: E731
        columns = B.movedim(0, 1).reshape(d, P * k) / root
        solved = conjugate_gradients(product, columns, accuracy.repeat_interleave(k), _INNER, precondition)
        return (solved.X / root).reshape(d, P, k).movedim(1, 0), solved.reached.reshape(P, k).all(1)


def programs_at_once(at: Solution) -> int:
    """Return how many programs like the one solved at `at` may be stacked."""
    vectors = 2 * (2 + at.program.m)  # of the length of θ, or of the data, per program
    longest = at.theta.numel() + sum(len(table.samples) for table in at.program.rows.tables)
    return max(1, numbers_at_once(at.theta, _IN_MEMORY) // (vectors * longest))
