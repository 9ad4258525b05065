"""The numbers of a study as JSON: complete or not there at all, and not computed twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dif
from dif.runtime.atomic_file import written


def write(path: Path, numbers: dict[str, Any]) -> None:
    """Write them."""
    with written(path) as file:
        file.write((json.dumps(numbers, indent=2) + "\n").encode())


def finished(path: Path, *beside: Path) -> dict[str, Any] | None:
    """The numbers that this version wrote before, if they and the files beside them are there."""
    if not all(one.exists() for one in (path, *beside)):
        return None
    known = json.loads(path.read_text())
    return known if known["version"] == dif.__version__ else None
