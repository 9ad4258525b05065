"""fairlearn: models under its constraints, their influence on its metrics, and the predictor that GridSearch picks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
import dif.fairness
from dif import InvalidInputError
from dif.runtime.inputs import check_number, check_order, read_array, read_labels, refuse_text

try:
    from fairlearn.reductions import BoundedGroupLoss, ExponentiatedGradient, GridSearch, UtilityParity
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted

    from dif.adapters import sklearn as linear
except ImportError as error:
    raise ImportError(
        'dif.adapters.fairlearn needs fairlearn and scikit-learn: pip install "directional-influence[fairlearn]"'
    ) from error

__all__ = ["FairClassifier", "FairRegressor", "solution_of"]

_AMONG_LABELS = ("TruePositiveRateParity", "FalsePositiveRateParity", "EqualizedOdds")  # of people with one label


def score(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return x·coef + intercept for every sample of a batch (X, y)."""
    return linear.predict_linear(params, batch[0])


def error_probability(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return the probability of the wrong label, which is smooth, in place of the zero-one loss; labels −1 and 1."""
    return torch.sigmoid(-batch[1] * score(params, batch))


def brier_score(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return the squared error of the probability, in place of that of the decision; labels −1 and 1."""
    return error_probability(params, batch) ** 2


class _FairMixin(linear.InfluenceMixin):
    """What both models share: the arguments of fit, the fairness constraints, and influence on metrics."""

    constraints: Any
    _link: Any
    _y: Any

    def fit(
        self, X: Any, y: Any, *, sensitive_features: Any = None, sample_weight: Any = None, control_features: Any = None
    ) -> Any:
        """Solve the problem.

        Args:
            X: The features, (n, d). The index of a DataFrame labels the samples in results.
            y: The labels, of two classes, or numbers for a regression.
            sensitive_features: The group of each sample, (n,) or (n, k). Like y it is taken by position; a column
                with the index of X in another order is refused.
            sample_weight: Weights of the samples, in the objective and in the constraint.
            control_features: The groups are compared within each value of these columns, as in fairlearn.
        """
        self._features = {"sensitive_features": sensitive_features, "control_features": control_features}
        check_order(X=X, y=y, **self._features, sample_weight=sample_weight)
        if self.constraints is not None and sensitive_features is None:
            raise InvalidInputError(
                f"`sensitive_features` must be passed to fit for {type(self.constraints).__name__}, not None."
            )
        self._features, self._weights = deepcopy(self._features), None
        if sample_weight is not None:
            refuse_text(sample_weight, "sample_weight")
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            self._weights = np.array(weights)
        self._X, self._y = self._read_training_samples(X, y)
        return self._solve(X)

    @property
    def _moment(self) -> Any:
        return self._options["constraints"]

    @property
    def constraint_names_(self) -> tuple[str, ...]:
        """The name of each constraint, in the order of `multipliers_`."""
        return self.solution_.problem.names

    def _build_samples(self, loss: Any) -> tuple[dif.Samples, dif.Term]:
        """Return the training samples, and the sum of their losses, weighted if fit was given weights."""
        classes = getattr(self, "classes_", None)
        train = linear.build_samples(loss, self._X, self._y, self._index, classes=classes)
        return train, train.sum() if self._weights is None else train.weighted(self._weights)

    def _build_rows(self, train: dif.Samples, loss: Any, **options: Any) -> list[dif.Constraint]:
        """Return the constraints that the moment stands for; `loss` is what it bounds or compares, if it is a loss."""
        if self._moment is None:
            return []
        options |= {"score": score, "loss": loss, "sample_weight": self._weights, **self._features}
        return dif.fairness.read_moment(self._moment, train, **options)

    def _find_like(self, index: Any, targets: Tensor) -> Any:
        """Return the index of a sample with the memberships of each relabelled one.

        Under a constraint among the samples of one label, it is one of the same groups and weight that has the label.
        """
        if type(self._moment).__name__ not in _AMONG_LABELS:
            return index
        columns = [read_array(c) for c in (*self._features.values(), self._weights) if c is not None]
        words = [str(row) for row in zip(*(c.reshape(len(self._y), -1).tolist() for c in columns), strict=True)]
        known = {key: i for i, key in reversed([*enumerate(zip(words, self._y.tolist(), strict=True))])}
        keys = [(words[i], float(t)) for i, t in zip(index, targets, strict=True)]
        alone = [int(i) for i, key in zip(index, keys, strict=True) if key not in known]
        if alone:
            raise InvalidInputError(
                f"No training sample with the groups and weight of sample {alone[0]} has its new label, so what it "
                f"counts in {type(self._moment).__name__} is unknown; fit again with the new label."
            )
        return [i if self._y[i] == t else known[key] for i, t, key in zip(index, targets, keys, strict=True)]

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
        linear.require_both(X, y)
        columns = {
            "sensitive_features": sensitive_features,
            "sample_weight": sample_weight,
            "control_features": control_features,
        }
        check_order(X=X, y=y, **columns)
        data, labels = self._read_test_samples(X, y)
        labels = (labels + 1) / 2 if self._link else labels
        targets = dif.fairness.smooth_metrics(
            metrics, linear.predict_linear, data, labels=labels, link=self._link, **columns
        )
        return self._score(targets, indices)


class FairClassifier(linear.LinearClassifierMixin, _FairMixin, ClassifierMixin, BaseEstimator):
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

    def _read_training_samples(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        features, labels = linear.validate(self, X, y)
        return np.array(features), self._encode_classes(labels, self._weights)

    def _build_problem(self) -> dif.Problem:
        train, risk = self._build_samples(linear.logistic_loss)
        loss = brier_score if self._name_loss() == "SquareLoss" else error_probability
        objective = check_number(self._options["C"], "C") * risk + linear.build_ridge(1.0)
        return dif.Problem(objective, self._build_rows(train, loss, labels=self._y))


class FairRegressor(linear.LinearRegressorMixin, _FairMixin, RegressorMixin, BaseEstimator):
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

    def _build_problem(self) -> dif.Problem:
        train, risk = self._build_samples(linear.squared_loss)
        kind, loss = type(self._moment).__name__, self._name_loss()
        allowed = ("NoneType", "NoneType"), ("DemographicParity", "NoneType"), ("BoundedGroupLoss", "SquareLoss")
        if (kind, loss) not in allowed:
            raise InvalidInputError(
                "A linear regression takes DemographicParity, or BoundedGroupLoss with SquareLoss, not "
                f"{kind}{f' with {loss}' if kind == 'BoundedGroupLoss' else ''}."
            )
        rows = self._build_rows(train, linear.squared_loss, link=None)
        return dif.Problem(linear.add_ridge(risk, self._options["alpha"]), rows)


def solution_of(search: Any) -> dif.Solution:
    """Return the predictor that a fitted GridSearch picked as a Solution.

    The multipliers of the picked point of the grid stay as they are, and so does the choice of that point. Fairlearn
    turns them into sample weights that depend on the sizes of the groups; a removal changes those, as fitting the
    predictor again on the remaining people with the same multipliers does. Relabelled targets are not relabelled again.
    Removals are of `solution.problem.people[0]`.

    Args:
        search: A GridSearch that was fitted with a LogisticRegression (also LinearRegression or Ridge, under a
            BoundedGroupLoss) as its estimator.

    Raises:
        InvalidInputError: It is something else, such as an ExponentiatedGradient, whose predictions are drawn at random
            from several predictors.
    """
    if isinstance(search, ExponentiatedGradient):
        mixed = int((np.asarray(search.weights_) > 0).sum()) if hasattr(search, "weights_") else "several"
        raise InvalidInputError(
            f"`search` must be a fitted GridSearch, not an ExponentiatedGradient, a mixture of {mixed} predictors that "
            "minimises no smooth problem; fit a FairClassifier with the same constraint, which is one model."
        )
    if not isinstance(search, GridSearch) or not hasattr(search, "best_idx_"):
        state = "one that is not fitted" if isinstance(search, GridSearch) else f"of type {type(search).__name__}"
        raise InvalidInputError(f"`search` must be a fitted GridSearch, not {state}.")
    predictor = search.predictors_[search.best_idx_]
    moment: Any = getattr(search, "constraints_", search.constraints)
    if not isinstance(moment, UtilityParity | BoundedGroupLoss):
        raise InvalidInputError(
            "The constraint of the GridSearch must be a UtilityParity, such as DemographicParity, or a BoundedGroupLoss"
            f", not of type {type(moment).__name__}."
        )
    multipliers = search.lambda_vecs_.iloc[:, search.best_idx_]
    weights, targets = moment.signed_weights(multipliers).to_numpy(dtype=float), moment.tags["label"].to_numpy()
    if isinstance(moment, UtilityParity):
        costs = 2.0 * targets - 1.0  # of the error rate, the objective of GridSearch
        weights = weights + costs
        targets = (weights > 0).astype(int)
        signs = np.where(weights > 0, 1.0, -1.0)
        factors = {"cost": signs * costs, "utility": signs * np.asarray(moment.utility_diff, dtype=float)}
        means = [_Mean("cost", 1.0, None), *_average_utilities(moment, multipliers)]
    else:
        factors = {"loss": np.ones(len(weights))}
        means = [_Mean("loss", float(c), np.array(moment.tags["group_id"] == g)) for g, c in multipliers.items()]
    fitted = linear.solution_of(predictor, moment.X, targets, sample_weight=np.abs(weights))
    columns = {"target": _encode(predictor, targets), **factors}
    classifies = hasattr(predictor, "classes_")
    loss = linear.logistic_loss if classifies else linear.squared_loss
    people = dif.Samples(
        lambda params, batch: loss(params, (batch["X"], batch["target"])),
        {
            "X": linear.label_rows(moment.X, read_labels(moment.X)),
            **{name: torch.as_tensor(np.array(column, dtype=np.float64)) for name, column in columns.items()},
        },
        name="train",
        check=lambda batch: linear.check_targets(batch["target"], predictor.classes_) if classifies else None,
    )
    objective = _add_penalty(_state_risk(people, means), fitted.problem.objective, people)
    return dif.fit(dif.Problem(objective, fitted.problem.constraints), fitted.params, show_progress=False)


@dataclass(frozen=True, eq=False)
class _Mean:
    """A multiple of the mean of factor · loss over some people."""

    factor: str  # a column of the data
    coefficient: float
    where: np.ndarray | None  # (n,) bool; None means all people


def _average_utilities(moment: Any, multipliers: Any) -> list[_Mean]:
    """Return the sum of all multipliers times constraints as means of utilities."""
    events, groups = moment.tags["event"], moment.tags["group_id"]
    means = []
    for event, group in moment.prob_group_event.index:
        above, below = float(multipliers["+", event, group]), float(multipliers["-", event, group])
        inside = np.array(events == event)
        means.append(_Mean("utility", above - moment.ratio * below, inside))
        means.append(_Mean("utility", below - moment.ratio * above, inside & np.array(groups == group)))
    return means


def _state_risk(people: dif.Samples, means: list[_Mean]) -> dif.Term:
    """Return the weighted loss of GridSearch, divided by the number of people, as a sum of means.

    A weight of fairlearn is cost + Σ multiplier · utility / share of the group. Divided by the number of people, the
    weighted sum is made of means over groups, which a removal renormalises like the shares.
    """

    def weigh(factor: str) -> dif.Samples:
        return people.view(lambda params, batch: batch[factor] * people.loss(params, batch), name=f"{factor} of train")

    views = {factor: weigh(factor) for factor in dict.fromkeys(mean.factor for mean in means)}
    terms = [m.coefficient * views[m.factor].mean(where=m.where) for m in means if m.coefficient != 0]
    return sum(terms[1:], terms[0])


def _add_penalty(risk: dif.Term, objective: dif.Term, people: dif.Samples) -> dif.Term:
    """Add the penalty of the estimator's objective, divided by the number of people n.

    1/n grows when a sample is removed: near n₀ people it is 2/n₀ − n/n₀², and the n in it is a sum over the people.
    """
    n, penalty = len(people), objective.functions
    if not penalty:
        return risk

    def evaluate(params: Any) -> Tensor:
        return torch.stack([c * function.fn(params) for c, function in penalty]).sum()

    each = people.view(lambda params, batch: evaluate(params).expand(len(batch["target"])), name="penalty of train")
    return risk + (2.0 / n) * dif.Function(evaluate, name="penalty") - (1.0 / n**2) * each.sum()


def _encode(predictor: Any, targets: np.ndarray) -> np.ndarray:
    """Return the targets as the loss takes them: −1 and 1 for a classifier, numbers for a regression."""
    return np.where(targets == predictor.classes_[1], 1.0, -1.0) if hasattr(predictor, "classes_") else targets
