"""The small quadratic program per perturbation, in the multipliers ν of the selected constraint rows.

Find ν with t = a − Sν: t = 0 on equal rows; t ≤ 0, ν ≥ 0, t·ν = 0 on the others.
S = G H_ρ⁻¹ Gᵀ; the step ω = −H_ρ⁻¹(b + Gᵀν) changes row j to tⱼ.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import daqp
import numpy as np
import torch
from numpy.typing import NDArray

from dif.errors import DegenerateError

Array = NDArray[Any]  # float64

_SIGN_TOLERANCE = 1e-12  # a sign counts as wrong beyond this, relative to the largest entry of its right-hand side
_SINGULAR = 1e-11  # smallest pivot of the scaled S above which rows count as independent
_ROUNDS = 40  # largest number of rounds of block pivoting, plus two per row; DAQP solves what is left
_PATIENCE = 3  # rounds without fewer wrong signs before rows change sides one at a time
_NO_LIMIT = 1e30  # DAQP takes bounds of this size as infinite


def solve_reduced_qp(S: Array, a: Array, equal: NDArray[np.bool_]) -> tuple[Array, dict[int, str]]:
    """Solve for ν, (P, m), given P right-hand sides a (P, m), one S (m, m) and which rows are equalities (m,).

    Return ν and a dict of the right-hand sides without a solution: index → reason; their rows of ν are NaN.

    Equal rows are eliminated once by a Schur complement. The others go through block pivoting, batched over right-hand
    sides with the same active set. Those that do not converge, or have dependent active rows, are solved by DAQP.
    """
    P, m = a.shape
    if m == 0 or P == 0:
        return np.zeros((P, m)), {}
    scale = 1.0 / np.sqrt(np.maximum(np.diag(S), np.finfo(float).tiny))
    scale[np.diag(S) <= 0] = 0.0  # a row whose gradient vanishes
    S, a = S * scale * scale[:, None], a * scale
    e, w = np.flatnonzero(equal), np.flatnonzero(~equal)
    factor = _cholesky(S[np.ix_(e, e)])
    nu, converged, failed = np.zeros((P, m)), np.full(P, factor is not None), {}
    if factor is not None:
        S_ew = S[np.ix_(e, w)]
        if len(w):
            M = S[np.ix_(w, w)] - S_ew.T @ _cholesky_solve(factor, S_ew)
            c = a[:, w] - _cholesky_solve(factor, a[:, e].T).T @ S_ew
            nu[:, w], converged = _pivot_blocks(M, c)
        nu[:, e] = _cholesky_solve(factor, (a[:, e] - nu[:, w] @ S_ew.T).T).T
    for p in np.flatnonzero(~converged).tolist():
        try:
            nu[p] = _solve_daqp(S, a[p], equal, scale)
        except _InconsistentRows as reason:
            nu[p], failed[p] = np.nan, str(reason)
    return nu * scale, failed


def _pivot_blocks(M: Array, c: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Find ν ≥ 0 with Mν − c ≥ 0 and ν·(Mν − c) = 0 for each row of c (P, k); also return which converged, (P,).

    All entries with a wrong sign change sides while that leaves fewer wrong signs. Otherwise only the last of them does
    (Murty's rule, which cannot cycle if M is positive definite).
    """
    P, k = c.shape
    nu, converged = np.zeros((P, k)), np.zeros(P, dtype=bool)
    tolerance = _SIGN_TOLERANCE * np.abs(c).max(1, initial=0.0)[:, None]
    active = c > tolerance  # entries with ν > 0
    fewest, patience = np.full(P, k + 1), np.full(P, _PATIENCE)
    pending = np.arange(P)
    for _ in range(_ROUNDS + 2 * k):
        patterns, which = np.unique(active[pending], axis=0, return_inverse=True)
        singular = []
        for number, pattern in enumerate(patterns):
            rows, on = pending[which.reshape(-1) == number], np.flatnonzero(pattern)
            factor = _cholesky(M[np.ix_(on, on)])
            if factor is None:
                singular.append(rows)
                continue
            nu[rows] = 0.0
            nu[np.ix_(rows, on)] = _cholesky_solve(factor, c[np.ix_(rows, on)].T).T
        if singular:
            pending = np.setdiff1d(pending, np.concatenate(singular))
        slack = nu[pending] @ M - c[pending]
        size = np.abs(nu[pending]).max(1, initial=0.0)[:, None] * _SIGN_TOLERANCE
        wrong = np.where(active[pending], nu[pending] < -size, slack < -tolerance[pending])
        count = wrong.sum(1)
        converged[pending[count == 0]] = True
        unfinished = count > 0
        pending, wrong, count = pending[unfinished], wrong[unfinished], count[unfinished]
        if len(pending) == 0:
            break
        better = count < fewest[pending]
        fewest[pending] = np.where(better, count, fewest[pending])
        patience[pending] = np.where(better, _PATIENCE, patience[pending] - 1)
        last_only = np.zeros_like(wrong)
        last_only[np.arange(len(wrong)), k - 1 - np.argmax(wrong[:, ::-1], axis=1)] = True
        active[pending] ^= np.where(patience[pending, None] < 0, last_only, wrong)
    nu[converged] = np.maximum(nu[converged], 0.0)
    return nu, converged


