"""Fairness constraints by name, on views of the samples of the objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif import InvalidInputError
from dif.fairness.groups import Groups, read_labels

PerSample = Callable[[Any, Any], Tensor]  # of the params and a batch: one number per sample
Link = Callable[[Tensor], Tensor] | None


def demographic_parity(
    train: dif.Samples,
    score: PerSample,
    *,
    sensitive_features: Any,
    bound: float = 0.01,
    ratio: float = 1.0,
    link: Link = torch.sigmoid,
    sample_weight: Any = None,
) -> list[dif.Constraint]:
    """Constrain the mean probability of each group to be near that of all samples.

    With p = link(score), and means over a group g and over all samples:
    ratio · mean_g(p) ≤ mean(p) + bound ("at most") and mean_g(p) ≥ ratio · mean(p) − bound ("at least").
    The selection rate of fairlearn counts score > 0 instead of p; `compare_metrics` shows it beside p.

    Of two groups only the smaller is constrained, because the other then is too. With bound=0 the means are equal: one
    equality for each group except the largest, which follows.

    Args:
        train: The samples of the objective. The constraints are made of a view, so that a removal acts on both.
        score: The score of the model, `score(params, batch)` → (n,); positive for the label 1.
        sensitive_features: The group of each sample, (n,), or several features, (n, k), which are combined.
        bound: The largest difference.
        ratio: The smallest ratio, such as 0.8 for the four-fifths rule with bound=0.
        link: The smooth stand-in for the decision score > 0. The default is the probability of logistic regression;
            None takes the score itself.
        sample_weight: Weights of the samples in the means, ≥ 0; None weighs all alike.

    >>> train = dif.Samples(lambda params, x: (x @ params["w"]) ** 2, torch.eye(6), name="train")
    >>> score = lambda params, x: x @ params["w"]
    >>> most, least = demographic_parity(train, score, sensitive_features=list("aabbbb"), bound=0.1)
    >>> most.name, least.name
    ('demographic parity, a, at most', 'demographic parity, a, at least')
    """
    view = _view(train, score, link)
    rule = _Rule("demographic parity", bound, ratio)
    return _parity(view, rule, _groups(train, sensitive_features), {"": None}, sample_weight)


def equal_opportunity(
    train: dif.Samples,
    score: PerSample,
    *,
    labels: Any,
    sensitive_features: Any,
    bound: float = 0.01,
    ratio: float = 1.0,
    link: Link = torch.sigmoid,
    sample_weight: Any = None,
) -> list[dif.Constraint]:
    """Constrain the mean probability among the samples of each group with label 1: smoothed true positive rates.

    The other arguments are those of `demographic_parity`; `labels` are 0 and 1, −1 and 1, or booleans.
    """
    events = {"": read_labels(labels, len(train))}
    view, rule = _view(train, score, link), _Rule("equal opportunity", bound, ratio)
    return _parity(view, rule, _groups(train, sensitive_features), events, sample_weight)


def false_positive_rate_parity(
    train: dif.Samples,
    score: PerSample,
    *,
    labels: Any,
    sensitive_features: Any,
    bound: float = 0.01,
    ratio: float = 1.0,
    link: Link = torch.sigmoid,
    sample_weight: Any = None,
) -> list[dif.Constraint]:
    """Constrain the mean probability among the samples of each group with label 0: smoothed false positive rates.

    The arguments are those of `equal_opportunity`.
    """
    events = {"": ~read_labels(labels, len(train))}
    view, rule = _view(train, score, link), _Rule("false positive rate parity", bound, ratio)
    return _parity(view, rule, _groups(train, sensitive_features), events, sample_weight)


def equalised_odds(
    train: dif.Samples,
    score: PerSample,
    *,
    labels: Any,
    sensitive_features: Any,
    bound: float = 0.01,
    ratio: float = 1.0,
    link: Link = torch.sigmoid,
    sample_weight: Any = None,
) -> list[dif.Constraint]:
    """Constrain the mean probability of each group among label 0 and among label 1: both smoothed rates.

    The arguments are those of `equal_opportunity`.
    """
    positive = read_labels(labels, len(train))
    events = {"label 0, ": ~positive, "label 1, ": positive}
    view, rule = _view(train, score, link), _Rule("equalised odds", bound, ratio)
    return _parity(view, rule, _groups(train, sensitive_features), events, sample_weight)


def error_rate_parity(
    train: dif.Samples,
    error: PerSample,
    *,
    sensitive_features: Any,
    bound: float = 0.01,
    ratio: float = 1.0,
    sample_weight: Any = None,
) -> list[dif.Constraint]:
    """Constrain the mean error of each group to be near that of all samples.

    `error(params, batch)` is a smooth error of each sample, such as the probability of the wrong label. The other
    arguments are those of `demographic_parity`.
    """
    view = train.view(_callable(error, "error"), name=f"error of {_samples(train).name}")
    rule = _Rule("error rate parity", bound, ratio)
    return _parity(view, rule, _groups(train, sensitive_features), {"": None}, sample_weight)


def bounded_group_loss(
    train: dif.Samples,
    *,
    sensitive_features: Any,
    bound: float,
    loss: PerSample | None = None,
    sample_weight: Any = None,
) -> list[dif.Constraint]:
    """Constrain the mean loss of each group to be at most `bound`.

    `loss(params, batch)` is the loss of each sample; None is the loss of `train`. The other arguments are those of
    `demographic_parity`.
    """
    groups, limit = _groups(train, sensitive_features), _number(bound, "bound")
    view = train if loss is None else train.view(_callable(loss, "loss"), name=f"group loss of {train.name}")
    means = [(name, view.mean(where=groups.members == g, weights=sample_weight)) for g, name in enumerate(groups.names)]
    return [(mean <= limit).named(f"bounded group loss, {name}") for name, mean in means]


@dataclass(frozen=True)
class _Rule:
    """Means may differ by `bound` and by the factor `ratio`; `name` begins the names of the constraints."""

    name: str
    bound: float
    ratio: float

    def __post_init__(self) -> None:
        _number(self.bound, "bound")
        if not 0 < _number(self.ratio, "ratio") <= 1:
            raise InvalidInputError(
                f"`ratio` is {self.ratio!r}.",
                "It must be above 0 and at most 1.",
                "It is the smallest ratio of the mean of a group and the mean of all samples.",
                "Pass 0.8 for the four-fifths rule, or leave it out and pass bound= for a difference.",
            )

    def compare(self, name: str, group: dif.Term, everyone: dif.Term) -> list[dif.Constraint]:
        """Return the constraints on the mean of one group."""
        if self.bound == 0 and self.ratio == 1:
            return [(group - everyone == 0.0).named(f"{self.name}, {name}")]
        most = (self.ratio * group <= everyone + self.bound).named(f"{self.name}, {name}, at most")
        least = (group >= self.ratio * everyone - self.bound).named(f"{self.name}, {name}, at least")
        return [most, least]


def _parity(
    view: dif.Samples, rule: _Rule, groups: Groups, events: Mapping[str, Tensor | None], sample_weight: Any
) -> list[dif.Constraint]:
    """Compare the mean of each group with that of all samples, among the samples of each event; None means all."""
    rows: list[dif.Constraint] = []
    for words, event in events.items():
        everyone = view.mean(where=event, weights=sample_weight)
        weights = everyone.sums[0][1].weights  # 0 outside the event
        masks = [(groups.members == g) & (weights > 0) for g in range(len(groups.names))]
        sizes = [float(weights[mask].sum()) for mask in masks]
        if not all(sizes):
            raise InvalidInputError(
                f"Group {groups.names[sizes.index(0.0)]!r} has no samples in {rule.name}{words and ', ' + words[:-2]}.",
                "Every group must have samples with the label in question, of weight above 0.",
                "The mean of such a group is not defined.",
                "Merge the group with another one, or choose a constraint that is not about labels.",
            )
        implied = sizes.index(max(sizes)) if rule.ratio == 1 and (len(sizes) == 2 or rule.bound == 0) else None
        for g, name in enumerate(groups.names):
            if g != implied:
                group = view.mean(where=masks[g], weights=sample_weight)
                rows += rule.compare(words + name, group, everyone)
    return rows


def _view(train: dif.Samples, score: PerSample, link: Link) -> dif.Samples:
    """Return the view of the samples whose loss is link(score)."""
    score = _callable(score, "score")
    if link is None:
        return _samples(train).view(score, name=f"score of {train.name}")
    stand_in = _callable(link, "link")
    name = f"probability of {_samples(train).name}"
    return train.view(lambda params, batch: stand_in(score(params, batch)), name=name)


def _groups(train: dif.Samples, sensitive_features: Any) -> Groups:
    return Groups.of(sensitive_features, len(_samples(train))).check_comparable()


def _samples(train: object) -> dif.Samples:
    """Return Samples; refuse other objects."""
    if not isinstance(train, dif.Samples):
        raise InvalidInputError(
            f"`train` is of type {type(train).__name__}.",
            "It must be a dif.Samples.",
            "Fairness constraints are about the samples of the objective.",
            "Pass the Samples object from which the objective is built.",
        )
    return train


def _callable(value: Any, name: str) -> Any:
    """Return a function; refuse other objects."""
    if not callable(value):
        raise InvalidInputError(
            f"`{name}` is of type {type(value).__name__}.",
            "It must be a function.",
            "It is evaluated at many parameters.",
            "Pass a function of the params and a batch (`link`: of the scores) that returns one number per sample.",
        )
    return value


def _number(value: Any, name: str) -> float:
    """Return a finite number ≥ 0 as a float."""
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "iuf" or not np.isfinite(number) or float(number) < 0:
        raise InvalidInputError(
            f"`{name}` is {value!r}.",
            "It must be one finite number ≥ 0.",
            "It limits how far groups may differ, or the loss of each.",
            "Pass a single number.",
        )
    return float(number)
