"""What perturbations do to the weights of samples and to bounds: the only place that knows what each kind does.

Everything that carries a perturbation out, or differentiates along it, reads it here: `Problem.after`, the
linearisation, retraining, and the batches of a training run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.problem.perturbation import Action, Addition, Entries, Perturbation, Reweighting, Shift
from dif.problem.samples import Samples
from dif.problem.term import Constraint, SampleSum, Term
from dif.runtime.inputs import check_instance

Problem = Any  # a dif.Problem, which asks here what it is after a perturbation

_ROUNDING = 1e-14  # relative size up to which a weight that is left counts as 0


@dataclass(frozen=True, eq=False)
class Move:
    """Changes of the weights of some samples in k sums, before renormalisation."""

    entries: Entries  # samples of each perturbation; a single list belongs to all perturbations
    dw: Tensor  # (E, k)
    renormalise: bool
    added: Addition | None = None  # whose new samples these are; None: those of the sums

    def pick(self, rows: Tensor) -> Move:
        """Return the listed perturbations, in that order."""
        if self.entries.P == 1:
            return self
        return replace(self, entries=self.entries.pick(rows), dw=self.dw[self.entries.find(rows)[1]])


@dataclass(frozen=True, eq=False)
class SumChange:
    """What actions that are carried out together do to the sums over one `Samples`, in some terms.

    Under perturbation p the weights w of a sum become w + factor·(alpha_p·w + (1 + alpha_p)·dw): its samples and the
    new ones take part with w + dw. A mean divides by Σw, to which only moves that renormalise add their dw, so that
    1 + alpha_p = Σw / (Σw + Σdw).
    """

    samples: Samples
    sums: tuple[SampleSum, ...]  # all k sums over these samples
    terms: tuple[int, ...]  # numbers of the terms in which it holds: 0 is the objective, 1 the first constraint
    factor: float
    moves: tuple[Move, ...]
    alpha: Tensor  # (P, k), or (1, k) if the same for all perturbations

    def pick(self, rows: Tensor) -> SumChange:
        """Return the listed perturbations, in that order."""
        alpha = self.alpha if len(self.alpha) == 1 else self.alpha[rows]
        return replace(self, alpha=alpha, moves=tuple(move.pick(rows) for move in self.moves))


@dataclass(frozen=True, eq=False)
class Changes:
    """P perturbations of a problem, resolved: the changes of its sums and of its bounds."""

    P: int
    sums: tuple[SumChange, ...]
    bounds: tuple[tuple[int, Tensor], ...]  # (number of the term, δτ (P, rows)); 1 for P or rows where all are equal

    @classmethod
    def of(cls, problem: Problem, perturbation: Perturbation) -> Changes:
        """Resolve perturbations; refuse those of other samples, terms or constraints than the problem's."""
        listed = [action for _, actions in perturbation.pieces for action in actions]
        for action in listed:
            _check_action(problem, action)
        stated = (problem.objective, *problem.constraints)
        found: list[list[SumChange]] = [[] for _ in perturbation.pieces]
        for samples, sums in problem.sums.items():
            for changes, (factor, actions) in zip(found, perturbation.pieces, strict=True):
                mine = [a for a in actions if not isinstance(a, Shift) and a.samples.population is samples.population]
                # Removals and additions from the same terms are carried out together, each reweighting by itself.
                apart = [[a] for a in mine if isinstance(a, Reweighting)]
                together: dict[tuple[Any, ...], list[int]] = {}  # numbers of the terms
                for group in ([a for a in mine if not isinstance(a, Reweighting)], *apart):
                    for number, term in enumerate(stated):
                        acting = tuple(a for a in group if a.terms is None or any(term is t for t in a.terms))
                        together.setdefault(acting, []).append(number)
                together.pop((), None)
                for acting, numbers in together.items():
                    summands = {id(s) for number in numbers for c, s in problem.terms[number].sums if c != 0}
                    used = [id(s) in summands for s in sums]
                    if any(used):
                        moved = _move(acting, sums, used)
                        changes.append(SumChange(samples, sums, tuple(numbers), factor, *moved))
        shifted = {id(action.constraint) for action in listed if isinstance(action, Shift)}
        bounds = [
            (number, _move_bound(number, constraint, perturbation, found))
            for number, constraint in enumerate(problem.constraints, 1)
            if constraint.share is not None or id(constraint) in shifted
        ]
        moved = tuple((number, dtau) for number, dtau in bounds if bool((dtau != 0).any()))
        return cls(len(perturbation), tuple(change for changes in found for change in changes), moved)

    def pick(self, rows: Tensor) -> Changes:
        """Return the listed perturbations, in that order, without resolving them again."""
        bounds = tuple((number, dtau if len(dtau) == 1 else dtau[rows]) for number, dtau in self.bounds)
        return Changes(len(rows), tuple(change.pick(rows) for change in self.sums), bounds)


# Resolution


