"""Where the samples are kept, and how batches of them are fetched: tensors, arrays on disk, Datasets, DataLoaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, default_collate

from dif.errors import InvalidInputError, few
from dif.problem.structure import leaves, mapped, tensors_of
from dif.runtime.inputs import as_tensor

_LOOKED_AT = 2**22  # numbers per look for NaN: data on disk are never read whole


@dataclass(frozen=True, eq=False)
class Storage:
    """n samples by index. Tensors (or arrays, memory-mapped ones too) are sliced, items of a Dataset are collated."""

    data: Any  # a structure of tensors, or a Dataset
    name: str
    whole: int  # samples in the data
    tensors_held: bool
    batch_size: int | None = None  # of a DataLoader
    collate: Callable[[Any], Any] = default_collate
    workers: int = 0
    dtype: torch.dtype | None = None  # what real numbers are cast to on the way out
    chosen: Tensor | None = None  # of a view: which samples of the data are in it

    @classmethod
    def of(cls, data: Any, name: str) -> Storage:
        """Read what the user handed in; nothing is copied."""
        what = f"data of Samples {name!r}"
        if isinstance(data, Storage):
            return replace(data, name=name)
        if isinstance(data, DataLoader):
            _refuse_streams(data.dataset, what)
            n = _count([len(data.dataset)], name)  # type: ignore[arg-type]
            _refuse_choices(data, n, what)
            held = {"batch_size": data.batch_size, "collate": data.collate_fn, "workers": data.num_workers}
            return cls(data.dataset, name, n, False, **held)  # type: ignore[arg-type]
        if isinstance(data, Mapping | tuple | list):
            data = tensors_of(tuple(data) if isinstance(data, list) else data, what)
        elif isinstance(data, Tensor) or hasattr(data, "__array__"):
            data = as_tensor(data, what)
        else:
            _refuse_streams(data, what)
            return cls(data, name, _count([len(data)], name), False)
        tensors = leaves(data)
        n = _count([len(t) if t.dim() else -1 for t in tensors], name)
        for t in tensors:
            _check_finite(t, n, what)
        return cls(data, name, n, True)

    def __len__(self) -> int:
        return self.whole if self.chosen is None else len(self.chosen)

    def shares(self, other: Storage) -> bool:
        """Whether both hold the same rows of the same data object."""
        if len(self) != len(other) or self.chosen is not other.chosen:
            return False
        if self.data is other.data:
            return True
        mine, others = ({t.data_ptr() for t in leaves(getattr(s.data, "tensors", s.data))} for s in (self, other))
        return bool((mine & others) - {0})  # 0: nothing is held

    def choose(self, indices: Tensor) -> Storage:
        """Some of the samples."""
        return replace(self, chosen=indices if self.chosen is None else self.chosen[indices])

    def joined(self, others: Sequence[Storage]) -> Storage:
        """These samples, and those of others of the same structure after them."""
        every = (self, *others)
        if all(one.tensors_held for one in every):
            first, *rest = (one._take(slice(0, len(one))) for one in every)
            following = [iter(leaves(data)) for data in rest]
            data = mapped(first, lambda t: torch.cat([t, *(next(more).to(t) for more in following)]))
        else:
            data = ConcatDataset([_Items(one) for one in every])
        collate = default_collate if self.tensors_held else self.collate
        whole = sum(map(len, every))
        held = all(one.tensors_held for one in every)
        return replace(self, data=data, whole=whole, tensors_held=held, chosen=None, collate=collate)

    def to(self, dtype: torch.dtype) -> Storage:
        """The same with real numbers in another precision: held tensors at once, items when they are fetched."""
        if self.tensors_held:
            return replace(self, data=mapped(self.data, lambda t: t.to(dtype) if t.is_floating_point() else t))
        return replace(self, dtype=dtype)

    def one(self) -> Any:
        """A batch of the first sample."""
        return self._take(slice(0, 1))

    def tensors(self) -> list[Tensor]:
        """The tensors of the data (of one sample, for a Dataset)."""
        return leaves(self.data if self.tensors_held else self.one())

    def batches(
        self, indices: Tensor | None, step: int, device: torch.device | None = None, within: slice | None = None
    ) -> Iterator[tuple[slice, Any]]:
        """Batches of at most `step` samples in order (of all, or of those listed), each with its positions.

        `within`: only these positions.
        """
        self._check_length()
        total = len(self) if indices is None else len(indices)
        first, last = (0, total) if within is None else (within.start, within.stop)
        places = [slice(begin, min(begin + step, last)) for begin in range(first, last, step)]
        wanted = (place if indices is None else indices[place] for place in places)
        if self.workers and not self.tensors_held and len(places) > 1:
            fetched: Any = self._fetched([self._indices(where) for where in wanted])
        else:
            fetched = (self._take(where) for where in wanted)
        for place, batch in zip(places, fetched, strict=True):
            yield place, batch if device is None else mapped(batch, lambda t: t.to(device, non_blocking=True))

    def _check_length(self) -> None:
        if not self.tensors_held and len(self.data) != self.whole:
            raise InvalidInputError(
                f"number of samples in {self.name!r}",
                measured=len(self.data),
                threshold=f"{self.whole}, as when the Samples were made",
                meaning="The Dataset has changed its length since, so weights and indices no longer belong to it.",
                cure="Make new Samples of the Dataset as it is now.",
            )

    def _indices(self, where: slice | Tensor) -> Sequence[int]:
        if self.chosen is not None:
            where = self.chosen[where if isinstance(where, slice) else where.to(self.chosen.device)]
        return range(self.whole)[where] if isinstance(where, slice) else where.tolist()

    def _take(self, where: slice | Tensor) -> Any:
        if not self.tensors_held:
            indices = self._indices(where)
            many = getattr(self.data, "__getitems__", None)  # a Dataset may know how to fetch several at once
            items = [self.data[i] for i in indices] if many is None else many(list(indices))
            return self._cast(self.collate(items))
        if self.chosen is not None:
            where = self.chosen[where if isinstance(where, slice) else where.to(self.chosen.device)]
        return mapped(self.data, lambda t: t[where if isinstance(where, slice) else where.to(t.device)])

    def _fetched(self, batches: list[Sequence[int]]) -> Iterator[Any]:
        """By the worker processes of a DataLoader, ahead of use."""
        lists: Any = [list(indices) for indices in batches]
        loader = DataLoader(
            self.data, batch_sampler=lists, collate_fn=self.collate, num_workers=self.workers,
            generator=torch.Generator(),  # else it draws from the user's random state
        )  # fmt: skip
        return (self._cast(batch) for batch in loader)

    def _cast(self, batch: Any) -> Any:
        dtype = self.dtype
        if dtype is None:
            return batch
        return mapped(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


class _Items(Dataset[Any]):
    """The samples of a storage, one by one."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def __len__(self) -> int:
        return len(self.storage)

    def __getitem__(self, i: int) -> Any:
        where = self.storage
        if where.tensors_held:
            return mapped(where._take(slice(i, i + 1)), lambda t: t[0])
        return where.data[where._indices(slice(i, i + 1))[0]]


