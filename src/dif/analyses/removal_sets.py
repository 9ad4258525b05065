"""Which samples to remove: sets chosen one by one, each choice at the solution that the others left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from dif.errors import DifError, InvalidInputError, NotConvergedError
from dif.estimators.directional import DirectionalInfluence
from dif.estimators.path import PathInfluence
from dif.evaluation.program import Program
from dif.evaluation.weight_change import indispensable
from dif.optimality.solution import Solution, expect_solution
from dif.optimality.targets import Targets
from dif.problem.samples import Samples
from dif.runtime.inputs import as_index, as_numbers
from dif.runtime.progress import Reporter, progress
from dif.solving.fit import fit

_PATIENCE = 5  # rounds in a row that may fail before it is said that nothing helps


@dataclass(frozen=True, eq=False)
class Choice:
    """Samples to remove, and what training without them says."""

    indices: tuple[int, ...]  # in the order in which they were chosen
    target: str
    before: float  # the target as it is
    predicted: float  # without them, as the sum of first-order scores at the start has it
    followed: tuple[float, ...]  # after each round of removals, at the solution that was followed; empty for a ranking
    verified: float  # at the solution of the problem without them, solved on its own
    solution: Solution  # that one, certified
    reached: bool | None  # whether the goal was reached, where there was one

    def __str__(self) -> str:
        return f"without {len(self.indices)} samples: {self.target} {self.before:.6g} → {self.verified:.6g} (retrained)"


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
    """The samples whose removal lowers (or raises) a target most, the constraints kept.

    Greedy: the strongest sample is removed, the solution followed to the problem without it, all scores are taken anew
    there, and so on. A round that makes the target worse is taken back, and the next strongest are tried. It ends early
    where no removal helps any more. With `greedy=False` the first-order
    ranking at the start is taken as it is. The problem without the set is then solved on its own, by `fit` from the old
    parameters (where it is not convex, other starts may end elsewhere): `Choice.verified`.

    Args:
        solution: A certified solution.
        target: A Term.
        samples: The Samples to remove from.
        count: How many at most.
        lower: Lower the target; False raises it.
        among: Indices that may be removed (None: all).
        greedy: Take scores anew after each round.
        per_round: How many are removed before scores are taken anew.
        show_progress: Show a bar on a terminal.
    """
    chooser = _Chooser.of(solution, target, samples, 1.0 if lower else -1.0, among)
    number, together = _counts("choose(count, per_round)", count, per_round)
    if greedy:
        with progress("choosing", number, show_progress) as report:
            while len(chooser.chosen) < number and chooser.round(min(together, number - len(chooser.chosen))):
                report(len(chooser.chosen))
    else:
        chooser.chosen = chooser.best(number)
    return chooser.verified(None)


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
    """A set, as small as it is found, whose removal brings a target to a goal: a margin to 0, a gap to what is wanted.

    Samples are chosen greedily until the goal is reached; then each that can stay without losing the goal is given
    back. No single one of those left can be spared; that no other set is smaller is not proven. `Choice.reached` says
    whether the goal was reached within the limit, `Choice.verified` where training without the set ends.

    Args:
        solution: A certified solution.
        target: A Term, now above the goal or below it.
        samples: The Samples to remove from.
        goal: Value of the target to reach.
        limit: How many may be removed.
        among: Indices that may be removed (None: all).
        per_round: How many are removed before scores are taken anew.
        show_progress: Show a bar on a terminal.
    """
    wanted = float(as_numbers(goal, "goal").reshape(()))
    most, together = _counts("smallest_set(limit, per_round)", limit, per_round)
    chooser = _Chooser.of(solution, target, samples, 1.0, among)
    chooser.sign = 1.0 if chooser.value > wanted else -1.0
    with progress("choosing", most, show_progress) as report:
        while len(chooser.chosen) < most and not chooser.beyond(wanted, chooser.value):
            if not chooser.round(min(together, most - len(chooser.chosen))):
                break
            report(len(chooser.chosen))
        if chooser.beyond(wanted, chooser.value):
            chooser.spare(wanted, report)
    return chooser.verified(wanted)


def _counts(what: str, limit: int, per_round: int) -> tuple[int, int]:
    most, together = as_index(limit), as_index(per_round)
    if most is None or most < 1 or together is None or together < 1:
        raise InvalidInputError(
            what,
            measured=f"{limit}, {per_round}",
            threshold="integers ≥ 1",
            meaning="So many samples are chosen at most, so many at a time.",
            cure="Use per_round=1 for the most careful choice.",
        )
    return most, together


def _scored(at: Solution, target: Any, samples: Samples, indices: list[int]) -> dict[int, float]:
    """The score of each sample without which there still is a solution, as far as one step can tell."""
    found = DirectionalInfluence(at).scores(target, samples.remove_each(indices), show_progress=False, assess=0)
    values = zip(indices, found.values[:, 0].tolist(), strict=True)
    return {i: value for i, value in values if isfinite(value)}


@dataclass
class _Chooser:
    """A set that grows, and the solution without it."""

    start: Solution
    at: Solution
    target: Any
    targets: Targets
    samples: Samples
    sign: float  # +1: lower is better
    candidates: list[int]
    first: dict[int, float]  # scores at the start
    chosen: list[int]
    followed: list[float]

    @classmethod
    def of(cls, solution: Solution, target: Any, samples: Samples, sign: float, among: Any) -> _Chooser:
        """Nothing chosen yet."""
        targets = Targets(target, expect_solution(solution))
        if len(targets.names) != 1:
            raise InvalidInputError(
                "targets to choose samples for",
                measured=len(targets.names),
                threshold="1",
                meaning="A set is chosen for one number.",
                cure="Add them up with weights of your choice: a sum of Terms is a Term.",
            )
        needed = indispensable(solution.program, samples)
        every = range(len(samples)) if among is None else samples.checked(among)
        candidates = [i for i in every if i not in needed]
        if not candidates:
            raise InvalidInputError(
                "samples that may be removed",
                measured=0,
                threshold="at least 1",
                meaning="Each of them is alone in a term of the problem, which would not be defined without it.",
                cure="Name others, or leave among= out.",
            )
        first = _scored(solution, target, samples, candidates)
        return cls(solution, solution, target, targets, samples, sign, candidates, first, [], [])

    @property
    def value(self) -> float:
        """The target at the solution without the set."""
        return float(self.targets.values(self.at.theta)[0])

    def beyond(self, goal: float, value: float) -> bool:
        """Whether a value is at the goal or past it."""
        return self.sign * (value - goal) <= 0

    def best(self, count: int) -> list[int]:
        """The strongest candidates at the solution without the set, as far as they help."""
        scores = {i: self.first[i] for i in self.candidates if i in self.first}
        if self.chosen:
            out = {*self.chosen, *indispensable(self.at.program, self.samples)}
            left = [i for i in self.candidates if i not in out]
            if not left:
                return []
            scores = _scored(self.at, self.target, self.samples, left)
        order = sorted(scores, key=lambda i: self.sign * scores[i])[:count]
        return [i for i in order if self.sign * scores[i] < 0]

    def round(self, count: int) -> bool:
        """Remove the strongest, follow the solution; False where nothing helps any more."""
        for _ in range(_PATIENCE):
            best = self.best(count)
            if not best:
                return False
            try:
                end = PathInfluence(self.at).follow(self.samples.remove(best)).end
            except NotConvergedError:  # the solution cannot do without them
                end = None
            if end is not None and self.sign * (float(self.targets.values(end.theta)[0]) - self.value) < 0:
                self.chosen += best
                self.at = self._without(self.chosen, end.theta, end.lam)
                self.followed.append(self.value)
                return True
            self.candidates = [i for i in self.candidates if i not in best]
        return False

    def spare(self, goal: float, report: Reporter) -> None:
        """Give back what the goal does not need, the weakest first."""
        for i in sorted(self.chosen, key=lambda i: abs(self.first[i])):
            fewer = [j for j in self.chosen if j != i]
            if not fewer:
                return
            report(len(self.chosen), "(sparing)")
            problem = self.start.problem.without(self.samples, fewer)
            try:
                found = fit(problem, self.at.params, multipliers=self.at.lam, show_progress=False)
            except DifError:  # it cannot be solved with that one back: the set stays as it is
                continue
            if found.converged and self.beyond(goal, float(self.targets.values(found.theta)[0])):
                self.chosen, self.at = fewer, found

    def _without(self, indices: list[int], theta: Tensor, lam: Tensor) -> Solution:
        problem = self.start.problem.without(self.samples, indices)
        return Solution.of_program(Program.of(problem, self.start.program.parameters, theta), theta, lam)

    def verified(self, goal: float | None) -> Choice:
        """Solve the problem without the set, from the first solution."""
        if not self.chosen:
            found = self.start
        else:
            problem = self.start.problem.without(self.samples, self.chosen)
            found = fit(problem, self.start.params, show_progress=False)
            found.check()
        before, after = (float(self.targets.values(s.theta)[0]) for s in (self.start, found))
        return Choice(
            tuple(self.chosen), self.targets.names[0], before, before + sum(self.first[i] for i in self.chosen),
            tuple(self.followed), after, found, None if goal is None else self.beyond(goal, after),
        )  # fmt: skip
