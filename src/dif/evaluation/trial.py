"""A trial: methods that score the removal of samples, and the truth that they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError, count_words
from dif.estimators.influence import Influence
from dif.evaluation.methods import Methods, Scorer, check_scores, expect_scorer, name_methods, read_values, score
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.problem.samples import Samples, expect_samples
from dif.runtime.inputs import as_index


@dataclass(frozen=True, eq=False)
class Trial:
    """Methods by name, the truth, the target, and the samples that are removed."""

    methods: dict[str, Any]
    truth: Scorer
    target: Any
    population: Samples
    show_progress: bool

    @classmethod
    def of(
        cls, methods: Methods, truth: Scorer, target: Any, samples: Samples | int, show_progress: bool = True
    ) -> Trial:
        """Check the arguments that the evaluations have in common."""
        named, judge = name_methods(methods), expect_scorer(truth)
        return cls(named, judge, target, expect_population(samples), show_progress)

    def predict(self, *, leave_out: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the score of removing each sample by each method, (n, T); (n, 1) where it is one for all targets."""
        each = self.population.remove_each()
        return {
            name: self._read(name, method, each)
            for name, method in self.methods.items()
            if leave_out is None or name not in leave_out
        }

    def measure(self, removals: Perturbation) -> Influence:
        """Return what the truth says about removals."""
        return score(self.truth, self.target, removals, self.show_progress)

    @cached_property
    def known_targets(self) -> int | None:
        """The number of targets; None where only the truth can tell, by its scores."""
        solution, named = getattr(self.truth, "solution", None), getattr(self.truth, "targets", None)
        if isinstance(solution, Solution):
            return len(Targets(self.target, solution).names)
        return None if named is None else len(named)

    def _read(self, name: str, method: Any, each: Perturbation) -> Tensor:
        """Ask an estimator, or read an Influence or an array; check the result."""
        if isinstance(method, Influence) and method.perturbations != tuple(each.labels):
            raise InvalidInputError(
                f"The Influence of {name!r} has {count_words(len(method), 'perturbation')}, the first of them "
                f"{method.perturbations[0]!r}.",
                f"It must have {len(each)}, the removals of each sample in order, as {each[0].labels[0]!r}.",
                "Scores are matched by the number of their sample.",
                "Score remove_each() of the same Samples, or pass influence.values.",
            )
        values = score(method, self.target, each).values if isinstance(method, Scorer) else read_values(name, method)
        return check_scores(name, values, len(each), self.known_targets)


def expect_population(samples: Samples | int) -> Samples:
    """Return the samples that are removed; a number stands for samples that only the user's own training knows."""
    count = as_index(samples)
    if count is None:
        return expect_samples(samples)
    if count < 2:
        raise InvalidInputError(
            f"`samples` is {count}.",
            "It must be dif.Samples, or their number, at least 2.",
            "Evaluation removes some samples and keeps the others.",
            "Pass the Samples of the problem, or how many samples your own training has.",
        )
    return Samples(lambda params, numbers: numbers, torch.arange(count), name="samples")
