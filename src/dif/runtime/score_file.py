"""Scores on disk, filled piece by piece: readable while they grow, gone on with after an interruption."""

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
from dif.runtime.atomic_file import written

_FORMAT = "dif scores in progress 1"
_KINDS = (".npy", ".zarr")


def streamed(path: str | os.PathLike[str]) -> bool:
    """Whether results of this name are filled piece by piece."""
    return os.fspath(path).endswith(_KINDS)


def beside(path: str | os.PathLike[str], kind: str = "json") -> Path:
    """The file that says what the scores are about; `part`: how far they are."""
    return Path(f"{os.fspath(path)}.{kind}")


class ZarrValues:
    """A Zarr array (P, T) that is read and written by slices, as a tensor is; nothing of it is held."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = torch.Size(array.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: Any) -> Tensor:
        return torch.from_numpy(np.asarray(self.array[where]))

    def __setitem__(self, where: Any, block: Tensor) -> None:
        self.array[where] = block.numpy()


Values = Tensor | ZarrValues


class Held:
    """Values (P, T) in memory, filled piece by piece."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.values: Values = torch.full(shape, float("nan"), dtype=torch.float64)
        self.pieces: list[dict[str, Any]] = []

    @property
    def done(self) -> int:
        """Rows that are finished."""
        return self.pieces[-1]["end"] if self.pieces else 0

    def write(self, block: Tensor, **about: Any) -> None:
        """The next piece, and what is to be known of it besides."""
        begin, end = self.done, self.done + len(block)
        self.values[begin:end] = block
        self.pieces.append({"end": end, **about})


class Streamed(Held):
    """A file of values (P, T), NaN where they are still to come, and beside it a journal of the pieces that are done.

    Each line of the journal has the checksum of its piece; a piece that does not agree with it, and what follows, is
    done again. Another piece of work (another `fingerprint`) under the same name begins anew.

    Args:
        path: Ends in .npy or .zarr.
        shape: (P, T).
        fingerprint: Of the work.
        piece: Rows that are written at once.
    """

    def __init__(self, path: str | os.PathLike[str], shape: tuple[int, int], fingerprint: str, piece: int) -> None:
        self.path, self.shape, self.fingerprint, self.piece = check_name(path), shape, fingerprint, piece
        self.pieces: list[dict[str, Any]] = []
        found = self._found()
        self.values = self._begun() if found is None else found

    def write(self, block: Tensor, **about: Any) -> None:
        """The next piece, on disk when this returns."""
        super().write(block, checksum=checksum(block), **about)
        _flushed(self.path)
        self._journal(self.pieces[-1])

    def finish(self) -> None:
        """Nothing more is to come."""
        beside(self.path, "part").unlink(missing_ok=True)

    @property
    def record(self) -> dict[str, Any]:
        """What a finished file says about how it came to be."""
        return {**self._head, "pieces": self.pieces}

    @property
    def _head(self) -> dict[str, Any]:
        return {"format": _FORMAT, "fingerprint": self.fingerprint, "shape": list(self.shape)}

    def _journal(self, line: dict[str, Any]) -> None:
        with open(beside(self.path, "part"), "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _begun(self) -> Values:
        self._refuse_foreign()
        beside(self.path).unlink(missing_ok=True)
        beside(self.path, "part").unlink(missing_ok=True)
        self._journal(self._head)  # first: whoever finds the file finds whose it is
        return _made(self.path, self.shape, self.piece)

    def _refuse_foreign(self) -> None:
        """What dif did not write is not overwritten."""
        if os.path.lexists(self.path) and journal_of(self.path) is None and not beside(self.path).exists():
            raise InvalidInputError(
                "out=",
                measured=f"{self.path!r}, which exists and was not written by dif",
                threshold="a new name, or scores of dif",
                meaning="It would be overwritten.",
                cure="Choose another name, or delete it.",
            )

    def _found(self) -> Values | None:
        """The same work, begun before: its values; pieces that are whole are remembered."""
        known = journal_of(self.path)
        if known is None or known[0] != self._head:
            return None
        try:
            values = opened(self.path, write=True)
            if tuple(values.shape) != self.shape:
                return None
            self.pieces = whole_pieces(values, known[1])
        except Exception:  # damaged beyond reading: begin anew
            return None
        with written(beside(self.path, "part")) as file:  # what is not whole is forgotten, half a line too
            file.writelines(f"{json.dumps(line)}\n".encode() for line in (self._head, *self.pieces))
        return values


def journal_of(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The work that a file is filled with, and its finished pieces; of a finished file, what its description keeps."""
    try:
        lines = beside(path, "part").read_text().split("\n")[:-1]  # a line that is not ended was not finished
        head, *pieces = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        try:
            about = json.loads(beside(path).read_text())
            pieces = about["streamed"].pop("pieces")
            head = about["streamed"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return head, pieces


def whole_pieces(values: Values, pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pieces, up to the first that is not what was written."""
    begin, good = 0, []
    for piece in pieces:
        try:
            block = values[begin : piece["end"]]
        except Exception:  # a chunk that its own checksum refuses
            break
        if checksum(block) != piece["checksum"]:
            break
        good.append(piece)
        begin = piece["end"]
    return good


def checksum(block: Tensor) -> int:
    """CRC-32 of the values."""
    return zlib.crc32(block.contiguous().numpy().tobytes())


def check_name(path: str | os.PathLike[str]) -> str:
    """A name that says what kind of file it is, in a folder that exists."""
    name = os.fspath(path)
    if not streamed(name):
        raise InvalidInputError(
            "out=",
            measured=repr(name),
            threshold="a name ending in .npy or .zarr",
            meaning="The scores are written as one array of numpy or Zarr, what they are about into a .json beside it.",
            cure="Name it scores.npy, say.",
        )
    if not Path(name).parent.is_dir():
        raise FileNotFoundError(f"no folder {str(Path(name).parent)!r} to save {Path(name).name!r} in: make it first")
    return name


def opened(path: str | os.PathLike[str], write: bool = False) -> Values:
    """The values of a file, read as needed."""
    name = os.fspath(path)
    if name.endswith(".zarr"):
        return ZarrValues(_zarr().open_array(name, mode="r+" if write else "r"))
    # copy on write: a tensor of a file that may not be written to has no other way
    return torch.from_numpy(np.lib.format.open_memmap(name, mode="r+" if write else "c"))


def _made(name: str, shape: tuple[int, int], piece: int) -> Values:
    """NaN everywhere; room is taken at once, so that a full disk shows now and not when all is computed."""
    if name.endswith(".zarr"):
        zarr = _zarr()
        codecs = {"compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]}
        chunk = (max(1, min(piece, shape[0])), max(1, shape[1]))
        made = zarr.create_array(
            name, shape=shape, chunks=chunk, dtype="float64", fill_value=np.nan, overwrite=True, **codecs
        )
        return ZarrValues(made)
    with written(name) as file:  # another file of that name: who has the old one mapped keeps it
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
        row = np.full((max(1, 2**20 // max(1, shape[1])), shape[1]), np.nan)
        for begin in range(0, shape[0], len(row)):
            file.write(row[: shape[0] - begin].tobytes())
    return torch.from_numpy(np.lib.format.open_memmap(name, mode="r+"))


def _flushed(name: str) -> None:
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
        raise ImportError('scores in a .zarr need Zarr: pip install "dif[zarr]"') from error
    return zarr
