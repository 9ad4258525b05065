"""What constrained estimators with the scikit-learn interface have in common: the fitted solution and its influence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

import dif
from dif.adapters.linear_models import build_params, build_samples, read_index
from dif.adapters.validation import require_both
from dif.fairness import check_order


class InfluenceMixin:
    """What the constrained estimators share: fitting, `solution_`, `certificate_`, `samples_` and `influence`.

    An estimator builds its problem from what `fit` kept (`_build_problem`), and reads test samples as its loss takes
    them (`_read_test_samples`).
    """

    coef_: Any
    intercept_: float
    fit_intercept: bool
    _X: Any  # the features that fit was given, (n, d)
    _build_problem: Any
    _read_test_samples: Any

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
        return build_samples(self.samples_.loss, features, targets, read_index(X), name="test")

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

    def _solve(self) -> None:
        """Fit the problem and set the fitted attributes."""
        start = self._build_params(np.zeros(self._X.shape[1]), 0.0)
        self._solution = dif.fit(self._build_problem(), start, show_progress=False)
        params = self._solution.params
        self.coef_ = params["coef"].numpy()
        self.intercept_ = float(params["intercept"]) if "intercept" in params else 0.0
        self.multipliers_ = self._solution.lam.numpy()
        self.kkt_residual_ = self._solution.kkt.residual
        self.n_iter_ = 1  # scikit-learn requires this attribute

    def _build_params(self, coef: Any, intercept: float) -> dict[str, Tensor]:
        return build_params(coef, intercept if self.fit_intercept else None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the solution out of pickles and copies: its losses are functions, which cannot be pickled."""
        state: Any = dict(super().__getstate__())  # type: ignore[misc]
        state.pop("_solution", None)
        return state
