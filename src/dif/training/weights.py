"""What perturbations do to the weights of every step of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dif.derivatives.weight_change import Direction
from dif.errors import InvalidInputError
from dif.problem.data import describe
from dif.problem.perturbation import Addition, Perturbation
from dif.problem.weights import Move, SumChange
from dif.training.run import Loop, fetch
from dif.training.step import ROUNDING, Batch, Moves, Part, PartMoves, Weights, default_weights


@dataclass(frozen=True, eq=False)
class StepMove:
    """A move of weights relative to those that the samples have in the run: the change of a, and of b in means."""

    owner: Tensor | None  # (E,) perturbation of each entry; None: all perturbations
    index: Tensor  # (E,) samples of the table, in order; new ones are numbered behind them
    da: Tensor  # (E, k)
    renormalise: bool

    def find(self, index: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the entries of perturbations begin … end − 1 on the samples `index`, which may have repetitions.

        Returns the perturbation of each, the place of its sample in `index`, and the change of its weights, (E, k).
        """
        first, last = torch.searchsorted(self.index, index), torch.searchsorted(self.index, index, right=True)
        count = last - first
        place = torch.repeat_interleave(torch.arange(len(index)), count)
        which = torch.arange(len(place)) + torch.repeat_interleave(last - count.cumsum(0), count)
        if self.owner is None:
            owner = torch.repeat_interleave(torch.arange(begin, end), len(place))
            place, which = place.repeat(end - begin), which.repeat(end - begin)
        else:
            mine = (self.owner[which] >= begin) & (self.owner[which] < end)
            place, which = place[mine], which[mine]
            owner = self.owner[which]
        return owner, place, self.da[which.to(self.da.device)]


@dataclass(frozen=True, eq=False)
class StepChange:
    """Actions that are carried out together on the sums of one table."""

    table: int
    rows: Tensor  # (1 + m,) the factor in rows that are changed, else 0
    moves: tuple[StepMove, ...]


@dataclass(frozen=True, eq=False)
class Extra:
    """New samples that take part in a perturbed run, with the table they belong to and the steps they are in."""

    part: Part  # all of them
    steps: dict[int, Tensor]  # step → places among them of those that take part


