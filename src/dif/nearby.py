"""Problems near a solved one: Newton on the KKT systems of many at once, with what was prepared at the solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dif.errors import DegenerateError
from dif.kkt import Scales, residuals
from dif.linear_solve import prepare
from dif.reduced_qp import solve_reduced_qp
from dif.solution import Solution
from dif.stack import Stack

_STEPS = 30  # Newton steps and shortenings of them
_INNER = 200  # iterations of conjugate gradients per step
_SHORTEST = 1 / 64


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

    Each Newton step meets the program's own curvature by conjugate gradients, for which the factors (or the sketch) of
    the curvature at the solution are the preconditioner: a few products instead of a new matrix. A step is shortened
    until the KKT residual falls. Programs that resist are handed back unsolved.
    """

    def __init__(self, at: Solution) -> None:
        self.at = at
        program = at.program
        self.held = program.equality
        try:
            self.solver, self.R = prepare(at.curvature, at.G[self.held])
        except DegenerateError:  # convex on the binding rows alone
            self.held = program.equality.clone()
            self.held[list(at.active.binding)] = True
            self.solver, self.R = prepare(at.curvature, at.G[self.held])
        self.kept = self.held.clone()
        self.kept[list(at.active.active)] = True

    def solve(self, stack: Stack, tol: float, max_iter: int) -> Ends:
        """Newton from (θ̄, λ̄) for every program of the stack."""
        P, at = len(stack), self.at
        theta, lam = at.theta.expand(P, -1).clone(), at.lam.expand(P, -1).clone()
        f, J = stack.gradients(theta)
        residual, goal = self._judge(stack, theta, lam, f, J, tol)
        ends = Ends(theta, lam, residual, goal, torch.zeros(P, dtype=torch.long))
        live = torch.arange(P)
        fresh = torch.ones(P, dtype=torch.bool)  # where a new step is due
        omega, dlam, length = torch.zeros_like(theta), torch.zeros_like(lam), torch.ones(P, dtype=torch.float64)
        for _ in range(min(_STEPS, max_iter)):
            live = live[~ends.reached[live] & (length[live] >= _SHORTEST)]
            if len(live) == 0:
                break
            due = live[fresh[live]]
            if len(due):
                step, found = self._step(stack.take(due), ends, due, f[due], J[due])
                omega[due], dlam[due], length[due], fresh[due] = *step, found.double(), False
                live = live[length[live] > 0]
                if len(live) == 0:
                    break
            ends.steps[live] += 1
            t = length[live].to(theta)[:, None]
            trial, price = ends.theta[live] + t * omega[live], ends.lam[live] + t * dlam[live]
            f_trial, J_trial = stack.take(live).gradients(trial)
            residual, goal = self._judge(stack.take(live), trial, price, f_trial, J_trial, tol)
            better = residual < (1 - 0.1 * length[live]) * ends.residual[live]
            moved = live[better]
            ends.theta[moved], ends.lam[moved], f[moved], J[moved] = (
                x[better] for x in (trial, price, f_trial, J_trial)
            )
            ends.residual[moved], ends.goal[moved] = residual[better], goal[better]
            length[live[~better]] *= 0.5
            length[moved], fresh[moved] = 1.0, True
        return ends

    def _judge(
        self, stack: Stack, theta: Tensor, lam: Tensor, f: Tensor, J: Tensor, tol: float
    ) -> tuple[Tensor, Tensor]:
        """KKT residuals, (P,), in the units of the solution; and what they must come down to."""
        curvature, equality = self.at.curvature, self.at.program.equality
        found, goals = [], []
        for p in range(len(theta)):
            scales = Scales.of(theta[p], J[p], curvature.own, curvature.noise)
            gradient = J[p, 0] + lam[p] @ J[p, 1:]
            kkt = residuals(scales, gradient, f[p, 1:] - stack.tau[p], lam[p], equality)
            finite = bool(torch.isfinite(f[p]).all())
            found.append(kkt.residual if finite and kkt.residual < float("inf") else float("inf"))
            goals.append(max(tol, 16 * kkt.rounding))
        return torch.tensor(found, dtype=torch.float64), torch.tensor(goals, dtype=torch.float64)

    def _step(
        self, stack: Stack, ends: Ends, which: Tensor, f: Tensor, J: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """ω, (P, d), and Δλ, (P, m), of one Newton step for some programs; where there is one, (P,) bool.

        Rows that are neither active nor violated by the step stay out of it.
        """
        theta, lam = ends.theta[which], ends.lam[which]
        held, c = self.held, f[:, 1:] - stack.tau
        G_held = J[:, 1:][:, held]
        weights = torch.cat([lam.new_ones((len(lam), 1)), lam], 1)
        eps = torch.finfo(theta.dtype).eps
        accuracy = (1e-2 * ends.residual[which]).clamp(min=eps**0.672, max=1e-3).to(theta)

        def product(V: Tensor) -> Tensor:
            pushed = self.R[:, None] * (G_held @ V)
            return stack.products(theta, weights, V) + G_held.mT @ pushed

        b = J[:, 0] + torch.einsum("pj,pjd->pd", self.R * c[:, held], G_held)
        while True:
            kept = torch.nonzero(self.kept).reshape(-1)
            G = J[:, 1:][:, kept]
            X, found = _conjugate_gradients(
                product, self.solver.approximate, torch.cat([b[:, :, None], G.mT], 2), accuracy
            )
            free_step, V = X[:, :, 0], X[:, :, 1:]
            S, a = G @ V, c[:, kept] - torch.einsum("pkd,pd->pk", G, free_step)
            nu = torch.zeros_like(lam)
            free = held[kept].cpu().numpy()
            for p in range(len(lam)):
                if found[p]:
                    S_p = (0.5 * (S[p] + S[p].T)).double().cpu().numpy()
                    answer, failed = solve_reduced_qp(S_p, a[p : p + 1].double().cpu().numpy(), free)
                    nu[p, kept] = torch.as_tensor(answer[0]).to(nu)
                    found[p] = not failed
            omega = -free_step - torch.einsum("pdk,pk->pd", V, nu[:, kept])
            found &= ~(nu[:, held & ~self.at.program.equality] < 0).any(1).cpu()  # convex only while they hold
            broken = (c + torch.einsum("pjd,pd->pj", J[:, 1:], omega) > 0)[found.to(c.device)].any(0) & ~self.kept
            if not bool(broken.any()):
                return (omega, nu - lam), found
            self.kept = self.kept | broken


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
