"""The states of a run: all of them in memory, some of them with the steps between recomputed, or all on disk."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dif.problem.structure import leaves, mapped
from dif.runtime.atomic_file import check_folder, open_atomically

_IN_MEMORY = 2**29  # numbers of all states together that are kept in memory; beyond, only every √T-th state is


class States:
    """The states s₀ … s_T of a run.

    Args:
        advance: Returns the state after step t, for t and the state before it.
        length: T.
        folder: Where each state is written as it is reached; None keeps states in memory.
        every: Keep every so many states in memory (None: all if they fit, else √T).
    """

    def __init__(
        self, advance: Callable[[int, Any], Any], start: Any, length: int, folder: str | os.PathLike[str] | None = None,
        every: int | None = None,
    ) -> None:  # fmt: skip
        self.advance, self.length = advance, length
        self.folder = None if folder is None else Path(folder)
        size = sum(t.numel() for t in leaves(start))
        fits = size * (length + 1) <= _IN_MEMORY
        self.every = every or (1 if fits or folder is not None else max(1, math.isqrt(length)))
        self._like = start
        self._kept: dict[int, Any] = {}
        self._recent: dict[int, Any] = {}
        self.put(0, start)

    def put(self, t: int, state: Any) -> None:
        """Keep the state before step t, if it is one of those that are kept."""
        if self.folder is not None:
            with open_atomically(self.folder / f"state_{t:06d}.npz") as file:
                np.savez(file, *(leaf.detach().cpu().numpy() for leaf in leaves(state)))
        elif t % self.every == 0 or t == self.length:
            self._kept[t] = mapped(state, torch.Tensor.detach)

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
                state = mapped(self.advance(s, state), torch.Tensor.detach)
        return self._recent[t]

    def backwards(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield t, the state before step t and the state after it, from the last step to the first."""
        after = self[self.length]
        for t in reversed(range(self.length)):
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
        with np.load(self.folder / f"state_{t:06d}.npz", allow_pickle=False) as file:
            arrays = iter([file[f"arr_{k}"] for k in range(len(file.files))])
        return mapped(self._like, lambda like: torch.from_numpy(next(arrays)).to(like))


def open_folder(folder: str | os.PathLike[str], fingerprint: str) -> bool:
    """Prepare a folder for the states of a run; return whether it has states of this very run already."""
    path = Path(folder)
    check_folder(path)
    path.mkdir(exist_ok=True)
    about = path / "run.json"
    known = json.loads(about.read_text()).get("fingerprint") if about.exists() else None
    if known == fingerprint:
        return True
    for old in path.glob("state_*.npz"):
        old.unlink()
    with open_atomically(about) as file:
        file.write(json.dumps({"format": "dif run 1", "fingerprint": fingerprint}).encode())
    return False