class RunPerturbation:
    """P perturbations of a training run, resolved to weights.

    Args:
        loop: The steps of the run.
        perturbation: What is carried out.
        since: First step at which it takes effect.
    """

    def __init__(self, loop: Loop, perturbation: Perturbation, since: int = 0) -> None:
        self.loop, self.perturbation, self.since = loop, perturbation, since
        self.direction = Direction(loop.program, perturbation)  # refuses what does not belong to the problem
        self.dtau = self.direction.dtau  # (P, m)
        self.whole = any(factor == 1.0 for factor, _ in perturbation.pieces)  # then bounds move by a finite amount
        self.extras: dict[tuple[int, int], Extra] = {}  # by addition and table
        self.sizes = [len(table.samples) for table in loop.program.rows.tables]  # samples, with the new ones
        self.changes = tuple(map(self._resolve, self.direction.changes.sums))

    def __len__(self) -> int:
        return len(self.perturbation)

    def _resolve(self, change: SumChange) -> StepChange:
        program = self.loop.program
        (number,) = (t for t, table in enumerate(program.rows.tables) if table.samples is change.samples)
        moves = tuple(self._read(number, move) for move in change.moves)
        mine = torch.isin(program.terms, torch.tensor(change.terms, device=program.tau.device))
        return StepChange(number, change.factor * mine.to(program.tau), moves)

    def _read(self, number: int, move: Move) -> StepMove:
        """Return a move relative to the weights that the samples have in the run."""
        U, index = self.loop.program.rows.tables[number].U, move.entries.index
        owner = None if len(self) > move.entries.P else move.entries.owner
        dw = move.dw.to(U)
        weights = U[:, index.to(U.device)].T if move.added is None else dw
        da = torch.where(weights != 0, dw / torch.where(weights != 0, weights, 1.0), 0.0)
        if move.added is not None:
            index = self._add_samples(number, move.added, index, dw).part.index[index]
        order = index.argsort(stable=True)
        return StepMove(
            owner if owner is None else owner[order], index[order], da[order.to(da.device)], move.renormalise
        )

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
        if addition.like is None and loop.step.problem is None:
            raise InvalidInputError(
                f"A step of your own draws its batches by rules that dif does not know, so the samples added to "
                f"{addition.samples.name!r} are in no batch; pass like=i, and they are in the batches of sample i."
            )
        if addition.like is not None:
            batches = [(t, indices[number]) for t, indices in enumerate(loop.indices)]
            where = [[t for t, batch in batches for _ in range(int((batch == i).sum()))] for i in addition.like]
        else:
            generator = torch.Generator().manual_seed(0)
            draw = [torch.randint(epoch.start, epoch.stop, (count,), generator=generator) for epoch in loop.epochs]
            where = [[int(steps[q]) for steps in draw] for q in range(count)]
        steps: dict[int, list[int]] = {}
        for q, mine in enumerate(where):
            for t in mine:
                steps.setdefault(t, []).append(q)
        U = table.U.new_zeros((len(table.U), count))
        U[:, index.to(U.device)] = dw.T
        part = Part(number, new, None, self.sizes[number] + torch.arange(count), U, extra=True)
        self.sizes[number] += count
        return self.extras.setdefault(key, Extra(part, {t: torch.tensor(places) for t, places in steps.items()}))

    def find_groups(self) -> Iterator[tuple[int, Tensor, float]]:
        """Yield the sums that constraints contain, but not the objective.

        That is their number, which perturbations change them, (P,) bool, and their members in a batch on average.
        """
        rows, P = self.loop.program.rows, len(self)
        for number, table in enumerate(rows.tables):
            counts = [(table.U[:, steps[number].to(table.U.device)] != 0).sum(1) for steps in self.loop.indices]
            members = torch.stack(counts).double().mean(0)
            for k, column in enumerate(range(len(rows.means))[rows.columns(number)]):
                if bool(rows.C[0, column] == 0) and bool((rows.C[1:, column] != 0).any()):
                    touched = torch.zeros(P, dtype=torch.bool)
                    for move in (m for change in self.changes if change.table == number for m in change.moves):
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

    def weights(self, t: int, batch: Batch, begin: int, end: int) -> Weights:
        """Return the weights of perturbations begin … end − 1 at step t, (P, 1 + m, k, B) for each part.

        A sample that is removed by half takes part with half its weight, in the sum of a mean and in its divisor.
        """
        moves = self.moves(t, batch, begin, end)
        return moves.carry_out(default_weights(self.loop.program, batch), moves.owners - begin, end - begin)

    def moves(self, t: int, batch: Batch, begin: int = 0, end: int | None = None) -> Moves:
        """Return by how much perturbations begin … end − 1 (None: all) move the weights of step t."""
        end, R = len(self) if end is None else end, 1 + self.loop.program.m
        found: list[list[tuple[Tensor, Tensor, Tensor, Tensor]]] = [[] for _ in batch]
        for change in self.changes if t >= self.since else ():
            for entries, part in zip(found, batch, strict=True):
                for move in change.moves if part.table == change.table else ():
                    owner, place, da = move.find(part.index, begin, end)
                    da = change.rows[:, None] * da[:, None]  # (E, 1 + m, k)
                    entries.append((owner, place, da, da if move.renormalise else torch.zeros_like(da)))
        dtau = self.dtau[begin:end] * (t >= self.since)
        bounded = begin + torch.nonzero(dtau.any(1)).reshape(-1).cpu()
        owners = torch.unique(torch.cat([bounded, *(entry[0] for entries in found for entry in entries)]))
        exact = torch.isin(owners, bounded) if self.whole else torch.zeros_like(owners, dtype=torch.bool)
        parts = []
        for part, entries in zip(batch, found, strict=True):
            none = part.U.new_zeros((0, R, len(part.U)))
            columns = zip((owners[:0], owners[:0], none, none), *entries, strict=True)
            owner, place, da, db = (torch.cat(column) for column in columns)
            B = max(1, len(part.index))
            key, entry = torch.unique(torch.searchsorted(owners, owner) * B + place, return_inverse=True)
            sums = none.new_zeros((len(key), *none.shape[1:]))
            da, db = (sums.index_add(0, entry.to(sums.device), d) for d in (da, db))
            after = da + (0.0 if part.extra else 1.0)
            whole = (da != 0) & ((after.abs() <= ROUNDING) | ((after - 1).abs() <= ROUNDING))
            exact[(key // B)[whole.flatten(1).any(1).cpu()]] = True
            parts.append(PartMoves(key // B, key % B, da, db))
        return Moves(owners, tuple(parts), dtau[(owners - begin).to(dtau.device)], exact)
