"""Influence through training: what perturbations change in the steps of a run, carried on to its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.errors import DegenerateError, FirstOrderWarning, InvalidInputError, warn
from dif.estimators.assessment import ErrorEstimate, warn_assessed
from dif.estimators.protocol import Out, Scored, differences, fill_scores, resolve
from dif.optimality.solution import Solution
from dif.problem.data import map_tensors
from dif.problem.perturbation import Perturbation
from dif.results.change import Change
from dif.results.influence import Influence
from dif.runtime.inputs import as_index, check_instance
from dif.runtime.work import check_jobs
from dif.training.adjoint import rerun, sweep_back
from dif.training.run import Run
from dif.training.weights import RunPerturbation

_PROBED = 12  # perturbations that are carried out by default
_FEW = 2  # members of a group in a batch, on average, below which its predictions are said beforehand to be rough
_UNRELATED = 0.5  # cosine of predicted and actual changes at or below which they have nothing to do with each other
_ROUNDING = 32  # changes of a target below this many eps · |target| may be rounding
_CURE = (
    "Use dif.Retraining(run), which carries the perturbations out. Larger batches, smaller steps, smooth activations "
    "and since= for the last steps make predictions more accurate."
)


class UnrolledInfluence:
    """Predicts what the same training would have done on perturbed data, by differentiating through its steps.

    For models that never reach a solution: fine-tuned networks, early stopping. Each step changes by its difference
    with and without the samples; what follows from that in later steps is carried on to first order. One sweep
    backwards over the run does this for all perturbations; it costs about as much as three trainings for one target.

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
        change = RunPerturbation(loop, Direction.resolve_single(loop.program, perturbation), self.since)
        tangent = map_tensors(loop.initial, torch.zeros_like)
        for t in range(self.since, loop.length):
            batch = change.batch(t)
            tangent = loop.step.push_forward(t, self.run.states[t], batch, tangent, change.moves(t, batch))
        dtheta, dlam = loop.step.read_point(tangent)
        return Change.of(loop.program, _check_finite(dtheta, self.strict), dlam, {"since": self.since})

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1, show_progress: bool = True,
        probe: int = _PROBED,
    ) -> Influence:  # fmt: skip
        """Predict the change of each target under each perturbation. Keywords as in `dif.Estimator`.

        Some of the perturbations are carried out to see how far the predictions can be trusted: `Influence.trusted`,
        `expected_error`, and `diagnostics["probe"]`. A FirstOrderWarning is given where they cannot be.

        Args:
            target: A Term, a list of Terms, a dict of Terms by name, or Samples (one target per sample).
            perturbations: One or many.
            out: File for the scores, ending in .npy.
            jobs: Without effect; all are scored together.
            show_progress: Show a progress bar on a terminal or in a notebook.
            probe: How many perturbations are carried out: a third of them the strongest, the others random, among
                them some that change each constrained group. Each is one more training, many at once. 0 skips this.
        """
        check_jobs(jobs)
        count = as_index(probe)
        if count is None or count < 0:
            raise InvalidInputError(f"`probe` must be an integer ≥ 0, not {probe!r}.")
        targets, (change, reasons) = Targets(target, self.run.point), self._resolve(perturbations)
        groups = list(change.find_groups())
        self._warn_few(groups)

        def score(begin: int) -> Iterator[Scored]:
            sweep = sweep_back(self.run, change, targets, show_progress)
            values = _check_finite(sweep.effects.sum(2).double().cpu(), self.strict)
            about: dict[str, Any] = {"adjoint_growth": sweep.growth, "multipliers_at_zero": sweep.zeros}
            if count:
                still = torch.finfo(self.run.point.theta.dtype).eps ** 0.625 * _measure(self.run.point, targets)
                rows, weights = _choose(values, still, [touched for _, touched, _ in groups], count, reasons)
                about |= self._carry_out(rows, weights, targets, change.direction, values)
            yield values, about

        def complete(influence: Influence) -> None:
            if influence.trusted is False:
                found = influence.diagnostics["assessment"]
                worst = found["rows"][max(range(len(found["rows"])), key=found["errors"].__getitem__)]
                warn_assessed(found, targets.names, perturbations[worst].labels[0], _CURE)

        influence = fill_scores(
            self, self.run.point, targets, change.direction, score, {"since": self.since}, out=out, show_progress=False,
            complete=complete, given=perturbations, reasons=reasons,
        )  # fmt: skip
        return replace(influence, origin=None)  # the end of a run solves nothing

    def by_term(self, target: Any, perturbations: Perturbation, *, show_progress: bool = True) -> Influence:
        """Return through which row each perturbation acts on one target: the objective and each constraint."""
        _ = self.run.problem  # refuses a step of the user's own, which has no terms
        targets = Targets(target, self.run.point)
        targets.check_single("by_term")
        change, reasons = self._resolve(perturbations)
        effects = sweep_back(self.run, change, targets, show_progress).effects
        names = ("objective", *self.run.point.program.names)
        title = f"{self.name}, by term, on {targets.names[0]}"
        values = _check_finite(effects[:, 0].double().cpu(), self.strict)
        values[list(reasons)] = float("nan")
        unanswered = {perturbations.labels[p]: reason for p, reason in reasons.items()}
        about = {"since": self.since} | ({"unanswered": unanswered} if unanswered else {})
        return Influence(values, perturbations, names, title, about)

    def _resolve(self, perturbations: Perturbation) -> tuple[RunPerturbation, dict[int, str]]:
        """Resolve perturbations to weights of the steps; and say why some have no answer, see `resolve`."""
        direction, reasons = resolve(self.run.loop.program, perturbations)
        return RunPerturbation(self.run.loop, direction, self.since), reasons

    def _warn_few(self, groups: Sequence[tuple[int, Tensor, float]]) -> None:
        """Say which perturbed groups have few members in a batch, where their constraint has a force."""
        program = self.run.point.program
        few = [group for group in groups if group[2] < _FEW and program.rows.means[group[0]] and group[1].any()]
        for column, _, members in few:
            lam = torch.tensor([*self.run.history.multipliers, self.run.point.lam.tolist()]).to(program.tau).amax(0)
            rows = (program.rows.C[1:, column] != 0) & program.kinds.has_force(lam)
            if bool(rows.any()):
                warn(
                    f"A batch has {members:.2g} members of the group in {program.names[int(rows.nonzero()[0])]!r} on "
                    f"average; it should have {_FEW}. Without one of them the constraint changes a lot in a step, or "
                    "is left out, so that predictions for them are rough; the removals that are carried out show how "
                    "rough. Use larger batches.",
                    FirstOrderWarning,
                )

    def _carry_out(
        self, rows: list[int], weights: Tensor, targets: Targets, direction: Direction, values: Tensor
    ) -> dict[str, Any]:
        """Carry out some of the perturbations and return the diagnostics "probe" and "assessment".

        Of each target the error is the relative error of all its predictions, estimated from these, or the share of
        wrong signs if that is larger.
        """
        at, predicted = self.run.point, values[rows]
        moves = torch.cat([theta for theta, _ in rerun(self.run, direction.pick(rows), self.since)]) - at.theta
        actual = differences(at, targets, moves)
        still = torch.maximum(actual.abs(), predicted.abs()) <= _measure_rounding(at, targets, moves)  # (p, T)
        a, p = (torch.where(still, 0.0, x) for x in (actual, predicted))
        share, tiny = weights.sqrt()[:, None], torch.finfo(a.dtype).tiny
        units = torch.maximum(a.abs(), p.abs()).nan_to_num(posinf=1.0).max(0).values
        units = torch.where(units > 0, units, 1.0)
        error, size = share * (a - p).abs().nan_to_num(nan=float("inf")), share * a.abs().nan_to_num()
        found = ErrorEstimate(error, size, units, targets.alike, [[] for _ in rows]).describe(rows)
        wrong, moving = (weights[:, None] * (a.sign() != p.sign())).sum(0), (weights[:, None] * ~still).sum(0)
        wrong, moving = (x.sum().expand(len(x)) if targets.alike else x for x in (wrong, moving))
        found["by_target"] = torch.maximum(wrong.new_tensor(found["by_target"]), wrong / moving.clamp(min=1)).tolist()
        found["pooled"] = max(found["by_target"])
        a, p = (a / units).reshape(-1), (p / units).reshape(-1)
        probe = {
            "perturbations": direction.pick(rows).perturbation.labels,
            "predicted": predicted.tolist(),
            "actual": actual.tolist(),
            "relative_error": float((a - p).norm() / a.norm().clamp(min=tiny)),
            "agreement": 1.0 if bool(still.all()) else float(a @ p / (a.norm() * p.norm()).clamp(min=tiny)),
        }
        if self.strict and not probe["agreement"] > _UNRELATED:
            worst = max(range(len(units)), key=found["by_target"].__getitem__)
            pairs = ", ".join(f"{x:.3g} ({y:.3g})" for x, y in zip(predicted[:, worst], actual[:, worst], strict=True))
            raise DegenerateError(
                f"Carried out, {len(rows)} of the perturbations agree with their predictions by "
                f"{probe['agreement']:.2g}: predicted (actual) for {targets.names[worst]} {pairs}.",
                f"The cosine of predictions and actual changes must be above {_UNRELATED:g}.",
                "The training is chaotic or not smooth at this scale, so its derivative predicts nothing.",
                "Use smaller steps, larger batches, a warm start (pretrained by SGD with steps as large as these), "
                "eps_root for Adam, smooth activations, or since= for the last part; strict=False records it.",
            )
        return {"probe": probe, "assessment": found}


