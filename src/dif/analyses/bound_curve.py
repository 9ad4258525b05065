"""The price of a constraint: the solution against its bound, without solving again for each value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dif.errors import DifError, InvalidInputError
from dif.estimators.path import PathInfluence
from dif.optimality.solution import Solution, expect_solution
from dif.optimality.targets import Targets
from dif.problem.term import Constraint
from dif.runtime.inputs import as_numbers
from dif.solving.continuation import Event, Point


@dataclass(frozen=True)
class Kink:
    """A bound at which the active set changes: to its left and right the curve has different slopes."""

    bound: float
    name: str  # of the constraint that switches
    binds: str  # on which side it binds: "below" or "above" that bound

    def __str__(self) -> str:
        return f"bound {self.bound:.6g}: {self.name} binds {self.binds}"


@dataclass(frozen=True, eq=False)
class BoundCurve:
    """The solutions of a problem as one of its bounds moves."""

    constraint: str
    bounds: Tensor  # (K,) ascending, as they were asked for
    objective: Tensor  # (K,) f₀; NaN where there is no solution
    price: Tensor  # (K,) the multiplier λ: how much the objective falls per unit of the bound loosened
    values: Tensor  # (K, T) of the targets
    targets: tuple[str, ...]
    multipliers: Tensor  # (K, m) of every row
    thetas: Tensor  # (K, d)
    kinks: tuple[Kink, ...]
    lost: tuple[str, ...]  # why the curve ends before the outermost bounds, where it does

    def to_frame(self) -> Any:
        """A pandas DataFrame: one row per bound, columns for the objective, the price and each target."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError('to_frame needs pandas: pip install "dif[pandas]"') from error
        columns = {"objective": self.objective.numpy(), "price": self.price.numpy()}
        columns |= {name: self.values[:, t].numpy() for t, name in enumerate(self.targets)}
        return pandas.DataFrame(columns, index=pandas.Index(self.bounds.numpy(), name=f"bound of {self.constraint}"))


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
        constraint: A constraint of its problem, of one row.
        bounds: Right-hand sides as the constraint is written.
        target: A Term, a list of Terms, or Samples, whose values are wanted, too.
        tol: Relative KKT residual of every point (None: 1e-10 in float64).
        max_steps: Limit on steps, each a gradient and a solve, to either side.

    Where a bound cannot be met, the values are NaN from there on, and `lost` says why.
    """
    at = expect_solution(solution)
    rows = at.program.where(constraint)
    if rows.stop - rows.start != 1:
        raise InvalidInputError(
            "rows of the constraint whose bound moves",
            measured=rows.stop - rows.start,
            threshold="1",
            meaning="A curve has one bound along its axis.",
            cure="State the row you mean as a constraint of its own.",
        )
    asked = as_numbers(bounds, "bounds of a curve").double().reshape(-1)
    if not len(asked) or not bool(torch.isfinite(asked).all()):
        raise InvalidInputError(
            "bounds of a curve",
            measured=f"{len(asked)} values" if len(asked) == 0 else "some not finite",
            threshold="at least one, all finite",
            meaning="The curve is wanted at these right-hand sides.",
            cure="Pass, for example, torch.linspace(0.0, 0.1, 21).",
        )
    asked = torch.unique(asked)
    targets = None if target is None else Targets(target, at)
    sign = -1.0 if constraint.negated else 1.0
    now = sign * float(constraint.tau)
    paths = PathInfluence(at, tol=tol, max_steps=max_steps)
    found: dict[float, Point] = {}
    kinks: list[Kink] = []
    lost: list[str] = []
    for side in (-1.0, 1.0):
        reach = [float(b) for b in asked if side * (float(b) - now) > 0]
        if not reach:
            continue
        far = max(reach, key=lambda b: abs(b - now)) - now
        stops = {(b - now) / far: b for b in reach}
        follower = paths.follower(constraint.shift(far))
        try:
            follower.run(sorted(stops))
        except DifError as error:
            lost.append(str(error))
        found |= {stops[p.epsilon]: p for p in follower.points if p.epsilon in stops}
        kinks += [_kink(event, now, far) for event in follower.events]
    found[now] = Point(0.0, at.program, at.theta, at.lam, at.c)
    nothing = float("nan")
    thetas, multipliers, values, objective = [], [], [], []
    for bound in asked.tolist():
        point = found.get(bound)
        thetas.append(torch.full_like(at.theta, nothing) if point is None else point.theta)
        multipliers.append(torch.full_like(at.lam, nothing) if point is None else point.lam)
        known = thetas[-1]
        objective.append(nothing if point is None else float(point.program.rows.values(known)[0]))
        if targets is not None:
            values.append(targets.values(known))
    lam = torch.stack(multipliers).double().cpu()
    return BoundCurve(
        at.program.names[rows.start],
        asked,
        torch.tensor(objective, dtype=torch.float64) + float(at.problem.objective.constant),
        lam[:, rows.start],
        torch.stack(values).double().cpu() if targets is not None else asked.new_zeros((len(asked), 0)),
        () if targets is None else targets.names,
        lam,
        torch.stack(thetas),
        tuple(sorted(kinks, key=lambda kink: kink.bound)),
        tuple(lost),
    )


def _kink(event: Event, now: float, far: float) -> Kink:
    ahead_is_above = far > 0
    return Kink(now + event.epsilon * far, event.name, "above" if event.binds == ahead_is_above else "below")
