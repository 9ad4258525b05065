"""Leave-one-out agreement: single samples are removed, the model is trained again, and predictions are compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError, count_words
from dif.estimators.agreement import Agreement
from dif.evaluation.methods import Methods, Scorer, check_scores, expect_seed
from dif.evaluation.picture import GREY, colour_methods
from dif.evaluation.result import Result
from dif.evaluation.result_file import read_result, write_result
from dif.evaluation.table import Table
from dif.evaluation.trial import Trial
from dif.problem.samples import Samples
from dif.runtime.axes import draw_on_panels
from dif.runtime.inputs import as_index

_KIND = "leave-one-out agreement"  # of file


@dataclass(frozen=True, eq=False, repr=False)
class LeaveOneOut(Result):
    """Predicted and actual changes of the targets without each of some samples."""

    indices: tuple[int, ...]  # the m samples that were removed, one at a time
    actual: Tensor  # (m, T) after training without each; NaN where that failed
    predicted: dict[str, Tensor]  # by method, (m, T)
    targets: tuple[str, ...]

    @cached_property
    def agreements(self) -> dict[str, Agreement]:
        """Agreement of each method with training, pooled over samples and targets."""
        rows = torch.isfinite(self.actual).all(1)
        return {name: Agreement.of(values[rows], self.actual[rows]) for name, values in self.predicted.items()}

    def table(self) -> Table:
        """Return correlations, slope, relative error and the share of equal signs for each method."""
        failed = int((~torch.isfinite(self.actual).all(1)).sum())
        words = f"{count_words(len(self.indices) - failed, 'sample')}, {count_words(len(self.targets), 'target')}"
        title = f"Leave-one-out agreement: {words}"
        title += f" ({count_words(failed, 'training')} failed)" if failed else ""
        rows = tuple(
            (name, a.pearson, a.spearman, a.slope, a.relative_error, a.sign) for name, a in self.agreements.items()
        )
        return Table(title, ("method", "Pearson r", "Spearman", "slope", "relative error", "same sign"), rows)

    def plot(self, axes: Any = None) -> Any:
        """Plot predicted against actual changes, one panel per method, with the line y = x; return the axes.

        Panels have their own vertical scale, since scores of some methods are not in the unit of the target.
        """
        axes = draw_on_panels(axes, len(self.predicted), meaning="Each method is drawn in a panel of its own.")
        for ax, (name, colour) in zip(axes, colour_methods(self.predicted), strict=True):
            actual, predicted = self.actual.reshape(-1).numpy(), self.predicted[name].reshape(-1).numpy()
            ax.scatter(actual, predicted, s=14, alpha=0.6, color=colour, linewidths=0)
            limits = ax.get_ylim()
            ax.axline((0.0, 0.0), slope=1.0, color=GREY, linewidth=1, linestyle="--", zorder=0)
            ax.set_ylim(limits)
            ax.set_title(f"{name}, r = {self.agreements[name].pearson:.3f}", fontsize=10)
            ax.set_xlabel("actual change (retrained)")
        axes[0].set_ylabel("predicted change")
        return axes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all to one file (npz, no pickle)."""
        about = {"targets": self.targets, "indices": self.indices}
        write_result(path, _KIND, about, self.predicted, actual=self.actual)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LeaveOneOut:
        """Read a file that `save` wrote."""
        about, predicted, arrays = read_result(path, _KIND)
        return cls(tuple(about["indices"]), arrays["actual"], predicted, tuple(about["targets"]))


def leave_one_out_agreement(
    methods: Methods, truth: Scorer, target: Any, samples: Samples | int, *, strongest: int = 20, random: int = 20,
    seed: int = 0, show_progress: bool = True,
) -> LeaveOneOut:  # fmt: skip
    """Remove the strongest samples by each method, and random ones, one at a time; train again and compare.

    Every method is judged on the same samples: the strongest of all methods together and the random ones, so that none
    is judged only where another one expects large changes.

    Args:
        methods: As for `linear_datamodelling_score`: estimators, an Influence, or arrays of scores, by name.
        truth: Trains again, as `dif.Retraining` and `OwnTraining` do.
        target: A Term, a list of Terms, or Samples; None where nothing but arrays is asked.
        samples: The Samples to remove from, or their number.
        strongest: How many samples of each method: those with the largest scores, in Euclidean norm over the targets.
        random: How many random samples.
        seed: Seed of the draw.
        show_progress: Show a bar on a terminal while training.
    """
    trial = Trial.of(methods, truth, target, samples, show_progress)
    n, counts = len(trial.population), [as_index(strongest), as_index(random)]
    if None in counts or min(c for c in counts if c is not None) < 0 or max(c for c in counts if c is not None) < 2:
        raise InvalidInputError(
            f"`strongest` is {strongest!r} and `random` is {random!r}.",
            "Both must be integers ≥ 0, and one of them at least 2.",
            "They say how many samples are removed, one at a time.",
            "Use strongest=20, random=20, or 0 for one of them.",
        )
    generator, values = expect_seed(seed), trial.predict()
    indices = _choose(values, n, strongest, random, generator)
    actual = trial.measure(trial.population.remove_each(indices))
    T = len(actual.targets)
    predicted = {name: check_scores(name, v, n, T)[indices].expand(-1, T).contiguous() for name, v in values.items()}
    return LeaveOneOut(tuple(indices), actual.values.double(), predicted, actual.targets)


def _choose(scores: Mapping[str, Tensor], n: int, strongest: int, random: int, draw: torch.Generator) -> list[int]:
    """Return the strongest samples of each method and random ones, ascending."""
    drawn = torch.randperm(n, generator=draw)[:random].tolist()
    sizes = (torch.linalg.vector_norm(values, dim=1) for values in scores.values())
    top = [torch.argsort(size, descending=True, stable=True)[:strongest].tolist() for size in sizes]
    return sorted({*drawn, *(i for indices in top for i in indices)})
