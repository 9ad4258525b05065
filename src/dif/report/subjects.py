"""What a report shows of each perturbation that was scored: usually the sample that it removes."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.fingerprint import READ
from dif.derivatives.sweeps import sample_losses
from dif.errors import InvalidInputError
from dif.optimality.solution import Solution
from dif.problem.perturbation import Perturbation, Removal
from dif.problem.sample_losses import SampleLosses
from dif.problem.structure import leaves
from dif.report.column import write_entry
from dif.report.sample_sets import SampleSets

_MAX_FEATURES = 24  # features shown per sample
_MAX_PIXELS = 40  # pixels shown along each side of an image


@dataclass(frozen=True, eq=False)
class Subjects:
    """Names, groups, features, images and losses of what was scored, by the number of the perturbation."""

    labels: Sequence[str] | None  # of the perturbations; None: each sample of `train` is removed, in their order
    solution: Solution
    train: SampleLosses | None  # the samples that are removed, one by each perturbation; None: something else changes
    index: Sequence[int] | None  # which sample each perturbation removes; None: the one with its number
    names: Sequence[Any] | None = None
    groups: Sequence[Any] | None = None
    features: dict[str, Sequence[Any]] | None = None
    images: Any = None

    @classmethod
    def of_perturbations(
        cls, perturbations: Perturbation | tuple[str, ...], labels: Sequence[str], solution: Solution
    ) -> Subjects:
        """Find the samples that perturbations remove, if each removes one."""
        train = index = None
        if isinstance(perturbations, Perturbation) and len(perturbations.pieces) == 1:
            _, action = perturbations.pieces[0]
            if isinstance(action, Removal) and bool((action.entries.start.diff() == 1).all()):
                train, index = action.samples, action.entries.index.tolist()
        return cls(labels, solution, train, index)

    def _pick(self, column: Any, i: int) -> Any:
        """Return the entry of a column for perturbation i: one per perturbation, or one per sample."""
        whole = self.index is not None and self.train is not None and len(column) == len(self.train)
        return column[self.index[i] if whole and self.index is not None else i]

    def name(self, i: int) -> str:
        """Return the name of subject i."""
        if self.names is not None:
            return str(self._pick(self.names, i))
        if self.labels is not None:
            return self.labels[i].removeprefix("remove ")
        return f"{self.train.name if self.train else 'sample'}[{i}]"

    def group(self, i: int) -> str | None:
        """Return the group of subject i, or None."""
        return None if self.groups is None else str(self._pick(self.groups, i))

    @cached_property
    def losses(self) -> dict[str, Tensor]:
        """Loss of each subject at the solution, by name: first `train`, then each view of it in the problem."""
        if self.train is None:
            return {}
        parameters, theta = self.solution.program.parameters, self.solution.theta
        views = [
            s for s in self.solution.problem.samples if s.population is self.train.population and s is not self.train
        ]
        rows = slice(None) if self.index is None else torch.tensor(self.index)
        return {s.name: sample_losses(s, parameters, theta).double().cpu()[rows] for s in (self.train, *views)}

    @cached_property
    def sets(self) -> SampleSets:
        """Names for sets of the samples: by group and feature; without features, by numbers in the data."""
        return SampleSets.of(self.train, self.groups, self._numbers() if self.features is None else self.features)

    def _numbers(self) -> dict[str, list[float]]:
        """Return the parts of the samples that are single numbers, such as labels, by the names of `feature`."""
        columns: dict[str, list[float]] = {}
        for _, batch in () if self.train is None else self.train.batches(at_most=READ):
            for k, leaf in enumerate(leaves(batch)):
                if leaf[0].numel() == 1:
                    columns.setdefault(f"z{k}", []).extend(leaf.detach().reshape(-1).tolist())
        return columns

    def feature(self, rows: Sequence[int]) -> list[dict[str, str]]:
        """Return the features of the subjects as text; by default, the numbers that a small sample consists of."""
        if self.features is not None:
            columns = list(self.features.items())[:_MAX_FEATURES]
            return [{name: write_entry(self._pick(column, i)) for name, column in columns} for i in rows]
        texts = []
        for i in rows:
            small = [leaf for leaf in self._leaves(i) if leaf.numel() <= _MAX_FEATURES]
            texts.append(
                {
                    f"z{k}" + (f"[{j}]" if part.numel() > 1 else ""): write_entry(value)
                    for k, part in enumerate(small)
                    for j, value in enumerate(part.reshape(-1).tolist())
                }
            )
        return texts

    def image(self, i: int) -> Tensor | None:
        """Return the pixels of subject i, (height, width) or (height, width, 3), 0 … 255; None if it has no image."""
        if self.images is not None:
            return _as_bytes(torch.as_tensor(self._pick(self.images, i)).detach().cpu())
        candidates = [leaf.detach().cpu() for leaf in self._leaves(i) if leaf.dim() in (2, 3)]
        images = [leaf for leaf in candidates if min(leaf.shape[-2:]) >= 5 or min(leaf.shape[:2]) >= 5]
        return _as_bytes(images[0]) if images else None

    def encode_image(self, i: int) -> dict[str, Any] | None:
        """Return the image of subject i with its pixels in base64; None if it has no image."""
        pixels = self.image(i)
        if pixels is None:
            return None
        grey = pixels.dim() == 2
        data = base64.b64encode(pixels.contiguous().numpy().tobytes()).decode()
        return {"height": pixels.shape[0], "width": pixels.shape[1], "channels": 1 if grey else 3, "data": data}

    def check_display(self, where: str = "") -> None:
        """Refuse features or images that cannot be shown, judged by the first; `where` says where they were given."""
        displays: list[tuple[str, str, Callable[[], object]]] = [
            ("features", "numbers or words", lambda: self.feature([0])),
            ("images", "numeric pixels of shape (n, height, width)", lambda: self.image(0)),
        ]
        for name, wanted, display in displays:
            try:
                display()
            except Exception as error:
                raise InvalidInputError(
                    f"`{name}`{where} cannot be displayed ({type(error).__name__}: {error}).",
                    f"It must hold {wanted}.",
                    "The report shows it for each sample.",
                    "Give one number or word per sample and feature, and one array per image; or leave it out.",
                ) from error
        if self.images is not None and self.image(0) is None:
            raise InvalidInputError(
                f"`images`{where} has entries of shape {tuple(torch.as_tensor(self._pick(self.images, 0)).shape)}.",
                "Each must be an image of shape (height, width), (height, width, 3) or (3, height, width).",
                "The report shows the image of each sample.",
                "Reshape each entry to its height and width, show numbers as `features`, or leave it out.",
            )

    def _leaves(self, i: int) -> list[Tensor]:
        """Return the tensors of the sample that perturbation i removes; none if it does something else."""
        if self.train is None:
            return []
        sample = i if self.index is None else self.index[i]
        _, batch = next(self.train.batches(torch.tensor([sample])))
        return [leaf[0] for leaf in leaves(batch)]


def _as_bytes(pixels: Tensor) -> Tensor | None:
    """Return pixels as uint8 with the channels last, reduced to at most _MAX_PIXELS per side."""
    if pixels.dim() == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        pixels = pixels.movedim(0, 2)
    if pixels.dim() == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dim() not in (2, 3) or (pixels.dim() == 3 and pixels.shape[2] != 3):
        return None
    step = max(1, math.ceil(max(pixels.shape[:2]) / _MAX_PIXELS))
    pixels = pixels[::step, ::step]
    if pixels.numel() == 0 or pixels.dtype == torch.uint8:
        return pixels if pixels.numel() else None
    low, high = float(pixels.min()), float(pixels.max())
    return (255 * (pixels.double() - low) / ((high - low) or 1.0)).round().to(torch.uint8)
