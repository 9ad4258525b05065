"""min f₀(θ) subject to constraints: the statement alone, no parameters and no numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import combinations
from typing import cast

from dif.errors import InvalidInputError, SameDataWarning, warn
from dif.problem.carried_out import carry_out
from dif.problem.perturbation import Perturbation, Shift
from dif.problem.samples import Samples
from dif.problem.term import Constraint, Expression, Term


class Problem:
    """Minimise an objective subject to constraints (paper: CL).

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
        if not isinstance(objective, Expression) or wrong:
            raise InvalidInputError(
                "Problem(objective, constraints)",
                measured=f"objective {type(objective).__name__}, constraints {', '.join(wrong) or 'sound'}",
                threshold="a Term or Function, and a list of Constraints",
                meaning="Constraints are made by comparing Terms: train.mean() <= 0.3.",
                cure="Build the objective from Samples.mean() and friends.",
            )
        self.objective: Term = objective.as_term()
        self.constraints: tuple[Constraint, ...] = listed
        self.names: tuple[str, ...] = tuple(c.name or f"constraint {j}" for j, c in enumerate(listed))
        again = {name for name in self.names if self.names.count(name) > 1}
        if again or len({id(c) for c in listed}) < len(listed):
            raise InvalidInputError(
                "names of the constraints",
                measured=f"{', '.join(sorted(again)) or 'one constraint'} more than once",
                threshold="each once",
                meaning="Multipliers and reports are looked up by constraint.",
                cure="Give each constraint a name of its own with .named(...).",
            )
        for one, other in self.same_data:
            warn(SameDataWarning.words(one.name, other.name), SameDataWarning)

    @property
    def samples(self) -> tuple[Samples, ...]:
        """The Samples that its objective and constraints are made of, each once."""
        terms = (self.objective, *(c.term for c in self.constraints))
        every = {id(part.samples): part.samples for term in terms for _, part in term.sums}
        return cast(tuple[Samples, ...], tuple(every.values()))

    @property
    def people(self) -> tuple[Samples, ...]:
        """The populations it is about, each once, however many views of it there are."""
        return cast(tuple[Samples, ...], tuple({id(s.people): s.people for s in self.samples}.values()))

    @property
    def same_data(self) -> tuple[tuple[Samples, Samples], ...]:
        """Pairs of Samples that hold the same data and are not views of each other: the same people, perhaps."""
        apart = [(a, b) for a, b in combinations(self.samples, 2) if a.people is not b.people]
        return tuple((a, b) for a, b in apart if a.storage.shares(b.storage))

    def after(self, perturbation: Perturbation) -> Problem:
        """State the problem with one perturbation carried out, in every view.

        Samples keep their numbers, so that further ones can be perturbed; those that are added come after the others,
        in Samples that take the place of the old ones (`problem.samples`). `dif.fit` solves it from scratch.

        >>> import torch
        >>> train = Samples(lambda p, z: (z - p["mean"]) ** 2, torch.tensor([1.0, 2.0, 6.0]), name="train")
        >>> ((_, left),) = Problem(train.mean()).after(train.remove([2])).objective.sums
        >>> left.weights.tolist()
        [0.5, 0.5, 0.0]
        """
        if not isinstance(perturbation, Perturbation) or len(perturbation) != 1:
            raise InvalidInputError(
                "what is carried out",
                measured=f"{len(perturbation)} perturbations"
                if isinstance(perturbation, Perturbation)
                else type(perturbation).__name__,
                threshold="one Perturbation",
                meaning="A problem is stated after one perturbation, which may remove or add many samples.",
                cure="Use train.remove([1, 2, 3]), or choose one: perturbations[i].",
            )
        for _, piece in perturbation.pieces:
            if isinstance(piece, Shift):
                if all(piece.constraint is not c for c in self.constraints):
                    raise InvalidInputError(
                        repr(piece.constraint),
                        measured="not a constraint of the problem",
                        threshold="one of its constraints, the same object",
                        meaning="Constraints are told apart by identity.",
                        cure="Shift one of problem.constraints.",
                    )
            elif all(people is not piece.samples.people for people in self.people):
                raise InvalidInputError(
                    f"samples {piece.samples.name!r}",
                    measured="no term of the problem uses them",
                    threshold="at least one",
                    meaning="Samples are told apart by identity.",
                    cure="Name the Samples object from which the objective or the constraints were built.",
                )
        objective, constraints = carry_out(perturbation, self.objective, self.constraints)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SameDataWarning)  # which was given when the problem was stated
            return Problem(objective, constraints)

    def without(self, samples: Samples, indices: Iterable[int]) -> Problem:
        """State the problem without some samples: `after(samples.remove(indices))`."""
        return self.after(samples.remove(indices))

    def __repr__(self) -> str:
        many = f"{len(self.constraints)} constraint{'' if len(self.constraints) == 1 else 's'}"
        return f"Problem(min {repr(self.objective)[5:-1]}, {many})"
