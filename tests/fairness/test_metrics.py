"""Smoothed metrics: what fairlearn's MetricFrame says of decisions that are drawn with these probabilities."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from refusals import invalid
from scipy.special import expit

import dif
import dif.fairness

metrics, scores = pytest.importorskip("fairlearn.metrics"), pytest.importorskip("sklearn.metrics")

RNG = np.random.default_rng(1)
X = RNG.normal(size=(80, 3))
LABELS = (X[:, 0] + RNG.normal(size=80) > 0).astype(int)
GROUP = RNG.choice(["a", "b", "c"], size=80)
W = np.array([1.0, -0.5, 0.3])
WEIGHTS = RNG.uniform(0.5, 2.0, size=80)
RATES = [
    metrics.selection_rate,
    metrics.mean_prediction,
    metrics.true_positive_rate,
    metrics.false_positive_rate,
    metrics.true_negative_rate,
    metrics.false_negative_rate,
    scores.accuracy_score,
    scores.zero_one_loss,
    scores.recall_score,
    scores.precision_score,
    scores.f1_score,
    scores.balanced_accuracy_score,
]


def score(params, data):
    return data @ params["w"]


def smooth(given, **options):
    arguments = {"data": torch.tensor(X), "labels": LABELS, "sensitive_features": GROUP} | options
    targets = dif.fairness.smooth_metrics(given, score, **arguments)
    return {target.name: float(target.fn({"w": torch.tensor(W)})) for target in targets}


def frame(functions, y_true, y_pred, groups, weights):
    parameters = {name: {"sample_weight": weights} for name in functions}
    found = metrics.MetricFrame(
        metrics=functions, y_true=y_true, y_pred=y_pred, sensitive_features=groups, sample_params=parameters
    )
    values = {"overall": found.overall, **{g: found.by_group.loc[g] for g in ("a", "b", "c")}}
    return values | {"difference": found.difference(), "ratio": found.ratio()}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
def test_smoothed_metrics_are_those_of_both_decisions_with_their_probabilities(weights):
    """Everybody appears twice in a MetricFrame: with decision 1 and weight p, with decision 0 and weight 1 − p."""
    functions = {metric.__name__: metric for metric in RATES}
    p, w = expit(X @ W), np.ones(80) if weights is None else weights
    decisions = np.repeat([1, 0], 80)
    twice = [np.tile(column, 2) for column in (LABELS, GROUP)]
    theirs = frame(functions, twice[0], decisions, twice[1], np.concatenate([w * p, w * (1 - p)]))
    found = smooth(functions, sample_weight=weights)
    assert len(found) == len(RATES) * 6
    for name in functions:
        for where, values in theirs.items():
            np.testing.assert_allclose(found[f"{name}, {where}"], values[name], rtol=1e-12, err_msg=f"{name} {where}")


def test_metrics_of_a_regression_are_those_of_a_metric_frame():
    functions = {"error": scores.mean_squared_error, "mean": metrics.mean_prediction}
    true = X[:, 1] + 0.2
    theirs = frame(functions, true, X @ W, GROUP, WEIGHTS)
    found = smooth(functions, labels=true, link=None, sample_weight=WEIGHTS)
    for name in functions:
        for where, values in theirs.items():
            np.testing.assert_allclose(found[f"{name}, {where}"], values[name], rtol=1e-12)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
def test_hard_metrics_stand_beside_the_smoothed_ones(weights):
    table = dif.fairness.compare_metrics(
        metrics.selection_rate,
        {"before": X @ W, "after": 5 * (X @ W)},
        labels=LABELS,
        sensitive_features=GROUP,
        sample_weight=weights,
    )
    assert list(table.columns) == [(m, s) for m in ("before", "after") for s in ("hard", "smoothed")]
    w = np.ones(80) if weights is None else weights
    hard = frame({"selection_rate": metrics.selection_rate}, LABELS, (X @ W > 0).astype(int), GROUP, w)
    for where, values in hard.items():
        np.testing.assert_allclose(table.loc[("selection_rate", where), ("before", "hard")], values["selection_rate"])
    np.testing.assert_allclose(table["before", "hard"], table["after", "hard"])
    np.testing.assert_allclose(
        table["before", "smoothed"], list(smooth(metrics.selection_rate, sample_weight=weights).values())
    )
    gap = (table["after", "smoothed"] - table["after", "hard"]).abs()
    assert (gap < (table["before", "smoothed"] - table["before", "hard"]).abs()).mean() > 0.5  # steeper is nearer


def test_wrong_inputs_are_refused():
    known = metrics.selection_rate

    def compare(values):
        return dif.fairness.compare_metrics(known, {"mine": values}, labels=LABELS, sensitive_features=GROUP)

    for action, measured in (
        (lambda: smooth(metrics.count), "`metrics` is the function count; it must be one of"),
        (lambda: smooth("selection_rate"), "`metrics` is of type str;"),
        (lambda: smooth({"auc": scores.roc_auc_score}), "`metrics['auc']` is the function roc_auc_score;"),
        (lambda: smooth({"mine": lambda y_true, y_pred: 0.0}), "`metrics['mine']` is your own function <lambda>;"),
        (lambda: smooth(scores.mean_squared_error), "`metrics` is the function mean_squared_error;"),
        (lambda: smooth(known, labels=2 * LABELS), "`labels` must contain only 0 and 1, or −1 and 1, not 2;"),
        (lambda: smooth(known, sensitive_features=np.where(LABELS, "ratio", "a")), "must not be called 'ratio'"),
        (lambda: compare(np.ones(3)), "one value per sample, not an array of shape (3,)"),
        (lambda: smooth(known, data=dif.Samples(score, X)), "`data` must be a tensor, an array or a data frame, or"),
        (lambda: smooth(known, data=(torch.tensor(X), None)), "as `score` takes it, not None."),
    ):
        invalid(action, measured)
    known = "it must be one of the functions selection_rate, mean_prediction, true_positive_rate, "
    invalid(lambda: smooth(metrics.count), known, " of fairlearn.metrics or sklearn.metrics")


def test_without_fairlearn_the_constraints_work_and_the_table_says_what_to_install():
    code = (
        "import sys; sys.modules['fairlearn'] = None\n"
        "import dif, dif.fairness\n"
        "try:\n    dif.fairness.compare_metrics(None, {}, labels=[0, 1], sensitive_features=[0, 1])\n"
        "except ImportError as error:\n    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "directional-influence[fairlearn]"' in result.stdout
