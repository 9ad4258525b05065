"""A file of scores that is filled chunk by chunk. It can be read while it grows, and resumed after an interruption."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.runtime.archive import FilePath, Journal, check_folder, damage_error, open_atomically

_BLOCK = 2**20  # numbers that are written or looked at together


def is_filled_in_chunks(path: FilePath) -> bool:
    """Return whether the scores of this file are written chunk by chunk."""
    return os.fspath(path).endswith(".npy")


class FileScores:
    """Scores (P, T) in a .npy file, NaN where they are not computed yet, with a journal beside it.

    The journal describes the scores and has the checksum of each finished chunk. From the first chunk that is damaged,
    the chunks are computed again. A file with another `fingerprint` is started from the beginning.

    Args:
        path: Ends in .npy.
        shape: (P, T).
        fingerprint: Identifies the computation whose scores these are.
        about: Describes the scores, in parts that JSON can hold; used only where the file is started.
    """

    def __init__(self, path: FilePath, shape: tuple[int, int], fingerprint: str, about: Iterable[Any]) -> None:
        self.path, self.shape, self.fingerprint = _check_path(path), shape, fingerprint
        self.journal = journal_of(path)
        self.pieces: list[dict[str, Any]] = []  # of each finished chunk: its last row + 1 ("end") and its diagnostics
        resumed = self._resume()
        if not resumed and os.path.lexists(self.path) and not self.journal.path.exists():
            raise InvalidInputError(
                f"`out` must be a new file, or one with scores of dif; {self.path!r} exists and was not written by dif."
            )
        if not resumed or self.done < shape[0]:
            self._describe(about, finished=False)  # before the file, so that the file is never without a journal
        if not resumed:
            _create(self.path, shape)
        self.values = open_values(self.path, write=True)

    @property
    def done(self) -> int:
        """Number of finished rows."""
        return self.pieces[-1]["end"] if self.pieces else 0

    def write(self, block: Tensor, **about: Any) -> None:
        """Append the next chunk of rows, with its diagnostics; later calls find it in the file."""
        begin, end = self.done, self.done + len(block)
        self.values[begin:end] = block
        self.pieces.append({"checksum": _checksum(block), "end": end, **about})
        self.journal.append(self.pieces[-1])

    def finish(self, about: Iterable[Any]) -> None:
        """Note that all rows are written, with the description of the result."""
        self._describe(about, finished=True)

    def _describe(self, about: Iterable[Any], *, finished: bool) -> None:
        head = {"fingerprint": self.fingerprint, "shape": list(self.shape), "finished": finished}
        self.journal.write([head, *({"about": part} for part in about), *self.pieces])

    def _resume(self) -> bool:
        """Read the intact chunks of the same computation; return whether there is its file."""
        try:
            (head, *entries), _ = self.journal.read()
            values = open_values(self.path)
        except Exception:  # there is none, or it is damaged beyond reading
            return False
        shape = list(self.shape)
        if [head["fingerprint"], head["shape"], list(values.shape)] != [self.fingerprint, shape, shape]:
            return False
        self.pieces = _find_intact(values, [entry for entry in entries if "end" in entry])
        return True


def journal_of(path: FilePath) -> Journal:
    """Return the journal beside a file of scores."""
    return Journal(f"{os.fspath(path)}.journal", "scores")


def read_values(path: FilePath) -> tuple[Tensor, list[Any], int]:
    """Return the scores in a file, which are read from disk as needed, the parts of their description, and the rows.

    The number of rows that are finished is smaller than that of all while the file grows; the other rows are NaN.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"There is no influence file {os.fspath(path)!r}.")
    try:
        (head, *entries), whole = journal_of(path).read()
        values = open_values(path)
    except Exception as error:
        raise damage_error(path, error) from error
    about = [entry["about"] for entry in entries if "about" in entry]
    pieces = [entry for entry in entries if "end" in entry]
    intact = _find_intact(values, pieces)
    rows = intact[-1]["end"] if intact else 0
    if not whole or list(values.shape) != head["shape"]:
        raise damage_error(path, "its journal, or its shape, is not as it was written")
    if len(intact) < len(pieces) or (head["finished"] and rows < len(values)):
        raise damage_error(path, f"values from row {rows} on differ from those that were written")
    step = max(1, _BLOCK // max(1, values.shape[1]))
    for begin in range(rows, len(values), step):
        block = values[begin : min(begin + step, len(values))]
        if not bool(block.isnan().all()):  # only then, since memory is used where something is written
            block.fill_(float("nan"))
    return values, about, rows


def open_values(path: FilePath, write: bool = False) -> Tensor:
    """Open the values of a score file; they are read from disk as needed."""
    # copy on write ("c"): torch has no read-only tensors
    values = np.lib.format.open_memmap(os.fspath(path), mode="r+" if write else "c")
    if values.dtype != np.float64 or values.ndim != 2:
        raise ValueError(f"values of type {values.dtype} and shape {values.shape}")
    return torch.from_numpy(values)


def _check_path(path: FilePath) -> str:
    """Return the path as a string; it must end in .npy, and its folder must exist."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if name is None or not is_filled_in_chunks(name):
        raise InvalidInputError(f"`out` must be a name ending in .npy, such as scores.npy, not {name or path!r}.")
    check_folder(Path(name))
    return name


def _find_intact(values: Tensor, pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chunks before the first whose values differ from what was written."""
    begin = 0
    for number, piece in enumerate(pieces):
        if _checksum(values[begin : piece["end"]]) != piece["checksum"]:
            return pieces[:number]
        begin = piece["end"]
    return pieces


def _checksum(block: Tensor) -> str:
    return hashlib.sha256(block.contiguous().numpy().data).hexdigest()


def _create(name: str, shape: tuple[int, int]) -> None:
    """Create an array of NaN in its full size, so that a full disk is noticed before anything is computed."""
    with open_atomically(name) as file:  # a new file, so that a memory map of the old one stays valid
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
        block = np.full((max(1, _BLOCK // max(1, shape[1])), shape[1]), np.nan)
        for begin in range(0, shape[0], len(block)):
            file.write(block[: shape[0] - begin].tobytes())
