"""The linearised optimality conditions at a point: prepared once, solved for one or many right-hand sides.

Every step of dif solves this system: the directional derivative, Newton's method in `fit` and `NewtonInfluence`, the
batched retraining and the path.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dif.errors import DegenerateError
from dif.linalg.multiplier_qp import no_step_error, solve_reduced_qp
from dif.linalg.solvers import LinearSolver, Operator, Solver, build_solver
from dif.problem.term import Kinds

Solve = Callable[[Tensor], Tensor]  # applies an inverse of H_ρ to columns


@dataclass(frozen=True)
class Response:
    """How the rows of a KKT system respond to P perturbations."""

    r: Tensor  # (P, m) the change of f − τ at θ̄, of all rows of the problem
    nu: Tensor  # (P, k) multipliers of the rows afterwards
    w: Tensor  # (P, k) the weights of the rows in ω = −H_ρ⁻¹(b + Gᵀw); NaN where there is no answer
    dlam: Tensor  # (P, m) the change of the multipliers of all rows of the problem
    failed: dict[int, str]  # why some have no answer, by number p


@dataclass(eq=False)
class KKTSystem:
    """The linearised KKT conditions of a step ω and the multipliers ν after it: g + Hω + Gᵀ(ν − λ) = 0.

    On equal rows c + Gω = 0. On the others c + Gω ≤ 0, ν ≥ 0 and ν·(c + Gω) = 0. The rows marked `firm` are solved as
    equalities. Because of these rows, H can be replaced by H_ρ = H + GᵀRG: the solution stays the same, and the matrix
    is positive definite.
    """

    H: Operator  # ∇²L
    G: Tensor  # (k, d) gradients of the rows
    firm: Tensor  # (k,) bool
    R: Tensor  # (k,) diagonal, zero on rows that are not firm
    solver: LinearSolver  # for H_ρ
    # Where perturbations start, for `respond`
    rows: Tensor = field(init=False)  # (k,) numbers in the problem
    equal: Tensor = field(init=False)  # (k,) bool, rows solved as equalities
    c: Tensor = field(init=False)  # (k,) values of the rows; 0 for the derivative
    lam: Tensor = field(init=False)  # (k,) their multipliers; 0 for the derivative
    sign_checked: Tensor = field(init=False)  # (k,) bool, equalities whose multipliers must stay ≥ 0
    soft: bool = field(init=False)  # whether the rows are penalties, without multipliers
    V: Tensor = field(init=False)  # H_ρ⁻¹Gᵀ, (d, k)
    S: Tensor = field(init=False)  # G H_ρ⁻¹ Gᵀ, (k, k)
    # the rows of the last call of `_eliminate` and their V, by whether the solve was exact
    _columns: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    @classmethod
    def prepare(
        cls, H: Operator, G: Tensor, firm: Tensor, *, rho: float | Tensor | None = None, damping: float = 0.0,
        solver: Solver = None,
    ) -> KKTSystem:  # fmt: skip
        """Factorise H_ρ = H + GᵀRG (+ δI), or build its preconditioner.

        Args:
            H: ∇²L.
            G: (k, d) gradients of the rows.
            firm: (k,) bool, rows that hold as equalities. On {Gω = −r} their term in H_ρ is constant, so the answer
                does not depend on R.
            rho: R of the firm rows. None: each adds curvature of the size of H; this is raised tenfold, up to six
                times, until H_ρ is positive definite.
            damping: δ.
            solver: Builds a solver for H_ρ, see `build_solver`.
        """
        rows, R = G[firm], G.new_zeros(len(G))
        if rho is not None or len(rows) == 0:
            R[firm] = 0.0 if rho is None else rho
        else:
            scale = H.scale()
            R[firm] = 1.0 / (rows * rows / scale).sum(1).clamp(min=torch.finfo(G.dtype).tiny)
            for _ in range(6):
                H_rho = H.with_rows(rows, R[firm], damping)
                rounding = torch.finfo(G.dtype).eps ** 0.5 * (scale + R[firm] @ rows**2)
                # not where the two parts of an entry cancel
                if not H_rho.assembled or bool((H_rho.dense().diagonal().abs() >= rounding).all()):
                    with suppress(DegenerateError):
                        return cls(H, G, firm, R, build_solver(H_rho, solver))
                R[firm] *= 10.0
        return cls(H, G, firm, R, build_solver(H.with_rows(rows, R[firm], damping), solver))

    @classmethod
    def prepare_convex(cls, H: Operator, G: Tensor, kinds: Kinds, binding: Tensor, **options: Any) -> KKTSystem:
        """Prepare with the equal rows firm. If H is not convex on these alone, the binding rows are firm too."""
        try:
            return cls.prepare(H, G, kinds.equal, **options)
        except DegenerateError:
            return cls.prepare(H, G, kinds.equal | binding, **options)

    def start(
        self, rows: Tensor, equal: Tensor, c: Tensor | None = None, lam: Tensor | None = None,
        sign_checked: Tensor | None = None, soft: bool = False,
    ) -> KKTSystem:  # fmt: skip
        """Return this system with the point at which perturbations start, solved for V, once for any number of them.

        Args:
            rows: (k,) the numbers of the rows among those of the problem.
            equal: (k,) bool, rows solved as equalities.
            c: (m,) values of all rows of the problem; None: zero, which gives the derivative.
            lam: (m,) their multipliers; None likewise.
            sign_checked: (k,) bool, inequalities solved as equalities, whose multipliers must stay ≥ 0.
            soft: Whether the rows are penalties, without multipliers.
        """
        system, zero = replace(self), torch.zeros_like(self.R)
        system.rows, system.equal, system.soft = rows, equal, soft
        system.c, system.lam = zero if c is None else c[rows], zero if lam is None else lam[rows]
        system.sign_checked = zero.bool() if sign_checked is None else sign_checked
        system.V = self.solver.solve(self.G.T)
        system.S = self.G @ system.V
        return system

    def respond(self, bV: Tensor, r: Tensor) -> Response:
        """Find the multipliers after perturbations that change ∇L by b and the values of the rows by r.

        Args:
            bV: (P, k) the products bᵀV.
            r: (P, m), of all rows of the problem.
        """
        c, dlam = self.c + r[:, self.rows], torch.zeros_like(r)
        w = self.R * c
        moved = c - bV - w @ self.S
        if self.soft:
            nu, failed = self.lam + self.R * moved, {}
        else:
            nu, failed = solve_reduced_qp(self.S, moved + self.lam @ self.S, self.equal)
            w = w + (nu - self.lam)
        dlam[:, self.rows] = nu - self.lam
        return Response(r, nu, w, dlam, failed)

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
    S = G @ V
    nu, failed = solve_reduced_qp(S, c + ((free[:, None] @ G.mT) + (lam[:, None] @ S))[:, 0], equal)
    return free - ((nu - lam)[:, None] @ V.mT)[:, 0], nu, failed


def kkt_step(
    g: Tensor, H: Operator, c: Tensor, G: Tensor, lam: Tensor, kinds: Kinds, binding: Tensor, solver: Solver = None
) -> tuple[Tensor, Tensor, KKTSystem]:
    """Min (g − Gᵀλ)ᵀω + ½ωᵀHω  s.t.  c + Gω = 0 on equal rows, ≤ 0 on the others; return ω, ν and the system solved.

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
            return omega[0], nu[0], system
        build = partial(KKTSystem.prepare, H, G, system.firm & ~wrong, solver=solver)
