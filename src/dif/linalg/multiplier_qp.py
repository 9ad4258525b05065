"""The small QP that is left per perturbation, in the multipliers of the rows kept.

Find ν with  t = a − S ν:   t = 0 on free rows;   t ≤ 0, ν ≥ 0, t·ν = 0 on the others.
S = G H_ρ⁻¹ Gᵀ; ω = −H_ρ⁻¹(b + Gᵀν) moves row j to tⱼ.
"""

from __future__ import annotations

from typing import Any

import daqp
import numpy as np
import torch
from numpy.typing import NDArray

from dif.errors import DegenerateError

Array = NDArray[Any]

_RELATIVE = 1e-12  # sign tolerance, of the largest entry of the perturbation's own data
_SINGULAR = 1e-11  # smallest pivot of the scaled S that counts as independent rows
_ROUNDS = 40


def solve_reduced_qp(S: Array, a: Array, free: NDArray[np.bool_]) -> tuple[Array, dict[int, str]]:
    """ν, (P, m), for P right-hand sides a (P, m) and one S (m, m).

    Where no ν exists its row is NaN, and the second part of the answer says why.

    Free rows are eliminated once by a Schur complement; the sign-constrained rest goes through block pivoting, batched
    over the perturbations that share an active set; what does not settle, or meets dependent rows, goes to DAQP.
    """
    P, m = a.shape
    if m == 0 or P == 0:
        return np.zeros((P, m)), {}
    scale = 1.0 / np.sqrt(np.maximum(np.diag(S), np.finfo(float).tiny))
    scale[np.diag(S) <= 0] = 0.0  # a row whose gradient vanishes
    S, a = S * scale * scale[:, None], a * scale
    f, w = np.flatnonzero(free), np.flatnonzero(~free)
    factor = _cholesky(S[np.ix_(f, f)])
    nu, failed = np.zeros((P, m)), {}
    if factor is None:
        _one_by_one(S, a, free, scale, np.arange(P), nu, failed)
        return nu * scale, failed
    if len(w) == 0:
        nu[:, f] = _solve(factor, a[:, f].T).T
        return nu * scale, failed
    S_fw = S[np.ix_(f, w)]
    M = S[np.ix_(w, w)] - S_fw.T @ _solve(factor, S_fw)
    c = a[:, w] - _solve(factor, a[:, f].T).T @ S_fw
    nu[:, w], settled = _block_pivoting(M, c)
    nu[:, f] = _solve(factor, (a[:, f] - nu[:, w] @ S_fw.T).T).T
    _one_by_one(S, a, free, scale, np.flatnonzero(~settled), nu, failed)
    return nu * scale, failed


def _one_by_one(
    S: Array, a: Array, free: NDArray[np.bool_], scale: Array, rows: Array, nu: Array, failed: dict[int, str]
) -> None:
    for p in rows.tolist():
        try:
            nu[p] = _daqp(S, a[p], free, scale)
        except _NoDirection as reason:
            nu[p], failed[p] = np.nan, str(reason)


def _block_pivoting(M: Array, c: Array) -> tuple[Array, NDArray[np.bool_]]:
    """ν ≥ 0 with Mν − c ≥ 0 and ν·(Mν − c) = 0, row by row of c; also which rows settled.

    All rows with a wrong sign change sides while that makes progress, else only the last of them (Murty's rule, which
    cannot cycle when M is positive definite).
    """
    P, k = c.shape
    nu, settled = np.zeros((P, k)), np.zeros(P, dtype=bool)
    tolerance = _RELATIVE * np.abs(c).max(1, initial=0.0)[:, None]
    held = c > tolerance  # rows with ν > 0
    fewest, patience = np.full(P, k + 1), np.full(P, 3)
    open_rows = np.arange(P)
    for _ in range(_ROUNDS + 2 * k):
        patterns, which = np.unique(held[open_rows], axis=0, return_inverse=True)
        lost = []
        for number, pattern in enumerate(patterns):
            rows, on = open_rows[which.reshape(-1) == number], np.flatnonzero(pattern)
            factor = _cholesky(M[np.ix_(on, on)])
            if factor is None:
                lost.append(rows)
                continue
            nu[rows] = 0.0
            nu[np.ix_(rows, on)] = _solve(factor, c[np.ix_(rows, on)].T).T
        if lost:
            open_rows = np.setdiff1d(open_rows, np.concatenate(lost))
        slack = nu[open_rows] @ M - c[open_rows]
        here = held[open_rows]
        size = np.abs(nu[open_rows]).max(1, initial=0.0)[:, None] * _RELATIVE
        wrong = np.where(here, nu[open_rows] < -size, slack < -tolerance[open_rows])
        count = wrong.sum(1)
        settled[open_rows[count == 0]] = True
        still = count > 0
        open_rows, wrong, count = open_rows[still], wrong[still], count[still]
        if len(open_rows) == 0:
            break
        better = count < fewest[open_rows]
        fewest[open_rows] = np.where(better, count, fewest[open_rows])
        patience[open_rows] = np.where(better, 3, patience[open_rows] - 1)
        single = patience[open_rows] < 0
        last = k - 1 - np.argmax(wrong[:, ::-1], axis=1)
        only = np.zeros_like(wrong)
        only[np.arange(len(wrong)), last] = True
        held[open_rows] ^= np.where(single[:, None], only, wrong)
    nu[settled] = np.maximum(nu[settled], 0.0)
    return nu, settled


