"""Names for sets of samples, such as those over which a constraint takes a mean: by their group and their features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from dif.errors import count_words
from dif.problem.sample_losses import SampleLosses
from dif.report.column import write_entry

_MOST_VALUES = 12  # different values of a column up to which it can name a set
_MOST_COLUMNS = 3  # columns that the name of a set combines
_MOST_MEMBERS = 3  # samples that are listed where a set has no name
_MISSING = ""  # words of an entry without a value, which names no set


@dataclass(frozen=True, eq=False)
class SampleSets:
    """Columns with few different values, one entry per sample of a population, in the words of a set."""

    population: object | None  # which samples the columns are about
    columns: tuple[np.ndarray, ...]  # such as "label = 1" or "group a" for each sample

    @classmethod
    def of(
        cls, samples: SampleLosses | None, groups: Sequence[Any] | None, features: Mapping[str, Sequence[Any]]
    ) -> SampleSets:
        """Read the groups and features of samples; columns of another length say nothing about them."""
        if samples is None:
            return cls(None, ())
        named = [(f"{name} = ", column) for name, column in features.items()]
        if groups is not None:
            called = all(str(group).lower().startswith("group") for group in groups)
            named.append(("" if called else "group ", groups))
        found = (_read(words, column) for words, column in named if len(column) == len(samples))
        return cls(samples.population, tuple(column for column in found if column is not None))

    def describe(self, samples: SampleLosses, members: Sequence[int]) -> str:
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


def _read(words: str, column: Sequence[Any]) -> np.ndarray | None:
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
