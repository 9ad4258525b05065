"""What perturbations do to the weights of every step of a training run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dif.derivatives.weight_change import Direction
from dif.errors import InvalidInputError
from dif.problem.data import describe
from dif.problem.perturbation import Addition, Perturbation
from dif.problem.weights import Move, SumChange
from dif.training.run import Loop, fetch
from dif.training.step import Batch, Part, WeightGradients, Weights, default_weights

_ROUNDING = 1e-14  # size up to which a weight counts as 0, as what three thirds of a removal leave


@dataclass(frozen=True, eq=False)
class StepMove:
    """A move of weights relative to those that the samples have in the run: the change of a, and of b in means."""

    owner: Tensor | None  # (E,) perturbation of each entry; None: all perturbations
    index: Tensor  # (E,) samples of the table; new ones are numbered behind them
    da: Tensor  # (E, k)
    renormalise: bool

    def add_to(self, moved: Tensor, index: Tensor, begin: int) -> None:
        """Add it to the moves of the samples `index` under perturbations begin, begin + 1, …, (P, B, k)."""
        which, place = _match(self.index, index)
        if self.owner is None:
            moved.index_add_(1, place.to(moved.device), self.da[which.to(moved.device)].expand(len(moved), -1, -1))
            return
        owner = self.owner[which] - begin
        mine = (owner >= 0) & (owner < len(moved))
        at = (owner[mine].to(moved.device), place[mine].to(moved.device))
        moved.index_put_(at, self.da[which[mine].to(moved.device)], accumulate=True)


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
        return StepMove(owner, index, da, move.renormalise)

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
        default, moved = default_weights(self.loop.program, batch), self.move(t, batch, begin, end)
        a, b = (
            tuple(torch.where((x + dx).abs() <= _ROUNDING, 0.0, x + dx) for x, dx in zip(xs, dxs, strict=True))
            for xs, dxs in ((default.a, moved.a), (default.b, moved.b))
        )
        return Weights(a, b, moved.dtau)

    def move(self, t: int, batch: Batch, begin: int, end: int) -> Weights:
        """Return by how much perturbations begin … end − 1 move the weights of step t, (P, 1 + m, k, B) each."""
        default, P = default_weights(self.loop.program, batch), end - begin
        a, b = ([x.new_zeros((P, *x.shape)) for x in default.a] for _ in range(2))
        if t < self.since:
            return Weights(tuple(a), tuple(b), torch.zeros_like(self.dtau[begin:end]))
        for change in self.changes:
            for number, part in enumerate(batch):
                for move in change.moves if part.table == change.table else ():
                    moved = part.U.new_zeros((P, *part.U.T.shape))
                    move.add_to(moved, part.index, begin)
                    scaled = change.rows[:, None, None] * moved.mT[:, None]
                    a[number] += scaled
                    if move.renormalise:
                        b[number] += scaled
        return Weights(tuple(a), tuple(b), self.dtau[begin:end])


def _match(wanted: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return all pairs (e, j) with wanted[e] = index[j], which may have repetitions, as two tensors."""
    ordered, order = index.sort()
    first, last = torch.searchsorted(ordered, wanted), torch.searchsorted(ordered, wanted, right=True)
    count = last - first
    which = torch.repeat_interleave(torch.arange(len(wanted)), count)
    offset = torch.arange(len(which)) - torch.repeat_interleave(count.cumsum(0) - count, count)
    return which, order[first[which] + offset]


class Record:
    """Derivatives of T targets with respect to the weights of a whole run, added up step by step."""

    def __init__(self, change: RunPerturbation, T: int) -> None:
        self.change = change
        program = change.loop.program
        shapes = [(T, 1 + program.m, len(t.U), n) for t, n in zip(program.rows.tables, change.sizes, strict=True)]
        self.a, self.b = ([program.tau.new_zeros(shape) for shape in shapes] for _ in range(2))
        self.tau = program.tau.new_zeros((T, program.m))

    @classmethod
    def join(cls, parts: list[Record]) -> Record:
        """Return the record of all targets, for records of some of them."""
        whole = cls(parts[0].change, sum(len(part.tau) for part in parts))
        whole.a, whole.b = ([torch.cat(x) for x in zip(*(getattr(p, n) for p in parts), strict=True)] for n in "ab")
        whole.tau = torch.cat([part.tau for part in parts])
        return whole

    def add(self, batch: Batch, gradients: WeightGradients) -> None:
        """Add the derivatives of a step."""
        for part, a, b in zip(batch, gradients.a, gradients.b, strict=True):
            index = part.index.to(self.tau.device)
            self.a[part.table].index_add_(3, index, a)
            self.b[part.table].index_add_(3, index, b)
        self.tau += gradients.tau

    def by_row(self) -> Tensor:
        """Return the change of each target under each perturbation through each row, (P, T, 1 + m)."""
        dtau, (T, m) = self.change.dtau, self.tau.shape
        total = self.tau.new_zeros((len(dtau), T, 1 + m))
        total[:, :, 1:] += dtau[:, None] * self.tau
        for change in self.change.changes:
            a, b = self.a[change.table], self.b[change.table]
            for move in change.moves:
                slope = (a + b if move.renormalise else a)[..., move.index.to(total.device)]  # (T, 1 + m, k, E)
                effect = ((slope * move.da.T).sum(2) * change.rows[:, None]).permute(2, 0, 1)  # (E, T, 1 + m)
                if move.owner is None:
                    total += effect.sum(0)
                else:
                    total.index_add_(0, move.owner.to(total.device), effect)
        return total
