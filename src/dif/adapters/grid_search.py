"""The predictor that fairlearn's GridSearch picks, as a Solution with fixed multipliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairlearn.reductions import BoundedGroupLoss, ExponentiatedGradient, GridSearch, UtilityParity
from torch import Tensor

import dif
from dif import InvalidInputError
from dif.adapters.linear_models import label_rows, logistic_loss, read_index, squared_loss
from dif.adapters.sklearn import solution_of as read_estimator


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
            f"`search` is an ExponentiatedGradient, a mixture of {mixed} predictors.",
            "It must be a fitted GridSearch.",
            "Each prediction of the mixture is drawn at random, and its weights are those of a game that was stopped. "
            "It minimises no smooth problem, so it has no derivative in the data.",
            "Fit a FairClassifier with the same constraint, which is one model, or a GridSearch.",
        )
    if not isinstance(search, GridSearch) or not hasattr(search, "best_idx_"):
        state = "not fitted" if isinstance(search, GridSearch) else f"of type {type(search).__name__}"
        raise InvalidInputError(
            f"`search` is {state}.",
            "It must be a fitted GridSearch.",
            "Only the predictor of a point of the grid minimises a known objective.",
            "Pass the GridSearch after fit.",
        )
    predictor = search.predictors_[search.best_idx_]
    moment: Any = getattr(search, "constraints_", search.constraints)
    if not isinstance(moment, UtilityParity | BoundedGroupLoss):
        raise InvalidInputError(
            f"The constraint of the GridSearch is of type {type(moment).__name__}.",
            "It must be a UtilityParity, such as DemographicParity, or a BoundedGroupLoss.",
            "Only these are known to turn multipliers and group sizes into sample weights.",
            "Search with one of them.",
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
    fitted = read_estimator(predictor, moment.X, targets, sample_weight=np.abs(weights))
    columns = {"target": _encode(predictor, targets), **factors}
    loss = logistic_loss if hasattr(predictor, "classes_") else squared_loss
    people = dif.Samples(
        lambda params, batch: loss(params, (batch["X"], batch["target"])),
        {
            "X": label_rows(moment.X, read_index(moment.X)),
            **{name: torch.as_tensor(np.array(column, dtype=np.float64)) for name, column in columns.items()},
        },
        name="train",
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
