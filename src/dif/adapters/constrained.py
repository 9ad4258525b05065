"""Estimators with constraints that follow scikit-learn's contract, and know the influence of their samples."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor

import dif
from dif import InvalidInputError
from dif.adapters.linear_models import logistic, params_of, samples_of, shrunk, squared, strength


class _Influenced:
    """What the constrained estimators share: the solution behind them, and its influence."""

    @property
    def solution_(self) -> dif.Solution:
        """θ̄ and λ̄ of the problem that was solved, made anew from what fit kept."""
        check_is_fitted(self, "coef_")
        params = self._params(self.coef_, self.intercept_)
        return dif.Solution(self._stated(), params, torch.as_tensor(self.multipliers_))  # type: ignore[attr-defined]

    def influence(self, X: Any = None, y: Any = None, *, indices: Any = None) -> dif.Influence:
        """What would change without each training sample, predicted without fitting again.

        Args:
            X: Test samples: the change of the loss of each of them. None: the change of every coefficient, and of
                the intercept.
            y: Their targets.
            indices: Of the training samples asked about; None: all.

        Returns:
            (training samples, test samples or coefficients): `.top()`, `.to_frame()`, `.save()`.
        """
        solution = self.solution_
        (train,) = solution.problem.samples
        if X is None:
            d = solution.theta.numel()
            features = list(getattr(self, "feature_names_in_", range(solution.params["coef"].numel() + 1)))
            place = getattr(self, "_place", None)
            if place is not None and hasattr(self, "feature_names_in_"):
                features.pop(place)
            names = [f"coef[{features[j] if j < len(features) else j}]" for j in range(d)]
            if self.fit_intercept:  # type: ignore[attr-defined]
                names[-1] = "intercept"
            target: Any = [dif.linear(np.eye(d)[j], name=names[j]).as_term() for j in range(d)]
        else:
            target = dif.Samples(train.loss, self._seen(X, y), name="test")  # type: ignore[attr-defined]
        return dif.DirectionalInfluence(solution).scores(target, train.remove_each(indices), show_progress=False)

    def _solve(self) -> None:
        found = dif.fit(self._stated(), self._params(np.zeros(self._X.shape[1]), 0.0), show_progress=False)  # type: ignore[attr-defined]
        self.coef_ = found.params["coef"].numpy()
        self.intercept_ = float(found.params["intercept"]) if "intercept" in found.params else 0.0
        self.multipliers_ = found.lam.numpy()
        self.kkt_residual_ = found.kkt.residual
        self.n_iter_ = 1

    def _params(self, coef: Any, intercept: float) -> dict[str, Tensor]:
        return params_of(coef, intercept if self.fit_intercept else None)  # type: ignore[attr-defined]


class ConstrainedLinearRegression(_Influenced, RegressorMixin, BaseEstimator):
    """Least squares under linear constraints on the coefficients: A_eq·coef = b_eq, A_ub·coef ≤ b_ub.

    Minimises Σ(yᵢ − xᵢ·coef − intercept)² + alpha‖coef‖².

    Args:
        A_eq: (rows, n_features), or None.
        b_eq: One number, or one per row.
        A_ub: (rows, n_features), or None.
        b_ub: One number, or one per row.
        alpha: Ridge on the coefficients.
        fit_intercept: Whether there is an intercept, which is neither shrunk nor constrained.

    Attributes:
        coef_, intercept_: The solution.
        multipliers_: Of the rows of A_eq, then of A_ub.
        kkt_residual_: How well the conditions of optimality hold.
        solution_: All of it as a dif.Solution.

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
        """Solve it; to a KKT residual of 1e-10."""
        found: Any = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._X, self._y = (np.array(part, dtype=np.float64) for part in found)
        self._fitted = deepcopy((self.A_eq, self.b_eq, self.A_ub, self.b_ub)), strength(self.alpha, "alpha")
        self._solve()
        return self

    def predict(self, X: Any) -> Any:
        """X·coef + intercept."""
        check_is_fitted(self, "coef_")
        return validate_data(self, X, dtype=np.float64, reset=False) @ self.coef_ + self.intercept_

    def _stated(self) -> dif.Problem:
        risk = samples_of(squared, self._X, self._y).sum()
        rows = []
        (A_eq, b_eq, A_ub, b_ub), alpha = self._fitted
        for A, b, equal in ((A_eq, b_eq, True), (A_ub, b_ub, False)):
            if A is not None:
                left = dif.linear(np.atleast_2d(np.asarray(A, dtype=float)), of="coef")
                right = torch.as_tensor(np.array(b, dtype=float))
                rows.append((left == right).named("A_eq") if equal else (left <= right).named("A_ub"))
        return dif.Problem(risk + shrunk(2 * alpha) if alpha else risk, rows)

    def _seen(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=False)
        return torch.as_tensor(np.array(X)), torch.as_tensor(np.array(y, dtype=np.float64))