def _measure_rounding(at: Solution, targets: Targets, moves: Tensor) -> Tensor:
    """Return the changes, (T,), up to which a target counts as not moving, such as one that a constraint pins.

    They are within rounding of its value, and very small beside what moves of this length, (p, d), could change.
    """
    eps = torch.finfo(at.theta.dtype).eps
    reach = targets.gradients(at.theta).norm(dim=0) * moves.norm(dim=1).nan_to_num(posinf=0.0).max()
    return torch.minimum(_ROUNDING * eps * _measure(at, targets), eps**0.625 * reach.double().cpu())


def _measure(at: Solution, targets: Targets) -> Tensor:
    """Return the size of each target, (T,), or of its terms, where it is a sum near 0."""
    Q = targets.gradients(at.theta).abs()
    return torch.maximum(targets.values(at.theta).abs(), at.theta.abs() @ Q).double().cpu()


def _choose(
    values: Tensor, still: Tensor, groups: Sequence[Tensor], count: int, left_out: Iterable[int] = ()
) -> tuple[list[int], Tensor]:
    """Return the rows that are carried out, and how many rows each of them stands for.

    A third are the strongest, over all targets; changes up to `still`, (T,), hardly count. The others are random:
    equally many of each group, one at least, and of the rows that are in none. A row in several groups counts to the
    smallest.
    """
    units = torch.maximum(values.abs().max(0).values, still.clamp(min=torch.finfo(values.dtype).tiny))
    strength = (values.abs() / units).sum(1)
    order, generator = strength.nan_to_num(posinf=0.0).argsort(descending=True), torch.Generator().manual_seed(0)
    order = order[~torch.isin(order, torch.tensor(list(left_out), dtype=torch.long))]
    first = -(-count // 3)
    owner = torch.zeros(len(values), dtype=torch.long)
    for number, touched in enumerate(sorted(groups, key=lambda touched: -int(touched.sum())), 1):
        owner[touched] = number
    rest = order[first:]
    parts = sorted((rest[owner[rest] == number] for number in owner[rest].unique()), key=len)
    rows, weights, left = [order[:first]], [torch.ones(len(order[:first]), dtype=torch.float64)], count - first
    for number, part in enumerate(parts):
        size = min(len(part), max(1, -(-left // (len(parts) - number))))
        rows.append(part[torch.randperm(len(part), generator=generator)[:size]])
        weights.append(torch.full((size,), len(part) / size, dtype=torch.float64))
        left -= size
    return torch.cat(rows).tolist(), torch.cat(weights)


def _check_finite(values: Tensor, strict: bool) -> Tensor:
    """Return the scores; with `strict`, refuse NaN and infinite ones."""
    if strict and not bool(torch.isfinite(values).all()):
        raise DegenerateError(
            f"{int((~torch.isfinite(values)).sum())} of {values.numel()} scores are NaN or infinite.",
            "The derivative of every step must be finite.",
            "A step has no derivative somewhere, such as the root of an average square of 0 in Adam without eps_root. "
            "Or a step of your own divides by the weights of a group that is empty without a sample.",
            "Pass eps_root=1e-8 to dif.Adam or dif.AdamW, avoid functions with infinite slopes, or use strict=False. "
            "Leave empty groups out of a step of your own.",
        )
    return values
