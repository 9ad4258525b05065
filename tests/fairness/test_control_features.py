"""Control features: groups are compared within each of their values, as fairlearn does."""

import warnings

import numpy as np
import pytest
import torch
from refusals import invalid
from scipy.special import expit
from sklearn.base import clone

import dif
import dif.fairness

reductions, metrics = pytest.importorskip("fairlearn.reductions"), pytest.importorskip("fairlearn.metrics")
from dif.adapters.fairlearn import FairClassifier, FairRegressor  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 3))
LABELS = (X[:, 0] + RNG.normal(size=300) > 0).astype(int)
GROUP = RNG.choice(["a", "b"], size=300, p=[0.4, 0.6])
X[:, 0] += 0.8 * (GROUP == "a")
REGION = RNG.choice(["north", "south"], size=300)
W = torch.tensor([1.0, -0.5, 0.3]).double()
WEIGHTS = RNG.uniform(0.5, 2.0, size=300)
KINDS = ["DemographicParity", "TruePositiveRateParity", "FalsePositiveRateParity", "EqualizedOdds", "ErrorRateParity"]


def score(params, batch):
    return batch[0] @ params["w"]


def wrong(params, batch):
    return torch.sigmoid((1 - 2 * batch[1]) * score(params, batch))


TRAIN = dif.Samples(wrong, (X, LABELS), name="train")


def load(moment):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas about fairlearn
        moment.load_data(X, LABELS, sensitive_features=GROUP, control_features=REGION)
    return moment


@pytest.mark.parametrize("kind", KINDS)
def test_violations_are_those_that_fairlearn_computes_from_probabilities(kind):
    three = np.where(X[:, 2] > 0.5, "c", GROUP)
    moment = getattr(reductions, kind)(difference_bound=0.03)
    rows = dif.fairness.read_moment(
        moment,
        TRAIN,
        sensitive_features=three,
        control_features=REGION,
        score=score,
        labels=LABELS,
        loss=wrong,
    )
    found = dif.Solution(dif.Problem(TRAIN.mean() + dif.ridge(1.0), rows), {"w": W}).c.numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moment.load_data(X, LABELS, sensitive_features=three, control_features=REGION)
    theirs = moment.gamma(lambda data: expit(np.asarray(data) @ W.numpy())) - moment.bound()
    # fairlearn 0.15 has the events "control=north,nan" for the other label, which the name of the rate excludes
    theirs = theirs[["nan" not in event for _, event, _ in theirs.index]]
    np.testing.assert_allclose(np.sort(found), np.sort(theirs), atol=1e-12)


def test_the_names_say_within_which_value():
    rows = dif.fairness.equalised_odds(
        TRAIN, score, labels=LABELS, sensitive_features=GROUP, control_features=REGION, bound=0.0
    )
    assert [row.name for row in rows] == [
        f"equalised odds, {region}, label {label}, {row.name.split(', ')[-1]}"
        for row, (region, label) in zip(
            rows, [(region, label) for region in ("north", "south") for label in (0, 1)], strict=True
        )
    ]


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
def test_metrics_are_those_of_metric_frame(weights):
    functions = {"selected": metrics.selection_rate, "found": metrics.true_positive_rate}
    values = X @ W.numpy()
    options = {"sensitive_features": GROUP, "control_features": REGION}
    parameters = None if weights is None else {name: {"sample_weight": weights} for name in functions}
    frame = metrics.MetricFrame(
        metrics=functions, y_true=LABELS, y_pred=(values > 0).astype(int), sample_params=parameters, **options
    )
    table = dif.fairness.compare_metrics(functions, {"mine": values}, labels=LABELS, sample_weight=weights, **options)
    assert table.index.names == ["metric", "control", "group"]
    hard = table["mine", "hard"]
    for name in functions:
        for region in ("north", "south"):
            assert hard[name, region, "overall"] == pytest.approx(frame.overall.loc[region, name])
            assert hard[name, region, "difference"] == pytest.approx(frame.difference().loc[region, name])
            assert hard[name, region, "ratio"] == pytest.approx(frame.ratio().loc[region, name])
            for group in ("a", "b"):
                assert hard[name, region, group] == pytest.approx(frame.by_group.loc[(region, group), name])
    targets = dif.fairness.smooth_metrics(
        functions, lambda params, x: x @ params["w"], X, labels=LABELS, sample_weight=weights, **options
    )
    found = {target.name: float(target.fn({"w": W})) for target in targets}
    wanted = {", ".join(row): value for row, value in table["mine", "smoothed"].items()}
    assert found == pytest.approx(wanted, rel=1e-12)
    inside = REGION == "north"
    alone = dif.fairness.compare_metrics(
        functions,
        {"mine": values[inside]},
        labels=LABELS[inside],
        sensitive_features=GROUP[inside],
        sample_weight=None if weights is None else weights[inside],
    )
    np.testing.assert_allclose(table.xs("north", level="control")["mine", "smoothed"], alone["mine", "smoothed"])


def test_a_group_that_lives_in_one_place_only_is_left_out_elsewhere():
    southern = np.where((REGION == "south") & (X[:, 2] > 0), "c", GROUP)
    options = {"labels": LABELS, "sensitive_features": southern, "control_features": REGION}
    table = dif.fairness.compare_metrics(metrics.selection_rate, {"mine": X[:, 0]}, **options)
    assert ("selection_rate", "south", "c") in table.index
    assert ("selection_rate", "north", "c") not in table.index
    assert np.isfinite(table.to_numpy()).all()
    action = lambda: dif.fairness.demographic_parity(  # noqa: E731
        TRAIN, score, sensitive_features=southern, control_features=REGION
    )
    assert "north" in invalid(action, "Group 'c'").found


def test_influence_is_that_of_refits():
    fit = {"sensitive_features": GROUP, "control_features": REGION}
    model = FairClassifier(reductions.DemographicParity(difference_bound=0.05), C=0.5).fit(X, LABELS, **fit)
    assert model.certificate_.holds
    assert model.multipliers_.max() > 1e-3
    moment = load(reductions.DemographicParity(difference_bound=0.05))
    violations = moment.gamma(lambda data: expit(np.asarray(data) @ model.coef_ + model.intercept_)) - moment.bound()
    assert violations.max() == pytest.approx(0.0, abs=1e-8)
    gone = np.arange(0, 300, 12)
    found = model.influence(indices=gone).values.numpy()
    actual = []
    for i in gone:
        here = np.arange(300) != i
        again = clone(model).fit(X[here], LABELS[here], **{name: column[here] for name, column in fit.items()})
        actual.append(np.append(again.coef_ - model.coef_, again.intercept_ - model.intercept_))
    assert dif.Agreement.of(torch.as_tensor(found), torch.as_tensor(np.array(actual))).pearson > 0.99
    moved = model.influence_on_metrics(metrics.selection_rate, X, LABELS, **fit, indices=[1])
    assert moved.targets[:2] == ("selection_rate, north, overall", "selection_rate, north, a")


def test_a_bounded_group_loss_takes_none():
    bounded = reductions.BoundedGroupLoss(reductions.SquareLoss(0, 1), upper_bound=0.9)
    fit = {"sensitive_features": GROUP, "control_features": REGION}
    words = "`control_features` must be None with a BoundedGroupLoss, which compares no groups"
    invalid(lambda: FairRegressor(bounded).fit(X, X[:, 0], **fit), words)
    model = FairRegressor(bounded).fit(X, X[:, 0], sensitive_features=np.column_stack([GROUP, REGION]))
    assert model.constraint_names_[0] == "bounded group loss, a, north"
