"""The optimality conditions linearised at a point: prepared once, solved for one or many right-hand sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dif.errors import DegenerateError
from dif.linalg.cholesky import Solver, prepare
from dif.linalg.multiplier_qp import no_direction, solve_reduced_qp
from dif.linalg.operator import Operator
from dif.problem.kinds import Kinds

Solve = Callable[[Tensor], Tensor]


class KKTSystem:
    """g + Hω + Gᵀ(ν − λ) = 0 with c + Gω = 0 on equal rows; on the others c + Gω ≤ 0, ν ≥ 0, and one of them 0.

    H is made positive definite by the curvature GᵀRG of the rows that are `firm`. Where these hold, that changes
    nothing.

    Args:
        H: ∇²L.
        G: (m, d) gradients of the rows.
        firm: (m,) bool.
        solver: Prepares a solver for H + GᵀRG; chosen by the size if left out.
    """

    def __init__(self, H: Operator, G: Tensor, firm: Tensor, solver: Solver = None) -> None:
        self.H, self.G, self.firm = H, G, firm
        self.solver, self.R = prepare(H, G[firm], solver=solver)
        self._known: dict[bool, tuple[Tensor, Tensor]] = {}  # whether exact → rows, and (H + GᵀRG)⁻¹Gᵀ on them

    @classmethod
    def convex(cls, H: Operator, G: Tensor, kinds: Kinds, binding: Tensor, solver: Solver = None) -> KKTSystem:
        """Prepare with firm equalities; where H is not convex on these alone, with the binding rows firm too."""
        try:
            return cls(H, G, kinds.equal, solver)
        except DegenerateError:
            return cls(H, G, kinds.equal | binding, solver)

    def reduce(self, g: Tensor, c: Tensor, rows: Tensor, solve: Solve | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Eliminate ω.

        Args:
            g: (P, d) gradients of the Lagrangians.
            c: (P, m) values of the rows.
            rows: (k,) numbers of the rows that may have a force.
            solve: Inverts H + GᵀRG; exactly, if left out.

        Returns:
            The step without forces, (P, d), the columns V = (H + GᵀRG)⁻¹Gᵀ, (d, k), and S = GV, (k, k).
        """
        exact, G = solve is None, self.G[rows]
        solve = solve or self.solver.solve
        b = (g + (self.R * c[:, self.firm]) @ self.G[self.firm]).T
        if exact in self._known and torch.equal(self._known[exact][0], rows):
            free = solve(b)
        else:
            found = solve(torch.cat([b, G.T], 1))
            free, self._known[exact] = found[:, : len(g)], (rows, found[:, len(g) :])
        V = self._known[exact][1]
        return -free.T, V, G @ V

    def step(
        self, g: Tensor, c: Tensor, lam: Tensor, rows: Tensor, equal: Tensor, solve: Solve | None = None
    ) -> tuple[Tensor, Tensor, dict[int, str]]:
        """Solve for ω, (P, d), and the multipliers after it, (P, m); and say why, for those that have no solution.

        Rows that are not listed have no force; `equal` (m,) bool says which hold as equalities.
        """
        free, V, S = self.reduce(g, c, rows, solve)
        S = 0.5 * (S + S.T)
        a = c[:, rows] + free @ self.G[rows].T + lam[:, rows] @ S
        found, failed = solve_reduced_qp(S.double().cpu().numpy(), a.double().cpu().numpy(), equal[rows].cpu().numpy())
        nu = torch.zeros_like(lam)
        nu[:, rows] = torch.as_tensor(found).to(lam)
        nu[list(failed)] = float("nan")
        return free - (nu - lam)[:, rows] @ V.T, nu, failed

    def held_step(self, g: Tensor, c: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """Solve for ω, (d,), and forces, (m,), with the rows of a mask held as equalities; NaN where they depend."""
        rows = torch.nonzero(held).reshape(-1)
        free, V, S = self.reduce(g[None], c[None], rows)
        mu = torch.zeros_like(c)
        if len(rows):
            found, failed = torch.linalg.solve_ex(S, c[rows] + self.G[rows] @ free[0])
            mu[rows] = found if int(failed) == 0 else torch.full_like(found, float("nan"))
        return free[0] - V @ mu[rows], mu


@dataclass(frozen=True, eq=False)
class Step:
    """ω and the multipliers after it."""

    omega: Tensor  # (d,)
    lam: Tensor  # (m,) λ̄ + Δλ
    unanswered: str = ""  # why there is no step, where NaN stands for it


def kkt_step(
    g: Tensor,
    H: Operator,
    c: Tensor,
    G: Tensor,
    lam: Tensor,
    kinds: Kinds,
    binding: Tensor,
    solver: Solver = None,
) -> Step:
    """Min (g − Gᵀλ)ᵀω + ½ωᵀHω  s.t.  c + Gω = 0 on equalities, ≤ 0 on every inequality; its multipliers are the new λ.

    g is ∇L at the multipliers λ: near a solution it is small, so that inexact solves do no harm.

    Where H is not convex on the equalities alone, the rows of `binding` are held as equalities too and their signs
    checked afterwards: rows with a negative multiplier are let go, as long as convexity allows it.
    """
    every = torch.arange(len(c), device=c.device)
    system = _attempt(lambda: KKTSystem.convex(H, G, kinds, binding, solver))
    while system is not None:
        omega, nu, failed = system.step(g[None], c[None], lam[None], every, system.firm)
        if failed:
            raise no_direction("this step", failed[0])
        wrong = system.firm & kinds.inadmissible(nu[0])
        if not bool(wrong.any()):
            return Step(omega[0], nu[0])
        firm = system.firm & ~wrong
        system = _attempt(lambda firm=firm: KKTSystem(H, G, firm, solver))
    raise DegenerateError(
        "curvature of the linearised problem",
        measured="not positive definite on the constraints that hold",
        threshold="positive definite",
        meaning="The quadratic problem of the step has no minimum: a constraint that kept it convex lets go, or the "
        "Lagrangian curves downwards along the constraints.",
        cure="Add a ridge, or use DirectionalInfluence, which needs convexity on the binding constraints only.",
    )


def _attempt(prepare_it: Callable[[], KKTSystem]) -> KKTSystem | None:
    """Prepare a system; None where its matrix is not positive definite."""
    try:
        return prepare_it()
    except DegenerateError:
        return None
