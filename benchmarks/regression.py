"""All 1000 samples of the paper's regression: dif against one QP per sample (the paper's way), in one run.

Run with `make bench`. "dif, all included" computes gradients, Hessian, active set and solves before it scores; "scores,
prepared" is the scoring alone, which is what a QP per sample does too, given H, G and b. Ratios are times of the others
divided by dif's, on the same machine in the same minute, one thread each. The last column is how far each answer is
from dif's, of its size; 1e-3 or more fails the run (CVXPY's default solver stops at an absolute 1e-5).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import cvxpy as cp
import daqp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import dif
from dif.studies import regression

SEED = 3  # one inequality binds


def timed(function: Callable[[], np.ndarray], repeat: int) -> tuple[float, np.ndarray]:
    """Median seconds over `repeat` runs, and the answer."""
    seconds = []
    for _ in range(repeat):
        begun = time.perf_counter()
        answer = function()
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds)), answer


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    train, problem = regression.problem(SEED)
    solution = dif.fit(problem, regression.start(), show_progress=False)
    removals = train.remove_each(renormalise=False)
    coordinates = dif.linear(torch.eye(regression.D))

    # what a QP per sample needs
    X, y = (t.numpy() for t in regression.data(SEED))
    theta, n = solution.theta.numpy(), len(y)
    H, b = X.T @ X / n, -(X @ theta - y)[:, None] * X / n  # b of each removal, (n, d)
    G = solution.G[list(solution.active.binding)].numpy()
    G_weak = solution.G[list(solution.active.weak)].numpy()

    def cvxpy_rebuilt() -> np.ndarray:
        rows = []
        for one in b:
            omega = cp.Variable(len(theta))
            held = [G @ omega == 0] + ([G_weak @ omega <= 0] if len(G_weak) else [])
            cp.Problem(cp.Minimize(one @ omega + 0.5 * cp.quad_form(omega, cp.psd_wrap(H))), held).solve()
            rows.append(omega.value)
        return np.stack(rows)

    def cvxpy_parametrised() -> np.ndarray:
        omega, direction = cp.Variable(len(theta)), cp.Parameter(len(theta))
        held = [G @ omega == 0] + ([G_weak @ omega <= 0] if len(G_weak) else [])
        stated = cp.Problem(cp.Minimize(direction @ omega + 0.5 * cp.quad_form(omega, cp.psd_wrap(H))), held)
        rows = []
        for one in b:
            direction.value = one
            stated.solve()
            rows.append(omega.value)
        return np.stack(rows)

    def daqp_each() -> np.ndarray:
        rows, A = [], np.ascontiguousarray(np.concatenate([G, G_weak]))
        low = np.concatenate([np.zeros(len(G)), np.full(len(G_weak), -1e30)])
        sense = np.concatenate([np.full(len(G), 5), np.zeros(len(G_weak))]).astype(np.int32)
        for one in b:
            rows.append(daqp.solve(H.copy(), one.copy(), A, np.zeros(len(A)), low, sense)[0])
        return np.stack(rows)

    def whole() -> np.ndarray:
        fresh = dif.Solution.of_program(solution.program, solution.theta, solution.lam)
        return dif.DirectionalInfluence(fresh).scores(coordinates, removals).values.numpy()

    prepared = dif.DirectionalInfluence(solution)
    slopes, rises = torch.randn(n, len(G)).double(), torch.zeros(n, len(G)).double()

    def scores() -> np.ndarray:
        return prepared.scores(coordinates, removals).values.numpy()

    def engine() -> np.ndarray:
        return prepared.linearisation.push(slopes, rises, removals)[0].numpy()

    scores(), whole(), engine()  # warm up
    ours, answer = timed(whole, 20)
    again, _ = timed(scores, 20)
    small, _ = timed(engine, 50)
    table = Table(title=f"{n} removals, d = {len(theta)}, {len(G)} binding and {len(G_weak)} weak rows, one thread")
    for heading in ("method", "ms for all", "µs per sample", "times dif's scores", "times dif, all included", "gap"):
        table.add_column(heading, justify="left" if heading == "method" else "right")

    def row(name: str, seconds: float, gap: float | None = None) -> None:
        ratios = ("", "", "") if gap is None else (f"{seconds / again:,.1f}", f"{seconds / ours:,.1f}", f"{gap:.0e}")
        table.add_row(name, f"{1e3 * seconds:,.1f}", f"{1e6 * seconds / n:,.2f}", *ratios)

    row("dif, all included", ours)
    row("dif: scores, prepared", again)
    row("dif: reduced QPs alone", small)
    for name, function in (
        ("DAQP per sample", daqp_each),
        ("CVXPY per sample, parametrised", cvxpy_parametrised),
        ("CVXPY per sample (paper)", cvxpy_rebuilt),
    ):
        seconds, other = timed(function, 1)
        gap = np.abs(other - answer).max() / np.abs(answer).max()
        if gap > 1e-3:
            raise SystemExit(f"{name}: answers differ by {gap:.2e} of their size")
        row(name, seconds, gap)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
