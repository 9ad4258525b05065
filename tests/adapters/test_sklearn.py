"""The scikit-learn adapter, checked against refits; the constrained estimators pass scikit-learn's own checks."""

import pickle

import numpy as np
import pytest
import torch

import dif

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import Lasso, LinearRegression, LogisticRegression, LogisticRegressionCV, Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from dif.adapters.sklearn import ConstrainedLinearRegression, FairLogisticRegression, solution_of

X, Y = load_diabetes(return_X_y=True)
X, Y = StandardScaler().fit_transform(X)[:150], (Y[:150] - Y.mean()) / Y.std()
EPS = 1e-4


def refit_with_less(estimator, i, labels=Y):
    """Return the change of the coefficients per unit of weight taken from sample i, by a refit with slightly less."""
    weights = np.ones(len(labels))
    before = np.ravel(clone(estimator).fit(X, labels, sample_weight=weights).coef_)
    weights[i] = 1 - EPS
    return (np.ravel(clone(estimator).fit(X, labels, sample_weight=weights).coef_) - before) / EPS


@pytest.mark.parametrize(
    "estimator",
    [
        ConstrainedLinearRegression(),
        ConstrainedLinearRegression(alpha=1.0, fit_intercept=False),
        FairLogisticRegression(),
        FairLogisticRegression(group=0, tau=0.5),
    ],
    ids=str,
)
def test_scikit_learns_own_checks(estimator):
    results = check_estimator(estimator, on_fail=None, on_skip=None)
    assert [(r["check_name"], r["exception"]) for r in results if r["status"] not in ("passed", "skipped")] == []
    assert sum(r["status"] == "passed" for r in results) > 40


@pytest.mark.parametrize(
    "estimator",
    [
        LinearRegression(),
        LinearRegression(positive=True),
        LinearRegression(positive=True, fit_intercept=False),
        Ridge(alpha=3.0, tol=1e-12),
        Ridge(alpha=3.0, positive=True, tol=1e-14),
    ],
    ids=str,
)
def test_regressions_to_first_order(estimator):
    estimator = clone(estimator).fit(X, Y)
    solution = solution_of(estimator, X, Y)
    assert solution.kkt.residual < 1e-9
    np.testing.assert_allclose(solution.params["coef"], estimator.coef_, atol=1e-5)
    (train,) = solution.problem.samples
    influence = dif.DirectionalInfluence(solution, switching=False)
    for i in (0, 17, 60):
        found = influence.change(train.remove([i])).theta["coef"].numpy()
        np.testing.assert_allclose(found, refit_with_less(estimator, i), atol=2e-5)
    if estimator.positive:
        zero = np.flatnonzero(estimator.coef_ == 0)
        assert len(zero) > 0
        assert set(zero) == set(solution.active.binding)
        assert not found[zero].any() or np.abs(found[zero]).max() < 1e-14


def test_leave_one_out_refits_with_a_bound():
    estimator = LinearRegression(positive=True).fit(X, Y)
    solution = solution_of(estimator, X, Y)
    (train,) = solution.problem.samples
    removals, coefficients = train.remove_each(range(40)), [dif.linear(np.eye(10)[j], of="coef") for j in range(10)]
    predicted = dif.DirectionalInfluence(solution).scores([c.as_term() for c in coefficients], removals).values
    refits = []
    for i in range(40):
        others = np.arange(len(Y)) != i
        refits.append(LinearRegression(positive=True).fit(X[others], Y[others]).coef_ - estimator.coef_)
    assert dif.Agreement.of(predicted, torch.as_tensor(np.array(refits))).pearson > 0.99


