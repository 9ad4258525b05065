"""The sweep backwards over a training run: derivatives of targets in the weights of all its samples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.derivatives.fingerprint import hash_all
from dif.derivatives.step import State
from dif.derivatives.weight_change import Direction
from dif.estimators.fingerprint import hash_direction, hash_solution, hash_targets
from dif.estimators.rerun import runs_at_once
from dif.estimators.training_weights import Record, RunPerturbation
from dif.optimality.targets import Targets
from dif.problem.structure import leaves, map_tensors
from dif.runtime.atomic_file import open_atomically
from dif.runtime.progress import progress
from dif.solving.run import Run

_SECONDS = 20.0  # between two checkpoints of a sweep


@dataclass
class Sweep:
    """The derivatives found on the way back from the last step to step t."""

    t: int
    adjoint: State  # of the state before step t
    record: Record
    growth: float = 0.0  # largest norm of the adjoint on the way, compared with the end
    zeros: int = 0  # times that a multiplier of an inequality fell to zero

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the rest of the sweep depends on."""
        return [*leaves(self.adjoint), *self.record.a, *self.record.b, self.record.tau]


def sweep_back(run: Run, change: RunPerturbation, targets: Targets, show_progress: bool) -> Sweep:
    """Sweep back over the run for all targets, as many at once as fit into memory.

    If the run is kept in a folder, checkpoints are written there: an interrupted sweep resumes, and a finished one is
    not repeated for the same targets.
    """
    Q, size = targets.gradients(run.theta).T, runs_at_once(run)  # (T, d)
    chunks = range(0, len(Q), size)
    steps, stem = run.loop.length - change.since, _checkpoint(run, change, targets)
    found: list[Sweep] = []
    with progress("unrolled", steps * len(chunks), show_progress) as report:
        for number, begin in enumerate(chunks):
            file = None if stem is None else stem.with_name(f"{stem.name}_{begin}_{size}.npz")
            for sweep in _go_back(run, change, Q[begin : begin + size], file):
                report(steps * number + run.loop.length - sweep.t)
                found[number:] = [sweep]
    return Sweep(change.since, {}, Record.join([s.record for s in found]), max(s.growth for s in found), found[0].zeros)


def _go_back(run: Run, change: RunPerturbation, Q: Tensor, file: Path | None) -> Iterator[Sweep]:
    """Yield the sweep after each step, with the derivatives up to there."""
    loop, first = run.loop, float(Q.norm())
    sweep = Sweep(loop.length, loop.step.make_adjoint(Q, run.state), Record(change, len(Q)))
    if file is not None:
        _load(file, sweep)
    yield sweep
    written = time.monotonic()
    for t, before, after in run.states.backwards(change.since, sweep.t):
        batch = change.batch(t)
        sweep.adjoint, gradients = loop.step.pull_back(t, before, after, batch, sweep.adjoint)
        sweep.record.add(t, batch, gradients)
        sweep.t = t
        size = float(loop.step.read_point(sweep.adjoint)[0].norm())
        sweep.growth = max(sweep.growth, size / first if first else 0.0)
        lam, then = (loop.step.read_point(state)[1] for state in (before, after))
        sweep.zeros += int(((then == 0) & (lam > 0)).sum())
        if file is not None and (t == change.since or time.monotonic() - written > _SECONDS):
            _save(file, sweep)
            written = time.monotonic()
        yield sweep


def _checkpoint(run: Run, change: RunPerturbation, targets: Targets) -> Path | None:
    """Return how the files of this sweep begin, in the folder of the run; None without a folder."""
    if run.states.folder is None:
        return None
    added = hash_direction(Direction(run.loop.program, change.perturbation)) if change.extras else []
    about = f"{change.since} {[extra.steps for extra in change.extras]}".encode()
    key = hash_all([about, hash_solution(run.point), *hash_targets(targets), *added]).hex()[:32]
    return run.states.folder / f"sweep_{key}"


def _save(file: Path, sweep: Sweep) -> None:
    numbers: dict[str, Any] = {"t": sweep.t, "growth": sweep.growth, "zeros": sweep.zeros}
    with open_atomically(file) as handle:
        np.savez(handle, *(x.detach().cpu().numpy() for x in sweep.tensors()), **numbers)


def _load(file: Path, sweep: Sweep) -> None:
    """Continue a sweep from its checkpoint, if there is one."""
    if not file.exists():
        return
    with np.load(file, allow_pickle=False) as stored:
        arrays = iter([torch.from_numpy(stored[f"arr_{k}"]) for k in range(len(sweep.tensors()))])
        sweep.t, sweep.growth, sweep.zeros = int(stored["t"]), float(stored["growth"]), int(stored["zeros"])
    sweep.adjoint = map_tensors(sweep.adjoint, lambda like: next(arrays).to(like))
    for tensor in sweep.tensors()[len(leaves(sweep.adjoint)) :]:
        tensor.copy_(next(arrays))
