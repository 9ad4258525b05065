"""CVXPY: how the solution of a quadratic program moves along any direction of its parameters, at kinks too.

`problem.derivative()` differentiates through a conic solver and answers with one branch where a constraint is about to
switch on or off. Here the optimality conditions of the canonical quadratic program are linearised as a variational
inequality: rows whose multiplier is zero stay inequalities, and each direction gets its own side.
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
    from cvxpy.reductions.solution import Solution as Raw

    from dif.adapters.parameter_terms import lift
except ImportError as error:
    raise ImportError('dif.adapters.cvxpy needs CVXPY: pip install "dif[cvxpy]"') from error

Array = NDArray[np.float64]
_SOLVERS = 1e-8  # absolute tolerance of interior-point solvers: all that a value far below it says
_LOWERED = ("symmetric", "diag", "PSD", "NSD", "hermitian", "sparsity")  # attributes that change what is stored


@dataclass(frozen=True)
class Derivative:
    """Directional derivatives along P directions: `derivative[x]` of a variable (P, …), or of a constraint's dual.

    The change when a direction is carried out in full is, to first order, the derivative itself.
    """

    objective: Array  # (P,) of the optimal value
    moved: dict[int, Array]  # id → (P, …)

    def __getitem__(self, thing: cp.Variable | cp.Constraint) -> Array:
        known = getattr(thing, "id", None)
        if known not in self.moved:
            raise InvalidInputError(
                "what a derivative is asked for",
                measured=str(thing),
                threshold="a variable or a constraint of the problem",
                meaning="Only those have a value at the solution.",
                cure="Use the objects from which the problem was built.",
            )
        return self.moved[known]


class Sensitivity:
    """Prepared once at the solution of a CVXPY problem that can be written as a quadratic program.

    Args:
        problem: Solved, DPP (`problem.is_dpp()`), with at least one Parameter.

    Raises:
        InvalidInputError: Not a quadratic program, not solved, or solved for other values of its parameters.
        DegenerateError: The solution or its multipliers are not unique, so there is no derivative.
    """

    def __init__(self, problem: cp.Problem) -> None:
        self.problem = _checked(problem)
        stated, self._terms = lift(problem)
        found: Any = stated.get_problem_data(cp.OSQP)
        data, self._chain, self._inverse = found
        canonical = data["param_prob"]
        self.qp = QuadraticProgram(*(data[key] for key in ("P", "q", "A", "b", "F", "G")))
        self.offset = float(self._inverse[-1]["offset"])
        self._columns = canonical.param_id_to_col
        self._tensors = canonical.P, canonical.q, canonical.A
        self._at = {p.id: np.array(_dense(p.value)) for p in problem.parameters()}
        places, M = self._read
        mine = np.concatenate([np.arange(*places[v.id][0].indices(M.shape[0])) for v in problem.variables()])
        self.qp.check_unique(np.unique(M[mine].indices))
        self._check_value()

    def _check_value(self) -> None:
        found = self._returned(self.qp.x, self.qp.y, self.qp.z, self.qp.value + self.offset)
        then, now = (float(np.ravel(value)[0]) for value in (self.problem.value, self.problem.objective.value))  # type: ignore[arg-type]
        here = float(found.opt_val)
        near = 1e-3 * max(abs(here), abs(then)) + 1e-6 * self.qp.unit
        if not (abs(then - now) <= near and abs(then - here) <= near + _SOLVERS):
            raise InvalidInputError(
                "solution of the problem",
                measured=f"value {then:.6g} when it was solved; for its parameters as they are now {now:.6g} at its "
                f"variables, {here:.6g} at best",
                threshold="the same to 1e-3",
                meaning="Its parameters have changed since, or the solver stopped early.",
                cure="Call problem.solve() again.",
            )

    # Directions

    def along(self, directions: Mapping[cp.Parameter, ArrayLike]) -> Derivative:
        """The derivative along one direction of the parameters, or along many: (P, *shape) for each parameter.

        Parameters that are not named stay as they are.
        """
        given = {p: _numbers(p, value) for p, value in directions.items()}
        known = {p.id: p for p in self.problem.parameters()}
        if any(not np.array_equal(_dense(p.value), self._at[p.id]) for p in known.values()):
            raise InvalidInputError(
                "values of the parameters",
                measured="others than when the Sensitivity was prepared",
                threshold="the same",
                meaning="It was prepared at another solution.",
                cure="Solve again, and prepare a new Sensitivity.",
            )
        pieces, many = [], 1
        for p, value in given.items():
            shape = getattr(p, "shape", ())
            several = value.ndim == len(shape) + 1
            if getattr(p, "id", None) not in known or value.shape[several:] != shape or not np.isfinite(value).all():
                raise InvalidInputError(
                    f"direction of {p}",
                    measured=f"shape {value.shape}, {int((~np.isfinite(value)).sum())} entries not finite"
                    + ("" if getattr(p, "id", None) in known else ", not of this problem"),
                    threshold=f"finite, {shape} or (P, *{shape}), of a parameter of the problem",
                    meaning="A direction says how much each entry of a parameter changes.",
                    cure="Pass an array of the parameter's own shape, or a stack of them.",
                )
            many = max(many, len(value)) if several else many
            pieces.append((p, value if several else value[None]))
        for p, value in pieces:
            if len(value) not in (1, many):
                raise InvalidInputError(
                    f"directions of {p}",
                    measured=len(value),
                    threshold=f"1 or {many}",
                    meaning="Each direction moves all parameters together.",
                    cure="Stack as many for every parameter.",
                )
        moves = {p.id: value for p, value in pieces}
        for term in self._terms:
            moves[term.stand_in.id] = term.slopes(self._at, moves, many)
        D = np.zeros((self._tensors[1].shape[1] - 1, many))  # the last column is the constant part
        for i in moves.keys() & self._columns.keys():  # a parameter may have no effect
            flat = np.stack([one.reshape(-1, order="F") for one in moves[i]], 1)
            D[self._columns[i] : self._columns[i] + len(flat)] = flat
        return self._derivative(D)

    def remove_each(self, weights: cp.Parameter, *, renormalise: bool = True) -> Derivative:
        """The change when each sample is removed, where `weights` is the Parameter that weighs the samples.

        `renormalise`: the weights of the others grow so that their sum stays (a mean stays a mean).
        """
        value = np.asarray(weights.value, dtype=float)
        if value.ndim != 1 or len(value) < 2:
            raise InvalidInputError(
                f"weights {weights}",
                measured=f"shape {value.shape}",
                threshold="one weight per sample, (n,), of two or more",
                meaning="Removing a sample sets its weight to 0.",
                cure="Weigh the losses with one Parameter of shape n, or use along(...).",
            )
        share = value / (value.sum() - value) if renormalise else np.zeros_like(value)
        return self.along({weights: share[:, None] * value - np.diag((1.0 + share) * value)})

    @cached_property
    def _forces(self) -> tuple[Any, Any, Any, Array]:
        """How each entry of the parameters moves ∇L, the rows of A, the rows of F (as b − Ax, g − Fx), the value."""
        P, q, AF = (_entries(tensor) for tensor in self._tensors)
        x, y, z = self.qp.x, self.qp.y, self.qp.z
        d, e, rows = len(x), len(y), len(y) + len(z)
        K = self._tensors[1].shape[1] - 1  # the last column is the constant part
        price = np.concatenate([y, -z])  # of the rows as CVXPY has them: A x + b = 0, F' x + g' ≥ 0
        row, column = AF.row % rows, AF.row // rows  # column d: the constant of the row
        inside = column < d
        x1 = np.concatenate([x, [1.0]])

        def summed(values: Array, at: NDArray[np.int64], k: NDArray[np.int64], size: int) -> Any:
            kept = k < K
            return sparse.csc_matrix((values[kept], (at[kept], k[kept])), shape=(size, K))

        gradient = summed(P.value * x[P.row // d], P.row % d, P.k, d)
        slope = q.row < d
        gradient += summed(q.value[slope], q.row[slope], q.k[slope], d)
        gradient += summed(AF.value[inside] * price[row[inside]], column[inside], AF.k[inside], d)
        moved = summed(AF.value * x1[column], row, AF.k, rows)  # of each row's left-hand side
        value = summed(0.5 * P.value * x[P.row // d] * x[P.row % d], 0 * P.row, P.k, 1)
        value += summed(q.value * x1[q.row], 0 * q.row, q.k, 1)
        total = np.asarray(value.todense()).reshape(-1) + moved.T @ price
        return gradient, -moved[:e], moved[e:], total

    def _derivative(self, D: Array) -> Derivative:
        gradient, equal, unequal, value = self._forces
        places, M = self._read
        if len(self.qp.weak) == 0 and M.shape[0] < D.shape[1]:
            pushed = sparse.vstack([-gradient, equal, unequal])
            found = (pushed.T @ self.qp.responses(M.toarray())).T @ D
        else:
            found = M @ self.qp.steps(gradient @ D, equal @ D, unequal @ D)
        moved = {
            thing: np.stack([column.reshape(shape, order="F") for column in found[where].T])
            for thing, (where, shape) in places.items()
        }
        return Derivative(self._sign * (value @ D), moved)

    # Back to the user's variables

    @cached_property
    def _read(self) -> tuple[dict[int, tuple[slice, tuple[int, ...]]], Any]:
        """The matrix by which the user's variables and duals are read off (x, y, z), and where each is found in it."""
        x, y, z = self.qp.x, self.qp.y, self.qp.z
        sizes = np.cumsum([len(x), len(y)])
        begun = np.zeros(len(x) + len(y) + len(z))
        before = self._values(*np.split(begun.copy(), sizes))
        places, start = {}, 0
        for thing, value in before.items():
            places[thing] = slice(start, start + value.size), value.shape
            start += value.size
        columns = []
        for j in range(len(begun)):
            unit = begun.copy()
            unit[j] = 1.0
            after = self._values(*np.split(unit, sizes))
            found = np.concatenate([(after[t] - before[t]).reshape(-1, order="F") for t in before])
            columns.append(sparse.csc_matrix(found[:, None]))
        return places, sparse.csr_matrix(sparse.hstack(columns))

    @cached_property
    def _sign(self) -> float:
        """−1 where the user maximises."""
        x, y, z = self.qp.x, self.qp.y, self.qp.z
        zero, one = (float(self._returned(x, y, z, v).opt_val) for v in (0.0, 1.0))
        return one - zero

    def _values(self, x: Array, y: Array, z: Array) -> dict[int, Array]:
        found = self._returned(x, y, z, 0.0)
        mine = {one.id: one.shape for one in (*self.problem.variables(), *self.problem.constraints)}
        both = {**found.primal_vars, **found.dual_vars}
        return {thing: np.reshape(np.asarray(both[thing], dtype=float), shape) for thing, shape in mine.items()}

    def _returned(self, x: Array, y: Array, z: Array, value: float) -> Any:
        """A solution of the canonical problem, handed back through CVXPY's own chain of reductions."""
        solver, known = self._chain.reductions[-1], self._inverse[-1]
        duals: dict[int, Array] = {}
        for values, constraints in ((y, known[solver.EQ_CONSTR]), (z, known[solver.NEQ_CONSTR])):
            begin = 0
            for one in constraints:
                duals[one.id] = values[begin : begin + one.size]
                begin += one.size
        found = Raw(cp.OPTIMAL, value, {known[solver.VAR_ID]: x}, duals, {})
        for reduction, inverse in list(zip(self._chain.reductions, self._inverse, strict=True))[-2::-1]:
            if isinstance(reduction, CvxAttr2Constr) and inverse:
                found = _unlowered(found, *inverse)
            else:
                found = reduction.invert(found, inverse)
        return found


