"""Read the constraints of fairlearn (its moments) as smooth constraints of dif."""

from __future__ import annotations

from typing import Any

import torch

import dif
import dif.fairness.constraints as named
from dif.fairness.columns import check
from dif.fairness.constraints import Link, PerSample

_OF_RATES = {
    "TruePositiveRateParity": named.equal_opportunity,
    "FalsePositiveRateParity": named.false_positive_rate_parity,
    "EqualizedOdds": named.equalised_odds,
}
_SMOOTH_LOSSES = ("SquareLoss", "ZeroOneLoss")  # those of fairlearn with a smooth counterpart
READABLE = ("DemographicParity", *_OF_RATES, "ErrorRateParity", "BoundedGroupLoss")


def name_moment(moment: Any) -> str:
    """Return the name of a moment of fairlearn that has a smooth counterpart; refuse everything else by name.

    A BoundedGroupLoss must have a bound and a loss with a smooth counterpart.
    """
    name, a_class = type(moment).__name__, isinstance(moment, type)
    check(
        not a_class and type(moment).__module__.startswith("fairlearn.") and name in READABLE,
        f"The constraint is {f'the class {moment.__name__}' if a_class else f'of type {name}'}.",
        f"It must be an object of one of fairlearn's classes {', '.join(READABLE)}.",
        "Only these are known to have a smooth counterpart, a mean score, error or loss of each group.",
        "Use one of them, as in DemographicParity(difference_bound=0.05), or state a smooth constraint yourself: "
        "compare means of train.view(...).",
    )
    if name == "BoundedGroupLoss":
        loss = type(moment.reduction_loss).__name__
        check(
            loss in _SMOOTH_LOSSES,
            f"The loss of the BoundedGroupLoss is of type {loss}.",
            f"It must be one of fairlearn's {', '.join(_SMOOTH_LOSSES)}.",
            "The derivative of an absolute value does not exist at 0, and that of an unknown loss is unknown.",
            "Use SquareLoss, or state the constraint with dif.fairness.bounded_group_loss(train, loss=...).",
        )
        check(
            moment.upper_bound is not None,
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
    name = name_moment(moment)
    shared = {"sensitive_features": sensitive_features, "sample_weight": sample_weight}
    if name == "BoundedGroupLoss":
        check(
            control_features is None,
            "`control_features` was given with a BoundedGroupLoss.",
            "It must be None there, as in fairlearn.",
            "A bounded group loss compares no groups, so nothing is to be compared within a control feature.",
            "Pass both columns as sensitive_features: the loss of each combination is then bounded.",
        )
        return named.bounded_group_loss(train, bound=moment.upper_bound, loss=_require(loss, "loss", name), **shared)
    limits = {"bound": moment.eps, "ratio": moment.ratio, "control_features": control_features}
    if name == "ErrorRateParity":
        return named.error_rate_parity(train, _require(loss, "loss", name), **limits, **shared)
    options = {**limits, **shared, "link": link}
    if name == "DemographicParity":
        return named.demographic_parity(train, _require(score, "score", name), **options)
    labels = _require(labels, "labels", name)
    return _OF_RATES[name](train, _require(score, "score", name), labels=labels, **options)


def _require(value: Any, argument: str, moment: str) -> Any:
    """Return an argument that a moment needs; refuse None."""
    meaning = "A moment of fairlearn names a constraint, but not how the model computes what is constrained."
    needs, cure = f"{moment} needs it.", f"Pass {argument}= to read_moment."
    check(value is not None, f"`{argument}` is None.", needs, meaning, cure)
    return value
