"""Estimators on data frames: labels of people, orders, one solution per fit, and the way from a fit to a report."""

import pickle
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
from refusals import invalid

import dif

pytest.importorskip("fairlearn")
import pandas
from fairlearn.metrics import selection_rate
from fairlearn.reductions import BoundedGroupLoss, DemographicParity, GridSearch, SquareLoss
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge

from dif.adapters.fairlearn import FairClassifier, FairRegressor, solution_of
from dif.adapters.sklearn import ConstrainedLinearRegression, FairLogisticRegression
from dif.adapters.sklearn import solution_of as read_estimator

RNG = np.random.default_rng(0)
NAMES = [f"loan {i}" for i in range(60)]
X = pandas.DataFrame(RNG.normal(size=(60, 3)), columns=["a", "b", "c"], index=NAMES)
Z = X["a"] + 0.5 * X["b"] + RNG.normal(size=60)
Y = (Z > 0).astype(int)
GROUP = pandas.Series(np.where(X["b"] > 0, "u", "v"), index=NAMES)
PARITY = DemographicParity(difference_bound=0.02)


def fit_models():
    """Every estimator with its target."""
    return [
        (FairClassifier(PARITY).fit(X, Y, sensitive_features=GROUP), Y),
        (FairRegressor(PARITY).fit(X, Z, sensitive_features=GROUP), Z),
        (FairLogisticRegression(group="site").fit(X.assign(site=GROUP), Y), Y),
        (ConstrainedLinearRegression(A_ub=[[1.0, 0.0, 0.0]], b_ub=0.5).fit(X, Z), Z),
    ]


def features_of(model):
    return X.assign(site=GROUP) if isinstance(model, FairLogisticRegression) else X


