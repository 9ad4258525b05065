"""The statement of a constrained problem, min f₀(θ) subject to constraints, without parameter values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import combinations

from dif.errors import InvalidInputError, SameDataWarning, count_words, warn
from dif.problem.perturbation import Perturbation
from dif.problem.samples import Samples
from dif.problem.term import Constraint, Expression, Term
from dif.problem.weights import apply_perturbation


class Problem:
    """Minimise an objective subject to constraints (paper: CL).

    Args:
        objective: A Term or a Function, such as `train.mean() + dif.ridge(0.1)`.
        constraints: Made by comparing Terms, such as `train.mean() <= 0.3`.

    Attributes:
        terms: f₀, and f of each constraint.
        samples: The Samples that the terms are made of, each once.
        people: The Samples without views, each once: a view is represented by the Samples that it was made from.
        sums: The distinct sums over each of `samples`.
        same_data: Pairs of Samples with the same data that are not views of each other, though they may be the same
            people.

    Raises:
        InvalidInputError: Where these are something else, or where two constraints have the same name.

    Examples:
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
                "The objective must be a Term or a Function, such as Samples.mean(), not of type "
                f"{type(objective).__name__}."
            )
        if wrong:
            raise InvalidInputError(
                "The constraints must be made by comparing Terms, such as train.mean() <= 0.3, not of type "
                f"{', '.join(wrong)}."
            )
        self.objective: Term = objective.as_term()
        self.constraints: tuple[Constraint, ...] = listed
        self.names: tuple[str, ...] = tuple(c.name or f"constraint {j}" for j, c in enumerate(listed))
        repeated = {name for name in self.names if self.names.count(name) > 1}
        if repeated or len({id(c) for c in listed}) < len(listed):
            raise InvalidInputError(
                f"The list of constraints has {', '.join(sorted(repeated)) or 'one constraint'} more than once; give "
                "each its own name with .named(...)."
            )
        self.terms: tuple[Term, ...] = (self.objective, *(c.term for c in listed))
        distinct = {id(part): part for term in self.terms for _, part in term.sums}.values()
        self.samples: tuple[Samples, ...] = tuple({id(part.samples): part.samples for part in distinct}.values())
        self.people: tuple[Samples, ...] = tuple({id(s.population): s.population for s in self.samples}.values())
        self.sums = {s: tuple(part for part in distinct if part.samples is s) for s in self.samples}
        pairs = [(a, b) for a, b in combinations(self.samples, 2) if a.population is not b.population]
        self.same_data = tuple((a, b) for a, b in pairs if a.storage.shares(b.storage))
        for a, b in self.same_data:
            warn(SameDataWarning.words(a.name, b.name), SameDataWarning)

    def after(self, perturbation: Perturbation) -> Problem:
        """Return the problem after one perturbation, which acts on every view; `dif.fit` solves it from scratch.

        Samples keep their indices, so that the result can be perturbed again. Added samples come after the others, in
        new Samples objects that replace the old ones (see `problem.samples` of the result).

        Examples:
            >>> import torch
            >>> train = Samples(lambda p, z: (z - p["mean"]) ** 2, torch.tensor([1.0, 2.0, 6.0]), name="train")
            >>> ((_, left),) = Problem(train.mean()).after(train.remove([2])).objective.sums
            >>> left.weights.allclose(torch.tensor([0.5, 0.5, 0.0]).double())
            True
        """
        if not isinstance(perturbation, Perturbation) or len(perturbation) != 1:
            several = isinstance(perturbation, Perturbation)
            found = str(len(perturbation)) if several else f"of type {type(perturbation).__name__}"
            raise InvalidInputError(
                f"Problem.after takes one Perturbation, not {found}; it may remove or add many samples."
            )
        objective, constraints = apply_perturbation(self, perturbation)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SameDataWarning)  # already given when the problem was stated
            return Problem(objective, constraints)

    def position(self, constraint: Constraint) -> int:
        """Return the number of a constraint of this problem."""
        for number, own in enumerate(self.constraints):
            if own is constraint:
                return number
        raise InvalidInputError(
            f"{constraint!r} is not a constraint of this problem; use problem.constraints[j]. A perturbed problem "
            "has new ones: take them from solution.problem.constraints."
        )

    def __repr__(self) -> str:
        return f"Problem(min {repr(self.objective)[5:-1]}, {count_words(len(self.constraints), 'constraint')})"
