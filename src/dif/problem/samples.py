"""Samples: a loss per sample and its data, from which terms and perturbations are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dif.errors import InvalidInputError, few
from dif.problem.data import Storage, describe, map_tensors
from dif.problem.perturbation import Addition, Entries, Perturbation, Removal, Reweighting
from dif.problem.term import SampleSum, Term
from dif.runtime.guard import convert_errors
from dif.runtime.inputs import as_index, as_numbers, as_tensor, check_callable, check_count, check_labels, check_list

# Entry of `fallbacks` that changes how a loss is evaluated, but not what can be done with it
PLAIN_ATTENTION = "attention by plain products: the faster kernels can be differentiated only once"


class Samples:
    """n samples and the loss of each: `loss(params, batch)` → (n,), unreduced.

    Args:
        loss: Takes the params (a dict of tensors; with an `nn.Module`, an object that is called like it) and a batch
            of `data`; returns one number per sample.
        data: A tensor, a tuple or dict of tensors (first dimension: samples), memory-mapped arrays, a torch `Dataset`,
            or a `DataLoader` (its Dataset, collate function, batch size and workers are used; its order is not: sample
            i is item i). A pandas DataFrame of numbers becomes a tensor (n, columns) in float64, or in the columns'
            own precision if they share one; a Series keeps its dtype, so that class labels stay integers. Results show
            the index of the first of them. The data are not copied: do not change them while you use these samples.
            Batches are moved to the device of the parameters.
        name: Shown in labels, errors and reports.
        batch_size: Samples per pass; None takes as many as fit into memory. No result depends on it.
        outputs: The outputs of the model for a batch, `outputs(params, batch)` → (n, ...); the loss then takes these
            instead of the params, `loss(outputs, batch)`. Gauss–Newton curvature needs the two separately, and `fit`
            uses it where the Hessian is expensive.
        check: Called with the data of samples that are added or replace others, and raises an error where the loss is
            not meant for them, such as for labels in another coding.

    Examples:
        >>> train = Samples(lambda params, z: (z - params["mean"]) ** 2, torch.tensor([1.0, 2.0, 6.0]), name="train")
        >>> train.mean(), len(train)
        (Term(mean of train), 3)
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        data: Any,
        name: str = "samples",
        batch_size: int | None = None,
        outputs: Callable[[Any, Any], Tensor] | None = None,
        check: Callable[[Any], None] | None = None,
    ) -> None:
        check_callable(loss, "loss(params, batch)", f"Samples {name!r}")
        if outputs is not None:
            check_callable(outputs, "outputs(params, batch)", f"Samples {name!r}")
        if batch_size is not None:
            batch_size = check_count(batch_size, f"`batch_size` of Samples {name!r}")
        self.loss = loss if outputs is None else lambda params, batch: loss(outputs(params, batch), batch)
        self.parted = None if outputs is None else (outputs, loss)  # the model and the loss of its outputs, separately
        self.name, self.check = name, check
        self.storage = Storage.of(data, name)
        self.n = len(self.storage)
        self.population: Samples = self  # for a view, the Samples that it was made from
        self.batch_size = self.storage.batch_size if batch_size is None else batch_size
        self.costs: dict[int, Any] = {}  # cost of evaluating one sample, by number of parameters
        self.kinks: dict[int, Any] = {}  # where kinks were looked for last, and found, by number of parameters
        self.compared: Counter[int] = Counter()  # points where its derivatives were checked, by number of parameters
        self.fallbacks: set[str] = set()  # what torch could not do with the loss, and what is done instead

    def __repr__(self) -> str:
        return f"Samples({self.name!r}, n={len(self)})"

    def view(
        self,
        loss: Callable[[Any, Any], Tensor],
        name: str | None = None,
        outputs: Callable[[Any, Any], Tensor] | None = None,
    ) -> Samples:
        """Return the same samples under another loss, such as the predicted rate, margin or cost of a constraint.

        A removal, reweighting, replacement or addition of a sample acts on every view at once.

        Examples:
            >>> train = Samples(lambda params, z: (z - params["mean"]) ** 2, torch.tensor([1.0, 2.0]), name="train")
            >>> distance = train.view(lambda params, z: z - params["mean"], name="distance")
            >>> distance.remove([1])
            Perturbation(1: remove train[1])
        """
        name = f"view of {self.name}" if name is None else name
        other = Samples(loss, self.storage, name, self.batch_size, outputs)
        other.population = self.population
        return other

    # Terms of objectives and constraints

    def mean(self, where: Any = None, *, weights: Any = None) -> Term:
        """Return the mean loss over all samples, or over those where the boolean mask is true.

        With `weights`, one number ≥ 0 per sample, it is the weighted mean Σ wᵢℓᵢ / Σ wᵢ. After a removal it is the
        weighted mean of the remaining samples.
        """
        if weights is None:
            return self._over(where, normalised=True)
        given = self._vector(weights, "weights")
        members = torch.where(self._mask(where), given, 0.0)
        if bool((given < 0).any()) or not bool((members > 0).any()):
            raise InvalidInputError(
                f"The vector `weights` of {self.name!r} must have no entry below 0 and at least one above 0 where "
                f"the mask is true, not {int((given < 0).sum())} below 0 and {int((members > 0).sum())} above 0; "
                "Samples.weighted takes any sign."
            )
        words = f"weighted mean of {'' if where is None else f'{int((members > 0).sum())} of '}{self.name}"
        return Term(sums=((1.0, SampleSum(self, members / members.sum(), True, False, words)),))

    def sum(self, where: Any = None) -> Term:
        """Return the summed loss over all samples, or over those where the mask is true; it is never renormalised."""
        return self._over(where, normalised=False)

    def weighted(self, w: Any) -> Term:
        """Return Σᵢ wᵢ ℓᵢ with your own weights; it is never renormalised."""
        weights = self._vector(w, "w")
        return Term(sums=((1.0, SampleSum(self, weights, False, False, f"weighted {self.name}")),))

    # Perturbations of the data

    def remove(
        self, indices: int | Iterable[int], *, terms: Sequence[Any] | None = None, renormalise: bool = True
    ) -> Perturbation:
        """Return one perturbation that removes all these samples, from every term or only from `terms`.

        With `renormalise` every mean is then taken over the remaining samples, as in retraining; otherwise the 1/N of
        each mean stays (the paper's ε).
        """
        index = torch.tensor(self.check_indices(indices))
        return Perturbation.of(Removal(self, Entries(1, torch.zeros_like(index), index), renormalise, terms))

    def remove_each(
        self, indices: Iterable[int] | None = None, *, terms: Sequence[Any] | None = None, renormalise: bool = True
    ) -> Perturbation:
        """Return one removal per sample, of all samples or of those listed."""
        index = torch.arange(len(self)) if indices is None else torch.tensor(self.check_indices(indices))
        return Perturbation.of(Removal(self, Entries(len(index), torch.arange(len(index)), index), renormalise, terms))

    def remove_groups(
        self, groups: Iterable[Iterable[int]], *, terms: Sequence[Any] | None = None, renormalise: bool = True
    ) -> Perturbation:
        """Return one removal per group of samples."""
        listed = check_list(groups, "groups", "lists of indices")
        entries = Entries.of([self.check_indices(group) for group in listed])
        return Perturbation.of(Removal(self, entries, renormalise, terms))

    def reweight(self, dw: Any, *, terms: Sequence[Any] | None = None) -> Perturbation:
        """Return one perturbation that adds dw[i] to the weight of sample i in each term in which that is not 0.

        The added weight is multiplied by the coefficient of the term.
        """
        return Perturbation.of(Reweighting(self, self._vector(dw, "dw"), terms))

    def add(
        self,
        data: Any,
        *,
        like: int | Iterable[int] | None = None,
        terms: Sequence[Any] | None = None,
        renormalise: bool = True,
    ) -> Perturbation:
        """Return one perturbation that adds new samples (same structure as `data`, same loss).

        They are added to the means and sums over all samples, with the average weight of their members. Whether they
        belong to a masked mean, or what they weigh in a weighted sum, only you know: `like=i` (one index, or one per
        new sample) gives them the memberships and weights of sample i.
        """
        new = self._new_samples(data, "new")
        entries = Entries.of([list(range(len(new)))])
        return Perturbation.of(Addition(self, entries, renormalise, terms, new, self._like(like, len(new))))

    def replace(self, indices: int | Iterable[int], data: Any, *, terms: Sequence[Any] | None = None) -> Perturbation:
        """Return one perturbation that replaces the data of these samples, for example with a corrected label."""
        index = self.check_indices(indices)
        new = self._new_samples(data, "corrected")
        if len(new) != len(index):
            raise InvalidInputError(
                f"There must be as many new as old samples of {self.name!r}, not {len(new)} for {len(index)}; the "
                "data of one are data[i:i+1]."
            )
        removal = Removal(self, Entries.of([index]), False, terms)
        entries = Entries.of([list(range(len(new)))])
        addition = Addition(self, entries, False, terms, new, torch.tensor(index))
        return Perturbation.of(removal) + Perturbation.of(addition)

    def _new_samples(self, data: Any, kind: str) -> Samples:
        """Return Samples of new data with the same loss; refuse data of another structure, shape or dtype."""
        name = f"{kind} {self.population.name}"
        new = self.with_data(Storage.of(data, name))
        old_structure, new_structure = describe(self.storage.one()), describe(new.storage.one())
        if old_structure != new_structure:
            raise InvalidInputError(
                f"The new data for {self.name!r} must have the structure {old_structure}, not {new_structure}; the "
                "data of one sample are data[i:i+1]."
            )
        if (check := self.population.check) is not None:
            for _, batch in new.batches():
                check(batch)
        new.name = name
        return new

    def _over(self, where: Any, normalised: bool) -> Term:
        """Return the mean or the sum over the samples of a mask; None means all samples."""
        members, everyone = self._mask(where), where is None
        weights = members.double() / members.sum() if normalised else members.double()
        words = f"{'mean' if normalised else 'sum'} of {'' if everyone else f'{int(members.sum())} of '}{self.name}"
        return Term(sums=((1.0, SampleSum(self, weights, normalised, everyone, words)),))

    def _mask(self, where: Any) -> Tensor:
        """Return a mask as a boolean tensor, (n,); None means all samples."""
        if where is None:
            return torch.ones(len(self), dtype=torch.bool)
        self._check_order(where, f"The mask `where` of {self.name!r}")
        mask = as_tensor(where, f"the mask `where` of {self.name!r}").cpu()
        if mask.dtype != torch.bool or mask.shape != (len(self),) or not bool(mask.any()):
            raise InvalidInputError(
                f"The mask `where` of {self.name!r} must be torch.bool, shape ({len(self)},), with at least one "
                f"true; it is {mask.dtype}, shape {tuple(mask.shape)}, {int((mask != 0).sum())} true."
            )
        return mask

    def _check_order(self, column: Any, what: str) -> None:
        """Refuse a mask or a vector that has the labels of these samples in another order."""
        check_labels(column, self.storage.labels(torch.arange(len(self))), what, "the samples")

    def _vector(self, values: Any, what: str) -> Tensor:
        """Return one finite number per sample as a float64 tensor, (n,)."""
        self._check_order(values, f"The vector `{what}` of {self.name!r}")
        vector = as_numbers(values, f"`{what}` of {self.name!r}")
        if vector.shape != (len(self),) or not bool(torch.isfinite(vector).all()) or not bool((vector != 0).any()):
            raise InvalidInputError(
                f"The vector `{what}` of {self.name!r} must have shape ({len(self)},), with all entries finite and "
                f"at least one nonzero; it has shape {tuple(vector.shape)}, {int((~torch.isfinite(vector)).sum())} "
                f"not finite, {int((vector != 0).sum())} nonzero entries."
            )
        return vector.clone()

    def _like(self, like: int | Iterable[int] | None, count: int) -> Tensor | None:
        """Return the index of an old sample for each new one, (count,)."""
        if like is None:
            return None
        given: Any = like.tolist() if hasattr(like, "tolist") else like  # type: ignore[union-attr]
        index = [i for old in (given if isinstance(given, Iterable) else [given]) for i in self.check_indices([old])]
        if len(index) not in (1, count):
            raise InvalidInputError(
                f"`like` must have 1 or {count} indices, one for each new sample, not {len(index)}."
            )
        return torch.tensor(index).expand(count)

    # Losses and data

    def __len__(self) -> int:
        return self.n

    def losses(self, params: Any, batch: Any, count: int) -> Tensor:
        """Evaluate the loss of each sample of a batch and check its shape, (count,)."""
        try:
            twice = PLAIN_ATTENTION in self.fallbacks  # attention must be differentiated twice
            kernels = sdpa_kernel(SDPBackend.MATH) if twice else nullcontext()
            with convert_errors(f"loss of Samples {self.name!r}"), kernels:
                out = self.loss(params, batch)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            # outside the domain of the loss, for example a matrix that has no Cholesky factor
            out = torch.full((count,), float("nan")).to(next(iter(params.values())))
        if not isinstance(out, Tensor) or out.shape != (count,):
            kind = type(out).__name__
            found = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"an object of type {kind}"
            raise InvalidInputError(
                f"The loss of Samples {self.name!r} must return a tensor of shape ({count},) for a batch of {count}, "
                f"one loss per sample without any mean or sum, not {found}."
            )
        return out

    def batches(
        self,
        indices: Tensor | None = None,
        at_most: int | None = None,
        device: torch.device | None = None,
        within: slice | None = None,
    ) -> Iterator[tuple[slice, Any]]:
        """Yield batches of the data in order, each with its positions.

        Args:
            indices: The samples; None means all.
            at_most: Samples per batch at most; None means as many as `batch_size` allows.
            device: The device that batches are moved to; None leaves them where they are.
            within: The positions to which the batches are limited; None means all.
        """
        total = len(self) if indices is None else len(indices)
        step = min(size for size in (self.batch_size, at_most, max(total, 1)) if size is not None)
        first, last = (0, total) if within is None else (within.start, within.stop)
        positions = [slice(begin, min(begin + step, last)) for begin in range(first, last, step)]
        fetched = self.storage.fetch([position if indices is None else indices[position] for position in positions])
        for position, batch in zip(positions, fetched, strict=True):
            yield position, batch if device is None else map_tensors(batch, lambda t: t.to(device, non_blocking=True))

    def take(self, indices: Tensor | None) -> Samples:
        """Return the listed samples as Samples of their own (None: these Samples); nothing is copied."""
        return self if indices is None else self.with_data(self.storage.choose(indices))

    def to(self, dtype: torch.dtype) -> Samples:
        """Return the same samples with floating-point data in another precision."""
        return self.with_data(self.storage.to(dtype))

    def same_loss(self, other: Samples) -> bool:
        """Return whether both evaluate the same loss function, on whatever data."""
        return self.loss is other.loss if self.parted is None else self.parted == other.parted

    def under(self, view: Samples) -> Samples:
        """Return these samples with the loss of `view`: samples that are added get the loss of each view in turn."""
        return self if self.loss is view.loss else view.with_data(self.storage)

    def check_indices(self, indices: int | Iterable[int]) -> list[int]:
        """Return sample indices as a list; each must exist and appear once."""
        if hasattr(indices, "tolist"):  # tensors and arrays, also without dimension
            indices = indices.tolist()  # type: ignore[union-attr]
        given = list(indices) if isinstance(indices, Iterable) and not isinstance(indices, str) else [indices]
        index = [as_index(i) for i in given]
        unknown = [g for g, i in zip(given, index, strict=True) if i is None or not 0 <= i < len(self)]
        if unknown or not index:
            found = few(unknown, quoted=True) if index else "an empty list"
            raise InvalidInputError(
                f"Indices of Samples {self.name!r} must be integers from 0 to {len(self) - 1}, at least one, not "
                f"{found}; write a slice as range(begin, end), and a mask as torch.nonzero(mask)[:, 0]."
            )
        known = [i for i in index if i is not None]
        if len(set(known)) < len(known):
            repeated = sorted(i for i, times in Counter(known).items() if times > 1)
            raise InvalidInputError(f"The sample indices {few(repeated)} of {self.name!r} were given more than once.")
        return known

    def with_data(self, storage: Storage, population: Samples | None = None) -> Samples:
        """Return the same loss over other data, as a view of `population`, or as Samples of its own for None."""
        other = copy(self)
        other.storage, other.n = storage, len(storage)
        other.population = other if population is None else population
        return other
