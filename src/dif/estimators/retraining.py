"""The ground truth: the changed problem is solved again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.fingerprint import hash_all, hash_direction
from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.errors import DifError, NotConvergedError
from dif.estimators.protocol import Out, Scored, chunk_size, differences, fill_scores, resolve
from dif.optimality.solution import Solution, expect_solution
from dif.problem.perturbation import Perturbation
from dif.problem.samples import PLAIN_ATTENTION
from dif.results.change import Change
from dif.results.influence import Influence
from dif.runtime.archive import read_archive, write_archive
from dif.runtime.guard import is_unsupported
from dif.runtime.inputs import expect_folder
from dif.runtime.work import Limits, check_jobs, run_unordered
from dif.solving.batched_newton import BatchedNewton, programs_at_once
from dif.solving.fit import FitState, Found, check_limits, resolve_tolerance, solve
from dif.training.adjoint import rerun, runs_at_once
from dif.training.run import Run

_KIND = "retrainings"  # of file


@dataclass(frozen=True, eq=False)
class RetrainingCache:
    """A folder with one file (npz, no pickle) per chunk of retrainings: θ, λ and residuals, for any target.

    The key of a retraining is a hash of the solution, its problem, the tolerance and the perturbation. A chunk that was
    solved together is written to one file, complete or not at all. Where some of a chunk need further stages, the
    others are written before that. Retrainings that did not reach the tolerance are kept as warm starts. Resumed work
    equals uninterrupted work to rounding, which depends on what is solved together.
    """

    folder: Path
    solution: Solution
    tol: float

    @classmethod
    def open(cls, folder: str | os.PathLike[str], solution: Solution, tol: float) -> RetrainingCache:
        """Open the cache in a folder, which is created if it is missing."""
        return cls(expect_folder(folder, "keep"), solution, tol)

    def load(self, direction: Direction) -> dict[int, Found]:
        """Return the cached retrainings of these perturbations by their number, finished or not."""
        found: dict[str, Found] = {}
        paths = sorted(self.folder.glob(f"{'[0-9a-f]' * 32}*.npz"))  # not files of others
        keys = [self._key(direction, p) for p in range(direction.P)] if paths else []
        wanted = set(keys)
        for path in paths:
            arrays, about = read_archive(path, _KIND, "Delete the file; its retrainings are then solved again.")
            for row in [row for row, key in enumerate(about["names"]) if key in wanted]:
                theta, lam = (torch.from_numpy(arrays[part][row].copy()) for part in ("theta", "lam"))
                numbers = (about[name][row] for name in ("residual", "goal", "iterations"))
                end = Found(theta.to(self.solution.theta), lam.to(self.solution.lam), *numbers)
                other = found.setdefault(about["names"][row], end)
                found[about["names"][row]] = min(other, end, key=lambda one: one.residual / one.goal)
        return {p: found[key] for p, key in enumerate(keys) if key in found}

    def save(self, direction: Direction, numbers: Sequence[int], ends: Sequence[Found]) -> None:
        """Write the retrainings of the perturbations with these numbers to one file, all or none."""
        about = {
            "names": [self._key(direction, p) for p in numbers],
            "perturbations": [direction.perturbation[p].labels[0] for p in numbers],
            "residual": [end.residual for end in ends],
            "goal": [end.goal for end in ends],
            "iterations": [end.iterations for end in ends],
        }
        arrays = {part: torch.stack([getattr(end, part) for end in ends]) for part in ("theta", "lam")}
        suffix = "" if all(end.reached for end in ends) else "-unfinished"
        name = hash_all([" ".join(about["names"]).encode()]).hex()[:32]
        write_archive(self.folder / f"{name}{suffix}.npz", _KIND, arrays, about)

    def _key(self, direction: Direction, p: int) -> str:
        """Hash everything that the retraining of perturbation p depends on."""
        about = f"{self.tol!r} {direction.perturbation[p].labels}"
        return hash_all((about.encode(), self._identity, *hash_direction(direction[p : p + 1]))).hex()[:32]

    @cached_property
    def _identity(self) -> bytes:
        return self.solution.identity


_CACHED_CHUNK = 16  # retrainings in a chunk at most, where finished chunks are written to the cache

Outcome = tuple[Found, DifError | None]  # where a solve ended, and why it failed (None: it did not)


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
    ) -> None:
        self._run = solution if isinstance(solution, Run) else None
        solution = solution.point if isinstance(solution, Run) else expect_solution(solution)
        self.solution = solution
        self.tol = resolve_tolerance(tol, solution.theta)
        check_limits(max_iter, None)
        self.max_iter = max_iter
        self.strict = strict
        if strict and self._run is None:
            solution.check(minimum=True)  # else retraining may end at another solution of the same problem
        self._cache = None if keep is None else RetrainingCache.open(keep, solution, self.tol)
        self._batched: BatchedNewton | None = None
        self._diagnostics = {"kkt": solution.kkt.parts, "tol": self.tol, "strict": strict}

    def change(self, perturbation: Perturbation) -> Change:
        """Return Δθ and Δλ of one perturbation, by solving the changed problem."""
        at = self.solution
        ((end, failure),) = self._retrain(Direction.resolve_single(at.program, perturbation))
        dtheta, dlam = end.theta - at.theta, end.lam - at.lam
        if failure is not None:
            dtheta, dlam = torch.full_like(dtheta, float("nan")), torch.full_like(dlam, float("nan"))
        reason = None if failure is None else str(failure)
        about = {"residual": end.residual, "iterations": end.iterations, "failed": reason}
        return Change.of(at.program, dtheta, dlam, self._diagnostics | about)

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1, show_progress: bool = True
    ) -> Influence:
        """Return the actual difference of each target after retraining. Keywords as in `dif.Estimator`."""
        at, targets, jobs = self.solution, Targets(target, self.solution), check_jobs(jobs)
        direction, reasons = resolve(at.program, perturbations)

        def score(begin: int) -> Iterator[Scored]:
            remaining = direction[begin:]
            labels = remaining.perturbation.labels
            for label, (end, failure) in zip(labels, self._retrain(remaining, jobs), strict=True):
                move = end.theta - at.theta if failure is None else torch.full_like(at.theta, float("nan"))
                failed = {} if failure is None else {label: str(failure)}
                yield differences(at, targets, [move]), {"residuals": [end.residual], "failed": failed}

        influence = fill_scores(
            self, at, targets, direction, score, self._diagnostics, out=out, show_progress=show_progress,
            given=perturbations, reasons=reasons,
        )  # fmt: skip
        return influence if self._run is None else replace(influence, origin=None)  # the end of a run solves nothing

    def _retrain(self, direction: Direction, jobs: int = 1) -> Iterator[Outcome]:
        """Solve each changed problem and yield where it ended, in order. With strict, failures are raised."""
        cached = {} if self._cache is None else self._cache.load(direction)
        if self._run is not None:
            yield from self._train_again(self._run, direction, cached)
            return
        outcomes: dict[int, Outcome] = {p: (end, None) for p, end in cached.items() if end.reached}
        if len(outcomes) < direction.P and self._batched is None:
            with suppress(DifError):  # where the curvature at the solution does not allow it
                self._batched = BatchedNewton(self.solution)
        size = programs_at_once(self.solution)
        size = size if self._cache is None else min(size, _CACHED_CHUNK)
        size = size if jobs == 1 else chunk_size(direction.P, size, jobs)
        tasks: list[tuple[list[int], Found | None]] = []
        for begin in range(0, direction.P, size):  # whatever is cached: rounding depends on what is solved together
            numbers = [p for p in range(begin, min(begin + size, direction.P)) if p not in cached]
            tasks += [(numbers, None)] if numbers else []
        tasks += [([p], end) for p, end in cached.items() if not end.reached]
        ready = run_unordered(self._solve_task, [(direction.pick(numbers), end) for numbers, end in tasks], jobs)
        for p in range(direction.P):
            while p not in outcomes:
                number, solved = next(ready)
                outcomes |= dict(zip(tasks[number][0], solved, strict=True))
            yield outcomes.pop(p)

    def _train_again(self, run: Run, direction: Direction, cached: dict[int, Found]) -> Iterator[Outcome]:
        """Train on the changed data and yield where each training ended, in order; finished chunks are cached."""
        size = runs_at_once(run) if self._cache is None else min(runs_at_once(run), _CACHED_CHUNK)
        for begin in range(0, direction.P, size):
            numbers = range(begin, min(begin + size, direction.P))
            if not all(p in cached for p in numbers):
                chunk = direction[begin : numbers.stop]
                ((thetas, lams),) = rerun(run, chunk)
                ends = [Found(theta, lam, residual=0.0, goal=1.0) for theta, lam in zip(thetas, lams, strict=True)]
                cached |= dict(zip(numbers, ends, strict=True))
                if self._cache is not None:
                    self._cache.save(chunk, range(chunk.P), ends)
            for p in numbers:
                diverged = not bool(torch.isfinite(cached[p].theta).all())
                failure = _divergence_error(direction.perturbation[p]) if diverged else None
                if failure is not None and self.strict:
                    raise failure
                yield cached[p], failure

    def _solve_task(self, task: tuple[Direction, Found | None]) -> list[Outcome]:
        """Solve a chunk of perturbations, or a single one from where an earlier run stopped."""
        direction, start = task
        return self.solve_together(direction) if start is None else [self._solve_single(direction, 0, start)]

    def solve_together(self, direction: Direction) -> list[Outcome]:
        """Solve the problems after these perturbations together, and write them to the cache."""
        at = self.solution
        # refuses samples without a derivative
        changes = [direction.first_order(p, at.theta, at.parts, at.part_gradients)[0] for p in range(direction.P)]
        ends, worse = [Found(at.theta, at.lam)] * direction.P, [False] * direction.P
        for ends, worse in self._solve_batched(direction, at.f + torch.stack(changes)):
            solved = [p for p, end in enumerate(ends) if end.reached and not worse[p]]
            self._keep(direction, solved, ends)  # the others may take much longer
            if len(solved) == direction.P:
                break
        begun = [p for p, end in enumerate(ends) if not end.reached and end.residual < float("inf")]
        self._keep(direction, begun, ends)  # a later call continues from there
        return [self._complete(direction, p, end, worse[p]) for p, end in enumerate(ends)]

    def _complete(self, direction: Direction, p: int, end: Found, worse: bool) -> Outcome:
        """Solve problem p by itself unless `end` is its solution; from θ̄ if `end` is worse, and keep the better one."""
        if not end.reached:
            return self._solve_single(direction, p, end)
        if worse:
            at, rows = self.solution, direction.perturbed_program(p).rows
            with suppress(DifError):
                other, failure = self._solve_single(direction, p, Found(at.theta, at.lam))
                if failure is None and rows.values(other.theta)[0] < rows.values(end.theta)[0]:
                    return other, None
            self._keep(direction, [p], {p: end})
        return end, None

    def _keep(self, direction: Direction, numbers: Sequence[int], ends: Mapping[int, Found] | Sequence[Found]) -> None:
        """Write the retrainings with these numbers to the cache, if there is one."""
        if self._cache is not None and numbers:
            self._cache.save(direction, numbers, [ends[p] for p in numbers])

    def _solve_batched(self, direction: Direction, before: Tensor) -> Iterator[tuple[list[Found], list[bool]]]:
        """Run Newton's method on all problems at once; yield where they are after each stage of the solver.

        With them comes which of them are solved at a worse point than θ̄, where the rows of the problems are `before`,
        (P, 1 + m). Yields nothing where the model cannot be mapped over parameters.
        """
        at, batched = self.solution, self._batched
        if batched is None or at.program.rows.fallbacks - {PLAIN_ATTENTION}:
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
        end, failure = Found(start.theta, start.lam, float("nan")), None
        try:
            point = FitState(start.theta, start.lam)
            end = solve(direction.perturbed_program(p), point, Limits(self.max_iter), tol=self.tol)
        except DifError as error:
            failure = error
        else:
            if not end.reached:
                failure = NotConvergedError(
                    f"Retraining after {direction.perturbation[p].labels[0]!r} stopped at a KKT residual of "
                    f"{end.residual:.3g}.",
                    f"It must be at most {self.tol:.1g}.",
                    "The changed problem was not solved, so its difference from the old solution means nothing.",
                    "Raise max_iter, add a ridge, or perturb less.",
                )
        end.iterations += start.iterations
        if failure is None:
            self._keep(direction, [p], {p: end})
        elif self.strict:
            raise failure
        return end, failure


def _divergence_error(perturbation: Perturbation) -> NotConvergedError:
    return NotConvergedError(
        f"The training became NaN or infinite after {perturbation.labels[0]!r}.",
        "It must stay finite.",
        "The same training on the changed data diverges, so there is no difference to report.",
        "Use a smaller learning rate, or strict=False to record NaN.",
    )
