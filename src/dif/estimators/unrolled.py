"""Influence through training: derivatives of a run of constrained training in the weights of its samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dif.estimators.influence import Change, Influence
from dif.estimators.scoring import Out, ScoredChunk, Scoring
from dif.estimators.training_weights import Record, RunPerturbation, single
from dif.evaluation.training_step import Weights
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.runtime.progress import progress
from dif.runtime.workers import check_jobs
from dif.solving.training import Run


class UnrolledInfluence:
    """Predicts what the same training would have done on perturbed data, by differentiating through its steps.

    For models that never reach a solution: fine-tuned networks, early stopping. One sweep backwards over the run gives
    the derivative of every target in the weights of all samples; it costs about as much as three trainings for one
    target.

    Args:
        run: A finished run, `dif.Training(...).run()`.
        since: The step at which perturbations take effect; those before it stay as they were.
    """

    name = "unrolled"

    def __init__(self, run: Run, *, since: int = 0) -> None:
        self.run, self.since = run, since

    def change(self, perturbation: Perturbation) -> Change:
        """Predict Δθ and Δλ at the end of the run, by one sweep forwards."""
        loop, change = self.run.loop, single(self.run.loop, perturbation, self.since)
        tangent = _zeros_like(loop.initial)
        for t in range(loop.length):
            batch = change.batch(t)
            weights, default = change.weights(t, batch, 0, 1), loop.step.default_weights(batch)
            dweights = Weights(
                tuple(x[0] - y for x, y in zip(weights.a, default.a, strict=True)),
                tuple(x[0] - y for x, y in zip(weights.b, default.b, strict=True)),
                weights.dtau[0],
            )
            tangent = loop.step.push_forward(self.run.states[t], batch, loop.factors[t], t, tangent, dweights)
        return Change.of(loop.step.program, tangent["theta"], tangent["lam"], {"since": self.since})

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1, show_progress: bool = True
    ) -> Influence:
        """Predict the change of each target under each perturbation. Keywords as in `dif.Estimator`."""
        check_jobs(jobs)
        targets = Targets(target, self.run.end)
        record, growth = self._sweep(targets, perturbations, show_progress)
        values = record.by_row().sum(2).double().cpu()
        scoring = Scoring(self.name, self.run.end, targets, perturbations, {"since": self.since}, out, False)

        def finish(influence: Influence) -> None:
            influence.diagnostics["adjoint_growth"] = growth

        return scoring.run(lambda begin: iter([ScoredChunk(values[begin:], {})]), len(values), finish)

    def by_term(self, target: Any, perturbations: Perturbation, *, show_progress: bool = True) -> Influence:
        """Return through which row each perturbation acts on one target: the objective and each constraint."""
        targets = Targets(target, self.run.end)
        record, _ = self._sweep(targets, perturbations, show_progress)
        names = ("objective", *self.run.end.program.names)
        title = f"{self.name}, by term, on {targets.names[0]}"
        return Influence(record.by_row()[:, 0].double().cpu(), perturbations, names, title, {"since": self.since})

    def _sweep(self, targets: Targets, perturbations: Perturbation, show_progress: bool) -> tuple[Record, float]:
        """Go back over the run; return the derivatives in all weights, and the growth of the adjoint."""
        loop, end = self.run.loop, self.run.end
        change = RunPerturbation(loop, perturbations, self.since)
        Q = targets.gradients(end.theta).T  # (T, d)
        T, record = len(Q), Record(change, len(Q))
        adjoint = {
            "theta": Q,
            "lam": end.lam.new_zeros((T, len(end.lam))),
            "memory": tuple(Q.new_zeros((T, len(m))) for m in loop.initial["memory"]),
        }
        first, largest = float(Q.norm()), 0.0
        with progress(self.name, loop.length - self.since, show_progress) as report:
            for t, before, after in self.run.states.backwards():
                if t < self.since:
                    break
                batch = change.batch(t)
                adjoint, gradients = loop.step.pull_back(before, after, batch, loop.factors[t], t, adjoint)
                record.add(t, batch, gradients)
                largest = max(largest, float(adjoint["theta"].norm()))
                report(loop.length - t)
        return record, largest / first if first else 0.0


def _zeros_like(state: Any) -> Any:
    if isinstance(state, Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: _zeros_like(value) for key, value in state.items()}
    return tuple(_zeros_like(value) for value in state)
