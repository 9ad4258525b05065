"""TracIn, a baseline: dot products of gradients, summed over checkpoints of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import dif
from dif.derivatives.losses import sample_gradients
from dif.derivatives.program import Targets
from dif.problem.parameters import Parameters
from dif.problem.samples import Samples
from dif.runtime.inputs import as_numbers


class TracIn:
    """Scores Σₜ ηₜ ∇φ(θₜ)·∇ℓᵢ(θₜ) over checkpoints θₜ of a training (Pruthi et al. 2020).

    Each step on sample i moved target φ by about −ηₜ ∇φ·∇ℓᵢ, so without the sample it would be higher by the sum. A set
    of samples has the sum of their scores. As in the original, a sample acts only through the gradient of its own loss:
    constraints, and later steps that would make up for its absence, do not count. The ranks of the scores mean
    something. Their size does so only if ηₜ is the learning rate times the weight of a sample, summed over the steps
    for which the checkpoint stands.

    Args:
        solution: Gives the layout of the parameters, and the point that `change` starts from.
        checkpoints: Parameters on the way: dicts of tensors or modules, as for `dif.fit`.
        rates: ηₜ, one number for all checkpoints or one for each.
    """

    name = "TracIn"

    def __init__(
        self, solution: dif.Solution, checkpoints: Sequence[Any], rates: float | Sequence[float] | Tensor = 1.0
    ) -> None:
        self.solution = solution
        listed = list(checkpoints) if isinstance(checkpoints, Sequence) else []
        if not listed:
            raise dif.InvalidInputError("`checkpoints` must be a list of params, at least one.")
        self.thetas = [_flatten(params, solution.program.parameters).to(solution.theta) for params in listed]
        self.rates = _check_rates(rates, len(self.thetas))

    @classmethod
    def of_run(cls, run: dif.Run, rates: float | Sequence[float] | Tensor = 1.0) -> TracIn:
        """Build from a training run of dif, with the end of each epoch as checkpoint."""
        points = (run.loop.step.read_point(run.states[epoch.stop])[0] for epoch in run.loop.epochs)
        parameters = run.point.program.parameters
        return cls(run.point, [parameters.tensors(theta) for theta in points], rates)

    def change(self, perturbation: dif.Perturbation) -> dif.Change:
        """Return Σₜ ηₜ ∇ℓᵢ(θₜ), summed over the removed samples, as Δθ; Δλ is 0."""
        at = self.solution
        samples, (removed,) = _read_removals(perturbation)
        moved = torch.zeros_like(at.theta)
        for rate, theta in zip(self.rates, self.thetas, strict=True):
            moved += rate * self._gradients(samples, theta, torch.tensor(removed)).sum(0)
        return dif.Change.of(at.program, moved, torch.zeros_like(at.lam), {})

    def scores(
        self,
        target: Any,
        perturbations: dif.Perturbation,
        *,
        out: Any = None,
        jobs: int = 1,
        show_progress: bool = True,
    ) -> dif.Influence:
        """Score removals, in this process and in memory; the keywords of `dif.Estimator` make no difference."""
        targets, (samples, removed) = Targets(target, self.solution), _read_removals(perturbations)
        index, rows = torch.unique(torch.tensor([i for indices in removed for i in indices]), return_inverse=True)
        values = torch.zeros(len(index), len(targets.names), dtype=torch.float64)
        for rate, theta in zip(self.rates, self.thetas, strict=True):
            found = self._gradients(samples, theta, index) @ targets.gradients(theta)
            values += rate * found.double().cpu()
        owner = torch.repeat_interleave(torch.arange(len(removed)), torch.tensor([len(part) for part in removed]))
        total = torch.zeros(len(removed), values.shape[1], dtype=torch.float64)
        return dif.Influence(total.index_add_(0, owner, values[rows]), perturbations, targets.names, self.name)

    def _gradients(self, samples: Samples, theta: Tensor, index: Tensor) -> Tensor:
        """Return the gradient of the loss of each sample of `index`, (P, d)."""
        return sample_gradients(samples, self.solution.program.parameters, theta, index)


def _flatten(params: Any, layout: Parameters) -> Tensor:
    """Return the flat θ of a checkpoint, which must have the layout of the solution."""
    own, theta = Parameters.of(params)
    if (own.names, own.shapes) != (layout.names, layout.shapes):
        raise dif.InvalidInputError("A checkpoint must have the tensors of the solution, in the same order.")
    return theta


def _check_rates(rates: Any, count: int) -> list[float]:
    """Return one rate per checkpoint."""
    given = as_numbers(rates, "rates")
    listed = given.expand(count) if given.dim() == 0 else given
    if listed.shape != (count,) or not bool((torch.isfinite(listed) & (listed > 0)).all()):
        raise dif.InvalidInputError(f"`rates` must be a positive number, or {count}, one per checkpoint.")
    return listed.tolist()


def _read_removals(perturbations: dif.Perturbation) -> tuple[Samples, list[list[int]]]:
    """Return the samples, and the numbers of those that each removal removes; refuse perturbations of other kinds."""
    factor, removal = perturbations.removal or (0.0, None)
    if removal is None or factor != 1.0 or removal.terms is not None:
        raise dif.InvalidInputError("TracIn scores complete removals only: remove, remove_each or remove_groups.")
    sizes = torch.bincount(removal.entries.owner, minlength=len(perturbations)).tolist()
    return removal.samples, [index.tolist() for index in removal.entries.index.split(sizes)]
