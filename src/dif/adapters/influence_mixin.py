"""What constrained estimators with the scikit-learn interface have in common: the fitted solution and its influence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

import dif
from dif.adapters.linear_models import build_params


class InfluenceMixin:
    """What the constrained estimators share: fitting, `solution_`, `certificate_` and `influence`."""

    @property
    def solution_(self) -> dif.Solution:
        """The fitted problem with its parameters and multipliers, rebuilt from the fitted attributes."""
        check_is_fitted(self, "coef_")
        params = self._build_params(self.coef_, self.intercept_)
        return dif.Solution(self._build_problem(), params, torch.as_tensor(self.multipliers_))  # type: ignore[attr-defined]

    @property
    def certificate_(self) -> dif.Certificate:
        """Whether the fitted point is a solution at which influence exists, and why."""
        return dif.Certificate.of(self.solution_)

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
        solution = self.solution_
        (train,) = solution.problem.people
        if X is None:
            names = self._parameter_names()
            rows = np.eye(len(names))
            target: Any = [dif.linear(row, name=name).as_term() for row, name in zip(rows, names, strict=True)]
        else:
            target = dif.Samples(train.loss, self._read_test_samples(X, y), name="test")  # type: ignore[attr-defined]
        return dif.DirectionalInfluence(solution).scores(target, train.remove_each(indices), show_progress=False)

    def _parameter_names(self) -> list[str]:
        """Return the names of the coefficients, and of the intercept if there is one."""
        features = list(getattr(self, "feature_names_in_", range(len(self.coef_))))
        group_column = getattr(self, "_group_column", None)
        if group_column is not None and hasattr(self, "feature_names_in_"):
            features.pop(group_column)
        names = [f"coef[{feature}]" for feature in features]
        return [*names, "intercept"] if self.fit_intercept else names  # type: ignore[attr-defined]

    def _solve(self) -> None:
        """Fit the problem and set the fitted attributes."""
        start = self._build_params(np.zeros(self._X.shape[1]), 0.0)  # type: ignore[attr-defined]
        solution = dif.fit(self._build_problem(), start, show_progress=False)  # type: ignore[attr-defined]
        self.coef_ = solution.params["coef"].numpy()
        self.intercept_ = float(solution.params["intercept"]) if "intercept" in solution.params else 0.0
        self.multipliers_ = solution.lam.numpy()
        self.kkt_residual_ = solution.kkt.residual
        self.n_iter_ = 1  # scikit-learn requires this attribute

    def _build_params(self, coef: Any, intercept: float) -> dict[str, Tensor]:
        return build_params(coef, intercept if self.fit_intercept else None)  # type: ignore[attr-defined]
