"""Names of the targets of scores: no two are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from dif.errors import InvalidInputError
from dif.problem.term import Term

_LISTED = 3  # samples of a sum, or coefficients of a linear function, that a name lists


def distinguish_targets(names: Sequence[str], terms: Sequence[Term]) -> tuple[str, ...]:
    """Return the names of targets, those that are the same made different.

    A name that dif made up gets the samples or coefficients of its term. Names that are still the same are refused.

    Args:
        names: Name of each target.
        terms: The targets; where some have several rows, there are fewer terms than names.
    """
    twice = _find_twice(names)
    if twice and len(names) == len(terms):
        names = [
            f"{name} ({parts})" if name in twice and term.name is None and (parts := _list_parts(term)) else name
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


def _list_parts(term: Term) -> str:
    """Return the first samples of each sum in a term, and the first coefficients of each linear function."""
    sums = (part.weights for _, part in term.sums)
    lists = [_join([str(i) for i in torch.nonzero(weights).reshape(-1).tolist()]) for weights in sums]
    for _, function in term.functions:
        if function.matrix is not None:
            row = function.matrix.reshape(-1)
            used = torch.nonzero(row).reshape(-1).tolist()
            lists.append(_join([f"{float(row[i]):g}·{function.of or 'θ'}[{i}]" for i in used]))
    return "; ".join(lists)


def _join(entries: Sequence[str]) -> str:
    return ", ".join(entries[:_LISTED]) + (", …" if len(entries) > _LISTED else "")
