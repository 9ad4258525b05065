"""Damped Newton's method on many systems at once: each step is shortened until the residual falls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_DECREASE = 0.1  # fraction of the decrease predicted by Newton's model that a step must achieve (Armijo's condition)


def damped_newton(
    z: Tensor,
    residual: Tensor,
    step: Callable[[Tensor], tuple[Tensor, Tensor]],
    judge: Callable[[Tensor, Tensor], Tensor],
    proceed: Callable[[Tensor, Tensor, Tensor], Tensor],
    limit: int,
) -> None:
    """Move points along their Newton steps while their residuals fall; both are updated in place.

    Args:
        z: (P, n) the points.
        residual: (P,) their residuals.
        step: Takes the numbers (k,) of some points. Returns their Newton steps, (k, n), and which exist, (k,) bool.
        judge: Takes numbers (k,) and trial points (k, n). Returns the residuals there, (k,), inf if unusable.
        proceed: Called after every trial with the numbers of the points, whether each moved, and the length of its
            next trial (1 where a new step is due). Returns which of them go on, (k,) bool.
        limit: Largest number of trials.
    """
    live = torch.arange(len(z))
    direction, length = torch.zeros_like(z), torch.ones(len(z), dtype=torch.float64)
    due = torch.ones(len(z), dtype=torch.bool)  # where a new step must be computed
    for _ in range(limit):
        fresh = live[due[live]]
        if len(fresh):
            direction[fresh], exists = step(fresh)
            due[fresh] = False
            length[fresh] = exists.double()
            live = live[length[live] > 0]
        if len(live) == 0:
            return
        trial = z[live] + length[live, None].to(z) * direction[live]
        trial_residual = judge(live, trial)
        moved = trial_residual < (1 - _DECREASE * length[live]) * residual[live]
        there = live[moved]
        z[there], residual[there] = trial[moved], trial_residual[moved]
        length[live] = torch.where(moved, 1.0, 0.5 * length[live])
        due[there] = True
        live = live[proceed(live, moved, length[live])]
