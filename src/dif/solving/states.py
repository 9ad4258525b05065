"""The states of a run: all of them in memory, some of them with the steps between recomputed, or all on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dif.errors import InvalidInputError
from dif.problem.structure import leaves, map_tensors
from dif.runtime.atomic_file import check_folder, open_atomically

_FORMAT = "dif run 2"  # name and version of the files in a folder
_IN_MEMORY = 2**29  # numbers of all states together that are kept in memory; beyond, only every √T-th state is


class States:
    """The states s₀ … s_T of a run.

    Args:
        advance: Returns the state after step t, for t and the state before it.
        start: s₀.
        length: T.
        folder: Where each state is written as it is reached; None keeps states in memory.
        mode: "all" keeps all states in memory, "sqrt" every √T-th, None all if they fit.
    """

    def __init__(
        self, advance: Callable[[int, Any], Any], start: Any, length: int, folder: Path | None = None,
        mode: Literal["all", "sqrt"] | None = None,
    ) -> None:  # fmt: skip
        self.advance, self.length, self.folder = advance, length, folder
        size = sum(t.numel() for t in leaves(start))
        fits = folder is not None or size * (length + 1) <= _IN_MEMORY
        everything = fits if mode is None else mode == "all"
        self.every = 1 if everything else max(1, math.isqrt(length))  # distance of the states that are kept
        self._like = start
        self._kept: dict[int, Any] = {}
        self._recent: dict[int, Any] = {}

    def put(self, t: int, state: Any) -> None:
        """Keep the state before step t, if it is one of those that are kept."""
        if self.folder is not None:
            with open_atomically(self.folder / f"state_{t:06d}.npz") as file:
                np.savez(file, *(leaf.detach().cpu().numpy() for leaf in leaves(state)))
        elif t % self.every == 0 or t == self.length:
            self._kept[t] = map_tensors(state, torch.Tensor.detach)

    def __getitem__(self, t: int) -> Any:
        if self.folder is not None:
            return self._read(t)
        if t in self._kept:
            return self._kept[t]
        if t not in self._recent:
            begin = t - t % self.every
            state, self._recent = self._kept[begin], {}
            for s in range(begin, min(begin + self.every, self.length)):
                self._recent[s] = state
                state = map_tensors(self.advance(s, state), torch.Tensor.detach)
        return self._recent[t]

    def backwards(self, begin: int, end: int) -> Iterator[tuple[int, Any, Any]]:
        """Yield t, the state before step t and the state after it, for t = end − 1 down to begin."""
        after = self[end]
        for t in reversed(range(begin, end)):
            before = self[t]
            yield t, before, after
            after = before

    @property
    def done(self) -> int:
        """Number of the last state on disk; 0 where there is none."""
        assert self.folder is not None
        found = sorted(self.folder.glob("state_*.npz"))
        return int(found[-1].stem.removeprefix("state_")) if found else 0

    def _read(self, t: int) -> Any:
        assert self.folder is not None
        path = self.folder / f"state_{t:06d}.npz"
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = iter([file[f"arr_{k}"] for k in range(len(file.files))])
            return map_tensors(self._like, lambda like: torch.from_numpy(next(arrays)).to(like).reshape(like.shape))
        except Exception as error:
            raise InvalidInputError(
                f"{str(path)!r} cannot be read ({type(error).__name__}: {error}).",
                "It must be the file that this run wrote.",
                "The file is missing or damaged.",
                "Delete it and the states after it; the same call then continues from the state before it.",
            ) from error


def open_folder(folder: Path, identity: dict[str, str]) -> None:
    """Prepare a folder for the states of a run, or check that it holds states of this very run.

    Args:
        folder: It is created if it is missing.
        identity: Hashes of all that the run depends on, by name.
    """
    check_folder(folder)
    folder.mkdir(exist_ok=True)
    path = folder / "run.json"
    if not path.exists():
        with open_atomically(path) as file:
            file.write(json.dumps({"format": _FORMAT, "identity": identity}).encode())
    try:
        known = json.loads(path.read_text())["identity"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{str(path)!r} cannot be read ({type(error).__name__}: {error}).",
            "It must be the file that a run wrote.",
            "The file is damaged, so it is not known to which run the states belong.",
            "Choose another folder, or delete this one to start again.",
        ) from error
    different = [name for name, digest in identity.items() if known.get(name) != digest]
    if different:
        raise InvalidInputError(
            f"The folder {str(folder)!r} holds another run: {' and '.join(different)} differ.",
            "A folder holds the states of one run.",
            "A run resumes only with the same data, start and batches; otherwise its states would contradict it.",
            "Pass the same ones (draw batches once, by a seed), or choose another folder.",
        )
