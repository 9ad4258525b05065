"""What is passed beside the samples: orders, lengths, text, missing values."""

import numpy as np
import pytest
import torch
from refusals import invalid

import dif
import dif.fairness

pandas = pytest.importorskip("pandas")
metrics = pytest.importorskip("fairlearn.metrics")

RNG = np.random.default_rng(0)
NAMES = [f"person {i}" for i in range(20)]
X = pandas.DataFrame(RNG.normal(size=(20, 2)), columns=["a", "b"], index=NAMES)
LABELS = pandas.Series(np.arange(20) % 2, index=NAMES)
GROUP = pandas.Series(["u", "u", "v", "v"] * 5, index=NAMES)
RATE = metrics.selection_rate
PARAMS = {"w": torch.tensor([1.0, -0.5], dtype=torch.float64)}


def score(params, data):
    return data @ params["w"]


def loss(params, batch):
    return (batch[0] @ params["w"] - batch[1]) ** 2


TRAIN = dif.Samples(loss, (X, LABELS), name="train")


def smooth(data=X, function=score, metric=RATE, **options):
    arguments = {"labels": LABELS, "sensitive_features": GROUP} | options
    targets = dif.fairness.smooth_metrics(metric, function, data, **arguments)
    return [float(target.fn(PARAMS)) for target in targets]


def compare(scores, **options):
    arguments = {"labels": LABELS, "sensitive_features": GROUP} | options
    return dif.fairness.compare_metrics(RATE, scores, **arguments)


def constrain(kind="equal_opportunity", **options):
    arguments = {"labels": LABELS, "sensitive_features": GROUP} | options
    return getattr(dif.fairness, kind)(TRAIN, lambda params, batch: score(params, batch[0]), **arguments)


def test_data_frames_and_arrays_are_tensors():
    wanted = smooth(torch.tensor(X.to_numpy()))
    for data in (X, X.to_numpy(), X.to_numpy().tolist()):
        assert smooth(data) == wanted
    assert smooth((X, LABELS), lambda params, batch: score(params, batch[0])) == wanted
    assert smooth({"x": X, "y": LABELS.to_numpy()}, lambda params, batch: score(params, batch["x"])) == wanted
    assert smooth(labels=2 * LABELS - 1) == wanted
    table = compare({"mine": torch.tensor(X["a"].to_numpy(), requires_grad=True)}, labels=2 * LABELS - 1)
    pandas.testing.assert_frame_equal(table, compare({"mine": X["a"]}))


def test_the_same_labels_in_another_order_are_refused():
    turned = GROUP[::-1]
    for action, names in (
        (lambda: smooth(sensitive_features=turned), "`data[0]` and `sensitive_features`"),
        (lambda: smooth(labels=LABELS[::-1]), "`data[0]` and `labels`"),
        (lambda: smooth(sample_weight=pandas.Series(1.0, index=turned.index)), "`data[0]` and `sample_weight`"),
        (lambda: compare({"mine": X["a"][::-1]}), "`labels` and `scores['mine']`"),
        (lambda: compare({"mine": X["a"]}, control_features=turned), "`labels` and `control_features`"),
        (lambda: constrain(sensitive_features=turned), "`train` and `sensitive_features`"),
        (lambda: constrain(labels=LABELS[::-1]), "`train` and `labels`"),
        (
            lambda: dif.fairness.bounded_group_loss(TRAIN, sensitive_features=turned, bound=1.0),
            "`train` and `sensitive_features`",
        ),
    ):
        first, second = names.split(" and ")
        invalid(action, f"{second} has the labels of {first} in another order", "with .loc[X.index]")
    other = pandas.Series(GROUP.to_numpy(), index=range(20))  # other labels: by position
    assert smooth(sensitive_features=other) == smooth()
    assert dif.fairness.check_order(X=X, y=LABELS, group=None).equals(X.index)


