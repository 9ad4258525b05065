"""State the objective and the constraints of a problem as they are after a perturbation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dif.problem.perturbation import Addition, Perturbation, Removal, Reweighting, Shift, empty_term_error
from dif.problem.sample_losses import SampleLosses
from dif.problem.term import Constraint, SampleSum, Term

WeightAction = Removal | Addition | Reweighting  # actions that change weights


def apply_perturbation(
    perturbation: Perturbation, objective: Term, constraints: Sequence[Constraint]
) -> tuple[Term, list[Constraint]]:
    """Return the objective and the constraints after one perturbation.

    Samples keep their indices; a removed sample has weight 0. Added samples come after the others, in new Samples
    objects that replace the old ones.
    """
    actions = [(scale, action) for scale, action in perturbation.pieces if not isinstance(action, Shift)]
    terms = (objective, *(c.term for c in constraints))
    extended, starts = _extend(list({id(s.samples): s.samples for t in terms for _, s in t.sums}.values()), actions)
    cache: dict[tuple[int, ...], SampleSum] = {}

    def perturb(term: Term, owner: Any) -> Term:
        relevant = [(scale, a) for scale, a in actions if a.terms is None or any(owner is t for t in a.terms)]
        sums = []
        for c, part in term.sums:
            if c == 0:
                continue
            key = (id(part), *(id(action) for _, action in relevant))
            if key not in cache:
                cache[key] = _reweight(part, relevant, extended, starts)
            sums.append((c, cache[key]))
        return replace(term, sums=tuple(sums))

    perturbed = []
    for constraint in constraints:
        shifts = [
            scale * action.dtau
            for scale, action in perturbation.pieces
            if isinstance(action, Shift) and action.constraint is constraint
        ]
        tau = sum(shifts, constraint.tau)
        perturbed.append(replace(constraint, term=perturb(constraint.term, constraint), tau=tau))
    return perturb(objective, objective), perturbed


def _extend(
    samples: list[SampleLosses], actions: Sequence[tuple[float, WeightAction]]
) -> tuple[dict[int, SampleLosses], dict[int, int]]:
    """Append the data of all additions to the Samples that they are added to.

    Returns:
        The extended Samples, by id of the old ones; and the index of the first new sample, by id of the addition.
    """
    extended: dict[int, SampleLosses] = {}
    starts: dict[int, int] = {}
    for population in {id(s.population): s.population for s in samples}.values():
        additions = [a for _, a in actions if isinstance(a, Addition) and a.samples.population is population]
        if not additions:
            continue
        start = len(population)
        for addition in additions:
            starts[id(addition)] = start
            start += len(addition.new)
        storage = population.storage.join([addition.new.storage for addition in additions])
        extended[id(population)] = population.with_data(storage)
        for view in samples:
            if view.population is population and view is not population:
                extended[id(view)] = view.with_data(storage, extended[id(population)])
    return extended, starts


def _reweight(
    part: SampleSum,
    actions: Sequence[tuple[float, WeightAction]],
    extended: dict[int, SampleLosses],
    starts: dict[int, int],
) -> SampleSum:
    """Return a sum with the weights that its samples have after the actions."""
    samples = extended.get(id(part.samples), part.samples)
    before, relevant = part.weights, [(c, a) for c, a in actions if a.samples.population is part.samples.population]
    old = torch.cat([before, before.new_zeros(len(samples) - len(before))])
    weights = old
    for scale, action in relevant:
        after = old.clone()
        if isinstance(action, Reweighting):
            after[: len(before)] += (before != 0) * action.dw
        elif isinstance(action, Removal):
            after[action.entries.index] = 0.0
        else:
            start = starts[id(action)]
            after[start : start + len(action.new)] = _weigh_new(part, action)
        if not isinstance(action, Reweighting):
            refilled = not action.renormalise and any(isinstance(a, Addition) for _, a in relevant)
            if not refilled and not bool((after != 0).any()):
                raise empty_term_error("The perturbation", part.words)
            if part.normalised and action.renormalise and float(after.sum()):
                after *= float(before.sum() / after.sum())  # a mean is taken over the samples that it has now
        weights = weights + scale * (after - old)
    return part if not relevant and samples is part.samples else replace(part, samples=samples, weights=weights)


def _weigh_new(part: SampleSum, addition: Addition) -> Tensor:
    """Return the weights of new samples in a sum, before renormalisation."""
    if addition.like is not None:
        return part.weights[addition.like]
    if not part.everyone:
        raise addition.membership_error([part.words])
    members = part.weights[part.weights != 0]
    return members.mean().expand(len(addition.new))  # the mean weight of the members