def test_a_weakly_active_bound_has_different_derivatives_on_both_sides():
    """The residual is orthogonal to the last column; the weight of a sample is decreased and increased."""
    rng = np.random.default_rng(0)
    A = rng.normal(size=(40, 3))
    y = A[:, 0] + 0.5 * A[:, 1] + 0.3 * rng.normal(size=40)
    design = A[:, :2]
    rest = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    last = A[:, 2] - rest * (rest @ A[:, 2]) / (rest @ rest)  # no correlation with the residual
    A[:, 2] = last
    estimator = LinearRegression(positive=True, fit_intercept=False).fit(A, y)
    solution = solution_of(estimator, A, y)
    assert solution.active.weak == (2,)
    (train,) = solution.problem.samples
    influence = dif.DirectionalInfluence(solution)
    last_changes = []
    for i in range(6):
        for side in (1.0, -1.0):
            weights = np.ones(40)
            weights[i] -= side * EPS
            refit = LinearRegression(positive=True, fit_intercept=False).fit(A, y, sample_weight=weights)
            found = influence.change(side * train.remove([i])).flat.numpy()
            np.testing.assert_allclose(found, (refit.coef_ - solution.theta.numpy()) / EPS, atol=1e-4)
            last_changes.append(float(found[2]))
    assert min(map(abs, last_changes)) < 1e-15  # on one side it stays at the bound
    assert max(last_changes) > 1e-4  # on the other it leaves the bound


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("weight", [None, "balanced"])
def test_logistic_regression_to_first_order(classes, weight):
    labels = np.digitize(Y, [0.0] if classes == 2 else [-0.5, 0.5])
    fixed = None  # class weights that a refit does not recompute
    if weight == "balanced":
        fixed = {int(k): len(labels) / (classes * np.sum(labels == k)) for k in np.unique(labels)}
    estimator = LogisticRegression(C=0.5, tol=1e-13, solver="newton-cholesky", class_weight=fixed).fit(X, labels)
    same = LogisticRegression(C=0.5, tol=1e-12, max_iter=10_000, class_weight=weight).fit(X, labels)
    solution = solution_of(same, X, labels)
    assert solution.kkt.residual < 1e-9
    np.testing.assert_allclose(np.ravel(solution.params["coef"]), np.ravel(estimator.coef_), atol=1e-6)
    (train,) = solution.problem.samples
    influence = dif.DirectionalInfluence(solution)
    for i in (3, 50):
        found = np.ravel(influence.change(train.remove([i])).theta["coef"])
        np.testing.assert_allclose(found, refit_with_less(estimator, i, labels), atol=1e-4)


def test_unsupported_estimators_and_options_are_refused():
    for action, text in (
        (
            lambda: solution_of(Lasso().fit(X, Y), X, Y),
            "must be a LinearRegression, Ridge or LogisticRegression, not a Lasso;",
        ),
        (
            lambda: solution_of(
                LogisticRegression(l1_ratio=0.5, solver="saga", max_iter=10_000).fit(X, Y > 0), X, Y > 0
            ),
            "must have l1_ratio=0, a smooth penalty, not l1_ratio=0.5;",
        ),
        (
            lambda: solution_of(LinearRegression().fit(X, Y), X, Y[::-1].copy()),
            "The estimator was fitted on other data, or its solver stopped early.",
        ),
        (
            lambda: FairLogisticRegression(group="sex").fit(X, Y > 0),
            "`group` must be a column number from 0 to 9, not 'sex'.",
        ),
        (
            lambda: solution_of(LogisticRegression(solver="liblinear").fit(X, Y > 0), X, Y > 0),
            "must not be fitted with solver='liblinear', which penalises it.",
        ),
        (
            lambda: solution_of(LogisticRegressionCV(Cs=2, l1_ratios=(0.0,)).fit(X, Y > 0), X, Y > 0),
            "Ridge or LogisticRegression, not a LogisticRegressionCV;",
        ),
        (lambda: FairLogisticRegression(C=-1.0).fit(X, Y > 0), "`C` must be a positive number, not -1.0."),
        (
            lambda: FairLogisticRegression().fit(X, Y > 0).influence(X[:3], ["cat"] * 3),
            "must have one label, False or True, not 3 labels, with 1 unknown ones, the first 'cat'.",
        ),
        (
            lambda: FairLogisticRegression(group=1, tau=0.0).fit(X, Y > 0),
            "`tau` must be above 0 if there is a group column",
        ),
    ):
        with pytest.raises(dif.InvalidInputError) as caught:
            action()
        assert text in str(caught.value)
    rough = solution_of(Ridge(alpha=1.0, solver="lsqr", tol=1e-3).fit(X, Y), X, Y, polish=False)
    assert rough.kkt.residual > 1e-6  # not polished


