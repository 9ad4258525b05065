"""The small quadratic program per perturbation, in the multipliers ν of the selected constraint rows.

Find ν with t = a − Sν: t = 0 on equal rows; t ≤ 0, ν ≥ 0, t·ν = 0 on the others.
S = G H_ρ⁻¹ Gᵀ; the step ω = −H_ρ⁻¹(b + Gᵀν) changes row j to tⱼ.
"""

from __future__ import annotations

from typing import Any

import daqp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dif.errors import DegenerateError

Array = NDArray[Any]  # float64

_SIGN_TOLERANCE = 1e-12  # a sign counts as wrong beyond this, relative to the largest entry of its right-hand side
_SINGULAR = 1e-11  # smallest pivot of the scaled S above which rows count as independent
_NEGLIGIBLE = 1e-13  # pivot of the scaled S that counts as zero, relative to the norm of S
_ROUNDS = 40  # largest number of rounds of block pivoting, plus two per row; DAQP solves what is left
_PATIENCE = 3  # rounds without fewer wrong signs before rows change sides one at a time
_NO_LIMIT = 1e30  # DAQP takes bounds of this size as infinite


def solve_reduced_qp(S: Tensor, a: Tensor, equal: Tensor) -> tuple[Tensor, dict[int, str]]:
    """Solve for ν, (P, m), given right-hand sides a (P, m), S (m, m) or one each (P, m, m), and which rows are equal.

    Return ν and a dict of the right-hand sides without a solution: index → reason; their rows of ν are NaN.

    Equal rows are eliminated once by a Schur complement. The others go through block pivoting, batched over right-hand
    sides with the same active set. Those that do not converge, or have dependent active rows, are solved by DAQP.
    """
    failed: dict[int, str] = {}
    if S.dim() == 3:
        found = torch.full_like(a, float("nan"))
        for p in torch.nonzero(torch.isfinite(S).flatten(1).all(1)).reshape(-1).tolist():
            found[p : p + 1], reasons = solve_reduced_qp(S[p], a[p : p + 1], equal)
            failed |= {p: reasons[0]} if reasons else {}
        return found, failed
    if a.numel() == 0:
        return torch.zeros_like(a), failed
    M, goal, mask = (0.5 * (S + S.T)).double().cpu().numpy(), a.double().cpu().numpy(), equal.cpu().numpy()
    scale = 1.0 / np.sqrt(np.maximum(np.diag(M), np.finfo(float).tiny))
    scale[np.diag(M) <= 0] = 0.0  # a row whose gradient vanishes
    M, goal = M * scale * scale[:, None], goal * scale
    e, w = np.flatnonzero(mask), np.flatnonzero(~mask)
    M_ew = M[np.ix_(e, w)]
    eliminated = _solve_positive(M[np.ix_(e, e)], np.hstack([M_ew, goal[:, e].T]))
    nu, converged = np.zeros_like(goal), np.full(len(goal), eliminated is not None)
    if eliminated is not None:
        X, y = np.hsplit(eliminated, [len(w)])
        if len(w):
            nu[:, w], converged = _pivot_blocks(M[np.ix_(w, w)] - M_ew.T @ X, goal[:, w] - y.T @ M_ew)
        nu[:, e] = y.T - nu[:, w] @ X.T
    left = np.flatnonzero(~converged)
    if len(left):
        nu[left], reasons = _solve_daqp(_factorise(M), goal[left], mask, scale)
        failed |= {int(left[p]): reason for p, reason in reasons.items()}
    return torch.as_tensor(nu * scale).to(a), failed


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
            solved = _solve_positive(M[np.ix_(on, on)], c[np.ix_(rows, on)].T)
            if solved is None:
                singular.append(rows)
                continue
            nu[rows] = 0.0
            nu[np.ix_(rows, on)] = solved.T
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


def _factorise(S: Array) -> Array:
    """Return B, (m, rank), with S = BBᵀ for regular or singular S; quadratic in m where the rank is low."""
    from scipy.linalg import get_lapack_funcs  # slow to import, seldom needed

    (factorise,) = get_lapack_funcs(("pstrf",), (S,))
    factor, pivots, rank, _ = factorise(S, tol=_NEGLIGIBLE * float(np.linalg.norm(S)), lower=1)
    B = np.zeros((len(S), rank))
    B[pivots - 1] = np.tril(factor[:, :rank])
    return B


