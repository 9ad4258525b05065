"""The solution of a quadratic program, exact on its active rows, and how it moves when the program does."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import eigh
from scipy.optimize import nnls
from scipy.sparse.linalg import splu

from dif import DegenerateError, NotConvergedError

Array = NDArray[np.float64]
_ZERO = 1e-8  # relative size below which a slack or a multiplier counts as 0
_NOISE = 1e-12  # the same, relative to the whole right-hand side: what rounding leaves
_ROUNDS = 50  # of adding and dropping rows
_LENT = 1e-9  # curvature that every variable is lent: auxiliary ones may have none of their own
_STEADY = 1e-7  # the same where rows are weak: the smaller, the more rounding in which of them stop a step
_TIED = 1e-9  # the same for rows, while they are found: some that are held together may depend on each other
_REPAID = 200  # steps at most in which it is given back
_SETTLED = 1e-6  # relative change with which the last step may end
_FLAT = 3.0  # where a tenth of the lent curvature makes a response grow by more, there is no other
_PINNED = 1e-3  # response below which a variable counts as pinned
_BALANCED = 20  # rounds of scaling rows and columns
_TOGETHER = 1024  # columns solved at once


class QuadraticProgram:
    """Min ½xᵀPx + qᵀx subject to Ax = b and Fx ≤ g, at its solution (x, y, z).

    Variables without curvature (epigraphs, slacks) need not be unique: they are left where an interior-point solver
    puts them. `binding` rows have a positive multiplier, `weak` ones neither slack nor multiplier.

    Inside, rows and columns are scaled until their largest entries are 1, and the objective until its largest curvature
    is: with units u = (D, E/c), P̂ = cDPD, q̂ = cDq, Â = EAD, b̂ = Eb; then (x, y, z) = u·(x̂, ŷ, ẑ).
    """

    P: Any  # sparse, as A and F; scaled, as all but x, y and z
    A: Any
    F: Any
    x: Array
    y: Array  # multipliers of Ax = b
    z: Array  # of Fx ≤ g
    binding: NDArray[np.int64]
    weak: NDArray[np.int64]

    def __init__(self, P: Any, q: Any, A: Any, b: Any, F: Any, g: Any) -> None:
        P, A, F = (sparse.csc_matrix(matrix) for matrix in (P, A, F))
        q, b, g = (np.asarray(vector, dtype=float) for vector in (q, b, g))
        D, E, self._price = balance(P, q, A, F)
        self.P = self._price * sparse.diags(D) @ P @ sparse.diags(D)
        self.A, self.F = (
            sparse.csc_matrix(sparse.diags(e) @ rows @ sparse.diags(D))
            for e, rows in ((E[: len(b)], A), (E[len(b) :], F))
        )
        self.q, self.b, self.g = self._price * D * q, E[: len(b)] * b, E[len(b) :] * g
        self.units = np.concatenate([D, E / self._price])
        self._settle()

    @property
    def value(self) -> float:
        """At the solution."""
        return float(0.5 * self._x @ (self.P @ self._x) + self.q @ self._x) / self._price

    @property
    def unit(self) -> float:
        """The size of the terms of which the value is made; where x is 0, of those of an x as large as the bounds."""
        size = _largest(self._x)
        if size <= _NOISE * _largest(self.q, self.b):
            size = _largest(self.b, self.g) or 1.0
        return (_largest(self.P.data) * size**2 + _largest(self.q) * size) / self._price

    def _settle(self) -> None:
        """x, the multipliers y and z, and which rows bind or are weak: an interior point, then exact on its rows."""
        x, y, z = self._interior()
        ratio = 1.0 if _largest(self.P.data) else (_largest(x) or 1.0) / (_largest(self.q) or 1.0)  # of x to forces
        held = z * ratio > self.g - self.F @ x
        for _ in range(_ROUNDS):
            self._hold(held, tied=_TIED)
            x, y, forces = self._stationary(x, y, z[held], held)
            z = np.zeros(len(self.g))
            z[held] = forces
            slack = self.g - self.F @ x
            near, push = self._zeros(x, y, z)
            if not ((z < -push) | (slack < -near)).any():
                break
            held = (held & ~(z < -push)) | (slack < -near)
        else:
            raise NotConvergedError(
                "active rows of the quadratic program",
                measured=f"still changing after {_ROUNDS} rounds",
                threshold="settled",
                meaning="The solution is too degenerate to be read: rows are added and dropped in turn.",
                cure="Remove redundant constraints, or add a small quadratic term.",
            )
        self._x = x
        self.x, self.y, self.z = np.split(
            self.units * np.concatenate([x, y, z.clip(min=0.0)]), np.cumsum([len(x), len(y)])
        )
        self.binding = np.flatnonzero(z > push)
        self.weak = np.flatnonzero((z <= push) & (slack <= near))
        self._lent = _STEADY if len(self.weak) else _LENT
        self._hold(np.isin(np.arange(len(self.g)), self.binding), self._lent)

    def _zeros(self, x: Array, y: Array, z: Array) -> tuple[Array, Array]:
        """The slack and the multiplier of each row that count as 0: small beside what the row is made of.

        A slack is compared with the terms of Fx. A multiplier is compared with the other forces on each variable of its
        row. What rounding leaves of the right-hand side counts as 0 everywhere.
        """
        noise = _NOISE * (_largest(x, self.q, self.b, self.g[z != 0]) or 1.0)
        near = _ZERO * (abs(self.F) @ np.abs(x)) + noise
        force = abs(self.P) @ np.abs(x) + np.abs(self.q) + abs(self.A).T @ np.abs(y) + abs(self.F).T @ np.abs(z)
        rows = self.F.tocoo()
        push = np.full(len(self.g), np.inf)
        kept = rows.data != 0
        np.minimum.at(push, rows.row[kept], force[rows.col[kept]] / np.abs(rows.data[kept]))
        return near, _ZERO * np.where(np.isfinite(push), push, 0.0) + noise

    def _stationary(self, x: Array, y: Array, z: Array, held: NDArray[np.bool_]) -> tuple[Array, Array, Array]:
        """The minimiser with some rows as equalities, and the multipliers; where it is not unique, the nearest one."""
        at = np.concatenate([x, y, z])
        back = np.concatenate([np.full(len(x), _LENT), np.full(len(at) - len(x), -_TIED)])
        for _ in range(_REPAID):
            before, at = at, self._solve(back * at + np.concatenate([-self.q, self.b, self.g[held]]))
            if _largest(at - before) <= 1e-14 * _largest(at):
                break
        return self._split(at)

    def _interior(self) -> tuple[Array, Array, Array]:
        clarabel: Any = import_module("clarabel")  # comes with CVXPY, without types
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
        rows = sparse.csc_matrix(sparse.vstack([self.A, self.F]))
        cones = [clarabel.ZeroConeT(len(self.b)), clarabel.NonnegativeConeT(len(self.g))]
        size = _largest(self.q, self.b) or _largest(self.g) or 1.0  # its tolerances are absolute below 1
        right = np.concatenate([self.b, self.g]) / size
        upper = sparse.csc_matrix(sparse.triu(self.P))
        found = clarabel.DefaultSolver(upper, self.q / size, rows, right, cones, settings).solve()
        if str(found.status) not in ("Solved", "AlmostSolved", "InsufficientProgress"):  # proved or refused later
            raise NotConvergedError(
                "quadratic program behind the CVXPY problem",
                measured=f"status {found.status}",
                threshold="Solved",
                meaning="It has no solution at these values of its parameters, or is too badly scaled.",
                cure="Look at problem.status after problem.solve(); scale the data.",
            )
        y, z = np.split(size * np.array(found.z), [len(self.b)])
        return size * np.array(found.x), y, z

    def _hold(self, held: NDArray[np.bool_], lent: float = _LENT, tied: float = 0.0) -> None:
        """Factorise the optimality conditions with these rows as equalities, and this much lent."""
        self._rows: Any = sparse.csc_matrix(sparse.vstack([self.A, self.F[np.flatnonzero(held)]]))
        more = lent * sparse.identity(self.P.shape[0], format="csc")
        less = -tied * sparse.identity(self._rows.shape[0], format="csc")
        self._kkt: Any = sparse.csc_matrix(sparse.bmat([[self.P + more, self._rows.T], [self._rows, less]]))
        try:
            self._factor = splu(self._kkt)
        except RuntimeError as error:
            raise self._degenerate() from error
        probe = np.random.default_rng(0).standard_normal(self._kkt.shape[0])
        if not tied and not np.abs(self._solve(self._kkt @ probe) - probe).max(initial=0.0) < 1e-3:
            raise self._degenerate()

    def _degenerate(self) -> DegenerateError:
        return DegenerateError(
            "optimality conditions of the quadratic program",
            measured=f"singular with {self._rows.shape[0]} rows held in {self.P.shape[0]} variables",
            threshold="regular",
            meaning="The solution or its multipliers are not unique, so there is no derivative.",
            cure="Add a small quadratic term to the objective, or remove constraints that repeat others.",
        )

    def _solve(self, B: Array) -> Array:
        X = self._factor.solve(B)
        return X + self._factor.solve(B - self._kkt @ X)

    def _split(self, X: Array) -> tuple[Array, Array, Array]:
        d, e = self.P.shape[0], len(self.b)
        return X[:d], X[d : d + e], X[d + e :]

    def check_unique(self, variables: NDArray[np.int64]) -> None:
        """Refuse where these variables can move at no price within the active rows.

        With a tenth of the lent curvature, what has curvature of its own responds as before, what has none ten times.
        Responses far below 1, those of variables that the rows pin, are rounding and are not compared.
        """
        if self._flat(variables, np.concatenate([self.binding, self.weak])):
            raise self._degenerate()
        if len(self.weak) and self._flat(variables, self.binding):  # the weak rows may stop one side alone
            push = np.zeros((len(self.x), 2 * len(variables)))
            push[np.tile(variables, 2), np.arange(2 * len(variables))] = np.repeat([1.0, -1.0], len(variables))
            zero = np.zeros((len(self.b) + len(self.g), push.shape[1]))
            self.steps(push / self.units[: len(push), None], zero[: len(self.b)], zero[len(self.b) :])

    def _flat(self, variables: NDArray[np.int64], rows: NDArray[np.int64]) -> bool:
        """Whether they can move at no price with these rows as equalities."""
        push = np.zeros((len(self.x) + len(self.b) + len(rows), len(variables)))
        push[variables, np.arange(len(variables))] = 1.0
        found = []
        for lent in (_LENT, 0.1 * _LENT):
            self._hold(np.isin(np.arange(len(self.g)), rows), lent)
            response = self._solve(push)[variables]
            found.append(0.5 * (response + response.T) + _PINNED * np.eye(len(variables)))
        self._hold(np.isin(np.arange(len(self.g)), self.binding), self._lent)
        try:
            return bool(len(variables)) and float(eigh(found[1], found[0], eigvals_only=True)[-1]) > _FLAT
        except np.linalg.LinAlgError as error:
            raise self._degenerate() from error

    def steps(self, r: Array, r_eq: Array, r_in: Array) -> Array:
        """The change of (x, y, z): the linearised variational inequality, weak rows as inequalities.

        Args:
            r: How ∇L moves at (x, y, z), one column per direction.
            r_eq: How b − Ax moves at x.
            r_in: How g − Fx moves at x.
        """
        if r.shape[1] > _TOGETHER:
            places = [slice(begin, begin + _TOGETHER) for begin in range(0, r.shape[1], _TOGETHER)]
            return np.hstack([self.steps(r[:, some], r_eq[:, some], r_in[:, some]) for some in places])
        moved = self._price * self.units[:, None] * np.concatenate([r, r_eq, r_in])
        r, r_eq, r_in = self._split(moved)
        W = self.F[self.weak]
        below = np.zeros((len(self.b) + len(self.binding), len(self.weak)))
        U, Uy, Uz = self._split(self._solve(np.concatenate([W.T.toarray(), below])))
        S = W @ U
        try:
            L = np.linalg.cholesky(0.5 * (S + S.T))
        except np.linalg.LinAlgError as error:
            raise self._degenerate() from error

        def blocked(room: Array) -> Array:
            """The multipliers ν ≥ 0 of the weak rows: the least ½νᵀSν + room·ν."""
            try:
                return nnls(L.T, -np.linalg.solve(L, room))[0]
            except RuntimeError as error:
                raise self._degenerate() from error

        before = omega = np.zeros_like(r)
        dy, dz = np.zeros_like(r_eq), np.zeros_like(r_in)
        for _ in range(_REPAID):
            before = omega
            pushed = np.concatenate([self._lent * omega - r, r_eq, r_in[self.binding]])
            omega, dy, forces = self._split(self._solve(pushed))
            room = r_in[self.weak] - W @ omega  # negative: the row is in the way
            nu = np.zeros_like(room)
            for p in np.flatnonzero((room < 0).any(0)):
                nu[:, p] = blocked(room[:, p])
            omega, dy = omega - U @ nu, dy - Uy @ nu
            dz[self.binding], dz[self.weak] = forces - Uz @ nu, nu
            if _largest(omega - before) <= 1e-12 * _largest(omega):
                break
        if _largest(omega - before) > _SETTLED * _largest(omega):  # goes on for ever: it is free on one side
            raise self._degenerate()
        return self.units[:, None] * np.concatenate([omega, dy, dz])

    def responses(self, asked: Array) -> Array:
        """Where no row is weak: V such that asked·(dx, dy, dz) = −V₁ᵀr + V₂ᵀr_eq + V₃ᵀr_in, the system being symmetric.

        asked: (numbers, all of x, y and z); V: (x, y and z, numbers). One solve for each number, whatever the number of
        directions.
        """
        d, rows = len(self.x), len(self.x) + len(self.y)
        kept = np.concatenate([np.arange(rows), rows + self.binding])
        V, more = np.zeros((len(kept), len(asked))), self._solve((asked * self.units)[:, kept].T.copy())
        for _ in range(_REPAID):
            V += more
            if _largest(more) <= 1e-13 * _largest(V):
                break
            more = self._solve(np.concatenate([self._lent * more[:d], np.zeros_like(more[d:])]))
        full = np.zeros((len(self.units), len(asked)))
        full[kept] = V
        return self._price * self.units[:, None] * full


def balance(P: Any, q: Array, A: Any, F: Any) -> tuple[Array, Array, float]:
    """Scales D of the variables, E of the rows and c of the objective that make the largest entries 1.

    A variable is measured by the curvature and the equalities it enters, which define it; by the inequalities where it
    enters no others. Bounds on a variable then take its scale, not the other way round.
    """
    P, A, F = (abs(sparse.csr_matrix(matrix)) for matrix in (P, A, F))
    rows: Any = sparse.csr_matrix(sparse.vstack([A, F]))
    D, E, price = np.ones(P.shape[0]), np.ones(rows.shape[0]), 1.0
    for _ in range(_BALANCED):
        across: Any = sparse.diags(E) @ rows @ sparse.diags(D)
        own = np.maximum(_tops(price * sparse.diags(D) @ P @ sparse.diags(D), 0), _tops(across[: A.shape[0]], 0))
        column, row = np.where(own > 0, own, _tops(across, 0)), _tops(across, 1)
        D, E = D / np.sqrt(np.where(column > 0, column, 1.0)), E / np.sqrt(np.where(row > 0, row, 1.0))
        steep = _largest((sparse.diags(D) @ P @ sparse.diags(D)).data) or _largest(D * q) or 1.0
        price = 1.0 / steep
    return D, E, price


def _tops(matrix: Any, axis: int) -> Array:
    """The largest entry of each column (axis 0) or row (axis 1); 0 where there is none."""
    if 0 in matrix.shape:
        return np.zeros(matrix.shape[1 - axis])
    return np.asarray(matrix.max(axis=axis).todense()).reshape(-1)


def _largest(*arrays: Array) -> float:
    """The largest finite absolute value; 0 where there is none."""
    return max((float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in map(np.asarray, arrays)), default=0.0)
