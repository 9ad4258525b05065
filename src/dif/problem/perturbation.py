"""Perturbations of the data and the bounds, as the user states them; `weights` resolves them to changes of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from dif.errors import InvalidInputError, few
from dif.runtime.inputs import as_index, check_number

Samples = Any  # a dif.Samples, which makes perturbations


@dataclass(frozen=True, eq=False)
class Entries:
    """The samples of each of P perturbations: index[e] is one of perturbation owner[e]; the owners rise."""

    P: int
    owner: Tensor  # (E,) long
    index: Tensor  # (E,) long

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Entries:
        """Build from P lists of indices."""
        owner = torch.repeat_interleave(torch.tensor([len(indices) for indices in lists]))
        return cls(len(lists), owner, torch.tensor([i for indices in lists for i in indices], dtype=torch.long))

    def find(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of the listed perturbations: the place in `rows` of their owners, and their own here."""
        first = torch.searchsorted(self.owner, rows)
        sizes = torch.searchsorted(self.owner, rows, right=True) - first
        owner = torch.repeat_interleave(sizes)
        return owner, torch.arange(len(owner)) + (first - sizes.cumsum(0) + sizes)[owner]

    def pick(self, rows: Tensor) -> Entries:
        """Return the listed perturbations, in that order."""
        owner, place = self.find(rows)
        return Entries(len(rows), owner, self.index[place])

    def describe(self) -> list[str]:
        """List the first few samples of each perturbation as text."""
        ends, index = torch.bincount(self.owner, minlength=self.P).cumsum(0).tolist(), self.index.tolist()
        return [few(index[begin:end]) for begin, end in pairwise([0, *ends])]


@dataclass(frozen=True, eq=False)
class _PerSamples:
    """An action of P perturbations, each on some samples."""

    samples: Samples
    entries: Entries  # indices of the samples of each perturbation
    renormalise: bool
    terms: Any  # terms that are changed, a tuple in a Perturbation; None means all

    def pick(self, rows: Tensor) -> Self:
        """Return the listed perturbations, in that order."""
        return replace(self, entries=self.entries.pick(rows))


class _Single:
    """An action that is one perturbation, without a list of samples."""

    entries = Entries(1, torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))

    def pick(self, rows: Tensor) -> Self:
        """Return itself."""
        return self


@dataclass(frozen=True, eq=False)
class Removal(_PerSamples):
    """Remove samples, in every view of them, from each of `terms` that contains them."""

    @property
    def is_single(self) -> bool:
        """Whether each perturbation removes one sample."""
        return torch.equal(self.entries.owner, torch.arange(self.entries.P))

    def labels(self) -> list[str]:
        """Describe each perturbation."""
        return [f"remove {self.samples.population.name}[{text}]" for text in self.entries.describe()]


@dataclass(frozen=True, eq=False)
class Addition(_PerSamples):
    """Add new samples to the terms that contain sample `like`, or else to the terms over all samples.

    Here `samples` are those that the new ones are added to, and the entries are indices into `new`.
    """

    new: Samples
    like: Tensor | None  # (len(new),) indices into `samples`

    def labels(self) -> list[str]:
        """Describe each perturbation."""
        return [f"add {self.new.name}[{text}]" for text in self.entries.describe()]


@dataclass(frozen=True, eq=False)
class Reweighting(_Single):
    """Add weight dw to every sample, times the coefficient of each term, wherever the sample has weight."""

    samples: Samples
    dw: Tensor  # (n,)
    terms: Any  # terms that are changed, a tuple in a Perturbation; None means all

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


Action = Removal | Addition | Reweighting | Shift  # what one summand of a Perturbation does


