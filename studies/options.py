"""What several commands have in common: options, and what they say when they are interrupted."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dif.cli.output import fail

Out = Annotated[Path, typer.Option(help="Folder for the figures and JSON files; it is created if missing.")]
Device = Annotated[str, typer.Option(help="torch device, such as cpu or cuda.")]
Data = Annotated[Path | None, typer.Option(help="Folder with the four MNIST files (idx, gzip).")]


class Side(StrEnum):
    """Pixels of an image along each side."""

    whole = "28"
    halved = "14"


def check_device(device: str) -> None:
    """Refuse a device that torch cannot use."""
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        fail(f"Device {device!r} is not available ({str(error).splitlines()[0]}). Leave out --device.", cause=error)


def say_saved(out: Path, how: str = "the same command continues from there") -> Callable[[], str]:
    """Return a function for `report_errors`: finished parts of a study are saved in `out`, and how to continue."""
    return lambda: f"Interrupted. Finished parts are saved in {str(out)!r}; {how}."
