"""Corrected labels: in the user's own words they are what a second fit takes, in another coding they are refused."""

import numpy as np
import pytest
import torch
from refusals import invalid

import dif

pytest.importorskip("fairlearn")
import pandas
from fairlearn import reductions
from sklearn.linear_model import LogisticRegression

from dif.adapters.fairlearn import FairClassifier, FairRegressor, solution_of
from dif.adapters.sklearn import ConstrainedLinearRegression, FairLogisticRegression
from dif.adapters.sklearn import solution_of as read_estimator

RNG, N, ROWS = np.random.default_rng(0), 120, [3, 8, 20, 31, 50]
X = pandas.DataFrame(RNG.normal(size=(N, 3)), columns=["a", "b", "c"], index=[f"loan {i}" for i in range(N)])
Z = X["a"].to_numpy() + 0.5 * X["b"].to_numpy() + RNG.normal(size=N)
GROUP, REGION = np.where(RNG.random(N) < 0.5, "u", "v"), np.where(RNG.random(N) < 0.5, "north", "south")
WEIGHTS = RNG.integers(1, 3, N).astype(float)
CODINGS = {"text": ("bad", "good"), "0/1": (0, 1), "-1/1": (-1, 1), "booleans": (False, True)}
PARITY = reductions.DemographicParity(difference_bound=0.03)


def label(coding="text", flipped=()):
    return np.where((Z > 0) ^ np.isin(np.arange(N), flipped), *CODINGS[coding][::-1])


def theta_of(model):
    return np.append(model.coef_, model.intercept_)


def check(model, rows, again, y):
    """Retraining on the relabelled samples is a second fit with these labels, and DIF predicts it."""
    perturbation, actual = model.relabel(rows, y), theta_of(again) - theta_of(model)
    np.testing.assert_allclose(dif.Retraining(model.solution_).change(perturbation).flat, actual, atol=1e-9)
    found = dif.DirectionalInfluence(model.solution_).change(perturbation).flat.numpy()
    assert found @ actual > 0.7 * np.linalg.norm(found) * np.linalg.norm(actual)


@pytest.mark.parametrize("coding", CODINGS)
def test_labels_are_those_of_fit(coding):
    y, new = label(coding), label(coding, ROWS)
    one, other = (FairClassifier(PARITY, C=0.5).fit(X, labels, sensitive_features=GROUP) for labels in (y, new))
    check(one, ROWS, other, new[ROWS])
    for rows in ([f"loan {i}" for i in ROWS], X.index[ROWS], np.array(ROWS)):
        assert one.relabel(rows, pandas.Series(new, X.index).iloc[ROWS]).labels == one.relabel(ROWS, new[ROWS]).labels


def test_the_group_may_be_a_column():
    y, new = label(), label(flipped=[3])
    one, other = (FairLogisticRegression("site", 0.02).fit(X.assign(site=GROUP), labels) for labels in (y, new))
    check(one, "loan 3", other, new[3])


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize("kind", ["TruePositiveRateParity", "FalsePositiveRateParity", "EqualizedOdds"])
def test_a_new_label_changes_the_means_that_a_sample_belongs_to(kind, weights):
    moment = getattr(reductions, kind)(difference_bound=0.03)
    columns = {"sensitive_features": GROUP, "control_features": REGION, "sample_weight": weights}
    fit = lambda y: FairClassifier(moment, C=0.5).fit(X, y, **columns)  # noqa: E731
    check(fit(label()), ROWS, fit(label(flipped=ROWS)), label(flipped=ROWS)[ROWS])


def test_targets_of_regressions():
    new = np.where(np.isin(np.arange(N), ROWS), 2.5, Z)
    for fit in (
        lambda y: ConstrainedLinearRegression(A_ub=[[1.0, 0.0, 0.0]], b_ub=0.5).fit(X, y),
        lambda y: FairRegressor(PARITY).fit(X, y, sensitive_features=GROUP),
    ):
        check(fit(Z), ROWS, fit(new), 2.5)


