"""What perturbations do to the weights of samples and to bounds: the only place that knows what each kind does.

Everything that carries a perturbation out, or differentiates along it, reads it here: `Problem.after`, the
linearisation, retraining, and the batches of a training run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.problem.perturbation import Action, Addition, Entries, Perturbation, Removal, Reweighting, Shift
from dif.problem.samples import Samples
from dif.problem.term import Constraint, SampleSum, Term

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
        if len(self.entries) == 1:
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

    def renormalised(self, move: Move) -> Tensor:
        """Return the changes of one move after renormalisation, (1 + alpha_p)·dw, (E, k)."""
        return (1.0 + (self.alpha if len(self.alpha) == 1 else self.alpha[move.entries.owner])) * move.dw


@dataclass(frozen=True, eq=False)
class Changes:
    """P perturbations of a problem, resolved: the changes of its sums and of its bounds."""

    P: int
    sums: tuple[SumChange, ...]
    bounds: tuple[tuple[Constraint, Tensor], ...]  # δτ: (P, rows), 1 instead of P or rows where all are the same

    @classmethod
    def of(cls, problem: Problem, perturbation: Perturbation) -> Changes:
        """Resolve perturbations; refuse those of other samples, terms or constraints than the problem's."""
        for _, action in perturbation.actions:
            _check_action(problem, action)
        terms: tuple[Any, ...] = (problem.objective, *problem.constraints)
        found: dict[int, list[SumChange]] = {piece: [] for piece in range(len(perturbation.pieces))}
        for samples, sums in _tables(terms):
            for piece, (factor, actions) in enumerate(perturbation.pieces):
                for together, numbers in _split(actions, samples.population, terms):
                    used = _find_used(sums, [terms[number] for number in numbers])
                    if any(used):
                        moves = _move(together, sums, used)
                        alpha = _renormalise(moves, sums, used, together)
                        found[piece].append(SumChange(samples, sums, numbers, factor, moves, alpha))
        bounds = [(c, _move_bound(n, c, perturbation, found)) for n, c in enumerate(problem.constraints, 1)]
        moved = tuple((constraint, dtau) for constraint, dtau in bounds if bool((dtau != 0).any()))
        return cls(len(perturbation), tuple(change for each in found.values() for change in each), moved)

    def pick(self, rows: Tensor) -> Changes:
        """Return the listed perturbations, in that order, without resolving them again."""
        bounds = tuple((c, dtau if len(dtau) == 1 else dtau[rows]) for c, dtau in self.bounds)
        return Changes(len(rows), tuple(change.pick(rows) for change in self.sums), bounds)


# Resolution


def _tables(terms: Iterable[Term | Constraint]) -> list[tuple[Samples, tuple[SampleSum, ...]]]:
    """Return the Samples of some terms, each with the distinct sums over it."""
    sums = list({id(s): s for term in terms for _, s in _read(term).sums}.values())
    every = list({id(s.samples): s.samples for s in sums}.values())
    return [(samples, tuple(s for s in sums if s.samples is samples)) for samples in every]


def _read(term: Term | Constraint) -> Term:
    return term.term if isinstance(term, Constraint) else term


def _find_used(sums: Sequence[SampleSum], terms: Iterable[Term | Constraint]) -> list[bool]:
    """Return which sums have a coefficient other than 0 in any of the terms."""
    used = {id(s) for term in terms for c, s in _read(term).sums if c != 0}
    return [id(s) in used for s in sums]


def _split(
    actions: Sequence[Action], population: Samples, terms: Sequence[Any]
) -> list[tuple[tuple[Any, ...], tuple[int, ...]]]:
    """Return the actions on a population that are carried out together, with the numbers of the terms they act on.

    Removals and additions from the same terms are. A reweighting adds absolute weight, whatever else happens.
    """
    mine: list[Any] = [a for a in actions if not isinstance(a, Shift) and a.samples.population is population]
    groups = [[a for a in mine if not isinstance(a, Reweighting)], *([a] for a in mine if isinstance(a, Reweighting))]
    found: dict[tuple[int, ...], tuple[tuple[Any, ...], list[int]]] = {}
    for group in groups:
        for number, term in enumerate(terms):
            together = tuple(a for a in group if a.terms is None or any(term is t for t in a.terms))
            if together:
                found.setdefault(tuple(map(id, together)), (together, []))[1].append(number)
    return [(together, tuple(numbers)) for together, numbers in found.values()]


