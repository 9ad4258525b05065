"""Turn what a user's loss or function raises into one error that says where it was raised and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

from dif.errors import DifError, InvalidInputError

_OURS = Path(__file__).parents[1]  # folder of dif: its own exceptions are not blamed on the user
_CURE = "Call it yourself on a few samples and fix the error."  # if torch's message is not known
_CURES = {  # what to do, by a phrase in torch's message
    "Jitted": "Pass the module as it was before torch.jit.script.",
    "DataParallel": "Pass the wrapped module, model.module.",
    "saved tensor hooks": "Switch activation checkpointing off for the fit; torch.func does not support it.",
    "setup_context": "Split the custom Function into forward and setup_context and set generate_vmap_rule = True.",
    "requires_grad_": "Inside a loss use torch.func.grad, vjp or jacrev instead of torch.autograd.grad.",
    "Sparse": "Create the embedding with sparse=False.",
    "inplace": "Avoid operations that change tensors in place (max_norm of an embedding, +=).",
    "more than 1 value per channel": "Give the normalisation running statistics (track_running_stats=True), or use "
    "LayerNorm: a loss may not depend on the other samples of its batch.",
    "scaled_dot_product": "Wrap it in torch.nn.attention.sdpa_kernel(SDPBackend.MATH).",
    "_embedding_bag": "Use nn.Embedding and sum or average its rows yourself.",
    "erivative for": "Use operators that torch can differentiate, with a smooth function (sigmoid, softplus) in place "
    "of a step or a count.",
    "output type Long": "Convert whole numbers, such as labels, to floating point: y.double() in the loss, or "
    "y.astype(float) in the data.",
    "expected m1 and m2 to have the same dtype": "Convert data and parameters to one dtype.",
}


class UserCodeError(InvalidInputError):
    """An exception raised by the user's loss or function, or by torch inside it."""


@contextmanager
def convert_errors(what: str) -> Iterator[None]:
    """Raise a UserCodeError for any exception of the user's code, or of torch inside it.

    Errors of dif, lack of memory, failed matrix factorisations and dif's own faults are raised unchanged.

    Args:
        what: The user's function, such as "loss of Samples 'train'".
    """
    try:
        yield
    except DifError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, torch.linalg.LinAlgError) or _is_our_fault(error):  # pyright: ignore[reportPrivateImportUsage]
            raise
        lines = str(error).strip().splitlines() or [""]
        raise UserCodeError(
            f"The {what} raised {type(error).__name__}: {lines[0].rstrip('.')}.",
            "It must be code that torch can evaluate and differentiate twice.",
            "The exception was raised by your code, or by torch inside it.",
            find_cure(error),
        ) from error


def find_cure(error: Exception, otherwise: str = _CURE) -> str:
    """Return what to do about an exception of torch, or `otherwise` if its message is not known."""
    return next((cure for phrase, cure in _CURES.items() if phrase in str(error)), otherwise)


def is_out_of_memory(error: Any) -> bool:
    """Return whether an exception says that memory could not be allocated."""
    phrases = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(phrase in str(error) for phrase in phrases)


def is_unsupported(error: Exception) -> bool:
    """Return whether a transform of the user's code failed, so that a simpler one should be tried."""
    return isinstance(error, UserCodeError) or not (isinstance(error, DifError) or is_out_of_memory(error))


def _is_our_fault(error: Exception) -> bool:
    """Return whether an exception other than a RuntimeError was raised by a line of dif."""
    file = Path(extract_tb(error.__traceback__)[-1].filename)
    examples = (_OURS / "examples", _OURS / "studies")  # their losses are user code
    ours = file.is_relative_to(_OURS) and not any(file.is_relative_to(folder) for folder in examples)
    return ours and not isinstance(error, RuntimeError)
