"""The ground truth: the changed problem solved again."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from typing import Any

import torch

from dif.errors import DifError, NotConvergedError
from dif.estimators.first_order import trust
from dif.estimators.influence import Change, Influence
from dif.estimators.retraining_cache import Kept
from dif.estimators.scoring import Out, ScoredChunk, Scoring, chunk_size, differences, join
from dif.evaluation.program import PerConstraint
from dif.evaluation.weight_change import Direction, chunks
from dif.optimality.solution import Solution, checked_tolerance, expect_solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.problem.sample_losses import PLAIN_ATTENTION
from dif.runtime.limits import Limits
from dif.runtime.user_code import unsupported
from dif.runtime.workers import checked_jobs, shared_out
from dif.solving.batched_newton import BatchedNewton, programs_at_once
from dif.solving.checkpoint import Standing
from dif.solving.fit import Found, check_limits, default_tolerance, solve

_KEPT = 16  # retrainings solved together where each is to be kept as soon as it is done

Outcome = tuple[Found | None, DifError | None]


class Retraining:
    """Solves each changed problem from θ̄, λ̄ to the same tolerance as `fit`, and keeps the residual as proof.

    Many are solved at once where the model can be mapped over parameters: by Newton steps that use the curvature
    prepared at θ̄ as a preconditioner. Those that resist go through `fit` one by one, from where they stopped.

    Args:
        solution: Where to start; should be a solution, so that the difference is the perturbation's.
        tol: Relative KKT residual to reach (None: 1e-10 in float64, 1e-5 in float32).
        max_iter: Limit per perturbation.
        strict: Raise where the point is not a solution, or a retraining fails; False records it and answers NaN.
        keep: A folder in which every finished retraining is kept at once; what is found there is not solved again.
        jobs: Default of `scores`.
        show_progress: Default of `scores`.
    """

    name = "retraining"

    def __init__(
        self,
        solution: Solution,
        *,
        tol: float | None = None,
        max_iter: int = 20_000,
        strict: bool = True,
        keep: str | os.PathLike[str] | None = None,
        jobs: int = 1,
        show_progress: bool = True,
    ) -> None:
        self.solution = expect_solution(solution)
        self.tol = default_tolerance(solution.theta) if tol is None else checked_tolerance(tol)
        check_limits(max_iter, None)
        self.max_iter = max_iter
        self.jobs = checked_jobs(jobs)
        self.strict = strict
        self.show_progress = show_progress
        if strict:
            solution.check()
            solution.active.strict_minimum().check()  # else retraining may end at another solution of the same problem
        self._kept = None if keep is None else Kept.at(keep, solution, self.tol)
        self._batched: BatchedNewton | None = None
        self._diagnostics = {"kkt": trust(solution)["kkt"], "tol": self.tol, "strict": strict}

    def change(self, perturbation: Perturbation) -> Change:
        """Δθ and Δλ of one perturbation, by solving the changed problem."""
        at = self.solution
        Direction.single(at.program, perturbation)  # refuses more than one
        ((found, failure),) = self._retrained(perturbation)
        nothing = float("nan")
        moved = torch.full_like(at.theta, nothing) if failure or found is None else found.theta - at.theta
        priced = torch.full_like(at.lam, nothing) if failure or found is None else found.lam - at.lam
        return Change(
            theta=at.program.parameters.tensors(moved),
            multipliers=PerConstraint.of(at.program, priced),
            flat=moved,
            diagnostics={
                **self._diagnostics,
                "residual": nothing if found is None else found.residual,
                "iterations": None if found is None else found.iterations,
                "failed": None if failure is None else str(failure),
            },
        )

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int | None = None,
        show_progress: bool | None = None,
    ) -> Influence:  # fmt: skip
        """The actual difference of each target after retraining; keywords as in `dif.Estimator`."""
        at, shown = self.solution, self.show_progress if show_progress is None else show_progress
        targets, jobs = Targets(target, at), self.jobs if jobs is None else checked_jobs(jobs)

        def score(begin: int) -> Iterator[ScoredChunk]:
            left = perturbations[begin:]
            for one, (found, failure) in zip(left, self._retrained(left, jobs), strict=True):
                solved = None if failure is not None else found
                move = torch.full_like(at.theta, float("nan")) if solved is None else solved.theta - at.theta
                about = {
                    "residuals": [float("nan") if found is None else found.residual],
                    "failed": {one.labels[0]: str(failure)} if solved is None else {},
                }
                yield ScoredChunk(differences(at, targets, [move]), about)

        def finish(influence: Influence, parts: list[dict[str, Any]]) -> None:
            for part in ("residuals", "failed"):
                influence.diagnostics[part] = join(parts, part)

        return Scoring(self.name, at, targets, perturbations, self._diagnostics, out, shown).run(score, 1, finish)

    def _retrained(self, perturbations: Perturbation, jobs: int = 1) -> Iterator[Outcome]:
        """Where each changed problem ended, in order; or why it did not. With strict, failures are raised."""
        known = self._found(perturbations)
        waiting: dict[int, Outcome] = {p: (found, None) for p, found in known.items() if found.reached}
        begun = {p: found for p, found in known.items() if not found.reached}
        if len(waiting) < len(perturbations) and self._batched is None:
            self._batched = self._prepared()
        pieces = list(self._pieces(perturbations, known, jobs)) + [
            ([p], perturbations[p], found) for p, found in begun.items()
        ]
        ready = shared_out(self._piece, [piece[1:] for piece in pieces], jobs)
        for p in range(len(perturbations)):
            while p not in waiting:
                number, outcomes = next(ready)
                waiting |= dict(zip(pieces[number][0], outcomes, strict=True))
            yield waiting.pop(p)

    def _found(self, perturbations: Perturbation) -> dict[int, Found]:
        """What is kept already, finished or not."""
        if self._kept is None:
            return {}
        known: dict[int, Found] = {}
        begin, places = 0, self._kept.places()
        for some in chunks(perturbations):
            direction = Direction(self.solution.program, some)
            known |= {begin + p: found for p, found in self._kept.load(direction, places).items()}
            begin += direction.P
        return known

    def _pieces(
        self, perturbations: Perturbation, known: Container[int], jobs: int
    ) -> Iterator[tuple[list[int], Perturbation, None]]:
        """What is still to be solved, as many at once as fit and as leave something for every job.

        Always the same together, whatever is known already: rounding depends on the company.
        """
        size = programs_at_once(self.solution)
        size = size if self._kept is None else min(size, _KEPT)
        size = chunk_size(len(perturbations), size, jobs)
        for begin in range(0, len(perturbations), size):
            missing = [p for p in range(begin, min(begin + size, len(perturbations))) if p not in known]
            end = 0
            while end < len(missing):  # in runs: a perturbation is sliced, not picked
                first = end
                end += 1
                while end < len(missing) and missing[end] == missing[end - 1] + 1:
                    end += 1
                yield missing[first:end], perturbations[missing[first] : missing[end - 1] + 1], None

    def _prepared(self) -> BatchedNewton | None:
        """What many are solved with; None where the solution has no curvature to start from."""
        try:
            return BatchedNewton(self.solution)
        except DifError:
            return None

    def _piece(self, piece: tuple[Perturbation, Found | None]) -> list[Outcome]:
        """Perturbations to be solved together; or one that an earlier run left unfinished."""
        some, begun = piece
        direction = Direction(self.solution.program, some)
        return self.solved(direction) if begun is None else [self._alone(direction, 0, begun)]

    def solved(self, direction: Direction) -> list[Outcome]:
        """Perturbations solved together, and kept."""
        at = self.solution
        for p in range(direction.P):
            direction.first_order(p, at.theta, at.p, at.Dp)  # refuses samples without a derivative
        ends = [Found(at.theta, at.lam)] * direction.P
        for ends in self._together(direction):
            if all(end.reached for end in ends):
                break
        if self._kept is not None and any(end.reached for end in ends):
            self._kept.save(direction, range(direction.P), ends)
        return [(end, None) if end.reached else self._alone(direction, p, end) for p, end in enumerate(ends)]

    def _together(self, direction: Direction) -> Iterator[list[Found]]:
        """Newton on all of them at once, where the model allows that: where they stand after each means tried."""
        at, batched = self.solution, self._batched
        if batched is None or any(table.samples.fallbacks - {PLAIN_ATTENTION} for table in at.program.rows.tables):
            return
        shared = lambda share: Direction(at.program, share * direction.perturbation).stacked()  # noqa: E731
        try:
            for ends in batched.solve(direction.stacked(), self.tol, self.max_iter, shared):
                numbers = zip(ends.residual.tolist(), ends.goal.tolist(), ends.steps.tolist(), strict=True)
                yield [Found(ends.theta[p].clone(), ends.lam[p].clone(), *n) for p, n in enumerate(numbers)]
        except Exception as error:
            if not unsupported(error):
                raise

    def _alone(self, direction: Direction, p: int, begun: Found) -> Outcome:
        """One problem, by all means of `fit`."""
        found, failure = None, None
        try:
            start = Standing(begun.theta, begun.lam)
            found = solve(direction.carried_out(p), start, Limits(self.max_iter), tol=self.tol)
            if not found.reached:
                failure = self._not_solved(direction.perturbation[p], found.residual)
        except DifError as error:
            failure = error
        if found is not None:
            found.iterations += begun.iterations
            if failure is None and self._kept is not None:
                self._kept.save(direction, [p], [found])
        if failure is not None and self.strict:
            raise failure
        return found, failure

    def _not_solved(self, perturbation: Perturbation, residual: float) -> NotConvergedError:
        return NotConvergedError(
            f"KKT residual after retraining ({perturbation.labels[0]})",
            measured=f"{residual:.3g}",
            threshold=f"{self.tol:.1g}",
            meaning="The changed problem was not solved, so its difference to the old solution means nothing.",
            cure="Raise max_iter, add a ridge, or perturb less.",
        )