def _move(actions: Sequence[Any], sums: Sequence[SampleSum], used: Sequence[bool]) -> tuple[tuple[Move, ...], Tensor]:
    """Return what each action does to the weights of the sums, before renormalisation; and alpha, (P, k)."""
    W = torch.stack([s.weights for s in sums])  # (k, n)
    P, before = max(action.entries.P for action in actions), W.sum(1)
    divisor, members = before.repeat(P, 1), (W != 0).sum(1).repeat(P, 1)
    moves, removed = [], torch.zeros(0, dtype=torch.long)
    for action in sorted(actions, key=lambda a: getattr(a, "renormalise", False)):  # those that do come last
        if isinstance(action, Reweighting):
            index = torch.nonzero(action.dw).reshape(-1)
            dw = (W[:, index] != 0).T * action.dw[index][:, None]
            return (Move(Entries(1, torch.zeros_like(index), index), dw, False),), torch.zeros_like(divisor)
        entries = action.entries
        if entries.P != P:
            entries = entries.pick(torch.zeros(P, dtype=torch.long))
        if isinstance(action, Addition):
            move = Move(entries, _weigh_added(action, entries.index, W, sums, used), action.renormalise, action)
        else:
            keys = entries.owner * len(action.samples) + entries.index
            if len(moves) > 0:  # a sample can be removed only once
                new = ~torch.isin(keys, removed)
                entries = Entries(P, entries.owner[new], entries.index[new])
            removed = torch.cat([removed, keys])
            move = Move(entries, -W[:, entries.index].T, action.renormalise)
        owner = move.entries.owner
        members.index_add_(0, owner, (move.dw != 0).long() * (1 if move.added else -1))
        if move.renormalise:
            divisor.index_add_(0, owner, move.dw)
        moves.append(move)
    empty = (members == 0) & torch.tensor(used)
    if len(removed) and bool(empty.any()):
        labels, reasons = [a.labels() for a in actions], {}
        for p, column in torch.nonzero(empty).tolist():
            label = " + ".join(each[p if len(each) > 1 else 0] for each in labels)
            reasons.setdefault(
                p,
                f"Perturbation {p} ({label}) leaves no samples in {sums[column].words!r}; a term must keep at least "
                "one. Restrict the removal with terms=[…], or drop the term.",
            )
        error = InvalidInputError(next(iter(reasons.values())))
        error.reasons = reasons
        raise error
    means = torch.tensor([s.normalised for s in sums]) & (divisor != 0)
    return tuple(moves), torch.where(means, (before - divisor) / torch.where(means, divisor, 1.0), 0.0)


def _weigh_added(action: Addition, index: Tensor, W: Tensor, sums: Sequence[SampleSum], used: Sequence[bool]) -> Tensor:
    """Return the weights of new samples in each sum, (E, k), before renormalisation."""
    if action.like is not None:
        return W[:, action.like[index]].T
    unclear = [s.words for s, is_used in zip(sums, used, strict=True) if is_used and not s.everyone]
    if unclear:
        raise InvalidInputError(
            f"It is unknown whether the samples added to {action.samples.name!r} belong to {', '.join(unclear)}; pass "
            "like=i, a sample with the same memberships, or terms=[…]."
        )
    means = W.sum(1) / (W != 0).sum(1).clamp(min=1) * torch.tensor([s.everyone for s in sums])  # of the members
    return means.expand(len(index), -1)


def _move_bound(
    number: int, constraint: Constraint, perturbation: Perturbation, found: Sequence[Sequence[SumChange]]
) -> Tensor:
    """Return δτ of a constraint, the term of this number, given what each piece does to the sums.

    A mean of N members keeps N/(1 + α) of them, so the share of a group follows from the α of two means.
    """
    old, total, share = constraint.tau.reshape(1, -1), torch.zeros((1, 1), dtype=torch.float64), constraint.share
    for changes, (factor, actions) in zip(found, perturbation.pieces, strict=True):
        shifts = (a.dtau for a in actions if isinstance(a, Shift) and a.constraint is constraint)
        tau = sum((dtau.reshape(1, -1) for dtau in shifts), old)
        for change in changes:
            mine = [change.sums.index(part) for _, part in constraint.term.sums if part in change.sums]
            if share is not None and number in change.terms and mine:
                group, both = mine
                after = share * (1.0 + change.alpha[:, both]) / (1.0 + change.alpha[:, group])
                tau = tau * (_limit(after) / _limit(torch.tensor(share, dtype=torch.float64)))[:, None]
        total = total + factor * (tau - old)
    return total


def _limit(share: Tensor) -> Tensor:
    """Return the factor min(1, N₂/N₁) of the bound for the share of group 1; 1 where there is no group 2 left."""
    return torch.where(share > 1 - _ROUNDING, 1.0, ((1 - share) / share).clamp(max=1.0))


