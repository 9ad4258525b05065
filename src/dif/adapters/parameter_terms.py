"""Terms of a CVXPY problem that depend only on parameters, such as `cp.square(s)`, and their numerical derivatives.

CVXPY would replace them by constants, or need cones other than those of a quadratic program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
from cvxpy.utilities.scopes import dpp_scope
from numpy.typing import NDArray

from dif import DegenerateError

Array = NDArray[np.float64]  # dense, double precision
_FIRST_STEP = 1e-2  # first step of the difference quotients, relative to the parameters
_MAX_HALVINGS = 40  # largest number of step halvings
_ORDERS = 5  # powers of the step that the extrapolation eliminates
_TOLERANCE = 1e-7  # relative difference of two extrapolations within which they have converged
_EXACT = 1e-11  # relative difference at which the halving stops early


@dataclass(frozen=True)
class ParameterTerm:
    """An expression that depends only on parameters and is not affine in them, such as `cp.square(s)`."""

    stand_in: cp.Parameter  # replaces the expression in the problem
    expression: Any  # written in copies of the user's parameters, so that it can be evaluated elsewhere
    copies: dict[int, cp.Parameter]  # the copies by the id of the user's parameter

    def slopes(self, at: Mapping[int, Array], moves: Mapping[int, Array], count: int) -> Array:
        """Return the one-sided derivatives along each direction, (count, *shape of the term).

        at: id → value of the parameter; moves: id → its directions, (count or 1, *shape of the parameter).
        """
        moving = [i for i in self.copies if i in moves]
        slopes = np.zeros((count, *self.stand_in.shape))
        for k in range(count if moving else 0):
            slopes[k] = self._slope(at, {i: moves[i][k % len(moves[i])] for i in moving})
        return slopes

    def _slope(self, at: Mapping[int, Array], move: Mapping[int, Array]) -> Array:
        """Extrapolate difference quotients with halved steps (Romberg) until two extrapolations agree."""
        length = max(float(np.abs(d).max(initial=0.0)) for d in move.values())
        if length == 0.0:
            return np.zeros(self.stand_in.shape)
        size = max(float(np.abs(at[i]).max(initial=0.0)) for i in move)
        here, step = self._value(at, move, 0.0), _FIRST_STEP * (size or 1.0) / length
        rows: list[list[Array]] = []
        difference, slope = np.inf, here
        for _ in range(_MAX_HALVINGS):
            row = [(self._value(at, move, step) - here) / step]
            for order, coarse in enumerate(rows[-1][:_ORDERS] if rows else [], 1):
                row.append(row[-1] + (row[-1] - coarse) / (2.0**order - 1.0))
            if len(rows) > _ORDERS:
                latest = float(np.abs(row[-1] - rows[-1][-1]).max(initial=0.0))
                if latest < difference:
                    difference, slope = latest, row[-1]
            rows.append(row)
            step /= 2.0
            if difference <= _EXACT * float(np.abs(slope).max(initial=0.0)):
                break
        first = float(np.abs(rows[0][0]).max(initial=0.0))
        if not difference <= _TOLERANCE * max(first, float(np.abs(slope).max(initial=0.0))):
            raise DegenerateError(
                f"The difference quotients of the term {self.expression} differ by {difference:.2g} for small steps.",
                f"They must converge to a relative difference of {_TOLERANCE:g}.",
                "The term has no derivative along one of the directions.",
                "Move its parameters into the interior of its domain, or use another direction.",
            )
        return slope

    def _value(self, at: Mapping[int, Array], move: Mapping[int, Array], step: float) -> Array:
        """Evaluate the expression at `at + step·move`."""
        for i, parameter in self.copies.items():
            parameter.value = at[i] + step * move[i] if i in move else at[i]
        with np.errstate(all="ignore"):
            return np.asarray(self.expression.value, dtype=float)


def replace_parameter_terms(problem: cp.Problem) -> tuple[cp.Problem, list[ParameterTerm]]:
    """Return the problem with each non-affine term of parameters replaced by a Parameter, and these terms."""
    terms: list[ParameterTerm] = []

    def replace(node: Any) -> Any:
        if not isinstance(node, cp.Expression) or isinstance(node, cp.Parameter) or not node.parameters():
            return node
        with dpp_scope():
            affine = node.is_affine()
        if node.is_constant() and not affine:
            signs: dict[str, Any] = {"nonneg": node.is_nonneg(), "nonpos": node.is_nonpos()}
            stand_in = cp.Parameter(node.shape, value=node.value, **signs)
            copies = {p.id: cp.Parameter(p.shape) for p in node.parameters()}
            terms.append(ParameterTerm(stand_in, _substitute(node, copies), copies))
            return stand_in
        before: list[Any] = node.args  # type: ignore[attr-defined]
        args = [replace(arg) for arg in before]
        return node if all(a is b for a, b in zip(args, before, strict=True)) else node.copy(args)

    objective = type(problem.objective)(replace(problem.objective.expr))
    constraints = [type(c)(*map(replace, c.args), *(c.get_data() or [])) for c in problem.constraints]
    return (cp.Problem(objective, constraints), terms) if terms else (problem, terms)


def _substitute(expression: Any, copies: Mapping[int, cp.Parameter]) -> Any:
    """Return the expression with its parameters replaced by their copies."""
    if isinstance(expression, cp.Parameter):
        return copies[expression.id]
    if not expression.parameters():
        return expression
    return expression.copy([_substitute(arg, copies) for arg in expression.args])
