"""scikit-learn: fitted models as a Solution, and constrained estimators with the scikit-learn interface."""

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
    raise ImportError(
        'dif.adapters.sklearn needs scikit-learn 1.6 or newer: pip install "directional-influence[sklearn]"'
    ) from error

from dif.adapters.constrained import ConstrainedLinearRegression, FairLogisticRegression
from dif.adapters.linear_models import (
    build_params,
    build_ridge,
    build_risk,
    check_strength,
    logistic_loss,
    read_index,
    softmax_loss,
    squared_loss,
)
from dif.adapters.validation import refuse_text, refuse_words
from dif.fairness import check_order

__all__ = ["ConstrainedLinearRegression", "FairLogisticRegression", "solution_of"]

_MAX_RESIDUAL = 0.01  # relative KKT residual above which the fitted values belong to other data


def solution_of(estimator: Any, X: Any, y: Any, *, sample_weight: Any = None, polish: bool = True) -> dif.Solution:
    """Return a fitted `LinearRegression` or `Ridge` (also with positive=True) or `LogisticRegression` as a Solution.

    Its samples are `solution.problem.samples[0]`. Removing one of them stands for fitting without it, except that the
    weights of class_weight="balanced" are not recomputed. Coefficients at their bound 0 are weak or binding rows of
    the constraint "positive".

    Args:
        estimator: A fitted estimator.
        X: The features it was fitted on, (n, d).
        y: The targets it was fitted on, (n,).
        sample_weight: The sample weights it was fitted with.
        polish: Continue with `dif.fit` from the fitted point, which is only accurate to the solver's tolerance.

    Raises:
        InvalidInputError: The estimator is not supported, its penalty is not smooth, or it was fitted on other data.
    """
    if isinstance(estimator, LogisticRegression) and not isinstance(estimator, LogisticRegressionCV):
        problem, params = _read_classifier(estimator, X, y, sample_weight)
    elif isinstance(estimator, LinearRegression | Ridge):
        problem, params = _read_regressor(estimator, X, y, sample_weight)
    else:
        raise InvalidInputError(
            f"`estimator` is of type {type(estimator).__name__}.",
            "It must be a LinearRegression, Ridge or LogisticRegression.",
            "The objective of an estimator must be known to differentiate its solution.",
            "Write the objective as a dif.Problem and pass the fitted values to dif.Solution(problem, params).",
        )
    fitted = dif.Solution(problem, params)
    if not fitted.kkt.residual <= _MAX_RESIDUAL:
        raise InvalidInputError(
            f"The fitted {type(estimator).__name__} has a KKT residual of {fitted.kkt.residual:.3g} on this X and y.",
            f"It must be at most {_MAX_RESIDUAL:g}.",
            "The estimator was fitted on other data, or its solver stopped early.",
            "Pass the X, y and sample_weight that were passed to fit, raise max_iter, or lower tol.",
        )
    return dif.fit(problem, fitted.params, multipliers=fitted.lam, show_progress=False) if polish else fitted


def _read_training_samples(
    estimator: Any, X: Any, y: Any, sample_weight: Any, **options: Any
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the index of X, and X and y as arrays."""
    check_is_fitted(estimator, "coef_")
    check_order(X=X, y=y, sample_weight=sample_weight)
    if sample_weight is not None:
        refuse_words(sample_weight, "sample_weight")
    try:
        features, targets = check_X_y(X, y, dtype="float64", **options)
    except (TypeError, ValueError) as error:
        refuse_text(X, error)
        raise
    if features.shape[1] != estimator.n_features_in_:
        raise InvalidInputError(
            f"X has {features.shape[1]} columns.",
            f"It must have {estimator.n_features_in_}, as in fit.",
            "The estimator was fitted on other data.",
            "Pass the X that was passed to fit.",
        )
    return read_index(X), features, targets


def _read_regressor(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[dif.Problem, dict[str, Tensor]]:
    """Return the problem that a LinearRegression or Ridge solves, and its fitted parameters."""
    refuse_words(y, "y")
    index, X, y = _read_training_samples(estimator, X, y, sample_weight, y_numeric=True)
    risk = build_risk(squared_loss, X, y, sample_weight, index)
    alpha = check_strength(getattr(estimator, "alpha", 0.0), "alpha")
    params = build_params(np.reshape(estimator.coef_, -1), estimator.intercept_ if estimator.fit_intercept else None)
    bounds = [(dif.linear(np.eye(X.shape[1]), of="coef") >= 0.0).named("positive")] if estimator.positive else []
    return dif.Problem(risk + build_ridge(2 * alpha) if alpha else risk, bounds), params


def _read_classifier(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[dif.Problem, dict[str, Tensor]]:
    """Return the problem that a LogisticRegression solves, and its fitted parameters."""
    index, X, y = _read_training_samples(estimator, X, y, sample_weight)
    if estimator.l1_ratio or getattr(estimator, "penalty", None) in ("l1", "elasticnet"):
        raise InvalidInputError(
            f"The LogisticRegression has l1_ratio={estimator.l1_ratio}.",
            "It must be 0, so that the penalty is the squared norm.",
            "The 1-norm is not differentiable at 0, where it puts coefficients.",
            "Fit with l1_ratio=0, or write the problem in CVXPY and use dif.adapters.cvxpy.",
        )
    if estimator.solver == "liblinear" and estimator.fit_intercept:
        raise InvalidInputError(
            "The LogisticRegression was fitted with solver='liblinear' and an intercept.",
            "It must be fitted with another solver, or with fit_intercept=False.",
            "Unlike the other solvers, liblinear penalises the intercept.",
            "Fit with solver='lbfgs' or solver='newton-cholesky'.",
        )
    class_index = np.searchsorted(estimator.classes_, y)
    weights = np.ones(len(y)) if sample_weight is None else np.asarray(sample_weight, dtype=float)
    if estimator.class_weight is not None:
        from sklearn.utils.class_weight import compute_class_weight

        class_weights = compute_class_weight(
            estimator.class_weight, classes=estimator.classes_, y=y, sample_weight=sample_weight
        )
        weights = weights * class_weights[class_index]
    binary = len(estimator.classes_) == 2
    unweighted = sample_weight is None and estimator.class_weight is None
    labels = 2.0 * class_index - 1.0 if binary else class_index
    risk = build_risk(logistic_loss if binary else softmax_loss, X, labels, None if unweighted else weights, index)
    intercept = estimator.intercept_ if estimator.fit_intercept else None
    if binary:
        params = build_params(estimator.coef_[0], None if intercept is None else intercept[0])
    else:
        params = build_params(estimator.coef_, intercept)
    constraints = []
    if not binary and intercept is not None:  # adding a constant to all intercepts changes no loss
        total = dif.linear(np.ones(len(intercept)), of="intercept")
        constraints = [(total == float(np.sum(intercept))).named("intercepts")]
    no_penalty = getattr(estimator, "penalty", "l2") is None or np.isinf(estimator.C)
    return dif.Problem(risk if no_penalty else risk + build_ridge(1.0 / estimator.C), constraints), params
