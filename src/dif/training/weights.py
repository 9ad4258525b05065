"""What perturbations do to the weights of every step of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dif.derivatives.weight_change import Direction
from dif.errors import InvalidInputError
from dif.problem.data import describe
from dif.problem.perturbation import Addition
from dif.problem.weights import Move, SumChange
from dif.training.run import Loop, fetch
from dif.training.step import Batch, Moves, Part, PartMoves, Weights, default_weights, is_rounding


@dataclass(frozen=True, eq=False)
class StepMove:
    """A move of weights relative to those that the samples have in the run: the change of a, and of b in means."""

    table: int
    rows: Tensor  # (1 + m,) the factor in rows that are changed, else 0
    owner: Tensor | None  # (E,) perturbation of each entry; None: all perturbations
    index: Tensor  # (E,) samples of the table, in order; new ones are numbered behind them
    da: Tensor  # (E, k)
    renormalise: bool

    def find(self, index: Tensor, P: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the entries on the samples `index`, which may have repetitions.

        Returns the perturbation of each, the place of its sample in `index`, and the changes of a and b, (E, 1 + m, k).
        """
        first, last = torch.searchsorted(self.index, index), torch.searchsorted(self.index, index, right=True)
        count = last - first
        place = torch.repeat_interleave(torch.arange(len(index)), count)
        which = torch.arange(len(place)) + torch.repeat_interleave(last - count.cumsum(0), count)
        owner = torch.repeat_interleave(torch.arange(P), len(place)) if self.owner is None else self.owner[which]
        if self.owner is None:
            place, which = place.repeat(P), which.repeat(P)
        da = self.rows[:, None] * self.da[which.to(self.da.device)][:, None]
        return owner, place, da, da if self.renormalise else torch.zeros_like(da)


@dataclass(frozen=True, eq=False)
class Extra:
    """New samples that take part in a perturbed run, with the table they belong to and the steps they are in."""

    part: Part  # all of them
    steps: dict[int, Tensor]  # step → places among them of those that take part


