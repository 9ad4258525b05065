"""Constrained estimators with the scikit-learn interface that report the influence of their training samples."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array

import dif
from dif import InvalidInputError
from dif.adapters.influence_mixin import InfluenceMixin
from dif.adapters.linear_estimators import LinearClassifierMixin, LinearRegressorMixin
from dif.adapters.linear_models import (
    build_ridge,
    build_samples,
    check_strength,
    logistic_loss,
    read_index,
    squared_loss,
)
from dif.adapters.validation import refuse_text, validate
from dif.fairness import check_order


class ConstrainedLinearRegression(LinearRegressorMixin, InfluenceMixin, RegressorMixin, BaseEstimator):
    """Least squares under linear constraints on the coefficients: A_eq·coef = b_eq, A_ub·coef ≤ b_ub.

    Minimises Σ(yᵢ − xᵢ·coef − intercept)² + alpha‖coef‖².

    Args:
        A_eq: (rows, n_features), or None.
        b_eq: One number, or one per row of A_eq.
        A_ub: (rows, n_features), or None.
        b_ub: One number, or one per row of A_ub.
        alpha: Strength of the ridge on the coefficients.
        fit_intercept: Whether there is an intercept. It is neither penalised nor constrained.

    Attributes:
        coef_, intercept_: The solution.
        multipliers_: One per row of A_eq, then one per row of A_ub.
        kkt_residual_: Residual of the optimality conditions.
        solution_: The fitted problem as a dif.Solution, one object per fit.
        samples_: The training samples as dif.Samples.

    >>> X, y = np.arange(12.0).reshape(6, 2) % 5, np.arange(6.0)
    >>> model = ConstrainedLinearRegression(A_eq=[[1.0, 1.0]], b_eq=1.0).fit(X, y)
    >>> round(float(model.coef_.sum()), 6)
    1.0
    """

    def __init__(
        self,
        A_eq: Any = None,
        b_eq: Any = 0.0,
        A_ub: Any = None,
        b_ub: Any = 0.0,
        *,
        alpha: float = 0.0,
        fit_intercept: bool = True,
    ) -> None:
        self.A_eq, self.b_eq, self.A_ub, self.b_ub = A_eq, b_eq, A_ub, b_ub
        self.alpha, self.fit_intercept = alpha, fit_intercept

    def fit(self, X: Any, y: Any) -> ConstrainedLinearRegression:
        """Solve the problem to a KKT residual of 1e-10."""
        check_order(X=X, y=y)
        self._index = read_index(X)
        self._keep_training_samples(X, y)
        self._settings = deepcopy((self.A_eq, self.b_eq, self.A_ub, self.b_ub)), check_strength(self.alpha, "alpha")
        self._solve()
        return self

    def _build_problem(self) -> dif.Problem:
        risk = build_samples(squared_loss, self._X, self._y, self._index).sum()
        rows = []
        (A_eq, b_eq, A_ub, b_ub), alpha = self._settings
        for A, b, equal in ((A_eq, b_eq, True), (A_ub, b_ub, False)):
            if A is not None:
                name = "eq" if equal else "ub"
                left = dif.linear(np.atleast_2d(_read_numbers(A, f"A_{name}")), of="coef")
                right = torch.as_tensor(_read_numbers(b, f"b_{name}"))
                rows.append((left == right if equal else left <= right).named(f"A_{name}"))
        return dif.Problem(risk + build_ridge(2 * alpha) if alpha else risk, rows)


class FairLogisticRegression(LinearClassifierMixin, InfluenceMixin, ClassifierMixin, BaseEstimator):
    """Logistic regression in which the mean loss of every group is at most the mean loss of all samples + tau.

    Minimises C·(sum of log-losses) + ½‖coef‖², as scikit-learn's LogisticRegression does.

    Args:
        group: The column of X with the group of each sample, as a name (pandas) or a number. It is not used as a
            feature. None: no constraint.
        tau: How much the mean loss of a group may exceed the mean loss of all samples.
        C: Inverse of the strength of the penalty, as in LogisticRegression.
        fit_intercept: Whether there is an intercept.

    Attributes:
        coef_, intercept_: The solution.
        groups_: The values in the group column, in the order of the constraints.
        multipliers_: One per group, in the units of the objective; 0 if its constraint does not bind.
        kkt_residual_: Residual of the optimality conditions.
        solution_: The fitted problem as a dif.Solution, one object per fit.
        samples_: The training samples as dif.Samples.
    """

    def __init__(self, group: Any = None, tau: float = 0.01, *, C: float = 1.0, fit_intercept: bool = True) -> None:
        self.group, self.tau, self.C, self.fit_intercept = group, tau, C, fit_intercept

    def fit(self, X: Any, y: Any) -> FairLogisticRegression:
        """Solve the problem to a KKT residual of 1e-10."""
        check_classification_targets(y)
        check_order(X=X, y=y)
        self._index = read_index(X)
        X, y = validate(self, X, y, dtype=np.float64 if self.group is None else None)
        group_column = self._find_group_column()
        C, tau = check_strength(self.C, "C"), check_strength(self.tau, "tau")
        if group_column is not None and not tau > 0:
            raise InvalidInputError(
                f"`tau` is {self.tau}.",
                "It must be above 0 if there is a group column.",
                "At 0 the constraints depend on each other, so their multipliers are not unique.",
                "Pass a small number, for example 0.001.",
            )
        self._group_column, self._settings = group_column, (C, tau)
        self._y = self._encode_classes(y)
        self._X, members = self._split_group(X)
        self.groups_, self._group_index = (None, None) if members is None else np.unique(members, return_inverse=True)
        self._solve()
        return self

    def _find_group_column(self) -> int | None:
        """Return the number of the group column; None if there is none."""
        if self.group is None:
            return None
        names, columns = list(getattr(self, "feature_names_in_", [])), int(getattr(self, "n_features_in_", 0))
        if columns < 2:
            raise ValueError(f"X has n_features = {columns}. It needs at least one feature beside the group column.")
        if isinstance(self.group, str) and self.group in names:
            return names.index(self.group)
        if (
            isinstance(self.group, int | np.integer)
            and not isinstance(self.group, bool)
            and 0 <= int(self.group) < columns
        ):
            return int(self.group)
        raise InvalidInputError(
            f"`group` is {self.group!r}.",
            f"It must be one of the columns {', '.join(map(str, names))}, or a column number from 0 to {columns - 1}."
            if names
            else f"It must be a column number from 0 to {columns - 1}.",
            "It names the column of X with the group of each sample.",
            "Pass the number of a column, or its name if X is a DataFrame.",
        )

    def _read_features(self, X: Any) -> Any:
        """Return the features of samples that the model was not fitted on, without the group column."""
        return self._split_group(
            validate(self, X, dtype=np.float64 if self._group_column is None else None, reset=False)
        )[0]

    def _split_group(self, X: Any) -> tuple[Any, Any]:
        """Return the features of X and the group of each sample; None for the latter if there is no group column."""
        if self._group_column is None:
            return np.array(X), None
        members = X[:, self._group_column]
        invalid = [value for value in members.tolist() if not isinstance(value, str | int | float)]
        if invalid:
            name = type(invalid[0]).__name__
            raise TypeError(f"The group column of X contains a {name}. An argument must be a string or a number.")
        features = np.delete(X, self._group_column, 1)
        try:
            return check_array(features, dtype="float64"), members.astype(str)
        except ValueError as error:
            names = [name for name in getattr(self, "feature_names_in_", ()) if name != self.group]
            refuse_text(features, error, names)
            raise

    def _build_problem(self) -> dif.Problem:
        train = build_samples(logistic_loss, self._X, self._y, self._index)
        risk, (C, tau) = train.mean(), self._settings
        groups = enumerate(() if self.groups_ is None else self.groups_)
        rows = [(train.mean(where=self._group_index == g) <= risk + tau).named(str(name)) for g, name in groups]
        return dif.Problem(C * train.sum() + build_ridge(1.0), rows)


def _read_numbers(value: Any, name: str) -> np.ndarray:
    """Return the array of numbers that was passed as the argument `name`."""
    try:
        return np.array(value, dtype=float)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"`{name}` is of type {type(value).__name__} and cannot be read as numbers.",
            "It must be a number, or an array or nested lists of numbers with rows of equal length.",
            "It states linear constraints on the coefficients.",
            "Pass A with one row per constraint and one column per feature, and b with one number per row.",
        ) from error
