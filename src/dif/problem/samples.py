"""Samples: a loss per sample and its data, from which terms and perturbations are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.problem.data import Storage, describe
from dif.problem.perturbation import Addition, Entries, Perturbation, Removal, Reweighting
from dif.problem.sample_losses import SampleLosses
from dif.problem.term import SampleSum, Term
from dif.runtime.inputs import as_numbers, as_tensor, check_instance, check_labels, check_list


class Samples(SampleLosses):
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

    >>> train = Samples(lambda params, z: (z - params["mean"]) ** 2, torch.tensor([1.0, 2.0, 6.0]), name="train")
    >>> train.mean(), len(train)
    (Term(mean of train), 3)
    """

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

        >>> train = Samples(lambda params, z: (z - params["mean"]) ** 2, torch.tensor([1.0, 2.0, 6.0]), name="train")
        >>> distance = train.view(lambda params, z: z - params["mean"], name="distance")
        >>> distance.remove([2])
        Perturbation(1: remove train[2])
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
        return self._over(where, normalised=True) if weights is None else self._weighted_mean(where, weights)

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
        entries = Entries.of([self.check_indices(indices)])
        return Perturbation.of(Removal(self, entries, renormalise, _terms(terms)))

    def remove_each(
        self, indices: Iterable[int] | None = None, *, terms: Sequence[Any] | None = None, renormalise: bool = True
    ) -> Perturbation:
        """Return one removal per sample, of all samples or of those listed."""
        index = torch.arange(len(self)) if indices is None else torch.tensor(self.check_indices(indices))
        return Perturbation.of(Removal(self, Entries.singles(index), renormalise, _terms(terms)))

    def remove_groups(
        self, groups: Iterable[Iterable[int]], *, terms: Sequence[Any] | None = None, renormalise: bool = True
    ) -> Perturbation:
        """Return one removal per group of samples."""
        listed = check_list(groups, "groups", "lists of indices")
        entries = Entries.of([self.check_indices(group) for group in listed])
        return Perturbation.of(Removal(self, entries, renormalise, _terms(terms)))

    def reweight(self, dw: Any, *, terms: Sequence[Any] | None = None) -> Perturbation:
        """Return one perturbation that adds dw[i] to the weight of sample i in each term in which that is not 0.

        The added weight is multiplied by the coefficient of the term.
        """
        return Perturbation.of(Reweighting(self, self._vector(dw, "dw"), _terms(terms)))

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
        return Perturbation.of(Addition(self, entries, renormalise, _terms(terms), new, self._like(like, len(new))))

    def replace(self, indices: int | Iterable[int], data: Any, *, terms: Sequence[Any] | None = None) -> Perturbation:
        """Return one perturbation that replaces the data of these samples, for example with a corrected label."""
        index = self.check_indices(indices)
        new = self._new_samples(data, "corrected")
        if len(new) != len(index):
            raise InvalidInputError(
                f"There must be as many new as old samples of {self.name!r}, not {len(new)} for {len(index)}; the "
                "data of one are data[i:i+1]."
            )
        removal = Removal(self, Entries.of([index]), False, _terms(terms))
        entries = Entries.of([list(range(len(new)))])
        addition = Addition(self, entries, False, _terms(terms), new, torch.tensor(index))
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
        new.name = name
        return new

    def _over(self, where: Any, normalised: bool) -> Term:
        """Return the mean or the sum over the samples of a mask; None means all samples."""
        members, everyone = self._mask(where), where is None
        weights = members.double() / members.sum() if normalised else members.double()
        words = f"{'mean' if normalised else 'sum'} of {'' if everyone else f'{int(members.sum())} of '}{self.name}"
        return Term(sums=((1.0, SampleSum(self, weights, normalised, everyone, words)),))

    def _weighted_mean(self, where: Any, weights: Any) -> Term:
        """Return the weighted mean over the samples of a mask; None means all samples."""
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
        if hasattr(like, "tolist"):
            like = like.tolist()  # type: ignore[union-attr]
        index = [i for old in (like if isinstance(like, Iterable) else [like]) for i in self.check_indices([old])]  # type: ignore[list-item]
        if len(index) not in (1, count):
            raise InvalidInputError(
                f"`like` must have 1 or {count} indices, one for each new sample, not {len(index)}."
            )
        return torch.tensor(index).expand(count)


def expect_samples(thing: object) -> Samples:
    """Return Samples; refuse other objects."""
    return check_instance(thing, Samples, "samples")


def _terms(terms: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return the terms that a perturbation acts on as a tuple; None means all."""
    if terms is None:
        return None
    listed = tuple(terms) if isinstance(terms, list | tuple) else (terms,)
    if not listed:
        raise InvalidInputError("`terms` must list problem.objective or constraints of the problem, at least one.")
    return listed