def _move(actions: Sequence[Any], sums: Sequence[SampleSum], used: Sequence[bool]) -> tuple[Move, ...]:
    """Return what each action does to the weights of the sums, before renormalisation."""
    P, alone = max(map(len, actions)), len(actions) == 1
    moves, removed = [], torch.zeros(0, dtype=torch.long)
    for action in sorted(actions, key=lambda a: getattr(a, "renormalise", False)):  # those that do come last
        if isinstance(action, Reweighting):
            index = torch.nonzero(action.dw).reshape(-1)
            dw = (_weigh(sums, index) != 0) * action.dw[index][:, None]
            return (Move(Entries.of_all(index), dw, False),)
        entries = action.entries if alone else action.entries.expand(P)
        if isinstance(action, Addition):
            moves.append(Move(entries, _weigh_added(action, entries.index, sums, used), action.renormalise, action))
            continue
        if not alone:  # a sample can be removed only once
            keys = entries.owner * len(action.samples) + entries.index
            entries, removed = entries.keep(~torch.isin(keys, removed)), torch.cat([removed, keys])
        moves.append(Move(entries, -_weigh(sums, entries.index), action.renormalise))
    return tuple(moves)


def _weigh(sums: Sequence[SampleSum], index: Tensor) -> Tensor:
    """Return the weights of some samples in each sum, (E, k)."""
    return torch.stack([s.weights[index] for s in sums], 1)


def _weigh_added(action: Addition, index: Tensor, sums: Sequence[SampleSum], used: Sequence[bool]) -> Tensor:
    """Return the weights of new samples in each sum, (E, k), before renormalisation."""
    if action.like is not None:
        return _weigh(sums, action.like[index])
    unclear = [s.words for s, is_used in zip(sums, used, strict=True) if is_used and not s.everyone]
    if unclear:
        raise InvalidInputError(
            f"It is unknown whether the samples added to {action.samples.name!r} belong to {', '.join(unclear)}; pass "
            "like=i, a sample with the same memberships, or terms=[…]."
        )
    means = [s.weights.sum() / (s.weights != 0).sum().clamp(min=1) * s.everyone for s in sums]  # of the members
    return torch.stack(means).expand(len(index), -1)


def _renormalise(
    moves: Sequence[Move], sums: Sequence[SampleSum], used: Sequence[bool], actions: Sequence[Action]
) -> Tensor:
    """Return alpha, (P, k); refuse perturbations that leave no samples in a sum that is used."""
    P = max(len(move.entries) for move in moves)
    before = torch.stack([s.weights.sum() for s in sums])
    divisor = before.expand(P, -1).clone()
    members = torch.stack([(s.weights != 0).sum() for s in sums]).expand(P, -1).clone()
    for move in moves:
        members.index_add_(0, move.entries.owner, (move.dw != 0).long() * (1 if move.added else -1))
        if move.renormalise:
            divisor.index_add_(0, move.entries.owner, move.dw)
    removals = [a for a in actions if isinstance(a, Removal)]
    empty = (members == 0) & torch.tensor(used)
    if removals and bool(empty.any()):
        labels, reasons = [a.labels() for a in actions], {}
        for p, column in torch.nonzero(empty).tolist():
            label = " + ".join(each[p if len(each) > 1 else 0] for each in labels)
            reasons[p] = (
                f"Perturbation {p} ({label}) leaves no samples in {sums[column].words!r}; a term must keep at least "
                "one. Restrict the removal with terms=[…], or drop the term."
            )
        error = InvalidInputError(next(iter(reasons.values())))
        error.reasons = reasons
        raise error
    means = torch.tensor([s.normalised for s in sums])
    return torch.where(means & (divisor != 0), (before - divisor) / torch.where(divisor != 0, divisor, 1.0), 0.0)


