"""The linearised optimality conditions at a point: prepared once, solved for one or many right-hand sides.

Every step of dif solves this system: the directional derivative, Newton's method in `fit` and `NewtonInfluence`, the
batched retraining and the path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from dif.errors import DegenerateError
from dif.linalg.cholesky import LinearSolver, Solver, prepare
from dif.linalg.multiplier_qp import no_step_error, solve_reduced_qp
from dif.linalg.operator import Operator
from dif.problem.kinds import Kinds

Solve = Callable[[Tensor], Tensor]  # applies an inverse of H_ρ to columns


@dataclass(eq=False)
class KKTSystem:
    """The linearised KKT conditions of a step ω and the multipliers ν after it: g + Hω + Gᵀ(ν − λ) = 0.

    On equal rows c + Gω = 0. On the others c + Gω ≤ 0, ν ≥ 0 and ν·(c + Gω) = 0. The rows marked `firm` are solved as
    equalities. Because of these rows, H can be replaced by H_ρ = H + GᵀRG: the solution stays the same, and the matrix
    is positive definite.
    """

    H: Operator  # ∇²L
    G: Tensor  # (m, d) gradients of the rows
    firm: Tensor  # (m,) bool
    R: Tensor  # (m,) diagonal, zero on rows that are not firm
    solver: LinearSolver  # for H_ρ
    # the rows of the last call of `_eliminate` and their V, by whether the solve was exact
    _columns: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    @classmethod
    def prepare(cls, H: Operator, G: Tensor, firm: Tensor, **options: Any) -> KKTSystem:
        """Factorise H_ρ, or build its preconditioner.

        Args:
            H: ∇²L.
            G: (m, d) gradients of the rows.
            firm: (m,) bool, rows that hold as equalities.
            options: `solver`, `rho` and `damping`, as in `dif.linalg.cholesky.prepare`.
        """
        prepared, R_firm = prepare(H, G[firm], **options)
        R = G.new_zeros(len(G))
        R[firm] = R_firm
        return cls(H, G, firm, R, prepared)

    @classmethod
    def prepare_convex(cls, H: Operator, G: Tensor, kinds: Kinds, binding: Tensor, **options: Any) -> KKTSystem:
        """Prepare with the equal rows firm. If H is not convex on these alone, the binding rows are firm too."""
        try:
            return cls.prepare(H, G, kinds.equal, **options)
        except DegenerateError:
            return cls.prepare(H, G, kinds.equal | binding, **options)

    @cached_property
    def V(self) -> Tensor:
        """H_ρ⁻¹Gᵀ, (d, m)."""
        return self.solver.solve(self.G.T)

    @cached_property
    def S(self) -> Tensor:
        """G H_ρ⁻¹ Gᵀ, (m, m)."""
        return self.G @ self.V

    def solve_rows(
        self, gV: Tensor, c: Tensor, lam: Tensor, equal: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[int, str]]:
        """Solve for the multipliers without forming the step.

        Args:
            gV: (P, m) the products gᵀV.
            c: (P, m) values of the rows.
            lam: (m,) multipliers that g contains.
            equal: (m,) bool, rows solved as equalities; None for rows without multipliers (penalties).

        Returns:
            ν, (P, m); the weights w, (P, m), of the rows in ω = −H_ρ⁻¹(g + Gᵀw); and why there is no solution, by
            number p of those that have none.
        """
        stiffness = self.R * c
        moved = c - gV - stiffness @ self.S
        if equal is None:
            return lam + self.R * moved, stiffness, {}
        nu, failed = solve_multipliers(self.S, moved, lam.expand_as(c), equal)
        return nu, nu - lam + stiffness, failed

    def step(
        self, g: Tensor, c: Tensor, lam: Tensor, rows: Tensor, equal: Tensor, solve: Solve | None = None
    ) -> tuple[Tensor, Tensor, dict[int, str]]:
        """Solve for ω, (P, d), and the multipliers after it, (P, m).

        Args:
            g: (P, d) gradients of the Lagrangians.
            c: (P, m) values of the rows.
            lam: (P, m) multipliers that g contains.
            rows: Numbers of the rows whose multipliers may change.
            equal: (m,) bool, rows solved as equalities.
            solve: Applies an inverse of H_ρ; the exact one if left out.

        Returns:
            ω and ν, NaN where there is no solution; and the reasons for that, by number p.
        """
        free, V = self._eliminate(g, c, rows, solve)
        omega, some, failed = complete_step(free, V, self.G[rows], c[:, rows], lam[:, rows], equal[rows])
        nu = torch.zeros_like(lam)
        nu[:, rows] = some
        nu[list(failed)] = float("nan")
        return omega, nu, failed

    def hold(self, g: Tensor, c: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """Solve for ω, (d,), and ν − λ, (m,), with the rows in `held` as equalities; NaN if these are dependent."""
        rows = torch.nonzero(held).reshape(-1)
        free, V = self._eliminate(g[None], c[None], rows)
        dlam = torch.zeros_like(c)
        if len(rows):
            found, failed = torch.linalg.solve_ex(self.G[rows] @ V, c[rows] + self.G[rows] @ free[0])
            dlam[rows] = found if int(failed) == 0 else torch.full_like(found, float("nan"))
        return free[0] - V @ dlam[rows], dlam

    def _eliminate(self, g: Tensor, c: Tensor, rows: Tensor, solve: Solve | None = None) -> tuple[Tensor, Tensor]:
        """Return the step with ν = λ, (P, d), and V = H_ρ⁻¹Gᵀ of some rows, (d, k), from one joint solve."""
        exact, solve = solve is None, solve or self.solver.solve
        b = (g + (self.R * c) @ self.G).T
        known = self._columns.get(exact)
        if known is not None and torch.equal(known[0], rows):
            return -solve(b).T, known[1]
        found = solve(torch.cat([b, self.G[rows].T], 1))
        self._columns[exact] = rows, found[:, len(g) :]
        return -found[:, : len(g)].T, found[:, len(g) :]


def complete_step(
    free: Tensor, V: Tensor, G: Tensor, c: Tensor, lam: Tensor, equal: Tensor
) -> tuple[Tensor, Tensor, dict[int, str]]:
    """Find the multipliers with which a step satisfies the rows, and add their effect: ω = free − V(ν − λ).

    Args:
        free: (P, d) the step with ν = λ.
        V: (d, k), or (P, d, k) if each p has a system of its own.
        G: (k, d) or (P, k, d).
        c: (P, k) values of the rows.
        lam: (P, k) multipliers that the step contains.
        equal: (k,) bool, rows solved as equalities.

    Returns:
        ω, (P, d), and ν, (P, k), NaN where there is no solution; and the reasons for that, by number p.
    """
    nu, failed = solve_multipliers(G @ V, c + (free[:, None] @ G.mT)[:, 0], lam, equal)
    return free - ((nu - lam)[:, None] @ V.mT)[:, 0], nu, failed


def solve_multipliers(S: Tensor, moved: Tensor, lam: Tensor, equal: Tensor) -> tuple[Tensor, dict[int, str]]:
    """Find the multipliers ν, (P, k), for which the values of the rows, moved − S(ν − λ), satisfy the constraints.

    `moved`, (P, k), are the values of the rows after the step with ν = λ. S is (k, k), or (P, k, k). Where
    no ν exists it is NaN, and the reason is returned by number p.
    """
    S = 0.5 * (S + S.mT)
    a = (moved + (lam[:, None] @ S)[:, 0]).double().cpu().numpy()
    matrices, mask = S.double().cpu().numpy(), equal.cpu().numpy()
    if S.dim() == 2:
        nu, failed = solve_reduced_qp(matrices, a, mask)
        return torch.as_tensor(nu).to(moved), failed
    nu, reasons = torch.full_like(moved, float("nan")), {}
    for p in torch.nonzero(torch.isfinite(S).flatten(1).all(1)).reshape(-1).tolist():
        found, failed = solve_reduced_qp(matrices[p], a[p : p + 1], mask)
        nu[p] = torch.as_tensor(found[0]).to(nu)
        reasons |= {p: failed[0]} if failed else {}
    return nu, reasons


def kkt_step(
    g: Tensor, H: Operator, c: Tensor, G: Tensor, lam: Tensor, kinds: Kinds, binding: Tensor, solver: Solver = None
) -> tuple[Tensor, Tensor]:
    """Min (g − Gᵀλ)ᵀω + ½ωᵀHω  s.t.  c + Gω = 0 on equal rows, ≤ 0 on the others; return ω and its multipliers.

    g is ∇L at the multipliers λ. Near a solution it is small, so that inexact solves do no harm.

    Where H is not convex on the equal rows alone, the rows of `binding` are held as equalities too and their signs
    are checked afterwards: rows with a negative multiplier are released, as long as convexity allows it.
    """
    every = torch.arange(len(c), device=c.device)
    build = partial(KKTSystem.prepare_convex, H, G, kinds, binding, solver=solver)
    while True:
        try:
            system = build()
        except DegenerateError as error:
            raise DegenerateError(
                "The quadratic problem of this step is not convex on the constraints that hold.",
                "Its curvature must be positive definite there.",
                "It has no minimum: a constraint that kept it convex becomes inactive, or the Lagrangian curves "
                "downwards along the constraints.",
                "Add a ridge, or use DirectionalInfluence, which needs convexity on the binding constraints only.",
            ) from error
        omega, nu, failed = system.step(g[None], c[None], lam[None], every, system.firm)
        if failed:
            raise no_step_error("this step", failed[0])
        wrong = system.firm & kinds.inadmissible(nu[0])
        if not bool(wrong.any()):
            return omega[0], nu[0]
        build = partial(KKTSystem.prepare, H, G, system.firm & ~wrong, solver=solver)
