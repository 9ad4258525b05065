"""Choose sets of samples to remove: greedily, with the solution and the scores updated after each round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from dif.derivatives.program import Program, Targets
from dif.errors import DifError, InvalidInputError, NotConvergedError, count_words
from dif.estimators.directional import DirectionalInfluence
from dif.estimators.path import PathInfluence
from dif.optimality.solution import Solution, expect_solution
from dif.problem.samples import Samples
from dif.problem.weights import find_indispensable
from dif.runtime.inputs import check_count, check_number
from dif.runtime.work import Reporter, progress
from dif.solving.fit import fit

_PATIENCE = 5  # failed attempts in a row after which no removal is expected to help


@dataclass(frozen=True, eq=False)
class Choice:
    """A set of samples to remove, and the target after retraining without them."""

    indices: tuple[int, ...]  # in the order in which they were chosen
    target: str
    before: float  # the target at the given solution
    predicted: float  # the target without them, predicted by the sum of their first-order scores at the given solution
    followed: tuple[float, ...]  # the target after each greedy round; empty for a ranking
    verified: float  # the target after solving the problem without them
    solution: Solution  # of the problem without them, certified
    reached: bool | None  # whether the goal was reached; None where there was none

    def __str__(self) -> str:
        removed = count_words(len(self.indices), "sample")
        return f"without {removed}: {self.target} {self.before:.6g} → {self.verified:.6g} (retrained)"


def choose(
    solution: Solution,
    target: Any,
    samples: Samples,
    count: int,
    *,
    lower: bool = True,
    among: Iterable[int] | None = None,
    greedy: bool = True,
    per_round: int = 1,
    show_progress: bool = True,
) -> Choice:
    """Choose the samples whose removal lowers (or raises) a target most, under the same constraints.

    Greedy: the sample with the strongest score is removed, the solution is followed to the problem without it, all
    scores are computed again there, and so on. A round that makes the target worse is undone, and the next strongest
    samples are tried. The choice ends early where no removal helps any more. With `greedy=False` the first-order
    ranking at the given solution is used as it is. The problem without the set is then solved by `fit` from where the
    choice arrived: `Choice.verified`. (If it is not convex, other starts may lead to other solutions.)

    Args:
        solution: A certified solution.
        target: A Term.
        samples: The Samples to remove from.
        count: Largest number of samples to remove.
        lower: Lower the target; False raises it.
        among: Indices that may be removed (None: all).
        greedy: Compute the scores again after each round.
        per_round: How many samples are removed in each round.
        show_progress: Show a bar on a terminal.
    """
    removal = _RemovalSet.start(solution, target, samples, 1.0 if lower else -1.0, among)
    count, per_round = _check_counts("count", count, per_round)
    if greedy:
        with progress("choosing", count, show_progress) as report:
            while len(removal.chosen) < count and removal.extend(min(per_round, count - len(removal.chosen))):
                report(len(removal.chosen))
    else:
        removal.chosen = removal.rank(count)
    return removal.verify(None)


def smallest_set(
    solution: Solution,
    target: Any,
    samples: Samples,
    goal: float,
    *,
    limit: int = 200,
    among: Iterable[int] | None = None,
    per_round: int = 1,
    show_progress: bool = True,
) -> Choice:
    """Find a small set of samples whose removal brings a target to a goal, such as a margin to 0.

    Samples are chosen greedily until the goal is reached; then each one that is not needed for the goal is put back.
    No single sample of the final set can be put back, but a smaller set may exist. `Choice.reached` says whether the
    goal was reached within the limit, `Choice.verified` is the target after training without the set.

    Args:
        solution: A certified solution.
        target: A Term, now above the goal or below it.
        samples: The Samples to remove from.
        goal: Value of the target to reach.
        limit: Largest number of samples to remove.
        among: Indices that may be removed (None: all).
        per_round: How many samples are removed in each round.
        show_progress: Show a bar on a terminal.
    """
    goal = check_number(goal, "goal", zero=True, negative=True)
    limit, per_round = _check_counts("limit", limit, per_round)
    removal = _RemovalSet.start(solution, target, samples, 1.0, among)
    removal.sign = 1.0 if removal.value > goal else -1.0
    with progress("choosing", limit, show_progress) as report:
        while len(removal.chosen) < limit and not removal.reaches(goal, removal.value):
            if not removal.extend(min(per_round, limit - len(removal.chosen))):
                break
            report(len(removal.chosen))
        if removal.reaches(goal, removal.value):
            removal.prune(goal, report)
    return removal.verify(goal)


def _check_counts(name: str, limit: int, per_round: int) -> tuple[int, int]:
    return check_count(limit, name), check_count(per_round, "per_round")


def _score(at: Solution, target: Any, samples: Samples, indices: list[int]) -> dict[int, float]:
    """Return the first-order score of each sample, without those whose removal has no answer."""
    influence = DirectionalInfluence(at).scores(target, samples.remove_each(indices), show_progress=False, assess=0)
    values = zip(indices, influence.values[:, 0].tolist(), strict=True)
    return {i: value for i, value in values if isfinite(value)}


@dataclass
class _RemovalSet:
    """A growing set of samples to remove, and the solution without them."""

    start_solution: Solution
    at: Solution  # without the chosen samples
    target: Any
    targets: Targets
    samples: Samples
    sign: float  # +1: lower is better
    candidates: list[int]
    first_scores: dict[int, float]  # at the start
    chosen: list[int]
    followed: list[float]  # the target after each round

    @classmethod
    def start(cls, solution: Solution, target: Any, samples: Samples, sign: float, among: Any) -> _RemovalSet:
        """Build an empty set, with the scores of all candidates."""
        targets = Targets(target, expect_solution(solution))
        if len(targets.names) != 1:
            raise InvalidInputError(
                f"`target` must be one number, not {len(targets.names)}; a weighted sum of Terms is a Term."
            )
        needed = find_indispensable(solution.problem, samples)
        indices = range(len(samples)) if among is None else samples.check_indices(among)
        candidates = [i for i in indices if i not in needed]
        if not candidates:
            raise InvalidInputError(
                f"None of the {len(indices)} candidates can be removed: each is the only sample in a term of the "
                "problem. Name other indices, or leave `among` out."
            )
        scores = _score(solution, target, samples, candidates)
        return cls(solution, solution, target, targets, samples, sign, candidates, scores, [], [])

    @property
    def value(self) -> float:
        """The target at the solution without the set."""
        return self._value_at(self.at.theta)

    def _value_at(self, theta: Tensor) -> float:
        return float(self.targets.values(theta)[0])

    def reaches(self, goal: float, value: float) -> bool:
        """Return whether a value is at the goal, up to the accuracy of a solution, or beyond it."""
        return self.sign * (value - goal) <= 1e-9 * max(abs(value), abs(goal))

    def rank(self, count: int) -> list[int]:
        """Return the strongest candidates at the solution without the set, only those that help."""
        scores = {i: self.first_scores[i] for i in self.candidates if i in self.first_scores}
        if self.chosen:
            excluded = {*self.chosen, *find_indispensable(self.at.problem, self.samples)}
            remaining = [i for i in self.candidates if i not in excluded]
            if not remaining:
                return []
            scores = _score(self.at, self.target, self.samples, remaining)
        order = sorted(scores, key=lambda i: self.sign * scores[i])[:count]
        return [i for i in order if self.sign * scores[i] < 0]

    def extend(self, count: int) -> bool:
        """Remove the strongest candidates and follow the solution; return False where no removal helps."""
        for _ in range(_PATIENCE):
            best = self.rank(count)
            if not best:
                return False
            try:
                end = PathInfluence(self.at).follow(self.samples.remove(best)).end
            except NotConvergedError:  # no solution without them was found
                end = None
            if end is not None and self.sign * (self._value_at(end.theta) - self.value) < 0:
                self.chosen += best
                problem = self.start_solution.problem.after(self.samples.remove(self.chosen))
                program = Program.of(problem, self.start_solution.program.parameters, end.theta)
                self.at = Solution.of_program(program, end.theta, end.lam)
                self.followed.append(self.value)
                return True
            self.candidates = [i for i in self.candidates if i not in best]
        return False

    def prune(self, goal: float, report: Reporter) -> None:
        """Put back the samples that are not needed to reach the goal, the weakest first."""
        for i in sorted(self.chosen, key=lambda i: abs(self.first_scores[i])):
            fewer = [j for j in self.chosen if j != i]
            if not fewer:
                return
            report(len(self.chosen), "(putting back)")
            problem = self.start_solution.problem.after(self.samples.remove(fewer))
            try:
                solution = fit(problem, self.at.params, multipliers=self.at.lam, show_progress=False)
            except DifError:  # the problem with that sample cannot be solved, so it stays removed
                continue
            if solution.converged and self.reaches(goal, self._value_at(solution.theta)):
                self.chosen, self.at = fewer, solution

    def verify(self, goal: float | None) -> Choice:
        """Solve the problem without the set, from where the choice arrived."""
        solution = self.start_solution
        if self.chosen:
            problem = self.start_solution.problem.after(self.samples.remove(self.chosen))
            solution = fit(problem, self.at.params, multipliers=self.at.lam, show_progress=False)
            solution.check()
        before, after = self._value_at(self.start_solution.theta), self._value_at(solution.theta)
        predicted = before + sum(self.first_scores[i] for i in self.chosen)
        reached = None if goal is None else self.reaches(goal, after)
        return Choice(
            tuple(self.chosen), self.targets.names[0], before, predicted, tuple(self.followed), after, solution, reached
        )
