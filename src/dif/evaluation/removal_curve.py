"""Removal curves: remove the top k samples of each method, train again, and see how far the target moves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.evaluation.methods import Methods, Scorer, expect_seed, expect_size
from dif.evaluation.picture import GREY, colour_methods
from dif.evaluation.result import Result
from dif.evaluation.result_file import read_result, write_result
from dif.evaluation.table import Table
from dif.evaluation.trial import Trial
from dif.problem.samples import Samples
from dif.runtime.axes import draw_on
from dif.runtime.inputs import as_index, check_list

_KIND = "removal curve"  # of file


@dataclass(frozen=True, eq=False, repr=False)
class RemovalCurve(Result):
    """The change of a target after training without the top k samples of each method, for several k."""

    counts: tuple[int, ...]  # (K,) how many samples were removed, ascending
    changes: dict[str, Tensor]  # by method, (K,); NaN where training failed
    random: Tensor  # (R, K) after removing random samples, in R random orders
    orders: dict[str, tuple[int, ...]]  # by method, the samples in the order of their removal
    target: str
    lower: bool  # whether the samples were chosen to lower the target

    @property
    def _wish(self) -> str:
        return "lower" if self.lower else "raise"

    def table(self) -> Table:
        """Return the change after k removals for each method, and mean and standard deviation of the random orders."""
        rows = [(name, *values.tolist()) for name, values in self.changes.items()]
        if len(self.random):
            rows.append((f"random, mean of {len(self.random)}", *self.random.mean(0).tolist()))
        if len(self.random) > 1:
            rows.append(("random, standard deviation", *self.random.std(0).tolist()))
        title = f"Change of {self.target} without the k samples that should {self._wish} it most"
        return Table(title, ("method", *(f"k = {k}" for k in self.counts)), tuple(rows))

    def plot(self, ax: Any = None) -> Any:
        """Plot the change of the target against k, with a band from the least to the greatest random change."""
        ax = draw_on(ax)
        at = [0, *self.counts]
        if len(self.random):
            curves = torch.cat([torch.zeros(len(self.random), 1), self.random], 1).numpy()
            ax.fill_between(at, curves.min(0), curves.max(0), color=GREY, alpha=0.25, linewidth=0)
            label = f"random ({len(self.random)} orders)"
            ax.plot(at, curves.mean(0), color=GREY, linestyle="--", marker="o", markersize=3, label=label)
        for name, colour in colour_methods(self.changes):
            ax.plot(at, [0.0, *self.changes[name].tolist()], color=colour, marker="o", markersize=4, label=name)
        ax.axhline(0.0, color=GREY, linewidth=1)
        ax.set_xlabel(f"samples removed, first those that should {self._wish} it most")
        ax.set_ylabel(f"change of {self.target} (retrained)")
        ax.legend(frameon=False)
        return ax

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all to one file (npz, no pickle)."""
        about = {"counts": self.counts, "orders": self.orders, "target": self.target, "lower": self.lower}
        write_result(path, _KIND, about, self.changes, random=self.random)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RemovalCurve:
        """Read a file that `save` wrote."""
        about, changes, arrays = read_result(path, _KIND)
        orders = {name: tuple(order) for name, order in about["orders"].items()}
        return cls(tuple(about["counts"]), changes, arrays["random"], orders, about["target"], about["lower"])


def removal_curve(
    methods: Methods,
    truth: Scorer,
    target: Any,
    samples: Samples | int,
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
        truth: `dif.Retraining(solution, keep=folder)`, an `OwnTraining`, or any other estimator. With
            `strict=False` removals after which training fails are left out of the curves.
        target: A Term; None where nothing but arrays is asked.
        samples: The Samples to remove from; their number where only an `OwnTraining` knows them.
        counts: The numbers k of samples to remove, such as [10, 20, 50, 100].
        lower: Remove the samples with the lowest scores, which should lower the target; False removes the highest.
        random: How many random orders are removed for comparison; 0 for none.
        seed: Seed of the random orders.
        show_progress: Show a bar on a terminal while training.
    """
    trial = Trial.of(methods, truth, target, samples, show_progress)
    n, repeats, generator = len(trial.population), as_index(random), expect_seed(seed)
    listed = check_list(
        counts,
        "counts",
        allowed="It must be a list of integers, at least one.",
        meaning="Each is a number of samples to remove at once.",
        cure="Pass, for example, [10, 20, 50, 100].",
    )
    sizes = sorted({expect_size(count, "counts", n - 1) for count in listed})
    if repeats is None or repeats < 0:
        raise InvalidInputError(
            f"`random` is {random!r}.",
            "It must be an integer ≥ 0.",
            "It says how many random orders are removed for comparison.",
            "Use 5 for a band, 0 for none.",
        )
    if trial.known_targets not in (None, 1):
        raise _target_error(trial.known_targets)
    scores = trial.predict()
    several = [values.shape[1] for values in scores.values() if values.shape[1] != 1]
    if several:
        raise _target_error(several[0])
    ranked = (torch.argsort(values[:, 0], descending=not lower, stable=True) for values in scores.values())
    orders = [*ranked, *(torch.randperm(n, generator=generator) for _ in range(repeats))]
    groups = trial.population.remove_groups([order[:k].tolist() for order in orders for k in sizes])
    actual = trial.measure(groups)
    if len(actual.targets) != 1:
        raise _target_error(len(actual.targets))
    curves = actual.values.double().reshape(len(orders), len(sizes))
    first = {name: tuple(order[: sizes[-1]].tolist()) for name, order in zip(trial.methods, orders, strict=False)}
    changes = {name: curve.clone() for name, curve in zip(trial.methods, curves, strict=False)}
    return RemovalCurve(tuple(sizes), changes, curves[len(trial.methods) :].clone(), first, actual.targets[0], lower)


def _target_error(count: int | None) -> InvalidInputError:
    return InvalidInputError(
        f"There are {count} targets.",
        "There must be one target.",
        "The curve shows how one number moves.",
        "Pass one Term, such as test.mean(), and one score per sample.",
    )
