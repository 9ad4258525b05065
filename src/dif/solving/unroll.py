"""Training by a step of one's own, recorded so that its derivatives can be taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dif.derivatives.program import Program
from dif.derivatives.user_step import (
    UserStep,
    check_derivative,
    check_repeats,
    check_step,
    describe_state,
    flatten_params,
    select_params,
)
from dif.errors import InvalidInputError
from dif.problem.parameters import BoundModule, Parameters
from dif.problem.problem import Problem
from dif.problem.samples import Samples
from dif.problem.structure import leaves, map_tensors
from dif.problem.term import Term
from dif.runtime.inputs import as_tensor, check_list
from dif.solving.run import Keep, Loop, Run, carry_out


def unroll(
    step: Callable[[Any, Any, Any], Any], start: Mapping[str, Any], batches: Iterable[Any], *,
    samples: Samples | Sequence[Samples] | None = None, keep: Keep = None, show_progress: bool = True,
) -> Run:  # fmt: skip
    """Carry out a training whose steps you have written, for `UnrolledInfluence` and `Retraining`.

    Args:
        step: `step(state, batch, weights)` returns the next state. It is written with torch operations, multiplies the
            loss of each sample by its weight, (B,), which is 1 for all of them in the run itself. Alternating updates,
            extragradient, an augmented Lagrangian, or an optimiser of your own can be written like this.
        start: The state before the first step: a dict of tensors, also nested, with the parameters, multipliers, and
            whatever the optimiser remembers. Targets depend on `state["params"]` if that is a dict of tensors, and
            otherwise on all tensors of the state. Of an `nn.Module` as "params" the step gets the named tensors, for
            `torch.func.functional_call(model, state["params"], x)`, and targets get what is called like the module.
        batches: For each step the numbers of its samples; the step gets them as `batch`.
        samples: The samples that are numbered: the step then gets their data as `batch`, and new samples can be added.
            With several Samples a batch is a tuple of numbers, one for each, and so are the data and the weights.
            Without it, `run.samples[0]` makes the perturbations.
        keep: As in `Training.run`.
        show_progress: Show progress on a terminal.

    >>> y = torch.tensor([1.0, 2.0, 6.0])
    >>> def step(state, batch, weights):
    ...     slope = (weights * (state["mean"] - y[batch])).sum() / weights.sum()
    ...     return {"mean": state["mean"] - 0.5 * slope}
    >>> run = unroll(step, {"mean": torch.zeros(())}, [[0, 1, 2]] * 20, show_progress=False)
    >>> run.state["mean"]
    tensor(3.0000)
    """
    _check_step_function(step)
    parameters, state = _check_start(start)
    per_step = _check_batches(batches)
    several = samples is not None and not isinstance(samples, Samples)
    split = [tuple(batch) if several else (batch,) for batch in per_step]
    if samples is None:
        filled = [x for x in (as_tensor(batch, "a batch") for batch in per_step) if x.numel()]
        largest = max((int(x.max()) for x in filled), default=0)
        named = [Samples(_Unstated(step), torch.arange(largest + 1))]
    else:
        named = [s.view(_Unstated(step), name=s.name) for s in ([samples] if isinstance(samples, Samples) else samples)]
    indices = tuple(_check_numbers(t, batch, named) for t, batch in enumerate(split))
    total = sum((s.sum() for s in named), Term())
    step_of_user = UserStep(step, Program.compile(Problem(total), parameters, flatten_params(state, parameters)))
    loop = Loop(step_of_user, indices, (range(len(indices)),), state)
    with torch.random.fork_rng([x.device for x in leaves(state) if x.is_cuda][:1]):
        check_step(step_of_user, state, loop.batch(0))
    run = carry_out(loop, keep, {}, show_progress)
    late = loop.length - 1
    with torch.random.fork_rng([x.device for x in leaves(state) if x.is_cuda][:1]):
        check_repeats(step_of_user, run.states[late], loop.batch(late))
        check_derivative(step_of_user, late, run.states[late], loop.batch(late))  # multipliers are at work by now
    return run


@dataclass(frozen=True)
class _Unstated:
    """Stands in for the loss of samples that only a step evaluates, so that perturbations of them can be resolved."""

    step: Callable[[Any, Any, Any], Any]

    def __call__(self, params: Any, batch: Any) -> Tensor:
        """Return zeros."""
        first = next(iter(params.values()))
        return (0 * first.sum()).expand(len(leaves(batch)[0]))


def _check_step_function(step: Any) -> None:
    """Refuse what cannot be called with a state, a batch and weights."""
    try:
        inspect.signature(step).bind(None, None, None)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"`step` cannot be called with three arguments ({error}).",
            "It must be a function step(state, batch, weights).",
            "It is called for every batch, with the weights of its samples.",
            "Write def step(state, batch, weights): … return the next state.",
        ) from error


def _check_start(start: Any) -> tuple[Parameters, dict[str, Any]]:
    """Return the layout of the params and the start as tensors that do not change; refuse what has no derivative."""
    model = start.get("params") if isinstance(start, Mapping) else None
    parameters = None
    if isinstance(model, nn.Module | BoundModule):
        parameters, theta = Parameters.of(model)
        start = {**start, "params": parameters.tensors(theta)}
    found = describe_state(start) if isinstance(start, Mapping) else {"": f"an object of type {type(start).__name__}"}
    wrong = {name: text for name, text in found.items() if text.startswith(("float16", "bfloat16", "an object"))}
    kinds = {x.dtype for x in leaves(start) if x.is_floating_point()} if not wrong else set()
    if wrong or len(kinds) != 1:
        name, text = next(iter(wrong.items())) if wrong else ("", f"tensors of types {sorted(map(str, kinds))}")
        raise InvalidInputError(
            f"The start{name} is {text}." if wrong else f"The start has {text}.",
            "It must be a dict of tensors, also nested, those with fractions all float64 or all float32.",
            "Derivatives through many steps need the digits of float32 at least, and names for the params.",
            'Pass {"theta": tensor, "lam": tensor}, say, converted by .double() or .float().',
        )
    state = map_tensors(dict(start), lambda x: x.detach().clone())
    if parameters is None:
        tensors = {k: x for k, x in select_params(state).items() if isinstance(x, Tensor) and x.is_floating_point()}
        parameters, _ = Parameters.of(tensors)
    return parameters, state


def _check_batches(batches: Any) -> list[Any]:
    """Return the batches as a list, so that every run uses the same."""
    return check_list(
        batches,
        "batches",
        allowed="It must list the numbers of the samples of each step, for at least one step.",
        meaning="A run without steps has nothing to differentiate.",
        cure="Pass [[0, 1, 2], [3, 4, 5]], say, or torch.randperm(n).split(batch_size).",
    )


def _check_numbers(t: int, batch: Sequence[Any], named: Sequence[Samples]) -> tuple[Tensor, ...]:
    """Return the numbers of the samples of step t."""
    found = [as_tensor(numbers, f"batch {t}") for numbers in batch]
    whole = len(found) == len(named) and all(
        x.dtype in (torch.int32, torch.int64) and x.dim() == 1 and len(x) for x in found
    )
    if not whole or any(int(x.min()) < 0 or int(x.max()) >= len(s) for x, s in zip(found, named, strict=True)):
        described = " and ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in found)
        span = f", from {min(int(x.min()) for x in found)} to {max(int(x.max()) for x in found)}" if whole else ""
        raise InvalidInputError(
            f"Batch {t} is {described}{span}.",
            f"It must list numbers of samples, from 0 to {' and '.join(str(len(s) - 1) for s in named)}.",
            "The numbers say which samples take part in a step, so that they can be removed.",
            "Pass the numbers, not the data; with several Samples, a tuple with the numbers of each.",
        )
    return tuple(x.long().cpu() for x in found)
