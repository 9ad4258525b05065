"""Store samples (tensors, arrays on disk, Datasets, DataLoaders) and fetch batches, which may have any structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, default_collate

from dif.errors import DifError, InvalidInputError, count_words, few
from dif.runtime.guard import is_out_of_memory
from dif.runtime.inputs import as_tensor, find_index


def map_tensors(item: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor of a structure, and return the same structure of the results."""
    if isinstance(item, Tensor):
        return fn(item)
    if isinstance(item, Mapping):
        return {k: map_tensors(v, fn) for k, v in item.items()}
    if isinstance(item, tuple | list):
        parts = [map_tensors(v, fn) for v in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    return item


def cast(data: Any, dtype: torch.dtype | None) -> Any:
    """Convert the floating-point tensors of a structure to a dtype; None leaves them as they are."""
    return data if dtype is None else map_tensors(data, lambda t: t.to(dtype) if t.is_floating_point() else t)


def leaves(data: Any) -> list[Tensor]:
    """Return the tensors of a structure as a list."""
    tensors: list[Tensor] = []
    map_tensors(data, tensors.append)
    return tensors


def to_tensors(data: Any, what: str) -> Any:
    """Convert the numbers of a structure to tensors; `what` names the data in error messages."""
    if isinstance(data, Mapping):
        return {k: to_tensors(v, what) for k, v in data.items()}
    if isinstance(data, tuple):
        parts = [to_tensors(v, what) for v in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    return as_tensor(data, what)


def describe(batch: Any) -> str:
    """Describe the types and shapes of one sample of a batch, such as "(float64[3], int64[])"."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape[1:])}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, tuple | list) and not all(isinstance(v, str) for v in batch):
        return "(" + ", ".join(describe(v) for v in batch) + ")"
    return "text" if isinstance(batch, list | tuple) else type(batch).__name__


_CHECKED = 2**22  # numbers checked for NaN at once, 32 MiB: data on disk must not be loaded as a whole


@dataclass(frozen=True, eq=False)
class Storage(Dataset[Any]):
    """n samples, addressed by index. Tensors and memory-mapped arrays are sliced, items of a Dataset are collated."""

    data: Any  # a structure of tensors, or a Dataset
    name: str
    total: int  # samples in the data
    is_tensors: bool  # whether `data` is a structure of tensors
    batch_size: int | None = None  # of the DataLoader, if there is one
    collate: Callable[[Any], Any] = default_collate
    workers: int = 0  # processes that fetch items of a Dataset
    dtype: torch.dtype | None = None  # to which floating-point items of a Dataset are cast when they are fetched
    subset: Tensor | None = None  # indices into the data; None means all samples
    index: Any = None  # index of the user's data frames, one label per sample of the data; None without a frame

    @classmethod
    def of(cls, data: Any, name: str) -> Storage:
        """Build from the data that the user passed; tensors and arrays are not copied."""
        what = f"data of Samples {name!r}"
        if isinstance(data, Storage):
            return replace(data, name=name)
        if isinstance(data, DataLoader):
            n = _count_items(data.dataset, name, what)
            _refuse_subsets(data, n, what)
            return cls(data.dataset, name, n, False, data.batch_size, data.collate_fn, data.num_workers)
        if not (isinstance(data, Mapping | tuple | list | Tensor) or hasattr(data, "__array__")):
            return cls(data, name, _count_items(data, name, what), False)
        index = find_index(data, what)
        data = to_tensors(tuple(data) if isinstance(data, list) else data, what)
        tensors = leaves(data)
        n = _count([len(t) if t.dim() else -1 for t in tensors], name)
        for t in tensors:
            _check_finite(t, n, what)
        return cls(data, name, n, True, index=index)

    def __len__(self) -> int:
        return self.total if self.subset is None else len(self.subset)

    def labels(self, indices: Tensor) -> Any:
        """Return the labels of these samples in the index of the user's data frames; None without a frame."""
        if self.index is None:
            return None
        return self.index[(indices if self.subset is None else self.subset.cpu()[indices]).numpy()]

    def shares(self, other: Storage) -> bool:
        """Return whether both hold the same rows of the same data object."""
        if len(self) != len(other) or self.subset is not other.subset:
            return False
        if self.data is other.data:
            return True
        mine, others = ({t.data_ptr() for t in leaves(getattr(s.data, "tensors", s.data))} for s in (self, other))
        return bool((mine & others) - {0})  # 0 is the address of every empty tensor

    def choose(self, indices: Tensor) -> Storage:
        """Return the samples with these indices; nothing is copied."""
        return replace(self, subset=indices if self.subset is None else self.subset[indices])

    def join(self, others: Sequence[Storage]) -> Storage:
        """Return these samples followed by those of other storages with the same structure."""
        storages = (self, *others)
        is_tensors = all(storage.is_tensors for storage in storages)
        if is_tensors:
            first, *rest = (next(storage.fetch([slice(0, len(storage))])) for storage in storages)
            following = [iter(leaves(data)) for data in rest]
            data = map_tensors(first, lambda t: torch.cat([t, *(next(tensors).to(t) for tensors in following)]))
        else:
            data = ConcatDataset(storages)
        collate = default_collate if self.is_tensors else self.collate
        total, labels = sum(map(len, storages)), [storage.labels(torch.arange(len(storage))) for storage in storages]
        index = None if any(part is None for part in labels) else labels[0].append(labels[1:])
        return replace(self, data=data, total=total, is_tensors=is_tensors, subset=None, collate=collate, index=index)

    def to(self, dtype: torch.dtype) -> Storage:
        """Return the data in another precision: tensors are converted now, items of a Dataset when they are fetched."""
        if self.is_tensors:
            return replace(self, data=cast(self.data, dtype))
        return replace(self, dtype=dtype)

    def one(self) -> Any:
        """Return a batch of the first sample."""
        return next(self.fetch([slice(0, 1)]))

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the data; of a Dataset, those of its first sample."""
        return leaves(self.data if self.is_tensors else self.one())

    def fetch(self, selections: Sequence[slice | Tensor]) -> Iterator[Any]:
        """Yield a batch of the samples at each of these positions."""
        if not self.is_tensors and len(self.data) != self.total:
            raise InvalidInputError(
                f"The Dataset of Samples {self.name!r} must have length {self.total}, as when the Samples were "
                f"created, not {len(self.data)}."
            )
        if self.workers and not self.is_tensors and len(selections) > 1:
            yield from self._fetch_ahead(selections)
            return
        for where in selections:
            if self.subset is not None:
                where = self.subset[where if isinstance(where, slice) else where.to(self.subset.device)]
            if self.is_tensors:
                yield map_tensors(self.data, lambda t, at=where: t[at if isinstance(at, slice) else at.to(t.device)])
            else:
                indices = list(range(self.total)[where]) if isinstance(where, slice) else where.tolist()
                yield cast(self.collate(self._read_items(indices)), self.dtype)

    def _read_items(self, indices: list[int]) -> Any:
        """Return items of the Dataset; errors of its code name the Samples."""
        fetch_many = getattr(self.data, "__getitems__", None)  # a Dataset may be able to fetch several at once
        try:
            return [self.data[i] for i in indices] if fetch_many is None else fetch_many(indices)
        except Exception as error:
            if isinstance(error, DifError) or is_out_of_memory(error):
                raise
            said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"
            raise InvalidInputError(f"The Dataset of Samples {self.name!r} raised {said}.") from error

    def _fetch_ahead(self, selections: Sequence[slice | Tensor]) -> Iterator[Any]:
        """Fetch batches ahead of use in the worker processes of a DataLoader."""
        every = torch.arange(self.total) if self.subset is None else self.subset.cpu()
        lists: Any = [every[where if isinstance(where, slice) else where.cpu()].tolist() for where in selections]
        loader = DataLoader(
            self.data, batch_sampler=lists, collate_fn=self.collate, num_workers=self.workers,
            generator=torch.Generator(),  # otherwise the loader would change the user's random state
        )  # fmt: skip
        return (cast(batch, self.dtype) for batch in loader)

    def __getitem__(self, i: int) -> Any:
        if self.is_tensors:
            return map_tensors(next(self.fetch([slice(i, i + 1)])), lambda t: t[0])
        return self.data[i if self.subset is None else int(self.subset[i])]


def _count_items(data: Any, name: str, what: str) -> int:
    """Return the length of a Dataset; refuse data without a length or without access by index."""
    countable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, str | bytes | IterableDataset) or not countable:
        raise InvalidInputError(
            f"{what[0].upper()}{what[1:]} must be a tensor, a tuple or dict of tensors, or a Dataset with a length, "
            f"not of type {type(data).__name__}."
        )
    return _count([len(data)], name)


def _refuse_subsets(loader: DataLoader[Any], n: int, what: str) -> None:
    """Refuse a DataLoader that leaves samples out, or that has no batches."""
    count = len(loader.sampler) if hasattr(loader.sampler, "__len__") else n  # type: ignore[arg-type]
    if count != n or (loader.batch_size is None and loader.batch_sampler is None):
        problem = f"whose sampler selects {count} of {n} samples" if count != n else "without batches"
        raise InvalidInputError(
            f"A DataLoader {problem} was given as {what}; it must have batches over all its samples. Select some "
            "with torch.utils.data.Subset."
        )


def _check_finite(t: Tensor, n: int, what: str) -> None:
    """Refuse samples with NaN or infinite entries."""
    if not t.is_floating_point() or t.device.type == "meta":
        return
    bad: list[int] = []
    step = max(1, _CHECKED * n // max(t.numel(), 1))
    for begin in range(0, n, step):
        chunk = t[begin : begin + step]
        if not bool(torch.isfinite(chunk).all()):
            wrong = (~torch.isfinite(chunk)).reshape(len(chunk), -1).any(1)
            bad += [begin + i for i in torch.nonzero(wrong).reshape(-1).tolist()]
    if bad:
        raise InvalidInputError(
            f"The {what} are NaN or infinite in {count_words(len(bad), 'sample')} ({few(bad)}); drop or impute those "
            "samples."
        )


def _count(lengths: list[int], name: str) -> int:
    """Return the number of samples, which must be the length of every tensor; a negative length marks a scalar."""
    if len(set(lengths)) != 1 or lengths[0] < 1:
        if not any(lengths):
            raise InvalidInputError(f"Samples {name!r} is empty; pass the data of at least one sample.")
        found = ", ".join("none (a scalar)" if n < 0 else str(n) for n in lengths)
        raise InvalidInputError(
            f"The tensors of Samples {name!r} must have one length, the number of samples, not {found}; pass a list of "
            "numbers as torch.tensor(numbers)."
        )
    return lengths[0]
