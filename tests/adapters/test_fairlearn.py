"""The fairlearn adapter: checked against refits, against fairlearn itself, and by scikit-learn's own checks."""

import pickle
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
from refusals import invalid
from scipy.special import expit

import dif
import dif.fairness
from dif.data import german_credit

pytest.importorskip("fairlearn")
from fairlearn.metrics import MetricFrame, false_positive_rate, selection_rate, true_positive_rate
from fairlearn.reductions import (
    AbsoluteLoss,
    BoundedGroupLoss,
    DemographicParity,
    EqualizedOdds,
    ErrorRate,
    ErrorRateParity,
    ExponentiatedGradient,
    FalsePositiveRateParity,
    GridSearch,
    SquareLoss,
    TruePositiveRateParity,
    ZeroOneLoss,
)
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, mean_squared_error
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_array

from dif.adapters.fairlearn import FairClassifier, FairRegressor, solution_of

CREDIT = german_credit()
X, Y = CREDIT.X[:, :-1].numpy(), (CREDIT.paid.numpy() > 0).astype(int)
AGE = np.where(CREDIT.age.numpy() <= 30, "young", "old")
TRAIN, TEST = slice(0, 700), slice(700, 1000)
PARITIES = [DemographicParity, TruePositiveRateParity, FalsePositiveRateParity, EqualizedOdds, ErrorRateParity]
MOMENTS = [
    *(kind(difference_bound=0.01) for kind in PARITIES),
    DemographicParity(ratio_bound=0.95),
    DemographicParity(difference_bound=0.0),
    BoundedGroupLoss(SquareLoss(0, 1), upper_bound=0.18),
    BoundedGroupLoss(ZeroOneLoss(), upper_bound=0.36),
]


class Divided:
    """A model whose groups are a function of each row, so that scikit-learn's checks can fit it under a constraint."""

    def fit(self, X, y, sample_weight=None):
        try:
            digits = np.floor(1000 * check_array(X, dtype=float).sum(1)).astype(int)
        except (TypeError, ValueError):
            digits = np.zeros(2, dtype=int)  # fit says what is wrong with X
        groups = digits % 2 if np.bincount(digits % 2, minlength=2).min() > 1 else np.arange(len(digits)) % 2
        return super().fit(X, y, sensitive_features=groups, sample_weight=sample_weight)


class DividedClassifier(Divided, FairClassifier):
    pass


class DividedRegressor(Divided, FairRegressor):
    pass


@pytest.mark.parametrize("estimator", [FairClassifier(), FairRegressor()], ids=repr)
def test_scikit_learns_own_checks(estimator):
    check(estimator)


