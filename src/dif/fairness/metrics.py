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
from dif.fairness.constraints import Groups, Link, PerSample, check_function
from dif.runtime.inputs import check_order, describe, read_array, read_numbers

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

_HOMES = ("fairlearn.", "sklearn.")  # packages whose metrics have these names
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
    control_features: Any = None,
) -> list[dif.Function]:
    """Return smooth counterparts of the metrics of a MetricFrame, as targets of influence.

    Each sample counts as positive with the weight p = link(score) and as negative with 1 − p, instead of one of them.
    Every metric gives the targets "metric, overall", one "metric, group" per group, "metric, difference" (largest minus
    smallest group) and "metric, ratio" (smallest divided by largest). With control features there are these targets
    for each of their values, "metric, value, overall" and so on.

    Args:
        metrics: The argument `metrics` of MetricFrame: a metric function of fairlearn or scikit-learn, or a dict of
            them by name. Those of decisions: selection_rate, mean_prediction, the four rates, accuracy_score,
            zero_one_loss, recall_score, precision_score, f1_score, balanced_accuracy_score. With link=None, those of
            predicted numbers: mean_prediction, mean_squared_error.
        score: The score of the model, `score(params, data)` → (n,).
        data: The data that the metrics are about, as `score` takes them: a tensor, a data frame or an array, which
            become tensors, or a tuple or dict of these.
        labels: True labels 0 and 1 (or −1 and 1), or true numbers with link=None, (n,).
        sensitive_features: The group of each sample.
        link: The smooth stand-in for the decision score > 0; None for a regression.
        sample_weight: Weights of the samples.
        control_features: The metrics are computed for each value of these columns by itself, as in MetricFrame.

    Raises:
        InvalidInputError: A metric has no smooth counterpart here, or is not defined for a group, or the arguments
            are not about the same samples.
    """
    score, names = check_function(score, "score"), _read_metrics(metrics, link)
    parts = data if isinstance(data, tuple) else (data,)
    columns = {"labels": labels, "sensitive_features": sensitive_features, "control_features": control_features}
    check_order(**{f"data[{k}]": part for k, part in enumerate(parts)}, **columns, sample_weight=sample_weight)
    data = _read_data(data)
    tables = _Table.read(labels, sensitive_features, link, sample_weight, control_features, _count_samples(data))
    for table in tables:
        table.check_defined(names)

    def target(table: _Table, metric: str, where: str) -> Callable[[Any], Tensor]:
        return lambda params: table.values(metric, score(params, data))[where]

    return [
        dif.Function(target(table, metric, where), name=f"{name}, {table.control}{where}")
        for name, metric in names.items()
        for table in tables
        for where in ("overall", *table.groups, "difference", "ratio")
    ]


def compare_metrics(
    metrics: Any,
    scores: Mapping[str, Any],
    *,
    labels: Any,
    sensitive_features: Any,
    link: Link = torch.sigmoid,
    sample_weight: Any = None,
    control_features: Any = None,
) -> Any:
    """Return a DataFrame of the metrics of several models, hard and smoothed side by side.

    Args:
        metrics: The argument `metrics` of fairlearn's MetricFrame, which computes the hard metrics.
        scores: The scores of each model by name, such as {"plain": ..., "fair": ...}, each (n,). A hard decision is
            score > 0; with link=None the scores are predicted numbers.
        labels: True labels 0 and 1 (or −1 and 1), or true numbers with link=None, (n,).
        sensitive_features: The group of each sample.
        link: The smooth stand-in for the decision score > 0; None for a regression.
        sample_weight: Weights of the samples.
        control_features: The metrics are computed for each value of these columns by itself, as in MetricFrame. The
            rows of the result then have the levels metric, control and group.
    """
    try:
        import pandas
        from fairlearn.metrics import MetricFrame
    except ImportError as error:
        raise ImportError('compare_metrics needs fairlearn: pip install "directional-influence[fairlearn]"') from error
    columns = {"labels": labels, "sensitive_features": sensitive_features, "control_features": control_features}
    check_order(**columns, sample_weight=sample_weight)
    names = _read_metrics(metrics, link)
    tables = _Table.read(labels, sensitive_features, link, sample_weight, control_features)
    functions = dict(metrics) if isinstance(metrics, Mapping) else dict.fromkeys(names, metrics)
    results = {}
    for model, values in _read_scores(scores, len(tables[0].labels)).items():
        check_order(**{"labels": labels, f"scores[{model!r}]": scores[model]})
        for table in tables:
            hard = table.measure_decisions(MetricFrame, functions, values)
            smooth = {name: table.values(metric, values) for name, metric in names.items()}
            for name in names:
                for where in smooth[name]:
                    row = (name, where) if control_features is None else (name, table.control[:-2], where)
                    results.setdefault((model, "hard"), {})[row] = float(hard[where][name])
                    results.setdefault((model, "smoothed"), {})[row] = float(smooth[name][where])
    levels = ["metric", "group"] if control_features is None else ["metric", "control", "group"]
    return pandas.DataFrame(results).rename_axis(index=levels)