class FairLogisticRegression(_Influenced, ClassifierMixin, BaseEstimator):
    """Logistic regression whose risk in every group is at most the mean risk + tau.

    Minimises C·(sum of log-losses) + ½‖coef‖², as LogisticRegression does.

    Args:
        group: The column of X that says who belongs together: a name (pandas), a number; None: no constraint. It is
            not used as a feature.
        tau: How much larger the risk of a group may be than the mean risk.
        C: Inverse strength of the shrinking, as in LogisticRegression.
        fit_intercept: Whether there is an intercept.

    Attributes:
        coef_, intercept_: The solution.
        groups_: The values of the group column, in the order of the constraints.
        multipliers_: One for each group, in the units of that objective: 0 where the constraint does not bind.
        kkt_residual_: How well the conditions of optimality hold.
        solution_: All of it as a dif.Solution.
    """

    def __init__(self, group: Any = None, tau: float = 0.01, *, C: float = 1.0, fit_intercept: bool = True) -> None:
        self.group, self.tau, self.C, self.fit_intercept = group, tau, C, fit_intercept

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.classifier_tags.multi_class = False
        return tags

    def fit(self, X: Any, y: Any) -> FairLogisticRegression:
        """Solve it; to a KKT residual of 1e-10."""
        check_classification_targets(y)
        numeric = self.group is None
        found: Any = validate_data(self, X, y, dtype=np.float64 if numeric else None)
        X, y = found
        place = self._column()
        C, tau = strength(self.C, "C"), strength(self.tau, "tau")
        if place is not None and not tau > 0:
            raise InvalidInputError(
                "tau",
                measured=self.tau,
                threshold="above 0",
                meaning="At 0 the constraints repeat each other, so that their multipliers are not unique.",
                cure="Allow a little, 0.001 say.",
            )
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        self.classes_ = np.unique(y)
        if kind != "binary" or len(self.classes_) < 2:
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}, "
                f"with {len(self.classes_)} class{'' if len(self.classes_) == 1 else 'es'}."
            )
        self._place, self._fitted = place, (C, tau)
        self._X, members = self._parted(X)
        self.groups_, self._group = (None, None) if members is None else np.unique(members, return_inverse=True)
        self._y = np.where(y == self.classes_[1], 1.0, -1.0)
        self._solve()
        return self

    def decision_function(self, X: Any) -> Any:
        """X·coef + intercept."""
        check_is_fitted(self, "coef_")
        X = self._checked(X)
        return self._parted(X)[0] @ self.coef_ + self.intercept_

    def predict_proba(self, X: Any) -> Any:
        """The probability of each class."""
        first = 1.0 / (1.0 + np.exp(self.decision_function(X)))
        return np.stack([first, 1.0 - first], 1)

    def predict(self, X: Any) -> Any:
        """The more probable class."""
        check_is_fitted(self, "coef_")
        return self.classes_[(self.decision_function(X) > 0).astype(int)]

    def _column(self) -> int | None:
        if self.group is None:
            return None
        names, columns = list(getattr(self, "feature_names_in_", [])), int(getattr(self, "n_features_in_", 0))
        if columns < 2:
            raise ValueError(f"n_features = {columns}: beside the group column there must be one to learn from")
        if isinstance(self.group, str) and self.group in names:
            return names.index(self.group)
        if isinstance(self.group, int | np.integer) and 0 <= int(self.group) < columns:
            return int(self.group)
        raise InvalidInputError(
            "group",
            measured=repr(self.group),
            threshold=f"one of {', '.join(map(str, names))}" if names else f"a column 0 … {columns - 1}",
            meaning="It names the column of X that says who belongs together.",
            cure="Pass the name of a column of a DataFrame, or its number.",
        )

    def _checked(self, X: Any) -> Any:
        return validate_data(self, X, dtype=None if self._place is not None else np.float64, reset=False)

    def _parted(self, X: Any) -> tuple[Any, Any]:
        """Features and group membership."""
        if self._place is None:
            return np.array(X), None
        members = X[:, self._place]
        strange = [value for value in members.tolist() if not isinstance(value, str | int | float)]
        if strange:
            raise TypeError(f"argument must be a string or a number, not {type(strange[0]).__name__}, to name a group")
        return check_array(np.delete(X, self._place, 1), dtype="float64"), members.astype(str)

    def _stated(self) -> dif.Problem:
        train = samples_of(logistic, self._X, self._y)
        risk, (C, tau) = train.mean(), self._fitted
        several = enumerate(() if self.groups_ is None else self.groups_)
        rows = [(train.mean(where=self._group == g) <= risk + tau).named(str(name)) for g, name in several]
        return dif.Problem(C * train.sum() + shrunk(1.0), rows)

    def _seen(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        X = self._checked(X)
        unknown = sorted(set(np.asarray(y).tolist()) - set(self.classes_.tolist()), key=str)
        if unknown or len(y) != len(X):
            raise InvalidInputError(
                "labels of the test samples",
                measured=f"{len(y)} for {len(X)} samples, {len(unknown)} unknown"
                + (f" ({unknown[0]!r})" if unknown else ""),
                threshold=f"one per sample, each {self.classes_[0]!r} or {self.classes_[1]!r}",
                meaning="A loss is taken against a class that the model knows.",
                cure="Use the labels of fit.",
            )
        sides = np.where(np.asarray(y) == self.classes_[1], 1.0, -1.0)
        return torch.as_tensor(np.array(self._parted(X)[0])), torch.as_tensor(sides)
