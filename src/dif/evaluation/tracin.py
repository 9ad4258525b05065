"""TracIn, a baseline: dot products of gradients, summed over checkpoints of a training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.fingerprint import encode_tensor, hash_all
from dif.derivatives.sweeps import sample_gradients, sample_slopes
from dif.derivatives.weight_change import Direction
from dif.errors import InvalidInputError, few
from dif.estimators.change import Change
from dif.estimators.first_order import describe_residuals
from dif.estimators.influence import Influence
from dif.estimators.scoring import Out, ScoredChunk, Scoring
from dif.evaluation.methods import read_removals
from dif.optimality.solution import Solution, expect_solution
from dif.optimality.targets import Targets
from dif.problem.parameters import Parameters
from dif.problem.perturbation import Perturbation
from dif.runtime.inputs import as_numbers, check_instance, check_list
from dif.solving.run import Run

_CHUNK = 2**14  # removals scored at once


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
        self, solution: Solution, checkpoints: Sequence[Any], rates: float | Sequence[float] | Tensor = 1.0
    ) -> None:
        self.solution = expect_solution(solution)
        listed = check_list(
            checkpoints,
            "checkpoints",
            allowed="It must be a list of params, at least one.",
            meaning="TracIn sums over the checkpoints of a training.",
            cure="Pass copies of the params from several moments of the training.",
        )
        self.thetas = [_flatten(params, solution.program.parameters).to(solution.theta) for params in listed]
        self.rates = _check_rates(rates, len(self.thetas))
        digest = hash_all(map(encode_tensor, self.thetas)).hex()
        self._diagnostics = {"kkt": describe_residuals(solution), "rates": self.rates, "checkpoints": digest}

    @classmethod
    def of_run(cls, run: Run, rates: float | Sequence[float] | Tensor = 1.0) -> TracIn:
        """Build from a training run of dif, with the end of each epoch as checkpoint."""
        known = check_instance(
            run,
            Run,
            "run",
            meaning="Its epochs are the checkpoints.",
            cure="Pass dif.Training(...).run(), or checkpoints of your own to dif.evaluation.TracIn.",
        )
        points = (known.loop.step.read_point(known.states[epoch.stop])[0] for epoch in known.loop.epochs)
        parameters = known.point.program.parameters
        return cls(known.point, [parameters.tensors(theta) for theta in points], rates)

    def change(self, perturbation: Perturbation) -> Change:
        """Return Σₜ ηₜ ∇ℓᵢ(θₜ), summed over the removed samples, as Δθ; Δλ is 0."""
        at = self.solution
        Direction.resolve_single(at.program, perturbation)
        samples, (removed,) = read_removals(perturbation)
        gradients = (
            rate * sample_gradients(samples, at.program.parameters, theta, torch.tensor(removed)).sum(0)
            for rate, theta in zip(self.rates, self.thetas, strict=True)
        )
        moved = sum(gradients, torch.zeros_like(at.theta))
        return Change.of(at.program, moved, torch.zeros_like(at.lam), dict(self._diagnostics))

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1, show_progress: bool = True
    ) -> Influence:
        """Score removals. Keywords as in `dif.Estimator`."""
        targets = Targets(target, self.solution)
        scoring = Scoring(self.name, self.solution, targets, perturbations, self._diagnostics, out, show_progress)
        scoring.check()
        slopes = [targets.gradients(theta) for theta in self.thetas]
        return scoring.run_chunks(partial(self._score, slopes), _CHUNK, jobs)

    def _score(self, slopes: list[Tensor], chunk: Perturbation) -> ScoredChunk:
        """Sum over checkpoints and over the samples of each removal; `slopes` are the gradients of the targets."""
        samples, removed = read_removals(chunk)
        index, rows = torch.unique(torch.tensor([i for indices in removed for i in indices]), return_inverse=True)
        values = torch.zeros(len(index), slopes[0].shape[1], dtype=torch.float64)
        for rate, theta, Q in zip(self.rates, self.thetas, slopes, strict=True):
            found = sample_slopes(samples, self.solution.program.parameters, theta, Q, index)[1]
            values += rate * found.double().cpu()
        owner = torch.repeat_interleave(torch.arange(len(removed)), torch.tensor([len(part) for part in removed]))
        total = torch.zeros(len(removed), values.shape[1], dtype=torch.float64)
        return ScoredChunk(total.index_add_(0, owner, values[rows]), {})


def _flatten(params: Any, layout: Parameters) -> Tensor:
    """Return the flat θ of a checkpoint, which must have the layout of the solution."""
    own, theta = Parameters.of(params)
    if (own.names, own.shapes) != (layout.names, layout.shapes):
        found, wanted = (
            few([f"{name} {tuple(shape)}" for name, shape in zip(each.names, each.shapes, strict=True)])
            for each in (own, layout)
        )
        raise InvalidInputError(
            f"A checkpoint has the tensors {found}.",
            f"It must have those of the solution: {wanted}.",
            "Gradients at a checkpoint are those of the same model.",
            "Pass the params of the same model, with the same names in the same order.",
        )
    return theta


def _check_rates(rates: Any, count: int) -> list[float]:
    """Return one rate per checkpoint."""
    given = as_numbers(rates, "rates")
    listed = given.expand(count) if given.dim() == 0 else given
    if listed.shape != (count,) or not bool((torch.isfinite(listed) & (listed > 0)).all()):
        raise InvalidInputError(
            f"`rates` is {rates!r}.",
            f"It must be a positive number, or {count}, one per checkpoint.",
            "Each checkpoint counts with its learning rate.",
            "Pass the learning rate, or leave it out if it was the same at all checkpoints.",
        )
    return listed.tolist()
