"""What perturbations do to the weights of every step of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dif.derivatives.step import Batch, Part, WeightGradients, Weights, default_weights
from dif.derivatives.weight_change import Direction
from dif.errors import InvalidInputError
from dif.problem.perturbation import Addition, Perturbation, Removal, Reweighting, Shift
from dif.problem.structure import describe
from dif.solving.run import Loop, fetch


@dataclass(frozen=True, eq=False)
class Entry:
    """One action on one table: the change of a on some samples, and of b where the means are renormalised."""

    table: int
    rows: Tensor  # (1 + m,) 1 for rows that are changed
    owner: Tensor | None  # (E,) perturbation of each entry; None: all perturbations
    index: Tensor  # (E,) samples of the table, or of `extra`
    da: Tensor  # (E, k) change of a
    renormalise: bool
    extra: int | None = None  # number of the addition whose samples these are


@dataclass(frozen=True, eq=False)
class Extra:
    """New samples that take part in a perturbed run, with the table they belong to and the steps they are in."""

    part: Part  # all of them
    steps: dict[int, Tensor]  # step → numbers of those that take part


@dataclass(frozen=True, eq=False)
class RunPerturbation:
    """P perturbations of a training run, resolved to weights."""

    loop: Loop
    perturbation: Perturbation
    since: int = 0  # first step at which they take effect
    entries: list[Entry] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    dtau: Tensor = field(init=False)  # (P, m)

    def __post_init__(self) -> None:
        program = self.loop.program
        direction = Direction(program, self.perturbation)  # refuses what does not belong to the problem
        object.__setattr__(self, "dtau", direction.dtau)
        for scale, action in self.perturbation.pieces:
            if not isinstance(action, Shift):
                self._resolve(scale, action, direction.changed_rows(action.terms))

    def __len__(self) -> int:
        return len(self.perturbation)

    def _resolve(self, scale: float, action: Removal | Addition | Reweighting, rows: Tensor) -> None:
        tables = self.loop.program.rows.tables
        for number, table in enumerate(tables):
            if table.samples.population is not action.samples.population:
                continue
            k, like = len(table.U), table.U
            if isinstance(action, Reweighting):
                relative = torch.where(like != 0, action.dw.to(like) / torch.where(like != 0, like, 1.0), 0.0)
                index = torch.nonzero(action.dw).reshape(-1)
                self.entries.append(
                    Entry(number, rows, None, index, scale * relative[:, index.to(like.device)].T, False)
                )
                continue
            owner = action.entries.owner if len(action) == len(self) else None
            index = action.entries.index
            if isinstance(action, Removal):
                da = like.new_full((len(index), k), -scale)
                self.entries.append(Entry(number, rows, owner, index, da, action.renormalise))
            else:
                da = like.new_full((len(index), k), scale)
                extra = self._add_samples(number, action)
                self.entries.append(Entry(number, rows, owner, index, da, action.renormalise, extra))

    def _add_samples(self, number: int, action: Addition) -> int:
        """Register new samples; each joins the batches of the sample it is like, or one batch drawn per epoch."""
        loop, table = self.loop, self.loop.program.rows.tables[number]
        new, count, device = action.new.under(table.samples), len(action.new), table.U.device
        if describe(new.storage.one()) != describe(table.samples.storage.one()):
            raise InvalidInputError(
                f"The new data for {action.samples.name!r} have the structure {describe(new.storage.one())}.",
                f"They must have the structure {describe(table.samples.storage.one())}.",
                "The step gets the samples of a batch as one object, old and new ones alike.",
                "Pass samples= to dif.unroll, so that the step gets data; a Cooper problem looks them up by number.",
            )
        if action.like is None and loop.step.problem is None:
            raise InvalidInputError(
                f"The samples added to {action.samples.name!r} are in no batch of this run.",
                "It must be said in which batches of a step of your own new samples are.",
                "A step of your own draws its batches by rules that dif does not know.",
                "Pass like=i: the new sample is then in the batches of sample i.",
            )
        if action.like is not None:
            U = table.U[:, action.like.to(device)]
            where = [
                [t for t in range(loop.length) for _ in range(int((loop.indices[t][number] == i).sum()))]
                for i in action.like
            ]
        else:
            everyone = torch.tensor([s.everyone for s in table.sums], device=device)
            U = torch.where(everyone[:, None], table.U[:, :1], 0.0).expand(-1, count)
            generator = torch.Generator().manual_seed(0)
            draw = [torch.randint(epoch.start, epoch.stop, (count,), generator=generator) for epoch in loop.epochs]
            where = [[int(steps[q]) for steps in draw] for q in range(count)]
        steps: dict[int, list[int]] = {}
        for q, mine in enumerate(where):
            for t in mine:
                steps.setdefault(t, []).append(q)
        part = Part(number, new, None, torch.arange(count), U, extra=True)
        self.extras.append(Extra(part, {t: torch.tensor(numbers) for t, numbers in steps.items()}))
        return len(self.extras) - 1

    def batch(self, t: int) -> Batch:
        """Return the samples of step t, with the new ones behind them."""
        loop, parts = self.loop, list(self.loop.batch(t))
        for extra in self.extras:
            index, part = extra.steps.get(t), extra.part
            if index is not None and t >= self.since:
                scale = loop.scale(part.table, len(parts[part.table].index))
                U = part.U[:, index.to(part.U.device)] * scale
                data = fetch(part.samples, index, part.U.device)
                parts.append(Part(part.table, part.samples, data, index, U, extra=True))
        return tuple(parts)

    def weights(self, t: int, batch: Batch, begin: int, end: int) -> Weights:
        """Return the weights of perturbations begin … end − 1 at step t, (P, 1 + m, k, B) for each part."""
        P = end - begin
        default = default_weights(self.loop.program, batch)
        a, b = ([x.expand(P, *x.shape).clone() for x in default.a] for _ in range(2))
        dtau = self.dtau[begin:end].clone() if t >= self.since else torch.zeros_like(self.dtau[begin:end])
        if t >= self.since:
            for entry in self.entries:
                self._apply(entry, t, batch, begin, end, a, b)
        return Weights(tuple(a), tuple(b), dtau)

    def _apply(
        self, entry: Entry, t: int, batch: Batch, begin: int, end: int, a: list[Tensor], b: list[Tensor]
    ) -> None:
        """Add one action to the weights of a step."""
        number = self._part_number(entry, t, batch)
        if number is None:
            return
        which, place = _match(entry.index, batch[number].index)
        owner = None if entry.owner is None else entry.owner[which]
        if owner is not None:
            mine = (owner >= begin) & (owner < end)
            which, place, owner = which[mine], place[mine], owner[mine]
        change = entry.rows[None, :, None] * entry.da[which.to(entry.da.device)][:, None, :]  # (E, 1 + m, k)
        for weights in (a[number], b[number]) if entry.renormalise else (a[number],):
            moved = weights.permute(0, 3, 1, 2)  # (P, B, 1 + m, k), a view
            if owner is None:
                moved.index_add_(1, place.to(moved.device), change.expand(end - begin, *change.shape))
            else:
                at = ((owner - begin).to(moved.device), place.to(moved.device))
                moved.index_put_(at, change, accumulate=True)

    def _part_number(self, entry: Entry, t: int, batch: Batch) -> int | None:
        """Return which part of the batch has the samples of an entry."""
        if entry.extra is None:
            return entry.table
        before = sum(t in extra.steps for extra in self.extras[: entry.extra])
        return len(self.loop.indices[t]) + before if t in self.extras[entry.extra].steps else None


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
        R, like = 1 + program.m, program.tau
        sizes = [(len(t.U), len(t.samples)) for t in program.rows.tables]
        sizes += [(len(extra.part.U), len(extra.part.index)) for extra in change.extras]
        self.a = [like.new_zeros((T, R, k, n)) for k, n in sizes]
        self.b = [like.new_zeros((T, R, k, n)) for k, n in sizes]
        self.tau = like.new_zeros((T, program.m))

    @classmethod
    def join(cls, parts: list[Record]) -> Record:
        """Return the record of all targets, for records of some of them."""
        whole = cls(parts[0].change, sum(len(part.tau) for part in parts))
        whole.a, whole.b = ([torch.cat(x) for x in zip(*(getattr(p, n) for p in parts), strict=True)] for n in "ab")
        whole.tau = torch.cat([part.tau for part in parts])
        return whole

    def add(self, t: int, batch: Batch, gradients: WeightGradients) -> None:
        """Add the derivatives of step t."""
        tables, extras = len(self.change.loop.indices[t]), [e for e, x in enumerate(self.change.extras) if t in x.steps]
        for number, part in enumerate(batch):
            slot = number if number < tables else tables + extras[number - tables]
            index = part.index.to(self.tau.device)
            self.a[slot].index_add_(3, index, gradients.a[number])
            self.b[slot].index_add_(3, index, gradients.b[number])
        self.tau += gradients.tau

    def by_row(self) -> Tensor:
        """Return the change of each target under each perturbation through each row, (P, T, 1 + m)."""
        change, (T, m) = self.change, self.tau.shape
        P = len(change)
        total = self.tau.new_zeros((P, T, 1 + m))
        total[:, :, 1:] += change.dtau[:, None] * self.tau
        for entry in change.entries:
            slot = entry.table if entry.extra is None else len(change.loop.indices[0]) + entry.extra
            index = entry.index.to(self.tau.device)
            slope = self.a[slot] + self.b[slot] if entry.renormalise else self.a[slot]  # (T, 1 + m, k, n)
            effect = (slope[..., index] * entry.da.T).sum(2) * entry.rows[:, None]  # (T, 1 + m, E)
            effect = effect.permute(2, 0, 1)
            if entry.owner is None:
                total += effect.sum(0)
            else:
                total.index_add_(0, entry.owner.to(total.device), effect)
        return total