def test_targets_in_another_coding_are_refused():
    y, row = label(), torch.tensor(X.to_numpy()[:1])
    classifier = FairClassifier(PARITY).fit(X, y, sensitive_features=GROUP)
    logistic = FairLogisticRegression().fit(X, y)
    three = LogisticRegression(tol=1e-8).fit(X, np.digitize(Z, [-0.5, 0.5]))
    search = reductions.GridSearch(LogisticRegression(tol=1e-10), reductions.DemographicParity(), grid_size=3)
    search.fit(X.to_numpy(), (Z > 0).astype(int), sensitive_features=GROUP)
    for samples, wrong, words in (
        (classifier.samples_, 0.0, "must be -1 for 'bad', 1 for 'good', not 0; `relabel` of an estimator takes the"),
        (logistic.samples_.view(lambda params, batch: batch[1]), 0.5, "must be -1 for 'bad', 1 for 'good', not 0.5"),
        (
            read_estimator(three, X, np.digitize(Z, [-0.5, 0.5])).problem.samples[0],
            3,
            "0 for 0, 1 for 1, 2 for 2, not 3",
        ),
    ):
        target = torch.tensor([wrong]).to(samples.storage.data[1])
        invalid(lambda s=samples, t=target: s.replace([0], (row, t)), words)
        invalid(lambda s=samples, t=target: s.add((row, t), like=0), words)
        assert len(samples.replace([0], (row, target * 0 + 1))) == 1
    people = solution_of(search).problem.people[0]
    given = {name: tensor[:1] for name, tensor in people.storage.data.items()}
    invalid(lambda: people.add(given | {"target": torch.zeros(1).double()}, like=0), "must be -1 for 0, 1 for 1, not 0")


def test_wrong_rows_and_labels_are_refused():
    y = label()
    model = FairClassifier(PARITY).fit(X, y, sensitive_features=GROUP)
    plain = FairClassifier(PARITY).fit(X.to_numpy(), y, sensitive_features=GROUP)
    shuffled = X.set_axis(RNG.permutation(N))
    numbered = FairClassifier(PARITY).fit(shuffled, y, sensitive_features=GROUP)
    twice = FairClassifier(PARITY).fit(X.set_axis(["a"] * N), y, sensitive_features=GROUP)
    odds = FairClassifier(reductions.EqualizedOdds(difference_bound=0.1))
    odds = odds.fit(X, y, sensitive_features=GROUP, sample_weight=1 + np.arange(N) / N)
    other = label(flipped=range(N))
    for action, measured in (
        (
            lambda: model.relabel(ROWS, 1),
            "Each of the 5 relabelled samples must have one label, 'bad' or 'good', not 5",
        ),
        (lambda: model.relabel(ROWS, y[:3]), "must have one label, 'bad' or 'good', not 3 labels"),
        (lambda: model.relabel([N], "good"), "must be integers from 0 to 119, at least one, not 120"),
        (lambda: model.relabel([3, 3], "good"), "3 of 'train' were given more than once"),
        (
            lambda: model.relabel([True], "good"),
            "labels that the index of X has once, not True",
        ),
        (lambda: model.relabel("loan 999", "good"), "labels that the index of X has once, not 'loan 999'"),
        (lambda: plain.relabel("loan 3", "good"), "labels that the index of X has once, not 'loan 3'"),
        (lambda: twice.relabel("a", "good"), "labels that the index of X has once, not 'a'"),
        (
            lambda: numbered.relabel([5], "good"),
            "`rows` must not be integers such as 5, which are positions of some samples",
        ),
        (
            lambda: model.relabel(X.index[[3, 4]], pandas.Series(y, X.index)[X.index[[4, 3]]]),
            "`y` has the labels of `rows`",
        ),
        (
            lambda: odds.relabel([7], other[7]),
            "No training sample with the groups and weight of sample 7 has its new label",
        ),
    ):
        invalid(action, measured)
    by_label = numbered.relabel(shuffled.index[[5]], "good")
    assert by_label.labels == model.relabel([5], "good").labels
    assert numbered.relabel(str(shuffled.index[5]), "good").labels == by_label.labels
