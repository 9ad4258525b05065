"""The statement of a constrained problem, min f₀(θ) subject to constraints, without parameter values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import combinations
from typing import cast

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
