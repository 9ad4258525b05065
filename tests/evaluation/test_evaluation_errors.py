"""What evaluation refuses, and what it says then."""

import numpy as np
import pytest
import torch
from refusals import NAN, TRAIN, estimator, table

import dif
from dif import evaluation

SCORES = torch.arange(8.0)
MEAN = TRAIN.mean()


def truth():
    return estimator(dif.Retraining)


def lds(methods=None, truth_=None, target=TRAIN, samples=TRAIN, **options):
    methods = {"mine": SCORES} if methods is None else methods
    options = {"show_progress": False, "subsets": 4, **options}
    return evaluation.linear_datamodelling_score(methods, truth_ or truth(), target, samples, **options)


def curve(methods=None, counts=(1, 2), target=MEAN, truth_=None, **options):
    methods = {"mine": SCORES} if methods is None else methods
    return evaluation.removal_curve(methods, truth_ or truth(), target, TRAIN, counts, show_progress=False, **options)


def singles(**options):
    return evaluation.leave_one_out_agreement({"mine": SCORES}, truth(), MEAN, TRAIN, show_progress=False, **options)


MASK = torch.arange(8) < 3

CASES = {  # a call, and words of the sentence
    "no methods": (lambda: lds({}), "`methods` must be a dict by name, or a list of estimators with different names."),
    "a number as methods": (lambda: lds(3), "`methods` must be a dict by name"),
    "scores without a name": (lambda: lds([SCORES]), "or a list of estimators with different names"),
    "two of a name": (lambda: lds([estimator(dif.ClassicalInfluence)] * 2), "estimators with different names"),
    "scores of another length": (lambda: lds({"mine": SCORES[:5]}), "not of shape (5, 1)"),
    "scores of other targets": (lambda: lds({"mine": torch.ones(8, 3)}), "(8,) or (8, 8), not of shape (8, 3)"),
    "NaN": (lambda: lds({"mine": SCORES * NAN}), "must be finite", "(8, 1) with NaN or ∞; use 0 for what has no score"),
    "an influence of other removals": (
        lambda: lds({"mine": estimator(dif.ClassicalInfluence).scores(TRAIN, TRAIN.remove_each([2, 1]), assess=0)}),
        "The Influence of 'mine' must be one of remove_each() of the same Samples.",
    ),
    "a number as truth": (lambda: lds(truth_=3), "`truth` must be an estimator such as dif.Retraining, or a function"),
    "a class as truth": (lambda: lds(truth_=dif.Retraining), "`truth` must be an estimator", "not <class"),
    "a class as method": (
        lambda: lds({"DIF": dif.DirectionalInfluence}),
        "The method 'DIF' must be an estimator such as DirectionalInfluence(solution).",
    ),
    "a number as samples": (lambda: lds(samples=8), "int", "Samples"),
    "no subsets": (lambda: lds(subsets=0), "`subsets` must be at least 3, not 0."),
    "subsets of text": (lambda: lds(subsets="many"), "`subsets` must be an integer ≥ 0, not 'many'."),
    "two subsets": (lambda: lds(subsets=2), "`subsets` must be at least 3, not 2."),
    "everything removed": (lambda: lds(share=1.0), "`share` must take at least one of 8 samples but not all"),
    "a negative share": (lambda: lds(share=-0.5), "`share` must take", "it is -0.5"),
    "no number as share": (lambda: lds(share=NAN), "`share` must take", "it is nan"),
    "a share of text": (lambda: lds(share="half"), "`share` must take", "it is 'half'"),
    "all trainings fail": (
        lambda: lds(truth_=lambda kept: NAN if len(kept) < 8 else 1.0, target=None),
        "0 of 4 trainings gave an answer; at least 3 must.",
    ),
    "other targets each time": (
        lambda: lds(truth_=lambda kept: np.ones(1 + len(kept) % 3), target=None),
        "`truth` must return equally many targets after every training, at least one.",
    ),
    "no targets": (lambda: lds(truth_=lambda kept: [], target=None), "equally many targets", "at least one"),
    "no counts": (lambda: curve(counts=[]), "`counts` must be a list of integers from 1 to 7, not []."),
    "all samples": (lambda: curve(counts=[3, 8]), "`counts` must be", "not [3, 8]"),
    "half a sample of a curve": (lambda: curve(counts=[0.5]), "`counts` must be", "not [0.5]"),
    "a number as counts": (lambda: curve(counts=3), "`counts` must be", "not 3"),
    "a number in an array as counts": (lambda: curve(counts=np.array(3)), "`counts` must be", "not array(3)"),
    "a negative number of orders": (lambda: curve(random=-1), "`random` must be an integer ≥ 0, not -1."),
    "scores of several targets in a curve": (
        lambda: curve({"mine": torch.ones(8, 2)}),
        "must be finite and of shape (8,) or (8, 1), not of shape (8, 2)",
    ),
    "several targets in a curve": (
        lambda: curve(target=TRAIN),
        "A curve has one target, not 8; pass one Term, such as test.mean().",
    ),
    "a function of several targets in a curve": (
        lambda: curve(truth_=lambda kept: [1.0, 2.0], target=None),
        "A curve has one target, not 2",
    ),
    "nothing to leave out": (lambda: singles(strongest=0, random=1), "`strongest` or `random` must be at least 2"),
    "half a sample": (lambda: singles(strongest=0.5), "`strongest` must be an integer ≥ 0, not 0.5."),
    "a seed of text": (lambda: singles(seed="a"), "`seed` must be an integer ≥ 0, not 'a'."),
    "a seed of many digits": (lambda: curve(seed=2**64), "`seed` must be an integer"),
    "a negative seed": (lambda: curve(seed=-1), "`seed` must be an integer ≥ 0, not -1."),
    "a mask of numbers": (
        lambda: evaluation.label_error_auc({"mine": SCORES}, SCORES),
        "`wrong` must be a boolean mask, one entry per sample, some true and some false.",
    ),
    "nothing wrong": (lambda: evaluation.label_error_auc({"mine": SCORES}, MASK & False), "some true and some false"),
    "a short mask": (
        lambda: evaluation.label_error_auc({"mine": SCORES}, MASK[:5], TRAIN),
        "`wrong` must have 8 entries, one per sample, not 5.",
    ),
    "an estimator without samples": (
        lambda: evaluation.label_error_auc({"DIF": estimator(dif.DirectionalInfluence)}, MASK),
        "`samples` must be given, since 'DIF' is an estimator.",
    ),
}


@table(CASES)
def test_refused(case):
    action, *words = case
    with pytest.raises(dif.InvalidInputError) as caught:
        action()
    assert [word for word in words if word not in str(caught.value)] == []