def check(estimator):
    results = check_estimator(estimator, on_fail=None, on_skip=None)
    failed = [(r["check_name"], r["exception"]) for r in results if r["status"] not in ("passed", "skipped")]
    assert failed == []
    names = {r["check_name"] for r in results if r["status"] == "passed"}
    assert len(names) > 40
    assert "check_sample_weight_equivalence_on_dense_data" in names


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: type(moment).__name__)
def test_every_moment_has_a_certified_solution_in_which_it_binds(moment):
    model = FairClassifier(moment, C=0.1).fit(X, Y, sensitive_features=AGE)
    assert model.certificate_.holds
    assert model.kkt_residual_ < 1e-9
    assert len(model.constraint_names_) == len(model.multipliers_)
    assert np.abs(model.multipliers_).max() > 1
    loaded = deepcopy(moment)
    loaded.load_data(X, Y, sensitive_features=AGE)
    violations = loaded.gamma(lambda data: expit(data @ model.coef_ + model.intercept_)) - loaded.bound()
    assert violations.max() == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param(DividedClassifier(DemographicParity(difference_bound=0.1)), id="parity"),
        pytest.param(
            DividedClassifier(BoundedGroupLoss(SquareLoss(0, 1), upper_bound=0.6)),
            id="bounded loss",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            DividedRegressor(DemographicParity(difference_bound=0.5), alpha=1.0),
            id="regression",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_scikit_learns_own_checks_under_a_constraint(estimator):
    check(estimator)


def test_influence_on_metrics_is_that_of_refits():
    model = FairClassifier(DemographicParity(difference_bound=0.02), C=0.1)
    model.fit(X[TRAIN], Y[TRAIN], sensitive_features=AGE[TRAIN])
    functions = {"selected": selection_rate, "accurate": accuracy_score, "found": true_positive_rate}
    gone = np.random.default_rng(0).permutation(700)[:25]
    found = model.influence_on_metrics(functions, X[TEST], Y[TEST], sensitive_features=AGE[TEST], indices=gone)
    assert found.trusted
    assert found.targets[:5] == tuple(f"selected, {w}" for w in ("overall", "old", "young", "difference", "ratio"))

    def measure(fitted):
        table = dif.fairness.compare_metrics(
            functions, {"": fitted.decision_function(X[TEST])}, labels=Y[TEST], sensitive_features=AGE[TEST]
        )
        return table["", "smoothed"].to_numpy()

    before, actual = measure(model), []
    for i in gone:
        here = np.arange(700) != i
        refit = clone(model).fit(X[TRAIN][here], Y[TRAIN][here], sensitive_features=AGE[TRAIN][here])
        actual.append(measure(refit) - before)
    for t, name in enumerate(found.targets):
        assert np.corrcoef(found.values[:, t], np.array(actual)[:, t])[0, 1] > 0.99, name
    losses = model.influence(X[TEST][:3], Y[TEST][:3], indices=gone)
    assert losses.values.shape == (25, 3)
    again = pickle.loads(pickle.dumps(model)).influence(X[TEST][:3], Y[TEST][:3], indices=gone)
    np.testing.assert_array_equal(again.values, losses.values)


def test_the_hard_metrics_before_and_after_are_those_of_metric_frame():
    plain = FairClassifier(C=0.1).fit(X[TRAIN], Y[TRAIN])
    fair = FairClassifier(EqualizedOdds(difference_bound=0.01), C=0.1)
    fair.fit(X[TRAIN], Y[TRAIN], sensitive_features=AGE[TRAIN])
    functions = {"tpr": true_positive_rate, "fpr": false_positive_rate}
    scores = {"plain": plain.decision_function(X[TRAIN]), "fair": fair.decision_function(X[TRAIN])}
    table = dif.fairness.compare_metrics(functions, scores, labels=Y[TRAIN], sensitive_features=AGE[TRAIN])
    for name, model in (("plain", plain), ("fair", fair)):
        frame = MetricFrame(
            metrics=functions, y_true=Y[TRAIN], y_pred=model.predict(X[TRAIN]), sensitive_features=AGE[TRAIN]
        )
        for metric in functions:
            assert table.loc[(metric, "difference"), (name, "hard")] == frame.difference()[metric]
            assert table.loc[(metric, "young"), (name, "hard")] == frame.by_group.loc["young", metric]
    smooth = table.xs("difference", level="group").xs("smoothed", axis=1, level=1)
    assert (smooth["fair"] < smooth["plain"]).all()


def test_weights_are_repetitions_and_a_weight_of_zero_is_an_absence():
    weights = np.arange(700) % 3
    model = FairClassifier(EqualizedOdds(difference_bound=0.02), C=0.1)
    weighted = clone(model).fit(X[TRAIN], Y[TRAIN], sensitive_features=AGE[TRAIN], sample_weight=weights)
    rows = np.repeat(np.arange(700), weights)
    repeated = clone(model).fit(X[rows], Y[rows], sensitive_features=AGE[rows])
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-9)
    np.testing.assert_allclose(weighted.multipliers_, repeated.multipliers_, atol=1e-6)