@dataclass(frozen=True, eq=False)
class Perturbation:
    """P perturbations, each a direction in the space of weights and bounds that is applied in full at ε = 1.

    Perturbations can be scaled and added: `0.01 * removal + shift`. Both summands have equally many perturbations, or
    one of them has a single perturbation, which is added to each of the other's. `perturbation[3]` and
    `perturbation[10:20]` select some of them. Whole perturbations that are added are carried out together:
    `remove([i]) + remove([j])` is `remove([i, j])`, and `remove([i]) + add(new, like=i)` is `replace([i], new)`. A
    factor scales the direction of all that is carried out together, and scaled summands add their directions.
    """

    pieces: tuple[tuple[float, tuple[Action, ...]], ...]  # (factor, actions that are carried out together), summed

    __array_ufunc__ = None  # numpy numbers on the left use our reflected operators

    @classmethod
    def of(cls, action: Action) -> Perturbation:
        """Build from one action; refuse an empty list of terms."""
        terms = None if isinstance(action, Shift) else action.terms
        if terms is not None:
            listed = tuple(terms) if isinstance(terms, list | tuple) else (terms,)
            if not listed:
                raise InvalidInputError(
                    "`terms` must list problem.objective or constraints of the problem, at least one."
                )
            action = replace(action, terms=listed)
        return cls(((1.0, (action,)),))

    @property
    def actions(self) -> tuple[tuple[float, Action], ...]:
        """All actions, with the factor of each."""
        return tuple((c, action) for c, actions in self.pieces for action in actions)

    def __len__(self) -> int:
        return max(action.entries.P for _, actions in self.pieces for action in actions)

    def __getitem__(self, key: int | slice) -> Perturbation:
        P = len(self)
        if isinstance(key, slice):
            rows = range(P)[key]
            if rows.step != 1 or not rows:
                raise InvalidInputError(
                    f"Perturbations must be indexed by a non-empty range inside 0 … {P} with step 1, not by {key}; "
                    "use perturbations.pick([0, 2, 4]) to select others."
                )
        else:
            number = as_index(key)
            if number is None:
                raise TypeError(f"Perturbations are indexed by [i] or [begin:end], not by [{key!r}].")
            if not -P <= number < P:
                raise IndexError(f"There are {P} perturbations, but index {number} was given.")
            rows = range(number % P, number % P + 1)
        return self.pick_known(torch.arange(rows.start, rows.stop))

    def pick(self, rows: Sequence[int]) -> Perturbation:
        """Return the listed perturbations, in that order."""
        P, listed = len(self), isinstance(rows, Iterable) and not isinstance(rows, str)
        given = list(rows) if listed else []
        numbers = [as_index(row) for row in given]
        wrong = [row for row, number in zip(given, numbers, strict=True) if number is None or not 0 <= number < P]
        if wrong or not given:
            found = few(wrong, quoted=True) if wrong else "an empty list" if listed else repr(rows)
            raise InvalidInputError(f"`rows` must be a list of integers from 0 to {P - 1}, not {found}.")
        return self.pick_known(torch.tensor(numbers))

    def pick_known(self, rows: Tensor) -> Perturbation:
        """Return the listed perturbations, in that order; the numbers are known to be valid."""
        P = len(self)
        pick = lambda action: action.pick(rows) if action.entries.P == P else action  # noqa: E731
        return Perturbation(tuple((c, tuple(map(pick, actions))) for c, actions in self.pieces))

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
                f"{len(self)} + {len(other)} perturbations cannot be added; both must be equally many, or one of them "
                "a single one."
            )
        pieces = self.pieces + other.pieces
        whole = tuple(action for c, actions in pieces if c == 1.0 for action in actions)
        scaled = tuple((c, actions) for c, actions in pieces if c != 1.0)
        return Perturbation(((1.0, whole), *scaled) if whole else scaled)

    __radd__ = __add__

    def __mul__(self, factor: object) -> Perturbation:
        if isinstance(factor, str) or not hasattr(factor, "__float__") or getattr(factor, "ndim", 0):
            raise TypeError(f"A Perturbation can be multiplied by one number, not by {type(factor).__name__}.")
        scale = check_number(factor, "the factor of a perturbation", zero=True, negative=True)
        return Perturbation(tuple((scale * c, actions) for c, actions in self.pieces))

    __rmul__ = __mul__

    def __neg__(self) -> Perturbation:
        return -1.0 * self

    def __sub__(self, other: object) -> Perturbation:
        return self + (-other) if isinstance(other, Perturbation) else NotImplemented

    @property
    def labels(self) -> list[str]:
        """A description of each perturbation."""
        P, columns = len(self), []
        for c, action in self.actions:
            labels = [text if c == 1.0 else f"{c:g} × {text}" for text in action.labels()]
            columns.append(labels if len(labels) == P else labels * P)
        return columns[0] if len(columns) == 1 else [" + ".join(row) for row in zip(*columns, strict=True)]

    @property
    def removal(self) -> tuple[float, Removal] | None:
        """The factor and the removal, where the perturbations consist of nothing else; otherwise None."""
        (c, action), *others = self.actions
        return None if others or not isinstance(action, Removal) else (c, action)

    @property
    def removed(self) -> tuple[Samples, Tensor] | None:
        """The samples that P complete removals of one sample each remove, and their indices, (P,); otherwise None."""
        c, action = self.removal or (0.0, None)
        if action is None or c != 1.0 or not action.is_single:
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
