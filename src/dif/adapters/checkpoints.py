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
    found: Any = torch.load(path, map_location="cpu", weights_only=True)
    state = next(
        (found[key] for key in _INSIDE if isinstance(found, Mapping) and isinstance(found.get(key), Mapping)), found
    )
    own = set(model.state_dict())
    named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    tensors: dict[str, Tensor] = {k: t for k, t in state.items() if isinstance(t, Tensor)} if named else {}
    begins = {""} if prefix is None else {prefix}
    if prefix is None:
        begins |= {name[: -len(mine)] for name in tensors for mine in own if name.endswith(f".{mine}")}
    fitting = [b for b in sorted(begins, key=len) if all(b + name in tensors for name in own)]
    if not fitting:
        missing = sorted(name for name in own if not any(b + name in tensors for b in begins))
        known = ", ".join(sorted(tensors)[:5]) or "none"
        raise InvalidInputError(
            f"weights in {os.fspath(path)!r}",
            measured=f"none for {', '.join(missing[:5]) or 'some'}; there are {known}",
            threshold="one tensor for each parameter and buffer of the model",
            meaning="The file holds another model, or names that begin otherwise.",
            cure="Build the model as it was trained; name the beginning with prefix='model.'.",
        )
    copy = deepcopy(model)
    copy.load_state_dict({name: tensors[fitting[0] + name] for name in own})
    return copy.to(dtype).eval()
