"""Trained weights from checkpoint files, as Lightning and plain training loops write them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from dif import InvalidInputError

_STATE_KEYS = ("state_dict", "model_state_dict", "model")  # keys under which checkpoints store the weights
_SHOWN = 4  # tensors of the file that an error lists


def restored(
    model: nn.Module, path: str | os.PathLike[str], *, prefix: str | None = None, dtype: torch.dtype = torch.float64
) -> nn.Module:
    """Return a copy of the model with the weights of a file, in evaluation mode and in double precision.

    Args:
        model: A model with the trained architecture; it is not changed.
        path: A state dict, or a checkpoint with one under "state_dict" (Lightning), "model_state_dict" or "model".
            It is read with weights_only=True, so no code in it is executed.
        prefix: Prefix of the names in the file, for example "model." if a LightningModule stores the network as
            self.model. None: found automatically.
        dtype: Precision of the copy.

    Raises:
        InvalidInputError: The file cannot be read, or its weights do not fit the model.
    """
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    tensors = _load_tensors(path)
    prefixes = {""} if prefix is None else {prefix}
    if prefix is None:
        prefixes |= {name[: -len(own)] for name in tensors for own in shapes if name.endswith(f".{own}")}
    fitting = [start for start in sorted(prefixes) if _shapes_under(tensors, start) == shapes]
    if len(fitting) != 1:
        listed = ", ".join(f"{name} {tuple(t.shape)}" for name, t in sorted(tensors.items())[:_SHOWN]) or "no tensors"
        how = f"fit under the prefixes {', '.join(map(repr, fitting))}" if fitting else "do not fit the model"
        raise InvalidInputError(
            f"The weights in {os.fspath(path)!r} {how}; there are {listed}. Build the model as it was trained, or pass "
            "the prefix of its names, for example prefix='model.'."
        )
    copy = deepcopy(model)
    copy.load_state_dict({name: tensors[fitting[0] + name] for name in shapes})
    return copy.to(dtype).eval()


def _load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Load the named tensors of a state dict, or of the state dict inside a checkpoint."""
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        reason = " ".join(str(error).strip().splitlines()[:1]).rstrip(".") or "no further details"
        raise InvalidInputError(
            f"The checkpoint {os.fspath(path)!r} cannot be read ({type(error).__name__}: {reason}); if you trust it, "
            "load it yourself and save only the weights: torch.save(model.state_dict(), path)."
        ) from error
    inner = [
        content[key] for key in _STATE_KEYS if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)
    ]
    state = inner[0] if inner else content
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        return {}
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _shapes_under(tensors: dict[str, Tensor], prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors whose names start with the prefix, by the rest of the name."""
    return {name[len(prefix) :]: tuple(t.shape) for name, t in tensors.items() if name.startswith(prefix)}
