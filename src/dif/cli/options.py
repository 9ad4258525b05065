"""Options that several commands have in common."""

from __future__ import annotations

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
