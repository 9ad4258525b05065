"""Influence through training: derivatives of a run of constrained training in the weights of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.errors import DegenerateError, InvalidInputError
from dif.estimators.protocol import Out, Scored, differences, fill_scores
from dif.problem.data import map_tensors
from dif.problem.perturbation import Perturbation
from dif.results.change import Change
from dif.results.influence import Influence
from dif.runtime.inputs import as_index, check_instance
from dif.runtime.work import check_jobs
from dif.training.adjoint import rerun, sweep_back
from dif.training.run import Run
from dif.training.weights import RunPerturbation

_UNRELATED = 0.5  # cosine of predicted and actual changes at or below which they have nothing to do with each other


class UnrolledInfluence:
    """Predicts what the same training would have done on perturbed data, by differentiating through its steps.

    For models that never reach a solution: fine-tuned networks, early stopping. One sweep backwards over the run gives
    the derivative of every target in the weights of all samples; it costs about as much as three trainings for one
    target.

    Args:
        run: A finished run, `dif.Training(...).run()`.
        since: The step at which perturbations take effect; those before it stay as they were.
        strict: Raise where the predictions have nothing to do with the perturbations that are carried out to check
            them; False records it.
    """

    name = "unrolled"

    def __init__(self, run: Run, *, since: int = 0, strict: bool = True) -> None:
        check_instance(run, Run, "run", cure="pass dif.Training(...).run()")
        number = as_index(since)
        if number is None or not 0 <= number <= run.loop.length:
            raise InvalidInputError(f"`since` must be an integer from 0 to {run.loop.length} (the end), not {since!r}.")
        self.run, self.since, self.strict = run, number, strict

    def change(self, perturbation: Perturbation) -> Change:
        """Predict Δθ and Δλ at the end of the run, by one sweep forwards."""
        loop = self.run.loop
        Direction.resolve_single(loop.program, perturbation)  # refuses several
        change, tangent = self._resolve(perturbation), map_tensors(loop.initial, torch.zeros_like)
        for t in range(self.since, loop.length):
            batch = change.batch(t)
            tangent = loop.step.push_forward(t, self.run.states[t], batch, tangent, change.moves(t, batch))
        dtheta, dlam = loop.step.read_point(tangent)
        return Change.of(loop.program, _check_finite(dtheta, self.strict), dlam, {"since": self.since})

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1, show_progress: bool = True,
        probe: int = 4,
    ) -> Influence:  # fmt: skip
        """Predict the change of each target under each perturbation. Keywords as in `dif.Estimator`.

        The derivative through a chaotic run means nothing, so `probe` of the perturbations, half of them the strongest
        and half random, are carried out and compared with their predictions: `diagnostics["probe"]`. 0 skips this.
        """
        check_jobs(jobs)
        count = as_index(probe)
        if count is None or count < 0:
            raise InvalidInputError(f"`probe` must be an integer ≥ 0, not {probe!r}.")
        targets = Targets(target, self.run.point)

        def score(begin: int) -> Iterator[Scored]:
            sweep = sweep_back(self.run, self._resolve(perturbations), targets, show_progress)
            values = _check_finite(sweep.effects.sum(2).double().cpu(), self.strict)
            about: dict[str, Any] = {"adjoint_growth": sweep.growth, "multipliers_at_zero": sweep.zeros}
            if count:
                about["probe"] = self._probe(count, targets, perturbations, values)
            yield values, about

        direction = Direction(self.run.point.program, perturbations)
        about = {"since": self.since}
        influence = fill_scores(self, self.run.point, targets, direction, score, about, out=out, show_progress=False)
        return replace(influence, origin=None)  # the end of a run solves nothing

    def by_term(self, target: Any, perturbations: Perturbation, *, show_progress: bool = True) -> Influence:
        """Return through which row each perturbation acts on one target: the objective and each constraint."""
        _ = self.run.problem  # refuses a step of the user's own, which has no terms
        targets = Targets(target, self.run.point)
        targets.check_single("by_term")
        effects = sweep_back(self.run, self._resolve(perturbations), targets, show_progress).effects
        names = ("objective", *self.run.point.program.names)
        title = f"{self.name}, by term, on {targets.names[0]}"
        values = _check_finite(effects[:, 0].double().cpu(), self.strict)
        return Influence(values, perturbations, names, title, {"since": self.since})

    def _resolve(self, perturbations: Perturbation) -> RunPerturbation:
        return RunPerturbation(self.run.loop, perturbations, self.since)

    def _probe(self, count: int, targets: Targets, perturbations: Perturbation, values: Tensor) -> dict[str, Any]:
        """Carry out some of the perturbations and compare them with their predictions."""
        strength = (values.abs() / values.abs().max(0).values.clamp(min=torch.finfo(values.dtype).tiny)).sum(1)
        order = strength.nan_to_num(posinf=0.0).argsort(descending=True)
        strongest, others = order[: -(-count // 2)], order[-(-count // 2) :]
        random = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[: count // 2]]
        rows = torch.cat([strongest, random]).tolist()
        ends = torch.cat([theta for theta, _ in rerun(self.run, perturbations.pick(rows), self.since)])
        actual, predicted = differences(self.run.point, targets, ends - self.run.theta), values[rows]
        scale = torch.maximum(actual.abs(), predicted.abs()).max(0).values.clamp(min=torch.finfo(values.dtype).tiny)
        a, p = (actual / scale).reshape(-1), (predicted / scale).reshape(-1)
        same = not bool(a.any()) and not bool(p.any())  # nothing changes, as predicted
        agreement = 1.0 if same else float(a @ p / (a.norm() * p.norm()).clamp(min=torch.finfo(a.dtype).tiny))
        error = float((a - p).norm() / a.norm().clamp(min=torch.finfo(a.dtype).tiny))
        found = {
            "perturbations": [perturbations[row].labels[0] for row in rows],
            "predicted": predicted.tolist(),
            "actual": actual.tolist(),
            "relative_error": error,
            "agreement": agreement,
        }
        if self.strict and not agreement > _UNRELATED:
            pairs = ", ".join(f"{x:.3g} ({y:.3g})" for x, y in zip(predicted[:, 0], actual[:, 0], strict=True))
            raise DegenerateError(
                f"Carried out, {len(rows)} of the perturbations agree with their predictions by {agreement:.2g}: "
                f"predicted (actual) for {targets.names[0]} {pairs}.",
                f"The cosine of predictions and actual changes must be above {_UNRELATED:g}.",
                "The training is chaotic or not smooth at this scale, so its derivative predicts nothing. Nor does "
                "that of a sample which is alone in its batch or group.",
                "Use smaller steps, larger batches, a warm start (pretrained by SGD with steps as large as these), "
                "eps_root for Adam, smooth activations, or since= for the last part; strict=False records it.",
            )
        return found


def _check_finite(values: Tensor, strict: bool) -> Tensor:
    """Return the scores; with `strict`, refuse NaN and infinite ones."""
    if strict and not bool(torch.isfinite(values).all()):
        raise DegenerateError(
            f"{int((~torch.isfinite(values)).sum())} of {values.numel()} scores are NaN or infinite.",
            "The derivative of every step must be finite.",
            "A step has no derivative somewhere, such as the root of an average square of 0 in Adam without eps_root.",
            "Pass eps_root=1e-8 to dif.Adam or dif.AdamW, avoid functions with infinite slopes, or use strict=False.",
        )
    return values