def test_constrained_regression():
    cp = pytest.importorskip("cvxpy")
    A_eq, A_ub = np.ones((1, 10)), np.vstack([np.eye(10)[0], -np.eye(10)[3]])
    model = ConstrainedLinearRegression(A_eq, 0.3, A_ub, [-0.1, -0.5], alpha=0.5).fit(X, Y)
    coef, intercept = cp.Variable(10), cp.Variable()
    objective = cp.sum_squares(X @ coef + intercept - Y) + 0.5 * cp.sum_squares(coef)
    rows = [A_eq @ coef == 0.3, A_ub @ coef <= [-0.1, -0.5]]
    tight = {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}
    cp.Problem(cp.Minimize(objective), rows).solve(solver=cp.CLARABEL, **tight)
    np.testing.assert_allclose(model.coef_, coef.value, atol=1e-7)
    np.testing.assert_allclose(model.intercept_, intercept.value, atol=1e-7)
    np.testing.assert_allclose(model.multipliers_, np.append(rows[0].dual_value, rows[1].dual_value), atol=1e-5)
    assert model.kkt_residual_ < 1e-9
    moved = model.influence(indices=[4, 9])
    assert moved.targets == (*(f"coef[{j}]" for j in range(10)), "intercept")
    for row, i in zip(moved.values, (4, 9), strict=True):
        others = np.arange(len(Y)) != i
        refit = clone(model).fit(X[others], Y[others])
        np.testing.assert_allclose(row[:10], refit.coef_ - model.coef_, atol=0.2 * np.abs(row[:10]).max())
    tested = model.influence(X[:3], Y[:3])
    assert tested.values.shape == (150, 3)
    reloaded = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(reloaded.influence(X[:3], Y[:3]).values, tested.values)


@pytest.mark.parametrize("no_penalty", [False, True])
def test_without_a_penalty_and_with_both_kinds_of_weights(no_penalty):
    labels, weights = Y > 0, np.random.default_rng(0).uniform(0.5, 1.5, len(Y))
    options = {"C": np.inf} if no_penalty else {"class_weight": "balanced", "C": 0.3}
    estimator = LogisticRegression(tol=1e-12, solver="newton-cholesky", **options).fit(X, labels, sample_weight=weights)
    solution = solution_of(estimator, X, labels, sample_weight=weights)
    np.testing.assert_allclose(solution.params["coef"], estimator.coef_[0], atol=1e-6)


def test_influence_on_coefficients_is_that_of_refits():
    """Also on average over the samples: the strength of the penalty must not depend on their number."""
    labels = Y > 0
    model = FairLogisticRegression(C=0.1).fit(X, labels)
    found = model.influence(indices=range(0, 150, 3)).values.numpy()
    refits = []
    for i in range(0, 150, 3):
        others = np.arange(150) != i
        refit = clone(model).fit(X[others], labels[others])
        refits.append(np.append(refit.coef_ - model.coef_, refit.intercept_ - model.intercept_))
    refits = np.array(refits)
    assert dif.Agreement.of(torch.as_tensor(found), torch.as_tensor(refits)).pearson > 0.995
    plain = solution_of(LogisticRegression(C=0.1, tol=1e-12, solver="newton-cholesky").fit(X, labels), X, labels)
    entries = [dif.linear(np.eye(11)[j]).as_term() for j in range(11)]
    removals = plain.problem.samples[0].remove_each(range(0, 150, 3))
    same = dif.DirectionalInfluence(plain).scores(entries, removals, show_progress=False).values
    np.testing.assert_allclose(found, same, atol=1e-7)  # without groups it is the problem of scikit-learn
    np.testing.assert_allclose(found.mean(0), refits.mean(0), atol=0.1 * np.abs(refits).mean())


def test_influence_uses_the_data_and_options_of_fit():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X[:, :3], columns=["a", "b", "c"])
    model = ConstrainedLinearRegression(A_ub=[[1.0, 0.0, 0.0]], b_ub=0.0).fit(frame, Y)
    assert model.influence(indices=[0]).targets == ("coef[a]", "coef[b]", "coef[c]", "intercept")
    expected = model.influence(frame[:2], Y[:2]).values
    with pytest.raises(ValueError, match="feature names"):
        model.influence(frame[["b", "a", "c"]][:2], Y[:2])
    with pytest.raises(ValueError, match="features"):
        model.influence(X[:2, :2], Y[:2])
    model.set_params(A_ub=None, alpha=5.0)
    frame.iloc[:] = 0.0
    test = pandas.DataFrame(X[:2, :3], columns=["a", "b", "c"])
    np.testing.assert_array_equal(model.influence(test, Y[:2]).values, expected)


