"""Results of evaluations: the numbers, and a table of those that matter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.errors import count_words
from dif.results.change import Agreement
from dif.runtime.text import TextTable

_PLACES = 7  # decimal places beyond which powers of ten are written
_DRAWS = 200  # bootstrap draws behind a standard error
_NAN = float("nan")


@dataclass(frozen=True)
class Table:
    """A title, headings and rows. The first cell of a row is a name, the others are numbers.

    >>> print(Table("Scores", ("method", "LDS"), (("DIF", 0.97571), ("random", float("nan")))))
    Scores
    method     LDS
    DIF     0.9757
    random       –
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]

    def __repr__(self) -> str:
        return f"{self.title}\n{TextTable(self.headings, tuple(self.format_rows()))}"

    def format_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of each row as text; the numbers of a column have equally many decimal places."""
        return list(zip(*map(_format_column, zip(*self.rows, strict=True)), strict=True))

    def to_markdown(self) -> str:
        """Return the table in Markdown, without its title."""
        lines = [self.headings, ("---",) * len(self.headings), *self.format_rows()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _format_column(cells: tuple[str | float, ...]) -> list[str]:
    """Format numbers so that the largest has four digits, at least to the fourth decimal place; a dash for NaN."""
    largest = max((abs(cell) for cell in cells if not isinstance(cell, str) and math.isfinite(cell)), default=0.0)
    places = max(4, 3 - math.floor(math.log10(largest))) if largest > 0 else 4
    form = f".{places}f" if places <= _PLACES else ".3e"
    return [cell if isinstance(cell, str) else format(cell, form) if math.isfinite(cell) else "–" for cell in cells]


class Result(ABC):
    """A result that is printed as a table."""

    @abstractmethod
    def table(self) -> Table:
        """Return the numbers that matter, one row per method."""

    def to_frame(self) -> Any:
        """Return the table as a pandas DataFrame with one row per name."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError('to_frame needs pandas: pip install "directional-influence[pandas]"') from error
        table = self.table()
        return pandas.DataFrame(list(table.rows), columns=list(table.headings)).set_index(table.headings[0])

    def __repr__(self) -> str:
        return str(self.table())


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
        rows = find_answers(self.actual)
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
        generator, T = np.random.default_rng(0), self.actual.shape[1]
        rows, draws = torch.nonzero(find_answers(self.actual))[:, 0].numpy(), {name: [] for name in self.predicted}
        for _ in range(_DRAWS):
            pick = np.ix_(generator.choice(rows, len(rows)), generator.choice(T, T))
            for name, values in self.predicted.items():
                correlations = _correlate_ranks(values.numpy()[pick], self.actual.numpy()[pick])
                draws[name].append(float(torch.from_numpy(correlations).nanmean()))
        known = {name: [value for value in values if math.isfinite(value)] for name, values in draws.items()}
        return {name: float(np.std(values, ddof=1)) if len(values) > 1 else _NAN for name, values in known.items()}

    def table(self) -> Table:
        """Return the score of each method with its standard error, and the spread over the targets."""
        rows = []
        for name, values in self.correlations.items():
            known = values[torch.isfinite(values)].tolist() or [_NAN]
            rows.append((name, self.scores[name], self.standard_errors[name], min(known), max(known)))
        title = f"Linear datamodelling score: {_count_trainings('subset', self.actual)}"
        return Table(title, ("method", "LDS", "standard error", "lowest target", "highest target"), tuple(rows))


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
        rows = find_answers(self.actual)
        return {name: Agreement.of(values[rows], self.actual[rows]) for name, values in self.predicted.items()}

    def table(self) -> Table:
        """Return correlations, slope, relative error and the share of equal signs for each method."""
        title = f"Leave-one-out agreement: {_count_trainings('sample', self.actual)}"
        rows = tuple(
            (name, a.pearson, a.spearman, a.slope, a.relative_error, a.sign) for name, a in self.agreements.items()
        )
        return Table(title, ("method", "Pearson r", "Spearman", "slope", "relative error", "same sign"), rows)


@dataclass(frozen=True, eq=False, repr=False)
class RemovalCurve(Result):
    """The change of a target after training without the top k samples of each method, for several k."""

    counts: tuple[int, ...]  # (K,) how many samples were removed, ascending
    changes: dict[str, Tensor]  # by method, (K,); NaN where training failed
    random: Tensor  # (R, K) after removing random samples, in R random orders
    orders: dict[str, tuple[int, ...]]  # by method, the samples in the order of their removal
    target: str
    lower: bool  # whether the samples were chosen to lower the target

    def table(self) -> Table:
        """Return the change after k removals for each method, and mean and standard deviation of the random orders."""
        rows = [(name, *values.tolist()) for name, values in self.changes.items()]
        if len(self.random):
            rows.append((f"random, mean of {len(self.random)}", *self.random.mean(0).tolist()))
        if len(self.random) > 1:
            rows.append(("random, standard deviation", *self.random.std(0).tolist()))
        wish = "lower" if self.lower else "raise"
        title = f"Change of {self.target} without the k samples that should {wish} it most"
        return Table(title, ("method", *(f"k = {k}" for k in self.counts)), tuple(rows))


@dataclass(frozen=True, eq=False, repr=False)
class LabelErrors(Result):
    """Rankings of samples, and which of the samples have wrong labels."""

    suspicion: dict[str, Tensor]  # by method, (n,): the larger, the more suspicious
    wrong: Tensor  # (n,) bool

    @property
    def areas(self) -> dict[str, float]:
        """Area under the ROC curve: how often a wrong sample is ranked above a right one, ties counted half."""
        return {name: _area(values, self.wrong) for name, values in self.suspicion.items()}

    def table(self) -> Table:
        """Return the area under the ROC curve, and the share of wrong labels found by inspecting as many samples."""
        count, n = int(self.wrong.sum()), len(self.wrong)
        found = [self.wrong[torch.argsort(x, descending=True, stable=True)[:count]] for x in self.suspicion.values()]
        rows = [(*item, float(x.double().mean())) for item, x in zip(self.areas.items(), found, strict=True)]
        title = f"Label errors: {count} of {n} labels are wrong"
        return Table(title, ("ranked by", "AUC", f"found in the first {count / n:.1%}"), tuple(rows))


def find_answers(actual: Tensor) -> Tensor:
    """Return a mask of the rows whose training gave an answer."""
    return torch.isfinite(actual).all(1)


def _count_trainings(what: str, actual: Tensor) -> str:
    """Return the number of trainings that gave an answer, of targets, and of trainings that failed, in words."""
    answered = int(find_answers(actual).sum())
    words = f"{count_words(answered, what)}, {count_words(actual.shape[1], 'target')}"
    failed = len(actual) - answered
    return words + (f" ({count_words(failed, 'training')} failed)" if failed else "")


def _correlate_ranks(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of each column of x with that of y; NaN where one of them is constant."""
    from scipy.stats import rankdata  # slow to import, seldom needed

    a, b = (rankdata(values, axis=0) for values in (x, y))
    a, b = a - a.mean(0), b - b.mean(0)
    spread = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.where(spread > 0, (a * b).sum(0) / np.where(spread > 0, spread, 1.0), np.nan)


def _area(suspicion: Tensor, wrong: Tensor) -> float:
    """Return the area under the ROC curve from the ranks of the wrong samples (Mann and Whitney's statistic)."""
    from scipy.stats import rankdata  # slow to import, seldom needed

    ranks, count = torch.from_numpy(rankdata(suspicion.numpy())), int(wrong.sum())
    return (float(ranks[wrong].mean()) - (count + 1) / 2) / (len(wrong) - count)
