"""Preconditioned conjugate gradients on many columns at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_PATIENCE = 300  # iterations without progress after which the routine gives up


@dataclass(frozen=True)
class CGResult:
    """Result of `conjugate_gradients`."""

    X: Tensor  # (d, c)
    reached: Tensor  # (c,) bool, columns whose residual is within the tolerance
    negative: Tensor  # (c,) curvature along the direction that stopped a column; +inf if none did
    iterations: int


def conjugate_gradients(
    product: Callable[[Tensor, Tensor], Tensor],
    B: Tensor,
    tolerance: Tensor,
    limit: int,
    precondition: Callable[[Tensor], Tensor],
) -> CGResult:
    """Solve A X = B, starting from zero, until the relative residual of every column is at most its tolerance.

    A column that meets negative curvature stops.

    Args:
        product: Returns A·D for some columns D (d, k) and their numbers (k,) among the columns of B.
        B: Right-hand sides, (d, c).
        tolerance: (c,) relative residual to reach in each column.
        limit: Largest number of iterations.
        precondition: Applies an approximate inverse of A to columns.
    """
    X, R = torch.zeros_like(B), B.clone()
    Z = precondition(R)
    D, rz = Z.clone(), (R * Z).sum(0)
    negative = torch.full_like(rz, float("inf"))
    goal = tolerance * torch.linalg.vector_norm(B, dim=0)
    sizes = torch.linalg.vector_norm(R, dim=0)
    live = sizes > goal
    used, best, since = 0, float("inf"), 0
    while bool(live.any()) and used < limit and since < _PATIENCE:
        used += 1
        some = torch.nonzero(live).reshape(-1)
        d = D[:, some]
        Ad = product(d, some)
        along = (d * Ad).sum(0)
        down = ~(along > 0)  # true for NaN too
        alpha = torch.where(down, 0.0, rz[some] / along)
        negative[some[down]] = (along / (d * d).sum(0))[down]
        X[:, some] += alpha * d
        R[:, some] -= alpha * Ad
        live[some[down]] = False
        Z = precondition(R[:, some])
        new = (R[:, some] * Z).sum(0)
        D[:, some] = Z + (new / rz[some]) * d
        rz[some] = new
        sizes = torch.linalg.vector_norm(R, dim=0)
        live &= sizes > goal
        worst = float((sizes[live] / goal[live]).max()) if bool(live.any()) else 0.0
        best, since = (worst, 0) if worst < 0.9 * best else (best, since + 1)
    return CGResult(X, sizes <= goal, negative, used)
