"""Benchmarks under constraints: the time they add, one QP per sample, and differentiable layers at a kink.

`python constrained.py overhead|programs|kink` runs one of them and prints the result as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import HERE, LAYERS, OURS, clock, run_alone, table

ROUNDS = 15  # runs of each measurement
KINK = {"n": 400, "d": 8, "seed": 0}  # samples, parameters and seed of the regression at a kink


def overhead() -> dict[str, Any]:
    """Time dif on the digits with bounds on the risks of 0, 1, 3 and 9 classes, each 2 % below its unbounded value."""
    import torch

    sys.path.insert(0, str(HERE / "peers"))
    import problem
    from dif_ import loss

    import dif
    from dif.derivatives.checks import check_derivatives
    from dif.problem.parameters import Parameters

    torch.set_num_threads(1)
    model, data = problem.load()
    train, test = dif.Samples(loss, (data.x, data.y)), dif.Samples(loss, (data.x_test, data.y_test), name="test")
    removals = train.remove_each(renormalise=False)
    objective = train.mean() + dif.ridge(problem.RIDGE)
    free = dif.Solution(dif.Problem(objective), model)
    solved = {0: free}
    for m in (1, 3, 9):
        risks = [train.mean(where=data.y == label) for label in range(m)]
        bounds = dif.Solution(dif.Problem(objective, [risk <= 0.0 for risk in risks]), model, torch.zeros(m)).f[1:]
        stated = dif.Problem(objective, [risk <= 0.98 * float(f) for risk, f in zip(risks, bounds, strict=True)])
        solved[m] = dif.fit(stated, model, show_progress=False)

    def run(m: int, switching: Any, assess: int = 0) -> dict[str, float]:
        at = solved[m]
        fresh = dif.Solution(at.problem, at.params, at.lam if m else None)
        begun = time.perf_counter()
        influence = dif.DirectionalInfluence(fresh, switching=switching)
        prepared = time.perf_counter() - begun
        influence.scores(test, removals, show_progress=False, assess=assess)
        return {"prepared": prepared, "whole": time.perf_counter() - begun}

    kinds = [(m, how, assess) for m in solved for how, assess in ((False, 0), ("auto", 0), ("auto", 20))]
    taken: dict[Any, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for kind in kinds:
        run(*kind)
    for _ in range(ROUNDS):
        for kind in kinds:
            taken[kind].append(run(*kind))

    def median(m: int, how: Any, assess: int, part: str = "whole") -> float:
        return statistics.median(one[part] for one in taken[m, how, assess])

    layout, theta = Parameters.of(model)
    check, _ = clock(lambda: check_derivatives(train, layout, theta), ROUNDS)  # done at the start of fit and at its end
    start = {name: torch.zeros_like(t) for name, t in model.named_parameters()}
    start = type(solved[1].params)(model, start, {})  # the model with all parameters zero
    fitted, _ = clock(lambda: dif.fit(solved[1].problem, start, show_progress=False), 3)

    def judge() -> float:
        fresh = dif.Solution(solved[1].problem, solved[1].params, solved[1].lam)
        fresh.check()
        return clock(fresh.derivatives, 1)[0]

    prepared = dif.DirectionalInfluence(solved[1], switching=False)
    solve, _ = clock(lambda: prepared.system.solver.solve(torch.ones_like(free.theta)[:, None]), 50)
    return {
        "seconds": {m: median(m, False, 0) for m in solved},
        "auto": {m: median(m, "auto", 0) for m in solved},
        "assess": {m: median(m, "auto", 20) - median(m, "auto", 0) for m in solved},
        "prepared": {m: median(m, "auto", 20, "prepared") for m in solved},
        "active": {m: len(at.active.active) for m, at in solved.items()},
        "solve": solve,
        "check": {"in fit": 2 * check / fitted, "in preparing": statistics.median(judge() for _ in range(ROUNDS))
                  / median(1, "auto", 0, "prepared")},
    }  # fmt: skip


def programs() -> dict[str, Any]:
    """Time all removals of the paper's regression: dif, and one QP per sample given H, G and b."""
    import clarabel
    import cvxpy as cp
    import daqp
    import numpy as np
    import osqp
    import torch
    from scipy import sparse

    import dif
    from studies import regression

    torch.set_num_threads(1)
    seed = 3  # one inequality binds
    train, stated = regression.problem(seed)
    solution = dif.fit(stated, regression.start(), show_progress=False)
    removals, coordinates = train.remove_each(renormalise=False), dif.linear(torch.eye(regression.D))
    X, y = (t.numpy() for t in regression.data(seed))
    theta, n, d = solution.theta.numpy(), len(y), regression.D
    H, b = X.T @ X / n, -(X @ theta - y)[:, None] * X / n  # b of each removal, (n, d)
    G = solution.G[list(solution.active.binding)].numpy()
    zero = np.zeros(len(G))

    def whole() -> np.ndarray:
        fresh = dif.Solution(stated, solution.params, solution.lam)
        derivative = dif.DirectionalInfluence(fresh, switching=False)
        return derivative.scores(coordinates, removals, show_progress=False, assess=0).values.numpy()

    prepared = dif.DirectionalInfluence(solution, switching=False)

    def scores() -> np.ndarray:
        return prepared.scores(coordinates, removals, show_progress=False, assess=0).values.numpy()

    def by_daqp() -> np.ndarray:
        sense = np.full(len(G), 5, dtype=np.int32)
        return np.stack([daqp.solve(H.copy(), one.copy(), np.ascontiguousarray(G), zero, zero, sense)[0] for one in b])

    def by_osqp() -> np.ndarray:
        solver, rows, exacting = osqp.OSQP(), [], {"verbose": False, "eps_abs": 1e-9, "eps_rel": 1e-9}
        solver.setup(sparse.csc_matrix(np.triu(H)), b[0], sparse.csc_matrix(G), zero, zero, **exacting)
        for one in b:
            solver.update(q=one)
            rows.append(solver.solve().x)
        return np.stack(rows)

    def by_clarabel() -> np.ndarray:
        settings, P, A = clarabel.DefaultSettings(), sparse.csc_matrix(np.triu(H)), sparse.csc_matrix(G)
        settings.verbose = False
        cones = [clarabel.ZeroConeT(len(G))]
        return np.stack([np.array(clarabel.DefaultSolver(P, one, A, zero, cones, settings).solve().x) for one in b])

    def cvxpy_of(direction: Any) -> tuple[Any, Any]:
        omega = cp.Variable(d)
        objective = cp.Minimize(direction @ omega + 0.5 * cp.quad_form(omega, cp.psd_wrap(H)))
        return omega, cp.Problem(objective, [G @ omega == 0])

    def by_cvxpy() -> np.ndarray:
        rows = []
        for one in b:
            omega, program = cvxpy_of(one)
            program.solve()
            rows.append(omega.value)
        return np.stack(rows)

    def by_parameter() -> np.ndarray:
        direction, rows = cp.Parameter(d), []
        omega, program = cvxpy_of(direction)
        for one in b:
            direction.value = one
            program.solve()
            rows.append(omega.value)
        return np.stack(rows)

    scores(), whole()
    exact = _constrained_steps(H, G, b)
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "dif, scores (prepared)": (scores, 20),
        "dif, all included": (whole, 20),
        "DAQP": (by_daqp, 3),
        "OSQP, one factorisation": (by_osqp, 1),
        "Clarabel": (by_clarabel, 1),
        "CVXPY, parametrised": (by_parameter, 1),
        "CVXPY, built for each (the paper's way)": (by_cvxpy, 1),
    }
    made = {}
    for name, (way, repeat) in ways.items():
        seconds, answer = clock(way, repeat)
        made[name] = {"seconds": seconds, "error": float(np.abs(answer - exact).max() / np.abs(exact).max())}
    return {"n": n, "d": d, "rows": len(G), "made": made}


