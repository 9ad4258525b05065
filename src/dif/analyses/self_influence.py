"""Self-influence: the effect of each sample on its own loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dif.errors import InvalidInputError
from dif.estimators.first_order import FirstOrderEstimator
from dif.estimators.newton import NewtonInfluence
from dif.estimators.protocol import Estimator
from dif.optimality.solution import Solution
from dif.problem.samples import Samples
from dif.problem.weights import find_indispensable
from dif.results.influence import Influence
from dif.runtime.work import progress

_CHUNK = 128  # samples scored at once: the scores of a chunk are (128, 128), of which the diagonal is kept


def self_influence(
    estimator: Estimator, samples: Samples, indices: Iterable[int] | None = None, *, show_progress: bool = True
) -> Influence:
    """Score how much the loss of each sample would rise if it were removed.

    The score is large where the other samples do not support this one, so mislabelled samples stand out. Under
    constraints a sample acts through every term that contains it, so pass a DirectionalInfluence; ClassicalInfluence
    sees only the objective. A sample that is the only one in a term of the problem cannot be removed: its score is NaN.
    """
    solution = getattr(estimator, "solution", None)
    if not isinstance(estimator, Estimator) or not isinstance(solution, Solution):
        raise InvalidInputError(
            f"`estimator` must be an estimator of a dif.Solution, not {type(estimator).__name__}; pass "
            "dif.DirectionalInfluence(solution), for example."
        )
    needed = find_indispensable(solution.problem, samples)
    index = list(range(len(samples))) if indices is None else samples.check_indices(indices)
    removable = [i for i in index if i not in needed]
    options: dict[str, Any] = {"show_progress": False}
    if isinstance(estimator, FirstOrderEstimator | NewtonInfluence):
        options["assess"] = 0
    scores: dict[int, float] = {}
    diagnostics = {}
    with progress("self-influence", len(index), show_progress) as report:
        for begin in range(0, len(removable), _CHUNK):
            chunk = removable[begin : begin + _CHUNK]
            influence = estimator.scores(samples.take(torch.tensor(chunk)), samples.remove_each(chunk), **options)
            scores |= dict(zip(chunk, influence.values.diagonal().tolist(), strict=True))
            diagnostics = influence.diagnostics
            report(begin + len(chunk))
    column = torch.tensor([scores.get(i, float("nan")) for i in index], dtype=torch.float64)[:, None]
    return Influence(column, samples.remove_each(index), ("own loss",), f"{estimator.name}, self", diagnostics)
