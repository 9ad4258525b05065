"""CVXPY: directional derivatives of the solution of a quadratic program with respect to its parameters, also at kinks.

`problem.derivative()` differentiates through a conic solver. Where a constraint is about to become active or inactive,
it returns the derivative of one side only. Here the optimality conditions of the canonical quadratic program are
linearised as a variational inequality: constraints with multiplier zero remain inequalities, so each direction gets the
derivative of its own side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from dif import DegenerateError, InvalidInputError
from dif.adapters.quadratic_program import QuadraticProgram

try:
    import cvxpy as cp
    from cvxpy.reductions.cvx_attr2constr import CvxAttr2Constr, recover_value_for_leaf
    from cvxpy.reductions.solution import Solution as CanonicalSolution
    from cvxpy.utilities.scopes import dpp_scope
except ImportError as error:
    raise ImportError('dif.adapters.cvxpy needs CVXPY: pip install "directional-influence[cvxpy]"') from error

Array = NDArray[np.float64]  # dense, double precision
_VALUE_TOLERANCE = 1e-3  # relative difference of two optimal values that count as equal
_SOLVER_TOLERANCE = 1e-8  # absolute tolerance of interior-point solvers
# Attributes of a Parameter that change how CVXPY stores its value
_COMPRESSED = ("symmetric", "diag", "PSD", "NSD", "hermitian", "sparsity")
# Difference quotients of terms that depend only on parameters
_FIRST_STEP = 1e-2  # first step, relative to the parameters
_MAX_HALVINGS = 30  # largest number of step halvings
_TOLERANCE = 1e-7  # relative difference of two quotients within which they have converged
_EXACT = 1e-10  # relative difference at which the halving stops early


@dataclass(frozen=True)
class Derivative:
    """Directional derivatives along P directions.

    `derivative[x]` is that of a variable x, or of the dual value of a constraint x: (P, *shape of x). It is also the
    first-order estimate of the change when the parameters move by the whole direction.
    """

    objective: Array  # (P,) of the optimal value
    moved: dict[int, Array]  # id of the variable or constraint → (P, *shape)

    def __getitem__(self, item: cp.Variable | cp.Constraint) -> Array:
        number = getattr(item, "id", None)
        if number not in self.moved:
            raise InvalidInputError(
                f"{item} must be a variable or a constraint of the problem, which have derivatives."
            )
        return self.moved[number]


class Sensitivity:
    """Directional derivatives of the solution of a CVXPY problem that can be written as a quadratic program.

    Args:
        problem: A solved DPP problem (`problem.is_dpp()`) with at least one Parameter.

    Raises:
        InvalidInputError: The problem is not a quadratic program, is not solved, or was solved for other values of its
            parameters.
        DegenerateError: The solution or its multipliers are not unique, so there is no derivative.
    """

    def __init__(self, problem: cp.Problem) -> None:
        _check_problem(problem)
        self.problem = problem
        canonicalised, self._terms = _replace_parameter_terms(problem)
        problem_data: Any = canonicalised.get_problem_data(cp.OSQP)
        data, self._chain, self._inverse_data = problem_data
        canonical = data["param_prob"]
        P, q, A, b, F, g = (data[key] for key in ("P", "q", "A", "b", "F", "G"))
        self.qp = QuadraticProgram(P, q, sparse.vstack([A, F]), np.concatenate([b, g]), len(b))
        self.offset = float(self._inverse_data[-1]["offset"])
        self._columns = canonical.param_id_to_col
        self._tensors = canonical.P, canonical.q, canonical.A
        self._parameter_values = {p.id: np.array(_to_dense(p.value)) for p in problem.parameters()}
        slices, M = self._readout
        rows = np.concatenate([np.arange(*slices[v.id][0].indices(M.shape[0])) for v in problem.variables()])
        self.qp.check_unique(np.unique(M[rows].indices))
        self._check_value()

    def _check_value(self) -> None:
        """Check that the problem was solved for the current values of its parameters."""
        canonical = self._invert(self.qp.point, self.qp.value + self.offset)
        then, now = (float(np.ravel(value)[0]) for value in (self.problem.value, self.problem.objective.value))  # type: ignore[arg-type]
        best = float(canonical.opt_val)
        tolerance = _VALUE_TOLERANCE * max(abs(best), abs(then)) + 1e-6 * self.qp.magnitude
        if not (abs(then - now) <= tolerance and abs(then - best) <= tolerance + _SOLVER_TOLERANCE):
            raise InvalidInputError(
                f"The value of the problem was {then:.6g} when it was solved. With its current parameters it is "
                f"{now:.6g} at its variables and {best:.6g} at the optimum.",
                f"The three values must agree to {_VALUE_TOLERANCE:g}.",
                "The parameters have changed since the solve, or the solver stopped early.",
                "Call problem.solve() again.",
            )

    # Directions

    def along(self, directions: Mapping[cp.Parameter, ArrayLike]) -> Derivative:
        """Return the derivative along one direction of the parameters, or along P directions.

        Args:
            directions: The direction of each parameter, of its shape; or P directions, (P, *shape). Parameters that are
                left out do not move.

        Raises:
            InvalidInputError: A direction does not fit its parameter, or the parameters have changed since.
        """
        parameters = {p.id: p for p in self.problem.parameters()}
        stacks = {p: _stack_directions(p, value, parameters) for p, value in directions.items()}
        if any(not np.array_equal(_to_dense(p.value), self._parameter_values[p.id]) for p in parameters.values()):
            raise InvalidInputError("The parameters have changed; solve again and prepare a new Sensitivity.")
        count = max([1, *map(len, stacks.values())])
        uneven = [f"{p} has {len(stack)} directions" for p, stack in stacks.items() if len(stack) not in (1, count)]
        if uneven:
            raise InvalidInputError(f"The parameter {uneven[0]}; it must have 1 or {count}, as the others.")
        moves = {p.id: stack for p, stack in stacks.items()}
        for term in self._terms:
            moves[term.stand_in.id] = term.slopes(self._parameter_values, moves, count)
        D = np.zeros((self._tensors[1].shape[1] - 1, count))  # the last column of the tensors is the constant part
        for i in moves.keys() & self._columns.keys():  # a parameter may have no effect
            flat = np.stack([move.reshape(-1, order="F") for move in moves[i]], 1)
            D[self._columns[i] : self._columns[i] + len(flat)] = flat
        return self._derivative(D)

    def remove_each(self, weights: cp.Parameter, *, renormalise: bool = True) -> Derivative:
        """Return the first-order change when each sample is removed, one at a time.

        Args:
            weights: The Parameter, (n,), with the weights of the samples.
            renormalise: Scale the other weights up so that their sum does not change: a mean remains a mean.
        """
        value = np.asarray(weights.value, dtype=float)
        if value.ndim != 1 or len(value) < 2:
            raise InvalidInputError(f"`weights` must have shape (n,) with n ≥ 2, one per sample, not {value.shape}.")
        return self.along({weights: _removal_directions(value, renormalise)})

    @cached_property
    def _slopes(self) -> tuple[Any, Array]:
        """Derivatives of ∇L and h − Rx, and of the Lagrangian's value, in each parameter entry, at fixed (x, y)."""
        entries: Any = [sparse.coo_matrix(tensor) for tensor in self._tensors]  # (vectorised matrix, parameters)
        P, q, AF = entries
        d, rows, K = (
            len(self.qp.q),
            len(self.qp.h),
            self._tensors[1].shape[1] - 1,
        )  # the last column is the constant part
        sign = np.where(self.qp.equal, 1.0, -1.0)  # of the rows in CVXPY's form: Ax + b = 0, F'x + g' ≥ 0
        x, multipliers = self.qp.point[:d], sign * self.qp.point[d:]
        row, column = AF.row % rows, AF.row // rows  # column d holds the constants of the rows
        inside = column < d
        x1 = np.concatenate([x, [1.0]])

        def sum_entries(values: Array, at: NDArray[np.int64], k: NDArray[np.int64], size: int) -> Any:
            varying = k < K
            return sparse.csc_matrix((values[varying], (at[varying], k[varying])), shape=(size, K))

        gradient = sum_entries(P.data * x[P.row // d], P.row % d, P.col, d)
        linear = q.row < d
        gradient += sum_entries(q.data[linear], q.row[linear], q.col[linear], d)
        gradient += sum_entries(AF.data[inside] * multipliers[row[inside]], column[inside], AF.col[inside], d)
        left_sides = sum_entries(AF.data * x1[column], row, AF.col, rows)
        value = sum_entries(0.5 * P.data * x[P.row // d] * x[P.row % d], 0 * P.row, P.col, 1)
        value += sum_entries(q.data * x1[q.row], 0 * q.row, q.col, 1)
        total = np.asarray(value.todense()).reshape(-1) + left_sides.T @ multipliers
        return sparse.vstack([gradient, -sparse.diags(sign) @ left_sides]), total

    def _derivative(self, D: Array) -> Derivative:
        """Return the derivative along the columns of D (parameter entries, P)."""
        slopes, value = self._slopes
        slices, M = self._readout
        if len(self.qp.weak) == 0 and M.shape[0] < D.shape[1]:  # linear in D: solve once per number asked for
            d = len(self.qp.q)
            turned = sparse.diags(np.where(np.arange(M.shape[1]) < d, -1.0, 1.0))  # makes the system symmetric
            changes = ((turned @ slopes).T @ self.qp.solve_directions(turned @ M.T.toarray())).T @ D
        else:
            changes = M @ self.qp.solve_directions(slopes @ D)
        sign = -1.0 if isinstance(self.problem.objective, cp.Maximize) else 1.0
        moved = {
            number: np.stack([column.reshape(shape, order="F") for column in changes[where].T])
            for number, (where, shape) in slices.items()
        }
        return Derivative(sign * (value @ D), moved)

    # Back to the user's variables

    @cached_property
    def _readout(self) -> tuple[dict[int, tuple[slice, tuple[int, ...]]], Any]:
        """The matrix that maps (x, y) to the user's variables and duals, and the rows and shape of each by id."""
        zero = np.zeros(len(self.qp.point))
        before = self._user_values(zero)
        slices, start = {}, 0
        for number, value in before.items():
            slices[number] = slice(start, start + value.size), value.shape
            start += value.size
        columns = []
        for j in range(len(zero)):
            unit = zero.copy()
            unit[j] = 1.0
            after = self._user_values(unit)
            change = np.concatenate([(after[number] - before[number]).reshape(-1, order="F") for number in before])
            columns.append(sparse.csc_matrix(change[:, None]))
        return slices, sparse.csr_matrix(sparse.hstack(columns))

    def _user_values(self, point: Array) -> dict[int, Array]:
        """Return the user's variables and duals by id, for a canonical solution (x, y)."""
        user = self._invert(point, 0.0)
        shapes = {item.id: item.shape for item in (*self.problem.variables(), *self.problem.constraints)}
        values = {**user.primal_vars, **user.dual_vars}
        return {number: np.reshape(np.asarray(values[number], dtype=float), shape) for number, shape in shapes.items()}

    def _invert(self, point: Array, value: float) -> Any:
        """Map a solution of the canonical problem back through CVXPY's chain of reductions."""
        solver, names = self._chain.reductions[-1], self._inverse_data[-1]
        duals, start = {}, len(self.qp.q)
        for constraint in (*names[solver.EQ_CONSTR], *names[solver.NEQ_CONSTR]):
            duals[constraint.id] = point[start : start + constraint.size]
            start += constraint.size
        solution = CanonicalSolution(cp.OPTIMAL, value, {names[solver.VAR_ID]: point[: len(self.qp.q)]}, duals, {})
        for reduction, inverse in list(zip(self._chain.reductions, self._inverse_data, strict=True))[-2::-1]:
            if isinstance(reduction, CvxAttr2Constr) and inverse:
                solution = _invert_attributes(solution, *inverse)
            else:
                solution = reduction.invert(solution, inverse)
        return solution


def _invert_attributes(solution: Any, new: Any, old: Any, constraints: Any) -> Any:
    """Do what CvxAttr2Constr.invert does, but do not project values onto the attributes: a change may be negative."""
    values = {
        number: recover_value_for_leaf(variable, solution.primal_vars[new[number].id], project=False)
        for number, variable in old.items()
        if new[number].id in solution.primal_vars
    }
    dense = {number: _to_dense(value) for number, value in values.items()}
    duals = {own: solution.dual_vars[other] for own, other in constraints.items() if other in solution.dual_vars}
    return CanonicalSolution(solution.status, solution.opt_val, dense, duals, solution.attr)


def _removal_directions(weights: Array, renormalise: bool) -> Array:
    """Return how the weights change when each sample is removed, (n, n): one row per removal."""
    share = weights / (weights.sum() - weights) if renormalise else np.zeros_like(weights)
    return share[:, None] * weights - np.diag((1.0 + share) * weights)


def _to_dense(value: Any) -> Any:
    """Return a sparse matrix as an array, and anything else as it is."""
    return value.toarray() if sparse.issparse(value) else value


def _check_problem(problem: cp.Problem) -> None:
    """Raise unless the problem is a solved DPP quadratic program with parameters."""
    if not isinstance(problem, cp.Problem):
        raise InvalidInputError(f"`problem` must be a cvxpy.Problem, not a {type(problem).__name__}.")
    reason = ""
    if problem.is_mixed_integer():
        reason = "has integer variables"
    elif not problem.is_qp():
        reason = f"is not a quadratic program (atoms {', '.join(sorted(a.__name__ for a in problem.atoms()))})"
    elif any(leaf.is_complex() for leaf in (*problem.variables(), *problem.parameters())):
        reason = "has complex numbers"
    elif not problem.parameters():
        reason = "has no Parameter to differentiate with respect to"
    elif any(p.attributes[name] for p in problem.parameters() for name in _COMPRESSED if name in p.attributes):
        reason = "has a Parameter that is declared symmetric, diagonal, definite or sparse"
    elif not problem.is_dpp():
        reason = "is not DPP in its parameters (problem.is_dpp() is False)"
    if reason:
        raise InvalidInputError(
            f"The problem {str(problem.objective)[:60]!r} {reason}; it must be a DPP quadratic program with parameters."
        )
    if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
        raise InvalidInputError(f"The problem must be solved first: its status is {problem.status}.")


def _stack_directions(parameter: Any, value: Any, parameters: Mapping[int, cp.Parameter]) -> Array:
    """Return the directions of one parameter as an array (P, *shape), with P = 1 for a single direction."""
    shape, wrong = getattr(parameter, "shape", ()), ""
    try:
        stack = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        stack, wrong = np.zeros(shape), f"is a {type(value).__name__} that cannot be read as numbers"
    single = stack.ndim != len(shape) + 1
    if getattr(parameter, "id", None) not in parameters:
        wrong = "was given, but the problem has no such parameter"
    elif (stack.shape if single else stack.shape[1:]) != shape:
        wrong = f"has shape {stack.shape}"
    elif not np.isfinite(stack).all():
        wrong = f"has {int((~np.isfinite(stack)).sum())} of {stack.size} entries that are not finite"
    if wrong:
        must = f"it must be a finite array of shape {shape}, or P of them stacked"
        raise InvalidInputError(f"The direction of {parameter} {wrong}; {must}.")
    return stack[None] if single else stack


@dataclass(frozen=True)
class _ParameterTerm:
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
        """Differentiate along one direction by one-sided differences, halving the step until two of them agree."""
        length = max(float(np.abs(d).max(initial=0.0)) for d in move.values())
        if length == 0.0:
            return np.zeros(self.stand_in.shape)
        size = max(float(np.abs(at[i]).max(initial=0.0)) for i in move)
        here, step = self._value(at, move, 0.0), _FIRST_STEP * (size or 1.0) / length
        difference, best, last, largest = np.inf, here, np.full_like(here, np.inf), 0.0
        for _ in range(_MAX_HALVINGS):
            near, far = (self._value(at, move, k * step) for k in (1, 2))
            slope = (4.0 * near - far - 3.0 * here) / (2.0 * step)
            change = float(np.abs(slope - last).max(initial=0.0))
            if change < difference:
                difference, best = change, slope
            last, step, largest = slope, step / 2.0, largest or float(np.abs(slope).max(initial=0.0))
            if difference <= _EXACT * float(np.abs(best).max(initial=0.0)):
                break
        if not difference <= _TOLERANCE * max(largest, float(np.abs(best).max(initial=0.0))):
            raise DegenerateError(
                f"The difference quotients of the term {self.expression} differ by {difference:.2g} for small steps.",
                f"They must converge to a relative difference of {_TOLERANCE:g}.",
                "The term has no derivative along one of the directions.",
                "Move its parameters into the interior of its domain, or use another direction.",
            )
        return best

    def _value(self, at: Mapping[int, Array], move: Mapping[int, Array], step: float) -> Array:
        """Evaluate the expression at `at + step·move`."""
        for i, parameter in self.copies.items():
            parameter.value = at[i] + step * move[i] if i in move else at[i]
        with np.errstate(all="ignore"):
            return np.asarray(self.expression.value, dtype=float)


def _replace_parameter_terms(problem: cp.Problem) -> tuple[cp.Problem, list[_ParameterTerm]]:
    """Return the problem with each non-affine term of parameters replaced by a Parameter, and these terms."""
    terms: list[_ParameterTerm] = []

    def replace(node: Any) -> Any:
        if not isinstance(node, cp.Expression) or isinstance(node, cp.Parameter) or not node.parameters():
            return node
        with dpp_scope():
            affine = node.is_affine()
        if node.is_constant() and not affine:
            signs: dict[str, Any] = {"nonneg": node.is_nonneg(), "nonpos": node.is_nonpos()}
            stand_in = cp.Parameter(node.shape, value=node.value, **signs)
            copies = {p.id: cp.Parameter(p.shape) for p in node.parameters()}
            terms.append(_ParameterTerm(stand_in, _substitute(node, copies), copies))
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