def _move_bound(
    number: int, constraint: Constraint, perturbation: Perturbation, found: Mapping[int, Sequence[SumChange]]
) -> Tensor:
    """Return δτ of constraint `number` − 1, given what each piece does to the sums.

    A mean of N members keeps N/(1 + α) of them, so the share of a group follows from the α of two means.
    """
    old, total, share = constraint.tau.reshape(1, -1), torch.zeros((1, 1), dtype=torch.float64), constraint.share
    for piece, (factor, actions) in enumerate(perturbation.pieces):
        shifts = (a.dtau for a in actions if isinstance(a, Shift) and a.constraint is constraint)
        tau = sum((dtau.reshape(1, -1) for dtau in shifts), old)
        for change in found[piece]:
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
    terms = (problem.objective, *problem.constraints)
    for term in action.terms or ():
        if not any(term is own for own in terms):
            raise InvalidInputError(
                f"`terms` must contain the problem's own objective or constraint objects, not {term!r}. A perturbed "
                "problem has new ones: take them from solution.problem."
            )
    owners = [_read(term) for term in (terms if action.terms is None else action.terms)]
    sums = [s for term in owners for c, s in term.sums if c != 0]
    used = [s for s in sums if s.samples.population is action.samples.population]
    if not used:
        raise InvalidInputError(f"The perturbation of {name!r} is restricted to terms that do not use these samples.")
    if isinstance(action, Addition) and action.like is not None:
        unused = (_weigh(used, action.like) == 0).all(1)
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
    terms: tuple[Term, ...] = (problem.objective, *(constraint.term for constraint in problem.constraints))
    extended, starts = _extend([samples for samples, _ in _tables(terms)], perturbation)
    cache: dict[tuple[int, ...], SampleSum] = {}

    def perturb(number: int) -> Term:
        sums = []
        for c, part in terms[number].sums:
            if c != 0:
                mine = [change for change in changes.sums if part in change.sums and number in change.terms]
                key = (id(part), *map(id, mine))
                if key not in cache:
                    cache[key] = _reweight(part, mine, extended.get(id(part.samples)) or part.samples, starts)
                sums.append((c, cache[key]))
        return replace(terms[number], sums=tuple(sums))

    constraints = [replace(c, term=perturb(number)) for number, c in enumerate(problem.constraints, 1)]
    for constraint, dtau in changes.bounds:
        number, shift = problem.position(constraint), dtau[0, 0] if dtau.shape[1] == 1 else dtau[0]
        constraints[number] = replace(constraints[number], tau=constraint.tau + shift)
    return perturb(0), [c if c.share is None else c.of_smaller_group() for c in constraints]


def _extend(samples: Sequence[Samples], perturbation: Perturbation) -> tuple[dict[int, Samples], dict[int, int]]:
    """Append the data of all additions to the Samples that they are added to.

    Returns:
        The extended Samples, by id of the old ones; and the index of the first new sample, by id of the addition.
    """
    extended: dict[int, Samples] = {}
    starts: dict[int, int] = {}
    every = [action for _, action in perturbation.actions if isinstance(action, Addition)]
    for population in {id(s.population): s.population for s in samples}.values():
        additions = [action for action in every if action.samples.population is population]
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
    return part if not changes and samples is part.samples else replace(part, samples=samples, weights=weights)


def find_indispensable(problem: Problem, samples: Samples) -> dict[int, str]:
    """Return the samples that are the only one in a term, which is undefined without them: index → term in words."""
    terms: dict[int, str] = {}
    every = (problem.objective, *problem.constraints)
    for own, sums in _tables(every):
        for s, used in zip(sums, _find_used(sums, every), strict=True):
            members = torch.nonzero(s.weights).reshape(-1)
            if own.population is samples.population and used and len(members) == 1:
                terms[int(members)] = s.words
    return terms
