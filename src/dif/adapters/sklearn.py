"""scikit-learn: what is fitted, read as a Solution; and estimators with constraints that follow its contract."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif import InvalidInputError

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.linear_model import LinearRegression, LogisticRegression, LogisticRegressionCV, Ridge
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_array, check_is_fitted, check_X_y, validate_data
except ImportError as error:
    raise ImportError('dif.adapters.sklearn needs scikit-learn 1.6 or newer: pip install "dif[sklearn]"') from error

_FAR = 0.01  # relative KKT residual beyond which a point was fitted on something else


# Losses of one sample; params: coef (d,) or (k, d), and intercept () or (k,) where there is one


def squared(params: dict[str, Tensor], batch: Any) -> Tensor:
    """(x·coef + intercept − y)²."""
    return (_linear(params, batch[0]) - batch[1]) ** 2


def logistic(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Log-loss of a label in {−1, 1}."""
    return torch.nn.functional.softplus(-batch[1] * _linear(params, batch[0]))


def softmax(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Log-loss of a class number."""
    return torch.nn.functional.cross_entropy(_linear(params, batch[0]), batch[1], reduction="none")


def _linear(params: dict[str, Tensor], X: Tensor) -> Tensor:
    found = X @ params["coef"].mT if params["coef"].dim() == 2 else X @ params["coef"]
    return found + params["intercept"] if "intercept" in params else found


def _shrunk(strength: float) -> dif.Function:
    """½ strength ‖coef‖²: the intercept is not shrunk."""
    return dif.Function(lambda params: 0.5 * strength * (params["coef"] ** 2).sum(), name=f"½·{strength:g}‖coef‖²")


# What is fitted already


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
    risk = _risk(squared, X, y, sample_weight)
    alpha = _strength(getattr(estimator, "alpha", 0.0), "alpha")
    params = _params(np.reshape(estimator.coef_, -1), estimator.intercept_ if estimator.fit_intercept else None)
    bounds = [(dif.linear(np.eye(X.shape[1]), of="coef") >= 0.0).named("positive")] if estimator.positive else []
    return dif.Problem(risk + _shrunk(2 * alpha) if alpha else risk, bounds), params


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
    risk = _risk(logistic if two else softmax, X, labels, None if uniform else weights)
    intercept = estimator.intercept_ if estimator.fit_intercept else None
    if two:
        params = _params(estimator.coef_[0], None if intercept is None else intercept[0])
    else:
        params = _params(estimator.coef_, intercept)
    fixed = []
    if not two and intercept is not None:  # a number added to all of them changes nothing
        fixed = [(dif.linear(np.ones(len(intercept)), of="intercept") == float(np.sum(intercept))).named("intercepts")]
    free = getattr(estimator, "penalty", "l2") is None or np.isinf(estimator.C)
    return dif.Problem(risk if free else risk + _shrunk(1.0 / estimator.C), fixed), params


def _samples(loss: Any, X: Any, y: Any) -> dif.Samples:
    target = torch.as_tensor(np.array(y))
    return dif.Samples(loss, (torch.as_tensor(np.array(X, dtype=np.float64)), target), name="train")


def _risk(loss: Any, X: Any, y: Any, weights: Any) -> dif.Term:
    train = _samples(loss, X, y)
    return train.sum() if weights is None else train.weighted(np.asarray(weights, dtype=float))


def _strength(value: Any, name: str) -> float:
    number = np.asarray(value)
    known = number.ndim == 0 and number.dtype.kind in "if" and np.isfinite(number) and float(number) >= 0
    if not known or (name == "C" and float(number) == 0):
        raise InvalidInputError(
            name,
            measured=repr(value),
            threshold="one finite number, ≥ 0" + (", not 0" if name == "C" else ""),
            meaning="It weighs a part of the objective, or loosens a bound.",
            cure="Pass a number.",
        )
    return float(number)


def _params(coef: Any, intercept: Any) -> dict[str, Tensor]:
    params = {"coef": torch.tensor(np.array(coef, dtype=np.float64))}
    return params if intercept is None else params | {"intercept": torch.tensor(np.array(intercept, dtype=np.float64))}


# Estimators with constraints


class _Influenced:
    """What the constrained estimators share: the solution behind them, and its influence."""

    _n_coef: int

    @property
    def solution_(self) -> dif.Solution:
        """θ̄ and λ̄ of the problem that was solved, made anew from what fit kept."""
        check_is_fitted(self, "coef_")
        problem, params = self._stated()  # type: ignore[attr-defined]
        return dif.Solution(problem, params, torch.as_tensor(self.multipliers_))  # type: ignore[attr-defined]

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
        problem, params = self._stated()  # type: ignore[attr-defined]
        found = dif.fit(problem, params, show_progress=False)
        self.coef_ = found.params["coef"].numpy()
        self.intercept_ = float(found.params["intercept"]) if "intercept" in found.params else 0.0
        self.multipliers_ = found.lam.numpy()
        self.kkt_residual_ = found.kkt.residual
        self.n_iter_ = 1

    def _start(self) -> dict[str, Tensor]:
        known = getattr(self, "coef_", np.zeros(self._n_coef))
        intercept = getattr(self, "intercept_", 0.0) if self.fit_intercept else None  # type: ignore[attr-defined]
        return _params(known, intercept)


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
        self._X, self._y = (np.array(part) for part in found)
        self._n_coef = self._X.shape[1]
        self._fitted = deepcopy((self.A_eq, self.b_eq, self.A_ub, self.b_ub)), _strength(self.alpha, "alpha")
        for gone in ("coef_", "intercept_"):
            self.__dict__.pop(gone, None)
        self._solve()
        return self

    def predict(self, X: Any) -> Any:
        """X·coef + intercept."""
        check_is_fitted(self, "coef_")
        return validate_data(self, X, dtype=np.float64, reset=False) @ self.coef_ + self.intercept_

    def _stated(self) -> tuple[dif.Problem, dict[str, Tensor]]:
        risk = _samples(squared, self._X, self._y).sum()
        rows = []
        (A_eq, b_eq, A_ub, b_ub), alpha = self._fitted
        for A, b, equal in ((A_eq, b_eq, True), (A_ub, b_ub, False)):
            if A is not None:
                left = dif.linear(np.atleast_2d(np.asarray(A, dtype=float)), of="coef")
                right = torch.as_tensor(np.array(b, dtype=float))
                rows.append((left == right).named("A_eq") if equal else (left <= right).named("A_ub"))
        return dif.Problem(risk + _shrunk(2 * alpha) if alpha else risk, rows), self._start()

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
        C, tau = _strength(self.C, "C"), _strength(self.tau, "tau")
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
        self._n_coef = self._X.shape[1]
        for gone in ("coef_", "intercept_"):
            self.__dict__.pop(gone, None)
        self._solve()
        return self

    def decision_function(self, X: Any) -> Any:
        """X·coef + intercept."""
        check_is_fitted(self, "coef_")
        X = validate_data(self, X, dtype=None if self._place is not None else np.float64, reset=False)
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

    def _parted(self, X: Any) -> tuple[Any, Any]:
        """Features and group membership."""
        if self._place is None:
            return np.array(X), None
        members = X[:, self._place]
        strange = [value for value in members.tolist() if not isinstance(value, str | int | float)]
        if strange:
            raise TypeError(f"argument must be a string or a number, not {type(strange[0]).__name__}, to name a group")
        return check_array(np.delete(X, self._place, 1), dtype="float64"), members.astype(str)

    def _stated(self) -> tuple[dif.Problem, dict[str, Tensor]]:
        train = _samples(logistic, self._X, self._y)
        risk, (C, tau) = train.mean(), self._fitted
        several = enumerate(() if self.groups_ is None else self.groups_)
        rows = [(train.mean(where=self._group == g) <= risk + tau).named(str(name)) for g, name in several]
        return dif.Problem(C * train.sum() + _shrunk(1.0), rows), self._start()

    def _seen(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        X = validate_data(self, X, dtype=None if self._place is not None else np.float64, reset=False)
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
