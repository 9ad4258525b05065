"""Perturbations of the data and the bounds, as the user states them; `Direction` resolves them to δw and δτ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from dif.errors import InvalidInputError, few
from dif.problem.sample_losses import SampleLosses
from dif.runtime.inputs import as_index, check_number


@dataclass(frozen=True, eq=False)
class Entries:
    """The samples of each of P perturbations as compressed rows: those of p are index[start[p] : start[p + 1]]."""

    start: Tensor  # (P + 1,) long
    index: Tensor  # (E,) long

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Entries:
        """Build from P lists of indices."""
        sizes = torch.tensor([0, *(len(indices) for indices in lists)])
        return cls(torch.cumsum(sizes, 0), torch.tensor([i for indices in lists for i in indices], dtype=torch.long))

    @classmethod
    def singles(cls, index: Tensor) -> Entries:
        """Build perturbations of one sample each."""
        return cls(torch.arange(len(index) + 1), index)

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def owner(self) -> Tensor:
        """The perturbation that each entry belongs to, (E,)."""
        return torch.repeat_interleave(torch.arange(len(self)), self.start.diff())

    def pick(self, rows: Tensor) -> Entries:
        """Return the listed perturbations, in that order."""
        first, sizes = self.start[rows], self.start[rows + 1] - self.start[rows]
        start = torch.cat([torch.zeros_like(first[:1]), torch.cumsum(sizes, 0)])
        place = torch.arange(int(start[-1])) + torch.repeat_interleave(first - start[:-1], sizes)
        return Entries(start, self.index[place])

    def describe(self) -> list[str]:
        """List the first few samples of each perturbation as text."""
        start, index = self.start.tolist(), self.index.tolist()
        return [few(index[begin:end]) for begin, end in pairwise(start)]


@dataclass(frozen=True, eq=False)
class _PerSamples:
    """An action of P perturbations, each on some samples."""

    samples: SampleLosses
    entries: Entries  # indices of the samples of each perturbation
    renormalise: bool
    terms: tuple[Any, ...] | None  # terms that are changed; None means all

    def __len__(self) -> int:
        return len(self.entries)

    def pick(self, rows: Tensor) -> Self:
        """Return the listed perturbations, in that order."""
        return replace(self, entries=self.entries.pick(rows))


class _Single:
    """An action that is one perturbation."""

    def __len__(self) -> int:
        return 1

    def pick(self, rows: Tensor) -> Self:
        """Return itself."""
        return self


@dataclass(frozen=True, eq=False)
class Removal(_PerSamples):
    """Remove samples, in every view of them, from each of `terms` that contains them."""

    def labels(self) -> list[str]:
        """Describe each perturbation."""
        return [f"remove {self.samples.population.name}[{text}]" for text in self.entries.describe()]


@dataclass(frozen=True, eq=False)
class Addition(_PerSamples):
    """Add new samples to the terms that contain sample `like`, or else to the terms over all samples.

    Here `samples` are those that the new ones are added to, and the entries are indices into `new`.
    """

    new: SampleLosses
    like: Tensor | None  # (len(new),) indices into `samples`

    def labels(self) -> list[str]:
        """Describe each perturbation."""
        return [f"add {self.new.name}[{text}]" for text in self.entries.describe()]

    def membership_error(self, terms: Sequence[str]) -> InvalidInputError:
        """Build the error for terms that do not tell whether the new samples belong to them."""
        return InvalidInputError(
            f"The membership of the samples added to {self.samples.name!r} is unknown in {', '.join(terms)}.",
            "It must be known in every term.",
            "Only you know whether a new sample is in a masked mean, or what it weighs in a weighted sum.",
            "Pass like=i, a sample with the same memberships, or terms=[…].",
        )


@dataclass(frozen=True, eq=False)
class Reweighting(_Single):
    """Add weight dw to every sample, times the coefficient of each term, wherever the sample has weight."""

    samples: SampleLosses
    dw: Tensor  # (n,)
    terms: tuple[Any, ...] | None  # terms that are changed; None means all

    def labels(self) -> list[str]:
        """Describe the perturbation."""
        return [f"reweight {int((self.dw != 0).sum())} of {self.samples.population.name}"]


@dataclass(frozen=True, eq=False)
class Shift(_Single):
    """Move the stored bound τ of one constraint."""

    constraint: Any
    dtau: Tensor  # () or (rows,), in the stored sense (negated for >=)
    written: str  # the shift as the user wrote it, for labels

    def labels(self) -> list[str]:
        """Describe the perturbation."""
        return [f"shift {self.constraint.name or 'a constraint'} by {self.written}"]


def check_shift(shift: Shift, rows: int) -> None:
    """Refuse a shift that has neither one value nor one for each row of its constraint."""
    if shift.dtau.dim() and shift.dtau.numel() != rows:
        raise InvalidInputError(
            f"The shift of {shift.constraint.name or 'a constraint'} has {shift.dtau.numel()} values.",
            "It must have 1 value." if rows == 1 else f"It must have 1 value, or {rows}.",
            "A shift moves every row alike, or each by its own amount.",
            "Pass one number, or one per row.",
        )


def unused_error(samples: SampleLosses) -> InvalidInputError:
    """Build the error for a perturbation of samples that the problem does not have."""
    return InvalidInputError(
        f"Samples {samples.name!r} cannot be perturbed: no term of the problem uses these samples.",
        "At least one term must use them.",
        "Samples are told apart by identity.",
        "Perturb the Samples from which the objective or the constraints were built. A problem to which samples were "
        "added has new ones: take them from solution.problem.samples.",
    )


def empty_term_error(perturbation: str, term: str) -> InvalidInputError:
    """Build the error for a perturbation after which a term has no samples; both are given in words."""
    return InvalidInputError(
        f"{perturbation} leaves no samples in {term!r}.",
        "At least one sample must remain.",
        "A term without samples is not defined, so there is nothing to retrain.",
        "Remove fewer samples, restrict the removal with terms=[…], or drop the term.",
    )


Action = Removal | Addition | Reweighting | Shift  # what one summand of a Perturbation does


@dataclass(frozen=True, eq=False)
class Perturbation:
    """P perturbations, each a direction in the space of weights and bounds that is applied in full at ε = 1.

    Perturbations can be scaled and added: `0.01 * removal + shift`. Both summands have equally many perturbations, or
    one of them has a single perturbation, which is added to each of the other's. `perturbation[3]` and
    `perturbation[10:20]` select some of them. Adding two renormalised removals adds their directions; to remove two
    samples together write `remove([i, j])`.
    """

    pieces: tuple[tuple[float, Action], ...]  # (factor, action), summed

    __array_ufunc__ = None  # numpy numbers on the left use our reflected operators

    def __len__(self) -> int:
        return max(len(action) for _, action in self.pieces)

    def __getitem__(self, key: int | slice) -> Perturbation:
        P = len(self)
        if isinstance(key, slice):
            begin, end, step = key.indices(P)
            if step != 1 or end <= begin:
                raise InvalidInputError(
                    f"{P} perturbations were indexed with {key}.",
                    f"A slice must be a non-empty range with step 1 inside 0 … {P}.",
                    "Perturbations are stored in consecutive rows.",
                    "Use perturbations.pick([0, 2, 4]) to select others, at least one.",
                )
        else:
            number = as_index(key)
            if number is None:
                raise TypeError(f"Perturbations are indexed by [i] or [begin:end], not by [{key!r}].")
            if not -P <= number < P:
                raise IndexError(f"There are {P} perturbations, but index {number} was given.")
            begin, end = number % P, number % P + 1
        return self._pick(torch.arange(begin, end))

    def pick(self, rows: Sequence[int]) -> Perturbation:
        """Return the listed perturbations, in that order."""
        P, listed = len(self), isinstance(rows, Iterable) and not isinstance(rows, str)
        given = list(rows) if listed else []
        numbers = [as_index(row) for row in given]
        wrong = [row for row, number in zip(given, numbers, strict=True) if number is None or not 0 <= number < P]
        if wrong or not given:
            found = f"includes {few(wrong, quoted=True)}" if wrong else "is empty" if listed else f"is {rows!r}"
            raise InvalidInputError(
                f"`rows` {found}.",
                f"It must be a list of integers from 0 to {P - 1}, at least one.",
                "Each row is the number of one perturbation.",
                "Count from 0 in the order in which they were created.",
            )
        return self._pick(torch.tensor(numbers))

    def _pick(self, rows: Tensor) -> Perturbation:
        P = len(self)
        return Perturbation(tuple((c, action.pick(rows) if len(action) == P else action) for c, action in self.pieces))

    def __iter__(self):
        """Yield the perturbations one at a time."""
        return (self[p] for p in range(len(self)))

    def __add__(self, other: object) -> Perturbation:
        if isinstance(other, int | float) and other == 0:  # sum([...]) starts at 0
            return self
        if not isinstance(other, Perturbation):
            return NotImplemented
        if len(self) != len(other) and 1 not in (len(self), len(other)):
            raise InvalidInputError(
                f"{len(self)} + {len(other)} perturbations were added.",
                "Both must have equally many, or one of them a single perturbation.",
                "Perturbations are added pair by pair.",
                "Select equally many of each, for example with perturbation[:k].",
            )
        return Perturbation(self.pieces + other.pieces)

    __radd__ = __add__

    def __mul__(self, factor: object) -> Perturbation:
        if isinstance(factor, str) or not hasattr(factor, "__float__") or getattr(factor, "ndim", 0):
            raise TypeError(f"A Perturbation can be multiplied by one number, not by {type(factor).__name__}.")
        scale = check_number(
            factor,
            "the factor of a perturbation",
            zero=True,
            negative=True,
            meaning="It says how much of the perturbation is carried out.",
            cure="Use 1 for all of it, 0.01 for a hundredth, -1 for the opposite.",
        )
        return Perturbation(tuple((scale * c, action) for c, action in self.pieces))

    __rmul__ = __mul__

    def __neg__(self) -> Perturbation:
        return -1.0 * self

    def __sub__(self, other: object) -> Perturbation:
        return self + (-other) if isinstance(other, Perturbation) else NotImplemented

    @property
    def labels(self) -> list[str]:
        """A description of each perturbation."""
        P, columns = len(self), []
        for c, action in self.pieces:
            labels = [text if c == 1.0 else f"{c:g} × {text}" for text in action.labels()]
            columns.append(labels if len(labels) == P else labels * P)
        return columns[0] if len(columns) == 1 else [" + ".join(row) for row in zip(*columns, strict=True)]

    @property
    def removed(self) -> tuple[SampleLosses, Tensor] | None:
        """The samples that P complete removals of one sample each remove, and their indices, (P,); otherwise None."""
        (c, action), *others = self.pieces
        if others or c != 1.0 or not isinstance(action, Removal) or bool((action.entries.start.diff() != 1).any()):
            return None
        return action.samples.population, action.entries.index

    @property
    def index(self) -> Any:
        """The label of each removed sample in the index of the user's DataFrame, or None.

        It is None where the data came without a DataFrame, or where the perturbations are not removals of one sample.
        """
        removed = self.removed
        return None if removed is None else removed[0].storage.labels(removed[1])

    def __repr__(self) -> str:
        labels = self[: min(3, len(self))].labels
        return f"Perturbation({len(self)}: {'; '.join(labels)}{'; …' if len(self) > 3 else ''})"
