"""What the user's losses and functions raise, or torch inside them: one error that says where, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

from dif.errors import DifError, InvalidInputError

_OURS = str(Path(__file__).parent)
_CURE = "Call it yourself on a few samples, loss(params, batch), and mend what it says."
_CURES = {  # by what torch says
    "Jitted": "Hand in the module as it was before torch.jit.script.",
    "DataParallel": "Hand in the module inside, model.module.",
    "saved tensor hooks": "Switch activation checkpointing off for the fit: torch.func cannot see through it.",
    "setup_context": "Split the custom Function into forward and setup_context and set generate_vmap_rule = True.",
    "requires_grad_": "Inside a loss use torch.func.grad, vjp or jacrev instead of torch.autograd.grad.",
    "Sparse": "Make the embedding with sparse=False.",
    "inplace": "Leave out what changes tensors in place (max_norm of an embedding, +=).",
    "more than 1 value per channel": "Give the normalisation running statistics (track_running_stats=True), or use "
    "LayerNorm: a loss may not depend on the other samples of its batch.",
    "scaled_dot_product": "Wrap it in torch.nn.attention.sdpa_kernel(SDPBackend.MATH).",
    "_embedding_bag": "Use nn.Embedding and add or average its rows yourself.",
    "erivative for": "Write that step with operators that torch can differentiate; a smooth one (sigmoid, softplus) "
    "in the place of a step or a count.",
    "expected m1 and m2 to have the same dtype": "Bring data and parameters to one dtype.",
}


class UserCodeError(InvalidInputError):
    """The user's loss or function, or torch inside it, raised."""


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """What the user's code, or torch inside it, raises: as one error.

    Lack of memory, matrices without a factor and dif's own faults pass.
    """
    try:
        yield
    except DifError:
        raise
    except Exception as error:
        if out_of_memory(error) or isinstance(error, torch.linalg.LinAlgError) or _our_fault(error):  # pyright: ignore[reportPrivateImportUsage]
            raise
        words = str(error).strip().splitlines()
        raise UserCodeError(
            what,
            measured=f"{type(error).__name__}: {words[0] if words else ''}",
            threshold="code that torch can evaluate and differentiate twice",
            meaning="It was raised by your code, or by torch inside it.",
            cure=cure_of(error),
        ) from error


def cure_of(error: Exception, otherwise: str = _CURE) -> str:
    """What to do about something that torch says."""
    return next((cure for word, cure in _CURES.items() if word in str(error)), otherwise)


def out_of_memory(error: Any) -> bool:
    """Whether an operator could not get the memory it asked for."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(w in str(error) for w in words)


def unsupported(error: Exception) -> bool:
    """Whether a transform of the user's code failed, so that a plainer one should be tried."""
    return isinstance(error, UserCodeError) or not (isinstance(error, DifError) or out_of_memory(error))


def _our_fault(error: Exception) -> bool:
    """Whether Python's own exception was raised by a line of dif."""
    return extract_tb(error.__traceback__)[-1].filename.startswith(_OURS) and not isinstance(error, RuntimeError)
