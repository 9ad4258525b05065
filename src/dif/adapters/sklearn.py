"""scikit-learn: what is fitted, read as a Solution; and estimators with constraints that follow its contract."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

import dif
from dif import InvalidInputError

try:
    from sklearn.linear_model import LinearRegression, LogisticRegression, LogisticRegressionCV, Ridge
    from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data  # noqa: F401 (since 1.6)
except ImportError as error:
    raise ImportError('dif.adapters.sklearn needs scikit-learn 1.6 or newer: pip install "dif[sklearn]"') from error

from dif.adapters.constrained import ConstrainedLinearRegression, FairLogisticRegression
from dif.adapters.linear_models import logistic, params_of, risk_of, shrunk, softmax, squared, strength

__all__ = ["ConstrainedLinearRegression", "FairLogisticRegression", "solution_of"]

_FAR = 0.01  # relative KKT residual beyond which a point was fitted on something else


def solution_of(estimator: Any, X: Any, y: Any, *, sample_weight: Any = None, polish: bool = True) -> dif.Solution:
    """A fitted `LinearRegression`, `Ridge` (both also with positive=True) or `LogisticRegression` as a Solution.

    The samples are `solution.problem.samples[0]`: removing one is what fitting again without it does (but weights that
    class_weight="balanced" made stay as they are). Coefficients at a bound of 0 are weak or binding rows of the
    constraint "positive".

    Args:
        estimator: Fitted on X and y.
        X: What it was fitted on, (n, d).
        y: Likewise.
        sample_weight: Likewise.
        polish: Go on to a certified solution from the fitted point, which solvers leave at their tolerance.

    Raises:
        InvalidInputError: Another estimator, a penalty that is not smooth, or a point that does not solve the problem
            of this X and y.
    """
    if isinstance(estimator, LogisticRegression) and not isinstance(estimator, LogisticRegressionCV):
        problem, params = _of_classifier(estimator, X, y, sample_weight)
    elif isinstance(estimator, LinearRegression | Ridge):
        problem, params = _of_regressor(estimator, X, y, sample_weight)
    else:
        raise InvalidInputError(
            "estimator",
            measured=type(estimator).__name__,
            threshold="LinearRegression, Ridge or LogisticRegression",
            meaning="The objective of an estimator must be known to differentiate its solution.",
            cure="State it as a dif.Problem, and hand in the fitted values as dif.Solution(problem, params).",
        )
    given = dif.Solution(problem, params)
    if not given.kkt.residual <= _FAR:
        raise InvalidInputError(
            f"fitted values of {type(estimator).__name__}",
            measured=f"KKT residual {given.kkt.residual:.3g} on these samples",
            threshold=f"{_FAR:g}",
            meaning="They do not solve the problem of this X and y: it was fitted on other data, or stopped early.",
            cure="Pass the X, y and sample_weight of fit; raise max_iter or lower tol.",
        )
    return dif.fit(problem, given.params, multipliers=given.lam, show_progress=False) if polish else given


def _of_regressor(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[dif.Problem, dict[str, Tensor]]:
    check_is_fitted(estimator, "coef_")
    X, y = check_X_y(X, y, dtype="float64", y_numeric=True)
    risk = risk_of(squared, X, y, sample_weight)
    alpha = strength(getattr(estimator, "alpha", 0.0), "alpha")
    params = params_of(np.reshape(estimator.coef_, -1), estimator.intercept_ if estimator.fit_intercept else None)
    bounds = [(dif.linear(np.eye(X.shape[1]), of="coef") >= 0.0).named("positive")] if estimator.positive else []
    return dif.Problem(risk + shrunk(2 * alpha) if alpha else risk, bounds), params


def _of_classifier(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[dif.Problem, dict[str, Tensor]]:
    check_is_fitted(estimator, "coef_")
    X, y = check_X_y(X, y, dtype="float64")
    if estimator.l1_ratio or getattr(estimator, "penalty", None) in ("l1", "elasticnet"):
        raise InvalidInputError(
            "penalty of LogisticRegression",
            measured=f"l1_ratio {estimator.l1_ratio}",
            threshold="0: the squared norm alone",
            meaning="The 1-norm has kinks, at which a solution is no stationary point.",
            cure="Fit with l1_ratio=0; or state the problem in CVXPY and use dif.adapters.cvxpy.",
        )
    if estimator.solver == "liblinear" and estimator.fit_intercept:
        raise InvalidInputError(
            "solver of LogisticRegression",
            measured="liblinear, with an intercept",
            threshold="another solver, or fit_intercept=False",
            meaning="liblinear shrinks the intercept, so it solves another problem than the others.",
            cure="Fit with solver='lbfgs' or 'newton-cholesky'.",
        )
    number = np.searchsorted(estimator.classes_, y)
    weights = np.ones(len(y)) if sample_weight is None else np.asarray(sample_weight, dtype=float)
    if estimator.class_weight is not None:
        from sklearn.utils.class_weight import compute_class_weight

        each = compute_class_weight(
            estimator.class_weight, classes=estimator.classes_, y=y, sample_weight=sample_weight
        )
        weights = weights * each[number]
    two = len(estimator.classes_) == 2
    uniform = sample_weight is None and estimator.class_weight is None
    labels = 2.0 * number - 1.0 if two else number
    risk = risk_of(logistic if two else softmax, X, labels, None if uniform else weights)
    intercept = estimator.intercept_ if estimator.fit_intercept else None
    if two:
        params = params_of(estimator.coef_[0], None if intercept is None else intercept[0])
    else:
        params = params_of(estimator.coef_, intercept)
    fixed = []
    if not two and intercept is not None:  # a number added to all of them changes nothing
        fixed = [(dif.linear(np.ones(len(intercept)), of="intercept") == float(np.sum(intercept))).named("intercepts")]
    free = getattr(estimator, "penalty", "l2") is None or np.isinf(estimator.C)
    return dif.Problem(risk if free else risk + shrunk(1.0 / estimator.C), fixed), params
