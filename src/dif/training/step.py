"""What a step of a training run is: a function of the state, a batch and the weights of its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dif.derivatives.program import Program
from dif.problem.problem import Problem
from dif.problem.samples import Samples

State = dict[str, Any]  # tensors in nested dicts, tuples and lists: parameters, multipliers, the optimiser's memory


@dataclass(frozen=True, eq=False)
class Part:
    """Samples of one table in one batch."""

    table: int  # number of the table among those of the program
    samples: Samples
    data: Any
    index: Tensor  # (B,) numbers of the samples
    U: Tensor  # (k, B) their weights in the table's sums; of sums that are not means, scaled up to all samples
    extra: bool = False  # samples that are not in the run, but in a perturbed one: they weigh nothing here


Batch = tuple[Part, ...]


@dataclass(frozen=True)
class Weights:
    """Who takes part in a step: a and b for each part of the batch, (1 + m, k, B), and the change of τ, (m,)."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    dtau: Tensor


@dataclass(frozen=True)
class WeightGradients:
    """Derivatives of T targets with respect to the weights of one step."""

    a: tuple[Tensor, ...]  # for each part of the batch, (T, 1 + m, k, B)
    b: tuple[Tensor, ...]
    tau: Tensor  # (T, m)


@dataclass(frozen=True)
class Observation:
    """What the history of a run records of a step: values in its batch, before it."""

    objective: Tensor  # ()
    violations: Tensor  # (m,) f − τ, 0 for constraints without members in the batch
    multipliers: Tensor  # (m,)


class Step(Protocol):
    """The steps of a training run and their derivatives; t counts steps from 0."""

    @property
    def program(self) -> Program:
        """The samples, terms and bounds that perturbations are about."""
        ...

    @property
    def problem(self) -> Problem | None:
        """What is minimised under which constraints; None where only the step knows."""
        ...

    @property
    def settings(self) -> Any:
        """What the step depends on besides the program, such as the optimiser."""
        ...

    def observe(self, t: int, state: State, batch: Batch) -> tuple[State, Observation | None]:
        """Return the state after step t, and what there is to record."""
        ...

    def advance(self, t: int, state: State, batch: Batch, weights: Weights | None = None) -> State:
        """Return the state after step t; without weights, those of the run itself."""
        ...

    def advance_many(self, t: int, states: State, batch: Batch, weights: Weights) -> State:
        """Return the states after step t, for P states and the weights of each, all with a first dimension P."""
        ...

    def push_forward(self, t: int, state: State, batch: Batch, tangent: State, dweights: Weights) -> State:
        """Return the tangent of the state after step t, for tangents of the state before it and of the weights."""
        ...

    def pull_back(
        self, t: int, state: State, after: State, batch: Batch, adjoint: State
    ) -> tuple[State, WeightGradients]:
        """Return the adjoints of the state before step t, and of its weights, for T adjoints of the state after it."""
        ...

    def read_point(self, state: State) -> tuple[Tensor, Tensor]:
        """Return θ, (d,), and λ, (m,), of a state; leading dimensions stay."""
        ...

    def make_adjoint(self, Q: Tensor, state: State) -> State:
        """Return the adjoints of a state for targets with gradients Q in θ, (T, d)."""
        ...


def default_weights(program: Program, batch: Batch) -> Weights:
    """Return the weights of the run itself: 1 for its samples, 0 for extra ones."""
    R, tau = 1 + program.m, program.tau
    a = tuple(torch.full((R, *part.U.shape), 0.0 if part.extra else 1.0).to(tau) for part in batch)
    return Weights(a, a, torch.zeros_like(tau))
