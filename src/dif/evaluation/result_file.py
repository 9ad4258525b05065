"""Files of results: arrays and a description in one npz file, without pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.runtime.atomic_file import open_atomically
from dif.runtime.file_path import expect_path


def write_result(
    path: str | os.PathLike[str], kind: str, about: Mapping[str, Any], methods: Mapping[str, Tensor], **arrays: Tensor
) -> None:
    """Write a result of one kind: what describes it, the array of each method, and other arrays by name."""
    described = json.dumps({"format": f"dif {kind} 1", **about, "methods": list(methods)})
    named = {f"method_{number}": values for number, values in enumerate(methods.values())} | arrays
    content: dict[str, Any] = {"about": np.array(described)} | {name: t.numpy() for name, t in named.items()}
    with open_atomically(expect_path(path)) as file:
        np.savez(file, **content)


def read_result(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return what `write_result` wrote: the description, the arrays of the methods, the other arrays."""
    if not expect_path(path).exists():
        raise FileNotFoundError(f"There is no file {os.fspath(path)!r}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "about"}
        methods = {name: arrays.pop(f"method_{number}") for number, name in enumerate(about.pop("methods"))}
        written_as = about.pop("format")
    except Exception as error:
        written_as, reason = None, f"{type(error).__name__}: {error}"
    else:
        if written_as == f"dif {kind} 1":
            return about, methods, arrays
        reason = f"format {written_as!r}"
    raise InvalidInputError(
        f"The file {os.fspath(path)!r} cannot be read ({reason}).",
        f"It must have the format {f'dif {kind} 1'!r}.",
        "It holds another kind of result, is damaged, or comes from a newer version.",
        "Load it with the class that saved it, or evaluate again.",
    )
