"""Trainings carried out again on perturbed data, and the sweep backwards that differentiates through one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dif.derivatives.fingerprint import hash_all, hash_direction, hash_targets
from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.errors import InvalidInputError
from dif.problem.data import leaves, map_tensors
from dif.runtime.archive import read_archive, write_archive
from dif.runtime.guard import numbers_at_once
from dif.runtime.work import progress
from dif.training.run import Run
from dif.training.step import Pulled, State, combine
from dif.training.weights import RunPerturbation


def rerun(run: Run, direction: Direction, since: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield θ, (P, d), and λ, (P, m), at the end of perturbed runs, chunk by chunk.

    They have the start and the batches of the run, and are perturbed from step `since` on.
    """
    loop, size = run.loop, runs_at_once(run)
    for begin in range(0, direction.P, size):
        change = RunPerturbation(loop, direction[begin : begin + size], since)
        state = map_tensors(run.states[since], lambda t, P=change.direction.P: t.expand(P, *t.shape))
        for t in range(since, loop.length):
            batch = change.batch(t)
            state = loop.step.advance_many(t, state, batch, change.weights(t, batch))
        yield loop.step.read_point(state)


def runs_at_once(run: Run) -> int:
    """Return how many perturbed runs fit into memory together."""
    return max(1, 4 * numbers_at_once(run.theta) // run.loop.step.memory(run.loop.initial, run.loop.batch(0)))


_KIND = "sweep"  # of file
_SECONDS = 20.0  # between two checkpoints of a sweep


@dataclass
class Sweep:
    """What was found on the way back from the last step to step t."""

    t: int
    adjoint: State  # of the state before step t
    effects: Tensor  # (P, T, 1 + m) changes of the targets through each row
    kept: dict[int, Pulled]  # by step, what effects are computed from; only if the run is in a folder
    growth: float = 0.0  # largest norm of the adjoint on the way, compared with the end
    zeros: int = 0  # times that a multiplier of an inequality fell to zero


def sweep_back(run: Run, change: RunPerturbation, targets: Targets, show_progress: bool) -> Sweep:
    """Sweep back over the run for all targets, as many at once as fit into memory.

    If the run is kept in a folder, checkpoints are written there: an interrupted sweep resumes, and a finished one is
    not repeated for the same targets.
    """
    Q, size = targets.gradients(run.theta).T, runs_at_once(run)  # (T, d)
    chunks = range(0, len(Q), size)
    steps, folder = run.loop.length - change.since, run.states.folder
    name = "" if folder is None else _identify(run, change, targets)[:32]
    found: list[Sweep] = []
    with progress("unrolled", steps * len(chunks), show_progress) as report:
        for number, begin in enumerate(chunks):
            file = None if folder is None else folder / f"sweep_{name}_{begin}_{size}.npz"
            for sweep in _go_back(run, change, Q[begin : begin + size], file):
                report(steps * number + run.loop.length - sweep.t)
                found[number:] = [sweep]
    effects = torch.cat([sweep.effects for sweep in found], 1)
    return Sweep(change.since, {}, effects, {}, max(s.growth for s in found), found[0].zeros)


def _go_back(run: Run, change: RunPerturbation, Q: Tensor, file: Path | None) -> Iterator[Sweep]:
    """Yield the sweep after each step, with the effects up to there; steps of a checkpoint are not repeated."""
    step, first, written = run.loop.step, float(Q.norm()), time.monotonic()
    effects = Q.new_zeros((change.direction.P, len(Q), 1 + run.loop.program.m))
    sweep = Sweep(run.loop.length, step.make_adjoint(Q, run.state), effects, {})
    if file is not None:
        _load(file, sweep)
    yield sweep
    after = run.states[sweep.t]
    for t in reversed(range(change.since, run.loop.length)):
        batch = change.batch(t)
        moves = change.moves(t, batch)
        pulled = sweep.kept.get(t)
        if pulled is None:
            before = run.states[t]
            sweep.adjoint, pulled = step.pull_back(t, before, after, batch, sweep.adjoint, moves)
            sweep.t = t
            size = float(step.read_point(sweep.adjoint)[0].norm())
            sweep.growth = max(sweep.growth, size / first if first else 0.0)
            lam, then = (step.read_point(state)[1] for state in (before, after))
            sweep.zeros += int(((then == 0) & (lam > 0)).sum())
            after = before
            if file is not None:
                sweep.kept[t] = pulled
                if t == change.since or time.monotonic() - written > _SECONDS:
                    _save(file, sweep)
                    written = time.monotonic()
        if len(moves.owners):
            effects.index_add_(0, moves.owners.to(Q.device), step.effects(t, batch, pulled, moves))
        yield sweep


def _identify(run: Run, change: RunPerturbation, targets: Targets) -> str:
    """Return a hash of all that a sweep depends on, with perturbations that add samples or are of a user's step."""
    moved = hash_direction(change.direction) if change.extras or run.loop.problem is None else []
    about = f"{change.since} {[extra.steps for extra in change.extras.values()]}".encode()
    return hash_all([about, run.point.identity, *hash_targets(targets), *moved]).hex()


def _save(file: Path, sweep: Sweep) -> None:
    groups = {"adjoint": leaves(sweep.adjoint), **sweep.kept}
    arrays = {f"{name}_{k}": x for name, tensors in groups.items() for k, x in enumerate(tensors)}
    about = {"file": file.name, "t": sweep.t, "growth": sweep.growth, "zeros": sweep.zeros}
    write_archive(file, _KIND, arrays, about)


def _load(file: Path, sweep: Sweep) -> None:
    """Continue a sweep from its checkpoint, if there is a sound one."""
    try:
        arrays, about = read_archive(file, _KIND, file=file.name)
    except (FileNotFoundError, InvalidInputError):
        return
    groups: dict[str, list[Tensor]] = {}
    for name, array in arrays.items():  # in the order in which they were written
        groups.setdefault(name.split("_")[0], []).append(torch.from_numpy(array))
    sweep.adjoint = combine(lambda like, x: x.to(like), sweep.adjoint, groups.pop("adjoint"))
    sweep.kept = {int(t): tuple(x.to(sweep.effects) for x in tensors) for t, tensors in groups.items()}
    sweep.t, sweep.growth, sweep.zeros = about["t"], about["growth"], about["zeros"]
