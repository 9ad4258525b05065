"""How good are scores? Three tests train again without some samples; one knows which labels are wrong."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.analyses.self_influence import self_influence
from dif.derivatives.program import Targets
from dif.errors import InvalidInputError, count_words, format_table
from dif.estimators.protocol import Estimator
from dif.optimality.solution import Solution
from dif.problem.perturbation import Perturbation
from dif.problem.samples import Samples
from dif.results.change import Agreement
from dif.results.influence import Influence
from dif.runtime.inputs import as_index, as_numbers, as_tensor, check_instance
from dif.runtime.work import progress

__all__ = [
    "DatamodellingScore",
    "LabelErrors",
    "LeaveOneOut",
    "RemovalCurve",
    "Table",
    "label_error_auc",
    "leave_one_out_agreement",
    "linear_datamodelling_score",
    "removal_curve",
]

_PLACES = 7  # decimal places beyond which powers of ten are written
_DRAWS = 200  # bootstrap draws behind a standard error
_NAN = float("nan")


@dataclass(frozen=True)
class Table:
    """A title, headings and rows. The first cell of a row is a name, the others are numbers.

    Examples:
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
        return f"{self.title}\n{format_table(self.headings, tuple(self.format_rows()))}"

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


_CHECKS = ("assess", "probe")  # options of estimators that check their own predictions; evaluation does that
_FEWEST = 3  # subsets below which a rank correlation says nothing

Methods = Mapping[str, Any] | Sequence[Estimator]  # by name: estimators, an Influence, or arrays with a row per sample
Truth = Estimator | Callable[[list[int]], Any]  # trains again: an estimator, or a function of the samples to train on


