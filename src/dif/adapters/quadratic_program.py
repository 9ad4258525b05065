"""The solution of a quadratic program, exact on its active rows, and its directional derivatives."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import eigh
from scipy.sparse.linalg import splu

from dif import DegenerateError, NotConvergedError
from dif.linalg.multiplier_qp import solve_reduced_qp

Array = NDArray[np.float64]  # dense, double precision
_ZERO = 1e-8  # size below which a slack or a multiplier counts as 0, relative to the terms of its row
_NOISE = 1e-12  # size below which it counts as a rounding error, relative to the whole right-hand side
_ROUNDS = 50  # rounds of adding rows to the active set and dropping rows from it
_REGULARISATION = 1e-9  # curvature added to every variable, because auxiliary variables may have none
_WEAK_REGULARISATION = 1e-7  # the same if there are weak rows: a smaller one amplifies rounding errors in their choice
_ROW_REGULARISATION = 1e-9  # the same for active rows while the active set is found, because they may be dependent
_MAX_CORRECTIONS = 200  # iterations that remove the effect of the regularisation
_MAX_LAST_CORRECTION = 1e-6  # relative size of the last such correction above which there is no solution
_FLAT_GROWTH = 3.0  # growth of a response above which a variable is flat, when the regularisation falls to a tenth
_PINNED_RESPONSE = 1e-3  # response below which a variable counts as fixed by the active rows
_SCALING_ROUNDS = 20  # rounds of scaling rows and columns
_CHUNK = 1024  # directions solved at once


class QuadraticProgram:
    """Minimise ½xᵀPx + qᵀx subject to Ax = b and Fx ≤ g; find the solution (x, y, z) and its derivatives.

    Variables without curvature (epigraphs, slacks) need not be unique: they keep the values that an interior-point
    solver gives them.

    Internally, rows and columns are scaled until their largest entries are 1, and the objective until its largest
    curvature is 1. With units u = (D, E/c): P̂ = cDPD, q̂ = cDq, Â = EAD, b̂ = Eb; then (x, y, z) = u·(x̂, ŷ, ẑ).
    The attributes P, q, A, b, F and g are the scaled ones.
    """

    P: Any  # (d, d) sparse
    A: Any  # (e, d) sparse
    F: Any  # (m, d) sparse
    x: Array  # (d,)
    y: Array  # (e,) multipliers of Ax = b
    z: Array  # (m,) multipliers of Fx ≤ g
    binding: NDArray[np.int64]  # rows of F with a positive multiplier
    weak: NDArray[np.int64]  # rows of F whose slack and multiplier are both 0

    def __init__(self, P: Any, q: Any, A: Any, b: Any, F: Any, g: Any) -> None:
        P, A, F = (sparse.csc_matrix(matrix) for matrix in (P, A, F))
        q, b, g = (np.asarray(vector, dtype=float) for vector in (q, b, g))
        D, E, self._cost_scale = compute_scales(P, q, A, F)
        self.P = self._cost_scale * sparse.diags(D) @ P @ sparse.diags(D)
        self.A, self.F = (
            sparse.csc_matrix(sparse.diags(e) @ rows @ sparse.diags(D))
            for e, rows in ((E[: len(b)], A), (E[len(b) :], F))
        )
        self.q, self.b, self.g = self._cost_scale * D * q, E[: len(b)] * b, E[len(b) :] * g
        self.units = np.concatenate([D, E / self._cost_scale])
        self._find_solution()

    @property
    def value(self) -> float:
        """Value of the objective at the solution, unscaled."""
        return float(0.5 * self._x @ (self.P @ self._x) + self.q @ self._x) / self._cost_scale

    @property
    def magnitude(self) -> float:
        """Size of the terms that the value is the sum of; if x is 0, for an x as large as the bounds."""
        size = _largest(self._x)
        if size <= _NOISE * _largest(self.q, self.b):
            size = _largest(self.b, self.g) or 1.0
        return (_largest(self.P.data) * size**2 + _largest(self.q) * size) / self._cost_scale

    def _find_solution(self) -> None:
        """Find x, y, z and the binding and weak rows: start at an interior point, then solve on the active set."""
        x, y, z = self._solve_interior_point()
        ratio = 1.0 if _largest(self.P.data) else (_largest(x) or 1.0) / (_largest(self.q) or 1.0)  # slack : multiplier
        active = z * ratio > self.g - self.F @ x
        for _ in range(_ROUNDS):
            self._factorise(active, row_regularisation=_ROW_REGULARISATION)
            x, y, multipliers = self._minimise_on(active, x, y, z[active])
            z = np.zeros(len(self.g))
            z[active] = multipliers
            slack = self.g - self.F @ x
            zero_slack, zero_multiplier = self._zero_sizes(x, y, z)
            if not ((z < -zero_multiplier) | (slack < -zero_slack)).any():
                break
            active = (active & ~(z < -zero_multiplier)) | (slack < -zero_slack)
        else:
            raise NotConvergedError(
                f"The active set of the quadratic program is still changing after {_ROUNDS} rounds.",
                "It must stop changing.",
                "The solution is too degenerate: the same constraints are added and dropped in turn.",
                "Remove redundant constraints, or add a small quadratic term.",
            )
        self._x = x
        self.x, self.y, self.z = np.split(
            self.units * np.concatenate([x, y, z.clip(min=0.0)]), np.cumsum([len(x), len(y)])
        )
        self.binding = np.flatnonzero(z > zero_multiplier)
        self.weak = np.flatnonzero((z <= zero_multiplier) & (slack <= zero_slack))
        self._regularisation = _WEAK_REGULARISATION if len(self.weak) else _REGULARISATION
        self._factorise(self._mask(self.binding), self._regularisation)

    def _mask(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows of F are listed, (m,)."""
        return np.isin(np.arange(len(self.g)), rows)

    def _zero_sizes(self, x: Array, y: Array, z: Array) -> tuple[Array, Array]:
        """Return the slack and the multiplier of each row, (m,), up to which they count as 0.

        A slack is compared with the terms of Fx. A multiplier is compared with the other gradient terms of each
        variable in its row. Rounding errors of the right-hand side count as 0 everywhere.
        """
        noise = _NOISE * (_largest(x, self.q, self.b, self.g[z != 0]) or 1.0)
        zero_slack = _ZERO * (abs(self.F) @ np.abs(x)) + noise
        gradient = abs(self.P) @ np.abs(x) + np.abs(self.q) + abs(self.A).T @ np.abs(y) + abs(self.F).T @ np.abs(z)
        rows = self.F.tocoo()
        smallest = np.full(len(self.g), np.inf)
        nonzero = rows.data != 0
        np.minimum.at(smallest, rows.row[nonzero], gradient[rows.col[nonzero]] / np.abs(rows.data[nonzero]))
        return zero_slack, _ZERO * np.where(np.isfinite(smallest), smallest, 0.0) + noise

    def _minimise_on(self, active: NDArray[np.bool_], x: Array, y: Array, z: Array) -> tuple[Array, Array, Array]:
        """Return minimiser and multipliers with the active rows as equalities; if not unique, those nearest to x, y, z.

        Each iteration moves the centre of the regularisation to the last point (proximal point method).
        """
        point = np.concatenate([x, y, z])
        weights = np.concatenate([np.full(len(x), _REGULARISATION), np.full(len(point) - len(x), -_ROW_REGULARISATION)])
        for _ in range(_MAX_CORRECTIONS):
            before, point = point, self._solve(weights * point + np.concatenate([-self.q, self.b, self.g[active]]))
            if _largest(point - before) <= 1e-14 * _largest(point):
                break
        return self._split(point)

    def _solve_interior_point(self) -> tuple[Array, Array, Array]:
        """Solve the scaled program with Clarabel; return x, y and z."""
        clarabel: Any = import_module("clarabel")  # installed with CVXPY; has no type information
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
        rows = sparse.csc_matrix(sparse.vstack([self.A, self.F]))
        cones = [clarabel.ZeroConeT(len(self.b)), clarabel.NonnegativeConeT(len(self.g))]
        size = _largest(self.q, self.b) or _largest(self.g) or 1.0  # Clarabel's tolerances are absolute below 1
        right = np.concatenate([self.b, self.g]) / size
        upper = sparse.csc_matrix(sparse.triu(self.P))
        solution = clarabel.DefaultSolver(upper, self.q / size, rows, right, cones, settings).solve()
        if str(solution.status) not in ("Solved", "AlmostSolved", "InsufficientProgress"):  # checked later
            raise NotConvergedError(
                f"The quadratic program of the CVXPY problem ended with status {solution.status}.",
                "Its status must be Solved.",
                "It has no solution for the current values of its parameters, or is too badly scaled.",
                "Look at problem.status after problem.solve(), or scale the data.",
            )
        y, z = np.split(size * np.array(solution.z), [len(self.b)])
        return size * np.array(solution.x), y, z

    def _factorise(
        self, active: NDArray[np.bool_], regularisation: float = _REGULARISATION, row_regularisation: float = 0.0
    ) -> None:
        """Factorise the regularised KKT matrix with the active rows as equalities."""
        self._rows: Any = sparse.csc_matrix(sparse.vstack([self.A, self.F[np.flatnonzero(active)]]))
        upper = self.P + regularisation * sparse.identity(self.P.shape[0], format="csc")
        lower = -row_regularisation * sparse.identity(self._rows.shape[0], format="csc")
        self._kkt: Any = sparse.csc_matrix(sparse.bmat([[upper, self._rows.T], [self._rows, lower]]))
        try:
            self._factor = splu(self._kkt)
        except RuntimeError as error:
            raise self._not_unique_error() from error
        probe = np.random.default_rng(0).standard_normal(self._kkt.shape[0])
        if not row_regularisation and not np.abs(self._solve(self._kkt @ probe) - probe).max(initial=0.0) < 1e-3:
            raise self._not_unique_error()

    def _not_unique_error(self) -> DegenerateError:
        """Build the error for a solution that is not unique."""
        return DegenerateError(
            f"The optimality conditions are singular with {self._rows.shape[0]} active constraints on "
            f"{self.P.shape[0]} variables of the quadratic program.",
            "They must be regular.",
            "The solution or its multipliers are not unique, so there is no derivative.",
            "Add a small quadratic term to the objective, or remove redundant constraints.",
        )

    def _solve(self, B: Array) -> Array:
        """Solve with the factorised KKT matrix, with one step of iterative refinement."""
        X = self._factor.solve(B)
        return X + self._factor.solve(B - self._kkt @ X)

    def _split(self, X: Array) -> tuple[Array, Array, Array]:
        """Split the rows of X into those of variables, equalities and inequalities."""
        d, e = self.P.shape[0], len(self.b)
        return X[:d], X[d : d + e], X[d + e :]

    def check_unique(self, variables: NDArray[np.int64]) -> None:
        """Raise DegenerateError if these variables can move within the active rows without changing the objective."""
        if self._is_flat(variables, np.concatenate([self.binding, self.weak])):
            raise self._not_unique_error()
        if len(self.weak) and self._is_flat(variables, self.binding):  # weak rows may block one side only
            force = np.zeros((len(self.x), 2 * len(variables)))
            force[np.tile(variables, 2), np.arange(2 * len(variables))] = np.repeat([1.0, -1.0], len(variables))
            zero = np.zeros((len(self.b) + len(self.g), force.shape[1]))
            self.solve_directions(force / self.units[: len(force), None], zero[: len(self.b)], zero[len(self.b) :])

    def _is_flat(self, variables: NDArray[np.int64], rows: NDArray[np.int64]) -> bool:
        """Tell whether the variables have a direction without curvature, with these rows as equalities.

        With a tenth of the regularisation, the response of a variable with curvature stays the same, and that of one
        without grows tenfold. Responses far below 1 are rounding errors of variables that the rows fix; these are not
        compared.
        """
        force = np.zeros((len(self.x) + len(self.b) + len(rows), len(variables)))
        force[variables, np.arange(len(variables))] = 1.0
        responses = []
        for regularisation in (_REGULARISATION, 0.1 * _REGULARISATION):
            self._factorise(self._mask(rows), regularisation)
            response = self._solve(force)[variables]
            responses.append(0.5 * (response + response.T) + _PINNED_RESPONSE * np.eye(len(variables)))
        self._factorise(self._mask(self.binding), self._regularisation)
        try:
            growth = eigh(responses[1], responses[0], eigvals_only=True) if len(variables) else np.zeros(1)
            return float(growth[-1]) > _FLAT_GROWTH
        except np.linalg.LinAlgError as error:
            raise self._not_unique_error() from error

    def solve_directions(self, r: Array, r_eq: Array, r_in: Array) -> Array:
        """Solve the linearised variational inequality, with weak rows as inequalities, for the change of (x, y, z).

        Args:
            r: Change of ∇L at (x, y, z), one column per direction.
            r_eq: Change of b − Ax at x.
            r_in: Change of g − Fx at x.

        Returns:
            The change of (x, y, z), one column per direction.
        """
        if r.shape[1] > _CHUNK:
            chunks = [slice(start, start + _CHUNK) for start in range(0, r.shape[1], _CHUNK)]
            return np.hstack([self.solve_directions(r[:, chunk], r_eq[:, chunk], r_in[:, chunk]) for chunk in chunks])
        r, r_eq, r_in = self._split(self._cost_scale * self.units[:, None] * np.concatenate([r, r_eq, r_in]))
        W = self.F[self.weak]
        zero = np.zeros((len(self.b) + len(self.binding), len(self.weak)))
        U, Uy, Uz = self._split(self._solve(np.concatenate([W.T.toarray(), zero])))
        S, inequalities = W @ U, np.zeros(len(self.weak), dtype=bool)
        try:
            np.linalg.cholesky(0.5 * (S + S.T))
        except np.linalg.LinAlgError as error:
            raise self._not_unique_error() from error
        before = omega = np.zeros_like(r)
        dy, dz = np.zeros_like(r_eq), np.zeros_like(r_in)
        for _ in range(_MAX_CORRECTIONS):
            before = omega
            right = np.concatenate([self._regularisation * omega - r, r_eq, r_in[self.binding]])
            omega, dy, dz_binding = self._split(self._solve(right))
            change = W @ omega - r_in[self.weak]  # positive: the step violates the row
            multipliers, failed = solve_reduced_qp(*map(torch.from_numpy, (S, change.T, inequalities)))
            if failed:
                raise self._not_unique_error()
            nu = multipliers.numpy().T
            omega, dy = omega - U @ nu, dy - Uy @ nu
            dz[self.binding], dz[self.weak] = dz_binding - Uz @ nu, nu
            if _largest(omega - before) <= 1e-12 * _largest(omega):
                break
        if _largest(omega - before) > _MAX_LAST_CORRECTION * _largest(omega):  # diverges: unbounded on one side
            raise self._not_unique_error()
        return self.units[:, None] * np.concatenate([omega, dy, dz])


