"""The same training on perturbed data: same start, same batches, many perturbations at once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dif.derivatives.cost import cost
from dif.derivatives.step import State
from dif.estimators.training_weights import RunPerturbation
from dif.problem.perturbation import Perturbation
from dif.problem.structure import leaves, map_tensors
from dif.runtime.memory import numbers_at_once
from dif.runtime.progress import Reporter
from dif.solving.run import Run

_VECTORS = 3  # of the size of the state that a step needs for each perturbation
_LAYERS = 64  # of the size of the batch that a step of the user's is assumed to need, since it cannot be measured


def rerun(
    run: Run, perturbations: Perturbation, since: int = 0, report: Reporter = lambda done, text="": None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield θ, (P, d), and λ, (P, m), at the end of the perturbed runs, chunk by chunk.

    Args:
        run: The run whose start and batches are used.
        perturbations: What is carried out.
        since: First step at which it is carried out; the steps before are those of the run.
        report: Called with the number of perturbed runs done, in parts of runs.
    """
    change, size = RunPerturbation(run.loop, perturbations, since), runs_at_once(run)
    for begin in range(0, len(perturbations), size):
        end = min(begin + size, len(perturbations))
        state = map_tensors(run.states[change.since], lambda t, P=end - begin: t.expand(P, *t.shape))
        for t, reached in _advance_all(run, change, begin, end):
            state = reached
            report(begin + (end - begin) * t / run.loop.length)
        yield run.loop.step.read_point(state)


def _advance_all(run: Run, change: RunPerturbation, begin: int, end: int) -> Iterator[tuple[int, State]]:
    """Carry out perturbations begin … end − 1 together; yield the states after every step."""
    loop, P = run.loop, end - begin
    state = map_tensors(run.states[change.since], lambda t: t.expand(P, *t.shape))
    for t in range(change.since, loop.length):
        batch = change.batch(t)
        weights = change.weights(t, batch, begin, end)
        state = loop.step.advance_many(t, state, batch, weights)
        yield t + 1, state


def runs_at_once(run: Run) -> int:
    """Return how many perturbed runs fit into memory together."""
    program, theta, batch = run.loop.program, run.theta, run.loop.batch(0)
    numbers = _VECTORS * sum(x.numel() for x in leaves(run.loop.initial))
    for part in batch:
        if run.loop.step.problem is None:
            numbers += _LAYERS * sum(x.numel() for x in leaves(part.data))
        else:
            each = cost(part.samples, program.parameters, theta)
            numbers += len(part.index) * (each.inputs + 2 * each.elements)
    return max(1, 4 * numbers_at_once(theta) // numbers)
