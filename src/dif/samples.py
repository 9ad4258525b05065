"""A per-sample loss and the data it is taken over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dif.errors import InvalidInputError, few
from dif.perturbation import Addition, Entries, Perturbation, Removal, Reweighting
from dif.reading import as_index, as_numbers, as_tensor
from dif.storage import Storage
from dif.structure import described
from dif.term import SampleSum, Term
from dif.user_code import in_words

PLAIN_ATTENTION = "attention by plain products: the faster kernels can be differentiated only once"


class Samples:
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

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        data: Any,
        name: str = "samples",
        batch_size: int | None = None,
        outputs: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        if not callable(loss) or not (outputs is None or callable(outputs)):
            raise InvalidInputError(
                f"loss of Samples {name!r}",
                measured=type(outputs if callable(loss) else loss).__name__,
                threshold="a callable loss(params, batch)",
                meaning="Samples(loss, data): the loss comes first.",
                cure="Pass a function that returns one loss per sample.",
            )
        if batch_size is not None and (as_index(batch_size) or 0) < 1:
            raise InvalidInputError(
                f"batch_size of Samples {name!r}",
                measured=batch_size,
                threshold="an integer ≥ 1, or None",
                meaning="It is the number of samples per pass.",
                cure="Leave it out to take as many as fit.",
            )
        self.loss = loss if outputs is None else lambda params, batch: loss(outputs(params, batch), batch)
        self.parted = None if outputs is None else (outputs, loss)
        self.name = name
        self.storage = Storage.of(data, name)
        self.people: Samples = self  # whose members these are: for a view, the Samples that it was made from
        self.batch_size = self.storage.batch_size if batch_size is None else as_index(batch_size)
        self.costs: dict[int, Any] = {}  # what a sample takes, by number of parameters; shared by views
        self.compared: set[int] = set()  # numbers of parameters with which its derivatives were compared
        self.fallbacks: set[str] = set()  # what torch could not do with the loss, and what was done instead

    def __len__(self) -> int:
        return len(self.storage)

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

    # How the numbers are reached

    def losses(self, params: Any, batch: Any, count: int) -> Tensor:
        """The loss of each sample of a batch, their shape checked."""
        try:
            with in_words(f"loss of Samples {self.name!r}"), self._kernels():
                out = self.loss(params, batch)
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            # outside the domain: a matrix without a factor, say
            out = torch.full((count,), float("nan")).to(next(iter(params.values())))
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        if shape != (count,):
            raise InvalidInputError(
                f"what the loss of Samples {self.name!r} returned",
                measured=f"shape {shape}" if isinstance(shape, tuple) else shape,
                threshold=f"a tensor of shape ({count},) for a batch of {count}",
                meaning="dif needs the loss of each sample by itself, before any mean or sum.",
                cure='Leave the reduction out (reduction="none", no .mean()) and squeeze extra dimensions.',
            )
        return out

    def _kernels(self) -> AbstractContextManager[Any]:
        """The fast kernels of attention can be differentiated only once."""
        return sdpa_kernel(SDPBackend.MATH) if PLAIN_ATTENTION in self.fallbacks else nullcontext()

    def batches(
        self,
        indices: Tensor | None = None,
        at_most: int | None = None,
        device: torch.device | None = None,
        within: slice | None = None,
    ) -> Iterator[tuple[slice, Any]]:
        """Batches of the data in order (of all samples, or of those listed), each with its positions."""
        total = len(self) if indices is None else len(indices)
        step = min(size for size in (self.batch_size, at_most, max(total, 1)) if size is not None)
        return self.storage.batches(indices, step, device, within)

    def take(self, indices: Tensor | None) -> Samples:
        """The samples listed (None: all of them), as Samples of their own; nothing is copied."""
        return self if indices is None else self._with(self.storage.choose(indices))

    def to(self, dtype: torch.dtype) -> Samples:
        """The same samples with their real numbers in another precision."""
        return self._with(self.storage.to(dtype))

    def same_loss(self, other: Samples) -> bool:
        """Whether both evaluate the same function, on whatever data."""
        return self.loss is other.loss if self.parted is None else self.parted == other.parted

    def under(self, view: Samples) -> Samples:
        """These samples under the loss of another view of the people they join."""
        return self if self.loss is view.loss else view._with(self.storage)

    def _new(self, data: Any, kind: str) -> Samples:
        """Other data under the same loss."""
        new = self._with(Storage.of(data, f"{kind} {self.people.name}"))
        new.name = f"{kind} {self.people.name}"
        return new

    def _with(self, storage: Storage) -> Samples:
        other = copy(self)
        other.storage = storage
        other.people = other
        return other

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

    def checked(self, indices: int | Iterable[int]) -> list[int]:
        """Numbers of samples, each once, as a list."""
        if hasattr(indices, "tolist"):  # tensors and arrays, also without dimension
            indices = indices.tolist()  # type: ignore[union-attr]
        given = list(indices) if isinstance(indices, Iterable) else [indices]
        index = [as_index(i) for i in given]
        unknown = [g for g, i in zip(given, index, strict=True) if i is None or not 0 <= i < len(self)]
        if unknown or not index:
            raise InvalidInputError(
                f"sample indices of {self.name!r}",
                measured=few(unknown) if index else "none",
                threshold=f"integers 0 … {len(self) - 1}, at least one",
                meaning="No such sample." if index else "Nothing would change.",
                cure="Count from 0 in the order of the data; use torch.nonzero(mask) for a mask.",
            )
        known = [i for i in index if i is not None]
        if len(set(known)) < len(known):
            twice = sorted(i for i, times in Counter(known).items() if times > 1)
            raise InvalidInputError(
                f"sample indices of {self.name!r}",
                measured=f"{few(twice)} given more than once",
                threshold="each at most once",
                meaning="A sample can be removed only once.",
                cure="Pass sorted(set(indices)).",
            )
        return known

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
