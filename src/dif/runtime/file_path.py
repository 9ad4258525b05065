"""Paths of files that a user gives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dif.errors import InvalidInputError


def expect_path(path: Any, *, folder: bool = False) -> Path:
    """Return the path of a file; refuse other objects, and an existing folder unless `folder` is true."""
    given = isinstance(path, str | os.PathLike)
    if not given or not os.fspath(path) or (not folder and Path(path).is_dir()):
        raise InvalidInputError(
            f"`path` is {f'{os.fspath(path)!r}, which is no file' if given else f'of type {type(path).__name__}'}.",
            "It must be the path of a file.",
            "The result is one file.",
            'Pass a path such as "results/scores.npz".',
        )
    return Path(path)


def expect_folder(path: Any, name: str) -> Path:
    """Return the path of a folder, which is created if it is missing; refuse other objects, and a file."""
    given = isinstance(path, str | os.PathLike) and bool(os.fspath(path))
    if not given or (Path(path).exists() and not Path(path).is_dir()):
        raise InvalidInputError(
            f"`{name}` is {f'{os.fspath(path)!r}, which is a file' if given else repr(path)}.",
            "It must be a folder; it is created if it is missing.",
            "What is finished is kept there, in several files.",
            "Choose another name.",
        )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
