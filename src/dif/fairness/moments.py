"""Read the constraints of fairlearn (its moments) as smooth constraints of dif."""

from __future__ import annotations

from typing import Any

import torch

import dif
from dif import InvalidInputError
from dif.fairness.constraints import (
    Link,
    PerSample,
    bounded_group_loss,
    demographic_parity,
    equal_opportunity,
    equalised_odds,
    error_rate_parity,
    false_positive_rate_parity,
)

_OF_RATES = {
    "TruePositiveRateParity": equal_opportunity,
    "FalsePositiveRateParity": false_positive_rate_parity,
    "EqualizedOdds": equalised_odds,
}
_SMOOTH_LOSSES = ("SquareLoss", "ZeroOneLoss")  # those of fairlearn with a smooth counterpart
READABLE = ("DemographicParity", *_OF_RATES, "ErrorRateParity", "BoundedGroupLoss")


def name_moment(moment: Any) -> str:
    """Return the name of a moment of fairlearn that has a smooth counterpart; refuse everything else by name.

    A BoundedGroupLoss must have a bound and a loss with a smooth counterpart.
    """
    name = type(moment).__name__
    if not type(moment).__module__.startswith("fairlearn.") or name not in READABLE:
        raise InvalidInputError(
            f"The constraint is of type {name}.",
            f"It must be one of fairlearn's {', '.join(READABLE)}.",
            "Only these are known to have a smooth counterpart, a mean score, error or loss of each group.",
            "Use one of them, or state a smooth constraint yourself: compare means of train.view(...).",
        )
    if name == "BoundedGroupLoss":
        loss = type(moment.reduction_loss).__name__
        if loss not in _SMOOTH_LOSSES:
            raise InvalidInputError(
                f"The loss of the BoundedGroupLoss is of type {loss}.",
                f"It must be one of fairlearn's {', '.join(_SMOOTH_LOSSES)}.",
                "The derivative of an absolute value does not exist at 0, and that of an unknown loss is unknown.",
                "Use SquareLoss, or state the constraint with dif.fairness.bounded_group_loss(train, loss=...).",
            )
        if moment.upper_bound is None:
            raise InvalidInputError(
                "The BoundedGroupLoss has upper_bound=None.",
                "It must be a number.",
                "Without a bound nothing is constrained.",
                "Pass upper_bound=, for example somewhat below the loss of the worst group without the constraint.",
            )
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

    Raises:
        InvalidInputError: The moment has no smooth counterpart, or an argument that it needs is missing.
    """
    name = name_moment(moment)
    shared = {"sensitive_features": sensitive_features, "sample_weight": sample_weight}
    if name == "BoundedGroupLoss":
        return bounded_group_loss(train, bound=moment.upper_bound, loss=_needed(loss, "loss", name), **shared)
    limits = {"bound": moment.eps, "ratio": moment.ratio}
    if name == "ErrorRateParity":
        return error_rate_parity(train, _needed(loss, "loss", name), **limits, **shared)
    options = {**limits, **shared, "link": link}
    if name == "DemographicParity":
        return demographic_parity(train, _needed(score, "score", name), **options)
    labels = _needed(labels, "labels", name)
    return _OF_RATES[name](train, _needed(score, "score", name), labels=labels, **options)


def _needed(value: Any, argument: str, moment: str) -> Any:
    """Return an argument that a moment needs; refuse None."""
    if value is None:
        raise InvalidInputError(
            f"`{argument}` is None.",
            f"{moment} needs it.",
            "A moment of fairlearn names a constraint, but not how the model computes what is constrained.",
            f"Pass {argument}= to read_moment.",
        )
    return value
