"""Trainings carried out again on perturbed data, and the sweep backwards that differentiates through one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dif.derivatives.fingerprint import hash_all, hash_direction, hash_targets
from dif.derivatives.losses import cost
from dif.derivatives.program import Targets
from dif.errors import InvalidInputError
from dif.problem.data import leaves, map_tensors
from dif.problem.perturbation import Perturbation
from dif.runtime.archive import read_archive, write_archive
from dif.runtime.guard import numbers_at_once
from dif.runtime.work import Reporter, progress
from dif.training.run import Run
from dif.training.step import State
from dif.training.weights import Record, RunPerturbation

_VECTORS = 3  # of the size of the state that a step needs for each perturbation
_LAYERS = 64  # of the size of the batch that a step of the user's is assumed to need, since it cannot be measured


def rerun(
    run: Run, perturbations: Perturbation, since: int = 0, report: Reporter = lambda done, text="": None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield θ, (P, d), and λ, (P, m), at the end of the perturbed runs, chunk by chunk.

    Args:
        run: The run whose start and batches are used.
        perturbations: What is carried out.
        since: First step at which it is carried out; the steps before are those of the run.
        report: Called with the number of perturbed runs done, in parts of runs.
    """
    loop, change, size = run.loop, RunPerturbation(run.loop, perturbations, since), runs_at_once(run)
    for begin in range(0, len(perturbations), size):
        end = min(begin + size, len(perturbations))
        state = map_tensors(run.states[change.since], lambda t, P=end - begin: t.expand(P, *t.shape))
        for t in range(change.since, loop.length):
            batch = change.batch(t)
            state = loop.step.advance_many(t, state, batch, change.weights(t, batch, begin, end))
            report(begin + (end - begin) * (t + 1) / loop.length)
        yield loop.step.read_point(state)


def runs_at_once(run: Run) -> int:
    """Return how many perturbed runs fit into memory together."""
    program, theta, batch = run.loop.program, run.theta, run.loop.batch(0)
    numbers = _VECTORS * sum(x.numel() for x in leaves(run.loop.initial))
    for part in batch:
        if run.loop.step.problem is None:
            numbers += _LAYERS * sum(x.numel() for x in leaves(part.data))
        else:
            each = cost(part.samples, program.parameters, theta)
            numbers += len(part.index) * (each.inputs + 2 * each.elements)
    return max(1, 4 * numbers_at_once(theta) // numbers)


_KIND = "sweep"  # of file
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
    steps, folder = run.loop.length - change.since, run.states.folder
    name = "" if folder is None else _identify(run, change, targets)[:32]
    found: list[Sweep] = []
    with progress("unrolled", steps * len(chunks), show_progress) as report:
        for number, begin in enumerate(chunks):
            file = None if folder is None else folder / f"sweep_{name}_{begin}_{size}.npz"
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
        sweep.record.add(batch, gradients)
        sweep.t = t
        size = float(loop.step.read_point(sweep.adjoint)[0].norm())
        sweep.growth = max(sweep.growth, size / first if first else 0.0)
        lam, then = (loop.step.read_point(state)[1] for state in (before, after))
        sweep.zeros += int(((then == 0) & (lam > 0)).sum())
        if file is not None and (t == change.since or time.monotonic() - written > _SECONDS):
            _save(file, sweep)
            written = time.monotonic()
        yield sweep


def _identify(run: Run, change: RunPerturbation, targets: Targets) -> str:
    """Return a hash of all that a sweep depends on."""
    added = hash_direction(change.direction) if change.extras else []
    about = f"{change.since} {[extra.steps for extra in change.extras.values()]}".encode()
    return hash_all([about, run.point.identity, *hash_targets(targets), *added]).hex()


def _save(file: Path, sweep: Sweep) -> None:
    arrays = {f"tensor_{k}": x for k, x in enumerate(sweep.tensors())}
    about = {"file": file.name, "t": sweep.t, "growth": sweep.growth, "zeros": sweep.zeros}
    write_archive(file, _KIND, arrays, about)


def _load(file: Path, sweep: Sweep) -> None:
    """Continue a sweep from its checkpoint, if there is a sound one."""
    try:
        arrays, about = read_archive(file, _KIND, file=file.name)
    except (FileNotFoundError, InvalidInputError):
        return
    tensors = iter([torch.from_numpy(arrays[f"tensor_{k}"]) for k in range(len(arrays))])
    sweep.t, sweep.growth, sweep.zeros = about["t"], about["growth"], about["zeros"]
    sweep.adjoint = map_tensors(sweep.adjoint, lambda like: next(tensors).to(like))
    for tensor in sweep.tensors()[len(leaves(sweep.adjoint)) :]:
        tensor.copy_(next(tensors))
