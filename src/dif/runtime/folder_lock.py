"""Locks on a folder, so that several processes can work in it. They end with the process that holds them.

On systems without `flock` (Windows) there are no locks, and no two processes should work in one folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_CHANGING = ".changing"  # locked while a process changes files that others change too
_IN_USE = ".in-use"  # locked, together with others, by each process that works in the folder


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process changes the folder, and keep others waiting meanwhile."""
    with _open(folder / _CHANGING) as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def use_folder(folder: Path) -> Iterator[bool]:
    """Mark the folder as in use; yields whether another process is using it, too."""
    with _open(folder / _IN_USE) as file:
        others = False
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                others = True
            fcntl.flock(file, fcntl.LOCK_SH)
        yield others


@contextmanager
def _open(path: Path) -> Iterator[int]:
    """Open a lock file, which is created if it is missing; it stays there, empty."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield file
    finally:
        os.close(file)  # this ends the lock
