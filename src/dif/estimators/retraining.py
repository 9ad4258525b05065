"""The ground truth: the changed problem is solved again."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.weight_change import Direction
from dif.errors import DifError, NotConvergedError
from dif.estimators.change import Change
from dif.estimators.first_order import describe_residuals
from dif.estimators.influence import Influence
from dif.estimators.rerun import rerun, runs_at_once
from dif.estimators.retraining_cache import RetrainingCache
from dif.estimators.scoring import Out, ScoredChunk, Scoring, chunk_size, differences
from dif.optimality.solution import Solution, expect_solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.problem.sample_losses import HARMLESS
from dif.runtime.limits import Limits
from dif.runtime.user_code import is_unsupported
from dif.runtime.workers import check_jobs, run_unordered
from dif.solving.batched_newton import BatchedNewton, programs_at_once
from dif.solving.checkpoint import FitState
from dif.solving.fit import Found, check_limits, resolve_tolerance, solve
from dif.solving.run import Run

_CACHED_CHUNK = 16  # retrainings in a chunk at most, where finished chunks are written to the cache

Outcome = tuple[Found | None, DifError | None]  # where a solve ended, and why it failed (None: it did not)


class Retraining:
    """Solves each changed problem from θ̄, λ̄ to the same tolerance as `fit`, and reports the residual.

    Of a training run it makes the same training again on the changed data: same start, same batches, many at once.

    Where the model can be mapped over parameters, many are solved at once by Newton steps that use the curvature at θ̄
    as preconditioner. Those that do not converge are solved one by one as in `fit`, from where they stopped.

    Args:
        solution: Warm start; it should be a solution, so that the perturbation alone explains the difference. Or a
            `dif.Run`; then `tol` and `max_iter` do not matter.
        tol: Relative KKT residual to reach (None: 1e-10 in float64, 1e-5 in float32).
        max_iter: Limit on the iterations per perturbation.
        strict: Raise where the point is not a solution, or a retraining fails; False records it and gives NaN.
        keep: Folder for finished retrainings. Those found there are not solved again, so interrupted runs resume.
        jobs: Default of `scores`.
        show_progress: Default of `scores`.
    """

    name = "retraining"

    def __init__(
        self,
        solution: Solution | Run,
        *,
        tol: float | None = None,
        max_iter: int = 20_000,
        strict: bool = True,
        keep: str | os.PathLike[str] | None = None,
        jobs: int = 1,
        show_progress: bool = True,
    ) -> None:
        self._run = solution if isinstance(solution, Run) else None
        solution = solution.point if isinstance(solution, Run) else expect_solution(solution)
        self.solution = solution
        self.tol = resolve_tolerance(tol, solution.theta)
        check_limits(max_iter, None)
        self.max_iter = max_iter
        self.jobs = check_jobs(jobs)
        self.strict = strict
        self.show_progress = show_progress
        if strict and self._run is None:
            solution.check()
            solution.active.strict_minimum().check()  # else retraining may end at another solution of the same problem
        self._cache = None if keep is None else RetrainingCache.open(keep, solution, self.tol)
        self._batched: BatchedNewton | None = None
        self._diagnostics = {"kkt": describe_residuals(solution), "tol": self.tol, "strict": strict}

    def change(self, perturbation: Perturbation) -> Change:
        """Return Δθ and Δλ of one perturbation, by solving the changed problem."""
        at = self.solution
        Direction.resolve_single(at.program, perturbation)  # refuses more than one
        ((end, failure),) = self._retrain(perturbation)
        nan = float("nan")
        dtheta = torch.full_like(at.theta, nan) if failure or end is None else end.theta - at.theta
        dlam = torch.full_like(at.lam, nan) if failure or end is None else end.lam - at.lam
        diagnostics = {
            **self._diagnostics,
            "residual": nan if end is None else end.residual,
            "iterations": None if end is None else end.iterations,
            "failed": None if failure is None else str(failure),
        }
        return Change.of(at.program, dtheta, dlam, diagnostics)

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int | None = None,
        show_progress: bool | None = None,
    ) -> Influence:  # fmt: skip
        """Return the actual difference of each target after retraining. Keywords as in `dif.Estimator`."""
        at, shown = self.solution, self.show_progress if show_progress is None else show_progress
        targets, jobs = Targets(target, at), self.jobs if jobs is None else check_jobs(jobs)

        def score(begin: int) -> Iterator[ScoredChunk]:
            remaining = perturbations[begin:]
            for perturbation, (end, failure) in zip(remaining, self._retrain(remaining, jobs), strict=True):
                solved = None if failure is not None else end
                move = torch.full_like(at.theta, float("nan")) if solved is None else solved.theta - at.theta
                about = {
                    "residuals": [float("nan") if end is None else end.residual],
                    "failed": {perturbation.labels[0]: str(failure)} if solved is None else {},
                }
                yield ScoredChunk(differences(at, targets, [move]), about)

        scoring = Scoring(self.name, at, targets, perturbations, self._diagnostics, out, shown)
        scoring.check()
        influence = scoring.run(score, 1)
        return influence if self._run is None else replace(influence, origin=None)  # the end of a run solves nothing

    def _retrain(self, perturbations: Perturbation, jobs: int = 1) -> Iterator[Outcome]:
        """Solve each changed problem and yield where it ended, in order. With strict, failures are raised."""
        cached = {} if self._cache is None else self._cache.load(perturbations)
        if self._run is not None:
            yield from self._train_again(self._run, perturbations, cached)
            return
        outcomes: dict[int, Outcome] = {p: (end, None) for p, end in cached.items() if end.reached}
        unfinished = [([p], perturbations[p], end) for p, end in cached.items() if not end.reached]
        if len(outcomes) < len(perturbations) and self._batched is None:
            with suppress(DifError):  # where the curvature at the solution does not allow it
                self._batched = BatchedNewton(self.solution)
        tasks = [*self._split(perturbations, cached, jobs), *unfinished]
        ready = run_unordered(self._solve_task, [task[1:] for task in tasks], jobs)
        for p in range(len(perturbations)):
            while p not in outcomes:
                number, solved = next(ready)
                outcomes |= dict(zip(tasks[number][0], solved, strict=True))
            yield outcomes.pop(p)

    def _split(
        self, perturbations: Perturbation, cached: Container[int], jobs: int
    ) -> Iterator[tuple[list[int], Perturbation, None]]:
        """Yield chunks of the perturbations that are not cached: their numbers and themselves.

        Chunk boundaries do not depend on the cache, since rounding depends on which problems are solved together.
        """
        size = programs_at_once(self.solution)
        size = size if self._cache is None else min(size, _CACHED_CHUNK)
        size = chunk_size(len(perturbations), size, jobs)
        for begin in range(0, len(perturbations), size):
            chunk = range(begin, min(begin + size, len(perturbations)))
            for is_cached, group in groupby(chunk, lambda p: p in cached):
                if not is_cached:
                    numbers = list(group)  # consecutive
                    yield numbers, perturbations[numbers[0] : numbers[-1] + 1], None

    def _train_again(self, run: Run, perturbations: Perturbation, cached: dict[int, Found]) -> Iterator[Outcome]:
        """Train on the changed data and yield where each training ended, in order; finished chunks are cached."""
        size = runs_at_once(run) if self._cache is None else min(runs_at_once(run), _CACHED_CHUNK)
        for begin in range(0, len(perturbations), size):
            numbers = range(begin, min(begin + size, len(perturbations)))
            if not all(p in cached for p in numbers):
                chunk = perturbations[begin : numbers.stop]
                ((thetas, lams),) = rerun(run, chunk)
                ends = [Found(theta, lam, residual=0.0, goal=1.0) for theta, lam in zip(thetas, lams, strict=True)]
                cached |= dict(zip(numbers, ends, strict=True))
                if self._cache is not None:
                    self._cache.save(Direction(self.solution.program, chunk), range(len(chunk)), ends)
            for p in numbers:
                failure = None if bool(torch.isfinite(cached[p].theta).all()) else _divergence_error(perturbations[p])
                if failure is not None and self.strict:
                    raise failure
                yield cached[p], failure

    def _solve_task(self, task: tuple[Perturbation, Found | None]) -> list[Outcome]:
        """Solve a chunk of perturbations, or a single one from where an earlier run stopped."""
        chunk, start = task
        direction = Direction(self.solution.program, chunk)
        return self.solve_together(direction) if start is None else [self._solve_single(direction, 0, start)]

    def solve_together(self, direction: Direction) -> list[Outcome]:
        """Solve the problems after these perturbations together, and write them to the cache."""
        at = self.solution
        # refuses samples without a derivative
        changes = [direction.first_order(p, at.theta, at.parts, at.part_gradients)[0] for p in range(direction.P)]
        ends, worse = [Found(at.theta, at.lam)] * direction.P, [False] * direction.P
        for ends, worse in self._solve_batched(direction, at.f + torch.stack(changes)):
            solved = [p for p, end in enumerate(ends) if end.reached and not worse[p]]
            if self._cache is not None and solved:  # the others may take much longer
                self._cache.save(direction, solved, [ends[p] for p in solved])
            if len(solved) == direction.P:
                break
        begun = [p for p, end in enumerate(ends) if not end.reached and end.residual < float("inf")]
        if self._cache is not None and begun:  # a later call continues from there
            self._cache.save(direction, begun, [ends[p] for p in begun])
        return [self._complete(direction, p, end, worse[p]) for p, end in enumerate(ends)]

    def _complete(self, direction: Direction, p: int, end: Found, worse: bool) -> Outcome:
        """Solve problem p by itself unless `end` is its solution; from θ̄ if `end` is worse, and keep the better one."""
        if not end.reached:
            return self._solve_single(direction, p, end)
        if worse:
            at, rows = self.solution, direction.perturbed_program(p).rows
            with suppress(DifError):
                other, failure = self._solve_single(direction, p, Found(at.theta, at.lam))
                if failure is None and other is not None and rows.values(other.theta)[0] < rows.values(end.theta)[0]:
                    return other, None
            if self._cache is not None:
                self._cache.save(direction, [p], [end])
        return end, None

    def _solve_batched(self, direction: Direction, before: Tensor) -> Iterator[tuple[list[Found], list[bool]]]:
        """Run Newton's method on all problems at once; yield where they are after each stage of the solver.

        With them comes which of them are solved at a worse point than θ̄, where the rows of the problems are `before`,
        (P, 1 + m). Yields nothing where the model cannot be mapped over parameters.
        """
        at, batched = self.solution, self._batched
        if batched is None or at.program.rows.fallbacks - HARMLESS:
            return
        partly = lambda share: Direction(at.program, share * direction.perturbation).stack_programs()  # noqa: E731
        try:
            stack = direction.stack_programs()
            for ends in batched.solve(stack, self.tol, self.max_iter, partly):
                numbers = zip(ends.residual.tolist(), ends.goal.tolist(), ends.steps.tolist(), strict=True)
                found = [Found(ends.theta[p].clone(), ends.lam[p].clone(), *n) for p, n in enumerate(numbers)]
                yield found, batched.find_worse(stack, ends, before).tolist()
        except Exception as error:
            if not is_unsupported(error):
                raise

    def _solve_single(self, direction: Direction, p: int, start: Found) -> Outcome:
        """Solve the problem after perturbation p as `fit` does, from a warm start."""
        end, failure = None, None
        try:
            point = FitState(start.theta, start.lam)
            end = solve(direction.perturbed_program(p), point, Limits(self.max_iter), tol=self.tol)
            if not end.reached:
                failure = NotConvergedError(
                    f"Retraining after {direction.perturbation[p].labels[0]!r} stopped at a KKT residual of "
                    f"{end.residual:.3g}.",
                    f"It must be at most {self.tol:.1g}.",
                    "The changed problem was not solved, so its difference from the old solution means nothing.",
                    "Raise max_iter, add a ridge, or perturb less.",
                )
        except DifError as error:
            failure = error
        if end is not None:
            end.iterations += start.iterations
            if failure is None and self._cache is not None:
                self._cache.save(direction, [p], [end])
        if failure is not None and self.strict:
            raise failure
        return end, failure


def _divergence_error(perturbation: Perturbation) -> NotConvergedError:
    return NotConvergedError(
        f"The training became NaN or infinite after {perturbation.labels[0]!r}.",
        "It must stay finite.",
        "The same training on the changed data diverges, so there is no difference to report.",
        "Use a smaller learning rate, or strict=False to record NaN.",
    )
