"""Fairness constraints by name, on views of the samples of the objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif.fairness.columns import as_array, check, check_function, check_order
from dif.fairness.groups import Groups, read_labels

PerSample = Callable[[Any, Any], Tensor]  # of the params and a batch: one number per sample
Link = Callable[[Tensor], Tensor] | None


def demographic_parity(
    train: dif.Samples, score: PerSample, *, sensitive_features: Any, bound: float = 0.01, ratio: float = 1.0,
    link: Link = torch.sigmoid, sample_weight: Any = None, control_features: Any = None,
) -> list[dif.Constraint]:  # fmt: skip
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
        control_features: A column of the data, or several: groups are compared within each of its values. None compares
            them among all samples.

    >>> train = dif.Samples(lambda params, x: (x @ params["w"]) ** 2, torch.eye(6), name="train")
    >>> score = lambda params, x: x @ params["w"]
    >>> most, least = demographic_parity(train, score, sensitive_features=list("aabbbb"), bound=0.1)
    >>> most.name, least.name
    ('demographic parity, a, at most', 'demographic parity, a, at least')
    """
    view, columns = _view(train, score, link), (sensitive_features, control_features, sample_weight)
    return _compare_groups(_Rule("demographic parity", bound, ratio), view, {"": None}, *columns)


def equal_opportunity(
    train: dif.Samples, score: PerSample, *, labels: Any, sensitive_features: Any, bound: float = 0.01,
    ratio: float = 1.0, link: Link = torch.sigmoid, sample_weight: Any = None, control_features: Any = None,
) -> list[dif.Constraint]:  # fmt: skip
    """Constrain the mean probability among the samples of each group with label 1: smoothed true positive rates.

    The other arguments are those of `demographic_parity`; `labels` are 0 and 1, −1 and 1, or booleans.
    """
    _, positive = _divide_by_label(train, labels, sensitive_features)
    view, columns = _view(train, score, link), (sensitive_features, control_features, sample_weight)
    return _compare_groups(_Rule("equal opportunity", bound, ratio), view, {"": positive}, *columns)


def false_positive_rate_parity(
    train: dif.Samples, score: PerSample, *, labels: Any, sensitive_features: Any, bound: float = 0.01,
    ratio: float = 1.0, link: Link = torch.sigmoid, sample_weight: Any = None, control_features: Any = None,
) -> list[dif.Constraint]:  # fmt: skip
    """Constrain smoothed false positive rates: as `equal_opportunity`, among the samples with label 0."""
    negative, _ = _divide_by_label(train, labels, sensitive_features)
    view, columns = _view(train, score, link), (sensitive_features, control_features, sample_weight)
    return _compare_groups(_Rule("false positive rate parity", bound, ratio), view, {"": negative}, *columns)


def equalised_odds(
    train: dif.Samples, score: PerSample, *, labels: Any, sensitive_features: Any, bound: float = 0.01,
    ratio: float = 1.0, link: Link = torch.sigmoid, sample_weight: Any = None, control_features: Any = None,
) -> list[dif.Constraint]:  # fmt: skip
    """Constrain both smoothed rates: as `equal_opportunity`, among label 0 and among label 1."""
    negative, positive = _divide_by_label(train, labels, sensitive_features)
    view, columns = _view(train, score, link), (sensitive_features, control_features, sample_weight)
    events: dict[str, Tensor | None] = {"label 0, ": negative, "label 1, ": positive}
    return _compare_groups(_Rule("equalised odds", bound, ratio), view, events, *columns)


