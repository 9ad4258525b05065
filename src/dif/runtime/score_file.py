"""A file of scores that is filled chunk by chunk. It can be read while it grows, and resumed after an interruption."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.runtime.atomic_file import check_folder, open_atomically

_FORMAT = "dif scores in progress 1"  # name and version of the journal, its first entry
_SUFFIXES = (".npy", ".zarr")  # files that can be filled chunk by chunk


def is_filled_in_chunks(path: str | os.PathLike[str]) -> bool:
    """Return whether the scores of this file are written chunk by chunk."""
    return os.fspath(path).endswith(_SUFFIXES)


def companion_path(path: str | os.PathLike[str], kind: str = "json") -> Path:
    """Return the path of the description of a score file (`json`), or of its journal (`part`)."""
    return Path(f"{os.fspath(path)}.{kind}")


class ZarrValues:
    """A Zarr array (P, T) that is read and written by slices like a tensor; nothing is cached in memory."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = torch.Size(array.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: Any) -> Tensor:
        return torch.from_numpy(np.asarray(self.array[where]))

    def pick(self, rows: list[int]) -> Tensor:
        """Return the listed rows; others are not read."""
        return torch.from_numpy(np.asarray(self.array.oindex[rows, :]))

    def __setitem__(self, where: Any, block: Tensor) -> None:
        self.array[where] = block.numpy()


Values = Tensor | ZarrValues  # scores (P, T), in memory or on disk


