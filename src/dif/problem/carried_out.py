"""A perturbation carried out: what becomes of the weights, the samples and the bounds of a statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.problem.perturbation import Addition, Perturbation, Removal, Reweighting, Shift
from dif.problem.sample_losses import SampleLosses
from dif.problem.term import Constraint, SampleSum, Term

Weighing = Removal | Addition | Reweighting


def carry_out(
    perturbation: Perturbation, objective: Term, constraints: Sequence[Constraint]
) -> tuple[Term, list[Constraint]]:
    """State objective and constraints as they are after one perturbation.

    Samples keep their numbers: one that is removed weighs nothing. Added ones come after the others, in Samples that
    take the place of the old ones.
    """
    pieces = perturbation.pieces
    weighing = [(scale, piece) for scale, piece in pieces if not isinstance(piece, Shift)]
    terms = (objective, *(c.term for c in constraints))
    grown, places = _grown(list({id(s.samples): s.samples for t in terms for _, s in t.sums}.values()), weighing)
    known: dict[tuple[int, ...], SampleSum] = {}

    def after(term: Term, owner: Any) -> Term:
        mine = [
            (scale, piece) for scale, piece in weighing if piece.terms is None or any(owner is t for t in piece.terms)
        ]
        sums = []
        for c, part in term.sums:
            key = (id(part), *(id(piece) for _, piece in mine))
            if key not in known:
                known[key] = _weighed(part, mine, grown, places)
            sums.append((c, known[key]))
        return replace(term, sums=tuple(sums))

    moved = []
    for constraint in constraints:
        shifts = [scale * p.dtau for scale, p in pieces if isinstance(p, Shift) and p.constraint is constraint]
        tau = sum(shifts, constraint.tau)
        moved.append(replace(constraint, term=after(constraint.term, constraint), tau=tau))
    return after(objective, objective), moved


def _grown(
    every: list[SampleLosses], pieces: Sequence[tuple[float, Weighing]]
) -> tuple[dict[int, SampleLosses], dict[int, int]]:
    """What takes the place of each Samples whose people are joined by others, and where each addition begins, by id."""
    grown: dict[int, SampleLosses] = {}
    places: dict[int, int] = {}
    for people in {id(s.people): s.people for s in every}.values():
        added = [piece for _, piece in pieces if isinstance(piece, Addition) and piece.samples.people is people]
        if not added:
            continue
        start = len(people)
        for piece in added:
            places[id(piece)] = start
            start += len(piece.new)
        storage = people.storage.joined([piece.new.storage for piece in added])
        grown[id(people)] = people.holding(storage)
        for view in every:
            if view.people is people and view is not people:
                grown[id(view)] = view.holding(storage, grown[id(people)])
    return grown, places


def _weighed(
    part: SampleSum,
    pieces: Sequence[tuple[float, Weighing]],
    grown: dict[int, SampleLosses],
    places: dict[int, int],
) -> SampleSum:
    """A sum with the weights that its samples have once the pieces are carried out."""
    samples = grown.get(id(part.samples), part.samples)
    before, mine = part.weights, [(c, piece) for c, piece in pieces if piece.samples.people is part.samples.people]
    old = torch.cat([before, before.new_zeros(len(samples) - len(before))])
    weights = old
    for scale, piece in mine:
        after = old.clone()
        if isinstance(piece, Removal):
            after[piece.entries.index] = 0.0
            _renormalise(after, before, part, piece, "Remove fewer samples, or state the problem without that term.")
        elif isinstance(piece, Reweighting):
            after[: len(before)] += (before != 0) * piece.dw
        else:
            place = places[id(piece)]
            after[place : place + len(piece.new)] = _of_new(part, piece)
            _renormalise(after, before, part, piece, "")
        weights = weights + scale * (after - old)
    return part if not mine and samples is part.samples else replace(part, samples=samples, weights=weights)


def _renormalise(after: Tensor, before: Tensor, part: SampleSum, piece: Removal | Addition, cure: str) -> None:
    """Let a mean go over as many as are in it now."""
    many, now = int((before != 0).sum()), int((after != 0).sum())
    if now == 0:
        raise InvalidInputError(
            f"samples left in {part.words!r}",
            measured=0,
            threshold="at least 1",
            meaning="A term without samples is not defined.",
            cure=cure,
        )
    if part.normalised and piece.renormalise:
        after *= many / now


def _of_new(part: SampleSum, piece: Addition) -> Tensor:
    """What new samples weigh, before the means are taken over more."""
    if piece.like is not None:
        return part.weights[piece.like]
    if not part.everyone:
        raise InvalidInputError(
            f"membership of the samples added to {piece.samples.name!r}",
            measured=f"unknown in {part.words}",
            threshold="known in every term",
            meaning="Only you know whether a new sample is in a masked mean, or what it weighs in a weighted sum.",
            cure="Say like=i, a sample with the same memberships, or terms=[…].",
        )
    return part.weights.max().expand(len(piece.new))
