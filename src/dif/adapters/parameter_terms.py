"""Terms of a CVXPY problem that depend on parameters alone: CVXPY may fix them at their value, or need other cones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
from cvxpy.utilities.scopes import dpp_scope
from numpy.typing import NDArray

from dif import DegenerateError

Array = NDArray[np.float64]
_BEGIN = 1e-2  # first step, relative to the parameters
_HALVED = 40  # times at most
_ORDERS = 5  # of the step that are extrapolated away
_AGREE = 1e-7  # relative difference of two extrapolations that is a limit


@dataclass(frozen=True)
class ParameterTerm:
    """An expression of parameters alone that is not affine, such as `cp.square(s)`.

    `stand_in` is the Parameter that takes its place. `expression` is written in parameters of its own. So it can be
    evaluated without touching the user's.
    """

    stand_in: cp.Parameter
    expression: Any
    own: dict[int, cp.Parameter]  # by the id of the user's

    def slopes(self, at: Mapping[int, Array], moves: Mapping[int, Array], many: int) -> Array:
        """The one-sided derivative along each direction. at: id → (…); moves: id → (many or 1, …)."""
        named = [i for i in self.own if i in moves]
        found = np.zeros((many, *self.stand_in.shape))
        for k in range(many if named else 0):
            found[k] = self._slope(at, {i: moves[i][k % len(moves[i])] for i in named})
        return found

    def _slope(self, at: Mapping[int, Array], move: Mapping[int, Array]) -> Array:
        """Difference quotients with halved steps, extrapolated (Romberg) until two agree."""
        length = max(float(np.abs(d).max(initial=0.0)) for d in move.values())
        if length == 0.0:
            return np.zeros(self.stand_in.shape)
        size = max(float(np.abs(at[i]).max(initial=0.0)) for i in move)
        here, step = self._value(at, move, 0.0), _BEGIN * (size or 1.0) / length
        rows: list[list[Array]] = []
        best, found = np.inf, here
        for _ in range(_HALVED):
            row = [(self._value(at, move, step) - here) / step]
            for order, coarse in enumerate(rows[-1][:_ORDERS] if rows else [], 1):
                row.append(row[-1] + (row[-1] - coarse) / (2.0**order - 1.0))
            if len(rows) > _ORDERS:
                apart = float(np.abs(row[-1] - rows[-1][-1]).max(initial=0.0))
                if apart < best:
                    best, found = apart, row[-1]
            rows.append(row)
            step /= 2.0
            if best <= 1e-11 * float(np.abs(found).max(initial=0.0)):
                break
        seen = float(np.abs(rows[0][0]).max(initial=0.0))
        if not best <= _AGREE * max(seen, float(np.abs(found).max(initial=0.0))):
            raise DegenerateError(
                f"term {self.expression} of the parameters",
                measured=f"difference quotients that stay {best:.2g} apart",
                threshold=f"a limit, to {_AGREE:g}",
                meaning="The term has no derivative along a direction that was asked for.",
                cure="Move its parameters into the inside of its domain, or use another direction.",
            )
        return found

    def _value(self, at: Mapping[int, Array], move: Mapping[int, Array], step: float) -> Array:
        for i, parameter in self.own.items():
            parameter.value = at[i] + step * move[i] if i in move else at[i]
        with np.errstate(all="ignore"):
            return np.asarray(self.expression.value, dtype=float)


def lift(problem: cp.Problem) -> tuple[cp.Problem, list[ParameterTerm]]:
    """The same problem with a Parameter in place of each such term, and the terms."""
    terms: list[ParameterTerm] = []

    def lifted(thing: Any) -> Any:
        if not isinstance(thing, cp.Expression) or isinstance(thing, cp.Parameter) or not thing.parameters():
            return thing
        with dpp_scope():
            affine = thing.is_affine()
        if thing.is_constant() and not affine:
            signs: dict[str, Any] = {"nonneg": thing.is_nonneg(), "nonpos": thing.is_nonpos()}
            stand_in = cp.Parameter(thing.shape, value=thing.value, **signs)
            own = {p.id: cp.Parameter(p.shape) for p in thing.parameters()}
            terms.append(ParameterTerm(stand_in, _rewritten(thing, own), own))
            return stand_in
        before: list[Any] = thing.args  # type: ignore[attr-defined]
        args = [lifted(arg) for arg in before]
        return thing if all(a is b for a, b in zip(args, before, strict=True)) else thing.copy(args)

    objective = type(problem.objective)(lifted(problem.objective.expr))
    constraints = [type(one)(*map(lifted, one.args), *(one.get_data() or [])) for one in problem.constraints]
    return (cp.Problem(objective, constraints), terms) if terms else (problem, terms)


def _rewritten(expression: Any, own: Mapping[int, cp.Parameter]) -> Any:
    """The expression with other parameters."""
    if isinstance(expression, cp.Parameter):
        return own[expression.id]
    if not expression.parameters():
        return expression
    return expression.copy([_rewritten(arg, own) for arg in expression.args])
