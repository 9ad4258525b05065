"""Predictions and targets of linear estimators with the scikit-learn interface: regressions and classifiers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import expit
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from dif import InvalidInputError
from dif.adapters.validation import refuse_words, validate


class LinearRegressorMixin:
    """Read numbers as targets, and predict X·coef + intercept."""

    coef_: Any
    intercept_: float
    _X: Any
    _y: Any

    def predict(self, X: Any) -> Any:
        """Return X·coef + intercept."""
        check_is_fitted(self, "coef_")
        return validate(self, X, dtype=np.float64, reset=False) @ self.coef_ + self.intercept_

    def _keep_training_samples(self, X: Any, y: Any) -> None:
        """Check the training samples and keep a copy."""
        refuse_words(y, "y")
        validated = validate(self, X, y, dtype=np.float64, y_numeric=True)
        self._X, self._y = (np.array(part, dtype=np.float64) for part in validated)

    def _read_test_samples(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        refuse_words(y, "y")
        X, y = validate(self, X, y, dtype=np.float64, y_numeric=True, reset=False)
        return torch.as_tensor(np.array(X)), torch.as_tensor(np.array(y, dtype=np.float64))


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
        return validate(self, X, dtype=np.float64, reset=False)

    def _encode_classes(self, y: Any, present: Any = slice(None)) -> np.ndarray:
        """Set `classes_` and return −1 and 1 for the training samples; `present` are those of weight above 0."""
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        self.classes_, found = np.unique(y), len(np.unique(y[present]))
        if kind != "binary" or found < 2:
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}, "
                f"with {found} class{'' if found == 1 else 'es'} of weight above 0."
            )
        return np.where(y == self.classes_[1], 1.0, -1.0)

    def _read_test_samples(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        X, y, known = self._read_features(X), np.asarray(y), self.classes_.tolist()
        unknown = sorted({str(label) for label in y.tolist() if label not in known}) if y.ndim == 1 else []
        if unknown or y.shape != (len(X),):
            given = f"{len(y)} labels" if y.ndim == 1 else f"labels of shape {y.shape}"
            raise InvalidInputError(
                f"There are {given} for {len(X)} test samples"
                + (f", with {len(unknown)} unknown labels, the first {unknown[0]!r}." if unknown else "."),
                f"Each sample must have one label, {known[0]!r} or {known[1]!r}.",
                "The loss is only defined for classes that the model was fitted on.",
                "Use the labels that were passed to fit.",
            )
        return torch.as_tensor(np.array(X)), torch.as_tensor(np.where(y == self.classes_[1], 1.0, -1.0))
