"""Retrainings without single images, for networks whose gradients and Hessians are computed by layers.

At full size, one removal changes the curvature so much that Newton's method with the Hessian of the solution fails, and
a Hessian takes as long as hundreds of gradients. Here the Hessian of the solution only gives the coordinates of
Newton's method and of the descent where that fails; both need nothing but gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import dif
from dif.derivatives.weight_change import Direction
from dif.estimators.retraining import RetrainingCache
from dif.solving.fit import Found
from studies.cnn_fit import GroupProgram, State, find_coordinates, say, settle


def retrain_each(
    problem: GroupProgram, solution: dif.Solution, removals: dif.Perturbation, images: Sequence[int], *,
    l2: float, tol: float, keep: Path,
) -> list[Found]:  # fmt: skip
    """Retrain from (θ̄, λ̄) without each of the images, until the relative KKT residual is at most `tol`.

    Args:
        problem: The problem of the solution.
        solution: The solution, with the Hessians of its parts.
        removals: The removals of the images.
        images: The numbers of the images.
        l2: Weight of the ridge.
        tol: In double precision, in the units of the solution.
        keep: Folder with a file for each retraining. Finished ones are not repeated; others go on where they stopped.

    Returns:
        Where each retraining ended; `reached` says whether the residual is small enough.
    """
    direction, cache = Direction(problem.program, removals), RetrainingCache.open(keep, solution, tol)
    found, W = cache.load(direction), None
    for p, image in enumerate(images):
        before = found.get(p, Found(solution.theta, solution.lam))
        if before.reached:
            continue
        if W is None:
            assert solution.part_hessians is not None
            W = find_coordinates(problem, State(solution.theta, solution.lam), solution.part_hessians, l2)
        say(f"Retraining {p + 1} of {len(images)}, {removals[p].labels[0]}")
        other = problem.without(image, direction.perturbed_program(p))
        end = settle(other, State(before.theta, before.lam), W, solution.scales, tol)
        found[p] = Found(end.theta, end.lam, end.residual, tol, before.iterations + end.rounds)
        cache.save(direction, [p], [found[p]])
    return [found[p] for p in range(len(images))]


def describe_failures(removals: dif.Perturbation, ends: Sequence[Found]) -> dict[str, str]:
    """Return why retrainings failed, by the label of the removal."""
    return {
        removals[p].labels[0]: f"Stopped at a KKT residual of {end.residual:.3g}; it must be at most {end.goal:.1g}."
        for p, end in enumerate(ends)
        if not end.reached
    }


def list_moves(solution: dif.Solution, ends: Sequence[Found]) -> list[Tensor]:
    """Return θ − θ̄ of each retraining; NaN where it failed."""
    unknown = torch.full_like(solution.theta, float("nan"))
    return [end.theta - solution.theta if end.reached else unknown for end in ends]