def _refuse_streams(data: Any, what: str) -> None:
    countable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, str | bytes | IterableDataset) or not countable:
        raise InvalidInputError(
            what,
            measured=type(data).__name__,
            threshold="a tensor, a tuple or dict of tensors, or a Dataset with a length",
            meaning="Samples must be countable and addressable by index.",
            cure="Load an iterable into tensors first.",
        )


def _refuse_choices(loader: DataLoader[Any], n: int, what: str) -> None:
    chosen = len(loader.sampler) if hasattr(loader.sampler, "__len__") else n  # type: ignore[arg-type]
    if chosen != n or (loader.batch_size is None and loader.batch_sampler is None):
        raise InvalidInputError(
            what,
            measured=f"{chosen} of {n} samples chosen by its sampler" if chosen != n else "a loader without batches",
            threshold="a loader of batches over all its samples",
            meaning="Sample i is item i of the Dataset: a loader's own choice of samples has no place here.",
            cure="Pass the Dataset (or torch.utils.data.Subset of it), or a loader with a batch size and no sampler.",
        )


def _check_finite(t: Tensor, n: int, what: str) -> None:
    if not t.is_floating_point() or t.device.type == "meta":
        return
    bad: list[int] = []
    step = max(1, _LOOKED_AT * n // max(t.numel(), 1))
    for begin in range(0, n, step):
        piece = t[begin : begin + step]
        if not bool(torch.isfinite(piece).all()):
            wrong = (~torch.isfinite(piece)).reshape(len(piece), -1).any(1)
            bad += [begin + i for i in torch.nonzero(wrong).reshape(-1).tolist()]
    if bad:
        raise InvalidInputError(
            what,
            measured=f"NaN or infinite in {len(bad)} samples ({few(bad)})",
            threshold="0",
            meaning="A loss of such a sample is not finite, and neither is its influence.",
            cure="Drop or impute those samples first.",
        )


def _count(lengths: list[int], name: str) -> int:
    if len(set(lengths)) != 1 or lengths[0] < 1:
        raise InvalidInputError(
            f"number of samples in {name!r}",
            measured=", ".join("a scalar" if n < 0 else str(n) for n in lengths) or "no tensor",
            threshold="one length ≥ 1 for all tensors",
            meaning="The first dimension of every tensor counts the samples.",
            cure="Make the first dimensions equal.",
        )
    return lengths[0]
