"""Logistic and linear regression under a constraint of fairlearn, with the scikit-learn interface."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

import dif
import dif.fairness
from dif import InvalidInputError
from dif.adapters.influence_mixin import InfluenceMixin
from dif.adapters.linear_models import (
    build_ridge,
    build_samples,
    check_strength,
    logistic_loss,
    predict_linear,
    squared_loss,
)


def score(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return x·coef + intercept for every sample of a batch (X, y)."""
    return predict_linear(params, batch[0])


def error_probability(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return the probability of the wrong label, which is smooth, in place of the zero-one loss; labels −1 and 1."""
    return torch.sigmoid(-batch[1] * score(params, batch))


def brier_score(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return the squared error of the probability, in place of that of the decision; labels −1 and 1."""
    return error_probability(params, batch) ** 2


class _FairMixin(InfluenceMixin):
    """What both models share: reading the arguments of fit, and influence on metrics."""

    def _read(self, sensitive_features: Any, sample_weight: Any, X: Any) -> None:
        """Check and keep a copy of what the problem is built from, besides X and y."""
        self._moment = deepcopy(self.constraints)  # type: ignore[attr-defined]
        if self._moment is not None and sensitive_features is None:
            raise InvalidInputError(
                "`sensitive_features` is None.",
                f"{type(self._moment).__name__} needs it.",
                "Without the group of each sample there is nothing to constrain.",
                "Pass sensitive_features= to fit, or constraints=None for a model without a constraint.",
            )
        self._sensitive_features = None if self._moment is None else np.array(sensitive_features)
        self._weights = None
        if sample_weight is not None:
            self._weights = np.array(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))

    @property
    def constraint_names_(self) -> tuple[str, ...]:
        """The name of each constraint, in the order of `multipliers_`."""
        check_is_fitted(self, "coef_")
        return self._build_problem().names  # type: ignore[attr-defined]

    def _add_up(self, train: dif.Samples) -> dif.Term:
        """Return the sum of the losses, weighted if fit was given weights."""
        return train.sum() if self._weights is None else train.weighted(self._weights)

    def influence_on_metrics(
        self,
        metrics: Any,
        X: Any,
        y: Any,
        *,
        sensitive_features: Any,
        sample_weight: Any = None,
        indices: Any = None,
    ) -> dif.Influence:
        """Predict how the metrics of a MetricFrame would change without each training sample, without refitting.

        Derivatives do not see decisions, which jump. Each metric is smoothed, see `dif.fairness.smooth_metrics`;
        `dif.fairness.compare_metrics` shows how far apart the two are.

        Args:
            metrics: The argument `metrics` of MetricFrame, such as {"selection rate": selection_rate}.
            X: The samples that the metrics are about.
            y: Their labels or target values.
            sensitive_features: Their groups.
            sample_weight: Their weights in the metrics.
            indices: Indices of the training samples to remove, one at a time. None: all.

        Returns:
            Scores (training samples, targets); the targets are each metric overall, of each group, its difference and
            its ratio.
        """
        solution = self.solution_
        data, labels = self._read_test_samples(X, y)  # type: ignore[attr-defined]
        targets = dif.fairness.smooth_metrics(
            metrics,
            predict_linear,
            data,
            labels=(labels + 1) / 2 if self._link else labels,  # type: ignore[attr-defined]
            sensitive_features=sensitive_features,
            link=self._link,  # type: ignore[attr-defined]
            sample_weight=sample_weight,
        )
        (train,) = solution.problem.people
        return dif.DirectionalInfluence(solution).scores(targets, train.remove_each(indices), show_progress=False)


