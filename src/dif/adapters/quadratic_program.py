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
_NEAR = 1e-5  # slack, relative, below which a row may be active
_ZERO = 1e-8  # relative size below which a slack or a multiplier counts as 0
_ROUNDS = 50  # of adding and dropping rows
_PROXIMAL = 1e-7  # curvature, relative, that every variable is lent: auxiliary ones may have none of their own
_REPAID = 30  # steps at most in which it is given back
_FLAT = 3.0  # where a tenth of the lent curvature makes a response grow by more, there is no other
_TOGETHER = 1024  # columns solved at once


class QuadraticProgram:
    """Min ½xᵀPx + qᵀx subject to Ax = b and Fx ≤ g, at its solution (x, y, z).

    Variables without curvature (epigraphs, slacks) need not be unique: they are left where an interior-point solver
    puts them. `binding` rows have a positive multiplier, `weak` ones neither slack nor multiplier.
    """

    P: Any  # sparse, as A and F
    A: Any
    F: Any
    x: Array
    y: Array  # multipliers of Ax = b
    z: Array  # of Fx ≤ g
    binding: NDArray[np.int64]
    weak: NDArray[np.int64]

    def __init__(self, P: Any, q: Any, A: Any, b: Any, F: Any, g: Any) -> None:
        self.P, self.A, self.F = (sparse.csc_matrix(matrix) for matrix in (P, A, F))
        self.q, self.b, self.g = (np.asarray(vector, dtype=float) for vector in (q, b, g))
        curved = self.P.diagonal()
        self.lent = _PROXIMAL * float(curved[curved > 0].mean() if (curved > 0).any() else 1.0)
        self._settle()

    @property
    def value(self) -> float:
        """At the solution."""
        return float(0.5 * self.x @ (self.P @ self.x) + self.q @ self.x)

    def _settle(self) -> None:
        """x, the multipliers y and z, and which rows bind or are weak: an interior point, then exact on its rows."""
        x, z = self._interior()
        norms = np.sqrt(np.asarray(self.F.multiply(self.F).sum(1)).reshape(-1)).clip(min=1e-300)
        size = max(1.0, float(np.abs(x).max(initial=0.0)))
        near = norms * size  # the unit of a slack
        push = max(float(np.abs(self.P.data).max(initial=0.0)) * size, float(np.abs(self.q).max(initial=0.0))) / norms
        held = (self.g - self.F @ x < _NEAR * near) | (z > _NEAR * push)
        for _ in range(_ROUNDS):
            self._hold(held)
            x, self.y, forces = self._stationary(x, held)
            z = np.zeros(len(self.g))
            z[held] = forces
            slack = self.g - self.F @ x
            wrong = (z < -_ZERO * push) | (slack < -_ZERO * near)
            if not wrong.any():
                break
            held = (held & ~(z < -_ZERO * push)) | (slack < -_ZERO * near)
        else:
            raise NotConvergedError(
                "active rows of the quadratic program",
                measured=f"still changing after {_ROUNDS} rounds",
                threshold="settled",
                meaning="The solution is too degenerate to be read: rows are added and dropped in turn.",
                cure="Remove redundant constraints, or add a small quadratic term.",
            )
        self.x, self.z = x, z.clip(min=0.0)
        self.binding = np.flatnonzero(z > _ZERO * push)
        self.weak = np.flatnonzero((z <= _ZERO * push) & (slack < _ZERO * near))
        self._hold(np.isin(np.arange(len(self.g)), self.binding))

    def _stationary(self, x: Array, held: NDArray[np.bool_]) -> tuple[Array, Array, Array]:
        """The minimiser with some rows as equalities, and the multipliers; where x is not unique, the nearest one."""
        steps = 0
        while True:
            found = self._split(self._solve(np.concatenate([self.lent * x - self.q, self.b, self.g[held]])))
            moved, x, steps = np.abs(found[0] - x).max(initial=0.0), found[0], steps + 1
            if steps == _REPAID or moved <= 1e-14 * max(1.0, float(np.abs(x).max(initial=0.0))):
                return found

    def _interior(self) -> tuple[Array, Array]:
        clarabel: Any = import_module("clarabel")  # comes with CVXPY, without types
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
        rows = sparse.csc_matrix(sparse.vstack([self.A, self.F]))
        cones = [clarabel.ZeroConeT(len(self.b)), clarabel.NonnegativeConeT(len(self.g))]
        upper = sparse.csc_matrix(sparse.triu(self.P))
        solver = clarabel.DefaultSolver(upper, self.q, rows, np.concatenate([self.b, self.g]), cones, settings)
        found = solver.solve()
        if not str(found.status).endswith("Solved"):
            raise NotConvergedError(
                "quadratic program behind the CVXPY problem",
                measured=f"status {found.status}",
                threshold="Solved",
                meaning="It has no solution at these values of its parameters, or is too badly scaled.",
                cure="Look at problem.status after problem.solve(); scale the data.",
            )
        return np.array(found.x), np.array(found.z)[len(self.b) :]

    def _hold(self, held: NDArray[np.bool_], lent: float | None = None) -> None:
        """Factorise the optimality conditions with these rows as equalities, and this much curvature lent."""
        self._rows: Any = sparse.csc_matrix(sparse.vstack([self.A, self.F[np.flatnonzero(held)]]))
        zero = sparse.csc_matrix((self._rows.shape[0], self._rows.shape[0]))
        more = (self.lent if lent is None else lent) * sparse.identity(self.P.shape[0], format="csc")
        self._kkt: Any = sparse.csc_matrix(sparse.bmat([[self.P + more, self._rows.T], [self._rows, zero]]))
        try:
            self._factor = splu(self._kkt)
        except RuntimeError as error:
            raise self._degenerate() from error
        probe = np.random.default_rng(0).standard_normal(self._kkt.shape[0])
        if not np.abs(self._solve(self._kkt @ probe) - probe).max(initial=0.0) < 1e-3:
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
        """
        held = np.isin(np.arange(len(self.g)), np.concatenate([self.binding, self.weak]))
        push = np.zeros((len(self.x) + len(self.b) + int(held.sum()), len(variables)))
        push[variables, np.arange(len(variables))] = 1.0
        found = []
        for lent in (self.lent, 0.1 * self.lent):
            self._hold(held, lent)
            response = self._solve(push)[variables]
            found.append(0.5 * (response + response.T))
        self._hold(np.isin(np.arange(len(self.g)), self.binding))
        size = 1e-9 * max(float(np.trace(found[0])), 1e-300) / max(len(variables), 1) * np.eye(len(variables))
        if len(variables) and float(eigh(found[1] + size, found[0] + size, eigvals_only=True)[-1]) > _FLAT:
            raise self._degenerate()

    def steps(self, r: Array, r_eq: Array, r_in: Array) -> tuple[Array, Array, Array]:
        """The change of x, y and z: the linearised variational inequality, weak rows as inequalities.

        Args:
            r: How ∇L moves at (x, y, z), one column per direction.
            r_eq: How b − Ax moves at x.
            r_in: How g − Fx moves at x.
        """
        if r.shape[1] > _TOGETHER:
            places = [slice(begin, begin + _TOGETHER) for begin in range(0, r.shape[1], _TOGETHER)]
            pieces = [self.steps(r[:, some], r_eq[:, some], r_in[:, some]) for some in places]
            return tuple(np.hstack(part) for part in zip(*pieces, strict=True))  # type: ignore[return-value]
        W = self.F[self.weak]
        below = np.zeros((len(self.b) + len(self.binding), len(self.weak)))
        U, Uy, Uz = self._split(self._solve(np.concatenate([W.T.toarray(), below])))
        S = W @ U
        try:
            L = np.linalg.cholesky(0.5 * (S + S.T))
        except np.linalg.LinAlgError as error:
            raise self._degenerate() from error
        omega, dy, dz = np.zeros_like(r), np.zeros_like(r_eq), np.zeros((len(self.g), r.shape[1]))
        for _ in range(_REPAID):
            before = omega
            pushed = np.concatenate([self.lent * omega - r, r_eq, r_in[self.binding]])
            omega, dy, forces = self._split(self._solve(pushed))
            room = r_in[self.weak] - W @ omega  # negative: the row is in the way
            nu = np.zeros_like(room)
            for p in np.flatnonzero((room < 0).any(0)):
                nu[:, p] = nnls(L.T, -np.linalg.solve(L, room[:, p]))[0]
            omega, dy = omega - U @ nu, dy - Uy @ nu
            dz[self.binding], dz[self.weak] = forces - Uz @ nu, nu
            if np.abs(omega - before).max(initial=0.0) <= 1e-12 * np.abs(omega).max(initial=1e-300):
                break
        return omega, dy, dz

    def responses(self, asked: Array) -> Array:
        """Where no row is weak: V such that asked·(dx, dy, dz) = −V₁ᵀr + V₂ᵀr_eq + V₃ᵀr_in, the system being symmetric.

        asked: (numbers, all of x, y and z); V: (x, y and z, numbers). One solve for each number, whatever the number of
        directions.
        """
        d, rows = len(self.x), len(self.x) + len(self.y)
        kept = np.concatenate([np.arange(rows), rows + self.binding])
        V, more = np.zeros((len(kept), len(asked))), self._solve(np.ascontiguousarray(asked[:, kept].T))
        for _ in range(_REPAID):
            V += more
            if np.abs(more).max(initial=0.0) <= 1e-13 * np.abs(V).max(initial=1e-300):
                break
            more = self._solve(np.concatenate([self.lent * more[:d], np.zeros_like(more[d:])]))
        full = np.zeros((rows + len(self.g), len(asked)))
        full[kept] = V
        return full
