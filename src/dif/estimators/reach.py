"""How far perturbations reach: which constraints could begin to bind or let go within their steps."""

from __future__ import annotations

import torch
from torch import Tensor

from dif.estimators.linearisation import Linearisation
from dif.evaluation.weight_change import Direction, chunks
from dif.problem.perturbation import Perturbation

_SEEN = 32  # perturbations whose steps show which rows they reach,
_MOVED = 2**25  # if these have at most so many numbers
_MIXTURES, _FEW_MIXTURES = 8, 4  # of more perturbations, to see how far they reach; few where a solve is dear
_MARGIN = 3.0  # times what perturbations move a row or its multiplier: so far a row counts as within reach
_REST = 64  # rows whose moves under every perturbation are looked at, where rows are kept that may switch
_CLEAR = 1e-10  # relative: beyond rounding


def rows_within_reach(lin: Linearisation, perturbations: Perturbation) -> Tensor:
    """Which inequalities could begin to bind or let go, though they are not kept so that they can, (m,) bool.

    Of a few perturbations that is seen from their steps. Of many, from how far mixtures of them with random signs move
    each row and multiplier: their root mean square is √(Σₚ move²) but for chance, so at least the largest. Once some
    rows may switch, the others are looked at under every perturbation.
    """
    at, P = lin.at, len(perturbations)
    held = torch.ones_like(at.program.kinds.equal)
    held[lin.rows] = lin.equal
    held = held & at.program.kinds.one_sided
    rest = torch.nonzero(held).reshape(-1)
    found = torch.zeros_like(held)
    if P <= _SEEN and P * at.theta.numel() <= _MOVED:
        found[rest] = _past(lin, rest, *(x[:, rest] for x in _moves(lin, Direction(at.program, perturbations))))
        return found
    if bool((~lin.equal).any()) and len(rest) <= _REST:
        found[rest] = _past(lin, rest, *lin.margins(rest, perturbations))
        return found
    moved, priced = _typical_moves(lin, perturbations)
    binding = at.active.mask(at.active.binding)
    near = torch.where(binding, at.lam <= _MARGIN * priced, -at.c <= _MARGIN * moved)
    return near & held & ~at.active.mask(at.active.weak)


def _past(lin: Linearisation, rows: Tensor, moved: Tensor, priced: Tensor) -> Tensor:
    """Which rows are violated, or have negative multipliers, after some of the steps, (rows,) bool."""
    c, lam = lin.at.c[rows], lin.at.lam[rows]
    over = torch.nan_to_num(c + moved, nan=-1.0) > _CLEAR * (c.abs() + moved.abs())
    under = torch.nan_to_num(lam + priced, nan=1.0) < -_CLEAR * (lam + priced.abs())
    return (over | under).any(0)


def _moves(lin: Linearisation, direction: Direction) -> tuple[Tensor, Tensor]:
    """Return how the step of each perturbation moves f − τ of every row and its multiplier, (P, m) each."""
    omega, response = lin.steps(direction)
    return response.r + omega @ lin.at.G.T, lin.multiplier_change(response.nu)


def _typical_moves(lin: Linearisation, perturbations: Perturbation) -> tuple[Tensor, Tensor]:
    """Estimate √(Σₚ move²) of f − τ of each row, and of its multiplier, (m,) each; only equal rows take part."""
    at, Z = lin.at, _MIXTURES if lin.at.curvature.assembled else _FEW_MIXTURES
    generator = torch.Generator().manual_seed(0)
    b, r = at.theta.new_zeros((Z, at.theta.numel())), at.theta.new_zeros((Z, at.program.m))
    for chunk in chunks(perturbations):
        direction = Direction(at.program, chunk)
        mix = (2.0 * torch.randint(0, 2, (Z, len(chunk)), generator=generator) - 1.0).to(at.theta)
        more_b, more_f = direction.mixed(mix, at.theta, lin.weights, at.p, at.Dp)
        b, r = b + more_b, r + more_f[:, 1:] - mix @ direction.dtau
    equal, system = lin.equal, lin.system
    stiffness = (system.R * r[:, lin.rows])[:, equal]
    S, V, G = system.S[equal][:, equal], system.V[:, equal], system.G[equal]
    nu = torch.linalg.lstsq(S, (r[:, lin.rows][:, equal] - b @ V - stiffness @ S).T).solution.T
    omega = -system.solver.solve((b + (nu + stiffness) @ G).T).T
    priced = torch.zeros_like(r)
    priced[:, lin.rows[equal]] = nu
    moved = r + omega @ at.G.T
    return torch.linalg.vector_norm(moved, dim=0) / Z**0.5, torch.linalg.vector_norm(priced, dim=0) / Z**0.5
