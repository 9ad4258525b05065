"""Save and reload the numbers of a study as JSON, so that a finished study is not computed again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import dif
from dif.runtime.archive import open_atomically


def write(path: Path, numbers: dict[str, Any]) -> None:
    """Write the numbers; the file is complete or not written at all."""
    with open_atomically(path) as file:
        file.write((json.dumps(numbers, indent=2) + "\n").encode())


def load_finished(path: Path, *others: Path) -> dict[str, Any] | None:
    """Return the saved numbers; None if a file is missing or another version of dif wrote them."""
    if not all(file.exists() for file in (path, *others)):
        return None
    numbers = json.loads(path.read_text())
    return numbers if numbers["version"] == dif.__version__ else None


@contextmanager
def time(folder: Path, stage: str) -> Iterator[None]:
    """Add the seconds that a stage of a study takes to those of earlier runs, in the folder's seconds.json."""
    begin = perf_counter()
    try:
        yield
    finally:
        seconds = load_seconds(folder)
        write(folder / "seconds.json", {**seconds, stage: seconds.get(stage, 0.0) + perf_counter() - begin})


def load_seconds(folder: Path) -> dict[str, float]:
    """Return the seconds that each stage of a study has taken so far."""
    path = folder / "seconds.json"
    return json.loads(path.read_text()) if path.exists() else {}


def list_changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return in words in what a setting differs from that of a saved study; empty where it does not.

    >>> list_changes({"n": 100, "seed": 0}, {"n": 200, "seed": 0})
    'n 100 (now 200)'
    """
    changed = ((key, before.get(key), value) for key, value in now.items() if before.get(key) != value)
    return ", ".join(f"{key} {old} (now {new})" for key, old, new in changed)
