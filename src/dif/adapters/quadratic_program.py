"""The solution of a quadratic program, exact on its active rows, and its directional derivatives."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import splu

from dif import DegenerateError, NotConvergedError
from dif.linalg.multiplier_qp import solve_reduced_qp

Array = NDArray[np.float64]  # dense, double precision
_ZERO = 1e-8  # size below which a slack or a multiplier counts as 0, relative to the terms of its row
_NOISE = 1e-12  # size below which it counts as a rounding error, relative to the whole right-hand side
_ROUNDS = 50  # rounds of adding rows to the active set and dropping rows from it
_REGULARISATION = 1e-9  # curvature added to every variable, because auxiliary variables may have none; also taken from
# the active rows while the active set is found, because they may be dependent
_WEAK_REGULARISATION = 1e-7  # the same if there are weak rows: a smaller one amplifies rounding errors in their choice
_MAX_CORRECTIONS = 200  # iterations that remove the effect of the regularisation
_MAX_LAST_CORRECTION = 1e-6  # relative size of the last such correction above which there is no solution
_SCALING_ROUNDS = 20  # rounds of scaling rows and columns
_CHUNK = 1024  # directions solved at once


class QuadraticProgram:
    """Minimise ½xᵀPx + qᵀx subject to Rx = h on the first rows and Rx ≤ h on the others; find (x, y) and derivatives.

    Variables without curvature (epigraphs, slacks) need not be unique: they keep the values that an interior-point
    solver gives them.

    Internally, rows and columns are scaled until their largest entries are 1, and the objective until its largest
    curvature is 1. With units u = (D, E/c): P̂ = cDPD, q̂ = cDq, R̂ = ERD, ĥ = Eh; then (x, y) = u·(x̂, ŷ). The
    attributes P, q, R and h are the scaled ones.
    """

    P: Any  # (d, d) sparse
    R: Any  # (k, d) sparse
    point: Array  # (d + k,) the solution x and the multipliers y of the rows
    binding: NDArray[np.int64]  # inequalities with a positive multiplier
    weak: NDArray[np.int64]  # inequalities whose slack and multiplier are both 0

    def __init__(self, P: Any, q: Any, R: Any, h: Any, equalities: int) -> None:
        scales, self._cost_scale = compute_scales(P, q, R)
        D, E = sparse.diags(scales[: len(q)]), sparse.diags(scales[len(q) :])
        self.P, self.R = sparse.csc_matrix(self._cost_scale * D @ P @ D), sparse.csr_matrix(E @ R @ D)
        self.q, self.h = self._cost_scale * D @ q, E @ h
        self.units = np.concatenate([scales[: len(q)], scales[len(q) :] / self._cost_scale])
        self.equal = np.arange(len(h)) < equalities
        self._find_solution()

    @property
    def value(self) -> float:
        """Value of the objective at the solution, unscaled."""
        return float(0.5 * self._x @ (self.P @ self._x) + self.q @ self._x) / self._cost_scale

    @property
    def magnitude(self) -> float:
        """Size of the terms that the value is the sum of; if x is 0, for an x as large as the bounds."""
        size = _largest(self._x)
        if size <= _NOISE * _largest(self.q, self.h[self.equal]):
            size = _largest(self.h) or 1.0
        return (_largest(self.P.data) * size**2 + _largest(self.q) * size) / self._cost_scale

    def _find_solution(self) -> None:
        """Find x, y and the binding and weak rows: start at an interior point, then solve on the active set."""
        x, y = self._solve_interior_point()
        ratio = 1.0 if _largest(self.P.data) else (_largest(x) or 1.0) / (_largest(self.q) or 1.0)  # slack : multiplier
        active = self.equal | (y * ratio > self.h - self.R @ x)
        for _ in range(_ROUNDS):
            x, y = self._minimise_on(active, x, y)
            slack, (zero_slack, zero_multiplier) = self.h - self.R @ x, self._zero_sizes(x, y)
            negative, violated = y < -zero_multiplier, slack < -zero_slack
            if not (~self.equal & (negative | violated)).any():
                break
            active = self.equal | (active & ~negative) | violated
        else:
            raise NotConvergedError(
                f"The active set of the quadratic program is still changing after {_ROUNDS} rounds.",
                "It must stop changing.",
                "The solution is too degenerate: the same constraints are added and dropped in turn.",
                "Remove redundant constraints, or add a small quadratic term.",
            )
        self._x, self.point = x, self.units * np.concatenate([x, np.where(self.equal, y, y.clip(min=0.0))])
        held = self.equal | (y > zero_multiplier)
        self.binding = np.flatnonzero(held & ~self.equal)
        self.weak = np.flatnonzero(~held & (slack <= zero_slack))
        self._regularisation = _WEAK_REGULARISATION if len(self.weak) else _REGULARISATION
        self._factorise(held, self._regularisation)
        probe = np.random.default_rng(0).standard_normal(self._kkt.shape[0])
        if not np.abs(self._solve(self._kkt @ probe) - probe).max(initial=0.0) < 1e-3:
            raise self._not_unique_error()

    def _zero_sizes(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return the slack and the multiplier of each row, (k,), up to which they count as 0.

        A slack is compared with the terms of Rx. A multiplier is compared with the other gradient terms of each
        variable in its row. Rounding errors of the right-hand side count as 0 everywhere.
        """
        noise = _NOISE * (_largest(x, self.q, self.h[self.equal | (y != 0)]) or 1.0)
        gradient = abs(self.P) @ np.abs(x) + np.abs(self.q) + abs(self.R).T @ np.abs(y)
        rows, smallest = self.R.tocoo(), np.full(len(y), np.inf)
        nonzero = rows.data != 0
        np.minimum.at(smallest, rows.row[nonzero], gradient[rows.col[nonzero]] / np.abs(rows.data[nonzero]))
        return _ZERO * (abs(self.R) @ np.abs(x)) + noise, _ZERO * np.where(np.isfinite(smallest), smallest, 0.0) + noise

    def _minimise_on(self, active: NDArray[np.bool_], x: Array, y: Array) -> tuple[Array, Array]:
        """Return minimiser and multipliers with the active rows as equalities; if not unique, those nearest to x, y.

        Each iteration moves the centre of the regularisation to the last point (proximal point method).
        """
        self._factorise(active, _REGULARISATION, _REGULARISATION)
        point, right = np.concatenate([x, y[active]]), np.concatenate([-self.q, self.h[active]])
        weights = np.where(np.arange(len(point)) < len(x), _REGULARISATION, -_REGULARISATION)
        for _ in range(_MAX_CORRECTIONS):
            before, point = point, self._solve(weights * point + right)
            if _largest(point - before) <= 1e-14 * _largest(point):
                break
        y = np.zeros(len(y))
        y[active] = point[len(x) :]
        return point[: len(x)], y

    def _solve_interior_point(self) -> tuple[Array, Array]:
        """Solve the scaled program with Clarabel; return x and y."""
        clarabel: Any = import_module("clarabel")  # installed with CVXPY; has no type information
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
        equalities = int(self.equal.sum())
        cones = [clarabel.ZeroConeT(equalities), clarabel.NonnegativeConeT(len(self.h) - equalities)]
        size = _largest(self.q, self.h[self.equal]) or _largest(self.h) or 1.0  # tolerances are absolute below 1
        upper, rows = sparse.csc_matrix(sparse.triu(self.P)), sparse.csc_matrix(self.R)
        found = clarabel.DefaultSolver(upper, self.q / size, rows, self.h / size, cones, settings).solve()
        if str(found.status) not in ("Solved", "AlmostSolved", "InsufficientProgress"):  # checked later
            raise NotConvergedError(
                f"The quadratic program of the CVXPY problem ended with status {found.status}.",
                "Its status must be Solved.",
                "It has no solution for the current values of its parameters, or is too badly scaled.",
                "Look at problem.status after problem.solve(), or scale the data.",
            )
        return size * np.array(found.x), size * np.array(found.z)

    def _factorise(self, held: NDArray[np.bool_], regularisation: float, row_regularisation: float = 0.0) -> None:
        """Factorise the regularised KKT matrix with these rows as equalities."""
        self._held = np.flatnonzero(held)
        rows: Any = self.R[self._held]
        upper = self.P + regularisation * sparse.identity(rows.shape[1])
        lower = -row_regularisation * sparse.identity(rows.shape[0])
        self._kkt: Any = sparse.csc_matrix(sparse.bmat([[upper, rows.T], [rows, lower]]))
        try:
            self._factor = splu(self._kkt)
        except RuntimeError as error:
            raise self._not_unique_error() from error

    def _not_unique_error(self) -> DegenerateError:
        """Build the error for a solution that is not unique."""
        return DegenerateError(
            f"The optimality conditions are singular with {len(self._held)} active constraints on "
            f"{self.P.shape[0]} variables of the quadratic program.",
            "They must be regular.",
            "The solution or its multipliers are not unique, so there is no derivative.",
            "Add a small quadratic term to the objective, or remove redundant constraints.",
        )

    def _solve(self, B: Array) -> Array:
        """Solve with the factorised KKT matrix, with one step of iterative refinement."""
        X = self._factor.solve(B)
        return X + self._factor.solve(B - self._kkt @ X)

    def check_unique(self, variables: NDArray[np.int64]) -> None:
        """Raise DegenerateError if these variables can move within the active rows without changing the objective.

        A force on such a variable moves it without end, in at least one direction.
        """
        force = np.zeros((len(self.units), 2 * len(variables)))
        force[np.tile(variables, 2), np.arange(2 * len(variables))] = np.repeat([1.0, -1.0], len(variables))
        self.solve_directions(force / self.units[:, None])

    def solve_directions(self, change: Array) -> Array:
        """Solve the linearised variational inequality, with weak rows as inequalities, for the change of (x, y).

        `change` has the changes of ∇L at (x, y), and below them those of h − Rx at x, one column per direction.
        """
        if change.shape[1] > _CHUNK:
            parts = np.array_split(change, -(-change.shape[1] // _CHUNK), axis=1)
            return np.hstack([self.solve_directions(part) for part in parts])
        d, W = len(self.q), self.R[self.weak]
        r, r_rows = np.split(self._cost_scale * self.units[:, None] * change, [d])
        U = self._solve(np.concatenate([W.T.toarray(), np.zeros((len(self._held), len(self.weak)))]))
        S = W @ U[:d]
        S, inequalities = 0.5 * (S + S.T), np.zeros(len(self.weak), dtype=bool)
        try:
            np.linalg.cholesky(S)
        except np.linalg.LinAlgError as error:
            raise self._not_unique_error() from error
        omega = correction = np.zeros_like(r)
        found = np.zeros((len(change), change.shape[1]))
        for _ in range(_MAX_CORRECTIONS):
            free = self._solve(np.concatenate([self._regularisation * omega - r, r_rows[self._held]]))
            violation = (W @ free[:d] - r_rows[self.weak]).T
            nu, failed = solve_reduced_qp(*map(torch.from_numpy, (S, violation, inequalities)))
            if failed:
                raise self._not_unique_error()
            moved = free - U @ nu.numpy().T
            correction, omega = moved[:d] - omega, moved[:d]
            found[:d], found[d + self._held], found[d + self.weak] = omega, moved[d:], nu.numpy().T
            if _largest(correction) <= 1e-12 * _largest(omega):
                break
        if _largest(correction) > _MAX_LAST_CORRECTION * _largest(omega, r):  # diverges: unbounded on one side
            raise self._not_unique_error()
        return self.units[:, None] * found


def compute_scales(P: Any, q: Array, R: Any) -> tuple[Array, float]:
    """Return scales of variables and rows, (d + k,), and of the objective, that make the largest entries 1 (Ruiz)."""
    scales, cost = np.ones(len(q) + R.shape[0]), 1.0
    for _ in range(_SCALING_ROUNDS):
        D = sparse.diags(scales)
        largest = abs(D @ sparse.bmat([[cost * P, R.T], [R, None]], format="csr") @ D).max(axis=1).toarray()[:, 0]
        scales = scales / np.sqrt(np.where(largest > 0, largest, 1.0))
        D = sparse.diags(scales[: len(q)])
        cost = 1.0 / (_largest((D @ P @ D).data) or _largest(D @ q) or 1.0)
    return scales, cost


def _largest(*arrays: Array) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    return max((float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in map(np.asarray, arrays)), default=0.0)
