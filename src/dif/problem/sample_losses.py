"""A loss for each sample of some stored data: how batches are fetched and losses evaluated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dif.errors import InvalidInputError, few
from dif.problem.data_source import Storage
from dif.runtime.inputs import as_index
from dif.runtime.user_code import in_words

PLAIN_ATTENTION = "attention by plain products: the faster kernels can be differentiated only once"


class SampleLosses:
    """What `Samples` rest on: the loss, the data and whose samples they are. Terms and perturbations are made above."""

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
        self.people: SampleLosses = self  # whose members these are: for a view, the Samples that it was made from
        self.batch_size = self.storage.batch_size if batch_size is None else as_index(batch_size)
        self.costs: dict[int, Any] = {}  # what a sample takes, by number of parameters; shared by views
        self.compared: set[int] = set()  # numbers of parameters with which its derivatives were compared
        self.fallbacks: set[str] = set()  # what torch could not do with the loss, and what was done instead

    def __len__(self) -> int:
        return len(self.storage)

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

    def take(self, indices: Tensor | None) -> Self:
        """The samples listed (None: all of them), as Samples of their own; nothing is copied."""
        return self if indices is None else self.holding(self.storage.choose(indices))

    def to(self, dtype: torch.dtype) -> Self:
        """The same samples with their real numbers in another precision."""
        return self.holding(self.storage.to(dtype))

    def same_loss(self, other: SampleLosses) -> bool:
        """Whether both evaluate the same function, on whatever data."""
        return self.loss is other.loss if self.parted is None else self.parted == other.parted

    def under(self, view: Self) -> Self:
        """These samples under the loss of another view of the people they join."""
        return self if self.loss is view.loss else view.holding(self.storage)

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

    def holding(self, storage: Storage, people: SampleLosses | None = None) -> Self:
        """The same loss over other data, of these people (None: of its own)."""
        other = copy(self)
        other.storage = storage
        other.people = other if people is None else people
        return other
