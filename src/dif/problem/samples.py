"""A per-sample loss and the data it is taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.problem.data_source import Storage
from dif.problem.perturbation import Addition, Entries, Perturbation, Removal, Reweighting
from dif.problem.sample_losses import SampleLosses
from dif.problem.structure import described
from dif.problem.term import SampleSum, Term
from dif.runtime.inputs import as_numbers, as_tensor


class Samples(SampleLosses):
    """n samples and the loss of each: `loss(params, batch)` → (n,), unreduced.

    Args:
        loss: Gets the params (a dict of tensors; with an `nn.Module`, something to call like it) and a batch of
            `data`; returns one number per sample.
        data: A tensor, a tuple or dict of tensors (first dimension: samples), memory-mapped arrays, a torch `Dataset`,
            or a `DataLoader` (its Dataset, collate function, batch size and workers are used; its order is not: sample
            i is item i). Held, not copied: leave it as it is while you use these samples. Batches are moved to the
            device of the parameters.
        name: Shown in labels, errors and reports.
        batch_size: Samples per pass; None takes as many as fit. No result depends on it.
        outputs: What the model makes of a batch, `outputs(params, batch)` → (n, ...); the loss then gets these in place
            of the params, `loss(outputs, batch)`. Only Gauss–Newton curvature needs the two apart.

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
        """The same samples under another loss: a predicted rate, a margin, a cost, whatever a constraint is about.

        Whatever is done to a sample (removal, reweighting, replacement, addition) is done in every view at once.

        >>> train = Samples(lambda params, z: (z - params["mean"]) ** 2, torch.tensor([1.0, 2.0, 6.0]), name="train")
        >>> distance = train.view(lambda params, z: z - params["mean"], name="distance")
        >>> distance.remove([2])
        Perturbation(1: remove train[2])
        """
        name = f"view of {self.name}" if name is None else name
        other = Samples(loss, self.storage, name, self.batch_size, outputs)
        other.people = self.people
        return other

    # What objectives and constraints are made of

    def mean(self, where: Any = None) -> Term:
        """Mean loss over all samples, or over those where the boolean mask is true."""
        members = self._mask(where)
        words = f"mean of {self.name}" if where is None else f"mean of {int(members.sum())} of {self.name}"
        return self._term(members.double() / members.sum(), normalised=True, everyone=where is None, words=words)

    def sum(self, where: Any = None) -> Term:
        """Summed loss over all samples, or over those where the boolean mask is true; never renormalised."""
        members = self._mask(where)
        words = f"sum of {self.name}" if where is None else f"sum of {int(members.sum())} of {self.name}"
        return self._term(members.double(), normalised=False, everyone=where is None, words=words)

    def weighted(self, w: Any) -> Term:
        """Σᵢ wᵢ ℓᵢ with weights of your own; never renormalised."""
        weights = self._vector(w, "weights")
        return self._term(weights, normalised=False, everyone=False, words=f"weighted {self.name}")

    # What can be done to the data

    def remove(
        self, indices: int | Iterable[int], *, terms: Sequence[Any] | None = None, renormalise: bool = True
    ) -> Perturbation:
        """One perturbation that removes all these samples, from every term or only from `terms`.

        With `renormalise` every mean is taken over the samples left, as retraining does; without, the 1/N of each mean
        stays (the paper's ε).
        """
        entries = Entries.of([self.checked(indices)])
        return self._perturb(Removal(self, entries, renormalise, _terms(terms)))

    def remove_each(
        self, indices: Iterable[int] | None = None, *, terms: Sequence[Any] | None = None, renormalise: bool = True
    ) -> Perturbation:
        """One perturbation per sample (all of them, or those listed)."""
        index = torch.arange(len(self)) if indices is None else torch.tensor(self.checked(indices))
        return self._perturb(Removal(self, Entries.singles(index), renormalise, _terms(terms)))

    def remove_groups(
        self, groups: Iterable[Iterable[int]], *, terms: Sequence[Any] | None = None, renormalise: bool = True
    ) -> Perturbation:
        """One perturbation per group of samples."""
        lists = [self.checked(group) for group in groups] if isinstance(groups, Iterable) else []
        if not lists:
            raise InvalidInputError(
                f"groups of samples of {self.name!r}",
                measured="none" if isinstance(groups, Iterable) else type(groups).__name__,
                threshold="a list of lists of indices, at least one",
                meaning="Each group is one perturbation.",
                cure="Write remove_groups([[1, 2], [5]]), or remove([1, 2]) for a single group.",
            )
        return self._perturb(Removal(self, Entries.of(lists), renormalise, _terms(terms)))

    def reweight(self, dw: Any, *, terms: Sequence[Any] | None = None) -> Perturbation:
        """Add weight dw[i] to sample i, times the term's coefficient, wherever the sample has weight."""
        return self._perturb(Reweighting(self, self._vector(dw, "dw"), _terms(terms)))

    def add(
        self,
        data: Any,
        *,
        like: int | Iterable[int] | None = None,
        terms: Sequence[Any] | None = None,
        renormalise: bool = True,
    ) -> Perturbation:
        """One perturbation that adds these new samples (same structure as `data`, same loss).

        They join the means and sums over all samples. Whether they belong to a mean with a mask, or what they weigh in
        a weighted sum, only you know: `like=i` (one index, or one per new sample) gives them the memberships and
        weights of sample i.
        """
        new = self._new(data, "new")
        self._check_structure(new)
        entries = Entries.of([list(range(len(new)))])
        return self._perturb(Addition(self, new, entries, self._like(like, len(new)), renormalise, _terms(terms)))

    def replace(self, indices: int | Iterable[int], data: Any, *, terms: Sequence[Any] | None = None) -> Perturbation:
        """One perturbation that puts new data (a corrected label, say) in the place of these samples."""
        index = self.checked(indices)
        new = self._new(data, "corrected")
        self._check_structure(new)
        if len(new) != len(index):
            raise InvalidInputError(
                f"replacement for samples of {self.name!r}",
                measured=f"{len(new)} new for {len(index)} old",
                threshold="as many new as old",
                meaning="Each new sample takes the place of one old sample.",
                cure="Keep the first dimension: data of one sample is data[i:i+1].",
            )
        removal = Removal(self, Entries.of([index]), False, _terms(terms))
        entries = Entries.of([list(range(len(new)))])
        addition = Addition(self, new, entries, torch.tensor(index), False, _terms(terms))
        return self._perturb(removal) + self._perturb(addition)

    def _new(self, data: Any, kind: str) -> Samples:
        """Other data under the same loss."""
        new = self.holding(Storage.of(data, f"{kind} {self.people.name}"))
        new.name = f"{kind} {self.people.name}"
        return new

    def _term(self, weights: Tensor, *, normalised: bool, everyone: bool, words: str) -> Term:
        return Term(sums=((1.0, SampleSum(self, weights, normalised, everyone, words)),))

    def _perturb(self, piece: Removal | Addition | Reweighting) -> Perturbation:
        return Perturbation(((1.0, piece),))

    def _mask(self, where: Any) -> Tensor:
        if where is None:
            return torch.ones(len(self), dtype=torch.bool)
        mask = as_tensor(where, f"where= over {self.name!r}").cpu()
        if mask.dtype != torch.bool or mask.shape != (len(self),) or not bool(mask.any()):
            raise InvalidInputError(
                f"where= over {self.name!r}",
                measured=f"{mask.dtype}, shape {tuple(mask.shape)}, {int((mask != 0).sum())} true",
                threshold=f"torch.bool, shape ({len(self)},), at least one true",
                meaning="The mask says which samples the term is taken over.",
                cure="Build it by a comparison, such as group == 2.",
            )
        return mask

    def _vector(self, values: Any, what: str) -> Tensor:
        vector = as_numbers(values, f"{what} over {self.name!r}")
        if vector.shape != (len(self),) or not bool(torch.isfinite(vector).all()) or not bool((vector != 0).any()):
            raise InvalidInputError(
                f"{what} over {self.name!r}",
                measured=f"shape {tuple(vector.shape)}, {int((~torch.isfinite(vector)).sum())} not finite, "
                f"{int((vector != 0).sum())} nonzero",
                threshold=f"shape ({len(self)},), all finite, at least one nonzero",
                meaning="One weight per sample is needed.",
                cure="Pass a vector as long as the data.",
            )
        return vector.clone()

    def _like(self, like: int | Iterable[int] | None, count: int) -> Tensor | None:
        if like is None:
            return None
        if hasattr(like, "tolist"):
            like = like.tolist()  # type: ignore[union-attr]
        index = [i for one in (like if isinstance(like, Iterable) else [like]) for i in self.checked([one])]  # type: ignore[list-item]
        if len(index) not in (1, count):
            raise InvalidInputError(
                "like=",
                measured=f"{len(index)} indices for {count} new samples",
                threshold=f"1 or {count}",
                meaning="Each new sample takes the memberships of one old sample.",
                cure="Name one old sample, or one per new sample.",
            )
        return torch.tensor(index).expand(count)

    def _check_structure(self, new: Samples) -> None:
        old_kind, new_kind = described(self.storage.one()), described(new.storage.one())
        if old_kind != new_kind:
            raise InvalidInputError(
                f"new data for {self.name!r}",
                measured=new_kind,
                threshold=old_kind,
                meaning="New samples go through the same loss as the old ones.",
                cure="Give them the structure, shapes and dtypes of the data, with the samples first: data[i:i+1].",
            )


def _terms(terms: Sequence[Any] | None) -> tuple[Any, ...] | None:
    if terms is None:
        return None
    listed = tuple(terms) if isinstance(terms, list | tuple) else (terms,)
    if not listed:
        raise InvalidInputError(
            "terms=",
            measured="an empty list",
            threshold="problem.objective or constraints",
            meaning="Nothing would change.",
            cure="Leave terms out to act on every term.",
        )
    return listed
