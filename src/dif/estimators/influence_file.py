"""Files of scores: one npz file, or a file of values that scoring fills, with a JSON description beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dif.errors import InvalidInputError
from dif.estimators.index_file import describe_index, restore_index
from dif.problem.perturbation import Perturbation
from dif.runtime.atomic_file import open_atomically
from dif.runtime.file_path import expect_path
from dif.runtime.score_file import Values, companion_path, intact_chunks, is_filled_in_chunks, open_values, read_journal

_FORMAT = "dif influence 1"  # name and version of the file format
_LABELS = 4096  # labels written at once, to save memory


@dataclass(frozen=True, eq=False)
class StoredScores:
    """What a file of scores holds."""

    values: Values
    perturbations: tuple[str, ...]
    targets: tuple[str, ...]
    estimator: str
    diagnostics: dict[str, Any]
    index: Any  # that of the user's data frame, or its labels; None without a data frame


def write_scores(path: str | os.PathLike[str], values: np.ndarray, about: Iterator[str]) -> None:
    """Write all to one file (npz, no pickle)."""
    with open_atomically(expect_path(path)) as file:
        np.savez(file, values=values, about=np.array("".join(about)))


def write_description(path: str | os.PathLike[str], about: Iterator[str]) -> None:
    """Write everything but the values to a JSON file next to the file of values, which scoring fills."""
    with open_atomically(companion_path(path)) as file:
        file.writelines(chunk.encode() for chunk in about)


def describe_scores(
    estimator: str, diagnostics: dict[str, Any], targets: Sequence[str], carried_out: Perturbation | tuple[str, ...],
    index: Any, **more: Any,
) -> Iterator[str]:  # fmt: skip
    """Yield everything but the values as JSON, chunk by chunk, so that a million labels need little memory."""
    about = {"format": _FORMAT, "estimator": estimator, "diagnostics": diagnostics, **more, "targets": list(targets)}
    if index is not None:
        about |= describe_index(index)
    yield json.dumps(about)[:-1] + ', "perturbations": ['
    P = len(carried_out)
    for begin in range(0, P, _LABELS):
        chunk = carried_out[begin : min(begin + _LABELS, P)]
        labels = chunk.labels if isinstance(chunk, Perturbation) else list(chunk)
        yield (", " if begin else "") + json.dumps(labels)[1:-1]
    yield "]}"


def read_scores(path: str | os.PathLike[str]) -> StoredScores:
    """Read a file of either kind."""
    if not expect_path(path, folder=True).exists():
        raise FileNotFoundError(f"There is no influence file {os.fspath(path)!r}.")
    try:
        if is_filled_in_chunks(path):
            about = json.loads(companion_path(path).read_text())
            values = open_values(path)
        else:
            with np.load(path, allow_pickle=False) as file:
                values, about = torch.as_tensor(file["values"]), json.loads(str(file["about"]))
        written_as, shape = about["format"], (len(about["perturbations"]), len(about["targets"]))
        labels, targets, estimator, diagnostics = (
            about[key] for key in ("perturbations", "targets", "estimator", "diagnostics")
        )
        index = restore_index(about)
    except ImportError:
        raise
    except Exception as error:
        raise _unreadable_error(path, f"{type(error).__name__}: {error}") from error
    if written_as != _FORMAT or tuple(values.shape) != shape:
        raise _unreadable_error(path, f"format {written_as!r} with values of shape {tuple(values.shape)}")
    if is_filled_in_chunks(path):
        _, pieces = read_journal(path) or ({}, [])
        good = intact_chunks(values, pieces)
        rows = good[-1]["end"] if good else 0
        if len(good) < len(pieces):
            raise _unreadable_error(path, f"values from row {rows} on differ from those that were written")
        diagnostics = {**diagnostics, "rows": rows}
    return StoredScores(values, tuple(labels), tuple(targets), estimator, diagnostics, index)


def _unreadable_error(path: str | os.PathLike[str], reason: str) -> InvalidInputError:
    """Build the error for a file that is no sound influence file."""
    return InvalidInputError(
        f"The influence file {os.fspath(path)!r} cannot be read ({reason}).",
        f"It must have the format {_FORMAT!r}.",
        "It was not written by Influence.save, is damaged, or comes from a newer version.",
        "Save the influence again, or update dif.",
    )