def _daqp(S: Array, a: Array, free: NDArray[np.bool_], scale: Array) -> Array:
    """One right-hand side by DAQP, S singular or not: min ½‖y‖² s.t. B y ≥ a (= on free rows), S = B Bᵀ, y = Bᵀν.

    S and a come with their rows scaled by `scale`.
    """
    eigenvalues, Q = np.linalg.eigh(S)
    kept = eigenvalues > 1e-13 * max(eigenvalues[-1], np.finfo(float).tiny)
    B = Q[:, kept] * np.sqrt(eigenvalues[kept])
    size = np.abs(a).max(initial=0.0) or 1.0
    goal = a / size
    f, w = np.flatnonzero(free), np.flatnonzero(~free)
    y0 = np.linalg.pinv(B[f], rcond=1e-10) @ goal[f] if len(f) else np.zeros(B.shape[1])
    gap = goal[f] - B[f] @ y0
    if np.abs(gap).max(initial=0.0) > 1e-8:  # gap is a combination of rows that is always 0: how far it would move
        raise _NoDirection(f"equalities moved apart by {size * (gap @ gap) / np.linalg.norm(scale[f] * gap):.3g}")
    N = _null_space(B[f]) if len(f) else np.eye(B.shape[1])
    lam = np.zeros(len(a))
    if len(w):
        rows, low = np.ascontiguousarray(B[w] @ N), goal[w] - B[w] @ y0
        live = np.abs(rows).max(1, initial=0.0) > 1e-12
        if np.any(low[~live] > 1e-8):
            raise _NoDirection("an inequality that depends on the equalities moved past them")
        if N.shape[1] and live.any():
            r = np.ascontiguousarray(rows[live])
            count = r.shape[1]
            _, _, flag, info = daqp.solve(
                np.eye(count),
                np.zeros(count),
                r,
                np.full(len(r), 1e30),
                np.ascontiguousarray(low[live]),
                np.zeros(len(r), dtype=np.int32),
                primal_tol=1e-11,
            )
            if flag != 1:
                raise _NoDirection("inequalities moved apart, none of the ω meets them all")
            multipliers = np.abs(np.asarray(info["lam"]))
            lam[w[live]] = _polish(r, low[live], multipliers)
    y = y0 + N @ (N.T @ (B[w].T @ lam[w]))
    lam[f] = np.linalg.lstsq(B[f].T, y - B[w].T @ lam[w], rcond=1e-10)[0] if len(f) else lam[f]
    return lam * size


def _polish(rows: Array, low: Array, multipliers: Array) -> Array:
    """The multipliers on DAQP's active set to full precision, where its rows are independent."""
    on = np.flatnonzero(multipliers > 1e-12)
    factor = _cholesky(rows[on] @ rows[on].T)
    exact = np.zeros(len(low))
    if factor is None:
        return multipliers
    exact[on] = _solve(factor, low[on])
    slack = rows @ (rows.T @ exact) - low
    sound = exact.min(initial=0.0) >= -1e-9 and slack.min(initial=0.0) >= -1e-9
    return np.maximum(exact, 0.0) if sound else multipliers


def _cholesky(A: Array):
    """The lower factor of A, None where its rows count as dependent."""
    if len(A) == 0:
        return np.zeros((0, 0))
    try:
        L = np.linalg.cholesky(A)
    except np.linalg.LinAlgError:
        return None
    return L if np.diag(L).min() ** 2 > _SINGULAR else None


def _solve(L: Array, B: Array) -> Array:
    if len(L) == 0:
        return np.zeros((0, *B.shape[1:]))
    if B.size == 0:
        return np.zeros_like(B)
    columns = torch.from_numpy(np.ascontiguousarray(B.reshape(len(B), -1)))
    return torch.cholesky_solve(columns, torch.from_numpy(L)).numpy().reshape(B.shape)  # importing SciPy's takes 0.2 s


def _null_space(B: Array) -> Array:
    """An orthonormal basis of {y : By = 0}."""
    _, sizes, Vt = np.linalg.svd(B)
    return Vt[int((sizes > 1e-10 * sizes.max(initial=0.0)).sum()) :].T


class _NoDirection(Exception):
    """The rows contradict each other."""


def no_direction(label: str, found: str) -> DegenerateError:
    """What is said of a perturbation that no step can follow."""
    return DegenerateError(
        f"feasibility of the linearised constraints under {label!r}",
        measured=found,
        threshold="one ω that meets all rows",
        meaning="The linearised constraints contradict each other: they depend on each other and the perturbation "
        "moves them apart, or the changed problem is infeasible.",
        cure="Drop redundant constraints, move dependent bounds consistently, or perturb less; strict=False says NaN.",
    )