def _solve_daqp(S: Array, a: Array, equal: NDArray[np.bool_], scale: Array) -> Array:
    """Solve one right-hand side by DAQP, for regular or singular S.

    The program is min ½‖y‖² s.t. By ≥ a (By = a on equal rows), with S = BBᵀ and y = Bᵀν. The rows of S and a are
    scaled by `scale`.
    """
    B = _take_root(S.tobytes(), len(S))
    size = np.abs(a).max(initial=0.0) or 1.0
    goal = a / size
    e, w = np.flatnonzero(equal), np.flatnonzero(~equal)
    y0 = np.linalg.pinv(B[e], rcond=1e-10) @ goal[e] if len(e) else np.zeros(B.shape[1])
    gap = goal[e] - B[e] @ y0
    if np.abs(gap).max(initial=0.0) > 1e-8:  # gap combines dependent rows to 0: measure how far apart a moves them
        distance = size * (gap @ gap) / np.linalg.norm(scale[e] * gap)
        raise _InconsistentRows(f"equalities moved apart by {distance:.3g}")
    N = _null_space(B[e]) if len(e) else np.eye(B.shape[1])
    nu = np.zeros(len(a))
    if len(w):
        rows, low = np.ascontiguousarray(B[w] @ N), goal[w] - B[w] @ y0
        nonzero = np.abs(rows).max(1, initial=0.0) > 1e-12
        if np.any(low[~nonzero] > 1e-8):
            raise _InconsistentRows("an inequality that depends on the equalities moved past them")
        if N.shape[1] and nonzero.any():
            nu[w[nonzero]] = _nearest_point_multipliers(np.ascontiguousarray(rows[nonzero]), low[nonzero])
    y = y0 + N @ (N.T @ (B[w].T @ nu[w]))
    nu[e] = np.linalg.lstsq(B[e].T, y - B[w].T @ nu[w], rcond=1e-10)[0] if len(e) else nu[e]
    return nu * size


@lru_cache(maxsize=1)  # one S has many right-hand sides
def _take_root(S: bytes, m: int) -> Array:
    """Return B with S = BBᵀ, for regular or singular S."""
    eigenvalues, Q = np.linalg.eigh(np.frombuffer(S).reshape(m, m))
    nonzero = eigenvalues > 1e-13 * max(eigenvalues[-1], np.finfo(float).tiny)
    return Q[:, nonzero] * np.sqrt(eigenvalues[nonzero])


def _nearest_point_multipliers(rows: Array, low: Array) -> Array:
    """Return the multipliers of min ½‖y‖² s.t. rows·y ≥ low."""
    d = rows.shape[1]
    upper, kinds = np.full(len(rows), _NO_LIMIT), np.zeros(len(rows), dtype=np.int32)
    _, _, flag, info = daqp.solve(
        np.eye(d), np.zeros(d), rows, upper, np.ascontiguousarray(low), kinds, primal_tol=1e-11
    )
    if flag != 1:
        raise _InconsistentRows("inequalities moved apart, so that no step satisfies all of them")
    return _polish(rows, low, np.abs(np.asarray(info["lam"])))


def _polish(rows: Array, low: Array, multipliers: Array) -> Array:
    """Recompute DAQP's multipliers on its active set to full precision, if its active rows are independent."""
    on = np.flatnonzero(multipliers > 1e-12)
    factor = _cholesky(rows[on] @ rows[on].T)
    exact = np.zeros(len(low))
    if factor is None:
        return multipliers
    exact[on] = _cholesky_solve(factor, low[on])
    slack = rows @ (rows.T @ exact) - low
    valid = exact.min(initial=0.0) >= -1e-9 and slack.min(initial=0.0) >= -1e-9
    return np.maximum(exact, 0.0) if valid else multipliers


def _cholesky(A: Array) -> Array | None:
    """Return the lower Cholesky factor of A; None if its rows count as dependent."""
    if len(A) == 0:
        return np.zeros((0, 0))
    try:
        L = np.linalg.cholesky(A)
    except np.linalg.LinAlgError:
        return None
    return L if np.diag(L).min() ** 2 > _SINGULAR else None


def _cholesky_solve(L: Array, B: Array) -> Array:
    """Solve LLᵀX = B. Torch does it because importing SciPy's takes 0.2 s."""
    if len(L) == 0:
        return np.zeros((0, *B.shape[1:]))
    if B.size == 0:
        return np.zeros_like(B)
    columns = torch.from_numpy(np.ascontiguousarray(B.reshape(len(B), -1)))
    return torch.cholesky_solve(columns, torch.from_numpy(L)).numpy().reshape(B.shape)


def _null_space(B: Array) -> Array:
    """Return an orthonormal basis of {y : By = 0}."""
    _, sizes, Vt = np.linalg.svd(B)
    return Vt[int((sizes > 1e-10 * sizes.max(initial=0.0)).sum()) :].T


class _InconsistentRows(Exception):
    """The rows contradict each other; the text says how."""


def no_step_error(label: str, reason: str) -> DegenerateError:
    """Build the error for a perturbation, or step, that has no solution."""
    return DegenerateError(
        f"No step satisfies all linearised constraints under {label!r}: {reason}.",
        "At least one step must satisfy all of them.",
        "The linearised constraints contradict each other: they depend on each other and the perturbation moves them "
        "apart, or the changed problem is infeasible.",
        "Drop redundant constraints, move dependent bounds consistently, or perturb less; strict=False returns NaN.",
    )
