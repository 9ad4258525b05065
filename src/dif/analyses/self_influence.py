"""Samples that look wrong: what each does to its own loss."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch

from dif.estimators.influence import Influence
from dif.evaluation.weight_change import indispensable
from dif.problem.samples import Samples
from dif.runtime.progress import progress

_TOGETHER = 128  # samples at once


def self_influence(
    estimator: Any, samples: Samples, indices: Iterable[int] | None = None, *, show_progress: bool = True
) -> Influence:
    """How much the loss of each sample would rise if it were removed: large where the others do not support it.

    Mislabelled samples stand out: only their own weight holds their loss down. Under constraints a sample acts through
    every term that holds it, so DirectionalInfluence is the estimator to pass; ClassicalInfluence sees the objective
    alone. A sample that is alone in a term of the problem cannot be removed: NaN.
    """
    index = list(range(len(samples))) if indices is None else samples.checked(indices)
    alone = indispensable(estimator.solution.program, samples)  # cannot be removed
    answered = [i for i in index if i not in alone]
    options = {"show_progress": False, **({"assess": 0} if "assess" in signature(estimator.scores).parameters else {})}
    values, diagnostics = [], {}
    with progress("self-influence", len(index), show_progress) as report:
        for begin in range(0, len(answered), _TOGETHER):
            some = answered[begin : begin + _TOGETHER]
            found = estimator.scores(samples.take(torch.tensor(some)), samples.remove_each(some), **options)
            values.append(found.values.diagonal())
            diagnostics = found.diagnostics
            report(begin + len(some))
    found = dict(zip(answered, torch.cat(values).tolist(), strict=True)) if values else {}
    column = torch.tensor([found.get(i, float("nan")) for i in index], dtype=torch.float64)[:, None]
    return Influence(column, samples.remove_each(index), ("own loss",), f"{estimator.name}, self", diagnostics)
