"""Constraints within reach of perturbations: those that could become active or inactive within their steps."""

from __future__ import annotations

import torch
from torch import Tensor

from dif.derivatives.weight_change import Direction, split_perturbation
from dif.estimators.linearisation import Linearisation
from dif.problem.perturbation import Perturbation

_PERTURBATIONS = 32  # perturbations at most whose steps are computed one by one
_STEPS = 2**25  # entries of these steps at most: 256 MiB in double precision
_MIXTURES = 8  # random mixtures of the perturbations, where there are more
_MIXTURES_WITHOUT_HESSIAN = 4  # the same, where each solve is by conjugate gradients
_MARGIN = 3.0  # a row is within reach up to this many times the estimated move of its slack or multiplier
_ROWS = 64  # rows at most whose moves are computed under every perturbation
_ROUNDING = 1e-10  # relative size up to which a violation counts as rounding


def rows_within_reach(lin: Linearisation, perturbations: Perturbation) -> Tensor:
    """Return which inequalities could switch within a step though `lin` does not allow them to, (m,) bool.

    For a few perturbations their steps are computed. For many, mixtures of them with random signs are: the root mean
    square of the moves of a row over the mixtures estimates √(Σₚ move²), which is at least the largest move. Where
    `lin` lets some rows switch already, the moves of the other rows are computed under every perturbation.
    """
    at, P = lin.at, len(perturbations)
    fixed = torch.ones_like(at.program.kinds.equal)  # inequalities that cannot switch in `lin`
    fixed[lin.rows] = lin.equal
    fixed = fixed & at.program.kinds.one_sided
    rows = torch.nonzero(fixed).reshape(-1)
    near = torch.zeros_like(fixed)
    if P <= _PERTURBATIONS and P * at.theta.numel() <= _STEPS:
        omega, response = lin.steps(Direction(at.program, perturbations))
        dc, dlam = response.r + omega @ at.G.T, lin.multiplier_change(response.nu)
        near[rows] = _switches(lin, rows, dc[:, rows], dlam[:, rows])
        return near
    if bool((~lin.equal).any()) and len(rows) <= _ROWS:
        near[rows] = _switches(lin, rows, *lin.margins(rows, perturbations))
        return near
    dc, dlam = _typical_moves(lin, perturbations)
    binding = at.active.mask(at.active.binding)
    near = torch.where(binding, at.lam <= _MARGIN * dlam, -at.c <= _MARGIN * dc)
    return near & fixed & ~at.active.mask(at.active.weak)


def _switches(lin: Linearisation, rows: Tensor, dc: Tensor, dlam: Tensor) -> Tensor:
    """Return which rows are violated, or have a negative multiplier, after any of the steps, (rows,) bool.

    `dc` and `dlam`, (P, rows), are the changes of f − τ and of the multipliers.
    """
    c, lam = lin.at.c[rows], lin.at.lam[rows]
    violated = torch.nan_to_num(c + dc, nan=-1.0) > _ROUNDING * (c.abs() + dc.abs())
    released = torch.nan_to_num(lam + dlam, nan=1.0) < -_ROUNDING * (lam + dlam.abs())
    return (violated | released).any(0)


def _typical_moves(lin: Linearisation, perturbations: Perturbation) -> tuple[Tensor, Tensor]:
    """Estimate √(Σₚ move²) of f − τ and of the multiplier of each row, (m,) each, with the equal rows only."""
    at, Z = lin.at, _MIXTURES if lin.at.curvature.assembled else _MIXTURES_WITHOUT_HESSIAN
    generator = torch.Generator().manual_seed(0)
    b, r = at.theta.new_zeros((Z, at.theta.numel())), at.theta.new_zeros((Z, at.program.m))
    for chunk in split_perturbation(perturbations):
        direction = Direction(at.program, chunk)
        mix = (2.0 * torch.randint(0, 2, (Z, len(chunk)), generator=generator) - 1.0).to(at.theta)
        more_b, more_f = direction.combine(mix, at.theta, lin.weights, at.parts, at.part_gradients)
        b, r = b + more_b, r + more_f[:, 1:] - mix @ direction.dtau
    equal, system = lin.equal, lin.system
    stiffness = (system.R * r[:, lin.rows])[:, equal]
    S, V, G = system.S[equal][:, equal], system.V[:, equal], system.G[equal]
    nu = torch.linalg.lstsq(S, (r[:, lin.rows][:, equal] - b @ V - stiffness @ S).T).solution.T
    omega = -system.solver.solve((b + (nu + stiffness) @ G).T).T
    dlam = torch.zeros_like(r)
    dlam[:, lin.rows[equal]] = nu
    dc = r + omega @ at.G.T
    return torch.linalg.vector_norm(dc, dim=0) / Z**0.5, torch.linalg.vector_norm(dlam, dim=0) / Z**0.5
