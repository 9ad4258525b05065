"""What every estimator offers."""

from __future__ import annotations

import os
from typing import Any, Protocol, runtime_checkable

from dif.estimators.influence import Change, Influence
from dif.problem.perturbation import Perturbation


@runtime_checkable
class Estimator(Protocol):
    """An answer to the question what a perturbation changes. Write your own by offering these three.

    >>> import dif
    >>> isinstance(dif.Retraining, type), all(hasattr(dif.Retraining, part) for part in ("name", "change", "scores"))
    (True, True)
    """

    @property
    def name(self) -> str:
        """What results and reports call it."""
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
            target: A Term, a list of Terms, or Samples (one target per sample).
            perturbations: What is done, one or many.
            out: A file ending in .npy or .zarr that the scores go to as they come. The same call goes on where an
                earlier one was interrupted.
            jobs: Processes that share the work (joblib; its `parallel_config` chooses the backend).
            show_progress: Show a bar on a terminal.
        """
        ...