def _constrained_steps(H: Any, G: Any, b: Any) -> Any:
    """Return ω = argmin bᵀω + ½ωᵀHω subject to Gω = 0 for each row of b, from the full KKT matrix."""
    import numpy as np

    K = np.block([[H, G.T], [G, np.zeros((len(G), len(G)))]])
    return np.linalg.solve(K, np.concatenate([-b, np.zeros((len(b), len(G)))], 1).T).T[:, : len(H)]


def kink(folder: str) -> dict[str, Any]:
    """Compare dif and cvxpylayers at a kink, with the bound exactly at the unconstrained solution of a regression.

    There λ = 0 and the one-sided derivatives differ. The ground truth is the one-sided difference quotient of
    re-solving with the weight of a sample lowered by ε.
    """
    import numpy as np
    import torch

    import dif

    torch.set_num_threads(1)
    rng = np.random.default_rng(KINK["seed"])
    n, d = KINK["n"], KINK["d"]
    X, truth = rng.standard_normal((n, d)), rng.standard_normal(d)
    y = X @ truth + 0.3 * rng.standard_normal(n)
    a, H = rng.standard_normal(d), X.T @ X / n
    free = np.linalg.solve(H, X.T @ y / n)
    tau = float(a @ free)

    def resolve(w: np.ndarray) -> np.ndarray:
        """Solve the problem with sample weights w in closed form."""
        K, g = (X.T * w) @ X / n, X.T @ (w * y) / n
        theta, back = np.linalg.solve(K, g), np.linalg.solve(K, a)
        return theta - max(a @ theta - tau, 0.0) / (a @ back) * back

    eps, every = 1e-6, np.ones(n)
    actual = np.stack([(resolve(every - eps * (np.arange(n) == i)) - free) / eps for i in range(n)])
    train = dif.Samples(lambda p, z: 0.5 * (z[0] @ p["theta"] - z[1]) ** 2, tuple(map(torch.as_tensor, (X, y))))
    stated = dif.Problem(train.mean(), [dif.linear(a[None]) <= tau])

    def ours() -> np.ndarray:
        solution = dif.Solution(stated, {"theta": torch.as_tensor(free)}, [0.0])
        removals = train.remove_each(renormalise=False)
        coordinates = dif.linear(torch.eye(d))
        derivative = dif.DirectionalInfluence(solution, switching=False)
        return derivative.scores(coordinates, removals, show_progress=False, assess=0).values.numpy()

    ours()
    seconds, predicted = clock(ours, 20)
    files = Path(folder) / "kink.npz"
    np.savez(files, X=X, y=y, a=a, tau=tau)
    layer = run_alone(LAYERS, str(HERE / "layers.py"), str(files))
    predictions = {"dif": predicted, "cvxpylayers (diffcp)": np.array(layer["removed"])}
    size = np.linalg.norm(actual, axis=1)
    wrong = {}
    for name, each in predictions.items():
        off = np.linalg.norm(each - actual, axis=1) / size
        wrong[name] = {
            "right": int((off < 1e-3).sum()),
            "median": float(np.median(off)),
            "worst": float(off.max()),
            "cosine": float((each * actual).sum() / np.linalg.norm(each) / np.linalg.norm(actual)),
        }
    return {"n": n, "seconds": {"dif": seconds, "cvxpylayers (diffcp)": layer["seconds"]}, "wrong": wrong}


