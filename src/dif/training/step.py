"""What a step of a training run is: a function of the state, a batch and the weights of its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dif.derivatives.program import Program
from dif.problem.data import leaves, map_tensors
from dif.problem.samples import Samples

VECTORS = 3  # of the size of the state that a step needs for each state

State = dict[str, Any]  # tensors in nested dicts, tuples and lists: parameters, multipliers, the optimiser's memory
Seen = dict[str, Tensor]  # what the history of a run records of a step: values in its batch, before it


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
Pulled = tuple[Tensor, ...]


@dataclass(frozen=True)
class Weights:
    """Who takes part in a step: a and b for each part of the batch, (1 + m, k, B), and the change of τ, (m,)."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    dtau: Tensor


def is_rounding(weights: Tensor) -> Tensor:
    """Return which weights count as 0, as those that three thirds of a removal leave."""
    return weights.abs() <= 64 * torch.finfo(weights.dtype).eps


@dataclass(frozen=True, eq=False)
class PartMoves:
    """Changes of the weights of one part of a batch: E entries, no two for one perturbation and sample."""

    owner: Tensor  # (E,) position of the perturbation among those that change the step
    place: Tensor  # (E,) position of the sample in the part
    da: Tensor  # (E, 1 + m, k)
    db: Tensor


@dataclass(frozen=True, eq=False)
class Moves:
    """The perturbations that change one step, and how they change its weights and bounds.

    Where samples are gone or new altogether, the step changes by its difference with and without them: `exact`.
    Elsewhere the change counts to first order, in proportion to the changes of the weights.
    """

    owners: Tensor  # (Q,) numbers of the perturbations
    parts: tuple[PartMoves, ...]
    dtau: Tensor  # (Q, m)
    exact: Tensor  # (Q,) bool

    def carry_out(self, start: Weights, at: Tensor, P: int) -> Weights:
        """Return the weights of P runs, (P, 1 + m, k, B) for each part, of which number at_q has perturbation q."""
        a, b, dtau = [], [], self.dtau.new_zeros((P, self.dtau.shape[1]))
        for moved, *pair in zip(self.parts, start.a, start.b, strict=True):
            where = tuple(index.to(dtau.device) for index in (at[moved.owner], moved.place))
            for side, x, dx in zip((a, b), pair, (moved.da, moved.db), strict=True):
                weights = x.movedim(-1, 0).repeat(P, 1, 1, 1).index_put(where, dx, accumulate=True)  # (P, B, 1 + m, k)
                side.append(torch.where(is_rounding(weights), 0.0, weights).movedim(1, -1))
        dtau[at.to(dtau.device)] = self.dtau
        return Weights(tuple(a), tuple(b), dtau)


class Step(Protocol):
    """The steps of a training run and their derivatives; t counts steps from 0."""

    @property
    def program(self) -> Program:
        """The samples, terms and bounds that perturbations are about."""
        ...

    def advance(self, t: int, state: State, batch: Batch) -> tuple[State, Seen]:
        """Return the state after step t of the run itself, and what there is to record."""
        ...

    def advance_many(self, t: int, states: State, batch: Batch, weights: Weights) -> State:
        """Return the states after step t, for P states and the weights of each, all with a first dimension P."""
        ...

    def push_forward(self, t: int, state: State, batch: Batch, tangent: State, moves: Moves) -> State:
        """Return how the state after step t changes with the state before it and under a perturbation.

        To first order in the state; in the weights as `Moves` says.
        """
        ...

    def pull_back(
        self, t: int, state: State, after: State, batch: Batch, adjoint: State, moves: Moves
    ) -> tuple[State, Pulled]:
        """Return the adjoints of the state before step t, for T of the state after it, and what `effects` needs."""
        ...

    def effects(self, t: int, batch: Batch, pulled: Pulled, moves: Moves) -> Tensor:
        """Return by how much perturbations change the targets through each row of step t, (Q, T, 1 + m)."""
        ...

    def memory(self, state: State, batch: Batch) -> int:
        """Return how many numbers a step needs for one more state."""
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


def combine(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Apply a function to the corresponding tensors of states or batches; return its results in their structure."""
    results = [function(*tensors) for tensors in zip(leaves(first), *map(leaves, others), strict=True)]
    each = iter(results)
    return map_tensors(first, lambda _: next(each))