@dataclass(frozen=True, eq=False)
class _Table:
    """What metrics are computed from besides the scores: among all samples, or those with one control value."""

    labels: Tensor  # (n,) 0 or 1, or true numbers if link is None
    groups: Mapping[str, Tensor]  # masks of the groups that have samples there, (n,) bool
    weights: Tensor  # (n,)
    link: Link
    control: str  # the control value followed by a comma; empty without control features
    inside: Tensor  # (n,) bool, the samples with that control value

    @classmethod
    def read(
        cls,
        labels: Any,
        sensitive_features: Any,
        link: Link,
        sample_weight: Any,
        control_features: Any,
        count: int | None = None,
    ) -> list[_Table]:
        """Read what users pass: one table for each control value."""
        if link is not None:
            check_function(link, "link")
        true = read_numbers(labels, "labels", count)
        if link is not None and set(true.tolist()) == {-1.0, 1.0}:
            true = (true + 1) / 2
        strange = sorted(set(true.tolist()) - {0.0, 1.0})
        if link is not None and strange:
            raise InvalidInputError(
                f"`labels` must contain only 0 and 1, or −1 and 1, not {strange[0]:g}; pass link=None for the metrics "
                "of a regression."
            )
        groups = Groups.of(sensitive_features, len(true)).split()
        taken = [name for name in groups if name in _SUMMARIES]
        if taken:
            raise InvalidInputError(f"A group in `sensitive_features` must not be called {taken[0]!r}.")
        ones = torch.ones_like(true)
        weights = (
            ones if sample_weight is None else read_numbers(sample_weight, "sample_weight", len(true), negative=False)
        )
        controls = {"": ones > 0}
        if control_features is not None:
            found = Groups.of(control_features, len(true), "control_features").split()
            controls = {f"{value}, ": inside for value, inside in found.items()}
        tables = []
        for control, inside in controls.items():
            present = {name: mask & inside for name, mask in groups.items() if (mask & inside).any()}
            tables.append(cls(true, present, weights, link, control, inside))
        return tables

    def check_defined(self, names: Mapping[str, str]) -> None:
        """Refuse metrics that are 0/0 in a group, such as the true positive rate of a group without label 1."""
        for name, metric in names.items():
            values = self._values(metric, lambda mask: torch.full((int(mask.sum()),), 0.5, dtype=torch.float64))
            undefined = [where for where, value in values.items() if not value.isfinite()]
            if undefined:
                raise InvalidInputError(
                    f"The metric {name!r} is not defined for {self.control}{undefined[0]}, which has no samples that "
                    "it counts; merge the group with another one, or choose another metric."
                )

    def values(self, metric: str, scores: Tensor) -> dict[str, Tensor]:
        """Return a smoothed metric overall, of each group, and the difference and ratio of the groups."""
        shape = tuple(getattr(scores, "shape", ()))
        if shape != tuple(self.labels.shape):
            given = f"shape {shape}" if isinstance(scores, Tensor) else type(scores).__name__
            raise InvalidInputError(
                f"`score` must return a tensor of shape {tuple(self.labels.shape)}, one score per label, not {given}."
            )
        return self._values(metric, lambda mask: scores[mask] if self.link is None else self.link(scores[mask]))

    def _values(self, metric: str, predict: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return `values` from the probabilities, or predicted numbers, of the samples of a mask."""
        masks = (self.inside, *self.groups.values())
        overall, *by_group = (self._value(metric, predict(mask), mask) for mask in masks)
        low, high = torch.stack(by_group).min(), torch.stack(by_group).max()
        named = dict(zip(self.groups, by_group, strict=True))
        return {"overall": overall, **named, "difference": high - low, "ratio": low / high}

    def _value(self, metric: str, p: Tensor, mask: Tensor) -> Tensor:
        """Return a smoothed metric of the samples of a mask."""
        y, w = (each[mask].to(p) for each in (self.labels, self.weights))
        if self.link is None:
            return _OF_NUMBERS[metric](p, y, w / w.sum())
        counts = (w * p) @ y, (w * p) @ (1 - y), (w * (1 - p)) @ y, (w * (1 - p)) @ (1 - y)
        return _OF_COUNTS[metric](*counts)

    def measure_decisions(self, kind: Any, functions: Mapping[str, Any], scores: Tensor) -> dict[str, Any]:
        """Return what a MetricFrame, passed as `kind`, says of the decisions, by the keys of `values`."""
        inside = self.inside
        number = torch.stack(list(self.groups.values())).int().argmax(0)[inside]
        frame = kind(
            metrics=dict(functions),
            y_true=self.labels[inside].numpy(),
            y_pred=(scores if self.link is None else (scores > 0).double())[inside].numpy(),
            sensitive_features=np.array(list(self.groups), dtype=object)[number.numpy()],
            sample_params={name: {"sample_weight": self.weights[inside].numpy()} for name in functions},
        )
        by_group = {group: frame.by_group.loc[group] for group in frame.by_group.index}
        return {"overall": frame.overall, **by_group, "difference": frame.difference(), "ratio": frame.ratio()}


def _read_scores(scores: Any, count: int) -> dict[str, Tensor]:
    """Return the scores of each model by its name, each (count,)."""
    if not isinstance(scores, Mapping) or not scores:
        given = "an empty dict" if isinstance(scores, Mapping) else describe(scores)
        raise InvalidInputError(f"`scores` must be a dict with the scores of at least one model by name, not {given}.")
    return {name: read_numbers(values, f"scores[{name!r}]", count) for name, values in scores.items()}


def _read_metrics(metrics: Any, link: Link) -> dict[str, str]:
    """Return the name of the smooth counterpart of each metric, by the user's name; refuse those without."""
    table = _OF_NUMBERS if link is None else _OF_COUNTS
    given = metrics if isinstance(metrics, Mapping) else {getattr(metrics, "__name__", "metric"): metrics}
    found = {name: str(getattr(metric, "__name__", type(metric).__name__)) for name, metric in given.items()}
    homes = {name: str(getattr(metric, "__module__", "")) for name, metric in given.items()}
    wrong = [n for n in given if found[n] not in table or not homes[n].startswith(_HOMES)]
    if not given or wrong:
        shown = _describe_metric(metrics, wrong[0]) if wrong else "`metrics` is an empty dict"
        raise InvalidInputError(
            f"{shown}; it must be one of the functions {', '.join(table)} of fairlearn.metrics or sklearn.metrics, "
            "which have a smooth counterpart."
        )
    return found


def _describe_metric(metrics: Any, name: str) -> str:
    """Begin a sentence about a metric without a smooth counterpart: where it was given, and what it is."""
    place, metric = (f"`metrics[{name!r}]`", metrics[name]) if isinstance(metrics, Mapping) else ("`metrics`", metrics)
    if not hasattr(metric, "__name__"):
        return f"{place} is of type {type(metric).__name__}"
    owner = "the" if str(metric.__module__).startswith(_HOMES) else "your own"
    return f"{place} is {owner} function {metric.__name__}"


def _read_data(data: Any) -> Any:
    """Return data with its arrays, data frames and series as tensors; frames become (rows, columns) in float64."""
    if isinstance(data, Mapping):
        return {name: _read_data(part) for name, part in data.items()}
    if isinstance(data, tuple):
        return tuple(_read_data(part) for part in data)
    if hasattr(data, "columns"):
        return torch.stack([read_numbers(data[name], str(name)) for name in data.columns], 1)
    if isinstance(data, Tensor):
        return data
    if not isinstance(data, list) and not hasattr(data, "__array__"):
        raise InvalidInputError(
            "`data` must be a tensor, an array or a data frame, or a tuple or dict of these, as `score` takes it, not "
            f"{describe(data)}."
        )
    values = read_array(data)
    return torch.as_tensor(np.array(values)) if values.dtype.kind in "biuf" else read_numbers(values, "data")


def _count_samples(data: Any) -> int | None:
    """Return the length of the tensors in data, which must be the same; None if there are none."""
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else [data]
    lengths = list(dict.fromkeys(len(part) for part in parts if isinstance(part, Tensor) and part.dim()))
    if len(lengths) > 1:
        raise InvalidInputError(f"The parts of `data` must have the same number of samples, not {lengths}.")
    return lengths[0] if lengths else None
