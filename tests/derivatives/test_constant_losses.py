"""Losses that do not depend on the parameters: a warning names them, where nobody can have meant it."""

import warnings

import numpy as np
import pytest
import torch

import dif

RNG = np.random.default_rng(0)
X = torch.tensor(np.c_[RNG.normal(size=(60, 2)), np.ones(60)])
SIGN = torch.where(X[:, 0] + 0.5 * torch.tensor(RNG.normal(size=60)) > 0, 1.0, -1.0).double()
score = lambda params, batch: batch[0] @ params["w"]  # noqa: E731
softplus = torch.nn.functional.softplus
LOSSES = {
    "logistic": lambda params, batch: softplus(-batch[1] * score(params, batch)),
    "squared hinge": lambda params, batch: torch.relu(1 - batch[1] * score(params, batch)) ** 2,
    "steep": lambda params, batch: softplus(-60 * batch[1] * score(params, batch)),
    "observed": lambda params, batch: (batch[1] > 0) * (score(params, batch) - 1) ** 2,
}


def judge(loss, labels, view=None):
    """Fit and score; return the texts of the warnings."""
    train = dif.Samples(loss, (X, labels), name="train")
    rows = [] if view is None else [train.view(view, name="view").mean() <= 1e3]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1), rows), {"w": torch.zeros(3).double()})
        dif.DirectionalInfluence(solution).scores(train.mean(), train.remove_each([0]), show_progress=False)
    return [str(one.message) for one in caught if "does not depend on" in str(one.message)]


@pytest.mark.parametrize("loss", ["logistic", "squared hinge"])
def test_labels_in_another_coding_are_named(loss):
    labels = (SIGN + 1) / 2
    (text,) = judge(LOSSES[loss], labels)
    count = int((labels == 0).sum())
    assert text.startswith(
        f"The loss of {count} of 60 samples of 'train' is not 0, but does not depend on the parameters"
    )
    assert text.endswith("Labels 0 and 1 do this in a loss that takes −1 and 1: pass 2·y − 1.")


def test_a_training_run_names_them_too():
    train = dif.Samples(LOSSES["logistic"], (X, (SIGN + 1) / 2), name="train")
    training = dif.Training(dif.Problem(train.mean()), {"w": torch.zeros(3).double()}, dif.SGD(0.1), epochs=1)
    with pytest.warns(UserWarning, match="samples of 'train' is not 0, but does not depend on the parameters"):
        training.run(show_progress=False)


@pytest.mark.parametrize("loss", LOSSES)
def test_flat_steep_and_masked_losses_are_none(loss):
    """The squared hinge is 0 where it is flat, a steep loss is nearly flat, and masked samples have the loss 0."""
    assert judge(LOSSES[loss], SIGN, view=lambda params, batch: torch.ones_like(batch[1])) == []