def _check_action(problem: Problem, action: Action) -> None:
    """Refuse an action on samples, terms or constraints that are not of this problem."""
    if isinstance(action, Shift):
        rows = problem.constraints[problem.position(action.constraint)].known_rows
        if rows is not None:
            check_shift(action.constraint, action.dtau.numel() if action.dtau.dim() else 1, rows)
        return
    name = action.samples.name
    if all(people is not action.samples.population for people in problem.people):
        raise InvalidInputError(
            f"Samples {name!r} cannot be perturbed: no term of the problem uses these samples. A problem to which "
            "samples were added has new ones: take them from solution.problem.samples."
        )
    stated = (problem.objective, *problem.constraints)
    for term in action.terms or ():
        if not any(term is own for own in stated):
            raise InvalidInputError(
                f"`terms` must contain the problem's own objective or constraint objects, not {term!r}. A perturbed "
                "problem has new ones: take them from solution.problem."
            )
    chosen = {id(term) for term in action.terms or stated}
    sums = [s for own, term in zip(stated, problem.terms, strict=True) if id(own) in chosen for c, s in term.sums if c]
    used = [s for s in sums if s.samples.population is action.samples.population]
    if not used:
        raise InvalidInputError(f"The perturbation of {name!r} is restricted to terms that do not use these samples.")
    if isinstance(action, Addition) and action.like is not None:
        unused = ~torch.stack([s.weights[action.like] != 0 for s in used]).any(0)
        if bool(unused.any()):
            raise InvalidInputError(
                f"Sample {int(action.like[unused][0])} of {name!r} has weight 0 in every term, so a sample like it "
                "would change nothing; name one that is still there."
            )


def check_shift(constraint: Constraint, count: int, rows: int) -> None:
    """Refuse a shift that has neither one value nor one for each row of its constraint."""
    if count not in (1, rows):
        allowed = "1 value" if rows == 1 else f"1 value, or {rows}"
        raise InvalidInputError(f"The shift of {constraint.name or 'a constraint'} must have {allowed}, not {count}.")


# Readers


def apply_perturbation(problem: Problem, perturbation: Perturbation) -> tuple[Term, list[Constraint]]:
    """Return the objective and the constraints after one perturbation.

    Samples keep their indices; a removed sample has weight 0. Added samples come after the others, in new Samples
    objects that replace the old ones.
    """
    changes = Changes.of(problem, perturbation)
    extended, starts = _extend(problem, perturbation)
    cache: dict[tuple[int, ...], SampleSum] = {}  # terms that share a sum share it afterwards, too

    def perturb(number: int) -> Term:
        sums = []
        for c, part in problem.terms[number].sums:
            if c != 0:
                mine = [change for change in changes.sums if part in change.sums and number in change.terms]
                key = (id(part), *map(id, mine))
                if key not in cache:
                    cache[key] = _reweight(part, mine, extended[part.samples], starts)
                sums.append((c, cache[key]))
        return replace(problem.terms[number], sums=tuple(sums))

    dtau = {number: dtau[0, 0] if dtau.shape[1] == 1 else dtau[0] for number, dtau in changes.bounds}
    constraints = [
        replace(c, term=perturb(number), tau=c.tau + dtau.get(number, 0.0))
        for number, c in enumerate(problem.constraints, 1)
    ]
    return perturb(0), [c if c.share is None else c.of_smaller_group() for c in constraints]


def _extend(problem: Problem, perturbation: Perturbation) -> tuple[dict[Samples, Samples], dict[int, int]]:
    """Append the data of all additions to the Samples that they are added to.

    Returns:
        The Samples afterwards, by those before; and the index of the first new sample, by id of the addition.
    """
    extended = {samples: samples for samples in problem.samples}
    starts: dict[int, int] = {}
    every = [action for _, action in perturbation.actions if isinstance(action, Addition)]
    for population in problem.people:
        additions = [action for action in every if action.samples.population is population]
        if additions:
            sizes = (len(addition.new) for addition in additions)
            starts.update(zip(map(id, additions), accumulate(sizes, initial=len(population)), strict=False))
            whole = population.with_data(population.storage.join([addition.new.storage for addition in additions]))
            views = [view for view in problem.samples if view.population is population]
            extended |= {v: whole if v is population else v.with_data(whole.storage, whole) for v in views}
    return extended, starts


def _reweight(part: SampleSum, changes: Sequence[SumChange], samples: Samples, starts: dict[int, int]) -> SampleSum:
    """Return a sum with the weights that its samples have after the changes."""
    old = torch.cat([part.weights, part.weights.new_zeros(len(samples) - len(part.weights))])
    weights = old
    for change in changes:
        column, after = change.sums.index(part), old.clone()
        for move in change.moves:
            start = starts[id(move.added)] if move.added else 0
            after.index_add_(0, start + move.entries.index, move.dw[:, column])
        weights = weights + change.factor * ((1.0 + change.alpha[0, column]) * after - old)
    weights = torch.where(weights.abs() <= _ROUNDING * old.abs(), 0.0, weights)  # three thirds of a removal
    return replace(part, samples=samples, weights=weights)


def find_indispensable(problem: Problem, samples: Samples) -> dict[int, str]:
    """Return the samples that are the only one in a term, which is undefined without them: index → term in words."""
    check_instance(samples, Samples, "samples")
    terms: dict[int, str] = {}
    for s in (s for term in problem.terms for c, s in term.sums if c != 0):
        members = torch.nonzero(s.weights).reshape(-1)
        if s.samples.population is samples.population and len(members) == 1:
            terms[int(members)] = s.words
    return terms
