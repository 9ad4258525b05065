"""scikit-learn: fitted models as a Solution, and constrained estimators with the scikit-learn interface.

The estimators report the influence of their training samples. The adapter for fairlearn builds on the same parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

import dif
from dif import InvalidInputError
from dif.runtime.inputs import (
    as_index,
    as_numbers,
    check_labels,
    check_number,
    check_order,
    read_labels,
    read_numbers,
    refuse_text,
    write_label,
)

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.linear_model import LinearRegression, LogisticRegression, LogisticRegressionCV, Ridge
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_array, check_is_fitted, check_X_y, validate_data  # since 1.6
except ImportError as error:
    raise ImportError(
        'dif.adapters.sklearn needs scikit-learn 1.6 or newer: pip install "directional-influence[sklearn]"'
    ) from error

__all__ = ["ConstrainedLinearRegression", "FairLogisticRegression", "solution_of"]

_MAX_RESIDUAL = 0.01  # relative KKT residual above which the fitted values belong to other data

# Losses of a batch (X, targets), one number per sample.
# params: "coef" (d,) or (k, d), and "intercept" () or (k,) if the model has one.


def squared_loss(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return (x·coef + intercept − y)² for every sample."""
    return (predict_linear(params, batch[0]) - batch[1]) ** 2


def logistic_loss(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return the log-loss for every sample, with labels −1 and 1."""
    return torch.nn.functional.softplus(-batch[1] * predict_linear(params, batch[0]))


def softmax_loss(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return the log-loss for every sample, with labels 0 … k − 1."""
    return torch.nn.functional.cross_entropy(predict_linear(params, batch[0]), batch[1], reduction="none")


def predict_linear(params: dict[str, Tensor], X: Tensor) -> Tensor:
    """Return X·coef + intercept."""
    product = X @ params["coef"].mT if params["coef"].dim() == 2 else X @ params["coef"]
    return product + params["intercept"] if "intercept" in params else product


def add_ridge(risk: dif.Term, alpha: Any) -> dif.Term:
    """Add alpha‖coef‖² to a sum of squares; the intercept is not penalised."""
    return risk + build_ridge(2 * alpha) if check_number(alpha, "alpha", zero=True) else risk


def build_ridge(strength: float) -> dif.Function:
    """Build ½ strength ‖coef‖²; the intercept is not penalised."""
    return dif.Function(lambda params: 0.5 * strength * (params["coef"] ** 2).sum(), name=f"½·{strength:g}‖coef‖²")


def label_rows(X: Any, index: Any) -> Any:
    """Return a copy of X in double precision: a DataFrame with this index, or an array if there is none."""
    rows = np.array(X, dtype=np.float64)
    if index is None:
        return rows
    import pandas

    return pandas.DataFrame(rows, index=index)


def build_samples(
    loss: Any, X: Any, y: Any, index: Any = None, name: str = "train", classes: Any = None
) -> dif.Samples:  # fmt: skip
    """Build Samples from the rows of X, their targets and, unless it is None, the index of a DataFrame.

    `classes` are what the targets of a classifier stand for; new samples with other targets are refused.
    """
    check = None if classes is None else lambda batch: check_targets(batch[1], classes)
    return dif.Samples(loss, (label_rows(X, index), torch.as_tensor(np.array(y))), name=name, check=check)


def check_targets(targets: Tensor, classes: Any) -> None:
    """Refuse targets of new samples that stand for none of the classes."""
    codes = [-1, 1] if len(classes) == 2 else list(range(len(classes)))
    unknown = [target for target in targets.tolist() if target not in codes]
    if unknown:
        known = [f"{code} for {label!r}" for code, label in zip(codes, np.asarray(classes).tolist(), strict=True)]
        raise InvalidInputError(
            f"The target of a new sample must be {', '.join(known)}, not {unknown[0]:g}; `relabel` of an estimator "
            "takes the labels that it was fitted with."
        )


def find_rows(rows: Any, index: Any) -> list[Any]:
    """Return the positions of samples that were given by position, or by label in the index of a DataFrame.

    Text and parts of an index are labels. Integers are positions; those that may be meant as labels are refused.
    """
    listed = [rows] if isinstance(rows, str) or not isinstance(rows, Iterable) else list(rows)
    numbers, places = [as_index(row) for row in listed], {}
    for place, label in enumerate(() if index is None else index):
        places.setdefault(write_label(label), []).append(place)
    found = [places.get(write_label(row), []) for row in listed]
    if not hasattr(rows, "get_indexer") and None not in numbers:
        if all(found) and found != [[number] for number in numbers]:
            raise InvalidInputError(
                f"`rows` must not be integers such as {numbers[0]}, which are positions of some samples and labels of "
                "others; pass a part of the index, such as X.index[positions]."
            )
        return numbers
    wrong = [row for row, known in zip(listed, found, strict=True) if len(known) != 1]
    if wrong:
        raise InvalidInputError(f"`rows` must be positions, or labels that the index of X has once, not {wrong[0]!r}.")
    return [place for (place,) in found]


def build_params(coef: Any, intercept: Any) -> dict[str, Tensor]:
    """Build the parameters coef, and intercept unless it is None, in double precision."""
    params = {"coef": coef} if intercept is None else {"coef": coef, "intercept": intercept}
    return {name: torch.tensor(np.array(value, dtype=np.float64)) for name, value in params.items()}


@contextmanager
def name_text(X: Any, names: Sequence[str] = ()) -> Iterator[None]:
    """Name the columns of text in X, where there are any and scikit-learn's checks fail."""
    try:
        yield
    except (TypeError, ValueError):
        refuse_text(X, "X", names)
        raise


def validate(estimator: Any, X: Any, *y: Any, text: bool = False, **options: Any) -> Any:
    """Return X, or X and y, as `validate_data` of scikit-learn does, as numbers unless `text` is allowed."""
    if text:
        return validate_data(estimator, X, *y, dtype=None, **options)
    with name_text(X):
        return validate_data(estimator, X, *y, dtype=np.float64, **options)


def require_both(X: Any, y: Any) -> None:
    """Refuse test samples without targets, and targets without test samples."""
    if X is None or y is None:
        raise InvalidInputError(f"`{'X' if X is None else 'y'}` is None; test samples need both X and y.")


class InfluenceMixin:
    """What the constrained estimators share: fitting, `solution_`, `certificate_`, `samples_` and `influence`.

    An estimator builds its problem from what `fit` kept (`_build_problem`), its options among them, and reads samples
    and targets as its loss takes them (`_read_training_samples`, `_read_test_samples`, `_read_targets`).
    """

    coef_: Any
    intercept_: float
    fit_intercept: bool
    _X: Any  # the features that fit was given, (n, d)
    _index: Any  # the index of their DataFrame, or None
    _options: dict[str, Any]  # the arguments of the constructor when the model was fitted
    _build_problem: Any
    _read_training_samples: Any
    _read_test_samples: Any
    _read_targets: Any

    @property
    def solution_(self) -> dif.Solution:
        """The fitted problem with its parameters and multipliers: one object per fit."""
        check_is_fitted(self, "coef_")
        if not hasattr(self, "_solution"):  # the estimator was pickled or copied, which leaves the solution behind
            params = self._build_params(self.coef_, self.intercept_)
            self._solution = dif.Solution(self._build_problem(), params, torch.as_tensor(self.multipliers_))
        return self._solution

    @property
    def certificate_(self) -> dif.Certificate:
        """Whether the fitted point is a solution at which influence exists, and why."""
        return dif.Certificate.of(self.solution_)

    @property
    def samples_(self) -> dif.Samples:
        """The training samples, for removals: `model.samples_.remove_each()`."""
        return self.solution_.problem.people[0]

    def test_samples(self, X: Any, y: Any) -> dif.Samples:
        """Return test samples with the loss of the model, as targets of any estimator.

        `model.test_samples(X, y).mean()` is the mean test loss. The loss is that of one sample, without C or weights:
        the log-loss of a classifier, the squared error of a regression.
        """
        check_is_fitted(self, "coef_")
        require_both(X, y)
        check_order(X=X, y=y)
        features, targets = self._read_test_samples(X, y)
        return build_samples(self.samples_.loss, features, targets, read_labels(X), name="test")

    def relabel(self, rows: Any, y: Any) -> dif.Perturbation:
        """Return one perturbation that gives training samples other targets, as if fit had been given these.

        Args:
            rows: The samples, by position, or by label in the index of the DataFrame that fit was given.
            y: Their targets as fit takes them, one for each sample or one for all.
        """
        samples, given = self.samples_, find_rows(rows, self._index)
        index, labels = np.array(samples.check_indices(given)), None if self._index is None else self._index[given]
        check_labels(y, labels, "`y`", "`rows`")
        targets = self._read_targets(np.full(len(index), y) if np.ndim(y) == 0 else y, len(index), "relabelled")
        new = label_rows(self._X[index], labels), torch.as_tensor(targets)
        return samples.remove(index) + samples.add(new, like=self._find_like(index, targets))

    def _find_like(self, index: Any, targets: Any) -> Any:
        """Return the index of a sample with the memberships of each relabelled one: without other rules, itself."""
        return index

    def influence(self, X: Any = None, y: Any = None, *, indices: Any = None) -> dif.Influence:
        """Predict what would change without each training sample, without refitting.

        Args:
            X: Test samples, to predict the change of the loss of each. None: predict the change of every coefficient
                and of the intercept.
            y: Targets of the test samples.
            indices: Indices of the training samples to remove, one at a time. None: all.

        Returns:
            Scores (training samples, test samples or coefficients), with `.top()`, `.to_frame()` and `.save()`.
        """
        if X is None and y is None:
            check_is_fitted(self, "coef_")
            names = self._name_parameters()
            rows = np.eye(len(names))
            target: Any = [dif.linear(row, name=name).as_term() for row, name in zip(rows, names, strict=True)]
        else:
            target = self.test_samples(X, y)
        return self._score(target, indices)

    def _score(self, target: Any, indices: Any) -> dif.Influence:
        """Return the scores of a target, for removals of single training samples."""
        removals = self.samples_.remove_each(indices)
        return dif.DirectionalInfluence(self.solution_).scores(target, removals, show_progress=False)

    def _name_parameters(self) -> list[str]:
        """Return the names of the coefficients, and of the intercept if there is one."""
        features = list(getattr(self, "feature_names_in_", range(len(self.coef_))))
        group_column = getattr(self, "_group_column", None)
        if group_column is not None and hasattr(self, "feature_names_in_"):
            features.pop(group_column)
        names = [f"coef[{feature}]" for feature in features]
        return [*names, "intercept"] if self.fit_intercept else names

    def _solve(self, X: Any) -> Any:
        """Fit the problem to the samples that were read from X, set the fitted attributes, and return the model."""
        self._index, self._options = read_labels(X), deepcopy(self.get_params(deep=False))  # type: ignore[attr-defined]
        start = self._build_params(np.zeros(self._X.shape[1]), 0.0)
        self._solution = dif.fit(self._build_problem(), start, show_progress=False)
        params = self._solution.params
        self.coef_ = params["coef"].numpy()
        self.intercept_ = float(params["intercept"]) if "intercept" in params else 0.0
        self.multipliers_ = self._solution.lam.numpy()
        self.kkt_residual_ = self._solution.kkt.residual
        self.n_iter_ = 1  # scikit-learn requires this attribute
        return self

    def _build_params(self, coef: Any, intercept: float) -> dict[str, Tensor]:
        return build_params(coef, intercept if self.fit_intercept else None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the solution out of pickles and copies: its losses are functions, which cannot be pickled."""
        state: Any = dict(super().__getstate__())  # type: ignore[misc]
        state.pop("_solution", None)
        return state


class LinearRegressorMixin:
    """Read numbers as targets, and predict X·coef + intercept."""

    coef_: Any
    intercept_: float
    _X: Any
    _y: Any

    def predict(self, X: Any) -> Any:
        """Return X·coef + intercept."""
        check_is_fitted(self, "coef_")
        return validate(self, X, reset=False) @ self.coef_ + self.intercept_

    def _read_training_samples(self, X: Any, y: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        refuse_text(y, "y")
        X, y = validate(self, X, y, y_numeric=True, **options)
        return np.array(X), np.array(y, dtype=np.float64)

    def _read_test_samples(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        return self._read_training_samples(X, y, reset=False)

    def _read_targets(self, y: Any, count: int, _: str) -> np.ndarray:
        return read_numbers(y, "y", count).numpy()


class LinearClassifierMixin:
    """Read two classes as −1 and 1, and predict them from X·coef + intercept."""

    classes_: Any
    coef_: Any
    intercept_: float

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.classifier_tags.multi_class = False
        return tags

    def decision_function(self, X: Any) -> Any:
        """Return X·coef + intercept."""
        check_is_fitted(self, "coef_")
        return self._read_features(X) @ self.coef_ + self.intercept_

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class, (n, 2)."""
        scores = self.decision_function(X)
        return np.stack([expit(-scores), expit(scores)], 1)

    def predict(self, X: Any) -> Any:
        """Return the more probable class of each sample."""
        check_is_fitted(self, "coef_")
        return self.classes_[(self.decision_function(X) > 0).astype(int)]

    def _read_features(self, X: Any) -> Any:
        """Return the features of samples that the model was not fitted on, (n, d)."""
        return validate(self, X, reset=False)

    def _encode_classes(self, y: Any, weights: Any = None) -> np.ndarray:
        """Set `classes_` and return −1 and 1 for the training samples."""
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        self.classes_, found = np.unique(y), len(np.unique(y if weights is None else y[weights > 0]))
        if kind != "binary" or found < 2:
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}, "
                f"with {found} class{'' if found == 1 else 'es'} of weight above 0."
            )
        return np.where(y == self.classes_[1], 1.0, -1.0)

    def _read_test_samples(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        features = self._read_features(X)
        return features, self._read_targets(y, len(features), "test")

    def _read_targets(self, y: Any, count: int, kind: str) -> np.ndarray:
        """Return −1 and 1 for the labels of samples of a kind, such as "test"."""
        y, known = np.asarray(y), self.classes_.tolist()
        unknown = sorted({str(label) for label in y.tolist() if label not in known}) if y.ndim == 1 else []
        if unknown or y.shape != (count,):
            given = f"{len(y)} labels" if y.ndim == 1 else f"labels of shape {y.shape}"
            given += f", with {len(unknown)} unknown ones, the first {unknown[0]!r}" if unknown else ""
            raise InvalidInputError(
                f"Each of the {count} {kind} samples must have one label, {known[0]!r} or {known[1]!r}, not {given}."
            )
        return np.where(y == self.classes_[1], 1.0, -1.0)


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

    Examples:
        >>> X, y = np.arange(12.0).reshape(6, 2) % 5, np.arange(6.0)
        >>> model = ConstrainedLinearRegression(A_eq=[[1.0, 1.0]], b_eq=1.0).fit(X, y)
        >>> round(float(model.coef_.sum()), 6)
        1.0
    """

    def __init__(
        self, A_eq: Any = None, b_eq: Any = 0.0, A_ub: Any = None, b_ub: Any = 0.0, *,
        alpha: float = 0.0, fit_intercept: bool = True,
    ) -> None:  # fmt: skip
        self.A_eq, self.b_eq, self.A_ub, self.b_ub = A_eq, b_eq, A_ub, b_ub
        self.alpha, self.fit_intercept = alpha, fit_intercept

    def fit(self, X: Any, y: Any) -> ConstrainedLinearRegression:
        """Solve the problem to a KKT residual of 1e-10."""
        check_order(X=X, y=y)
        self._X, self._y = self._read_training_samples(X, y)
        return self._solve(X)

    def _build_problem(self) -> dif.Problem:
        risk, rows = build_samples(squared_loss, self._X, self._y, self._index).sum(), []
        for name in ("eq", "ub"):
            A, b = (self._options[f"{part}_{name}"] for part in "Ab")
            if A is not None:
                left = dif.linear(torch.atleast_2d(as_numbers(A, f"`A_{name}`")), of="coef")
                right = as_numbers(b, f"`b_{name}`")
                rows.append((left == right if name == "eq" else left <= right).named(f"A_{name}"))
        return dif.Problem(add_ridge(risk, self._options["alpha"]), rows)


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
        given, y = validate(self, X, y, text=self.group is not None)
        self._group_column = self._find_group_column()
        self._y = self._encode_classes(y)
        self._X, members = self._split_group(given)
        self.groups_, self._group_index = (None, None) if members is None else np.unique(members, return_inverse=True)
        return self._solve(X)

    def _find_group_column(self) -> int | None:
        """Return the number of the group column; None if there is none."""
        if self.group is None:
            return None
        names, columns = list(getattr(self, "feature_names_in_", [])), int(getattr(self, "n_features_in_", 0))
        if columns < 2:
            raise ValueError(f"X has n_features = {columns}. It needs at least one feature beside the group column.")
        if isinstance(self.group, str) and self.group in names:
            return names.index(self.group)
        number = self.group if isinstance(self.group, int | np.integer) and not isinstance(self.group, bool) else -1
        if not 0 <= int(number) < columns:
            named = f"one of the columns {', '.join(map(str, names))}, or " if names else ""
            numbers = f"a column number from 0 to {columns - 1}"
            raise InvalidInputError(f"`group` must be {named}{numbers}, not {self.group!r}.")
        return int(number)

    def _read_features(self, X: Any) -> Any:
        """Return the features of samples that the model was not fitted on, without the group column."""
        return self._split_group(validate(self, X, text=self._group_column is not None, reset=False))[0]

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
        names = [name for name in getattr(self, "feature_names_in_", ()) if name != self.group]
        with name_text(features, names):
            return check_array(features, dtype="float64"), members.astype(str)

    def _build_problem(self) -> dif.Problem:
        train = build_samples(logistic_loss, self._X, self._y, self._index, classes=self.classes_)
        C, tau = check_number(self._options["C"], "C"), check_number(self._options["tau"], "tau", zero=True)
        if self.groups_ is not None and not tau > 0:
            raise InvalidInputError(f"`tau` must be above 0 if there is a group column, such as 0.001, not {tau:g}.")
        groups, most = enumerate(() if self.groups_ is None else self.groups_), train.mean() + tau
        rows = [(train.mean(where=self._group_index == g) <= most).named(str(name)) for g, name in groups]
        return dif.Problem(C * train.sum() + build_ridge(1.0), rows)


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
            f"`estimator` must be a LinearRegression, Ridge or LogisticRegression, not a {type(estimator).__name__}; "
            "state other objectives as a dif.Problem, and pass the fitted values to dif.Solution(problem, params)."
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
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return X, y and the weights as arrays; None for the latter where there are none."""
    check_is_fitted(estimator, "coef_")
    check_order(X=X, y=y, sample_weight=sample_weight)
    with name_text(X):
        features, targets = check_X_y(X, y, dtype="float64", **options)
    if features.shape[1] != estimator.n_features_in_:
        raise InvalidInputError(
            f"`X` must have {estimator.n_features_in_} columns, as in fit, not {features.shape[1]}."
        )
    weights = None if sample_weight is None else read_numbers(sample_weight, "sample_weight", len(features)).numpy()
    return features, targets, weights


def _read_regressor(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[dif.Problem, dict[str, Tensor]]:
    """Return the problem that a LinearRegression or Ridge solves, and its fitted parameters."""
    refuse_text(y, "y")
    features, targets, weights = _read_training_samples(estimator, X, y, sample_weight, y_numeric=True)
    train = build_samples(squared_loss, features, targets, read_labels(X))
    risk = train.sum() if weights is None else train.weighted(weights)
    params = build_params(np.reshape(estimator.coef_, -1), estimator.intercept_ if estimator.fit_intercept else None)
    bounds = [(dif.linear(np.eye(features.shape[1]), of="coef") >= 0.0).named("positive")] if estimator.positive else []
    return dif.Problem(add_ridge(risk, getattr(estimator, "alpha", 0.0)), bounds), params


def _read_classifier(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[dif.Problem, dict[str, Tensor]]:
    """Return the problem that a LogisticRegression solves, and its fitted parameters."""
    features, targets, weights = _read_training_samples(estimator, X, y, sample_weight)
    if estimator.l1_ratio or getattr(estimator, "penalty", None) in ("l1", "elasticnet"):
        raise InvalidInputError(
            f"LogisticRegression must have l1_ratio=0, a smooth penalty, not l1_ratio={estimator.l1_ratio}; fit again, "
            "or write the problem in CVXPY and use dif.adapters.cvxpy."
        )
    if estimator.solver == "liblinear" and estimator.fit_intercept:
        raise InvalidInputError(
            "A LogisticRegression with an intercept must not be fitted with solver='liblinear', which penalises it."
        )
    classes, binary = estimator.classes_, len(estimator.classes_) == 2
    codes = np.searchsorted(classes, targets)
    if estimator.class_weight is not None:
        balance = compute_class_weight(estimator.class_weight, classes=classes, y=targets, sample_weight=weights)
        weights = balance[codes] if weights is None else weights * balance[codes]
    loss, labels = (logistic_loss, 2.0 * codes - 1.0) if binary else (softmax_loss, codes)
    train = build_samples(loss, features, labels, read_labels(X), classes=classes)
    risk = train.sum() if weights is None else train.weighted(weights)
    intercept, constraints = estimator.intercept_ if estimator.fit_intercept else None, []
    if binary:
        params = build_params(estimator.coef_[0], None if intercept is None else intercept[0])
    else:
        params = build_params(estimator.coef_, intercept)
        if intercept is not None:  # adding a constant to all intercepts changes no loss
            total = dif.linear(np.ones(len(intercept)), of="intercept")
            constraints = [(total == float(np.sum(intercept))).named("intercepts")]
    no_penalty = getattr(estimator, "penalty", "l2") is None or np.isinf(estimator.C)
    return dif.Problem(risk if no_penalty else risk + build_ridge(1.0 / estimator.C), constraints), params