def test_wrong_inputs_are_refused():
    only_a, one_each = np.where(LABELS, "a", "b"), "must have shape (20,), one value per sample, not"
    for action, measured in (
        (lambda: smooth(X.assign(c="red")), "`c` must contain finite numbers, not 'red', in 20 of 20 places"),
        (lambda: smooth(X[:5]), "`labels` must have shape (5,), one value per sample, not an array of shape (20,)"),
        (lambda: smooth((X, LABELS[:3])), "must have the same number of samples, not [20, 3]"),
        (lambda: smooth(labels=LABELS[:4]), f"`labels` {one_each} an array of shape (4,)"),
        (lambda: smooth(labels=None), f"`labels` {one_each} None"),
        (lambda: smooth(labels="paid"), f"`labels` {one_each} of type str"),
        (lambda: smooth(labels=["yes", "no"] * 10), "'yes', in 20"),
        (lambda: smooth(labels=[0, np.nan] * 10), "nan, in 10"),
        (lambda: smooth(sample_weight=[1.0, 2.0]), f"`sample_weight` {one_each} an array of shape (2,)"),
        (lambda: smooth(sample_weight=-np.ones(20)), "`sample_weight` must contain finite numbers ≥ 0, not -1.0"),
        (lambda: smooth(sensitive_features="sex"), "(20, k) for k features, not of type str"),
        (lambda: smooth(sensitive_features=[[1], [1, 2]]), "(20, k) for k features, not of type list"),
        (lambda: smooth(function=None), "`score` must be a function with one number per sample, not None"),
        (lambda: smooth(link=3), "`link` must be a function with one number per sample, not of type int"),
        (lambda: smooth(metric={}), "empty dict"),
        (
            lambda: smooth(metric=metrics.true_positive_rate, sensitive_features=only_a),
            "'true_positive_rate' is not defined for b",
        ),
        (
            lambda: smooth(function=lambda params, data: score(params, data)[:, None]),
            "`score` must return a tensor of shape (20,), one score per label, not shape (20, 1)",
        ),
        (lambda: smooth(function=lambda params, data: 1.0), "one score per label, not float"),
        (
            lambda: compare(X["a"].to_numpy()),
            "`scores` must be a dict with the scores of at least one model by name, not an array of shape (20,)",
        ),
        (lambda: compare({}), "at least one model by name, not an empty dict"),
        (
            lambda: compare({"mine": np.full(20, np.nan)}),
            "`scores['mine']` must contain finite numbers, not nan, in 20",
        ),
        (lambda: compare({"mine": ["high"] * 20}), "`scores['mine']` must contain finite numbers, not 'high'"),
        (lambda: compare({"mine": np.ones((20, 2))}), f"`scores['mine']` {one_each} an array of shape (20, 2)"),
        (lambda: compare({"mine": score}), f"`scores['mine']` {one_each} of type function"),
        (lambda: constrain(labels=[[1]] * 20), f"`labels` {one_each} an array of shape (20, 1)"),
        (lambda: constrain(bound=[[1], [1, 2]]), "`bound` must be a number ≥ 0"),
        (
            lambda: constrain(control_features=[1]),
            "`control_features` must have shape (20,), or (20, k) for k features, not an array of shape (1,)",
        ),
        (lambda: constrain(control_features=GROUP), "Group 'v' has no samples in"),
    ):
        invalid(action, measured)
    for build in (dif.fairness.equal_opportunity, dif.fairness.error_rate_parity):
        labels = {"labels": LABELS} if build is dif.fairness.equal_opportunity else {}
        invalid(
            lambda build=build, labels=labels: build(None, score, sensitive_features=GROUP, **labels),
            "`train` must be the dif.Samples of the objective, not None.",
        )
    with pytest.raises(TypeError, match="bounds"):
        constrain(bounds=0.1)
    with pytest.raises(TypeError, match="link"):
        dif.fairness.error_rate_parity(TRAIN, score, sensitive_features=GROUP, link=torch.sigmoid)
