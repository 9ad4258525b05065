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
    meaning = "Sample i is row i of each, whatever its label, so values of different samples would be combined."
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
        assert invalid(action, names, "in the same order", "with .loc[]").meaning == meaning
    other = pandas.Series(GROUP.to_numpy(), index=range(20))  # other labels: by position
    assert smooth(sensitive_features=other) == smooth()
    assert dif.fairness.check_order(X=X, y=LABELS, group=None).equals(X.index)


def test_wrong_inputs_are_refused():
    one_each, mean = (
        "There is one value for each sample.",
        "Text, missing values and infinity cannot be used in a mean.",
    )
    function = "It is evaluated at many parameters."
    only_a = np.where(LABELS, "a", "b")
    group = "It says to which group each sample belongs."
    for action, measured, meaning in (
        (lambda: smooth(X.assign(c="red")), "`c` contains 'red', in 20 of 20 places", mean),
        (lambda: smooth(X[:5]), "`labels` is an array of shape (20,)", one_each),
        (lambda: smooth((X, LABELS[:3])), "20 and 3 samples", "Sample i is row i of every part."),
        (lambda: smooth(labels=LABELS[:4]), "`labels` is an array of shape (4,)", one_each),
        (lambda: smooth(labels=None), "`labels` is None", one_each),
        (lambda: smooth(labels="paid"), "`labels` is of type str", one_each),
        (lambda: smooth(labels=["yes", "no"] * 10), "'yes', in 20", mean),
        (lambda: smooth(labels=[0, np.nan] * 10), "nan, in 10", mean),
        (lambda: smooth(sample_weight=[1.0, 2.0]), "`sample_weight` is an array of shape (2,)", one_each),
        (lambda: smooth(sample_weight=-np.ones(20)), "`sample_weight` contains -1.0", mean),
        (lambda: smooth(sensitive_features="sex"), "of type str", group),
        (lambda: smooth(sensitive_features=[[1], [1, 2]]), "of type list", group),
        (lambda: smooth(function=None), "`score` is of type NoneType", function),
        (lambda: smooth(link=3), "`link` is of type int", function),
        (lambda: smooth(metric={}), "empty dict", "A smooth counterpart is known only for these."),
        (
            lambda: smooth(metric=metrics.true_positive_rate, sensitive_features=only_a),
            "'true_positive_rate' is not defined for b",
            "A rate is divided by the number of samples with one label, and this number is 0.",
        ),
        (
            lambda: smooth(function=lambda params, data: score(params, data)[:, None]),
            "`score` returned shape (20, 1)",
            "There is one score for each label.",
        ),
        (lambda: smooth(function=lambda params, data: 1.0), "returned float", "There is one score for each label."),
        (lambda: compare(X["a"].to_numpy()), "of type ndarray", "Each model has its own columns in the result, "),
        (lambda: compare({}), "an empty dict", "Each model has its own columns in the result, "),
        (lambda: compare({"mine": np.full(20, np.nan)}), "`scores['mine']` contains nan, in 20", mean),
        (lambda: compare({"mine": ["high"] * 20}), "'high'", mean),
        (lambda: compare({"mine": np.ones((20, 2))}), "shape (20, 2)", one_each),
        (lambda: compare({"mine": score}), "of type function", one_each),
        (lambda: constrain(labels=[[1]] * 20), "shape (20, 1)", one_each),
        (lambda: constrain(bound=[[1], [1, 2]]), "`bound`", "It limits how far groups may differ, "),
        (lambda: constrain(control_features=[1]), "`control_features` is an array of shape (1,)", group),
        (
            lambda: constrain(control_features=GROUP),
            "Group 'v' has no samples in",
            "mean of such a group is not defined.",
        ),
    ):
        assert meaning in invalid(action, measured).meaning
    for build in (dif.fairness.equal_opportunity, dif.fairness.error_rate_parity):
        labels = {"labels": LABELS} if build is dif.fairness.equal_opportunity else {}
        error = invalid(
            lambda build=build, labels=labels: build(None, score, sensitive_features=GROUP, **labels), "None"
        )
        assert error.meaning == "Fairness constraints are about the samples of the objective."
    with pytest.raises(TypeError, match="bounds"):
        constrain(bounds=0.1)
    with pytest.raises(TypeError, match="link"):
        dif.fairness.error_rate_parity(TRAIN, score, sensitive_features=GROUP, link=torch.sigmoid)
