"""Groups: which group of a sensitive feature, and which of the two labels, each sample has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.fairness.columns import as_array, check, read_values


@dataclass(frozen=True, eq=False)
class Groups:
    """The group of every sample."""

    names: tuple[str, ...]
    members: Tensor  # (n,) long, the number of each sample's group

    @classmethod
    def of(cls, features: Any, count: int, name: str = "sensitive_features") -> Groups:
        """Read one or several features of `count` samples; several features are combined.

        >>> Groups.of(["b", "a", "b"], 3)
        Groups(names=('a', 'b'), members=tensor([1, 0, 1]))
        """
        values = as_array(features)
        given = f"an array of shape {values.shape}" if values.ndim else f"of type {type(features).__name__}"
        check(
            values.ndim in (1, 2) and len(values) == count and values.size > 0,
            f"`{name}` is {'None' if features is None else given}, for {count} samples.",
            f"It must have shape ({count},), or ({count}, k) for k features.",
            "It says to which group each sample belongs.",
            "Pass a column of the data, with the samples in the same order.",
        )
        rows = [tuple(row) for row in values.reshape(count, -1).tolist()]
        missing = sum(any(_is_missing(value) for value in row) for row in rows)
        check(
            not missing,
            f"`{name}` is missing for {missing} of {count} samples.",
            "Every sample must have a value.",
            "A sample without a group belongs to no constraint.",
            'Give these samples a group of their own, such as "unknown", or leave them out.',
        )
        try:
            order = sorted(set(rows))
        except TypeError:  # numbers and texts together
            order = sorted(set(rows), key=lambda row: [str(value) for value in row])
        names = list(dict.fromkeys(", ".join(map(str, row)) for row in order))
        number = {group: position for position, group in enumerate(names)}
        members = torch.tensor([number[", ".join(map(str, row))] for row in rows])
        return cls(tuple(names), members)

    def check_comparable(self) -> Groups:
        """Return itself; refuse a single group, and groups of one sample."""
        sizes = Counter(self.members.tolist())
        alone = [self.names[g] for g, size in sizes.items() if size == 1]
        found = f"{len(self.names)} groups, {len(alone)} of them with one sample" if alone else "1 group"
        check(
            len(self.names) > 1 and not alone,
            f"`sensitive_features` has {found}.",
            "It must have at least 2 groups, each with at least 2 samples.",
            "Groups are compared by their means, which must exist without any one sample.",
            "Merge small groups, or divide a continuous feature into ranges.",
        )
        return self

    def split(self) -> dict[str, Tensor]:
        """Return the mask of each group by its name, (n,) bool."""
        return {name: self.members == g for g, name in enumerate(self.names)}


def read_labels(labels: Any, count: int) -> Tensor:
    """Return which samples have the positive label, (n,) bool; labels are 0 and 1, −1 and 1, or booleans.

    >>> read_labels([0, 1, 1], 3)
    tensor([False,  True,  True])
    """
    values = read_values(labels, "labels", count)
    found = set(values.tolist())
    check(
        found in ({0, 1}, {-1, 1}),
        f"`labels` contains {', '.join(map(repr, sorted(found, key=str)[:4]))}.",
        "It must contain 0 and 1, −1 and 1, or False and True.",
        "The rates of a group are taken over the samples with one of two labels.",
        "Pass the label of every sample; encode the positive one as 1.",
    )
    return torch.as_tensor(np.array(values == 1))


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN or pandas.NA."""
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas.NA has no truth value
        return True