def linear_datamodelling_score(
    methods: Methods,
    truth: Truth,
    target: Any,
    samples: Samples,
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
        truth: `dif.Retraining(solution, keep=folder)` or any other estimator. For a model that dif cannot train, a
            function: it is called with the numbers of the samples to train on and returns the targets of the model.
        target: A Term, a list of Terms, or Samples (one target per sample); None where nothing but arrays is asked.
        samples: The Samples to remove from.
        subsets: How many subsets are removed.
        share: Share of the samples that each removes.
        seed: Seed of the draw.
        jointly: Ask estimators for the removal of each subset as a whole instead of adding up the scores of its
            samples. This is no longer the score of the literature, but what estimators of groups are for.
        show_progress: Show a bar on a terminal while training.
    """
    count = len(check_instance(samples, Samples, "samples"))
    named, removed = _name_methods(methods), _draw_subsets(count, subsets, share, seed)
    whole = {name: method for name, method in named.items() if jointly and isinstance(method, Estimator)}
    scores = _predict({name: named[name] for name in named if name not in whole}, truth, target, samples)
    sums = {name: torch.stack([values[index].sum(0) for index in removed]) for name, values in scores.items()}
    sums |= {name: _score(method, target, samples.remove_groups(removed)).values for name, method in whole.items()}
    actual, targets = _measure(truth, target, samples, removed, show_progress)
    predicted = _expand({name: sums[name] for name in named}, len(removed), len(targets))
    answered = int(find_answers(actual).sum())
    if answered < _FEWEST:
        raise InvalidInputError(f"{answered} of {len(removed)} trainings gave an answer; at least {_FEWEST} must.")
    return DatamodellingScore(tuple(map(tuple, removed)), actual, predicted, targets)


def leave_one_out_agreement(
    methods: Methods, truth: Truth, target: Any, samples: Samples, *, strongest: int = 20, random: int = 20,
    seed: int = 0, show_progress: bool = True,
) -> LeaveOneOut:  # fmt: skip
    """Remove the strongest samples by each method, and random ones, one at a time; train again and compare.

    Every method is judged on the same samples: the strongest of all methods together and the random ones, so that none
    is judged only where another one expects large changes.

    Args:
        methods: As for `linear_datamodelling_score`: estimators, an Influence, or arrays of scores, by name.
        truth: Trains again, as for `linear_datamodelling_score`.
        target: A Term, a list of Terms, or Samples; None where nothing but arrays is asked.
        samples: The Samples to remove from.
        strongest: How many samples of each method: those with the largest scores, in Euclidean norm over the targets.
        random: How many random samples.
        seed: Seed of the draw.
        show_progress: Show a bar on a terminal while training.
    """
    named, generator = _name_methods(methods), _expect_seed(seed)
    most, drawn = _expect_count(strongest, "strongest"), _expect_count(random, "random")
    if max(most, drawn) < 2:
        raise InvalidInputError(f"`strongest` or `random` must be at least 2, not {most} and {drawn}.")
    scores = _predict(named, truth, target, samples)
    chosen = set(torch.randperm(len(samples), generator=generator)[:drawn].tolist())
    for values in scores.values():
        chosen.update(_rank(torch.linalg.vector_norm(values, dim=1))[:most].tolist())
    indices = sorted(chosen)
    actual, targets = _measure(truth, target, samples, [[i] for i in indices], show_progress)
    predicted = _expand({name: values[indices] for name, values in scores.items()}, len(indices), len(targets))
    return LeaveOneOut(tuple(indices), actual, predicted, targets)


def removal_curve(
    methods: Methods,
    truth: Truth,
    target: Any,
    samples: Samples,
    counts: Sequence[int],
    *,
    lower: bool = False,
    random: int = 5,
    seed: int = 0,
    show_progress: bool = True,
) -> RemovalCurve:
    """Remove the top k samples of each method, train again, and report the change of the target.

    The better a method finds the samples that matter, the steeper its curve. Samples are ranked once, by their scores
    at the full data (`dif.choose` ranks again after each removal).

    Args:
        methods: By name, or a list: estimators, an Influence of samples.remove_each(), or arrays of scores, (n,). A
            score is the predicted change of the target if the sample is removed.
        truth: Trains again, as for `linear_datamodelling_score`. With `dif.Retraining(…, strict=False)` removals after
            which training fails are left out of the curves.
        target: A Term; None where nothing but arrays is asked.
        samples: The Samples to remove from.
        counts: The numbers k of samples to remove, such as [10, 20, 50, 100].
        lower: Remove the samples with the lowest scores, which should lower the target; False removes the highest.
        random: How many random orders are removed for comparison; 0 for none.
        seed: Seed of the random orders.
        show_progress: Show a bar on a terminal while training.
    """
    named, n = _name_methods(methods), len(check_instance(samples, Samples, "samples"))
    repeats, generator = _expect_count(random, "random"), _expect_seed(seed)
    several = isinstance(counts, Iterable) and getattr(counts, "ndim", 1) == 1
    sizes = sorted({as_index(k) or 0 for k in counts} if several else ())
    if not sizes or not 0 < sizes[0] <= sizes[-1] < n:
        raise InvalidInputError(f"`counts` must be a list of integers from 1 to {n - 1}, not {counts!r}.")
    scores = _predict(named, truth, target, samples, single=True)
    ranked = (_rank(values[:, 0], descending=not lower) for values in scores.values())
    orders = [*ranked, *(torch.randperm(n, generator=generator) for _ in range(repeats))]
    removed = [order[:k].tolist() for order in orders for k in sizes]
    actual, targets = _measure(truth, target, samples, removed, show_progress)
    _expect_one_target(len(targets))
    curves = actual.reshape(len(orders), len(sizes))
    first = {name: tuple(order[: sizes[-1]].tolist()) for name, order in zip(scores, orders, strict=False)}
    changes = {name: curve.clone() for name, curve in zip(scores, curves, strict=False)}
    return RemovalCurve(tuple(sizes), changes, curves[len(scores) :].clone(), first, targets[0], lower)


def label_error_auc(
    methods: Methods, wrong: Any, samples: Samples | None = None, *, show_progress: bool = True
) -> LabelErrors:
    """Measure how well rankings find wrong labels: the area under the ROC curve of each.

    Args:
        methods: By name, or a list. Numbers, (n,), are taken as they are: the larger, the more suspicious (the loss of
            each sample, for example). An estimator is asked for `dif.self_influence`, how much the loss of each
            sample would rise without it.
        wrong: Which labels are wrong: a boolean mask, (n,).
        samples: The Samples, for estimators.
        show_progress: Show a bar on a terminal.
    """
    mask, named = as_tensor(wrong, "wrong labels").cpu(), _name_methods(methods)
    if mask.dtype != torch.bool or mask.dim() != 1 or not 0 < int(mask.sum()) < len(mask):
        raise InvalidInputError("`wrong` must be a boolean mask, one entry per sample, some true and some false.")
    if samples is not None and len(check_instance(samples, Samples, "samples")) != len(mask):
        raise InvalidInputError(f"`wrong` must have {len(samples)} entries, one per sample, not {len(mask)}.")
    suspicion = {}
    for name, method in named.items():
        if isinstance(method, Estimator):
            if samples is None:
                raise InvalidInputError(f"`samples` must be given, since {name!r} is an estimator.")
            values = self_influence(method, samples, show_progress=show_progress).values
            lowest = float(values[torch.isfinite(values)].min())
            values = values.nan_to_num(nan=lowest)  # of samples that cannot be removed
        else:
            values = _read_values(name, method)
        suspicion[name] = _check_scores(name, values, len(mask), 1)[:, 0]
    return LabelErrors(suspicion, mask)


def _name_methods(methods: Methods) -> dict[str, Any]:
    """Return methods by name; those of a list have names of their own."""
    if isinstance(methods, Mapping):
        named = {str(name): method for name, method in methods.items()}
    else:
        listed = isinstance(methods, Sequence) and all(isinstance(method, Estimator) for method in methods)
        named = {method.name: method for method in methods} if listed else {}
    if not named or len(named) < len(methods):
        raise InvalidInputError("`methods` must be a dict by name, or a list of estimators with different names.")
    for name, method in named.items():
        if isinstance(method, type):
            raise InvalidInputError(f"The method {name!r} must be an estimator such as {method.__name__}(solution).")
    return named


def _predict(
    methods: Mapping[str, Any], truth: Truth, target: Any, samples: Samples, *, single: bool = False
) -> dict[str, Tensor]:
    """Return the score of removing each sample by each method, (n, T); (n, 1) where it is one for all targets."""
    if isinstance(truth, type) or not (isinstance(truth, Estimator) or callable(truth)):
        raise InvalidInputError(f"`truth` must be an estimator such as dif.Retraining, or a function, not {truth!r}.")
    each, solution = check_instance(samples, Samples, "samples").remove_each(), getattr(truth, "solution", None)
    known = len(Targets(target, solution).names) if isinstance(solution, Solution) else 1 if single else None
    if single:
        _expect_one_target(known)
    predicted = {}
    for name, method in methods.items():
        if isinstance(method, Influence) and method.perturbations != tuple(each.labels):
            raise InvalidInputError(f"The Influence of {name!r} must be one of remove_each() of the same Samples.")
        values = _score(method, target, each).values if isinstance(method, Estimator) else _read_values(name, method)
        predicted[name] = _check_scores(name, values, len(each), known)
    return predicted


def _measure(
    truth: Truth, target: Any, samples: Samples, removed: list[list[int]], show_progress: bool
) -> tuple[Tensor, tuple[str, ...]]:
    """Train again without each group of samples; return the changes of the targets, (P, T), and their names."""
    if isinstance(truth, Estimator):
        actual = _score(truth, target, samples.remove_groups(removed), show_progress)
        return actual.values.double(), actual.targets
    values = []
    with progress("own training", 1 + len(removed), show_progress) as report:
        for number, gone in enumerate(map(set, [[], *removed]), 1):
            answer = truth([i for i in range(len(samples)) if i not in gone])
            values.append(as_numbers(answer, "targets returned by `truth`").reshape(-1))
            report(number)
    if len({len(value) for value in values}) > 1 or not len(values[0]):
        raise InvalidInputError("`truth` must return equally many targets after every training, at least one.")
    return torch.stack(values[1:]) - values[0], tuple(f"target {t}" for t in range(len(values[0])))


def _expect_count(value: Any, name: str) -> int:
    number = as_index(value)
    if number is None or not 0 <= number < 2**63:
        raise InvalidInputError(f"`{name}` must be an integer ≥ 0, not {value!r}.")
    return number


def _expect_seed(seed: int | torch.Generator) -> torch.Generator:
    """Return the generator of random choices: of a seed, or the given one."""
    if isinstance(seed, torch.Generator):
        return seed
    return torch.Generator().manual_seed(_expect_count(seed, "seed"))


def _expect_one_target(count: int | None) -> None:
    if count not in (None, 1):
        raise InvalidInputError(f"A curve has one target, not {count}; pass one Term, such as test.mean().")


def _draw_subsets(n: int, subsets: int, share: float, seed: int) -> list[list[int]]:
    """Draw the samples that each subset lacks."""
    count, generator = _expect_count(subsets, "subsets"), _expect_seed(seed)
    if count < _FEWEST:
        raise InvalidInputError(f"`subsets` must be at least {_FEWEST}, not {count}.")
    if not isinstance(share, int | float) or not 0 < share < 1 or int(share * n) < 1:
        raise InvalidInputError(f"`share` must take at least one of {n} samples but not all; it is {share!r}.")
    return [torch.randperm(n, generator=generator)[: int(share * n)].tolist() for _ in range(count)]


def _score(estimator: Estimator, target: Any, perturbations: Perturbation, show_progress: bool = False) -> Influence:
    """Return scores without the estimator's own checks of them."""
    known = inspect.signature(estimator.scores).parameters
    options: dict[str, Any] = {name: 0 for name in _CHECKS if name in known}
    return estimator.scores(target, perturbations, show_progress=show_progress, **options)


def _read_values(name: str, method: Any) -> Tensor:
    """Return scores that were computed elsewhere, (n, T): an Influence, or numbers, (n,) or (n, T)."""
    values = method.values if isinstance(method, Influence) else as_numbers(method, f"scores of {name!r}")
    return values[:, None] if values.dim() == 1 else values


def _check_scores(name: str, values: Tensor, n: int, targets: int | None) -> Tensor:
    """Refuse scores of another shape than (n, T) or (n, 1), or that are not finite."""
    finite = bool(torch.isfinite(values).all())
    if values.dim() != 2 or len(values) != n or values.shape[1] not in (1, targets or values.shape[1]) or not finite:
        raise InvalidInputError(
            f"The scores of {name!r} must be finite and of shape ({n},) or ({n}, {targets or 'T'}), "
            f"not of shape {tuple(values.shape)}{'' if finite else ' with NaN or ∞'}; use 0 for what has no score."
        )
    return values.double()


def _expand(scores: Mapping[str, Tensor], rows: int, targets: int) -> dict[str, Tensor]:
    """Return scores of every target, (rows, T)."""
    checked = {name: _check_scores(name, values, rows, targets) for name, values in scores.items()}
    return {name: values.expand(-1, targets).contiguous() for name, values in checked.items()}


def _rank(values: Tensor, descending: bool = True) -> Tensor:
    return torch.argsort(values, descending=descending, stable=True)