def test_data_frames_and_cross_validation_with_routed_features():
    sklearn, pandas = pytest.importorskip("sklearn"), pytest.importorskip("pandas")
    frame = pandas.DataFrame(X[:300], columns=list(CREDIT.columns[:-1]))
    age = pandas.Series(AGE[:300])
    words = pandas.Series(np.where(Y[:300] > 0, "paid", "lost"))
    model = FairClassifier(DemographicParity(difference_bound=0.02), C=0.1).fit(frame, words, sensitive_features=age)
    assert list(model.classes_) == ["lost", "paid"]
    assert model.influence(indices=[0]).targets[0] == "coef[months]"
    moved = model.influence_on_metrics(selection_rate, frame[:50], words[:50], sensitive_features=age[:50], indices=[1])
    assert moved.targets[0] == "selection_rate, overall"
    with sklearn.config_context(enable_metadata_routing=True):
        routed = model.set_fit_request(sensitive_features=True)
        assert cross_val_score(routed, frame, words, cv=3, params={"sensitive_features": age}).min() > 0.6


def test_regressions_agree_with_cvxpy():
    cp = pytest.importorskip("cvxpy")
    A, b = load_diabetes(return_X_y=True)
    A, b = A / A.std(0), (b - b.mean()) / b.std()
    sex = A[:, 1] > 0
    coef, intercept = cp.Variable(10), cp.Variable()
    fitted = A @ coef + intercept
    tight = {"solver": cp.CLARABEL, "tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}
    gap = cp.sum(fitted[sex]) / sex.sum() - cp.sum(fitted) / len(b)
    for moment, rows in (
        (
            BoundedGroupLoss(SquareLoss(-5, 5), upper_bound=0.51),
            [cp.sum_squares((fitted - b)[~sex]) / (~sex).sum() <= 0.51],
        ),
        (DemographicParity(difference_bound=0.01), [cp.abs(gap) <= 0.01]),
    ):
        model = FairRegressor(moment, alpha=0.5).fit(A, b, sensitive_features=sex)
        assert model.certificate_.holds
        cp.Problem(cp.Minimize(cp.sum_squares(fitted - b) + 0.5 * cp.sum_squares(coef)), rows).solve(**tight)
        np.testing.assert_allclose(model.coef_, coef.value, atol=1e-5)
        np.testing.assert_allclose(model.multipliers_.max(), rows[0].dual_value, rtol=1e-3)
        found = model.influence_on_metrics(mean_squared_error, A[:50], b[:50], sensitive_features=sex[:50], indices=[7])
        assert found.values.shape == (1, 5)
    moved = model.influence(indices=range(0, 440, 20)).values.numpy()
    refits = []
    for i in range(0, 440, 20):
        here = np.arange(442) != i
        refit = clone(model).fit(A[here], b[here], sensitive_features=sex[here])
        refits.append(np.append(refit.coef_ - model.coef_, refit.intercept_ - model.intercept_))
    assert dif.Agreement.of(torch.as_tensor(moved), torch.as_tensor(np.array(refits))).pearson > 0.99


def search(estimator, moment, data, labels, groups, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas about fairlearn
        return GridSearch(estimator, moment, **options).fit(data, labels, sensitive_features=groups)


@pytest.mark.parametrize(
    ("estimator", "moment"),
    [
        (LogisticRegression(C=0.05, tol=1e-12, solver="newton-cholesky"), DemographicParity()),
        (LogisticRegression(C=0.05, tol=1e-12, solver="newton-cholesky"), EqualizedOdds(ratio_bound=0.9)),
        (LogisticRegression(C=0.05, tol=1e-12, solver="newton-cholesky"), ErrorRateParity()),
        (LogisticRegression(C=0.05, tol=1e-12, solver="newton-cholesky"), BoundedGroupLoss(ZeroOneLoss())),
        (Ridge(alpha=100.0), BoundedGroupLoss(SquareLoss(0, 1))),
        (LinearRegression(), BoundedGroupLoss(SquareLoss(0, 1))),
    ],
    ids=["parity", "odds", "errors", "bounded", "ridge", "squares"],
)
def test_the_predictor_that_grid_search_picks(estimator, moment):
    """Against searching again without each person, at the multipliers of the picked predictor."""
    data = (X, Y, AGE) if isinstance(estimator, LogisticRegression) else (X[:, :5], Y.astype(float), AGE)
    picked = search(estimator, moment, *data, grid_size=9)
    picked.best_idx_ = int(np.argmax(np.abs(picked.lambda_vecs_.to_numpy()).max(0) > 0))  # one with multipliers
    solution = solution_of(picked)
    predictor = picked.predictors_[picked.best_idx_]
    np.testing.assert_allclose(solution.params["coef"], np.ravel(predictor.coef_), atol=1e-7)
    assert float(np.abs(picked.lambda_vecs_.iloc[:, picked.best_idx_]).max()) > 0
    gone = np.random.default_rng(0).permutation(1000)[:20]
    (people,) = solution.problem.people
    targets = [dif.linear(row).as_term() for row in np.eye(len(solution.theta))]
    found = dif.DirectionalInfluence(solution).scores(targets, people.remove_each(gone), show_progress=False).values
    grid, actual = picked.lambda_vecs_.iloc[:, [picked.best_idx_]], []
    for i in gone:
        again = search(estimator, moment, *(np.delete(column, i, axis=0) for column in data), grid=grid).predictors_[0]
        moved = np.append(again.coef_, again.intercept_) - solution.theta.numpy()
        actual.append(moved)
    agreement = dif.Agreement.of(found, torch.as_tensor(np.array(actual)))
    assert agreement.pearson > 0.995
    assert 0.9 < agreement.slope < 1.02


def test_wrong_inputs_are_refused():
    few = X[:100], Y[:100]
    mixture = ExponentiatedGradient(LogisticRegression(), DemographicParity(), max_iter=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixture.fit(X, Y, sensitive_features=AGE)
    unfitted = GridSearch(LogisticRegression(), DemographicParity())
    forest = search(FairClassifier(), DemographicParity(), X, Y, AGE, grid_size=2)
    odd = search(LogisticRegression(), DemographicParity(), X, Y, AGE, grid_size=2)
    odd.constraints_ = ErrorRate()
    for action, measured in (
        (
            lambda: FairClassifier(DemographicParity()).fit(*few),
            "`sensitive_features` must be passed to fit for DemographicParity, not None.",
        ),
        (lambda: FairClassifier(ErrorRate()).fit(*few, sensitive_features=AGE[:100]), "not of type ErrorRate;"),
        (lambda: FairClassifier(C=0.0).fit(*few), "`C` must be a positive number, not"),
        (
            lambda: FairClassifier().fit(*few).influence(X[:2], [0, 7]),
            "must have one label, 0 or 1, not 2 labels, with 1 unknown ones, the first '7'.",
        ),
        (
            lambda: FairRegressor(EqualizedOdds()).fit(*few, sensitive_features=AGE[:100]),
            "or BoundedGroupLoss with SquareLoss, not EqualizedOdds.",
        ),
        (
            lambda: FairRegressor(BoundedGroupLoss(AbsoluteLoss(0, 1), upper_bound=1)).fit(
                *few, sensitive_features=AGE[:100]
            ),
            "or BoundedGroupLoss with SquareLoss, not BoundedGroupLoss with AbsoluteLoss.",
        ),
        (lambda: solution_of(mixture), "must be a fitted GridSearch, not an ExponentiatedGradient, a mixture of"),
        (lambda: solution_of(unfitted), "must be a fitted GridSearch, not one that is not fitted."),
        (lambda: solution_of(LogisticRegression()), "must be a fitted GridSearch, not of type LogisticRegression."),
        (lambda: solution_of(forest), "Ridge or LogisticRegression, not a FairClassifier;"),
        (lambda: solution_of(odd), "or a BoundedGroupLoss, not of type ErrorRate."),
    ):
        invalid(action, measured)
    with pytest.raises(ValueError, match="binary"):
        FairClassifier().fit(X, np.arange(1000) % 3)
