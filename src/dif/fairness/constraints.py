"""Groups of a sensitive feature, and fairness constraints by name or as moments of fairlearn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif import InvalidInputError
from dif.runtime.inputs import check_number, check_order, describe, read_array, read_column


@dataclass(frozen=True, eq=False)
class Groups:
    """The group of every sample."""

    names: tuple[str, ...]
    members: Tensor  # (n,) long, the number of each sample's group

    @classmethod
    def of(cls, features: Any, count: int, name: str = "sensitive_features") -> Groups:
        """Read one or several features of `count` samples; several features are combined.

        Examples:
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

    Examples:
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

    Of two groups only the smaller is constrained, because the other then is too; where a perturbation turns the order
    of their sizes, the bound moves so that it limits the other one. With bound=0 the means are equal: one equality for
    each group except the largest, which follows.

    Args:
        train: The samples of the objective. The constraints are made of a view, so that a removal acts on both.
        score: The score of the model, `score(params, batch)` → (n,); positive for the label 1.
        sensitive_features: The group of each sample, (n,), or several features, (n, k), which are combined.
        bound: The largest difference.
        ratio: The smallest ratio, such as 0.8 for the four-fifths rule with bound=0. It needs a link with values ≥ 0,
            because scores may be negative.
        link: The smooth stand-in for the decision score > 0. The default is the probability of logistic regression;
            None takes the score itself.
        sample_weight: Weights of the samples in the means, ≥ 0; None weighs all alike.
        control_features: A column of the data, or several: groups are compared within each of its values. None compares
            them among all samples.

    Examples:
        >>> train = dif.Samples(lambda params, x: (x @ params["w"]) ** 2, torch.eye(6), name="train")
        >>> score = lambda params, x: x @ params["w"]
        >>> most, least = demographic_parity(train, score, sensitive_features=list("aabbbb"), bound=0.1)
        >>> most.name, least.name
        ('demographic parity, a, at most', 'demographic parity, a, at least')
    """
    view, columns = _view(train, score, link, ratio), (sensitive_features, control_features, sample_weight)
    return _compare_groups(_Rule("demographic parity", bound, ratio), view, {"": None}, *columns)


def equal_opportunity(
    train: dif.Samples, score: PerSample, *, labels: Any, sensitive_features: Any, bound: float = 0.01,
    ratio: float = 1.0, link: Link = torch.sigmoid, sample_weight: Any = None, control_features: Any = None,
) -> list[dif.Constraint]:  # fmt: skip
    """Constrain the mean probability among the samples of each group with label 1: smoothed true positive rates.

    The other arguments are those of `demographic_parity`; `labels` are 0 and 1, −1 and 1, or booleans.
    """
    _, positive = _divide_by_label(train, labels, sensitive_features)
    view, columns = _view(train, score, link, ratio), (sensitive_features, control_features, sample_weight)
    return _compare_groups(_Rule("equal opportunity", bound, ratio), view, {"": positive}, *columns)


def false_positive_rate_parity(
    train: dif.Samples, score: PerSample, *, labels: Any, sensitive_features: Any, bound: float = 0.01,
    ratio: float = 1.0, link: Link = torch.sigmoid, sample_weight: Any = None, control_features: Any = None,
) -> list[dif.Constraint]:  # fmt: skip
    """Constrain smoothed false positive rates: as `equal_opportunity`, among the samples with label 0."""
    negative, _ = _divide_by_label(train, labels, sensitive_features)
    view, columns = _view(train, score, link, ratio), (sensitive_features, control_features, sample_weight)
    return _compare_groups(_Rule("false positive rate parity", bound, ratio), view, {"": negative}, *columns)


def equalised_odds(
    train: dif.Samples, score: PerSample, *, labels: Any, sensitive_features: Any, bound: float = 0.01,
    ratio: float = 1.0, link: Link = torch.sigmoid, sample_weight: Any = None, control_features: Any = None,
) -> list[dif.Constraint]:  # fmt: skip
    """Constrain both smoothed rates: as `equal_opportunity`, among label 0 and among label 1."""
    negative, positive = _divide_by_label(train, labels, sensitive_features)
    view, columns = _view(train, score, link, ratio), (sensitive_features, control_features, sample_weight)
    events: dict[str, Tensor | None] = {"label 0, ": negative, "label 1, ": positive}
    return _compare_groups(_Rule("equalised odds", bound, ratio), view, events, *columns)


def error_rate_parity(
    train: dif.Samples, error: PerSample, *, sensitive_features: Any, bound: float = 0.01, ratio: float = 1.0,
    sample_weight: Any = None, control_features: Any = None,
) -> list[dif.Constraint]:  # fmt: skip
    """Constrain the mean error of each group to be near that of all samples.

    `error(params, batch)` is a smooth error ≥ 0 of each sample, such as the probability of the wrong label. The other
    arguments are those of `demographic_parity`, without `link`.
    """
    view = _view(train, check_function(error, "error"), None, 1)
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
    groups, limit = _read_groups(train, sensitive_features), check_number(bound, "bound", zero=True)
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
        check_number(self.bound, "bound", zero=True)
        if not 0 < check_number(self.ratio, "ratio", zero=True) <= 1:
            raise InvalidInputError(
                f"`ratio` must be above 0 and at most 1, such as 0.8 for the four-fifths rule, not {self.ratio!r}."
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
        if empty:
            raise InvalidInputError(
                f"Group {empty[0]!r} has no samples in {rule.name}{words and ', ' + words[:-2]}, so its mean is not "
                "defined; merge it with another one, or leave out the control feature."
            )
        equal = rule.bound == 0 and rule.ratio == 1
        alternate = len(sizes) == 2 and rule.ratio == 1 and not equal
        implied = max(sizes, key=lambda group: sizes[group]) if alternate or equal else None
        for group, inside in masks.items():
            if group != implied:
                found = rule.compare(words + group, view.mean(where=inside, weights=sample_weight), everyone)
                rows += [row.of_smaller_group() for row in found] if alternate else found
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


def _view(train: dif.Samples, score: PerSample, link: Link, ratio: float) -> dif.Samples:
    """Return the view of the samples whose loss is link(score)."""
    _check_samples(train)
    check_function(score, "score")
    stand_in = None if link is None else check_function(link, "link")
    if ratio != 1 and (stand_in is None or bool((stand_in(torch.linspace(-10, 10, 21)) < 0).any())):
        found = "link=None, because mean scores" if stand_in is None else "this `link`, because its means"
        raise InvalidInputError(
            f"`ratio` cannot be used with {found} may be negative; pass `bound` instead, or a link whose values are "
            "positive, such as torch.sigmoid."
        )
    if stand_in is None:
        return train.view(score, name=f"score of {train.name}")
    return train.view(lambda params, batch: stand_in(score(params, batch)), name=f"probability of {train.name}")


def _read_groups(train: dif.Samples, sensitive_features: Any) -> Groups:
    return Groups.of(sensitive_features, len(_check_samples(train))).check_comparable()


def _check_samples(train: object) -> dif.Samples:
    """Return Samples; refuse other objects."""
    if not isinstance(train, dif.Samples):
        raise InvalidInputError(f"`train` must be the dif.Samples of the objective, not {describe(train)}.")
    return train


# Constraints of fairlearn

_OF_RATES = {
    "TruePositiveRateParity": equal_opportunity,
    "FalsePositiveRateParity": false_positive_rate_parity,
    "EqualizedOdds": equalised_odds,
}
_SMOOTH_LOSSES = ("SquareLoss", "ZeroOneLoss")  # those of fairlearn with a smooth counterpart
_READABLE = ("DemographicParity", *_OF_RATES, "ErrorRateParity", "BoundedGroupLoss")


def _name_moment(moment: Any) -> str:
    """Return the name of a moment of fairlearn that has a smooth counterpart; refuse everything else by name.

    A BoundedGroupLoss must have a bound and a loss with a smooth counterpart.
    """
    name, a_class = type(moment).__name__, isinstance(moment, type)
    if a_class or not type(moment).__module__.startswith("fairlearn.") or name not in _READABLE:
        found = f"the class {moment.__name__}" if a_class else f"of type {name}"
        raise InvalidInputError(
            f"The constraint must be an object of one of fairlearn's classes {', '.join(_READABLE)}, not {found}; "
            "state other smooth constraints yourself: compare means of train.view(...)."
        )
    if name == "BoundedGroupLoss":
        loss = type(moment.reduction_loss).__name__
        if loss not in _SMOOTH_LOSSES:
            raise InvalidInputError(
                f"The loss of the BoundedGroupLoss must be one of fairlearn's {', '.join(_SMOOTH_LOSSES)}, which have "
                f"a smooth counterpart, not of type {loss}."
            )
        if moment.upper_bound is None:
            raise InvalidInputError("The `upper_bound` of the BoundedGroupLoss must be a number, not None.")
    return name


def read_moment(
    moment: Any,
    train: dif.Samples,
    *,
    sensitive_features: Any,
    score: PerSample | None = None,
    labels: Any = None,
    loss: PerSample | None = None,
    link: Link = torch.sigmoid,
    sample_weight: Any = None,
    control_features: Any = None,
) -> list[dif.Constraint]:
    """Return the smooth counterparts of a moment of fairlearn, such as DemographicParity(difference_bound=0.05).

    Only the kind of the moment and its bounds are read, not the data that it may have loaded.

    Args:
        moment: A DemographicParity, TruePositiveRateParity, FalsePositiveRateParity, EqualizedOdds, ErrorRateParity
            or BoundedGroupLoss of fairlearn.reductions.
        train: The samples of the objective.
        sensitive_features: The group of each sample.
        score: The score of the model, for the first four.
        labels: The label of each sample, for those with positive rates and for EqualizedOdds.
        loss: The smooth error of each sample, for the last two: the probability of the wrong label for ErrorRateParity
            and ZeroOneLoss, the squared error for SquareLoss. Fairlearn clips the latter to a range; dif does not, so
            that its constraint is the stricter one.
        link: The smooth stand-in for the decision score > 0.
        sample_weight: Weights of the samples in the means.
        control_features: Groups are compared within each value of these columns. BoundedGroupLoss takes none, as in
            fairlearn.

    Raises:
        InvalidInputError: The moment has no smooth counterpart, or an argument that it needs is missing.
    """
    name = _name_moment(moment)
    shared = {"sensitive_features": sensitive_features, "sample_weight": sample_weight}
    if name == "BoundedGroupLoss":
        if control_features is not None:
            raise InvalidInputError(
                "`control_features` must be None with a BoundedGroupLoss, which compares no groups; pass both columns "
                "as sensitive features, and the loss of each combination is bounded."
            )
        return bounded_group_loss(train, bound=moment.upper_bound, loss=_require(loss, "loss", name), **shared)
    limits = {"bound": moment.eps, "ratio": moment.ratio, "control_features": control_features}
    if name == "ErrorRateParity":
        return error_rate_parity(train, _require(loss, "loss", name), **limits, **shared)
    options = {**limits, **shared, "link": link}
    if name == "DemographicParity":
        return demographic_parity(train, _require(score, "score", name), **options)
    labels = _require(labels, "labels", name)
    return _OF_RATES[name](train, _require(score, "score", name), labels=labels, **options)


def _require(value: Any, argument: str, moment: str) -> Any:
    """Return an argument that a moment needs; refuse None."""
    if value is None:
        raise InvalidInputError(f"`{argument}` must be passed for {moment}, not None.")
    return value
