"""The statement of a constrained problem, min f₀(θ) subject to constraints, without parameter values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import combinations
from typing import cast

import torch

from dif.errors import InvalidInputError, SameDataWarning, count_words, warn
from dif.problem.perturbation import Action, Addition, Perturbation, Shift, check_shift, unused_error
from dif.problem.perturbed_problem import apply_perturbation
from dif.problem.samples import Samples, expect_samples
from dif.problem.term import Constraint, Expression, Term


class Problem:
    """Minimise an objective subject to constraints (paper: CL).

    Args:
        objective: A Term or a Function, such as `train.mean() + dif.ridge(0.1)`.
        constraints: Made by comparing Terms, such as `train.mean() <= 0.3`.

    Raises:
        InvalidInputError: Where these are something else, or where two constraints have the same name.

    >>> import torch
    >>> from dif.problem.samples import Samples
    >>> train = Samples(lambda p, z: (z - p["mean"]) ** 2, torch.tensor([1.0, 2.0, 6.0]))
    >>> Problem(train.mean(), [train.mean() <= 9.0])
    Problem(min mean of samples, 1 constraint)
    """

    def __init__(self, objective: Expression, constraints: Iterable[Constraint] | Constraint = ()) -> None:
        several = isinstance(constraints, Iterable)
        listed = tuple(constraints) if several else (constraints,)  # type: ignore[arg-type]
        wrong = [type(c).__name__ for c in listed if not isinstance(c, Constraint)]
        if not isinstance(objective, Expression):
            raise InvalidInputError(
                f"The objective is of type {type(objective).__name__}.",
                "It must be a Term or a Function.",
                "Only a function of the parameters can be minimised.",
                "Build it from Samples.mean(), Samples.sum(), dif.ridge and the like.",
            )
        if wrong:
            raise InvalidInputError(
                f"The constraints include objects of type {', '.join(wrong)}.",
                "They must be a list of Constraints.",
                "Constraints are made by comparing Terms: train.mean() <= 0.3.",
                "Compare a Term, not its value, with a number or a Term; leave the list out if there are none.",
            )
        self.objective: Term = objective.as_term()
        self.constraints: tuple[Constraint, ...] = listed
        self.names: tuple[str, ...] = tuple(c.name or f"constraint {j}" for j, c in enumerate(listed))
        repeated = {name for name in self.names if self.names.count(name) > 1}
        if repeated or len({id(c) for c in listed}) < len(listed):
            raise InvalidInputError(
                f"The list of constraints has {', '.join(sorted(repeated)) or 'one constraint'} more than once.",
                "Each constraint and each name may appear only once.",
                "Multipliers and reports are looked up by constraint.",
                "Give each constraint its own name with .named(...).",
            )
        for a, b in self.same_data:
            warn(SameDataWarning.words(a.name, b.name), SameDataWarning)

    @property
    def samples(self) -> tuple[Samples, ...]:
        """The Samples that the objective and the constraints are made of, each once."""
        terms = (self.objective, *(c.term for c in self.constraints))
        samples = {id(part.samples): part.samples for term in terms for _, part in term.sums}
        return cast(tuple[Samples, ...], tuple(samples.values()))

    @property
    def people(self) -> tuple[Samples, ...]:
        """The Samples without views, each once: a view is represented by the Samples that it was made from."""
        return cast(tuple[Samples, ...], tuple({id(s.population): s.population for s in self.samples}.values()))

    @property
    def same_data(self) -> tuple[tuple[Samples, Samples], ...]:
        """Pairs of Samples with the same data that are not views of each other, though they may be the same people."""
        pairs = [(a, b) for a, b in combinations(self.samples, 2) if a.population is not b.population]
        return tuple((a, b) for a, b in pairs if a.storage.shares(b.storage))

    def after(self, perturbation: Perturbation) -> Problem:
        """Return the problem after one perturbation, which acts on every view; `dif.fit` solves it from scratch.

        Samples keep their indices, so that the result can be perturbed again. Added samples come after the others, in
        new Samples objects that replace the old ones (see `problem.samples` of the result).

        >>> import torch
        >>> train = Samples(lambda p, z: (z - p["mean"]) ** 2, torch.tensor([1.0, 2.0, 6.0]), name="train")
        >>> ((_, left),) = Problem(train.mean()).after(train.remove([2])).objective.sums
        >>> left.weights.tolist()
        [0.5, 0.5, 0.0]
        """
        if not isinstance(perturbation, Perturbation) or len(perturbation) != 1:
            several = isinstance(perturbation, Perturbation)
            objects = (
                f"{len(perturbation)} perturbations were"
                if several
                else f"An object of type {type(perturbation).__name__} was"
            )
            raise InvalidInputError(
                f"{objects} given to Problem.after.",
                "It takes one Perturbation.",
                "A problem is stated after one perturbation, which may remove or add many samples.",
                "Use train.remove([1, 2, 3]), or select one: perturbations[i].",
            )
        for _, action in perturbation.pieces:
            self.check_action(action)
        objective, constraints = apply_perturbation(perturbation, self.objective, self.constraints)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SameDataWarning)  # already given when the problem was stated
            return Problem(objective, constraints)

    def check_action(self, action: Action) -> None:
        """Refuse an action on samples, terms or constraints that are not of this problem."""
        if isinstance(action, Shift):
            rows = self.constraints[self.position(action.constraint)].known_rows
            if action.dtau.numel() > 1 and rows is not None:
                check_shift(action, rows)
            return
        if all(people is not action.samples.population for people in self.people):
            raise unused_error(action.samples)
        for term in action.terms or ():
            if term is not self.objective and not any(term is c for c in self.constraints):
                raise InvalidInputError(
                    f"`terms` contains {term!r}.",
                    "Each term must be the problem's own objective or one of its constraint objects.",
                    "Terms are told apart by identity.",
                    "Use problem.objective and problem.constraints[j]. A perturbed problem has new ones: take them "
                    "from solution.problem.",
                )
        owners = (self.objective, *self.constraints) if action.terms is None else action.terms
        sums = [pair for t in owners for pair in (t.term if isinstance(t, Constraint) else t).sums]
        used = [part for c, part in sums if c != 0 and part.samples.population is action.samples.population]
        if not used:
            raise InvalidInputError(
                f"The perturbation of {action.samples.name!r} is restricted to terms that do not use these samples.",
                "At least one of the terms must use them.",
                "Nothing would change.",
                "Name terms that use them, or leave `terms` out.",
            )
        if isinstance(action, Addition) and action.like is not None:
            unused = torch.stack([part.weights[action.like] == 0 for part in used]).all(0)
            if bool(unused.any()):
                raise InvalidInputError(
                    f"Sample {int(action.like[unused][0])} of {action.samples.name!r} has weight 0 in every term.",
                    "A new sample is like one that has weight in some term.",
                    "A sample like one that was removed would be in no term, so nothing would change.",
                    "Name another sample in `like`, or replace a sample that is still there.",
                )

    def position(self, constraint: Constraint) -> int:
        """Return the number of a constraint of this problem."""
        for number, own in enumerate(self.constraints):
            if own is constraint:
                return number
        raise InvalidInputError(
            f"{constraint!r} is not a constraint of this problem.",
            "It must be one of the constraint objects that were passed to Problem.",
            "Constraints are told apart by identity, and .named(...) makes a new one.",
            "Keep the object that you passed to Problem, or use problem.constraints[j]. A perturbed problem has new "
            "ones: take them from solution.problem.constraints.",
        )

    def without(self, samples: Samples, indices: Iterable[int]) -> Problem:
        """Return the problem without some samples: `after(samples.remove(indices))`."""
        return self.after(expect_samples(samples).remove(indices))

    def __repr__(self) -> str:
        return f"Problem(min {repr(self.objective)[5:-1]}, {count_words(len(self.constraints), 'constraint')})"
