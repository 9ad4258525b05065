"""fairlearn's moments as smooth constraints: the same violations as fairlearn computes, the others refused by name."""

import numpy as np
import pytest
import torch
from refusals import invalid

import dif
import dif.fairness

reductions = pytest.importorskip("fairlearn.reductions")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
LABELS = (X[:, 0] + RNG.normal(size=60) > 0).astype(int)
GROUP = RNG.choice(["a", "b", "c"], size=60)
W = torch.tensor([1.0, -0.5, 0.3]).double()
SQUARE, ZERO_ONE = reductions.SquareLoss(0, 1), reductions.ZeroOneLoss()


def score(params, batch):
    return batch[0] @ params["w"]


def squared(params, batch):
    return (torch.sigmoid(score(params, batch)) - batch[1]) ** 2


def wrong(params, batch):
    return torch.where(batch[1] > 0, 1 - torch.sigmoid(score(params, batch)), torch.sigmoid(score(params, batch)))


TRAIN = dif.Samples(squared, (X, LABELS), name="train")


def read(moment, **options):
    loss = squared if getattr(moment, "reduction_loss", None) is SQUARE else wrong
    arguments = {"sensitive_features": GROUP, "score": score, "labels": LABELS, "loss": loss} | options
    return dif.fairness.read_moment(moment, TRAIN, **arguments)


def values_of(rows):
    """The left-hand sides f − τ of the constraints at W, as dif evaluates them."""
    return dif.Solution(dif.Problem(TRAIN.mean() + dif.ridge(1.0), rows), {"w": W}).c.numpy()


@pytest.mark.parametrize("limit", [{"difference_bound": 0.03}, {"ratio_bound": 0.9, "ratio_bound_slack": 0.01}, {}])
@pytest.mark.parametrize(
    "kind",
    ["DemographicParity", "TruePositiveRateParity", "FalsePositiveRateParity", "EqualizedOdds", "ErrorRateParity"],
)
def test_violations_are_those_that_fairlearn_computes_from_probabilities(kind, limit):
    moment = getattr(reductions, kind)(**limit)
    found = values_of(read(moment))
    moment.load_data(X, LABELS, sensitive_features=GROUP)
    theirs = moment.gamma(lambda data: torch.sigmoid(torch.as_tensor(data) @ W).numpy()) - moment.bound()
    np.testing.assert_allclose(np.sort(found), np.sort(theirs), atol=1e-12)


@pytest.mark.parametrize("loss", [SQUARE, ZERO_ONE], ids=["square", "zero-one"])
def test_group_losses_are_those_that_fairlearn_computes_from_probabilities(loss):
    moment = reductions.BoundedGroupLoss(loss, upper_bound=0.2)
    found = values_of(read(moment))
    moment.load_data(X, LABELS, sensitive_features=GROUP)
    theirs = moment.gamma(lambda data: torch.sigmoid(torch.as_tensor(data) @ W).numpy()) - moment.bound()
    np.testing.assert_allclose(found, theirs, atol=1e-12)


class Custom(reductions.DemographicParity):
    """A user's moment, which may do anything."""


def test_moments_without_a_smooth_counterpart_are_refused_by_name():
    known = "BoundedGroupLoss, not of type"
    for moment, options, measured in (
        (reductions.ErrorRate(), {}, f"{known} ErrorRate;"),
        (reductions.MeanLoss(SQUARE), {}, f"{known} MeanLoss;"),
        (reductions.UtilityParity(), {}, f"{known} UtilityParity;"),
        (Custom(), {}, f"{known} Custom;"),
        ("demographic parity", {}, f"{known} str;"),
        (
            reductions.BoundedGroupLoss(reductions.AbsoluteLoss(0, 1), upper_bound=1),
            {},
            "which have a smooth counterpart, not of type AbsoluteLoss",
        ),
        (reductions.BoundedGroupLoss(SQUARE), {}, "`upper_bound` of the BoundedGroupLoss must be a number, not None"),
        (reductions.BoundedGroupLoss(SQUARE, upper_bound=1), {"loss": None}, "`loss` must be passed for "),
        (reductions.DemographicParity(), {"score": None}, "`score` must be passed for "),
        (reductions.EqualizedOdds(), {"labels": None}, "`labels` must be passed for "),
        (reductions.EqualizedOdds(ratio_bound=0.8), {"link": None}, "`ratio` cannot be used with link=None"),
    ):
        invalid(lambda moment=moment, options=options: read(moment, **options), measured)
