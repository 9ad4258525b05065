"""A run: the steps of a training carried out one after the other, with the states on the way."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.fingerprint import ObjectEncoder, encode_tensor, fingerprint_program, hash_all
from dif.derivatives.program import PerConstraint, Program
from dif.errors import InvalidInputError
from dif.optimality.judgement import KKT
from dif.optimality.solution import Solution
from dif.problem.data import leaves, map_tensors
from dif.problem.problem import Problem
from dif.problem.samples import Samples
from dif.runtime.archive import Journal, lock_folder, read_archive, write_archive
from dif.runtime.inputs import expect_folder
from dif.runtime.work import progress
from dif.training.step import Batch, Part, Seen, State, Step, combine

_KIND = "state of a run"  # of file
_IN_MEMORY = 2**29  # numbers of all states together that are kept in memory; beyond, only every √T-th state is


class States:
    """The states s₀ … s_T of a run.

    Args:
        loop: Its steps.
        keep: "all" keeps all states in memory, "sqrt" every √T-th, None all if they fit. Each state is written to a
            folder as it is reached.
    """

    def __init__(self, loop: Loop, keep: Keep) -> None:
        self.loop, self.length, self.folder = loop, loop.length, _read_folder(keep)
        self.identity = {} if self.folder is None else loop.identify()
        size = sum(t.numel() for t in leaves(loop.initial))
        everything = keep == "all" or (keep != "sqrt" and size * (self.length + 1) <= _IN_MEMORY)
        self.every = 1 if everything or self.folder is not None else max(1, math.isqrt(self.length))
        self._kept: dict[int, Any] = {}
        self._recent: dict[int, Any] = {}

    def put(self, t: int, state: Any) -> None:
        """Keep the state before step t, if it is one of those that are kept."""
        if self.folder is not None:
            arrays = {f"leaf_{k}": leaf for k, leaf in enumerate(leaves(state))}
            write_archive(self._file(t), _KIND, arrays, {"step": t, "identity": self.identity})
        elif t % self.every == 0 or t == self.length:
            self._kept[t] = state

    def __getitem__(self, t: int) -> Any:
        if self.folder is not None:
            cure = "Delete it; training with the same folder then continues from the state before it."
            arrays, _ = read_archive(self._file(t), _KIND, cure, step=t, identity=self.identity)
            tensors = [torch.from_numpy(arrays[f"leaf_{k}"]) for k in range(len(arrays))]
            return combine(lambda like, x: x.to(like), self.loop.initial, tensors)
        if t in self._kept:
            return self._kept[t]
        if t not in self._recent:
            begin = t - t % self.every
            state, self._recent = self._kept[begin], {}
            for s in range(begin, min(begin + self.every, self.length)):
                self._recent[s] = state
                state, _ = self.loop.advance(s, state)
        return self._recent[t]

    def find_done(self) -> int:
        """Return the number of the last state in the folder, 0 where there is none; refuse those of another run."""
        if not self._file(0).exists():
            return 0
        cure = "Delete this folder to start again, or choose another one."
        known = read_archive(self._file(0), _KIND, cure)[1]["identity"]
        different = [name for name, digest in self.identity.items() if known.get(name) != digest]
        if different:
            raise InvalidInputError(
                f"The folder {str(self.folder)!r} holds another run: {' and '.join(different)} differ. Pass the same "
                "ones (draw batches once, by a seed), or choose another folder."
            )
        return next(t for t in range(self.length + 1) if t == self.length or not self._file(t + 1).exists())

    def _file(self, t: int) -> Path:
        assert self.folder is not None
        return self.folder / f"state_{t:06d}.npz"


Keep = str | os.PathLike[str] | None  # "all", "sqrt", a folder, or None for what fits into memory


@dataclass(frozen=True, eq=False)
class Loop:
    """The steps of one training, with the samples of each."""

    step: Step
    indices: tuple[tuple[Tensor, ...], ...]  # for each step, the samples of each table
    epochs: tuple[range, ...]  # the steps of each epoch
    initial: State
    problem: Problem | None = None  # what is minimised under which constraints; None where only the step knows
    settings: Any = None  # what the steps depend on besides the program, such as the optimiser

    @property
    def program(self) -> Program:
        """The samples, terms and bounds that perturbations are about."""
        return self.step.program

    @property
    def length(self) -> int:
        """Number of steps."""
        return len(self.indices)

    def advance(self, t: int, state: State) -> tuple[State, Seen]:
        """Return the state after step t, and what there is to record."""
        after, seen = self.step.advance(t, state, self.batch(t))
        return map_tensors(after, torch.Tensor.detach), seen

    def batch(self, t: int) -> Batch:
        """Return the samples of step t."""
        device, parts = self.program.tau.device, []
        for number, (table, index) in enumerate(zip(self.program.rows.tables, self.indices[t], strict=True)):
            U = table.U[:, index.to(device)] * self.scale(number, len(index))
            parts.append(Part(number, table.samples, fetch(table.samples, index, device), index, U))
        return tuple(parts)

    def scale(self, number: int, count: int) -> Tensor:
        """Return the factors, (k, 1), that scale the sums of a table from `count` samples up to all; 1 for means."""
        rows = self.program.rows
        table, means = rows.tables[number], rows.means[rows.columns(number)]
        return torch.where(means, 1.0, len(table.samples) / count).to(table.U)[:, None]

    def identify(self) -> dict[str, str]:
        """Return hashes of all that a run depends on, by name."""
        batches = chain.from_iterable(map(encode_tensor, step) for step in self.indices)
        return {
            "the data, the loss or the step": fingerprint_program(self.program).hex(),
            "the start": hash_all(map(encode_tensor, leaves(self.initial))).hex(),
            "the batches": hash_all(batches).hex(),
            "the optimiser or the schedule": hash_all(ObjectEncoder().encode(self.settings)).hex(),
        }


@dataclass(frozen=True)
class History:
    """Objective, f − τ and λ at the batch of every step; empty for a step of one's own.

    The values of a step are those before it; f − τ is 0 for constraints without members in the batch.
    """

    steps: list[int] = field(default_factory=list)
    objective: list[float] = field(default_factory=list)
    violations: list[list[float]] = field(default_factory=list)
    multipliers: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Run:
    """A finished training: where it ended, and the states on the way."""

    loop: Loop
    states: States
    history: History

    @property
    def end(self) -> Solution:
        """The end point, with its residuals; seldom a solution."""
        _ = self.problem
        return self.point

    @cached_property
    def point(self) -> Solution:
        """The end point with the samples that were trained on; without losses where only the step knows them."""
        point = Solution.of_program(self.loop.program, *self.loop.step.read_point(self.state))
        point.made_by = self.identity
        return point

    @cached_property
    def identity(self) -> bytes:
        """Hash of all that the run depends on: data, losses, start, batches, and the optimiser or the step."""
        return hash_all(digest.encode() for digest in self.loop.identify().values())

    @property
    def state(self) -> State:
        """The state after the last step."""
        return self.states[self.loop.length]

    @property
    def theta(self) -> Tensor:
        """θ at the end, (d,)."""
        return self.point.theta

    @property
    def params(self) -> dict[str, Tensor]:
        """θ at the end, in the structure of the params."""
        return self.point.params

    @property
    def samples(self) -> tuple[Samples, ...]:
        """The samples that were trained on; removals and other perturbations are made from these."""
        return tuple(dict.fromkeys(table.samples.population for table in self.loop.program.rows.tables))  # type: ignore[arg-type]

    @property
    def problem(self) -> Problem:
        """The problem that was trained on."""
        problem = self.loop.problem
        if problem is None:
            raise InvalidInputError(
                "This run was made by a step of your own, so dif does not know its problem, multipliers and residuals; "
                "read run.state, or use dif.Training."
            )
        return problem

    @property
    def multipliers(self) -> PerConstraint:
        """λ at the end, per constraint."""
        return self.end.multipliers

    @property
    def kkt(self) -> KKT:
        """Residuals of the optimality conditions at the end, over all samples."""
        return self.end.kkt

    def __repr__(self) -> str:
        if self.loop.problem is None:
            return f"Run({self.loop.length} steps)"
        return f"Run({self.loop.length} steps: objective {self.end.objective:.6g}, {self.kkt})"


def carry_out(loop: Loop, keep: Keep, show_progress: bool) -> Run:
    """Carry out all steps and return the run.

    Args:
        loop: The steps.
        keep: Which states to keep: "all", "sqrt" (every √T-th; those between are computed again), None for what fits
            into memory, or a folder. Called again with the same folder, the run resumes after an interruption. A folder
            of a run with other settings, data, start or batches is refused. One that another process uses is waited
            for.
        show_progress: Show progress with the objective, the worst violation and λ on a terminal.
    """
    states = States(loop, keep)
    with nullcontext() if states.folder is None else lock_folder(states.folder):
        return Run(loop, states, _carry_out(loop, states, show_progress))


def _carry_out(loop: Loop, states: States, show_progress: bool) -> History:
    """Carry out the steps that are not in the folder of the states, and return the history of all."""
    begin, journal = 0, None
    entries: list[dict[str, Any]] = []  # of the history, one for each step
    if states.folder is not None:
        begin = states.find_done()
        if loop.problem is not None:
            journal = Journal(states.folder / "history.jsonl", "history of a run")
            with suppress(FileNotFoundError, ValueError):  # none, or not even its first line
                (head, *known), _ = journal.read()
                entries = known[:begin] if head == states.identity else []
            begin = len(entries)
            journal.write([states.identity, *entries])
    if begin == 0:
        states.put(0, loop.initial)
    state = states[begin]
    with progress("training", loop.length, show_progress) as report:
        for t in range(begin, loop.length):
            state, seen = loop.advance(t, state)
            if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves(state)):
                raise InvalidInputError(
                    f"The state of the training is not finite after step {t + 1} of {loop.length}.",
                    "It must stay finite.",
                    "The training diverged, or the loss left its domain.",
                    "Use a smaller learning rate, or clip the arguments of logarithms and divisions.",
                )
            states.put(t + 1, state)
            if seen:
                entries.append({"steps": t} | {name: value.tolist() for name, value in seen.items()})
            if journal is not None:
                journal.append(entries[-1])
            report(t + 1, _describe(**seen) if seen else "")
    return History(**{name: [entry[name] for entry in entries] for name in (entries[0] if entries else ())})


def _read_folder(keep: Keep) -> Path | None:
    """Return the folder in which states are kept; None where they are kept in memory."""
    if keep in (None, "all", "sqrt"):
        return None
    mistyped = str(keep).lower() in ("", "all", "sqrt", "none")
    if mistyped or not isinstance(keep, str | os.PathLike) or Path(keep).is_file():
        raise InvalidInputError(f'`keep` must be "all", "sqrt", a folder or None, not {keep!r}.')
    return expect_folder(keep, "keep")


def fetch(samples: Samples, index: Tensor, device: torch.device) -> Any:
    """Return the data of some samples as one batch."""
    return map_tensors(next(samples.storage.fetch([index])), lambda t: t.to(device))


def _describe(objective: Tensor, violations: Tensor, multipliers: Tensor) -> str:
    worst, largest = (float(x.max()) if len(x) else 0.0 for x in (violations, multipliers))
    return f"(objective {float(objective):.3g}, violation {worst:.1e}, λ {largest:.3g})"
