"""Metrics of groups as fairlearn's MetricFrame has them, and smooth counterparts that can be targets of influence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif import InvalidInputError
from dif.fairness.constraints import Link, PerSample
from dif.fairness.groups import Groups

# Metrics of decisions as functions of the weights of true and false positives, and of false and true negatives
_OF_COUNTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "selection_rate": lambda tp, fp, fn, tn: (tp + fp) / (tp + fp + fn + tn),
    "mean_prediction": lambda tp, fp, fn, tn: (tp + fp) / (tp + fp + fn + tn),
    "true_positive_rate": lambda tp, fp, fn, tn: tp / (tp + fn),
    "false_positive_rate": lambda tp, fp, fn, tn: fp / (fp + tn),
    "true_negative_rate": lambda tp, fp, fn, tn: tn / (fp + tn),
    "false_negative_rate": lambda tp, fp, fn, tn: fn / (tp + fn),
    "accuracy_score": lambda tp, fp, fn, tn: (tp + tn) / (tp + fp + fn + tn),
    "zero_one_loss": lambda tp, fp, fn, tn: (fp + fn) / (tp + fp + fn + tn),
    "recall_score": lambda tp, fp, fn, tn: tp / (tp + fn),
    "precision_score": lambda tp, fp, fn, tn: tp / (tp + fp),
    "f1_score": lambda tp, fp, fn, tn: 2 * tp / (2 * tp + fp + fn),
    "balanced_accuracy_score": lambda tp, fp, fn, tn: 0.5 * (tp / (tp + fn) + tn / (fp + tn)),
}
# Metrics of predicted numbers as functions of predictions, true values and weights that sum to 1
_OF_NUMBERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean_prediction": lambda predicted, true, w: w @ predicted,
    "mean_squared_error": lambda predicted, true, w: w @ (predicted - true) ** 2,
}

_SUMMARIES = ("overall", "difference", "ratio")  # of a metric over all groups


def smooth_metrics(
    metrics: Any,
    score: PerSample,
    data: Any,
    *,
    labels: Any,
    sensitive_features: Any,
    link: Link = torch.sigmoid,
    sample_weight: Any = None,
) -> list[dif.Function]:
    """Return smooth counterparts of the metrics of a MetricFrame, as targets of influence.

    Each sample counts as positive with the weight p = link(score) and as negative with 1 − p, instead of one of them.
    Every metric gives the targets "metric, overall", one "metric, group" per group, "metric, difference" (largest minus
    smallest group) and "metric, ratio" (smallest divided by largest).

    Args:
        metrics: The argument `metrics` of MetricFrame: a metric function of fairlearn or scikit-learn, or a dict of
            them by name. Those of decisions: selection_rate, mean_prediction, the four rates, accuracy_score,
            zero_one_loss, recall_score, precision_score, f1_score, balanced_accuracy_score. With link=None, those of
            predicted numbers: mean_prediction, mean_squared_error.
        score: The score of the model, `score(params, data)` → (n,).
        data: The data that the metrics are about, as `score` takes them.
        labels: True labels 0 and 1, or true numbers with link=None, (n,).
        sensitive_features: The group of each sample.
        link: The smooth stand-in for the decision score > 0; None for a regression.
        sample_weight: Weights of the samples.

    Raises:
        InvalidInputError: A metric has no smooth counterpart here.
    """
    table = _Table.of(labels, sensitive_features, link, sample_weight)

    def target(metric: str, where: str) -> Callable[[Any], Tensor]:
        return lambda params: table.values(metric, score(params, data))[where]

    places = ("overall", *table.groups.names, "difference", "ratio")
    return [
        dif.Function(target(metric, where), name=f"{name}, {where}")
        for name, metric in _read_metrics(metrics, link).items()
        for where in places
    ]


def compare_metrics(
    metrics: Any,
    scores: Mapping[str, Any],
    *,
    labels: Any,
    sensitive_features: Any,
    link: Link = torch.sigmoid,
    sample_weight: Any = None,
) -> Any:
    """Return a DataFrame of the metrics of several models, hard and smoothed side by side.

    Args:
        metrics: The argument `metrics` of fairlearn's MetricFrame, which computes the hard metrics.
        scores: The scores of each model by name, such as {"plain": ..., "fair": ...}, each (n,). A hard decision is
            score > 0; with link=None the scores are predicted numbers.
        labels: True labels 0 and 1, or true numbers with link=None, (n,).
        sensitive_features: The group of each sample.
        link: The smooth stand-in for the decision score > 0; None for a regression.
        sample_weight: Weights of the samples.
    """
    try:
        import pandas
        from fairlearn.metrics import MetricFrame
    except ImportError as error:
        raise ImportError('compare_metrics needs fairlearn: pip install "directional-influence[fairlearn]"') from error
    table, names = _Table.of(labels, sensitive_features, link, sample_weight), _read_metrics(metrics, link)
    functions = metrics if isinstance(metrics, Mapping) else dict.fromkeys(names, metrics)
    group = [table.groups.names[g] for g in table.groups.members.tolist()]
    columns = {}
    for model, score in scores.items():
        values = torch.as_tensor(np.asarray(score, dtype=float).copy())
        if values.shape != table.labels.shape:
            raise InvalidInputError(
                f"The scores of {model!r} have shape {tuple(values.shape)}.",
                f"They must have shape {tuple(table.labels.shape)}.",
                "There is one score for each label.",
                "Pass model.decision_function(X), or model.predict(X) of a regression.",
            )
        weights = {name: {"sample_weight": table.weights.numpy()} for name in names}
        frame = MetricFrame(
            metrics=dict(functions),
            y_true=table.labels.numpy(),
            y_pred=values.numpy() if link is None else (values > 0).double().numpy(),
            sensitive_features=group,
            sample_params=None if sample_weight is None else weights,
        )
        hard = {"overall": frame.overall, **{g: frame.by_group.loc[g] for g in table.groups.names}}
        hard |= {"difference": frame.difference(), "ratio": frame.ratio()}
        smooth = {name: table.values(metric, values) for name, metric in names.items()}
        rows = [(name, where) for name in names for where in hard]
        columns[model, "hard"] = {(name, where): float(hard[where][name]) for name, where in rows}
        columns[model, "smoothed"] = {(name, where): float(smooth[name][where]) for name, where in rows}
    return pandas.DataFrame(columns).rename_axis(index=["metric", "group"])


@dataclass(frozen=True, eq=False)
class _Table:
    """What metrics are computed from besides the scores."""

    labels: Tensor  # (n,) 0 or 1, or true numbers if link is None
    groups: Groups
    weights: Tensor  # (n,)
    link: Link

    @classmethod
    def of(cls, labels: Any, sensitive_features: Any, link: Link, sample_weight: Any) -> _Table:
        """Read what users pass."""
        true = torch.as_tensor(np.asarray(labels, dtype=float).copy())
        if link is not None and not set(true.tolist()) <= {0.0, 1.0}:
            raise InvalidInputError(
                f"`labels` contains {sorted(set(true.tolist()) - {0.0, 1.0})[0]:g}.",
                "It must contain only 0 and 1.",
                "Metrics of decisions are about the labels 0 and 1.",
                "Encode the labels, or pass link=None for the metrics of a regression.",
            )
        groups = Groups.of(sensitive_features, len(true))
        taken = [name for name in groups.names if name in _SUMMARIES]
        if taken:
            raise InvalidInputError(
                f"A group in `sensitive_features` is called {taken[0]!r}.",
                f"It must not be called {', '.join(_SUMMARIES)}.",
                "Targets of this name are about all groups.",
                "Rename the group.",
            )
        weights = (
            torch.ones_like(true) if sample_weight is None else torch.as_tensor(np.asarray(sample_weight, float).copy())
        )
        return cls(true, groups, weights, link)

    def values(self, metric: str, scores: Tensor) -> dict[str, Tensor]:
        """Return a smoothed metric overall, of each group, and the difference and ratio of the groups."""
        everyone = torch.ones_like(self.groups.members, dtype=torch.bool)
        masks = [everyone, *(self.groups.members == g for g in range(len(self.groups.names)))]
        overall, *by_group = (self._value(metric, scores, mask) for mask in masks)
        low, high = torch.stack(by_group).min(), torch.stack(by_group).max()
        groups = dict(zip(self.groups.names, by_group, strict=True))
        return {"overall": overall, **groups, "difference": high - low, "ratio": low / high}

    def _value(self, metric: str, scores: Tensor, mask: Tensor) -> Tensor:
        """Return a smoothed metric of the samples of a mask."""
        y, w = (each[mask].to(scores) for each in (self.labels, self.weights))
        if self.link is None:
            return _OF_NUMBERS[metric](scores[mask], y, w / w.sum())
        p = self.link(scores[mask])
        counts = (w * p) @ y, (w * p) @ (1 - y), (w * (1 - p)) @ y, (w * (1 - p)) @ (1 - y)
        return _OF_COUNTS[metric](*counts)


def _read_metrics(metrics: Any, link: Link) -> dict[str, str]:
    """Return the name of the smooth counterpart of each metric, by the user's name; refuse those without."""
    table = _OF_NUMBERS if link is None else _OF_COUNTS
    given = metrics if isinstance(metrics, Mapping) else {getattr(metrics, "__name__", "metric"): metrics}
    for name, metric in given.items():
        known = getattr(metric, "__name__", "") in table
        if not known or not str(getattr(metric, "__module__", "")).startswith(("fairlearn.", "sklearn.")):
            raise InvalidInputError(
                f"The metric {name!r} is {getattr(metric, '__name__', type(metric).__name__)!r}.",
                f"It must be one of {', '.join(table)} of fairlearn.metrics or sklearn.metrics.",
                "A smooth counterpart is known only for these.",
                "Use one of them, or state the target yourself, as a mean of dif.Samples or a dif.Function.",
            )
    return {name: metric.__name__ for name, metric in given.items()}
