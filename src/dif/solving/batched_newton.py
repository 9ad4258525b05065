"""Problems near a solved one: Newton on the KKT systems of many at once, with what was prepared at the solution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dif.evaluation.batched_program import Stack
from dif.linalg.anderson import Extrapolation
from dif.linalg.conjugate_gradients import ConjugateGradients
from dif.linalg.multiplier_qp import solve_reduced_qp
from dif.optimality.kkt_system import KKTSystem, Solve
from dif.optimality.residuals import residuals
from dif.optimality.solution import Solution
from dif.runtime.memory import in_flight

_HELD = 2**25  # numbers of θ, weights and gradients held at once on the CPU
_STEPS = 30  # Newton steps and shortenings of them
_INNER = 200  # iterations of conjugate gradients per step
_SHORTEST = 1 / 64
_HALVED = 6  # prepared steps within which the residual must halve, or each program's own curvature is looked at
_SHARES = (0.2, 0.4, 0.6, 0.8)  # of a perturbation that is too much at once
_ON_THE_WAY = 1e-4  # residual at these
_LOOSE = 1e-3  # relative residual of solves with the curvature at the solution, where it is not assembled


@dataclass
class Ends:
    """Where the programs of a stack ended."""

    theta: Tensor  # (P, d)
    lam: Tensor  # (P, m)
    residual: Tensor  # (P,)
    goal: Tensor  # (P,) the tolerance, or what rounding allows
    steps: Tensor  # (P,) Newton steps tried

    @property
    def reached(self) -> Tensor:
        """Which of them are solved, (P,) bool."""
        return self.residual <= self.goal


class Nearby:
    """Solves stacks of programs that differ little from the one solved at `at`.

    First by steps with the curvature and the gradients of the rows at the solution, prepared once (where the matrix is
    dear, what preconditions it comes first): each costs one gradient and one solve, and where the perturbation is small
    they close in quickly, the more so as each is combined with those before it. What does not close in is tried by way
    of smaller perturbations, and goes on by Newton's method: each program's own curvature is met by conjugate
    gradients, for which what was prepared is the preconditioner, and a step is shortened until the KKT residual falls.
    Programs that resist are handed back unsolved.
    """

    def __init__(self, at: Solution) -> None:
        self.at = at
        program = at.program
        solver = None if at.curvature.assembled else partial(ConjugateGradients, tolerance=_LOOSE)
        binding = at.active.mask(at.active.binding)
        self.system = KKTSystem.convex(at.curvature, at.G, program.kinds, binding, solver)
        self.solver = self.system.solver
        self.kept = self.system.firm | at.active.mask(at.active.active)

    def solve(self, stack: Stack, tol: float, max_iter: int, partly: Callable[[float], Stack]) -> Iterator[Ends]:
        """From (θ̄, λ̄) to the solution of every program of the stack: where they are after each means that was tried.

        `partly(share)`: the same programs with only a share of what is changed about them, by way of which those are
        reached that are too far away for one step.
        """
        ends = self._begun(len(stack), tol)
        if not self.at.curvature.assembled:
            self._close_in(stack, ends, max_iter, self.solver.approximate)
        self._close_in(stack, ends, max_iter, None)
        yield ends
        if not bool(ends.reached.all()):
            self._follow(stack, partly, ends, tol, max_iter)
            yield ends
        if not bool(ends.reached.all()):
            self._newton(stack, ends, max_iter)
            yield ends

    def step(self, stack: Stack, theta: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        """One step with what was prepared, from a point (θ, λ) of each program: ω, (P, d), the multipliers, (P, m)."""
        f, g = stack.pullback(theta, _weights(lam))
        solve = self.solver.approximate if self.at.curvature.assembled else None  # exact, but unchecked
        return self._prepared_step(f[:, 1:] - stack.tau, g, lam, solve)

    def settle(self, stack: Stack, theta: Tensor, lam: Tensor, tol: float, max_iter: int) -> Ends:
        """A few steps with what was prepared, extrapolated, from a point (θ, λ) of each program."""
        ends = self._begun(len(stack), tol)
        ends.theta, ends.lam = theta.clone(), lam.clone()
        self._close_in(stack, ends, max_iter, None)
        return ends

    def _begun(self, P: int, tol: float) -> Ends:
        theta, lam = self.at.theta.expand(P, -1).clone(), self.at.lam.expand(P, -1).clone()
        goal = torch.full((P,), max(tol, 16 * self.at.scales.rounding), dtype=torch.float64)
        return Ends(theta, lam, torch.full_like(goal, float("inf")), goal, torch.zeros(P, dtype=torch.long))

    def _follow(self, stack: Stack, partly: Callable[[float], Stack], ends: Ends, tol: float, max_iter: int) -> None:
        """The programs not reached yet, by way of others between them and the solution."""
        which = torch.nonzero(~ends.reached).reshape(-1)
        now = self._begun(len(which), tol)
        aims = [*((partly(share).take(which), _ON_THE_WAY) for share in _SHARES), (stack.take(which), tol)]
        solve = None if self.at.curvature.assembled else self.solver.approximate
        for some, aim in aims:
            now.residual[:] = float("inf")
            now.goal[:] = max(aim, 16 * self.at.scales.rounding)
            self._close_in(some, now, max_iter, solve)
        ends.steps[which] += now.steps
        better = now.residual < ends.residual[which]
        moved = which[better]
        ends.theta[moved], ends.lam[moved], ends.residual[moved] = (
            now.theta[better],
            now.lam[better],
            now.residual[better],
        )

    def _judge(self, c: Tensor, g: Tensor, lam: Tensor) -> Tensor:
        """KKT residuals, (P,), in the units of the solution."""
        scales, kinds = self.at.scales, self.at.program.kinds
        found = [residuals(scales, g[p], c[p], lam[p], kinds).residual for p in range(len(g))]
        sizes = torch.tensor(found, dtype=torch.float64)
        return torch.where(torch.isfinite(sizes) & torch.isfinite(c).all(1).cpu(), sizes, float("inf"))

    # With what was prepared at the solution

    def _close_in(self, stack: Stack, ends: Ends, max_iter: int, solve: Solve | None) -> None:
        """Steps with Ḡ and H̄, as `solve` inverts it, extrapolated, while they shrink the residual enough."""
        live = torch.nonzero(~ends.reached).reshape(-1)
        if len(live) == 0:
            return
        d, m = ends.theta.shape[1], ends.lam.shape[1]
        past = Extrapolation(len(stack), d + m, partial(self.at.scales.lengths, G=self.at.G))
        mark = torch.full_like(ends.residual, float("inf"))  # the last residual that was half of the mark before it
        since = torch.zeros_like(ends.steps)  # steps since then
        holding = torch.zeros((len(stack), m), dtype=torch.bool, device=ends.lam.device)  # multipliers that push
        further = 1e-3 if self.at.curvature.cheap else 1.0  # beyond the goal, where steps cost little
        aim = (further * ends.goal).clamp(min=16 * self.at.scales.rounding)
        theta, lam = ends.theta.clone(), ends.lam.clone()
        for _ in range(max_iter):
            some = stack.take(live)
            f, g = some.pullback(theta[live], _weights(lam[live]))
            c = f[:, 1:] - some.tau
            residual = self._judge(c, g, lam[live])
            better = residual < ends.residual[live]
            moved = live[better]
            halved = residual < 0.5 * mark[live]
            mark[live] = torch.where(halved, residual, mark[live])
            since[live] = torch.where(halved, 0, since[live] + 1)
            ends.theta[moved], ends.lam[moved], ends.residual[moved] = theta[moved], lam[moved], residual[better]
            going = (since[live] < _HALVED) & (residual > aim[live]) & torch.isfinite(residual)
            live, c, g = live[going], c[going], g[going]
            if len(live) == 0:
                return
            ends.steps[live] += 1
            omega, nu = self._prepared_step(c, g, lam[live], solve)
            exists = torch.isfinite(omega).all(1) & torch.isfinite(nu).all(1)
            live, omega, nu = live[exists.to(live.device)], omega[exists], nu[exists]
            if len(live) == 0:
                return
            pushing = nu > 0
            past.forget(live[(pushing != holding[live]).any(1).to(live.device)])
            holding[live] = pushing
            here = torch.cat([theta[live], lam[live]], 1)
            there = here + past.combined(live, here, torch.cat([omega, nu - lam[live]], 1))
            theta[live], lam[live] = there[:, :d], self.at.program.kinds.project(there[:, d:])

    def _prepared_step(self, c: Tensor, g: Tensor, lam: Tensor, solve: Solve | None) -> tuple[Tensor, Tensor]:
        """Solve for ω, (P, d), and the multipliers after it, (P, m); rows that a step breaks are kept from then on."""
        firm = self.system.firm
        while True:
            rows = torch.nonzero(self.kept).reshape(-1)
            omega, nu, _ = self.system.step(g, c, lam, rows, firm, solve)
            omega[(firm & self.at.program.kinds.inadmissible(nu)).any(1)] = float("nan")  # convex only while they hold
            broken = (c + omega @ self.at.G.T > 0).any(0) & ~self.kept
            if not bool(broken.any()):
                return omega, nu
            self.kept = self.kept | broken

    # With each program's own curvature

    def _newton(self, stack: Stack, ends: Ends, max_iter: int) -> None:
        live = torch.nonzero(~ends.reached).reshape(-1)
        if len(live) == 0:
            return
        P, d = ends.theta.shape
        f, J = ends.lam.new_zeros((P, 1 + ends.lam.shape[1])), ends.lam.new_zeros((P, 1 + ends.lam.shape[1], d))
        f[live], J[live] = stack.take(live).gradients(ends.theta[live])
        fresh = torch.ones(P, dtype=torch.bool)  # where a new step is due
        omega, dlam = torch.zeros_like(ends.theta), torch.zeros_like(ends.lam)
        length = torch.ones(P, dtype=torch.float64)
        for _ in range(min(_STEPS, max_iter)):
            live = live[~ends.reached[live] & (length[live] >= _SHORTEST)]
            if len(live) == 0:
                return
            due = live[fresh[live]]
            if len(due):
                step, found = self._step(stack.take(due), ends, due, f[due], J[due])
                omega[due], dlam[due], length[due], fresh[due] = *step, found.double(), False
                live = live[length[live] > 0]
                if len(live) == 0:
                    return
            ends.steps[live] += 1
            t = length[live].to(ends.theta)[:, None]
            trial, price = ends.theta[live] + t * omega[live], ends.lam[live] + t * dlam[live]
            some = stack.take(live)
            f_trial, J_trial = some.gradients(trial)
            gradient = torch.einsum("pj,pjd->pd", _weights(price), J_trial)
            residual = self._judge(f_trial[:, 1:] - some.tau, gradient, price)
            better = residual < (1 - 0.1 * length[live]) * ends.residual[live]
            moved = live[better]
            ends.theta[moved], ends.lam[moved], f[moved], J[moved] = (
                x[better] for x in (trial, price, f_trial, J_trial)
            )
            ends.residual[moved] = residual[better]
            length[live[~better]] *= 0.5
            length[moved], fresh[moved] = 1.0, True

    def _step(
        self, stack: Stack, ends: Ends, which: Tensor, f: Tensor, J: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """ω, (P, d), and Δλ, (P, m), of one Newton step for some programs; where there is one, (P,) bool.

        Rows that are neither active nor violated by the step stay out of it.
        """
        theta, lam = ends.theta[which], ends.lam[which]
        held, c = self.system.firm, f[:, 1:] - stack.tau
        G_held = J[:, 1:][:, held]
        weights = _weights(lam)
        eps = torch.finfo(theta.dtype).eps
        accuracy = (1e-2 * ends.residual[which]).clamp(min=eps**0.672, max=1e-3).to(theta)

        def product(V: Tensor) -> Tensor:
            pushed = self.system.R[:, None] * (G_held @ V)
            return stack.products(theta, weights, V) + G_held.mT @ pushed

        b = torch.einsum("pj,pjd->pd", weights, J) + torch.einsum("pj,pjd->pd", self.system.R * c[:, held], G_held)
        while True:
            kept = torch.nonzero(self.kept).reshape(-1)
            G = J[:, 1:][:, kept]
            X, found = _conjugate_gradients(
                product, self.solver.approximate, torch.cat([b[:, :, None], G.mT], 2), accuracy
            )
            free_step, V = X[:, :, 0], X[:, :, 1:]
            S = G @ V
            S = 0.5 * (S + S.mT)
            a = c[:, kept] - torch.einsum("pkd,pd->pk", G, free_step) + torch.einsum("pk,pkl->pl", lam[:, kept], S)
            nu = torch.zeros_like(lam)
            free = held[kept].cpu().numpy()
            for p in range(len(lam)):
                if found[p]:
                    S_p, a_p = S[p].double().cpu().numpy(), a[p : p + 1].double().cpu().numpy()
                    answer, failed = solve_reduced_qp(S_p, a_p, free)
                    nu[p, kept] = torch.as_tensor(answer[0]).to(nu)
                    found[p] = not failed
            omega = -free_step - torch.einsum("pdk,pk->pd", V, (nu - lam)[:, kept])
            found &= ~(held & self.at.program.kinds.inadmissible(nu)).any(1).cpu()  # convex only while they hold
            broken = (c + torch.einsum("pjd,pd->pj", J[:, 1:], omega) > 0)[found.to(c.device)].any(0) & ~self.kept
            if not bool(broken.any()):
                return (omega, nu - lam), found
            self.kept = self.kept | broken


def programs_at_once(at: Solution) -> int:
    """How many programs like the one solved at `at` may be stacked."""
    vectors = 2 * (2 + at.program.m)  # of the length of θ, or of the data, per program
    longest = at.theta.numel() + sum(len(table.samples) for table in at.program.rows.tables)
    return max(1, in_flight(at.theta, _HELD) // (vectors * longest))


def _weights(lam: Tensor) -> Tensor:
    """(1, λ) of each program."""
    return torch.cat([lam.new_ones((len(lam), 1)), lam], 1)


def _conjugate_gradients(
    product: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], B: Tensor, tolerance: Tensor
) -> tuple[Tensor, Tensor]:
    """X with H_p X_p = B_p for each p, to a relative residual in the preconditioner's norm.

    The second part of the answer, (P,) bool: for which p it was reached, without meeting negative curvature.
    """
    P, d, c = B.shape

    def apply(R: Tensor) -> Tensor:
        return precondition(R.movedim(0, 1).reshape(d, P * c)).reshape(d, P, c).movedim(1, 0)

    X, R = torch.zeros_like(B), B.clone()
    Z = apply(R)
    D, rz = Z.clone(), (R * Z).sum(1)  # (P, c)
    goal = tolerance[:, None] ** 2 * rz
    lost = torch.zeros(P, dtype=torch.bool, device=B.device)
    for _ in range(_INNER):
        live = (rz > goal) & ~lost[:, None]
        if not bool(live.any()):
            break
        HD = product(D)
        along = (D * HD).sum(1)
        lost = lost | ((along <= 0) & live).any(1) | ~torch.isfinite(along).all(1)
        alpha = torch.where(live & ~lost[:, None], rz / torch.where(along > 0, along, 1.0), 0.0)[:, None]
        X, R = X + alpha * D, R - alpha * HD
        Z = apply(R)
        new = (R * Z).sum(1)
        beta = torch.where(live, new / torch.where(rz > 0, rz, 1.0), 0.0)[:, None]
        D, rz = torch.where(live[:, None], Z + beta * D, D), torch.where(live, new, rz)
    return X, ~(lost | (rz > goal).any(1)).cpu()