def test_fair_logistic_regression_on_frames_and_in_pipelines():
    pandas = pytest.importorskip("pandas")
    data = load_breast_cancer(as_frame=True)
    frame = data.data.iloc[:200, :5] / data.data.iloc[:, :5].std()
    frame = frame - frame.mean()
    frame["site"] = np.where(data.data["mean smoothness"][:200] > 0.1, "north", "south")
    labels = data.target[:200].map({0: "malignant", 1: "benign"})
    model = FairLogisticRegression(group="site", tau=0.01, C=0.1).fit(frame, labels)
    assert list(model.groups_) == ["north", "south"]
    assert list(model.feature_names_in_) == list(frame.columns)
    assert (model.multipliers_ > 0).sum() == 1
    losses = -np.log(model.predict_proba(frame)[np.arange(200), (labels == "malignant").astype(int)])
    risks = [losses[frame["site"] == g].mean() for g in ("north", "south")]
    np.testing.assert_allclose(max(risks), losses.mean() + 0.01, atol=1e-9)  # the constraint binds
    assert model.score(frame, labels) > 0.8
    shown = model.influence(frame.iloc[:2], labels[:2]).to_frame()
    assert isinstance(shown, pandas.DataFrame)
    assert shown.shape == (200, 2)
    i = int(np.argmax(np.abs(shown.iloc[:, 0])))
    others = np.arange(200) != i
    refit = clone(model).fit(frame[others], labels[others])
    before, after = (-np.log(m.predict_proba(frame[:1])[0, int(labels[0] == "malignant")]) for m in (model, refit))
    np.testing.assert_allclose(after - before, shown.iloc[i, 0], rtol=0.3)

    numbers = frame.drop(columns="site")
    pipeline = make_pipeline(StandardScaler(), FairLogisticRegression(C=1.0))
    assert cross_val_score(pipeline, numbers, labels, cv=3).min() > 0.8
    search = GridSearchCV(pipeline, {"fairlogisticregression__C": [0.01, 1.0]}, cv=3).fit(numbers, labels)
    assert search.best_params_["fairlogisticregression__C"] in (0.01, 1.0)
    plain = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(numbers, labels)
    np.testing.assert_allclose(FairLogisticRegression(C=1.0).fit(numbers, labels).coef_, plain.coef_[0], atol=1e-5)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.int8, bool])
def test_targets_of_any_numeric_type(kind):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3))
    y = (X[:, 0] > 0).astype(kind)
    fitted = ConstrainedLinearRegression(A_ub=[[1.0, 0.0, 0.0]], b_ub=0.1).fit(X, y)
    wanted = ConstrainedLinearRegression(A_ub=[[1.0, 0.0, 0.0]], b_ub=0.1).fit(X, y.astype(np.float64))
    np.testing.assert_allclose(fitted.coef_, wanted.coef_, rtol=1e-12)
    assert np.isfinite(fitted.influence().values.numpy()).all()


def test_the_index_of_a_data_frame_is_shown():
    pandas = pytest.importorskip("pandas")
    generator = np.random.default_rng(0)
    X = pandas.DataFrame(generator.normal(size=(30, 2)), index=[f"row {i}" for i in range(30)], columns=["a", "b"])
    y = pandas.Series(X["a"] + 0.1 * generator.normal(size=30))
    labels = (y > 0).astype(int)
    for model, target in ((ConstrainedLinearRegression(), y), (FairLogisticRegression(), labels)):
        assert list(model.fit(X, target).influence(indices=[4, 2]).to_frame().index) == ["row 4", "row 2"]
        assert list(model.fit(X.to_numpy(), target).influence(indices=[4]).to_frame().index) == ["remove train[4]"]
    for model, target in ((Ridge(), y), (LogisticRegression(), labels)):
        (train,) = solution_of(model.fit(X, target), X, target).problem.samples
        assert list(train.remove_each([4]).index) == ["row 4"]