class RunPerturbation:
    """P perturbations of a training run, resolved to weights.

    Args:
        loop: The steps of the run.
        direction: What is carried out, resolved on the program of the run.
        since: First step at which it takes effect.
    """

    def __init__(self, loop: Loop, direction: Direction, since: int = 0) -> None:
        self.loop, self.direction, self.since = loop, direction, since
        self.whole = any(factor == 1.0 for factor, _ in direction.perturbation.pieces)  # then bounds move at once
        self.extras: dict[tuple[int, int], Extra] = {}  # by addition and table
        self.sizes = [len(table.samples) for table in loop.program.rows.tables]  # samples, with the new ones
        self.changes = tuple(self._read(change, move) for change in direction.changes.sums for move in change.moves)

    def _read(self, change: SumChange, move: Move) -> StepMove:
        """Return a move relative to the weights that the samples have in the run."""
        program = self.loop.program
        (number,) = (t for t, table in enumerate(program.rows.tables) if table.samples is change.samples)
        U, index = program.rows.tables[number].U, move.entries.index
        dw = move.dw.to(U)
        weights = U[:, index.to(U.device)].T if move.added is None else dw
        da = torch.where(weights != 0, dw / torch.where(weights != 0, weights, 1.0), 0.0)
        if move.added is not None:
            index = self._add_samples(number, move.added, index, dw).part.index[index]
        order = index.argsort(stable=True)
        rows = change.factor * torch.isin(program.terms, torch.tensor(change.terms).to(program.terms)).to(program.tau)
        owner = None if move.entries.P < self.direction.P else move.entries.owner[order]
        return StepMove(number, rows, owner, index[order], da[order.to(da.device)], move.renormalise)

    def _add_samples(self, number: int, addition: Addition, index: Tensor, dw: Tensor) -> Extra:
        """Register new samples; each joins the batches of the sample it is like, or one batch drawn per epoch."""
        loop, table, key = self.loop, self.loop.program.rows.tables[number], (id(addition), number)
        if key in self.extras:
            return self.extras[key]
        new, count = addition.new.under(table.samples), len(addition.new)
        if describe(new.storage.one()) != describe(table.samples.storage.one()):
            raise InvalidInputError(
                f"The new data for {addition.samples.name!r} must have the structure "
                f"{describe(table.samples.storage.one())}, not {describe(new.storage.one())}; pass samples= to "
                "dif.unroll, so that the step gets data: a Cooper problem looks them up by number."
            )
        if addition.like is None and loop.problem is None:
            raise InvalidInputError(
                f"A step of your own draws its batches by rules that dif does not know, so the samples added to "
                f"{addition.samples.name!r} are in no batch; pass like=i, and they are in the batches of sample i."
            )
        if addition.like is not None:
            joins = [(t, addition.like[:, None] == step[number]) for t, step in enumerate(loop.indices)]
        else:
            generator = torch.Generator().manual_seed(0)
            draws = [torch.randint(epoch.start, epoch.stop, (count,), generator=generator) for epoch in loop.epochs]
            joins = [(t, draw[:, None] == t) for draw in draws for t in set(draw.tolist())]
        steps = {t: places for t, joining in joins if len(places := torch.nonzero(joining)[:, 0])}
        U = table.U.new_zeros((len(table.U), count))
        U[:, index.to(U.device)] = dw.T
        part = Part(number, new, None, self.sizes[number] + torch.arange(count), U, extra=True)
        self.sizes[number] += count
        return self.extras.setdefault(key, Extra(part, steps))

    def find_groups(self) -> Iterator[tuple[int, Tensor, float]]:
        """Yield the sums that constraints contain, but not the objective.

        That is their number, which perturbations change them, (P,) bool, and their members in a batch on average.
        """
        rows, P = self.loop.program.rows, self.direction.P
        for number, table in enumerate(rows.tables):
            drawn = torch.cat([step[number] for step in self.loop.indices]).to(table.U.device)
            members = (table.U[:, drawn] != 0).sum(1) / self.loop.length
            for k, column in enumerate(range(len(rows.means))[rows.columns(number)]):
                if bool(rows.C[0, column] == 0) and bool((rows.C[1:, column] != 0).any()):
                    touched = torch.zeros(P, dtype=torch.bool)
                    for move in (move for move in self.changes if move.table == number):
                        mine = (move.da[:, k] != 0).cpu()
                        touched[slice(P * bool(mine.any())) if move.owner is None else move.owner[mine]] = True
                    yield column, touched, float(members[k])

    def batch(self, t: int) -> Batch:
        """Return the samples of step t, with the new ones behind them."""
        loop, parts = self.loop, list(self.loop.batch(t))
        for extra in self.extras.values() if t >= self.since else ():
            place, part = extra.steps.get(t), extra.part
            if place is not None:
                U = part.U[:, place.to(part.U.device)] * loop.scale(part.table, len(parts[part.table].index))
                data = fetch(part.samples, place, part.U.device)
                parts.append(Part(part.table, part.samples, data, part.index[place], U, extra=True))
        return tuple(parts)

    def weights(self, t: int, batch: Batch) -> Weights:
        """Return the weights of the perturbations at step t, (P, 1 + m, k, B) for each part.

        A sample that is removed by half takes part with half its weight, in the sum of a mean and in its divisor.
        """
        moves = self.moves(t, batch)
        return moves.carry_out(default_weights(self.loop.program, batch), moves.owners, self.direction.P)

    def moves(self, t: int, batch: Batch) -> Moves:
        """Return by how much the perturbations move the weights of step t."""
        P, dtau, begun = self.direction.P, self.direction.dtau * (t >= self.since), t >= self.since
        found = [
            [move.find(part.index, P) for move in self.changes if begun and move.table == part.table] for part in batch
        ]
        bounded = torch.nonzero(dtau.any(1)).reshape(-1).cpu()
        owners = torch.unique(torch.cat([bounded, *(entry[0] for entries in found for entry in entries)]))
        exact, parts = torch.isin(owners, bounded) & self.whole, []
        for part, entries in zip(batch, found, strict=True):
            none, B = part.U.new_zeros((0, 1 + dtau.shape[1], len(part.U))), max(1, len(part.index))
            columns = zip((owners[:0], owners[:0], none, none), *entries, strict=True)
            owner, place, da, db = (torch.cat(column) for column in columns)
            key, entry = torch.unique(torch.searchsorted(owners, owner) * B + place, return_inverse=True)
            sums = none.new_zeros((len(key), *none.shape[1:]))
            da, db = (sums.index_add(0, entry.to(sums.device), d) for d in (da, db))
            whole = is_rounding(da - 1 if part.extra else da + 1)  # new, or gone
            exact[(key // B)[whole.flatten(1).any(1).cpu()]] = True
            parts.append(PartMoves(key // B, key % B, da, db))
        return Moves(owners, tuple(parts), dtau[owners.to(dtau.device)], exact)