def section() -> str:
    """Run the three benchmarks and return their tables as Markdown."""
    added, many = run_alone(OURS, "constrained.py", "overhead"), run_alone(OURS, "constrained.py", "programs")
    with tempfile.TemporaryDirectory() as folder:
        bent = run_alone(OURS, "constrained.py", "kink", folder)
    seconds, active = added["seconds"], added["active"]
    allowed = {m: 1.1 * seconds["0"] + active[m] * added["solve"] for m in seconds}
    free, costs = seconds["0"], []
    for m, taken in seconds.items():
        ratios = f"{taken / free:.2f}", f"{taken / allowed[m]:.2f}", f"{added['auto'][m] / free:.2f}"
        costs.append([m if m != "0" else "none", str(active[m]), f"{1e3 * taken:.0f}", *ratios])
    checked = []
    for m, taken in added["assess"].items():
        times = (f"{1e3 * seconds:.0f}" for seconds in (added["prepared"][m], taken))
        checked.append([m if m != "0" else "none", *times, f"{taken / added['prepared'][m]:.2f}"])
    ours = many["made"]["dif, scores (prepared)"]["seconds"]
    whole = many["made"]["dif, all included"]["seconds"]
    each = []
    for name, one in many["made"].items():
        ratios = f"{one['seconds'] / ours:,.1f}", f"{one['seconds'] / whole:,.1f}"
        each.append([name, f"{1e3 * one['seconds']:,.1f}", *ratios, f"{one['error']:.0e}"])
    kinked = []
    for name, one in bent["wrong"].items():
        errors = f"{one['median']:.0e}", f"{one['worst']:.0e}", f"{one['cosine']:.3f}"
        kinked.append([name, f"{1e3 * bent['seconds'][name]:,.1f}", f"{one['right']} of {bent['n']}", *errors])
    return f"""## What constraints add

These are the same digits, 1500 samples × 50 test points, with bounds on the risks of 1, 3 and 9 classes. Each bound is
2 % below the risk without it, and all of them bind. Each time is the median of {ROUNDS} runs, alternating between the
settings, in one process. One solve with the prepared factors takes {1e3 * added["solve"]:.2f} ms. The allowed time is
the time without constraints + 10 % + one solve per active row.

The times are those of the derivative (switching=False). The last column is the default, switching="auto", which also
determines which constraints the removals could switch, and keeps these in the step.

{table(["bounds that bind", "active", "ms", "time / time without", "time / allowed", "auto / time without"], costs)}
## What it costs to know how far scores can be trusted

The same problems, with the expected error estimated for the 20 strongest removals and 20 others (assess=20, the
default).

{table(["bounds that bind", "preparing, ms", "assess=20, ms", "its time / preparing"], checked)}
Comparing the derivatives of torch with finite differences takes {100 * added["check"]["in fit"]:.1f} % of the time of
`fit`, and {100 * added["check"]["in preparing"]:.1f} % of the time of preparing (with one bound).

## One QP per sample

This is the paper's regression with {many["n"]} removals, d = {many["d"]} and {many["rows"]} active rows. The other
solvers are given H, G and b; the time of dif with "all included" contains computing them. Errors are measured against a
dense solution of the KKT system.

{table(["", "ms for all", "its time / dif's scores", "its time / dif, all included", "error"], each)}
## At a kink

This is a linear regression with N = {KINK["n"]}, d = {KINK["d"]} and a bound that the unconstrained solution meets
exactly (λ = 0). Removals that push the solution against the bound move it along the bound, and the others move it away
from the bound, so no linear map is right for all of them. The ground truth is the one-sided difference quotient of
re-solving. cvxpylayers differentiates the same training problem with respect to the weights of the samples.

{table(["", "ms for all", "right to 0.1 %", "median error", "worst error", "cosine"], kinked)}"""


if __name__ == "__main__":
    print(json.dumps({"overhead": overhead, "programs": programs, "kink": kink}[sys.argv[1]](*sys.argv[2:])))
