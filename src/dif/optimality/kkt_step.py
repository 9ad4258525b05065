"""One Newton step on the optimality conditions: the linearised variational inequality, solved as a QP."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dif.errors import DegenerateError
from dif.linalg.cholesky import LinearSolver, Solver, prepare
from dif.linalg.multiplier_qp import no_direction, solve_reduced_qp
from dif.linalg.operator import Operator


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
    equality: Tensor,
    binding: Tensor,
    solver: Solver = None,
) -> Step:
    """Min (g − Gᵀλ)ᵀω + ½ωᵀHω  s.t.  c + Gω = 0 on equalities, ≤ 0 on every inequality; its multipliers are the new λ.

    g is ∇L at the multipliers λ: near a solution it is small, so that inexact solves do no harm.

    Where H is not convex on the equalities alone, the rows of `binding` are held as equalities too and their signs
    checked afterwards: rows with a negative multiplier are let go, as long as convexity allows it.
    """
    held = equality.clone()
    convex = _try(H, G[held], solver)
    if convex is None:
        held = equality | binding
        convex = _try(H, G[held], solver)
    for _ in range(1 + int((held & ~equality).sum())):
        if convex is None:
            break
        step = _solve(g, c, G, lam, held, *convex)
        wrong = held & ~equality & (step.lam < 0)
        if not bool(wrong.any()):
            return step
        held = held & ~wrong
        convex = _try(H, G[held], solver)
    raise DegenerateError(
        "curvature of the linearised problem",
        measured="not positive definite on the constraints that hold",
        threshold="positive definite",
        meaning="The quadratic problem of the step has no minimum: a constraint that kept it convex lets go, or the "
        "Lagrangian curves downwards along the constraints.",
        cure="Add a ridge, or use DirectionalInfluence, which needs convexity on the binding constraints only.",
    )


def _try(H: Operator, G: Tensor, solver: Solver) -> tuple[LinearSolver, Tensor] | None:
    try:
        return prepare(H, G, solver=solver)
    except DegenerateError:
        return None


def _solve(g: Tensor, c: Tensor, G: Tensor, lam: Tensor, held: Tensor, solver: LinearSolver, R: Tensor) -> Step:
    b = g + G[held].T @ (R * c[held])
    found = solver.solve(torch.cat([b[:, None], G.T], 1))
    free_step, V = found[:, 0], found[:, 1:]
    S = G @ V
    nu, failed = solve_reduced_qp(
        S.double().cpu().numpy(),
        (c - G @ free_step + S @ lam).double().cpu().numpy()[None],
        held.cpu().numpy().astype(bool),
    )
    if failed:
        raise no_direction("this step", failed[0])
    new = torch.as_tensor(np.ascontiguousarray(nu[0])).to(c)
    return Step(-free_step - V @ (new - lam), new)
