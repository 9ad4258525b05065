"""Guard passes over the data: errors of user code, memory that runs out, samples shared among processes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from traceback import extract_tb
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as processes
from torch import Tensor

from dif.errors import DifError, InvalidInputError, MemoryWarning

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
    ours = file.is_relative_to(_OURS) and not file.is_relative_to(_OURS / "examples")  # their losses are user code
    return ours and not isinstance(error, RuntimeError)


_groups: list[Any] = []  # process groups of the enclosing `sharded` blocks, innermost first


@contextmanager
def sharded(group: Any = None) -> Iterator[None]:
    """Share every pass over the samples among the processes of torch.distributed.

    All processes run the same lines on the same problem; each may read the data from its own copy or mount. Every
    process evaluates only its own part of the samples, and all processes get the same numbers. Up to rounding, results
    do not depend on the number of processes.

    Args:
        group: The process group; None means all processes.

    Raises:
        InvalidInputError: Where torch.distributed is not initialised.

    Start the script with `torchrun --nproc-per-node 8 script.py`. In the script, after
    `torch.distributed.init_process_group()`:

        with dif.sharded():
            solution = dif.fit(problem, params)
            scores = dif.DirectionalInfluence(solution).scores(test, train.remove_each())
    """
    if not (processes.is_available() and processes.is_initialized()):
        raise InvalidInputError(
            "dif.sharded() needs a process group; start the script with torchrun and call "
            "torch.distributed.init_process_group() first."
        )
    _groups.insert(0, group if group is not None else processes.group.WORLD)
    try:
        yield
    finally:
        del _groups[0]


def is_single_process() -> bool:
    """Return whether this process evaluates all samples itself."""
    return not _groups or processes.get_world_size(_groups[0]) == 1


def span(n: int) -> slice:
    """Return the range of the n samples that this process evaluates."""
    if not _groups:
        return slice(0, n)
    rank, world = processes.get_rank(_groups[0]), processes.get_world_size(_groups[0])
    return slice(rank * n // world, (rank + 1) * n // world)


def sum_over_processes(part: Tensor) -> Tensor:
    """Add up the parts of all processes; every process gets the bit-identical sum."""
    if not _groups:
        return part
    total = part.contiguous().clone()
    processes.all_reduce(total, group=_groups[0])
    return total


def gather_rows(rows: Tensor, n: int) -> Tensor:
    """Collect the rows of all processes, in the order of the samples, (n, …)."""
    if not _groups:
        return rows
    all_rows = rows.new_zeros((n, *rows.shape[1:]))
    all_rows[span(n)] = rows
    return sum_over_processes(all_rows)


def holds_in_all_processes(condition: bool, like: Tensor) -> bool:
    """Return whether a condition is true in all processes; `like` determines the device of the exchange."""
    return bool(sum_over_processes(torch.tensor(float(not condition), device=like.device)) == 0)


NUMBERS_AT_ONCE = 2**23  # numbers in memory at once while several columns go through a batch on the CPU: 64 MiB
_ACCELERATED = 2**29  # largest value of the same limit on an accelerator: 4 GiB in double precision
_HALVINGS = 24  # halvings of the batches after which running out of memory is an error; few numbers are left then
_short: list[int] = [0]  # how often batches were halved so far in this process

P = ParamSpec("P")
R = TypeVar("R")


def numbers_at_once(like: Tensor, cpu: int = NUMBERS_AT_ONCE) -> int:
    """Return how many numbers may be in memory at once on the device of `like`.

    On an accelerator this is an eighth of the unused memory, between `cpu` and `_ACCELERATED`.
    """
    if like.device.type != "cuda":
        return max(1, cpu >> _short[0])
    unused = torch.cuda.get_device_properties(like.device).total_memory - torch.cuda.memory_allocated(like.device)
    return max(1, max(cpu, min(_ACCELERATED, int(unused / (8 * like.element_size())))) >> _short[0])


def retry_with_smaller_batches(sweep: Callable[P, R]) -> Callable[P, R]:
    """Wrap a pass over the data so that it is repeated with batches of half the size where memory runs out.

    A MemoryWarning is given, and batches stay small for the rest of the process. Inside `dif.sharded()` with several
    processes the error is raised instead, because the other processes would wait forever. Other exceptions become a
    UserCodeError.
    """

    @wraps(sweep)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            try:
                return sweep(*args, **kwargs)
            except Exception as error:
                short = isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error)
                if not short or _short[0] >= _HALVINGS or not is_single_process():
                    with convert_errors("loss or function"):
                        raise
                reason = str(error).splitlines()[0].rstrip(".")
            _short[0] += 1
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            text = f"Memory ran out, so dif is going on with batches halved in size ({reason})."
            warnings.warn(text, MemoryWarning, stacklevel=2)

    return run
