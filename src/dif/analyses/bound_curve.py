"""The price of a constraint: the solution as a function of its bound, followed along a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.program import Targets
from dif.errors import DifError, InvalidInputError, few, format_table
from dif.estimators.path import PathInfluence
from dif.optimality.solution import Solution, expect_solution
from dif.problem.term import Constraint
from dif.runtime.inputs import as_numbers
from dif.solving.continuation import Event, PathPoint


@dataclass(frozen=True)
class CurveKink:
    """A bound at which the active set changes, so that the curve has different slopes to its left and right."""

    bound: float
    name: str  # of the constraint that switches
    binds: str  # the side on which it is binding: "below" or "above" that bound

    def __str__(self) -> str:
        return f"bound {self.bound:.6g}: {self.name} is binding {self.binds} it"


@dataclass(frozen=True, eq=False)
class BoundCurve:
    """The solutions of a problem as one of its bounds moves."""

    constraint: str
    bounds: Tensor  # (K,) the bounds asked for, ascending
    objective: Tensor  # (K,) f₀; NaN where there is no solution
    price: Tensor  # (K,) the multiplier λ: how much the objective falls per unit by which the bound is loosened
    values: Tensor  # (K, T) of the targets
    targets: tuple[str, ...]
    multipliers: Tensor  # (K, m) of all rows
    thetas: Tensor  # (K, d)
    kinks: tuple[CurveKink, ...]
    lost: tuple[str, ...]  # why the curve ends before the outermost bounds; empty where it does not

    def to_frame(self) -> Any:
        """Return a pandas DataFrame: one row per bound, columns for the objective, the price and each target."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError('to_frame needs pandas: pip install "directional-influence[pandas]"') from error
        columns = {"objective": self.objective.numpy(), "price": self.price.numpy()}
        columns |= {name: self.values[:, t].numpy() for t, name in enumerate(self.targets)}
        return pandas.DataFrame(columns, index=pandas.Index(self.bounds.numpy(), name=f"bound of {self.constraint}"))

    def plot(self, ax: Any = None, target: int | str | None = None) -> Any:
        """Plot the price of the constraint, or a target, against the bound, on new axes if `ax` is None."""
        from dif.report.plots import bound_curve

        return bound_curve(self, ax, target)

    def __str__(self) -> str:
        columns = [self.bounds, self.objective, self.price, *self.values.T]
        rows = tuple(tuple(f"{float(x):.6g}" for x in row) for row in zip(*columns, strict=True))
        table = format_table(("bound", "objective", "price", *self.targets), rows, left=0)
        return "\n".join([f"Curve of the bound of {self.constraint}", str(table), *map(str, self.kinks), *self.lost])


def bound_curve(
    solution: Solution,
    constraint: Constraint,
    bounds: Sequence[float] | Tensor,
    target: Any = None,
    *,
    tol: float | None = None,
    max_steps: int = 100_000,
) -> BoundCurve:
    """Follow the solution while the bound of one constraint moves: objective, price and targets at each value.

    Args:
        solution: A certified solution; its own bound may lie anywhere among the others.
        constraint: A constraint of its problem, with one row.
        bounds: Right-hand sides, as in the constraint as it is written.
        target: A Term, a list or dict of Terms, or Samples, whose values are computed along the curve.
        tol: Relative KKT residual of every point (None: 1e-10 in float64).
        max_steps: Limit on steps, each a gradient and a solve, to either side.

    Returns:
        The curve. Where a bound cannot be met the values are NaN from there on, and `lost` says why.
    """
    at = expect_solution(solution)
    rows = torch.nonzero(at.program.terms[1:] == 1 + at.problem.position(constraint)).reshape(-1).tolist()
    if len(rows) != 1:
        raise InvalidInputError(
            f"`constraint` must have one row, not {len(rows)}; state the row as a constraint of its own."
        )
    asked = as_numbers(bounds, "bounds of a curve").double().reshape(-1)
    if not len(asked) or not bool(torch.isfinite(asked).all()):
        raise InvalidInputError(f"`bounds` must be finite numbers, at least one, not {few(asked.tolist()) or 'none'}.")
    asked = torch.unique(asked)
    targets = None if target is None else Targets(target, at)
    sign = -1.0 if constraint.negated else 1.0
    now = sign * float(constraint.tau)
    paths = PathInfluence(at, tol=tol, max_steps=max_steps)
    points = {now: PathPoint(0.0, at.program, at.theta, at.lam, at.c)}
    kinks: list[CurveKink] = []
    lost: list[str] = []
    for side in (-1.0, 1.0):
        ahead = [bound for bound in asked.tolist() if side * (bound - now) > 0]
        if not ahead:
            continue
        span = max(ahead, key=lambda bound: abs(bound - now)) - now
        stops = {(bound - now) / span: bound for bound in ahead}
        follower = paths.follower(constraint.shift(span))
        try:
            follower.run(sorted(stops))
        except DifError as error:
            lost.append(str(error))
        points |= {stops[point.epsilon]: point for point in follower.points if point.epsilon in stops}
        kinks += [_make_kink(event, now, span) for event in follower.events]
    nan = float("nan")
    thetas, multipliers, values, objective = [], [], [], []
    for bound in asked.tolist():
        point = points.get(bound)
        theta = torch.full_like(at.theta, nan) if point is None else point.theta
        thetas.append(theta)
        multipliers.append(torch.full_like(at.lam, nan) if point is None else point.lam)
        objective.append(nan if point is None else float(point.program.rows.values(theta)[0]))
        if targets is not None:
            values.append(targets.values(theta))
    lam = torch.stack(multipliers).double().cpu()
    return BoundCurve(
        at.program.names[rows[0]],
        asked,
        torch.tensor(objective, dtype=torch.float64) + float(at.problem.objective.constant),
        lam[:, rows[0]],
        torch.stack(values).double().cpu() if targets is not None else asked.new_zeros((len(asked), 0)),
        () if targets is None else targets.names,
        lam,
        torch.stack(thetas),
        tuple(sorted(kinks, key=lambda kink: kink.bound)),
        tuple(lost),
    )


def _make_kink(event: Event, now: float, span: float) -> CurveKink:
    """Translate an event on the path from the bound `now` to now + span."""
    return CurveKink(now + event.epsilon * span, event.name, "above" if event.binds == (span > 0) else "below")
