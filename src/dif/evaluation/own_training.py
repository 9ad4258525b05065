"""Ground truth from a training of one's own."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.derivatives.fingerprint import ObjectEncoder, hash_all
from dif.errors import InvalidInputError, count_words, warn
from dif.estimators.influence import Influence
from dif.evaluation.methods import read_removals
from dif.problem.perturbation import Perturbation
from dif.runtime.atomic_file import open_atomically
from dif.runtime.file_path import expect_folder
from dif.runtime.inputs import as_index, as_numbers, check_count, check_list
from dif.runtime.progress import progress


class OwnTraining:
    """Trains again by a function of yours, for models that `dif.Retraining` cannot retrain.

    Where the result of training depends on a seed, the targets are averaged over several seeds, as in TRAK (Park et al.
    2023).

    Args:
        train: Called as train(kept, seed) with the numbers of the samples to train on, ascending. It returns the
            targets of the trained model: a number, or T numbers.
        count: How many samples there are.
        seeds: Seeds over which the targets are averaged.
        keep: Folder for finished trainings, one file each. Those found there are not repeated, so that interrupted
            runs resume. If the function changes, or anything it refers to (code, data, settings), it trains again.
    """

    name = "own training"

    def __init__(
        self,
        train: Callable[[list[int], int], Any],
        count: int,
        *,
        seeds: Sequence[int] = (0,),
        keep: str | os.PathLike[str] | None = None,
    ) -> None:
        if not _can_call(train):
            found = "does not take two arguments" if callable(train) else f"is of type {type(train).__name__}"
            raise InvalidInputError(
                f"`train` {found}.",
                "It must be a function train(kept, seed).",
                "It is called with the numbers of the samples to train on, and a seed.",
                "Pass a function that trains and returns the targets of the trained model.",
            )
        self.train = train
        self.count = check_count(
            count,
            "count",
            meaning="It is the number of samples of your training.",
            cure="Pass the number of samples that there are before any is removed.",
        )
        words = {
            "allowed": "It must be a list of integers, at least one.",
            "meaning": "Targets are averaged over trainings with these seeds.",
            "cure": "Use seeds=[0] for a training that does not depend on a seed.",
        }
        given = check_list(seeds, "seeds", **words)
        self.seeds = [number for seed in given if (number := as_index(seed)) is not None]
        if len(self.seeds) < len(given):
            raise InvalidInputError(f"`seeds` is {seeds!r}.", **words)
        self.folder = None if keep is None else expect_folder(keep, "keep")
        self._mark = b"" if keep is None else _fingerprint(train)

    def scores(self, target: Any, perturbations: Perturbation, *, show_progress: bool = True) -> Influence:
        """Train without the samples of each removal and return the change of each target.

        The function itself decides what the targets are, so `target` may be None. Where other methods are asked about
        it, it must be what the function returns.
        """
        samples, removed = read_removals(perturbations)
        if len(samples) != self.count:
            raise InvalidInputError(
                f"{count_words(len(samples), 'sample')} can be removed, but `count` is {self.count}.",
                "Both must be the same.",
                "The numbers of the samples are those that your function trains on.",
                "Pass OwnTraining(train, len(samples)).",
            )
        changes = []
        with progress(self.name, len(removed), show_progress) as report:
            for number, indices in enumerate(removed):
                gone = set(indices)
                changes.append(self._evaluate([i for i in range(self.count) if i not in gone]) - self.before)
                report(number + 1)
        return Influence(torch.stack(changes), perturbations, self.targets, self.name)

    @cached_property
    def before(self) -> Tensor:
        """The targets after training on all samples, (T,)."""
        return self._evaluate(list(range(self.count)))

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the targets, by their number."""
        return tuple(f"target {t}" for t in range(len(self.before)))

    def _evaluate(self, kept: list[int]) -> Tensor:
        """Return the targets after training on some samples, averaged over the seeds, (T,)."""
        values = [self._train_once(kept, seed) for seed in self.seeds]
        lengths = {len(value) for value in values} | ({len(self.before)} if len(kept) < self.count else set())
        if len(lengths) > 1 or 0 in lengths:
            raise InvalidInputError(
                f"`train` returned {' and '.join(count_words(length, 'number') for length in sorted(lengths))}.",
                "It must always return equally many, at least one.",
                "Each number is a target, which is compared between trainings.",
                "Return the same targets in the same order after every training.",
            )
        return torch.stack(values).mean(0)

    def _train_once(self, kept: list[int], seed: int) -> Tensor:
        """Train with one seed, or read the targets of an earlier training, (T,)."""
        if self.folder is None:
            return self._call(kept, seed)
        name = hash_all([self._mark, np.array([seed, self.count, *kept], dtype="<i8").tobytes()]).hex()[:32]
        path = self.folder / f"{name}.npy"
        if path.exists():
            return _read(path)
        values = self._call(kept, seed)
        with open_atomically(path) as file:
            np.save(file, values.numpy(), allow_pickle=False)
        return values

    def _call(self, kept: list[int], seed: int) -> Tensor:
        return as_numbers(self.train(kept, seed), "targets returned by `train`").reshape(-1)


def _can_call(train: Any) -> bool:
    """Return whether train(kept, seed) is a possible call, as far as Python can tell before."""
    try:
        inspect.signature(train).bind([], 0)
    except TypeError:
        return False
    except ValueError:  # some functions of C have no signature
        return True
    return True


def _fingerprint(train: Callable[[list[int], int], Any]) -> bytes:
    """Hash a training function and all it refers to; warn if that cannot be inspected, so that it never recurs."""
    first, again = (hash_all(ObjectEncoder().encode(train)) for _ in range(2))
    if first != again:
        warn(
            "`train` refers to an object that cannot be inspected, so nobody can tell whether it has changed. What is "
            "kept in the folder will not be used again in another run. Create such objects (generators, locks, open "
            "files) inside the function.",
            UserWarning,
        )
    return first


def _read(path: Path) -> Tensor:
    """Return the targets of a kept training."""
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        raise InvalidInputError(
            f"The kept training {str(path)!r} cannot be read ({type(error).__name__}: {error}).",
            "It must be a file that OwnTraining wrote.",
            "It is damaged.",
            "Delete the file; that training is then repeated.",
        ) from error