class FairClassifier(_FairMixin, ClassifierMixin, BaseEstimator):
    """Logistic regression under a constraint of fairlearn, in smooth form, solved to a KKT residual of 1e-10.

    Minimises C·(sum of log-losses) + ½‖coef‖², as scikit-learn's LogisticRegression does. The constraint is about
    probabilities: the selection rate of a group is its mean probability, and so on (see `dif.fairness`). The problem
    is in general not convex; the solution is a strict local minimum, which `certificate_` certifies.

    Args:
        constraints: A DemographicParity, TruePositiveRateParity, FalsePositiveRateParity, EqualizedOdds,
            ErrorRateParity or BoundedGroupLoss (with SquareLoss or ZeroOneLoss) of fairlearn.reductions. None: no
            constraint.
        C: Inverse of the strength of the penalty, as in LogisticRegression.
        fit_intercept: Whether there is an intercept. It is not penalised.

    Attributes:
        coef_, intercept_: The solution.
        classes_: The two labels; constraints on labels take the second as the positive one.
        constraint_names_: The name of each constraint.
        multipliers_: One per constraint, in the units of the objective; 0 where a constraint does not bind.
        kkt_residual_: Residual of the optimality conditions.
        solution_: The fitted problem as a dif.Solution.
        certificate_: Whether the solution can be differentiated, with reasons.
    """

    _link = staticmethod(torch.sigmoid)

    def __init__(self, constraints: Any = None, *, C: float = 1.0, fit_intercept: bool = True) -> None:
        self.constraints, self.C, self.fit_intercept = constraints, C, fit_intercept

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.classifier_tags.multi_class = False
        return tags

    def fit(self, X: Any, y: Any, *, sensitive_features: Any = None, sample_weight: Any = None) -> FairClassifier:
        """Solve the problem; `sensitive_features` is the group of each sample, (n,) or (n, k)."""
        validated: Any = validate_data(self, X, y, dtype=np.float64)
        X, y = validated
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        self.classes_ = np.unique(y)
        self._settings = check_strength(self.C, "C")
        self._read(sensitive_features, sample_weight, X)
        present = len(np.unique(y if self._weights is None else y[self._weights > 0]))
        if kind != "binary" or present < 2:
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}, "
                f"with {present} class{'' if present == 1 else 'es'} of weight above 0."
            )
        self._X, self._y = np.array(X), np.where(y == self.classes_[1], 1.0, -1.0)
        self._solve()
        return self

    def decision_function(self, X: Any) -> Any:
        """Return X·coef + intercept."""
        check_is_fitted(self, "coef_")
        return validate_data(self, X, dtype=np.float64, reset=False) @ self.coef_ + self.intercept_

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class, (n, 2)."""
        scores = self.decision_function(X)
        return np.stack([expit(-scores), expit(scores)], 1)

    def predict(self, X: Any) -> Any:
        """Return the more probable class of each sample."""
        check_is_fitted(self, "coef_")
        return self.classes_[(self.decision_function(X) > 0).astype(int)]

    def _build_problem(self) -> dif.Problem:
        train = build_samples(logistic_loss, self._X, self._y)
        objective = self._settings * self._add_up(train) + build_ridge(1.0)
        if self._moment is None:
            return dif.Problem(objective)
        squared = type(getattr(self._moment, "reduction_loss", None)).__name__ == "SquareLoss"
        rows = dif.fairness.read_moment(
            self._moment,
            train,
            sensitive_features=self._sensitive_features,
            score=score,
            labels=self._y,
            loss=brier_score if squared else error_probability,
            sample_weight=self._weights,
        )
        return dif.Problem(objective, rows)

    def _read_test_samples(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        X, y = validate_data(self, X, dtype=np.float64, reset=False), np.asarray(y)
        unknown = sorted(set(y.tolist()) - set(self.classes_.tolist()), key=str)
        if unknown or len(y) != len(X):
            raise InvalidInputError(
                f"There are {len(y)} labels for {len(X)} test samples"
                + (f", with {len(unknown)} unknown labels, the first {unknown[0]!r}." if unknown else "."),
                f"Each sample must have one label, {self.classes_[0]!r} or {self.classes_[1]!r}.",
                "The loss is only defined for classes that the model was fitted on.",
                "Use the labels that were passed to fit.",
            )
        return torch.as_tensor(np.array(X)), torch.as_tensor(np.where(y == self.classes_[1], 1.0, -1.0))


class FairRegressor(_FairMixin, RegressorMixin, BaseEstimator):
    """Least squares under a constraint of fairlearn, in smooth form, solved to a KKT residual of 1e-10.

    Minimises Σ(yᵢ − xᵢ·coef − intercept)² + alpha‖coef‖². DemographicParity is about the mean prediction of each group.
    The problem is convex.

    Args:
        constraints: A BoundedGroupLoss with SquareLoss, or a DemographicParity, of fairlearn.reductions. None: no
            constraint.
        alpha: Strength of the ridge on the coefficients, as in scikit-learn's Ridge.
        fit_intercept: Whether there is an intercept. It is not penalised.

    Attributes: Those of `FairClassifier`, except `classes_`.
    """

    _link = None

    def __init__(self, constraints: Any = None, *, alpha: float = 1.0, fit_intercept: bool = True) -> None:
        self.constraints, self.alpha, self.fit_intercept = constraints, alpha, fit_intercept

    def fit(self, X: Any, y: Any, *, sensitive_features: Any = None, sample_weight: Any = None) -> FairRegressor:
        """Solve the problem; `sensitive_features` is the group of each sample, (n,) or (n, k)."""
        validated: Any = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._settings = check_strength(self.alpha, "alpha")
        self._read(sensitive_features, sample_weight, validated[0])
        self._X, self._y = (np.array(part, dtype=np.float64) for part in validated)
        self._solve()
        return self

    def predict(self, X: Any) -> Any:
        """Return X·coef + intercept."""
        check_is_fitted(self, "coef_")
        return validate_data(self, X, dtype=np.float64, reset=False) @ self.coef_ + self.intercept_

    def _build_problem(self) -> dif.Problem:
        train = build_samples(squared_loss, self._X, self._y)
        risk = self._add_up(train)
        objective = risk + build_ridge(2 * self._settings) if self._settings else risk
        if self._moment is None:
            return dif.Problem(objective)
        loss = type(getattr(self._moment, "reduction_loss", None)).__name__
        kind = type(self._moment).__name__
        if kind != "DemographicParity" and (kind, loss) != ("BoundedGroupLoss", "SquareLoss"):
            raise InvalidInputError(
                f"The constraint is {kind}{f' with {loss}' if kind == 'BoundedGroupLoss' else ''}.",
                "A linear regression takes DemographicParity, or BoundedGroupLoss with SquareLoss.",
                "The others are about labels, of which a regression has none, or have no derivative.",
                "Use one of these two, or a FairClassifier if the target has two classes.",
            )
        rows = dif.fairness.read_moment(
            self._moment,
            train,
            sensitive_features=self._sensitive_features,
            score=score,
            loss=squared_loss,
            link=None,
            sample_weight=self._weights,
        )
        return dif.Problem(objective, rows)

    def _read_test_samples(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=False)
        return torch.as_tensor(np.array(X)), torch.as_tensor(np.array(y, dtype=np.float64))