def test_the_index_of_the_frame_labels_the_people():
    for model, target in fit_models():
        found = model.influence(features_of(model)[:2], target[:2], indices=[4, 2])
        assert list(found.to_frame().index) == ["loan 4", "loan 2"]
        assert found.top(1)[0].name in ("loan 4", "loan 2")
        assert list(model.samples_.remove_each([7]).index) == ["loan 7"]
    moved = fit_models()[0][0].influence_on_metrics(selection_rate, X, Y, sensitive_features=GROUP, indices=[5])
    assert list(moved.to_frame().index) == ["loan 5"]
    weighted = FairClassifier(PARITY).fit(X, Y, sensitive_features=GROUP, sample_weight=pandas.Series(2.0, index=NAMES))
    assert list(weighted.samples_.remove_each([7]).index) == ["loan 7"]
    plain = FairClassifier(PARITY).fit(X.to_numpy(), Y, sensitive_features=GROUP)
    assert plain.samples_.remove_each([7]).index is None
    search = GridSearch(LogisticRegression(tol=1e-10), DemographicParity(), grid_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas about fairlearn
        search.fit(X, Y, sensitive_features=GROUP)
    assert list(solution_of(search).problem.people[0].remove_each([7]).index) == ["loan 7"]


def test_the_same_labels_in_another_order_are_refused():
    turned, weights = X[::-1].index, pandas.Series(1.0, index=NAMES)
    groups = {"sensitive_features": GROUP}
    model = FairClassifier(PARITY).fit(X, Y, **groups)
    for action, names in (
        (lambda: FairClassifier(PARITY).fit(X, Y, sensitive_features=GROUP[turned]), "`X` and `sensitive_features`"),
        (lambda: FairClassifier(PARITY).fit(X, Y, sensitive_features=GROUP[turned].to_frame()), "`X` and `sens"),
        (lambda: FairClassifier(PARITY).fit(X, Y[turned], **groups), "`X` and `y`"),
        (lambda: FairRegressor().fit(X, Z, sample_weight=weights[turned]), "`X` and `sample_weight`"),
        (
            lambda: FairRegressor(PARITY).fit(X, Z, **groups, control_features=GROUP[turned]),
            "`X` and `control_features`",
        ),
        (
            lambda: FairClassifier(PARITY).fit(X.to_numpy(), Y, sensitive_features=GROUP[turned]),
            "`y` and `sensitive_features`",
        ),
        (lambda: FairLogisticRegression().fit(X, Y[turned]), "`X` and `y`"),
        (lambda: ConstrainedLinearRegression().fit(X, Z[turned]), "`X` and `y`"),
        (lambda: model.influence(X, Y[turned]), "`X` and `y`"),
        (lambda: model.test_samples(X, Y[turned]), "`X` and `y`"),
        (
            lambda: model.influence_on_metrics(selection_rate, X, Y, sensitive_features=GROUP[turned]),
            "`X` and `sensitive_features`",
        ),
        (lambda: read_estimator(Ridge().fit(X, Z), X, Z[turned]), "`X` and `y`"),
    ):
        first, second = names.split(" and ")
        invalid(action, second, f"has the labels of {first} in another order", "samples would be combined.")
    by_position = FairClassifier(PARITY).fit(X, Y.to_numpy(), sensitive_features=GROUP.reset_index(drop=True))
    np.testing.assert_array_equal(by_position.coef_, model.coef_)


def test_a_fit_has_one_solution():
    for model, target in fit_models():
        first = model.solution_
        assert model.solution_ is first
        assert model.samples_ is first.problem.people[0]
        removals = model.samples_.remove_each([3])
        scores = dif.DirectionalInfluence(model.solution_).scores(
            model.test_samples(features_of(model), target).mean(), removals, show_progress=False
        )
        for other in (pickle.loads(pickle.dumps(model)), deepcopy(model)):
            assert other.solution_ is not first
            assert other.solution_ is other.solution_
            same = dif.DirectionalInfluence(other.solution_).scores(
                other.test_samples(features_of(model), target).mean(),
                other.samples_.remove_each([3]),
                show_progress=False,
            )
            np.testing.assert_allclose(same.values, scores.values, rtol=1e-9)
        with pytest.raises(NotFittedError):
            clone(model).solution_  # noqa: B018
        options = {"sensitive_features": GROUP} if isinstance(model, FairClassifier | FairRegressor) else {}
        assert model.fit(features_of(model), target, **options).solution_ is not first


def test_the_mean_test_loss_is_a_target_of_every_estimator(tmp_path):
    train, test = X[:45], X[45:]
    model = FairClassifier(PARITY, C=0.5).fit(train, Y[:45], sensitive_features=GROUP[:45])
    tested = model.test_samples(test, Y[45:])
    p = model.predict_proba(test)[np.arange(15), Y[45:]]
    assert model.solution_.value(tested.mean()) == pytest.approx(-np.log(p).mean(), rel=1e-12)
    target, removals = {"mean test loss": tested.mean()}, model.samples_.remove_each([3, 8, 20, 31])
    scores = dif.DirectionalInfluence(model.solution_).scores(target, removals, show_progress=False)
    each = model.influence(test, Y[45:], indices=[3, 8, 20, 31])
    np.testing.assert_allclose(scores.values[:, 0], each.values.mean(1), rtol=1e-9)
    actual = dif.Retraining(model.solution_).scores(target, removals, show_progress=False)
    for row, i in zip(actual.values[:, 0], (3, 8, 20, 31), strict=True):
        here = np.arange(45) != i
        refit = clone(model).fit(train[here], Y[:45][here], sensitive_features=GROUP[:45][here])
        after = -np.log(refit.predict_proba(test)[np.arange(15), Y[45:]]).mean()
        assert float(row) == pytest.approx(after + np.log(p).mean(), abs=1e-9)
    scores.report(tmp_path / "report.html", features=train, retrained=actual)
    assert "mean test loss" in (tmp_path / "report.html").read_text()
    for regression in (FairRegressor(), ConstrainedLinearRegression()):
        regression.fit(train, Z[:45])
        squares = (regression.predict(test) - Z[45:]) ** 2
        found = regression.solution_.value(regression.test_samples(test, Z[45:]).mean())
        assert found == pytest.approx(squares.mean(), rel=1e-12)


def test_wrong_inputs_are_refused():
    text, dates = X.assign(job="clerk"), X.assign(since=pandas.Timestamp("2020-01-01"))
    model, regression = FairClassifier().fit(X, Y), FairRegressor().fit(X, Z)
    with_site = FairLogisticRegression(group="site", tau=0.1)
    many = ["x"] * 60
    bounded = BoundedGroupLoss(SquareLoss(0, 1), upper_bound=1.0)
    for action, measured in (
        (lambda: model.influence(X), "`y` is None"),
        (lambda: model.influence(y=Y), "`X` is None"),
        (lambda: model.test_samples(None, None), "`X` is None"),
        (lambda: model.influence_on_metrics(selection_rate, X, None, sensitive_features=GROUP), "`y` is None"),
        (lambda: FairClassifier().fit(text, Y), "text or dates: job"),
        (lambda: FairClassifier().fit(dates, Y), "text or dates: since"),
        (lambda: FairRegressor().fit(text.to_numpy(), Z), "text or dates: 3"),
        (lambda: FairRegressor().fit(X.assign(**dict.fromkeys("defghij", "t")), Z), "d, e, f, g, h, i, … 7 in all"),
        (lambda: model.influence(X.assign(c="red"), Y), "text or dates: c"),
        (lambda: with_site.fit(text.assign(site=GROUP), Y), "text or dates: job"),
        (lambda: read_estimator(Ridge().fit(X, Z), X.assign(c="red"), Z), "text or dates: c"),
        (lambda: FairRegressor().fit(X, many), "`y` must contain numbers only, not 'x'"),
        (lambda: regression.influence(X, many), "`y` must contain numbers only, not 'x'"),
        (lambda: ConstrainedLinearRegression().fit(X, many), "`y` must contain numbers only, not 'x'"),
        (lambda: read_estimator(LinearRegression().fit(X, Z), X, many), "`y` must contain numbers only, not 'x'"),
        (lambda: FairClassifier().fit(X, Y, sample_weight=many), "`sample_weight` must contain numbers only, not 'x'"),
        (
            lambda: read_estimator(LogisticRegression().fit(X, Y), X, Y, sample_weight=many),
            "`sample_weight` must contain finite numbers, not 'x'",
        ),
        (lambda: model.influence(X, Y.to_frame()), "must have one label, 0 or 1, not labels of shape (60, 1)"),
        (lambda: model.influence(X, {0: 1}), "must have one label, 0 or 1, not labels of shape ()"),
        (lambda: model.influence(X, Y[:5]), "Each of the 60 test samples must have one label, 0 or 1, not 5 labels"),
        (
            lambda: ConstrainedLinearRegression(A_ub=[["one"]]).fit(X, Z),
            "given as `A_ub` cannot be read as numbers",
        ),
        (
            lambda: ConstrainedLinearRegression(A_eq=[[1.0], [1.0, 2.0]]).fit(X, Z),
            "given as `A_eq` cannot be read as numbers",
        ),
        (
            lambda: ConstrainedLinearRegression(A_eq=[[1.0, 0.0, 0.0]], b_eq="one").fit(X, Z),
            "given as `b_eq` cannot be read as numbers",
        ),
        (lambda: FairClassifier(C=[[1], [1, 2]]).fit(X, Y), "`C` must be a positive number, not"),
        (
            lambda: FairLogisticRegression(group=True).fit(X, Y),
            "`group` must be one of the columns a, b, c, or a column number from 0 to 2, not True",
        ),
        (
            lambda: FairClassifier(DemographicParity).fit(X, Y, sensitive_features=GROUP),
            "not the class DemographicParity",
        ),
        (
            lambda: FairRegressor(bounded).fit(X, Z, sensitive_features=GROUP, control_features=GROUP),
            "`control_features` must be None with a BoundedGroupLoss",
        ),
        (lambda: read_estimator(Ridge().fit(X, Z), X[["a", "b"]], Z), "`X` must have 3 columns, as in fit, not 2."),
    ):
        invalid(action, measured)
    invalid(lambda: model.influence(X[:1], [7]), "must have one label, 0 or 1, not", "the first '7'.")
    assert torch.isfinite(model.influence(X, Y).values).all()
    with pytest.raises(ValueError, match="contains NaN"):  # scikit-learn's own words
        with_site.fit(X.assign(site=["u", None] * 30), Y)
    for action in ("influence", "test_samples"):
        with pytest.raises(NotFittedError):
            getattr(FairClassifier(), action)(X, Y)