def error_rate_parity(
    train: dif.Samples, error: PerSample, *, sensitive_features: Any, bound: float = 0.01, ratio: float = 1.0,
    sample_weight: Any = None, control_features: Any = None,
) -> list[dif.Constraint]:  # fmt: skip
    """Constrain the mean error of each group to be near that of all samples.

    `error(params, batch)` is a smooth error of each sample, such as the probability of the wrong label. The other
    arguments are those of `demographic_parity`, without `link`.
    """
    view = _view(train, check_function(error, "error"), None)
    columns = sensitive_features, control_features, sample_weight
    return _compare_groups(_Rule("error rate parity", bound, ratio), view, {"": None}, *columns)


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
    `demographic_parity`. For a bound within each value of a control feature pass both columns as sensitive features.
    """
    groups, limit = _read_groups(train, sensitive_features), _read_number(bound, "bound")
    check_order(train=train.remove_each(), sensitive_features=sensitive_features, sample_weight=sample_weight)
    view = train if loss is None else train.view(check_function(loss, "loss"), name=f"group loss of {train.name}")
    means = {name: view.mean(where=inside, weights=sample_weight) for name, inside in groups.split().items()}
    return [(mean <= limit).named(f"bounded group loss, {name}") for name, mean in means.items()]


@dataclass(frozen=True)
class _Rule:
    """Means may differ by `bound` and by the factor `ratio`; `name` begins the names of the constraints."""

    name: str
    bound: float
    ratio: float

    def __post_init__(self) -> None:
        _read_number(self.bound, "bound")
        check(
            0 < _read_number(self.ratio, "ratio") <= 1,
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


def _compare_groups(
    rule: _Rule,
    view: dif.Samples,
    events: Mapping[str, Tensor | None],
    sensitive_features: Any,
    control_features: Any,
    sample_weight: Any,
) -> list[dif.Constraint]:
    """Compare the mean of each group with that of all samples, among the samples of each event; None means all."""
    groups = _read_groups(view, sensitive_features)
    columns = {"sensitive_features": sensitive_features, "control_features": control_features}
    check_order(train=view.remove_each(), **columns, sample_weight=sample_weight)
    if control_features is not None:
        events = _divide_by_control(events, Groups.of(control_features, len(view), "control_features"))
    rows: list[dif.Constraint] = []
    for words, event in events.items():
        everyone = view.mean(where=event, weights=sample_weight)
        weights = everyone.sums[0][1].weights  # 0 outside the event
        masks = {group: inside & (weights > 0) for group, inside in groups.split().items()}
        sizes = {group: float(weights[inside].sum()) for group, inside in masks.items()}
        empty = [group for group, size in sizes.items() if size == 0]
        check(
            not empty,
            f"Group {empty[0] if empty else ''!r} has no samples in {rule.name}{words and ', ' + words[:-2]}.",
            "Every group must have samples with the label and control feature in question, of weight above 0.",
            "The mean of such a group is not defined.",
            "Merge the group with another one, leave out the control feature, or choose a constraint without labels.",
        )
        follows = rule.ratio == 1 and (len(sizes) == 2 or rule.bound == 0)  # from the constraints of the others
        implied = max(sizes, key=lambda group: sizes[group]) if follows else None
        for group, inside in masks.items():
            if group != implied:
                rows += rule.compare(words + group, view.mean(where=inside, weights=sample_weight), everyone)
    return rows


def _divide_by_label(train: dif.Samples, labels: Any, sensitive_features: Any) -> tuple[Tensor, Tensor]:
    """Return which samples have label 0 and which have label 1, each (n,) bool."""
    positive = read_labels(labels, len(_check_samples(train)))
    check_order(train=train.remove_each(), labels=labels, sensitive_features=sensitive_features)
    return ~positive, positive


def _divide_by_control(events: Mapping[str, Tensor | None], control: Groups) -> dict[str, Tensor]:
    """Return the part of each event with each value of the control feature."""
    return {
        f"{value}, {words}": inside if event is None else inside & event
        for value, inside in control.split().items()
        for words, event in events.items()
    }


def _view(train: dif.Samples, score: PerSample, link: Link) -> dif.Samples:
    """Return the view of the samples whose loss is link(score)."""
    _check_samples(train)
    check_function(score, "score")
    if link is None:
        return train.view(score, name=f"score of {train.name}")
    stand_in, name = check_function(link, "link"), f"probability of {train.name}"
    return train.view(lambda params, batch: stand_in(score(params, batch)), name=name)


def _read_groups(train: dif.Samples, sensitive_features: Any) -> Groups:
    return Groups.of(sensitive_features, len(_check_samples(train))).check_comparable()


def _check_samples(train: object) -> dif.Samples:
    """Return Samples; refuse other objects."""
    meaning, cure = "Fairness constraints are about the samples of the objective.", "Pass the Samples of the objective."
    found = f"`train` is of type {type(train).__name__}."
    check(isinstance(train, dif.Samples), found, "It must be a dif.Samples.", meaning, cure)
    return train  # type: ignore[return-value]


def _read_number(value: Any, name: str) -> float:
    """Return a finite number ≥ 0 as a float."""
    number = as_array(value)
    valid = number.ndim == 0 and number.dtype.kind in "iuf" and bool(np.isfinite(number)) and float(number) >= 0
    meaning = "It limits how far groups may differ, or the loss of each."
    check(valid, f"`{name}` is {value!r}.", "It must be one finite number ≥ 0.", meaning, "Pass a single number.")
    return float(number)
