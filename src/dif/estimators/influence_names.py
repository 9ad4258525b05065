"""Names of the targets of scores: no two are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from dif.errors import InvalidInputError
from dif.problem.term import Term

_LISTED = 3  # samples of a sum that a name lists


def distinguish_targets(names: Sequence[str], terms: Sequence[Term]) -> tuple[str, ...]:
    """Return the names of targets, those that are the same made different.

    A name that dif made up gets the samples that its term is about. Names that are still the same are refused.

    Args:
        names: Name of each target.
        terms: The targets; where some have several rows, there are fewer terms than names.
    """
    twice = _find_twice(names)
    if twice and len(names) == len(terms):
        names = [
            f"{name} ({_list_samples(term)})" if name in twice and term.name is None and term.sums else name
            for name, term in zip(names, terms, strict=True)
        ]
        twice = _find_twice(names)
    if twice:
        raise InvalidInputError(
            f"{names.count(twice[0])} targets are called {twice[0]!r}.",
            "Each target must have a name of its own.",
            "Scores are found, compared and reported by the name of their target.",
            'Pass a dict of targets by name, such as {"group a": term, "group b": other}.',
        )
    return tuple(names)


def _find_twice(names: Sequence[str]) -> list[str]:
    """Return the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def _list_samples(term: Term) -> str:
    """Return the numbers of the first samples of each sum in a term."""
    lists = []
    for _, part in term.sums:
        members = torch.nonzero(part.weights).reshape(-1).tolist()
        lists.append(", ".join(map(str, members[:_LISTED])) + (", …" if len(members) > _LISTED else ""))
    return "; ".join(lists)