def compute_scales(P: Any, q: Array, A: Any, F: Any) -> tuple[Array, Array, float]:
    """Return scales D of the variables, E of the rows and c of the objective that make the largest entries 1.

    The scale of a variable comes from its entries in P and A, or if it has none there, from those in F. So the bounds
    of a variable are scaled by the variable, not the other way round.
    """
    P, A, F = (abs(sparse.csr_matrix(matrix)) for matrix in (P, A, F))
    rows: Any = sparse.csr_matrix(sparse.vstack([A, F]))
    D, E, c = np.ones(P.shape[0]), np.ones(rows.shape[0]), 1.0
    for _ in range(_SCALING_ROUNDS):
        scaled_rows: Any = sparse.diags(E) @ rows @ sparse.diags(D)
        scaled_P = c * sparse.diags(D) @ P @ sparse.diags(D)
        own = np.maximum(_maxima(scaled_P, 0), _maxima(scaled_rows[: A.shape[0]], 0))
        column, row = np.where(own > 0, own, _maxima(scaled_rows, 0)), _maxima(scaled_rows, 1)
        D, E = D / np.sqrt(np.where(column > 0, column, 1.0)), E / np.sqrt(np.where(row > 0, row, 1.0))
        c = 1.0 / (_largest((sparse.diags(D) @ P @ sparse.diags(D)).data) or _largest(D * q) or 1.0)
    return D, E, c


def _maxima(matrix: Any, axis: int) -> Array:
    """Return the largest entry of each column (axis 0) or row (axis 1); 0 for an empty one."""
    if 0 in matrix.shape:
        return np.zeros(matrix.shape[1 - axis])
    return np.asarray(matrix.max(axis=axis).todense()).reshape(-1)


def _largest(*arrays: Array) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    return max((float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in map(np.asarray, arrays)), default=0.0)
