"""The solution path from the old problem to the changed one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.errors import DifError, InvalidInputError, few
from dif.estimators.protocol import Out, Scored, by_chunk, describe_solution, differences, fill_scores, resolve
from dif.optimality.kkt_system import KKTSystem
from dif.optimality.solution import Solution, expect_solution
from dif.problem.perturbation import Perturbation
from dif.results.change import Change
from dif.results.influence import Influence
from dif.runtime.inputs import as_numbers, check_count
from dif.solving.continuation import Path, PathFollower
from dif.solving.fit import resolve_tolerance


class PathInfluence:
    """Follows the solution θ(ε), λ(ε) from ε = 0 to 1, for perturbations of any size.

    The directional derivative predicts, Newton's method on the perturbed KKT system corrects, and each ε at which a
    constraint becomes active or inactive is located. The end is the solution of the changed problem that the path
    leads to, with a certified residual; where the path cannot be continued, an error says so.

    Args:
        solution: A certified solution.
        tol: Relative KKT residual of every point (None: 1e-10 in float64, 1e-5 in float32).
        max_steps: Limit on steps per perturbation, each a gradient and a solve.
        strict: Raise where the point is not a solution or is degenerate, or where a path cannot be continued; False
            gives NaN for the latter.
    """

    name = "path"

    def __init__(
        self, solution: Solution, *, tol: float | None = None, max_steps: int = 5000, strict: bool = True
    ) -> None:
        self.solution = expect_solution(solution)
        self.tol = resolve_tolerance(tol, solution.theta)
        self.max_steps = check_count(max_steps, "max_steps")
        self.strict = strict
        if strict:
            solution.check(independent=True, minimum=True)
        self._diagnostics = {**describe_solution(solution), "tol": self.tol, "strict": strict}
        self._prepared = KKTSystem.prepare_convex(
            solution.curvature, solution.G, solution.program.kinds, solution.active.is_binding
        )

    def follow(self, perturbation: Perturbation, stops: Sequence[float] = ()) -> Path:
        """Follow the path of one perturbation; it has a point at each ε of `stops`, besides those it chooses itself."""
        return self.follower(perturbation).run(check_stops(stops))

    def follower(self, perturbation: Perturbation) -> PathFollower:
        """Build the object that follows the path of one perturbation."""
        return PathFollower(self.solution, perturbation, self.tol, self.max_steps, self._prepared)

    def change(self, perturbation: Perturbation) -> Change:
        """Return Δθ and Δλ at the end of the path of one perturbation."""
        path, at = self.follow(perturbation), self.solution
        found = {"residual": path.residual, "events": [str(event) for event in path.events], "steps": path.steps}
        diagnostics = self._diagnostics | found | {"curvatures": path.curvatures}
        return Change.of(at.program, path.thetas[-1] - at.theta, path.multipliers[-1] - at.lam, diagnostics)

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1, show_progress: bool = True
    ) -> Influence:
        """Return the difference of each target between start and end of each path. Keywords as in `dif.Estimator`."""
        at, targets = self.solution, Targets(target, self.solution)
        direction, reasons = resolve(at.program, perturbations)
        return fill_scores(
            self, at, targets, direction, by_chunk(partial(self._score, targets), direction, jobs=jobs),
            self._diagnostics, out=out, show_progress=show_progress, given=perturbations, reasons=reasons,
        )  # fmt: skip

    def _score(self, targets: Targets, chunk: Direction) -> Scored:
        moves: list[Tensor] = []
        unanswered: dict[str, str] = {}
        events: dict[str, list[str]] = {}
        for perturbation in chunk.perturbation:
            try:
                path = self.follow(perturbation)
            except DifError as error:
                if self.strict:
                    raise
                unanswered[perturbation.labels[0]] = str(error)
                moves.append(torch.full_like(self.solution.theta, float("nan")))
                continue
            if path.events:
                events[perturbation.labels[0]] = [str(event) for event in path.events]
            moves.append(path.thetas[-1] - self.solution.theta)
        return differences(self.solution, targets, moves), {"unanswered": unanswered, "events": events}


def check_stops(stops: Sequence[float]) -> list[float]:
    """Return the stops in ascending order, with ε = 1 as the last; refuse those outside [0, 1]."""
    given = as_numbers(stops, "stops on a path").reshape(-1).tolist()
    outside = [stop for stop in given if not 0.0 <= stop <= 1.0]
    if outside:
        raise InvalidInputError(
            f"The stops on a path must be values of ε from 0 to 1, not {few(outside)}; to go beyond 1, scale the "
            "perturbation: 2 * removal."
        )
    return sorted({1.0, *given})
