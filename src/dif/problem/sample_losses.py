"""The loss of each sample of stored data: fetch batches and evaluate losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dif.errors import InvalidInputError, few
from dif.problem.data import Storage, map_tensors
from dif.runtime.guard import convert_errors
from dif.runtime.inputs import as_index, check_count

# Entry of `fallbacks` that changes how a loss is evaluated, but not what can be done with it
PLAIN_ATTENTION = "attention by plain products: the faster kernels can be differentiated only once"
NO_SECOND_BACKWARD = (
    "Hessian-vector products by forward over reverse mode: an operator has no correct second backward pass"
)


class SampleLosses:
    """The loss and the data of `Samples`, which adds the methods that make terms and perturbations."""

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        data: Any,
        name: str = "samples",
        batch_size: int | None = None,
        outputs: Callable[[Any, Any], Tensor] | None = None,
    ) -> None:
        if not callable(loss):
            raise InvalidInputError(
                f"`loss` of Samples {name!r} must be a callable loss(params, batch), not of type {type(loss).__name__}."
            )
        if outputs is not None and not callable(outputs):
            raise InvalidInputError(
                f"`outputs` of Samples {name!r} must be a callable outputs(params, batch), not of type "
                f"{type(outputs).__name__}."
            )
        if batch_size is not None:
            batch_size = check_count(batch_size, f"`batch_size` of Samples {name!r}")
        self.loss = loss if outputs is None else lambda params, batch: loss(outputs(params, batch), batch)
        self.parted = None if outputs is None else (outputs, loss)  # the model and the loss of its outputs, separately
        self.name = name
        self.storage = Storage.of(data, name)
        self.population: SampleLosses = self  # for a view, the Samples that it was made from
        self.batch_size = self.storage.batch_size if batch_size is None else batch_size
        self.costs: dict[int, Any] = {}  # cost of evaluating one sample, by number of parameters
        self.kinks: dict[int, Any] = {}  # where kinks were looked for last, and found, by number of parameters
        self.compared: set[int] = set()  # numbers of parameters for which the derivatives of the loss were checked
        self.fallbacks: set[str] = set()  # what torch could not do with the loss, and what is done instead

    def __len__(self) -> int:
        return len(self.storage)

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
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        if shape != (count,):
            returned = f"a tensor of shape {shape}" if isinstance(shape, tuple) else f"an object of type {shape}"
            raise InvalidInputError(
                f"The loss of Samples {self.name!r} must return a tensor of shape ({count},) for a batch of {count}, "
                f"one loss per sample without any mean or sum, not {returned}."
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

    def take(self, indices: Tensor | None) -> Self:
        """Return the listed samples as Samples of their own (None: these Samples); nothing is copied."""
        return self if indices is None else self.with_data(self.storage.choose(indices))

    def to(self, dtype: torch.dtype) -> Self:
        """Return the same samples with floating-point data in another precision."""
        return self.with_data(self.storage.to(dtype))

    def same_loss(self, other: SampleLosses) -> bool:
        """Return whether both evaluate the same loss function, on whatever data."""
        return self.loss is other.loss if self.parted is None else self.parted == other.parted

    def under(self, view: Self) -> Self:
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

    def with_data(self, storage: Storage, population: SampleLosses | None = None) -> Self:
        """Return the same loss over other data, as a view of `population`, or as Samples of its own for None."""
        other = copy(self)
        other.storage = storage
        other.population = other if population is None else population
        return other