class MemoryScores:
    """Scores (P, T) in memory, filled chunk by chunk; NaN where they are not computed yet."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.values: Values = torch.full(shape, float("nan"), dtype=torch.float64)
        self.pieces: list[dict[str, Any]] = []  # of each finished chunk: its last row + 1 ("end") and its diagnostics

    @property
    def done(self) -> int:
        """Number of finished rows."""
        return self.pieces[-1]["end"] if self.pieces else 0

    def write(self, block: Tensor, **about: Any) -> None:
        """Append the next chunk of rows, with its diagnostics."""
        begin, end = self.done, self.done + len(block)
        self.values[begin:end] = block
        self.pieces.append({"end": end, **about})


class FileScores(MemoryScores):
    """Scores (P, T) in a file, NaN where they are not computed yet, with a journal of the finished chunks beside it.

    Each line of the journal has the checksum of its chunk. From the first chunk whose checksum differs, the chunks are
    computed again. A file with another `fingerprint` is started from the beginning.

    Args:
        path: Ends in .npy or .zarr.
        shape: (P, T).
        fingerprint: Identifies the computation whose scores these are.
        rows: Rows in a chunk.
    """

    def __init__(self, path: str | os.PathLike[str], shape: tuple[int, int], fingerprint: str, rows: int) -> None:
        self.path, self.shape, self.fingerprint, self.rows = check_path(path), shape, fingerprint, rows
        self.pieces: list[dict[str, Any]] = []
        resumed = self._resume()
        self.values = self._start() if resumed is None else resumed

    def write(self, block: Tensor, **about: Any) -> None:
        """Append the next chunk of rows, with its diagnostics; it is on disk when this returns."""
        super().write(block, checksum=checksum(block), **about)
        _flush(self.path)
        self._append_to_journal(self.pieces[-1])

    def finish(self) -> None:
        """Delete the journal: all rows are written."""
        companion_path(self.path, "part").unlink(missing_ok=True)

    @property
    def record(self) -> dict[str, Any]:
        """The journal as a dict, which becomes part of the description of a finished file."""
        return {**self._head, "pieces": self.pieces}

    @property
    def _head(self) -> dict[str, Any]:
        return {"format": _FORMAT, "fingerprint": self.fingerprint, "shape": list(self.shape)}

    def _append_to_journal(self, line: dict[str, Any]) -> None:
        with open(companion_path(self.path, "part"), "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _start(self) -> Values:
        """Create the file and its journal."""
        self._refuse_foreign()
        companion_path(self.path).unlink(missing_ok=True)
        companion_path(self.path, "part").unlink(missing_ok=True)
        self._append_to_journal(self._head)  # before the file, so that the file is never without a journal
        return _create(self.path, self.shape, self.rows)

    def _refuse_foreign(self) -> None:
        """Refuse to overwrite a file that dif did not write."""
        if os.path.lexists(self.path) and read_journal(self.path) is None and not companion_path(self.path).exists():
            raise InvalidInputError(
                f"`out` is {self.path!r}, which exists and was not written by dif.",
                "It must be a new file, or one with scores of dif.",
                "The existing file would be overwritten.",
                "Choose another name, or delete that file.",
            )

    def _resume(self) -> Values | None:
        """Open the file of the same computation and read its intact chunks; None if there is none."""
        journal = read_journal(self.path)
        if journal is None or journal[0] != self._head:
            return None
        try:
            values = open_values(self.path, write=True)
            if tuple(values.shape) != self.shape:
                return None
            self.pieces = intact_chunks(values, journal[1])
        except Exception:  # damaged beyond reading: start from the beginning
            return None
        with open_atomically(
            companion_path(self.path, "part")
        ) as file:  # without the lines of damaged chunks and without an incomplete last line
            file.writelines(f"{json.dumps(line)}\n".encode() for line in (self._head, *self.pieces))
        return values


def read_journal(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Read the head and the chunks of a journal, or of a finished file from its description; None without either."""
    try:
        lines = companion_path(path, "part").read_text().split("\n")[:-1]  # a line without line break is incomplete
        head, *chunks = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        try:
            about = json.loads(companion_path(path).read_text())
            chunks = about["streamed"].pop("pieces")
            head = about["streamed"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return head, chunks


def intact_chunks(values: Values, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chunks before the first whose values differ from what was written."""
    begin, intact = 0, []
    for chunk in chunks:
        try:
            block = values[begin : chunk["end"]]
        except Exception:  # Zarr's own checksum differs
            break
        if checksum(block) != chunk["checksum"]:
            break
        intact.append(chunk)
        begin = chunk["end"]
    return intact


def checksum(block: Tensor) -> int:
    """Return the CRC-32 of the values."""
    return zlib.crc32(block.contiguous().numpy().tobytes())


def check_path(path: str | os.PathLike[str]) -> str:
    """Return the path as a string; it must end in .npy or .zarr, and its folder must exist."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if name is None or not is_filled_in_chunks(name):
        raise InvalidInputError(
            f"`out` is {path if name is None else name!r}.",
            "It must be a name ending in .npy or .zarr.",
            "The scores are written as one array of numpy or Zarr, with a description in a .json file beside it.",
            "Use a name such as scores.npy.",
        )
    check_folder(Path(name))
    return name


def open_values(path: str | os.PathLike[str], write: bool = False) -> Values:
    """Open the values of a score file; they are read from disk as needed."""
    name = os.fspath(path)
    if name.endswith(".zarr"):
        return ZarrValues(_zarr().open_array(name, mode="r+" if write else "r"))
    # copy on write ("c"): torch has no read-only tensors
    return torch.from_numpy(np.lib.format.open_memmap(name, mode="r+" if write else "c"))


def _create(name: str, shape: tuple[int, int], rows: int) -> Values:
    """Create an array of NaN.

    A .npy file is written in its full size at once, so that a full disk is noticed before anything is computed.
    """
    if name.endswith(".zarr"):
        zarr = _zarr()
        codecs = {"compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]}
        chunk = (max(1, min(rows, shape[0])), max(1, shape[1]))
        array = zarr.create_array(
            name, shape=shape, chunks=chunk, dtype="float64", fill_value=np.nan, overwrite=True, **codecs
        )
        return ZarrValues(array)
    with open_atomically(name) as file:  # a new file, so that a memory map of the old one stays valid
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
        block = np.full((max(1, 2**20 // max(1, shape[1])), shape[1]), np.nan)
        for begin in range(0, shape[0], len(block)):
            file.write(block[: shape[0] - begin].tobytes())
    return torch.from_numpy(np.lib.format.open_memmap(name, mode="r+"))


def _flush(name: str) -> None:
    """Write a .npy file from the system's buffers to disk."""
    if name.endswith(".npy"):
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise ImportError('Scores in a .zarr file need Zarr: pip install "directional-influence[zarr]".') from error
    return zarr
