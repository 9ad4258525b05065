"""Training under constraints on mini-batches: descent on θ, ascent on λ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from dif.derivatives.program import Program
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.problem import Problem
from dif.problem.samples import Samples
from dif.runtime.guard import convert_errors
from dif.runtime.inputs import as_index, check_count, check_number
from dif.solving.fit import read_multipliers
from dif.training.descent import Ascent, Optimizer, TrainingStep
from dif.training.run import Keep, Loop, Run, carry_out

Schedule = Literal["cosine"] | Callable[[float], float] | None


@dataclass(frozen=True, eq=False)
class Training:
    """Training of a problem by an optimiser on mini-batches, with ascent on the multipliers.

    Each Samples is shuffled anew in every epoch, by the seed; a step takes the next batch of each. An epoch is one pass
    over the largest Samples; smaller ones are shuffled anew whenever they have been gone through. A mean is taken over
    its members in the batch; other sums are scaled up from the batch to all samples. A constraint with a mean that has
    no members in the batch is left out of that step. θ and λ move at the same time, both from the same point. Samples
    that are added without `like=` join one random batch per epoch.

    Args:
        problem: Objective and constraints.
        params: Start: a dict of tensors or an `nn.Module`; never changed.
        optimizer: `dif.SGD`, `dif.Adam` or `dif.AdamW`.
        dual: `dif.Ascent`, for the multipliers.
        batch_size: Samples in a batch.
        epochs: Passes over the data.
        seed: Of the order of the samples.
        schedule: Factor of the learning rate of θ: None for 1, "cosine" to fall to 0, or a function of the share of the
            training that is done, from 0 to 1.
        multipliers: Start of λ (per constraint or flat), ≥ 0 for inequalities; zero when left out.
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
        for name in ("batch_size", "epochs"):
            check_count(getattr(self, name), name)
        number = as_index(self.seed)
        if number is None or not -(2**63) < number < 2**63:
            raise InvalidInputError(f"`seed` must be an integer of at most 64 bits, not {self.seed!r}.")
        optimizer = isinstance(self.optimizer, Optimizer) and not isinstance(self.optimizer, type)
        known = isinstance(self.schedule, str | None) and self.schedule in (None, "cosine")
        for name, sound, wanted in (
            ("optimizer", optimizer, "an optimiser such as dif.SGD(0.02, momentum=0.9)"),
            ("dual", isinstance(self.dual, Ascent), "a dif.Ascent"),
            ("schedule", known or callable(self.schedule), 'None, "cosine" or a function of the share that is done'),
        ):
            if not sound:
                raise InvalidInputError(f"`{name}` must be {wanted}, not {getattr(self, name)!r}.")

    @cached_property
    def loop(self) -> Loop:
        """The steps of this training."""
        parameters, theta = Parameters.of(self.params)
        program = Program.of(self.problem, parameters, theta)
        lam = read_multipliers(program, self.multipliers)
        tables = [table.samples for table in program.rows.tables]
        indices, epochs = draw_batches(tables, self.batch_size, self.epochs, self.seed)
        factors = tuple(self._factor(t / len(indices)) for t in range(len(indices)))
        step = TrainingStep(program, self.optimizer, self.dual, factors)
        start = {"theta": theta, "lam": lam, "memory": self.optimizer.start(theta)}
        return Loop(step, indices, epochs, start, program.problem, (self.optimizer, self.dual, factors))

    def _factor(self, share: float) -> float:
        if self.schedule is None:
            return 1.0
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * share))
        with convert_errors("schedule"):
            factor = self.schedule(share)
        return check_number(factor, f"schedule({share:.3g})", zero=True)

    def run(self, *, keep: Keep = None, show_progress: bool = True) -> Run:
        """Train, and return the run with all that its derivatives need.

        Args:
            keep: Which states to keep: "all", "sqrt" (every √T-th; those between are computed again), None for what
                fits into memory, or a folder. Called again with the same folder, the training resumes after an
                interruption.
            show_progress: Show progress with the objective, the worst violation and λ on a terminal.
        """
        return carry_out(self.loop, keep, show_progress)


def draw_batches(
    tables: Sequence[Samples], batch_size: int, epochs: int, seed: int
) -> tuple[tuple[tuple[Tensor, ...], ...], tuple[range, ...]]:
    """Return the samples of each table at every step, and the steps of each epoch.

    An epoch is one pass over the largest population. Views of the same samples share their batches; a smaller
    population is shuffled anew whenever it has been gone through.
    """
    populations = list(dict.fromkeys(samples.population for samples in tables))
    longest = max((len(p) for p in populations), default=1)
    generator = torch.Generator().manual_seed(seed)

    def deal(population: Samples) -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(len(population), generator=generator).split(min(batch_size, longest))

    dealers = {p: deal(p) for p in sorted(populations, key=lambda p: len(p) < longest)}
    per_epoch, steps = math.ceil(longest / batch_size), []
    for _ in range(epochs * per_epoch):
        drawn = {p: next(batches) for p, batches in dealers.items()}
        steps.append(tuple(drawn[samples.population] for samples in tables))  # type: ignore[index]
    return tuple(steps), tuple(range(k * per_epoch, (k + 1) * per_epoch) for k in range(epochs))
