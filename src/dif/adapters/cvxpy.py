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

from dif import InvalidInputError
from dif.adapters.quadratic_program import QuadraticProgram

try:
    import cvxpy as cp
    from cvxpy.reductions.cvx_attr2constr import CvxAttr2Constr, recover_value_for_leaf
    from cvxpy.reductions.solution import Solution as CanonicalSolution

    from dif.adapters.parameter_terms import replace_parameter_terms
except ImportError as error:
    raise ImportError('dif.adapters.cvxpy needs CVXPY: pip install "directional-influence[cvxpy]"') from error

Array = NDArray[np.float64]  # dense, double precision
_VALUE_TOLERANCE = 1e-3  # relative difference of two optimal values that count as equal
_SOLVER_TOLERANCE = 1e-8  # absolute tolerance of interior-point solvers
# Attributes of a Parameter that change how CVXPY stores its value
_COMPRESSED = ("symmetric", "diag", "PSD", "NSD", "hermitian", "sparsity")


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
                f"The derivative of {item} was asked for.",
                "It must be a variable or a constraint of the problem.",
                "Only those have a value at the solution.",
                "Use the objects from which the problem was built.",
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
        canonicalised, self._terms = replace_parameter_terms(problem)
        problem_data: Any = canonicalised.get_problem_data(cp.OSQP)
        data, self._chain, self._inverse_data = problem_data
        canonical = data["param_prob"]
        self.qp = QuadraticProgram(*(data[key] for key in ("P", "q", "A", "b", "F", "G")))
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
        canonical = self._invert(self.qp.x, self.qp.y, self.qp.z, self.qp.value + self.offset)
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
            raise InvalidInputError(
                "The parameters have other values than when the Sensitivity was prepared.",
                "They must have the same values.",
                "It was prepared at another solution.",
                "Solve the problem again and prepare a new Sensitivity.",
            )
        count = max([1, *map(len, stacks.values())])
        uneven = [f"{p} has {len(stack)} directions" for p, stack in stacks.items() if len(stack) not in (1, count)]
        if uneven:
            raise InvalidInputError(
                f"The parameter {uneven[0]}.",
                f"It must have 1 or {count}.",
                "Each direction moves all parameters together.",
                "Pass the same number of directions for every parameter.",
            )
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
            raise InvalidInputError(
                f"The weights {weights} have shape {value.shape}.",
                "Their shape must be (n,) with n ≥ 2: one weight per sample.",
                "Removing a sample sets its weight to 0.",
                "Weight the losses with one Parameter of shape n, or use along(...).",
            )
        share = value / (value.sum() - value) if renormalise else np.zeros_like(value)
        return self.along({weights: share[:, None] * value - np.diag((1.0 + share) * value)})

    @cached_property
    def _slopes(self) -> tuple[Any, Any, Any, Array]:
        """Derivatives of ∇L, b − Ax, g − Fx and the Lagrangian's value with respect to each parameter entry.

        They are taken at fixed (x, y, z).
        """
        P, q, AF = (_entries(tensor) for tensor in self._tensors)
        x, y, z = self.qp.x, self.qp.y, self.qp.z
        d, e, rows = len(x), len(y), len(y) + len(z)
        K = self._tensors[1].shape[1] - 1  # the last column of the tensors is the constant part
        multipliers = np.concatenate([y, -z])  # of the rows in CVXPY's form: Ax + b = 0, F'x + g' ≥ 0
        row, column = AF.row % rows, AF.row // rows  # column d holds the constants of the rows
        inside = column < d
        x1 = np.concatenate([x, [1.0]])

        def sum_entries(values: Array, at: NDArray[np.int64], k: NDArray[np.int64], size: int) -> Any:
            varying = k < K
            return sparse.csc_matrix((values[varying], (at[varying], k[varying])), shape=(size, K))

        gradient = sum_entries(P.value * x[P.row // d], P.row % d, P.k, d)
        linear = q.row < d
        gradient += sum_entries(q.value[linear], q.row[linear], q.k[linear], d)
        gradient += sum_entries(AF.value[inside] * multipliers[row[inside]], column[inside], AF.k[inside], d)
        left_sides = sum_entries(AF.value * x1[column], row, AF.k, rows)
        value = sum_entries(0.5 * P.value * x[P.row // d] * x[P.row % d], 0 * P.row, P.k, 1)
        value += sum_entries(q.value * x1[q.row], 0 * q.row, q.k, 1)
        total = np.asarray(value.todense()).reshape(-1) + left_sides.T @ multipliers
        return gradient, -left_sides[:e], left_sides[e:], total

    def _derivative(self, D: Array) -> Derivative:
        """Return the derivative along the columns of D (parameter entries, P)."""
        gradient, equal, unequal, value = self._slopes
        slices, M = self._readout
        if len(self.qp.weak) == 0 and M.shape[0] < D.shape[1]:  # linear in D: solve once per number asked for
            forces = sparse.vstack([-gradient, equal, unequal])
            changes = (forces.T @ self.qp.solve_adjoint(M.toarray())).T @ D
        else:
            changes = M @ self.qp.solve_directions(gradient @ D, equal @ D, unequal @ D)
        moved = {
            number: np.stack([column.reshape(shape, order="F") for column in changes[where].T])
            for number, (where, shape) in slices.items()
        }
        return Derivative(self._sign * (value @ D), moved)

    # Back to the user's variables

    @cached_property
    def _readout(self) -> tuple[dict[int, tuple[slice, tuple[int, ...]]], Any]:
        """The matrix that maps (x, y, z) to the user's variables and duals, and the rows and shape of each by id."""
        x, y, z = self.qp.x, self.qp.y, self.qp.z
        ends = np.cumsum([len(x), len(y)])
        zero = np.zeros(len(x) + len(y) + len(z))
        before = self._user_values(*np.split(zero.copy(), ends))
        slices, start = {}, 0
        for number, value in before.items():
            slices[number] = slice(start, start + value.size), value.shape
            start += value.size
        columns = []
        for j in range(len(zero)):
            unit = zero.copy()
            unit[j] = 1.0
            after = self._user_values(*np.split(unit, ends))
            change = np.concatenate([(after[number] - before[number]).reshape(-1, order="F") for number in before])
            columns.append(sparse.csc_matrix(change[:, None]))
        return slices, sparse.csr_matrix(sparse.hstack(columns))

    @cached_property
    def _sign(self) -> float:
        """1 if the user minimises, −1 if the user maximises."""
        x, y, z = self.qp.x, self.qp.y, self.qp.z
        at_zero, at_one = (float(self._invert(x, y, z, value).opt_val) for value in (0.0, 1.0))
        return at_one - at_zero

    def _user_values(self, x: Array, y: Array, z: Array) -> dict[int, Array]:
        """Return the user's variables and duals by id, for a canonical solution (x, y, z)."""
        user = self._invert(x, y, z, 0.0)
        shapes = {item.id: item.shape for item in (*self.problem.variables(), *self.problem.constraints)}
        values = {**user.primal_vars, **user.dual_vars}
        return {number: np.reshape(np.asarray(values[number], dtype=float), shape) for number, shape in shapes.items()}

    def _invert(self, x: Array, y: Array, z: Array, value: float) -> Any:
        """Map a solution of the canonical problem back through CVXPY's chain of reductions."""
        solver, names = self._chain.reductions[-1], self._inverse_data[-1]
        duals: dict[int, Array] = {}
        for values, constraints in ((y, names[solver.EQ_CONSTR]), (z, names[solver.NEQ_CONSTR])):
            start = 0
            for constraint in constraints:
                duals[constraint.id] = values[start : start + constraint.size]
                start += constraint.size
        solution = CanonicalSolution(cp.OPTIMAL, value, {names[solver.VAR_ID]: x}, duals, {})
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


@dataclass(frozen=True)
class _Entries:
    """Entries of a CVXPY tensor: entry `row` of a vectorised matrix is Σ value · (parameter entry k)."""

    row: NDArray[np.int64]
    k: NDArray[np.int64]
    value: Array


def _entries(tensor: Any) -> _Entries:
    """Return the nonzero entries of a CVXPY tensor."""
    coordinates: Any = sparse.coo_matrix(tensor)
    return _Entries(coordinates.row.astype(np.int64), coordinates.col.astype(np.int64), coordinates.data)


def _to_dense(value: Any) -> Any:
    """Return a sparse matrix as an array, and anything else as it is."""
    return value.toarray() if sparse.issparse(value) else value


def _check_problem(problem: cp.Problem) -> None:
    """Raise unless the problem is a solved DPP quadratic program with parameters."""
    if not isinstance(problem, cp.Problem):
        raise InvalidInputError(
            f"A Sensitivity was asked for a {type(problem).__name__}.",
            "It must be a cvxpy.Problem.",
            "The canonical quadratic program of a problem is differentiated.",
            "Pass the solved problem itself.",
        )
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
            f"The problem {str(problem.objective)[:60]!r} {reason}.",
            "It must be a DPP quadratic program with parameters.",
            "The canonical quadratic program is differentiated, and its data must be affine in the parameters.",
            "Write losses as squares, absolute values or maxima, and weight samples with a cp.Parameter.",
        )
    if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
        raise InvalidInputError(
            f"The status of the problem is {problem.status}.",
            "It must be optimal.",
            "The derivative is taken at a solution.",
            "Call problem.solve() first.",
        )


def _stack_directions(parameter: Any, value: Any, parameters: Mapping[int, cp.Parameter]) -> Array:
    """Return the directions of one parameter as an array (P, *shape), with P = 1 for a single direction."""
    try:
        stack = np.asarray(value, dtype=float)
    except (TypeError, ValueError) as error:
        reason = f"is a {type(value).__name__} that cannot be read as numbers ({error})"
        raise _direction_error(parameter, reason) from error
    shape = getattr(parameter, "shape", ())
    single = stack.ndim != len(shape) + 1
    if getattr(parameter, "id", None) not in parameters:
        raise _direction_error(parameter, "was given, but the problem has no such parameter")
    if (stack.shape if single else stack.shape[1:]) != shape:
        raise _direction_error(parameter, f"has shape {stack.shape}")
    if not np.isfinite(stack).all():
        raise _direction_error(
            parameter, f"has {int((~np.isfinite(stack)).sum())} of {stack.size} entries that are not finite"
        )
    return stack[None] if single else stack


def _direction_error(parameter: Any, reason: str) -> InvalidInputError:
    """Build the error for a direction that does not fit its parameter."""
    return InvalidInputError(
        f"The direction of {parameter} {reason}.",
        f"It must be a finite array of shape {getattr(parameter, 'shape', ())}, or P of them stacked.",
        "A direction says how much each entry of a parameter of the problem changes.",
        "Pass an array of the parameter's own shape, or stack several along a new first axis.",
    )
