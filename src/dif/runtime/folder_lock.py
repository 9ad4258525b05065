"""Locks on a folder, so that several processes can work in it. They end with the process that holds them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

_CHANGING = ".changing"  # locked while a process changes files that others change too
_IN_USE = ".in-use"  # locked, together with others, by each process that works in the folder
_PLACES = 64  # bytes of a lock file on Windows, of which each process that shares the file locks one
_PAUSE = 0.05  # seconds between two attempts on Windows


class WholeFileLocks:
    """Locks of whole files, with `flock` of Unix."""

    def __init__(self, fcntl: Any) -> None:
        self._fcntl = fcntl

    def wait(self, file: int) -> None:
        """Wait until no one else has the file, and keep it."""
        self._fcntl.flock(file, self._fcntl.LOCK_EX)

    def share(self, file: int) -> bool:
        """Keep the file together with others; return whether there are any."""
        others = False
        try:
            self._fcntl.flock(file, self._fcntl.LOCK_EX | self._fcntl.LOCK_NB)
        except OSError:
            others = True
        self._fcntl.flock(file, self._fcntl.LOCK_SH)
        return others


class ByteLocks:
    """Locks of single bytes of a file, with `locking` of Windows, which has no shared locks."""

    def __init__(self, msvcrt: Any) -> None:
        self._msvcrt = msvcrt

    def wait(self, file: int) -> None:
        """Wait until no one else has the first byte, and keep it."""
        while not self._lock(file, 0):
            time.sleep(_PAUSE)

    def share(self, file: int) -> bool:
        """Keep one byte; return whether others keep any."""
        mine, others = None, False
        for place in range(_PLACES):
            if not self._lock(file, place):
                others = True
            elif mine is None:
                mine = place
            else:
                os.lseek(file, place, os.SEEK_SET)
                self._msvcrt.locking(file, self._msvcrt.LK_UNLCK, 1)
        return others

    def _lock(self, file: int, place: int) -> bool:
        """Lock one byte, which need not exist; return whether no one else has it."""
        os.lseek(file, place, os.SEEK_SET)
        try:
            self._msvcrt.locking(file, self._msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True


def find_locks() -> WholeFileLocks | ByteLocks:
    """Return the locks that this system has."""
    try:
        return WholeFileLocks(import_module("fcntl"))
    except ImportError:  # Windows
        return ByteLocks(import_module("msvcrt"))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process changes the folder, and keep others waiting meanwhile."""
    with _open(folder / _CHANGING) as file:
        find_locks().wait(file)
        yield


@contextmanager
def use_folder(folder: Path) -> Iterator[bool]:
    """Mark the folder as in use; yields whether another process is using it, too."""
    with _open(folder / _IN_USE) as file:
        yield find_locks().share(file)


@contextmanager
def _open(path: Path) -> Iterator[int]:
    """Open a lock file, which is created if it is missing; it stays there, empty."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield file
    finally:
        os.close(file)  # this ends the lock
