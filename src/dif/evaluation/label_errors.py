"""Label errors: does a ranking of the samples put those with wrong labels first?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dif.analyses.self_influence import self_influence
from dif.errors import InvalidInputError, few
from dif.estimators.protocol import Estimator
from dif.evaluation.methods import Methods, check_scores, expect_seed, name_methods, read_values
from dif.evaluation.picture import GREY, colour_methods
from dif.evaluation.result import Result
from dif.evaluation.table import Table
from dif.evaluation.trial import expect_population
from dif.problem.samples import Samples
from dif.runtime.axes import draw_on
from dif.runtime.inputs import as_tensor, check_number


@dataclass(frozen=True, eq=False, repr=False)
class LabelErrors(Result):
    """Rankings of samples, and which of the samples have wrong labels."""

    suspicion: dict[str, Tensor]  # by method, (n,): the larger, the more suspicious
    wrong: Tensor  # (n,) bool

    @property
    def areas(self) -> dict[str, float]:
        """Area under the ROC curve: how often a wrong sample is ranked above a right one, ties counted half."""
        return {name: _area(values, self.wrong) for name, values in self.suspicion.items()}

    def share_found(self, name: str, share: float) -> float:
        """Return the share of the wrong labels among the most suspicious samples, which are a given share of all."""
        if not isinstance(name, str) or name not in self.suspicion:
            raise InvalidInputError(
                f"There is no method {name!r}.",
                f"The methods are {few(list(self.suspicion), quoted=True)}.",
                "Each method ranks the samples by its own suspicion.",
                "Choose one of them.",
            )
        part = check_number(
            share,
            "share",
            zero=True,
            meaning="It is the share of the samples that are inspected.",
            cure="Use 0.1, say.",
        )
        inspected = torch.argsort(self.suspicion[name], descending=True, stable=True)[: round(part * len(self.wrong))]
        return float(self.wrong[inspected].sum() / self.wrong.sum())

    def table(self) -> Table:
        """Return the area under the ROC curve, and the share of wrong labels found by inspecting as many samples."""
        base = float(self.wrong.double().mean())
        title = f"Label errors: {int(self.wrong.sum())} of {len(self.wrong)} labels are wrong"
        rows = tuple((name, area, self.share_found(name, base)) for name, area in self.areas.items())
        return Table(title, ("ranked by", "AUC", f"found in the first {base:.1%}"), rows)

    def plot(self, ax: Any = None) -> Any:
        """Plot the share of wrong labels found against the share of samples inspected; return the axes."""
        ax = draw_on(ax)
        inspected = torch.arange(len(self.wrong) + 1) / len(self.wrong)
        for name, colour in colour_methods(self.suspicion):
            order = torch.argsort(self.suspicion[name], descending=True, stable=True)
            found = torch.cumsum(self.wrong[order].double(), 0) / self.wrong.sum()
            label = f"{name}, AUC {self.areas[name]:.3f}"
            ax.plot(inspected, [0.0, *found.tolist()], color=colour, label=label)
        ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
        ax.set_xlabel("share of samples inspected")
        ax.set_ylabel("share of wrong labels found")
        ax.legend(frameon=False)
        return ax


def label_error_auc(
    methods: Methods, wrong: Any, samples: Samples | int | None = None, *, show_progress: bool = True
) -> LabelErrors:
    """Measure how well rankings find wrong labels: the area under the ROC curve of each.

    Args:
        methods: By name, or a list. Numbers, (n,), are taken as they are: the larger, the more suspicious (the loss of
            each sample, for example). An estimator is asked for `dif.self_influence`, how much the loss of each
            sample would rise without it.
        wrong: Which labels are wrong: a boolean mask, (n,), as `flip_labels` returns it.
        samples: The Samples, for estimators.
        show_progress: Show a bar on a terminal.
    """
    mask = as_tensor(wrong, "wrong labels").cpu()
    count = int(mask.sum()) if mask.dtype == torch.bool and mask.dim() == 1 else 0
    if not 0 < count < len(mask):
        raise InvalidInputError(
            f"`wrong` has dtype {mask.dtype} and shape {tuple(mask.shape)}, with {count} true entries.",
            "It must be a boolean mask with one entry per sample, some true and some false.",
            "A ranking is judged by how it separates wrong labels from right ones.",
            "Pass (labels != true_labels), or the mask that dif.evaluation.flip_labels returns.",
        )
    population = expect_population(len(mask) if samples is None else samples)
    if len(population) != len(mask):
        raise InvalidInputError(
            f"`wrong` has {len(mask)} entries.",
            f"It must have {len(population)}, one per sample.",
            "It says of each sample whether its label is wrong.",
            "Give the mask in the order of the samples.",
        )
    suspicion = {}
    for name, method in name_methods(methods).items():
        if isinstance(method, Estimator) and samples is None:
            raise InvalidInputError(
                f"{name!r} is an estimator, and `samples` was left out.",
                "With estimators, `samples` must be the Samples that they remove.",
                "The suspicion of an estimator is the self-influence of each sample.",
                "Pass samples=train.",
            )
        if isinstance(method, Estimator):
            values = self_influence(method, population, show_progress=show_progress).values
            lowest = float(values[torch.isfinite(values)].min())
            values = values.nan_to_num(nan=lowest)  # of samples that cannot be removed
        else:
            values = read_values(name, method)
        suspicion[name] = check_scores(name, values, len(mask), 1)[:, 0]
    return LabelErrors(suspicion, mask)


def flip_labels(labels: Any, share: float, *, seed: int | torch.Generator = 0) -> tuple[Tensor, Tensor]:
    """Make a share of the labels wrong: each becomes one of the other labels, with equal chances.

    Args:
        labels: (n,) at least two different labels.
        share: Share of the samples whose labels become wrong.
        seed: Seed, or a generator, of the draw.

    Returns:
        The labels, and the mask of those that are wrong.

    >>> labels, wrong = flip_labels(torch.tensor([0, 1, 1, 0]), 0.5)
    >>> int(wrong.sum()), torch.equal(labels != torch.tensor([0, 1, 1, 0]), wrong)
    (2, True)
    """
    given = as_tensor(labels, "labels")
    n, size = given.numel(), check_number(
        share, "share", zero=True, meaning="It is the share of the labels that are made wrong.", cure="Use 0.1, say."
    )  # fmt: skip
    classes, code = torch.unique(given, return_inverse=True)
    if given.dim() != 1 or len(classes) < 2 or size > 1:
        raise InvalidInputError(
            f"There are {n} labels of shape {tuple(given.shape)} with {len(classes)} different values, and `share` is "
            f"{share}.",
            "There must be a vector of at least 2 different labels, and a share of at most 1.",
            "A wrong label is one of the others.",
            "Pass the labels of all samples.",
        )
    generator = expect_seed(seed)
    wrong = torch.zeros(n, dtype=torch.bool)
    wrong[torch.randperm(n, generator=generator)[: int(size * n)]] = True
    other = (code.cpu() + torch.randint(1, len(classes), (n,), generator=generator)) % len(classes)
    wrong = wrong.to(given.device)
    return torch.where(wrong, classes[other.to(given.device)], given), wrong


def _area(suspicion: Tensor, wrong: Tensor) -> float:
    """Return the area under the ROC curve from the ranks of the wrong samples (Mann and Whitney's statistic)."""
    from scipy.stats import rankdata  # slow to import, seldom needed

    ranks, count = torch.from_numpy(rankdata(suspicion.numpy())), int(wrong.sum())
    above = float(ranks[wrong].sum()) - count * (count + 1) / 2
    return above / (count * (len(wrong) - count))