def _unlowered(found: Any, new: Any, old: Any, constraints: Any) -> Any:
    """What CvxAttr2Constr.invert does, without projecting values onto the attributes: a step is no value."""
    values = {
        number: recover_value_for_leaf(variable, found.primal_vars[new[number].id], project=False)
        for number, variable in old.items()
        if new[number].id in found.primal_vars
    }
    dense = {number: _dense(value) for number, value in values.items()}
    duals = {mine: found.dual_vars[theirs] for mine, theirs in constraints.items() if theirs in found.dual_vars}
    return Raw(found.status, found.opt_val, dense, duals, found.attr)


@dataclass(frozen=True)
class _Entries:
    """A tensor of CVXPY: entry `row` of a vectorised matrix is Σ value · (parameter k)."""

    row: NDArray[np.int64]
    k: NDArray[np.int64]
    value: Array


def _dense(value: Any) -> Any:
    return value.toarray() if sparse.issparse(value) else value


def _entries(tensor: Any) -> _Entries:
    found: Any = sparse.coo_matrix(tensor)
    return _Entries(found.row.astype(np.int64), found.col.astype(np.int64), found.data)


def _checked(problem: cp.Problem) -> cp.Problem:
    if not isinstance(problem, cp.Problem):
        raise InvalidInputError(
            "what Sensitivity is built from",
            measured=type(problem).__name__,
            threshold="a cvxpy.Problem",
            meaning="Its canonical quadratic program is what is differentiated.",
            cure="Pass the problem itself, solved.",
        )
    why = ""
    if problem.is_mixed_integer():
        why = "it has integer variables"
    elif not problem.is_qp():
        why = f"it is not a quadratic program (atoms {', '.join(sorted(a.__name__ for a in problem.atoms()))})"
    elif any(leaf.is_complex() for leaf in (*problem.variables(), *problem.parameters())):
        why = "it has complex numbers"
    elif not problem.parameters():
        why = "it has no Parameter to differentiate along"
    elif any(p.attributes[name] for p in problem.parameters() for name in _LOWERED if name in p.attributes):
        why = "a Parameter is declared symmetric, diagonal, definite or sparse"
    elif not problem.is_dpp():
        why = "its parameters do not enter as DPP asks (problem.is_dpp() is False)"
    if why:
        raise InvalidInputError(
            f"problem {str(problem.objective)[:60]!r}",
            measured=why,
            threshold="a DPP quadratic program with parameters",
            meaning="The derivative is taken on the canonical quadratic program, whose data are affine in the "
            "parameters.",
            cure="Write losses as squares, absolute values or maxima; weigh samples with a cp.Parameter.",
        )
    if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
        raise InvalidInputError(
            "status of the problem",
            measured=problem.status,
            threshold="optimal",
            meaning="The derivative is taken at a solution.",
            cure="Call problem.solve() first.",
        )
    return problem


def _numbers(parameter: Any, value: Any) -> np.ndarray:
    """The direction of a parameter, as an array."""
    try:
        return np.asarray(value, dtype=float)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"direction of {parameter}",
            measured=f"{type(value).__name__} ({error})",
            threshold="numbers, as an array or nested lists of equal lengths",
            meaning="It cannot be read as numbers.",
            cure="Pass an array of the parameter's own shape, or a stack of them.",
        ) from error
