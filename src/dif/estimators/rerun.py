"""The same training on perturbed data: same start, same batches, many perturbations at once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dif.estimators.training_weights import RunPerturbation
from dif.evaluation.cost import cost
from dif.evaluation.training_step import State
from dif.problem.perturbation import Perturbation
from dif.problem.structure import mapped
from dif.runtime.memory import numbers_at_once
from dif.runtime.progress import Reporter
from dif.solving.training import Run

_VECTORS = 8  # of the length of θ that a step needs for each perturbation


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
        state = run.states[change.since]
        for t, reached in _advance_all(run, change, begin, end):
            state = reached
            report(begin + (end - begin) * t / run.loop.length)
        yield state["theta"], state["lam"]


def _advance_all(run: Run, change: RunPerturbation, begin: int, end: int) -> Iterator[tuple[int, State]]:
    """Carry out perturbations begin … end − 1 together; yield the states after every step."""
    loop, P = run.loop, end - begin
    state = mapped(run.states[change.since], lambda t: t.expand(P, *t.shape))
    for t in range(change.since, loop.length):
        batch = change.batch(t)
        weights = change.weights(t, batch, begin, end)
        state = loop.step.advance_many(state, batch, loop.factors[t], t, weights)
        yield t + 1, state


def runs_at_once(run: Run) -> int:
    """Return how many perturbed runs fit into memory together."""
    program, theta = run.loop.step.program, run.loop.initial["theta"]
    numbers = _VECTORS * theta.numel()
    for table, index in zip(program.rows.tables, run.loop.indices[0], strict=True):
        each = cost(table.samples, program.parameters, theta)
        numbers += len(index) * (each.inputs + 2 * each.elements)
    return max(1, 4 * numbers_at_once(theta) // numbers)
