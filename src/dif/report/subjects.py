"""What a report shows of each perturbation that was scored: usually the sample that it removes."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.derivatives.fingerprint import READ
from dif.derivatives.losses import sample_losses
from dif.errors import InvalidInputError, count_words, few
from dif.optimality.solution import Solution
from dif.problem.data import leaves
from dif.problem.perturbation import Perturbation
from dif.problem.samples import Samples
from dif.runtime.inputs import is_numbering, is_reordered, is_same, read_labels, write_label

_MAX_LENGTH = 160  # characters of an entry
_MAX_FEATURES = 24  # features shown per sample
_MAX_PIXELS = 40  # pixels shown along each side of an image
_MOST_VALUES = 12  # different values of a column up to which it can name a set of samples
_MOST_COLUMNS = 3  # columns that the name of a set combines
_MOST_MEMBERS = 3  # samples that are listed where a set has no name
_MISSING = ""  # words of an entry without a value, which names no set


@dataclass(frozen=True, eq=False)
class Subjects:
    """Names, groups, features, images and losses of what was scored, by the number of the perturbation."""

    perturbations: Perturbation | Sequence[str]  # their labels, where nothing else is known of them
    solution: Solution
    names: Sequence[Any] | None = None
    groups: Sequence[Any] | None = None
    features: Mapping[str, Sequence[Any]] | None = None
    images: Any = None

    @classmethod
    def of(
        cls, perturbations: Perturbation | Sequence[str], solution: Solution, *, names: Any = None, groups: Any = None,
        features: Any = None, images: Any = None, index: Any = None, where: str = "",
    ) -> Subjects:  # fmt: skip
        """Read the columns that a user gives: one entry per perturbation, or per sample of the data.

        Args:
            perturbations: What was scored, or the labels of it.
            solution: The solution of the scores.
            names: One name each; by default its label in the user's data frame, or that of the perturbation.
            groups: One group each.
            features: A dict of columns, or a data frame.
            images: Pixels each, (height, width) or with three channels.
            index: Labels of the perturbations in the index of the user's data frame; None without one.
            where: Where the columns were given, for error messages, such as " in model.py".
        """
        if features is not None and not (hasattr(features, "items") and hasattr(features, "keys")):
            raise InvalidInputError(
                f"`features`{where} is of type {type(features).__name__}; it must be a dict of columns or a data frame."
            )
        train = cls(perturbations, solution).train
        count, everyone = (len(perturbations) if train is None else len(train)), index
        if index is not None and train is not None:
            everyone = train.population.storage.labels(torch.arange(count))

        def read(name: str, column: Any) -> list[Any]:
            _check_labels(column, name, index, everyone)
            return expect_column(column, f"`{name}`{where}", {len(perturbations), count})

        _check_labels(features, "features", index, everyone)
        if names is None and index is not None:
            names = [write_label(label) for label in everyone]
        given = {"names": names, "groups": groups, "images": images}
        columns: dict[str, Any] = {name: read(name, column) for name, column in given.items() if column is not None}
        if features is not None:
            columns["features"] = {str(key): read(f"features[{key!r}]", column) for key, column in features.items()}
        subjects = cls(perturbations, solution, **columns)
        subjects._check_display(where)
        return subjects

    @cached_property
    def _removed(self) -> tuple[Samples, list[int]] | None:
        """The samples that are removed, and which of them each perturbation removes; None if it is not one of each."""
        _, removal = (self.perturbations.removal if isinstance(self.perturbations, Perturbation) else None) or (0, None)
        return None if removal is None or not removal.is_single else (removal.samples, removal.entries.index.tolist())

    @property
    def train(self) -> Samples | None:
        """The samples that are removed, one by each perturbation; None if something else changes."""
        return None if self._removed is None else self._removed[0]

    @cached_property
    def labels(self) -> Sequence[str]:
        """Label of each perturbation."""
        return self.perturbations.labels if isinstance(self.perturbations, Perturbation) else self.perturbations

    def _pick(self, column: Any, i: int) -> Any:
        """Return the entry of a column for perturbation i: one per perturbation, or one per sample."""
        whole = self._removed is not None and len(column) == len(self._removed[0])
        return column[self._removed[1][i] if whole and self._removed is not None else i]

    def name(self, i: int) -> str:
        """Return the name of subject i."""
        return self.labels[i].removeprefix("remove ") if self.names is None else str(self._pick(self.names, i))

    def group(self, i: int) -> str | None:
        """Return the group of subject i, or None."""
        return None if self.groups is None else str(self._pick(self.groups, i))

    @cached_property
    def losses(self) -> dict[str, Tensor]:
        """Loss of each subject at the solution, by name: first `train`, then each view of it in the problem."""
        if self._removed is None:
            return {}
        train, rows = self._removed
        parameters, theta = self.solution.program.parameters, self.solution.theta
        views = [s for s in self.solution.problem.samples if s.population is train.population and s is not train]
        return {s.name: sample_losses(s, parameters, theta).double().cpu()[rows] for s in (train, *views)}

    @cached_property
    def sets(self) -> SampleSets:
        """Names for sets of the samples: by group and feature; without features, by numbers in the data."""
        return SampleSets.of(self.train, self.groups, self._numbers() if self.features is None else self.features)

    def _numbers(self) -> dict[str, list[float]]:
        """Return the parts of the samples that are single numbers, such as labels, by the names of `feature`."""
        columns: dict[str, list[float]] = {}
        for _, batch in () if self.train is None else self.train.batches(at_most=READ):
            for k, leaf in enumerate(leaves(batch)):
                if leaf[0].numel() == 1:
                    columns.setdefault(f"z{k}", []).extend(leaf.detach().reshape(-1).tolist())
        return columns

    def feature(self, i: int) -> dict[str, str]:
        """Return the features of subject i as text; by default, the numbers that a small sample consists of."""
        if self.features is not None:
            columns = list(self.features.items())[:_MAX_FEATURES]
            return {name: write_entry(self._pick(column, i)) for name, column in columns}
        small = [leaf for leaf in self._leaves(i) if leaf.numel() <= _MAX_FEATURES]
        return {
            f"z{k}" + (f"[{j}]" if part.numel() > 1 else ""): write_entry(value)
            for k, part in enumerate(small)
            for j, value in enumerate(part.reshape(-1).tolist())
        }

    def image(self, i: int) -> dict[str, Any] | None:
        """Return the image of subject i with its pixels in base64; None if it has no image."""
        if self.images is not None:
            found = [torch.as_tensor(self._pick(self.images, i))]
        else:
            found = [leaf for leaf in self._leaves(i) if leaf.dim() in (2, 3)]
            found = [leaf for leaf in found if min(leaf.shape[-2:]) >= 5 or min(leaf.shape[:2]) >= 5]
        pixels = _as_bytes(found[0].detach().cpu()) if found else None
        if pixels is None:
            return None
        data = base64.b64encode(pixels.contiguous().numpy().tobytes()).decode()
        height, width, *channels = pixels.shape
        return {"height": height, "width": width, "channels": 3 if channels else 1, "data": data}

    def _check_display(self, where: str) -> None:
        """Refuse features or images that cannot be shown, judged by the first."""
        for name, wanted, display in (
            ("features", "numbers or words", self.feature),
            ("images", "numeric pixels of shape (n, height, width)", self.image),
        ):
            try:
                display(0)
            except Exception as error:
                raise InvalidInputError(
                    f"`{name}`{where} cannot be displayed ({type(error).__name__}: {error}); it must hold {wanted}."
                ) from error
        if self.images is not None and self.image(0) is None:
            raise InvalidInputError(
                f"`images`{where} has entries of shape {tuple(torch.as_tensor(self._pick(self.images, 0)).shape)}; "
                "each must have shape (height, width), (height, width, 3) or (3, height, width)."
            )

    def _leaves(self, i: int) -> list[Tensor]:
        """Return the tensors of the sample that perturbation i removes; none if it does something else."""
        if self._removed is None:
            return []
        train, rows = self._removed
        _, batch = next(train.batches(torch.tensor([rows[i]])))
        return [leaf[0] for leaf in leaves(batch)]


def _as_bytes(pixels: Tensor) -> Tensor | None:
    """Return pixels as uint8 with the channels last, reduced to at most _MAX_PIXELS per side."""
    if pixels.dim() == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        pixels = pixels.movedim(0, 2)
    if pixels.dim() == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dim() not in (2, 3) or (pixels.dim() == 3 and pixels.shape[2] != 3):
        return None
    step = max(1, math.ceil(max(pixels.shape[:2]) / _MAX_PIXELS))
    pixels = pixels[::step, ::step]
    if pixels.numel() == 0 or pixels.dtype == torch.uint8:
        return pixels if pixels.numel() else None
    low, high = float(pixels.min()), float(pixels.max())
    return (255 * (pixels.double() - low) / ((high - low) or 1.0)).round().to(torch.uint8)


def list_entries(column: Any) -> list[Any] | None:
    """Return the entries of a list, an array or a pandas column by position; None for other objects.

    >>> list_entries((1, 2)), list_entries("ab"), list_entries(3)
    ([1, 2], None, None)
    """
    listable = isinstance(column, Iterable) and not isinstance(column, str | bytes | Mapping | set)
    return list(column) if listable and getattr(column, "ndim", 1) > 0 else None


def expect_column(column: Any, name: str, lengths: set[int], per: str = "sample") -> list[Any]:
    """Return the entries of a column; refuse other objects, and other numbers of entries.

    Args:
        column: A list, an array or a pandas column.
        name: What the user calls it, in backquotes, for the error message.
        lengths: How many entries it may have.
        per: What has one entry; a noun.
    """
    entries = list_entries(column)
    if entries is None or len(entries) not in lengths:
        found = f"is of type {type(column).__name__}" if entries is None else f"has {len(entries)} entries"
        numbers = " or ".join(map(str, sorted(lengths)))
        raise InvalidInputError(
            f"{name} {found}; it must be a list, an array or a column with {numbers} entries, one per {per}."
        )
    return entries


def write_entry(value: Any) -> str:
    """Return an entry as text, long ones cut short.

    >>> write_entry(1.0), write_entry(0.123456789), write_entry("a")
    ('1', '0.123457', 'a')
    """
    value = value.item() if hasattr(value, "item") else value
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_LENGTH else text[:_MAX_LENGTH] + "…"


def _check_labels(column: Any, name: str, index: Any, everyone: Any) -> None:
    """Refuse a data frame or a series whose index says that its rows are other samples than those of the scores.

    Args:
        column: What the user gave.
        name: The argument.
        index: Labels of the perturbations; None without any.
        everyone: Labels of all samples; of the perturbations, if these are no removals.
    """
    found = read_labels(column)
    if found is None or index is None:
        return
    whole = everyone is not index and len(found) == len(everyone)  # then its rows are in the order of the data
    labels, source = (everyone, "X") if whole else (index, "scores")
    if is_same(found, labels):
        return
    reordered = is_reordered(found, labels)
    unnamed = is_numbering(found) or (is_numbering(everyone) and set(everyone).isdisjoint(found))
    if reordered or not unnamed:
        known = set(labels)
        other = f"other labels than the scores: {few([x for x in found if x not in known], quoted=True)}"
        plain = ".to_dict('list')" if hasattr(column, "columns") else ".to_list()"
        raise InvalidInputError(
            f"`{name}` has {'the labels of the scores in another order' if reordered else other}. Pass "
            f"{name}.loc[{source}.index], or, if its rows are in order already, {name}{plain}."
        )


@dataclass(frozen=True, eq=False)
class SampleSets:
    """Columns with few different values, one entry per sample of a population, in the words of a set."""

    population: object | None  # which samples the columns are about
    columns: tuple[np.ndarray, ...]  # such as "label = 1" or "group a" for each sample

    @classmethod
    def of(
        cls, samples: Samples | None, groups: Sequence[Any] | None, features: Mapping[str, Sequence[Any]]
    ) -> SampleSets:
        """Read the groups and features of samples; columns of another length say nothing about them."""
        if samples is None:
            return cls(None, ())
        named = [(f"{name} = ", column) for name, column in features.items()]
        if groups is not None:
            called = all(str(group).lower().startswith("group") for group in groups)
            named.append(("" if called else "group ", groups))
        found = (_read_set(words, column) for words, column in named if len(column) == len(samples))
        return cls(samples.population, tuple(column for column in found if column is not None))

    def describe(self, samples: Samples, members: Sequence[int]) -> str:
        """Return the name and the size of a set: "label = 1, group a (83 samples)".

        The name is one that fits these samples and no others; without one, the first samples are listed.
        """
        index, size = list(members), count_words(len(members), "sample")
        known = self.columns if samples.population is self.population else ()
        shared = [c for c in known if c[index[0]] != _MISSING and (c[index] == c[index[0]]).all()]
        for number in range(1, _MOST_COLUMNS + 1):
            for chosen in combinations(shared, number):
                inside = np.logical_and.reduce([column == column[index[0]] for column in chosen])
                if inside.sum() == len(index):
                    return f"{', '.join(str(column[index[0]]) for column in chosen)} ({size})"
        listed = ", ".join(map(str, index[:_MOST_MEMBERS])) + (", …" if len(index) > _MOST_MEMBERS else "")
        return f"{size} ({listed})"


def _read_set(words: str, column: Sequence[Any]) -> np.ndarray | None:
    """Return the words of each entry; None for a column with many values, or with one."""
    texts, values = [], set()
    for entry in column:
        text = write_entry(entry)
        absent = entry is None or (text == "nan" and not isinstance(entry, str))
        texts.append(_MISSING if absent else words + text)
        values.add(texts[-1])
        if len(values) > _MOST_VALUES:
            return None
    return np.array(texts) if len(values) > 1 else None
