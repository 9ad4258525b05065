"""What is done to the data: a direction δw, δτ, as the user says it (`Direction` resolves it on a problem)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError, few
from dif.problem.sample_losses import SampleLosses
from dif.runtime.inputs import as_index


@dataclass(frozen=True, eq=False)
class Entries:
    """Which sample belongs to which perturbation, P lists in compressed rows."""

    start: Tensor  # (P + 1,) long
    index: Tensor  # (E,) long

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Entries:
        """From P lists of indices."""
        sizes = torch.tensor([0, *(len(one) for one in lists)])
        return cls(torch.cumsum(sizes, 0), torch.tensor([i for one in lists for i in one], dtype=torch.long))

    @classmethod
    def singles(cls, index: Tensor) -> Entries:
        """One sample each."""
        return cls(torch.arange(len(index) + 1), index)

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def owner(self) -> Tensor:
        """The perturbation each entry belongs to, (E,)."""
        return torch.repeat_interleave(torch.arange(len(self)), self.start.diff())

    def slice(self, begin: int, end: int) -> Entries:
        """The perturbations begin … end − 1."""
        start = self.start[begin : end + 1]
        return Entries(start - start[0], self.index[int(start[0]) : int(start[-1])])

    def pick(self, rows: Sequence[int]) -> Entries:
        """The perturbations listed, in that order."""
        return Entries.of([self.index[self.start[p] : self.start[p + 1]].tolist() for p in rows])

    def words(self) -> list[str]:
        """The samples of each perturbation, the first few of them."""
        start, index = self.start.tolist(), self.index.tolist()
        return [few(index[begin:end]) for begin, end in pairwise(start)]


@dataclass(frozen=True, eq=False)
class Removal:
    """Take samples, in every view of them, out of each term of `terms` (None: of all) that holds them."""

    samples: SampleLosses
    entries: Entries
    renormalise: bool
    terms: tuple[Any, ...] | None

    def __len__(self) -> int:
        return len(self.entries)

    def slice(self, begin: int, end: int) -> Removal:
        """The perturbations begin … end − 1."""
        return replace(self, entries=self.entries.slice(begin, end))

    def pick(self, rows: Sequence[int]) -> Removal:
        """The perturbations listed, in that order."""
        return replace(self, entries=self.entries.pick(rows))

    def labels(self) -> list[str]:
        """Each perturbation in words."""
        return [f"remove {self.samples.people.name}[{words}]" for words in self.entries.words()]


@dataclass(frozen=True, eq=False)
class Addition:
    """Put new samples into the terms: as members of the terms that hold sample `like`, or of those over all samples."""

    samples: SampleLosses
    new: SampleLosses
    entries: Entries  # of `new`
    like: Tensor | None  # (len(new),) indices into `samples`
    renormalise: bool
    terms: tuple[Any, ...] | None

    def __len__(self) -> int:
        return len(self.entries)

    def slice(self, begin: int, end: int) -> Addition:
        """The perturbations begin … end − 1."""
        return replace(self, entries=self.entries.slice(begin, end))

    def pick(self, rows: Sequence[int]) -> Addition:
        """The perturbations listed, in that order."""
        return replace(self, entries=self.entries.pick(rows))

    def labels(self) -> list[str]:
        """Each perturbation in words."""
        return [f"add {self.new.name}[{words}]" for words in self.entries.words()]


@dataclass(frozen=True, eq=False)
class Reweighting:
    """Add weight dw to every sample, times the coefficient of each term, wherever the sample has weight."""

    samples: SampleLosses
    dw: Tensor  # (n,)
    terms: tuple[Any, ...] | None

    def __len__(self) -> int:
        return 1

    def slice(self, begin: int, end: int) -> Reweighting:
        """Itself: it is one perturbation."""
        return self

    def pick(self, rows: Sequence[int]) -> Reweighting:
        """Itself: it is one perturbation."""
        return self

    def labels(self) -> list[str]:
        """In words."""
        return [f"reweight {int((self.dw != 0).sum())} of {self.samples.people.name}"]


@dataclass(frozen=True, eq=False)
class Shift:
    """Move the stored bound τ of one constraint."""

    constraint: Any
    dtau: Tensor  # () or (rows,), in the stored sense (negated for >=)
    written: str

    def __len__(self) -> int:
        return 1

    def slice(self, begin: int, end: int) -> Shift:
        """Itself: it is one perturbation."""
        return self

    def pick(self, rows: Sequence[int]) -> Shift:
        """Itself: it is one perturbation."""
        return self

    def labels(self) -> list[str]:
        """In words."""
        return [f"shift {self.constraint.name or 'a constraint'} by {self.written}"]


Piece = Removal | Addition | Reweighting | Shift


@dataclass(frozen=True, eq=False)
class Perturbation:
    """P directions in weight space, each carried out in full at ε = 1.

    They scale and add: `0.01 * removal + shift`. Of two summands one may hold a single perturbation, which then joins
    each of the other's. `perturbation[3]` and `perturbation[10:20]` pick some of them. Adding two renormalised
    removals adds their directions; to remove two samples together write `remove([i, j])`.
    """

    pieces: tuple[tuple[float, Piece], ...]

    __array_ufunc__ = None  # numpy numbers on the left hand over to us

    def __len__(self) -> int:
        return max(len(piece) for _, piece in self.pieces)

    def __getitem__(self, key: int | slice) -> Perturbation:
        P = len(self)
        if isinstance(key, slice):
            begin, end, step = key.indices(P)
            if step != 1 or end <= begin:
                raise InvalidInputError(
                    "slice of perturbations",
                    measured=key,
                    threshold=f"a non-empty range with step 1 inside 0 … {P}",
                    meaning="Perturbations are stored in consecutive rows.",
                    cure="Name the samples you want in remove_each(indices) instead.",
                )
        else:
            place = as_index(key)
            if place is None:
                raise TypeError(f"perturbations are numbered: [i] or [begin:end], not [{key!r}]")
            if not -P <= place < P:
                raise IndexError(f"perturbation {place} of {P}")
            begin, end = place % P, place % P + 1
        pieces = [(c, piece.slice(begin, end) if len(piece) == P else piece) for c, piece in self.pieces]
        return Perturbation(tuple(pieces))

    def pick(self, rows: Sequence[int]) -> Perturbation:
        """The perturbations listed, in that order."""
        P, listed = len(self), [as_index(row) for row in rows]
        if not listed or any(row is None or not 0 <= row < P for row in listed):
            raise InvalidInputError(
                "perturbations to pick",
                measured=few(list(rows)) if listed else "none",
                threshold=f"integers 0 … {P - 1}, at least one",
                meaning="There is no such perturbation.",
                cure="Count from 0 in the order in which they were made.",
            )
        return Perturbation(tuple((c, piece.pick(rows) if len(piece) == P else piece) for c, piece in self.pieces))

    def __iter__(self):
        """One at a time."""
        return (self[p] for p in range(len(self)))

    def __add__(self, other: object) -> Perturbation:
        if isinstance(other, int | float) and other == 0:  # sum([...]) starts at 0
            return self
        if not isinstance(other, Perturbation):
            return NotImplemented
        if len(self) != len(other) and 1 not in (len(self), len(other)):
            raise InvalidInputError(
                "sum of perturbations",
                measured=f"{len(self)} + {len(other)}",
                threshold="equal numbers, or one of them 1",
                meaning="Perturbations are added pair by pair.",
                cure="Select as many of each, for example with perturbation[:k].",
            )
        return Perturbation(self.pieces + other.pieces)

    __radd__ = __add__

    def __mul__(self, factor: object) -> Perturbation:
        if isinstance(factor, str) or not hasattr(factor, "__float__"):
            return NotImplemented
        scale = float(factor)  # type: ignore[arg-type]
        if not abs(scale) < float("inf"):
            raise InvalidInputError(
                "factor of a perturbation",
                measured=scale,
                threshold="finite",
                meaning="It says how much of the perturbation is carried out.",
                cure="Use 1 for all of it, 0.01 for a hundredth, -1 for the opposite.",
            )
        return Perturbation(tuple((scale * c, piece) for c, piece in self.pieces))

    __rmul__ = __mul__

    def __neg__(self) -> Perturbation:
        return -1.0 * self

    def __sub__(self, other: object) -> Perturbation:
        return self + (-other) if isinstance(other, Perturbation) else NotImplemented

    @property
    def labels(self) -> list[str]:
        """Each perturbation in words."""
        P, spoken = len(self), []
        for c, piece in self.pieces:
            labels = [text if c == 1.0 else f"{c:g} × {text}" for text in piece.labels()]
            spoken.append(labels if len(labels) == P else labels * P)
        return spoken[0] if len(spoken) == 1 else [" + ".join(row) for row in zip(*spoken, strict=True)]

    def __repr__(self) -> str:
        labels = self[: min(3, len(self))].labels
        return f"Perturbation({len(self)}: {'; '.join(labels)}{'; …' if len(self) > 3 else ''})"