def _solve_daqp(
    B: Array, a: Array, equal: NDArray[np.bool_], scale: Array
) -> tuple[Array, dict[int, str]]:  # fmt: skip
    """Solve right-hand sides a, (P, m), by DAQP, for regular or singular S = BBᵀ; the result as of `solve_reduced_qp`.

    The program is min ½‖y‖² s.t. By ≥ a (By = a on equal rows), with y = Bᵀν. The rows of S and a are scaled by
    `scale`.
    """
    size = np.abs(a).max(1, initial=0.0)
    size[size == 0] = 1.0
    goal, nu, failed = a / size[:, None], np.zeros_like(a), {}
    e, w = np.flatnonzero(equal), np.flatnonzero(~equal)
    U, sizes, Vt = np.linalg.svd(B[e])
    rank = int((sizes > 1e-10 * sizes.max(initial=0.0)).sum())
    inverse = (Vt[:rank].T / sizes[:rank]) @ U[:, :rank].T  # of the equal rows
    N = Vt[rank:].T  # basis of {y : By = 0 on equal rows}
    y = goal[:, e] @ inverse.T
    gap = goal[:, e] - y @ B[e].T  # combines dependent equal rows to 0: measures how far apart a moves them
    low, rows = goal[:, w] - y @ B[w].T, np.ascontiguousarray(B[w] @ N)
    free = np.abs(rows).max(1, initial=0.0) > 1e-12
    rows = rows[free]
    for p in range(len(a)):
        try:
            if np.abs(gap[p]).max(initial=0.0) > 1e-8:
                distance = size[p] * (gap[p] @ gap[p]) / np.linalg.norm(scale[e] * gap[p])
                raise _InconsistentRows(f"equalities moved apart by {distance:.3g}")
            if np.any(low[p, ~free] > 1e-8):
                raise _InconsistentRows("an inequality that depends on the equalities moved past them")
            if len(rows):
                nu[p, w[free]] = _nearest_point_multipliers(rows, low[p, free])
        except _InconsistentRows as reason:
            failed[p] = str(reason)
    pull = nu[:, w] @ B[w]
    nu[:, e] = (y + pull @ N @ N.T - pull) @ inverse
    nu[list(failed)] = np.nan
    return nu * size[:, None], failed


def _nearest_point_multipliers(rows: Array, low: Array) -> Array:
    """Return the multipliers of min ½‖y‖² s.t. rows·y ≥ low: those of DAQP, to full precision if rows allow it."""
    d = rows.shape[1]
    upper, kinds = np.full(len(rows), _NO_LIMIT), np.zeros(len(rows), dtype=np.int32)
    _, _, flag, info = daqp.solve(
        np.eye(d), np.zeros(d), rows, upper, np.ascontiguousarray(low), kinds, primal_tol=1e-11
    )
    if flag != 1:
        raise _InconsistentRows("inequalities moved apart, so that no step satisfies all of them")
    multipliers, exact = np.abs(np.asarray(info["lam"])), np.zeros(len(low))
    on = np.flatnonzero(multipliers > 1e-12)
    solved = _solve_positive(rows[on] @ rows[on].T, low[on, None])
    if solved is None:  # dependent active rows
        return multipliers
    exact[on] = solved[:, 0]
    slack = rows @ (rows.T @ exact) - low
    valid = exact.min(initial=0.0) >= -1e-9 and slack.min(initial=0.0) >= -1e-9
    return np.maximum(exact, 0.0) if valid else multipliers


def _solve_positive(A: Array, B: Array) -> Array | None:
    """Solve AX = B by Cholesky; None if the rows of A count as dependent. Importing SciPy's takes 0.2 s."""
    L, failed = torch.linalg.cholesky_ex(torch.from_numpy(A))
    if int(failed) or (len(L) and not float(L.diagonal().min()) ** 2 > _SINGULAR):
        return None
    return torch.cholesky_solve(torch.from_numpy(np.ascontiguousarray(B)), L).numpy()


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
