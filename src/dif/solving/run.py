"""A run: the steps of a training carried out one after the other, with the states on the way."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.fingerprint import encode_tensor, fingerprint_program, hash_all
from dif.derivatives.program import PerConstraint, Program
from dif.derivatives.step import Batch, Observation, Part, State, Step
from dif.errors import InvalidInputError
from dif.optimality.residuals import KKT
from dif.optimality.solution import Solution
from dif.problem.problem import Problem
from dif.problem.sample_losses import SampleLosses
from dif.problem.samples import Samples
from dif.problem.structure import leaves, map_tensors
from dif.runtime.atomic_file import open_atomically
from dif.runtime.progress import progress
from dif.solving.states import States, open_folder

Keep = str | os.PathLike[str] | None  # "all", "sqrt", a folder, or None for what fits into memory


@dataclass(frozen=True, eq=False)
class Loop:
    """The steps of one training, with the samples of each."""

    step: Step
    indices: tuple[tuple[Tensor, ...], ...]  # for each step, the samples of each table
    epochs: tuple[range, ...]  # the steps of each epoch
    initial: State

    @property
    def program(self) -> Program:
        """The samples, terms and bounds that perturbations are about."""
        return self.step.program

    @property
    def length(self) -> int:
        """Number of steps."""
        return len(self.indices)

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

    def advance(self, t: int, state: State) -> State:
        """Return the state after step t of the run."""
        return self.step.advance(t, state, self.batch(t))


@dataclass
class History:
    """Objective, f − τ and λ at the batch of every step; empty for a step of one's own."""

    steps: list[int] = field(default_factory=list)
    objective: list[float] = field(default_factory=list)
    violations: list[list[float]] = field(default_factory=list)
    multipliers: list[list[float]] = field(default_factory=list)

    def add(self, t: int, seen: Observation) -> None:
        """Record one step."""
        self.steps.append(t)
        self.objective.append(float(seen.objective))
        self.violations.append(seen.violations.tolist())
        self.multipliers.append(seen.multipliers.tolist())

    def cut(self, length: int) -> History:
        """Return the first steps."""
        return History(**{name: values[:length] for name, values in asdict(self).items()})


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
        return Solution.of_program(self.loop.program, *self.loop.step.read_point(self.state))

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
        problem = self.loop.step.problem
        if problem is None:
            raise InvalidInputError(
                "This run was made by a step of your own.",
                "Only a run of dif.Training has a problem, multipliers and KKT residuals.",
                "Nothing but the step knows what is minimised and which part of the state is a multiplier.",
                "Read run.state, or state the problem and use dif.Training.",
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
        if self.loop.step.problem is None:
            return f"Run({self.loop.length} steps)"
        return f"Run({self.loop.length} steps: objective {self.end.objective:.6g}, {self.kkt})"


def carry_out(loop: Loop, keep: Keep, settings: dict[str, str], show_progress: bool) -> Run:
    """Carry out all steps and return the run.

    Args:
        loop: The steps.
        keep: Which states to keep: "all", "sqrt" (every √T-th; those between are computed again), None for what fits
            into memory, or a folder. Called again with the same folder, the run resumes after an interruption.
        settings: Of the step, by name, as text. A folder of a run with other settings, data, start or batches is
            refused.
        show_progress: Show progress with the objective, the worst violation and λ on a terminal.
    """
    if keep is not None and (not isinstance(keep, str | os.PathLike) or not str(keep)):
        raise InvalidInputError(
            f"`keep` is {keep!r}.",
            'It must be "all", "sqrt", a folder, or None.',
            "It says which states of the run are kept, and where.",
            "Leave it out to keep what fits into memory.",
        )
    folder = None if keep is None or keep in ("all", "sqrt") else Path(keep)
    states = States(loop.advance, loop.initial, loop.length, folder, mode=None if folder else keep)  # type: ignore[arg-type]
    history, begin = History(), 0
    if folder is not None:
        open_folder(folder, {**_identify(loop), **settings})
        history = _read_history(folder)
        begin = min(states.done, len(history.steps)) if loop.step.problem else states.done
        history = history.cut(begin)
        _write_history(folder, history)
    states.put(0, loop.initial)
    state = states[begin]
    with progress("training", loop.length, show_progress) as report:
        for t in range(begin, loop.length):
            state, seen = loop.step.observe(t, state, loop.batch(t))
            _check_finite(state, t, loop.length)
            states.put(t + 1, state)
            if seen is not None:
                history.add(t, seen)
                if folder is not None:
                    with (folder / "history.jsonl").open("a") as file:
                        file.write(_describe_step(history, -1))
            report(t + 1, "" if seen is None else _describe(seen))
    return Run(loop, states, history)


def fetch(samples: SampleLosses, index: Tensor, device: torch.device) -> Any:
    """Return the data of some samples as one batch."""
    return map_tensors(next(samples.storage.fetch([index])), lambda t: t.to(device))


def _identify(loop: Loop) -> dict[str, str]:
    """Return hashes of all that a run depends on, by name."""
    batches = chain.from_iterable(map(encode_tensor, step) for step in loop.indices)
    return {
        "the data, the loss or the step": fingerprint_program(loop.program).hex(),
        "the start": hash_all(map(encode_tensor, leaves(loop.initial))).hex(),
        "the batches": hash_all(batches).hex(),
    }


def _check_finite(state: State, t: int, length: int) -> None:
    if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves(state)):
        raise InvalidInputError(
            f"The state of the training is not finite after step {t + 1} of {length}.",
            "It must stay finite.",
            "The training diverged, or the loss left its domain.",
            "Use a smaller learning rate, or clip the arguments of logarithms and divisions.",
        )


def _describe(seen: Observation) -> str:
    worst, largest = (float(x.max()) if len(x) else 0.0 for x in (seen.violations, seen.multipliers))
    return f"(objective {float(seen.objective):.3g}, violation {worst:.1e}, λ {largest:.3g})"


def _describe_step(history: History, number: int) -> str:
    """Return one step of a history as a line of JSON."""
    return json.dumps({f.name: getattr(history, f.name)[number] for f in fields(history)}) + "\n"


def _write_history(folder: Path, history: History) -> None:
    """Write a history to a folder, so that further steps can be appended."""
    with open_atomically(folder / "history.jsonl") as file:
        file.write("".join(_describe_step(history, k) for k in range(len(history.steps))).encode())


def _read_history(folder: Path) -> History:
    """Read the history in a folder, up to a line that was cut off."""
    path, lines = folder / "history.jsonl", []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return History(**{name: [line[name] for line in lines] for name in asdict(History())})
