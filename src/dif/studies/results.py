"""Save and reload the numbers of a study as JSON, so that a finished study is not computed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dif
from dif.runtime.atomic_file import open_atomically


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


def list_changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return in words in what a setting differs from that of a saved study; empty where it does not.

    >>> list_changes({"n": 100, "seed": 0}, {"n": 200, "seed": 0})
    'n 100 (now 200)'
    """
    changed = ((key, before.get(key), value) for key, value in now.items() if before.get(key) != value)
    return ", ".join(f"{key} {old} (now {new})" for key, old, new in changed)
