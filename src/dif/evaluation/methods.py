"""Methods under evaluation: estimators, or scores that were computed elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dif.derivatives.weight_change import check_perturbation
from dif.errors import InvalidInputError, few
from dif.estimators.influence import Influence
from dif.problem.perturbation import Perturbation, Removal
from dif.problem.sample_losses import SampleLosses
from dif.runtime.inputs import as_index, as_numbers

_CHECKS = ("assess", "probe")  # options of estimators that check their own predictions; evaluation does that


@runtime_checkable
class Scorer(Protocol):
    """Scores perturbations. Every `dif.Estimator` does, and so does `OwnTraining`."""

    @property
    def name(self) -> str:
        """Name in tables and pictures."""
        ...

    def scores(self, target: Any, perturbations: Perturbation, *, show_progress: bool = True) -> Influence:
        """Predict or measure the change of each target under each perturbation."""
        ...


Methods = Mapping[str, Any] | Sequence[Scorer]  # by name: estimators, an Influence, or arrays with a row per sample


def name_methods(methods: Methods) -> dict[str, Any]:
    """Return methods by name; those of a list have names of their own."""
    named: dict[str, Any]
    if isinstance(methods, Mapping):
        named = {str(name): method for name, method in methods.items()}
    else:
        listed = list(methods) if isinstance(methods, Sequence) else []
        nameless = not all(isinstance(method, Scorer) for method in listed)
        named = {} if nameless else {method.name: method for method in listed}
        if nameless or len(named) < len(listed):
            found = "holds scores without a name" if nameless else f"holds two methods named {_find_twice(listed)!r}"
            raise InvalidInputError(
                f"`methods` {found}.",
                "A list must hold estimators with different names.",
                "Tables and pictures name each method.",
                'Pass a dict: {"DIF": estimator, "mine": scores}.',
            )
    if not named:
        found = "is empty" if isinstance(methods, Mapping | Sequence) else f"is of type {type(methods).__name__}"
        raise InvalidInputError(
            f"`methods` {found}.",
            "It must be a dict from names to estimators or scores, or a list of estimators, at least one.",
            "There is nothing to evaluate.",
            'Pass, for example, {"DIF": dif.DirectionalInfluence(solution)}.',
        )
    classes = [name for name, method in named.items() if isinstance(method, type)]
    if classes:
        raise InvalidInputError(
            f"The method {classes[0]!r} is {_describe(named[classes[0]])}.",
            "It must be an estimator, an Influence, or an array of scores.",
            "A class has not seen the solution yet.",
            f"Pass {named[classes[0]].__name__}(solution).",
        )
    return named


def _describe(thing: object) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"of type {type(thing).__name__}"


def _find_twice(listed: list[Scorer]) -> str:
    """Return the first name that occurs twice."""
    names = [method.name for method in listed]
    return next(name for name in names if names.count(name) > 1)


def expect_scorer(truth: object) -> Scorer:
    """Return the ground truth; refuse what cannot score perturbations."""
    if not isinstance(truth, Scorer) or isinstance(truth, type):
        raise InvalidInputError(
            f"`truth` is {_describe(truth)}.",
            "It must be an estimator, or a dif.evaluation.OwnTraining.",
            "It says what removing samples really changes.",
            "Pass dif.Retraining(solution), or wrap a training function of your own in dif.evaluation.OwnTraining.",
        )
    return truth


def expect_size(count: Any, name: str, most: int) -> int:
    """Return a number of samples from 1 to `most`."""
    number = as_index(count)
    if number is None or not 1 <= number <= most:
        raise InvalidInputError(
            f"`{name}` includes {count!r}.",
            f"It must be an integer from 1 to {most}.",
            "So many samples are removed at once, and at least one must remain.",
            "Choose numbers that are smaller than the number of samples.",
        )
    return number


def expect_seed(seed: Any) -> torch.Generator:
    """Return the generator of random choices: of a seed, or the given one."""
    if isinstance(seed, torch.Generator):
        return seed
    number = as_index(seed)
    if number is None or not 0 <= number < 2**63:
        raise InvalidInputError(
            f"`seed` is {seed!r}.",
            "It must be an integer ≥ 0, or a torch.Generator.",
            "The same seed makes the same random choices.",
            "Use seed=0.",
        )
    return torch.Generator().manual_seed(number)


def score(scorer: Scorer, target: Any, perturbations: Perturbation, show_progress: bool = False) -> Influence:
    """Return scores without the estimator's own checks of them."""
    known = inspect.signature(scorer.scores).parameters
    options: dict[str, Any] = {name: 0 for name in _CHECKS if name in known}
    return scorer.scores(target, perturbations, show_progress=show_progress, **options)


def read_values(name: str, method: Any) -> Tensor:
    """Return scores that were computed elsewhere, (n, T): an Influence, or numbers, (n,) or (n, T)."""
    values = method.values if isinstance(method, Influence) else as_numbers(method, f"scores of {name!r}")
    return values[:, None] if values.dim() == 1 else values


def check_scores(name: str, values: Tensor, n: int, targets: int | None) -> Tensor:
    """Refuse scores of another shape than (n, T) or (n, 1), or that are not finite."""
    bad = int((~torch.isfinite(values)).sum())
    if values.dim() != 2 or len(values) != n or values.shape[1] not in (1, targets or values.shape[1]) or bad:
        allowed = f"({n},) or ({n}, {'T' if targets is None else targets})"
        raise InvalidInputError(
            f"The scores of {name!r} have shape {tuple(values.shape)}; {bad} of them are not finite.",
            f"The shape must be {allowed}, and all must be finite.",
            "There is one score for each sample, or one for each sample and target.",
            "Give the scores in the order of the samples, with 0 for what a method cannot score.",
        )
    return values.double()


def read_removals(perturbations: Perturbation) -> tuple[SampleLosses, list[list[int]]]:
    """Return the samples, and the numbers of those that each removal removes; refuse perturbations of other kinds."""
    check_perturbation(perturbations)
    actions = [action for factor, action in perturbations.pieces if factor == 1.0]
    removal = actions[0] if len(actions) == 1 and len(perturbations.pieces) == 1 else None
    if not isinstance(removal, Removal) or removal.terms is not None:
        raise InvalidInputError(
            f"The perturbations are {few(perturbations[: min(2, len(perturbations))].labels, quoted=True)}.",
            "They must be complete removals of samples from all terms.",
            "This method knows only which samples are there and which are not.",
            "Use samples.remove, remove_each or remove_groups, without terms=.",
        )
    start, index = removal.entries.start.tolist(), removal.entries.index.tolist()
    return removal.samples, [index[begin:end] for begin, end in pairwise(start)]
