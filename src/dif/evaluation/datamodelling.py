"""Linear datamodelling score: do the summed scores of random subsets rank the models trained without them?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.errors import InvalidInputError, count_words
from dif.evaluation.methods import Methods, Scorer, check_scores, expect_seed, score
from dif.evaluation.picture import GREY, colour_methods
from dif.evaluation.result import Result
from dif.evaluation.result_file import read_result, write_result
from dif.evaluation.table import Table
from dif.evaluation.trial import Trial
from dif.problem.samples import Samples
from dif.runtime.axes import draw_on
from dif.runtime.inputs import check_count, check_number

_KIND = "datamodelling score"  # of file
_DRAWS = 200  # bootstrap draws behind a standard error
_FEWEST = 3  # subsets below which a rank correlation says nothing


@dataclass(frozen=True, eq=False, repr=False)
class DatamodellingScore(Result):
    """Predicted and actual targets of models trained without random subsets of the data.

    `scores` has the linear datamodelling score of each method, `correlations` that of each target.
    """

    removed: tuple[tuple[int, ...], ...]  # the samples that each of M subsets lacks
    actual: Tensor  # (M, T) change of each target after training without them; NaN where that failed
    predicted: dict[str, Tensor]  # by method, (M, T): sums of scores, or scores of the subset as a whole
    targets: tuple[str, ...]

    @cached_property
    def correlations(self) -> dict[str, Tensor]:
        """Spearman's rank correlation over the subsets for each target, by method, (T,); NaN where one is constant."""
        rows = self._answered
        return {
            name: torch.from_numpy(_correlate_ranks(values[rows].numpy(), self.actual[rows].numpy()))
            for name, values in self.predicted.items()
        }

    @property
    def scores(self) -> dict[str, float]:
        """The linear datamodelling score of each method: the mean of its correlations over the targets.

        Targets on which the method or the truth is constant are left out; NaN where that is so on all.
        """
        return {name: float(values.nanmean()) for name, values in self.correlations.items()}

    @cached_property
    def standard_errors(self) -> dict[str, float]:
        """Standard error of each score, by 200 bootstrap draws of the subsets and of the targets."""
        generator = np.random.default_rng(0)
        rows, T = self._answered.numpy(), self.actual.shape[1]
        draws: dict[str, list[float]] = {name: [] for name in self.predicted}
        for _ in range(_DRAWS):
            subsets, targets = generator.choice(rows, len(rows)), generator.choice(T, T)
            pick = np.ix_(subsets, targets)
            for name, values in self.predicted.items():
                correlations = _correlate_ranks(values.numpy()[pick], self.actual.numpy()[pick])
                draws[name].append(float(torch.from_numpy(correlations).nanmean()))
        return {name: _spread(np.array(values)) for name, values in draws.items()}

    @property
    def _answered(self) -> Tensor:
        """The subsets whose training gave an answer."""
        return torch.nonzero(torch.isfinite(self.actual).all(1)).reshape(-1)

    def table(self) -> Table:
        """Return the score of each method with its standard error, and the spread over the targets."""
        failed = len(self.removed) - len(self._answered)
        words = f"{count_words(len(self._answered), 'subset')}, {count_words(len(self.targets), 'target')}"
        title = f"Linear datamodelling score: {words}"
        title += f" ({count_words(failed, 'training')} failed)" if failed else ""
        rows = []
        for name, values in self.correlations.items():
            known = values[torch.isfinite(values)]
            extremes = (float(known.min()), float(known.max())) if len(known) else (float("nan"),) * 2
            rows.append((name, self.scores[name], self.standard_errors[name], *extremes))
        return Table(title, ("method", "LDS", "standard error", "lowest target", "highest target"), tuple(rows))

    def plot(self, ax: Any = None) -> Any:
        """Draw the correlations of all targets as one box per method, with the score as a diamond; return the axes."""
        ax = draw_on(ax)
        names = list(self.predicted)[::-1]
        colours = dict(colour_methods(self.predicted))
        for place, name in enumerate(names):
            values, colour = self.correlations[name], colours[name]
            boxes = ax.boxplot(
                values[torch.isfinite(values)].numpy(), positions=[place], orientation="horizontal", widths=0.6,
                patch_artist=True, flierprops={"marker": ".", "markersize": 3}, medianprops={"color": colour},
            )  # fmt: skip
            boxes["boxes"][0].set(facecolor=colour, alpha=0.25)
            ax.errorbar(
                self.scores[name], place, xerr=self.standard_errors[name], color=colour, marker="D", markersize=6,
                capsize=4,
            )  # fmt: skip
        ax.set_yticks(range(len(names)), [f"{name}\nLDS {_write(self.scores[name])}" for name in names])
        ax.axvline(0.0, color=GREY, linewidth=1)
        ax.set_xlabel("rank correlation with retraining, per target")
        return ax

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all to one file (npz, no pickle)."""
        sizes = torch.tensor([len(indices) for indices in self.removed])
        flat = torch.tensor([i for indices in self.removed for i in indices], dtype=torch.long)
        about = {"targets": self.targets}
        write_result(path, _KIND, about, self.predicted, actual=self.actual, sizes=sizes, removed=flat)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DatamodellingScore:
        """Read a file that `save` wrote."""
        about, predicted, arrays = read_result(path, _KIND)
        removed = tuple(tuple(part.tolist()) for part in torch.split(arrays["removed"], arrays["sizes"].tolist()))
        return cls(removed, arrays["actual"], predicted, tuple(about["targets"]))


def linear_datamodelling_score(
    methods: Methods,
    truth: Scorer,
    target: Any,
    samples: Samples | int,
    *,
    subsets: int = 50,
    share: float = 0.5,
    seed: int = 0,
    jointly: bool = False,
    show_progress: bool = True,
) -> DatamodellingScore:
    """Measure how well scores predict what training on random subsets of the data gives (LDS).

    M random subsets R₁ … R_M, each a given share of the samples, are removed, and the model is trained without each
    (Ilyas et al. 2022, *Datamodels*). A method predicts that target φ changes by Σ_{i ∈ R} sᵢ, the sum of its scores
    over what is removed. The linear datamodelling score (Park et al. 2023, *TRAK*) is Spearman's rank correlation of
    predicted and actual changes over the M subsets, averaged over the targets. All subsets have the same size, so sums
    over the kept samples, as in TRAK, with scores of the opposite sign, have the same ranks.

    The subsets depend only on the number of samples, `subsets`, `share` and `seed`. Give the truth a folder
    (`keep=`), and the same call resumes after an interruption, and further methods cost no further training.

    Args:
        methods: By name, or a list: estimators, an Influence of samples.remove_each(), or arrays of scores, (n,) or
            (n, T). A score is the predicted change of the target if the sample is removed.
        truth: `dif.Retraining(solution, keep=folder)`, an `OwnTraining`, or any other estimator.
        target: A Term, a list of Terms, or Samples (one target per sample); None where nothing but arrays is asked.
        samples: The Samples to remove from; their number where only an `OwnTraining` knows them.
        subsets: How many subsets are removed.
        share: Share of the samples that each removes.
        seed: Seed of the draw.
        jointly: Ask estimators for the removal of each subset as a whole instead of adding up the scores of its
            samples. This is no longer the score of the literature, but what estimators of groups are for.
        show_progress: Show a bar on a terminal while training.
    """
    trial = Trial.of(methods, truth, target, samples, show_progress)
    removed = _draw_subsets(len(trial.population), subsets, share, seed)
    groups = trial.population.remove_groups(removed)
    whole = {name: method for name, method in trial.methods.items() if jointly and isinstance(method, Scorer)}
    single = trial.predict(leave_out=whole)
    sums = {name: torch.stack([values[index].sum(0) for index in removed]) for name, values in single.items()}
    sums |= {name: score(method, target, groups).values for name, method in whole.items()}
    actual = trial.measure(groups)
    T = len(actual.targets)
    predicted = {
        name: check_scores(name, sums[name], len(removed), T).expand(-1, T).contiguous() for name in trial.methods
    }
    answered = int(torch.isfinite(actual.values).all(1).sum())
    if answered < _FEWEST:
        raise InvalidInputError(
            f"{answered} of {len(removed)} trainings gave an answer.",
            f"At least {_FEWEST} must.",
            "There are too few models to rank.",
            "Remove a smaller share, or retrain with strict=True to see why it fails.",
        )
    lists = tuple(tuple(index) for index in removed)
    return DatamodellingScore(lists, actual.values.double(), predicted, actual.targets)


def _draw_subsets(n: int, subsets: int, share: float, seed: int) -> list[list[int]]:
    """Draw the samples that each subset lacks."""
    subsets = check_count(
        subsets,
        "subsets",
        meaning="The model is trained once for each subset.",
        cure="Use about 50 for a first impression, more for a smaller standard error.",
    )
    share = check_number(
        share,
        "share",
        zero=False,
        meaning="It is the share of the samples that each subset removes.",
        cure="Use 0.5 for random halves.",
    )
    size = int(share * n)
    if subsets < _FEWEST or not 1 <= size < n:
        raise InvalidInputError(
            f"{subsets} subsets of {size} of {n} samples were asked for.",
            f"There must be at least {_FEWEST} subsets, each of at least one sample but not all.",
            "The score ranks models that were trained on different parts of the data.",
            "Use more subsets, or a share between 0 and 1 such as 0.5.",
        )
    generator = expect_seed(seed)
    return [torch.randperm(n, generator=generator)[:size].tolist() for _ in range(subsets)]


def _write(score: float) -> str:
    """Return a score as text; a dash for NaN."""
    return f"{score:.3f}" if np.isfinite(score) else "–"


def _spread(values: np.ndarray) -> float:
    """Return the standard deviation of the values that are known; NaN where these are fewer than two."""
    known = values[np.isfinite(values)]
    return float(np.std(known, ddof=1)) if len(known) > 1 else float("nan")


def _correlate_ranks(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of each column of x with that of y; NaN where one of them is constant."""
    from scipy.stats import rankdata  # slow to import, seldom needed

    a, b = (rankdata(values, axis=0) for values in (x, y))
    a, b = a - a.mean(0), b - b.mean(0)
    spread = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.where(spread > 0, (a * b).sum(0) / np.where(spread > 0, spread, 1.0), np.nan)
