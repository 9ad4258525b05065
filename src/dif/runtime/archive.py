"""The files of dif: archives and journals, which notice any damage, and the lock of a folder. Nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from dif.errors import InvalidInputError
from dif.runtime.inputs import expect_path

VERSION = 1  # of archives and journals, and of what each kind of them holds
Arrays = Mapping[str, np.ndarray | Tensor]
FilePath = str | os.PathLike[str]


def write_archive(path: FilePath, kind: str, arrays: Arrays, about: Mapping[str, Any]) -> None:
    """Write arrays and a description to one npz file; an interrupted write leaves an old file as it is.

    Args:
        path: The file.
        kind: What it holds, such as "influence"; another kind of file is not read as this one.
        arrays: Numbers by name.
        about: What else belongs to them, as JSON can hold it.
    """
    text = json.dumps({"kind": kind, "version": VERSION, **about})
    plain: Any = {name: x.detach().cpu().numpy() if isinstance(x, Tensor) else x for name, x in arrays.items()}
    with open_atomically(expect_path(path)) as file:
        np.savez(file, **plain, about=np.array(text), checksum=np.array(_hash(text, plain)))


def read_archive(
    path: FilePath, kind: str, cure: str = "", **expected: Any
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the description in a file of `write_archive`.

    Args:
        path: The file.
        kind: What it must hold.
        cure: What to do about a damaged file; a sentence.
        expected: Entries of the description that must be these.

    Raises:
        FileNotFoundError: Where there is no such file.
        InvalidInputError: Where it is damaged, of another kind or version, or belongs to something else.
    """
    with _naming_damage(path, kind, cure):
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        text, checksum = str(arrays.pop("about")), str(arrays.pop("checksum"))
        about = json.loads(text)
        _check(about, kind, checksum == _hash(text, arrays), expected)
    return arrays, about


def write_document(path: FilePath, kind: str, about: Mapping[str, Any]) -> None:
    """Write a description alone as a JSON file that people can read, too; the arguments as in `write_archive`."""
    content = {"kind": kind, "version": VERSION, **about}
    sealed = content | {"checksum": _hash(json.dumps(content, allow_nan=False), {})}
    with open_atomically(path) as file:
        file.write((json.dumps(sealed, indent=1) + "\n").encode())


def read_document(path: FilePath, kind: str, cure: str = "") -> dict[str, Any]:
    """Return the description in a file of `write_document`; arguments and errors as in `read_archive`."""
    with _naming_damage(path, kind, cure):
        content = json.loads(Path(path).read_bytes())
        checksum = content.pop("checksum")
        _check(content, kind, checksum == _hash(json.dumps(content), {}), {})
        return {name: value for name, value in content.items() if name not in ("kind", "version")}


@contextmanager
def _naming_damage(path: FilePath, kind: str, cure: str) -> Iterator[None]:
    """Turn all that goes wrong while a file is read into an error that names the file."""
    if not expect_path(path).exists():
        raise FileNotFoundError(f"There is no {kind} file {os.fspath(path)!r}.")
    try:
        yield
    except Exception as error:
        raise damage_error(path, error, cure) from error


def _check(about: Mapping[str, Any], kind: str, intact: bool, expected: Mapping[str, Any]) -> None:
    """Refuse a file of another kind or version, one that was changed, and one that belongs to something else."""
    if about["kind"] != kind or about["version"] != VERSION:
        raise ValueError(f"it is {about['kind']!r}, version {about['version']}, not {kind!r}, version {VERSION}")
    if not intact:
        raise ValueError("its checksum differs")
    others = [name for name, value in expected.items() if about[name] != value]
    if others:
        raise ValueError(f"it has another {others[0]}")


def damage_error(path: FilePath, reason: object, cure: str = "") -> InvalidInputError:
    """Build the error about a file that cannot be read."""
    words = f"{type(reason).__name__}: {reason}" if isinstance(reason, KeyError) else str(reason)
    found = f"{os.fspath(path)!r} is damaged, or was not written by dif: {words.rstrip('.') or 'it is empty'}."
    return InvalidInputError(f"{found} {cure}".strip())


def _hash(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Return the checksum of an archive: of the description, and of names, dtypes, shapes and bytes of the arrays."""
    digest = hashlib.sha256(text.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class Journal:
    """A file of entries of JSON, one on each line after a checksum of itself and of all entries before it.

    Entries are appended one by one. What follows a damaged line does not count, nor does a last line that was cut off.

    Args:
        path: The file.
        kind: What the entries are about.
    """

    def __init__(self, path: FilePath, kind: str) -> None:
        self.path, self._mark = Path(path), hashlib.sha256(f"{kind} {VERSION}".encode()).hexdigest()
        self._last = self._mark  # checksum of the last line

    def write(self, entries: Iterable[Any]) -> None:
        """Write all entries, in place of those that were there."""
        self._last = self._mark
        with open_atomically(self.path) as file:
            file.writelines(map(self._seal, entries))

    def append(self, entry: Any) -> None:
        """Write one more entry, after all have been read or written."""
        with name_in_errors(self.path), self.path.open("ab") as file:
            file.write(self._seal(entry))

    def read(self) -> tuple[list[Any], bool]:
        """Return the entries before the first damage, and whether there is none."""
        self._last, entries = self._mark, []
        for line in self.path.read_bytes().split(b"\n")[:-1]:  # a line without line break was cut off
            checksum, _, text = line.partition(b" ")
            found = self._chain(text)
            if checksum != found.encode():
                return entries, False
            self._last = found
            entries.append(json.loads(text))
        return entries, True

    def _seal(self, entry: Any) -> bytes:
        text = json.dumps(entry).encode()
        self._last = self._chain(text)
        return f"{self._last} ".encode() + text + b"\n"

    def _chain(self, text: bytes) -> str:
        return hashlib.sha256(self._last.encode() + text).hexdigest()


@contextmanager
def open_atomically(path: FilePath) -> Iterator[BinaryIO]:
    """Open a temporary file for writing, and rename it to `path` once everything is written."""
    path = Path(path)
    check_folder(path)
    with name_in_errors(path):
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)  # it is still there only where something went wrong


@contextmanager
def name_in_errors(path: FilePath) -> Iterator[None]:
    """Let errors of the system, such as a full disk, name the file that could not be written."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def check_folder(path: Path) -> None:
    """Raise FileNotFoundError unless the folder of `path` exists."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(path.parent)!r} to save {path.name!r} in. Create it first.")


_PAUSE = 0.05  # seconds between two attempts to lock a folder


@contextmanager
def lock_folder(folder: Path, name: str = ".lock", *, wait: bool = True) -> Iterator[bool]:
    """Keep other processes that lock the folder by this name waiting; the lock of a killed process is gone.

    Args:
        folder: An existing folder. An empty file of this name stays there.
        name: What is locked, as the name of a file.
        wait: Wait until no one else has the lock.

    Yields:
        Whether the lock was got; only with `wait=False` it may not be.
    """
    file = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        while not (locked := _lock(file)) and wait:
            time.sleep(_PAUSE)
        yield locked
    finally:
        os.close(file)  # this ends the lock


def _lock(file: int) -> bool:
    """Lock an open file, with `flock` of Unix or `locking` of Windows; return whether no one else has locked it."""
    try:
        system = import_module("fcntl")
        attempt, mode = system.flock, (system.LOCK_EX | system.LOCK_NB,)
    except ImportError:
        system = import_module("msvcrt")
        attempt, mode = system.locking, (system.LK_NBLCK, 1)
    try:
        attempt(file, *mode)
    except OSError:
        return False
    return True
