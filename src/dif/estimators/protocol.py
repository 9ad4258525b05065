"""The interface of every estimator."""

from __future__ import annotations

import os
from typing import Any, Protocol, runtime_checkable

from dif.estimators.change import Change
from dif.estimators.influence import Influence
from dif.problem.perturbation import Perturbation


@runtime_checkable
class Estimator(Protocol):
    """Predicts what perturbations change. Any object with these three members can be used as an estimator.

    >>> import dif
    >>> isinstance(dif.Retraining, type), all(hasattr(dif.Retraining, part) for part in ("name", "change", "scores"))
    (True, True)
    """

    @property
    def name(self) -> str:
        """Name of the estimator in results and reports."""
        ...

    def change(self, perturbation: Perturbation) -> Change:
        """Predict Δθ and Δλ of one perturbation, carried out in full."""
        ...

    def scores(
        self,
        target: Any,
        perturbations: Perturbation,
        *,
        out: str | os.PathLike[str] | None = None,
        jobs: int = 1,
        show_progress: bool = True,
    ) -> Influence:
        """Predict the change of each target under each perturbation.

        Args:
            target: A Term, a list of Terms, a dict of Terms by name, or Samples (one target per sample).
            perturbations: One or many.
            out: File for the scores, ending in .npy or .zarr, filled as they are computed. After an interruption the
                same call resumes.
            jobs: Processes that share the work (joblib; its `parallel_config` chooses the backend).
            show_progress: Show a progress bar on a terminal or in a notebook.
        """
        ...
