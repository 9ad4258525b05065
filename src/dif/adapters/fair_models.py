"""Logistic and linear regression under a constraint of fairlearn, with the scikit-learn interface."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted
from torch import Tensor

import dif
import dif.fairness
from dif import InvalidInputError
from dif.adapters.influence_mixin import InfluenceMixin
from dif.adapters.linear_estimators import LinearClassifierMixin, LinearRegressorMixin
from dif.adapters.linear_models import (
    build_ridge,
    build_samples,
    check_strength,
    logistic_loss,
    predict_linear,
    read_index,
    squared_loss,
)
from dif.adapters.validation import refuse_words, require_both, validate


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
    """What both models share: the arguments of fit, the fairness constraints, and influence on metrics."""

    constraints: Any
    _link: Any
    _y: Any

    def _keep(self, X: Any, y: Any, **columns: Any) -> None:
        """Check and keep a copy of what the problem is built from, besides X and y."""
        index = dif.fairness.check_order(X=X, y=y, **columns)
        self._moment, self._index = deepcopy(self.constraints), index if read_index(X) is not None else None
        if self._moment is not None and columns["sensitive_features"] is None:
            raise InvalidInputError(
                "`sensitive_features` is None.",
                f"{type(self._moment).__name__} needs it.",
                "Without the group of each sample there is nothing to constrain.",
                "Pass sensitive_features= to fit, or constraints=None for a model without a constraint.",
            )
        self._features = {name: deepcopy(columns[name]) for name in ("sensitive_features", "control_features")}
        self._weights = None
        if columns["sample_weight"] is not None:
            refuse_words(columns["sample_weight"], "sample_weight")
            weights = _check_sample_weight(columns["sample_weight"], X, dtype=np.float64, ensure_non_negative=True)
            self._weights = np.array(weights)

    @property
    def constraint_names_(self) -> tuple[str, ...]:
        """The name of each constraint, in the order of `multipliers_`."""
        return self.solution_.problem.names

    def _build_samples(self, loss: Any) -> tuple[dif.Samples, dif.Term]:
        """Return the training samples, and the sum of their losses, weighted if fit was given weights."""
        train = build_samples(loss, self._X, self._y, self._index)
        return train, train.sum() if self._weights is None else train.weighted(self._weights)

    def _build_rows(self, train: dif.Samples, loss: Any, **options: Any) -> list[dif.Constraint]:
        """Return the constraints that the moment stands for; `loss` is what it bounds or compares, if it is a loss."""
        if self._moment is None:
            return []
        options |= {"score": score, "loss": loss, "sample_weight": self._weights, **self._features}
        return dif.fairness.read_moment(self._moment, train, **options)

    def _name_loss(self) -> str:
        """Return the name of the loss of a BoundedGroupLoss; "NoneType" for other moments."""
        return type(getattr(self._moment, "reduction_loss", None)).__name__

    def influence_on_metrics(
        self,
        metrics: Any,
        X: Any,
        y: Any,
        *,
        sensitive_features: Any,
        sample_weight: Any = None,
        control_features: Any = None,
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
            control_features: The metrics are computed for each value of these columns by itself.
            indices: Indices of the training samples to remove, one at a time. None: all.

        Returns:
            Scores (training samples, targets); the targets are each metric overall, of each group, its difference and
            its ratio.
        """
        check_is_fitted(self, "coef_")
        require_both(X, y)
        columns = {
            "sensitive_features": sensitive_features,
            "sample_weight": sample_weight,
            "control_features": control_features,
        }
        dif.fairness.check_order(X=X, y=y, **columns)
        data, labels = self._read_test_samples(X, y)
        labels = (labels + 1) / 2 if self._link else labels
        targets = dif.fairness.smooth_metrics(metrics, predict_linear, data, labels=labels, link=self._link, **columns)
        return self._score(targets, indices)


class FairClassifier(LinearClassifierMixin, _FairMixin, ClassifierMixin, BaseEstimator):
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
        solution_: The fitted problem as a dif.Solution, one object per fit.
        samples_: The training samples as dif.Samples.
        certificate_: Whether the solution can be differentiated, with reasons.
    """

    _link = staticmethod(torch.sigmoid)

    def __init__(self, constraints: Any = None, *, C: float = 1.0, fit_intercept: bool = True) -> None:
        self.constraints, self.C, self.fit_intercept = constraints, C, fit_intercept

    def fit(
        self, X: Any, y: Any, *, sensitive_features: Any = None, sample_weight: Any = None, control_features: Any = None
    ) -> FairClassifier:
        """Solve the problem.

        Args:
            X: The features, (n, d). The index of a DataFrame labels the samples in results.
            y: The labels, of two classes.
            sensitive_features: The group of each sample, (n,) or (n, k). Like y it is taken by position; a column
                with the index of X in another order is refused.
            sample_weight: Weights of the samples, in the objective and in the constraint.
            control_features: The groups are compared within each value of these columns, as in fairlearn.
        """
        features, labels = validate(self, X, y, dtype=np.float64)
        self._settings = check_strength(self.C, "C")
        self._keep(
            X, y, sensitive_features=sensitive_features, sample_weight=sample_weight, control_features=control_features
        )
        self._y = self._encode_classes(labels, slice(None) if self._weights is None else self._weights > 0)
        self._X = np.array(features)
        self._solve()
        return self

    def _build_problem(self) -> dif.Problem:
        train, risk = self._build_samples(logistic_loss)
        loss = brier_score if self._name_loss() == "SquareLoss" else error_probability
        return dif.Problem(self._settings * risk + build_ridge(1.0), self._build_rows(train, loss, labels=self._y))


class FairRegressor(LinearRegressorMixin, _FairMixin, RegressorMixin, BaseEstimator):
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

    def fit(
        self, X: Any, y: Any, *, sensitive_features: Any = None, sample_weight: Any = None, control_features: Any = None
    ) -> FairRegressor:
        """Solve the problem; the arguments are those of `FairClassifier.fit`, with numbers as y."""
        self._keep_training_samples(X, y)
        self._settings = check_strength(self.alpha, "alpha")
        columns = {"sensitive_features": sensitive_features, "control_features": control_features}
        self._keep(X, y, **columns, sample_weight=sample_weight)
        self._solve()
        return self

    def _build_problem(self) -> dif.Problem:
        train, risk = self._build_samples(squared_loss)
        kind, loss = type(self._moment).__name__, self._name_loss()
        allowed = ("NoneType", "NoneType"), ("DemographicParity", "NoneType"), ("BoundedGroupLoss", "SquareLoss")
        if (kind, loss) not in allowed:
            raise InvalidInputError(
                f"The constraint is {kind}{f' with {loss}' if kind == 'BoundedGroupLoss' else ''}.",
                "A linear regression takes DemographicParity, or BoundedGroupLoss with SquareLoss.",
                "The others are about labels, of which a regression has none, or have no derivative.",
                "Use one of these two, or a FairClassifier if the target has two classes.",
            )
        rows = self._build_rows(train, squared_loss, link=None)
        return dif.Problem(risk + build_ridge(2 * self._settings) if self._settings else risk, rows)
