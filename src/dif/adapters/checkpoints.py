"""Trained weights on disk, as Lightning and plain training loops write them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from dif import InvalidInputError

_INSIDE = ("state_dict", "model_state_dict", "model")  # where the weights lie in files that hold more than them


def restored(
    model: nn.Module, path: str | os.PathLike[str], *, prefix: str | None = None, dtype: torch.dtype = torch.float64
) -> nn.Module:
    """A copy of the model with the weights of a file, in evaluation mode and in double precision.

    Args:
        model: Of the architecture that was trained; not changed.
        path: A state dict, or a checkpoint with one under "state_dict" (Lightning), "model_state_dict" or "model".
            Read with weights_only=True: nothing in it is executed.
        prefix: What the names begin with in the file ("model." where a LightningModule holds the network as
            self.model); found by itself when left out.
        dtype: Of the copy.
    """
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        raise InvalidInputError(
            f"checkpoint {os.fspath(path)!r}",
            measured=f"{type(error).__name__}: {first[0] if first else 'no text'}",
            threshold="tensors and plain numbers alone, as torch.load(weights_only=True) reads",
            meaning="It is damaged, or holds other objects, which would have to be executed to be read.",
            cure="Save the weights alone where you trust the file: torch.save(model.state_dict(), path).",
        ) from error
    inside = [found[key] for key in _INSIDE if isinstance(found, Mapping) and isinstance(found.get(key), Mapping)]
    state = inside[0] if inside else found
    own = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    tensors: dict[str, Tensor] = {k: t for k, t in state.items() if isinstance(t, Tensor)} if named else {}
    begins = {""} if prefix is None else {prefix}
    if prefix is None:
        begins |= {name[: -len(mine)] for name in tensors for mine in own if name.endswith(f".{mine}")}
    fitting = [b for b in sorted(begins) if _under(tensors, b) == own]
    if len(fitting) != 1:
        there = ", ".join(f"{name} {tuple(t.shape)}" for name, t in sorted(tensors.items())[:4]) or "none"
        several = f"fit under {', '.join(map(repr, fitting))}" if fitting else "do not fit"
        raise InvalidInputError(
            f"weights in {os.fspath(path)!r}",
            measured=f"{several}; there are {there}",
            threshold="one set with the names and shapes of the model",
            meaning="The file holds another model, several of them, or names that begin otherwise.",
            cure="Build the model as it was trained; name the beginning with prefix='model.'.",
        )
    copy = deepcopy(model)
    copy.load_state_dict({name: tensors[fitting[0] + name] for name in own})
    return copy.to(dtype).eval()


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors whose names begin so."""
    return {name[len(prefix) :]: tuple(t.shape) for name, t in tensors.items() if name.startswith(prefix)}
