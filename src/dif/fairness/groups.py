"""Groups: which group of a sensitive feature, and which of the two labels, each sample has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif import InvalidInputError
from dif.runtime.inputs import describe, read_array, read_column


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
        values = read_array(features)
        if values.ndim not in (1, 2) or len(values) != count or values.size == 0:
            raise InvalidInputError(
                f"`{name}` must have shape ({count},), or ({count}, k) for k features, not {describe(features)}."
            )
        rows = [tuple(row) for row in values.reshape(count, -1).tolist()]
        missing = sum(any(_is_missing(value) for value in row) for row in rows)
        if missing:
            raise InvalidInputError(
                f"`{name}` is missing for {missing} of {count} samples; give these a group of their own, such as "
                '"unknown", or leave them out.'
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
        if len(self.names) < 2 or alone:
            raise InvalidInputError(
                f"`sensitive_features` must have at least 2 groups of at least 2 samples each, not {len(self.names)}, "
                f"{len(alone)} of them with one sample; merge small groups, or divide a continuous feature into ranges."
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
    values = read_column(labels, "labels", count)
    found = set(values.tolist())
    if found not in ({0, 1}, {-1, 1}):
        shown = ", ".join(map(repr, sorted(found, key=str)[:4]))
        raise InvalidInputError(f"`labels` must contain 0 and 1, −1 and 1, or False and True, not {shown}.")
    return torch.as_tensor(np.array(values == 1))


def check_function(value: Any, name: str) -> Any:
    """Return the function that was passed as the argument `name`."""
    if not callable(value):
        raise InvalidInputError(f"`{name}` must be a function with one number per sample, not {describe(value)}.")
    return value


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN or pandas.NA."""
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas.NA has no truth value
        return True
