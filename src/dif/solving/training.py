"""Training under constraints on mini-batches: descent on θ, ascent on λ, and the run with its states."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.evaluation.fingerprint import fingerprint_program
from dif.evaluation.optimizers import Ascent, Optimizer
from dif.evaluation.program import PerConstraint, Program
from dif.evaluation.training_step import Batch, Part, State, TrainingStep, Weights
from dif.optimality.residuals import KKT
from dif.optimality.solution import Solution
from dif.problem.parameters import Parameters
from dif.problem.problem import Problem
from dif.problem.sample_losses import SampleLosses
from dif.problem.structure import leaves, mapped
from dif.runtime.inputs import as_index
from dif.runtime.progress import progress
from dif.solving.states import States, open_folder

Schedule = Literal["cosine"] | Callable[[float], float] | None


@dataclass(frozen=True, eq=False)
class TrainingLoop:
    """The steps of one training: their batches and learning rates."""

    step: TrainingStep
    indices: tuple[tuple[Tensor, ...], ...]  # for each step, the samples of each table
    epochs: tuple[range, ...]  # the steps of each epoch
    factors: tuple[float, ...]  # of the learning rate at each step
    initial: State

    @property
    def length(self) -> int:
        """Number of steps."""
        return len(self.indices)

    def batch(self, t: int) -> Batch:
        """Return the samples of step t."""
        rows, device = self.step.program.rows, self.initial["theta"].device
        parts = []
        for number, (table, index) in enumerate(zip(rows.tables, self.indices[t], strict=True)):
            U = table.U[:, index.to(device)] * self.scale(number, len(index))
            parts.append(Part(number, table.samples, fetch(table.samples, index, device), index, U))
        return tuple(parts)

    def scale(self, number: int, count: int) -> Tensor:
        """Return the factors, (k, 1), that scale the sums of a table from `count` samples up to all; 1 for means."""
        rows = self.step.program.rows
        table, means = rows.tables[number], self.step.means[rows.columns(number)]
        return torch.where(means, 1.0, len(table.samples) / count).to(table.U)[:, None]

    def advance(self, t: int, state: State, weights: Weights | None = None, batch: Batch | None = None) -> State:
        """Return the state after step t."""
        return self.step.advance(state, self.batch(t) if batch is None else batch, self.factors[t], t, weights)


@dataclass(frozen=True, eq=False)
class Training:
    """Training of a problem by an optimiser on mini-batches, with ascent on the multipliers.

    Each Samples is shuffled anew in every epoch, by the seed; a step takes the next batch of each. A mean is taken over
    its members in the batch; a constraint without members in the batch is left out of that step. θ and λ move at the
    same time, both from the same point.

    Args:
        problem: Objective and constraints.
        params: Start: a dict of tensors or an `nn.Module`; never changed.
        optimizer: `dif.SGD`, `dif.Adam` or `dif.AdamW`.
        dual: `dif.Ascent`, for the multipliers.
        batch_size: Samples in a batch.
        epochs: Passes over the data.
        seed: Of the order of the samples.
        schedule: Factor of the learning rate: None for 1, "cosine" to fall to 0, or a function of the share of the
            training that is done, from 0 to 1.
        multipliers: Start of λ (per constraint or flat); zero when left out.
    """

    problem: Problem
    params: Any
    optimizer: Optimizer
    dual: Ascent = field(default_factory=lambda: Ascent(0.1))
    batch_size: int = 256
    epochs: int = 1
    seed: int = 0
    schedule: Schedule = None
    multipliers: Any = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("epochs", 1), ("seed", None)):
            number = as_index(getattr(self, name))
            if number is None or (least is not None and number < least):
                raise InvalidInputError(
                    f"`{name}` is {getattr(self, name)!r}.",
                    "It must be an integer." if least is None else f"It must be an integer ≥ {least}.",
                    "It sets the batches of the training.",
                    "Pass batch_size=250, epochs=5, seed=0, say.",
                )
        known = self.schedule in (None, "cosine") or callable(self.schedule)
        for name, sound, wanted, example in (
            ("optimizer", hasattr(self.optimizer, "update"), "an optimiser of dif", "dif.SGD(0.02, momentum=0.9)"),
            ("dual", isinstance(self.dual, Ascent), "a dif.Ascent", "dif.Ascent(0.5)"),
            ("schedule", known, 'None, "cosine" or a function of the share done', '"cosine"'),
        ):
            if not sound:
                raise InvalidInputError(
                    f"`{name}` is {getattr(self, name)!r}.",
                    f"It must be {wanted}.",
                    "Every step of the training uses it.",
                    f"Pass {example}, say.",
                )

    @cached_property
    def loop(self) -> TrainingLoop:
        """The steps of this training."""
        parameters, theta = Parameters.of(self.params)
        program = Program.of(self.problem, parameters, theta)
        lam = torch.zeros_like(program.tau)
        lam = lam if self.multipliers is None else program.flatten_multipliers(self.multipliers)
        step = TrainingStep(program, self.optimizer, self.dual)
        indices, epochs = draw_batches(
            [t.samples for t in program.rows.tables], self.batch_size, self.epochs, self.seed
        )
        factors = tuple(self._factor(t / max(1, len(indices))) for t in range(len(indices)))
        return TrainingLoop(step, indices, epochs, factors, step.start(theta, lam))

    def _factor(self, share: float) -> float:
        if self.schedule is None:
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * share)) if self.schedule == "cosine" else float(self.schedule(share))

    def run(self, *, keep: str | os.PathLike[str] | None = None, show_progress: bool = True) -> Run:
        """Train, and return the run with all that its derivatives need.

        Args:
            keep: Folder in which the state after every step is kept. Called again with the same folder, the training
                resumes after an interruption.
            show_progress: Show progress with the objective, the worst violation and λ on a terminal.
        """
        loop = self.loop
        resumed = keep is not None and open_folder(keep, self._fingerprint())
        states = States(loop.advance, loop.initial, loop.length, keep)
        begin = states.done if resumed else 0
        state, history = states[begin], History()
        with progress("training", loop.length, show_progress) as report:
            for t in range(begin, loop.length):
                batch = loop.batch(t)
                objective, violations = loop.step.observe(state, batch)
                history.add(t, objective, violations, state["lam"])
                state = loop.advance(t, state, batch=batch)
                if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves(state)):
                    raise InvalidInputError(
                        f"The state of the training is not finite after step {t + 1} of {loop.length}.",
                        "It must stay finite.",
                        "The training diverged, or the loss left its domain.",
                        "Use a smaller learning rate, or clip the arguments of logarithms and divisions.",
                    )
                states.put(t + 1, state)
                worst = float(violations.max()) if len(violations) else 0.0
                lam = float(state["lam"].max()) if len(state["lam"]) else 0.0
                report(t + 1, f"(objective {float(objective):.3g}, violation {worst:.1e}, λ {lam:.3g})")
        return Run(self, loop, states, history)

    def _fingerprint(self) -> str:
        """Hash all that the run depends on."""
        loop = self.loop
        hashed = hashlib.sha256(fingerprint_program(loop.step.program))
        hashed.update(repr((self.optimizer, self.dual, loop.factors)).encode())
        for tensor in (*leaves(loop.initial), *(index for step in loop.indices for index in step)):
            hashed.update(tensor.detach().cpu().numpy().tobytes())
        return hashed.hexdigest()


@dataclass
class History:
    """Objective, f − τ and λ at the batch of every step."""

    steps: list[int] = field(default_factory=list)
    objective: list[float] = field(default_factory=list)
    violations: list[list[float]] = field(default_factory=list)
    multipliers: list[list[float]] = field(default_factory=list)

    def add(self, t: int, objective: Tensor, violations: Tensor, lam: Tensor) -> None:
        """Record one step."""
        self.steps.append(t)
        self.objective.append(float(objective))
        self.violations.append(violations.tolist())
        self.multipliers.append(lam.tolist())


@dataclass(frozen=True, eq=False)
class Run:
    """A finished training: where it ended, and the states on the way."""

    training: Training
    loop: TrainingLoop
    states: States
    history: History

    @property
    def problem(self) -> Problem:
        """The problem that was trained on."""
        return self.training.problem

    @cached_property
    def end(self) -> Solution:
        """The end point, with its residuals; seldom a solution."""
        state = self.states[self.loop.length]
        return Solution.of_program(self.loop.step.program, state["theta"], state["lam"])

    @property
    def theta(self) -> Tensor:
        """θ at the end, (d,)."""
        return self.end.theta

    @property
    def params(self) -> dict[str, Tensor]:
        """θ at the end, in the structure of the params."""
        return self.end.params

    @property
    def multipliers(self) -> PerConstraint:
        """λ at the end, per constraint."""
        return self.end.multipliers

    @property
    def kkt(self) -> KKT:
        """Residuals of the optimality conditions at the end, over all samples."""
        return self.end.kkt

    def __repr__(self) -> str:
        return f"Run({self.loop.length} steps: objective {self.end.objective:.6g}, {self.kkt})"


def draw_batches(
    tables: Sequence[SampleLosses], batch_size: int, epochs: int, seed: int
) -> tuple[tuple[tuple[Tensor, ...], ...], tuple[range, ...]]:
    """Return the samples of each table at every step, and the steps of each epoch.

    An epoch is one pass over the largest population. Views of the same samples share their batches; a smaller
    population is shuffled anew whenever it has been gone through.
    """
    populations = list({id(samples.population): samples.population for samples in tables}.values())
    generator = torch.Generator().manual_seed(seed)
    longest = max((len(p) for p in populations), default=1)
    per_epoch = math.ceil(longest / batch_size)
    orders: dict[int, list[Tensor]] = {id(p): [] for p in populations}
    steps, ranges = [], []
    for epoch in range(epochs):
        for p in populations:
            if len(p) == longest:
                orders[id(p)] = list(torch.randperm(len(p), generator=generator).split(batch_size))
        for _ in range(per_epoch):
            for p in populations:
                if not orders[id(p)]:
                    orders[id(p)] = list(torch.randperm(len(p), generator=generator).split(batch_size))
            drawn = {id(p): orders[id(p)].pop(0) for p in populations}
            steps.append(tuple(drawn[id(samples.population)] for samples in tables))
        ranges.append(range(epoch * per_epoch, (epoch + 1) * per_epoch))
    return tuple(steps), tuple(ranges)


def fetch(samples: SampleLosses, index: Tensor, device: torch.device) -> Any:
    """Return the data of some samples as one batch."""
    return mapped(next(samples.storage.fetch([index])), lambda t: t.to(device))
