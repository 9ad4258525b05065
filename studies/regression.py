"""The paper's constrained linear regression: 100 leave-one-out removals, predicted and retrained (section 5.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif.report import plots
from dif.runtime.work import progress
from studies import results

N, D = 1000, 5  # samples, parameters
NOISE = 0.1  # standard deviation of the noise of y
A_EQ, B_EQ = [[1.0] * 5], -4.0  # A θ = b
A_INEQ, B_INEQ = [[1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, -1.0, 0.0, 1.0]], [1.5, 1.5]  # A θ ≤ b
RHOS = tuple(10.0**e for e in range(0, 7))  # grid of penalty weights ρ
KS = tuple(10.0**e for e in range(0, 13, 2))  # grid of the penalty's second parameter k
PRINTED = "penalty IF, printed"  # penalty IF as the paper prints it, tuned over the grid
MINIMISER = "penalty IF, minimiser"  # penalty IF at the minimiser of the penalised problem, tuned over the grid
RETRAINED = "dif's retraining"  # dif.Retraining, a check of CVXPY's


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Draw X and y as the paper does."""
    rng = np.random.default_rng(seed)
    X, truth = rng.standard_normal((N, D)), rng.standard_normal(D)
    return torch.as_tensor(X), torch.as_tensor(X @ truth + NOISE * rng.standard_normal(N))


def problem(seed: int, bounds: str = "paper") -> tuple[dif.Samples, dif.Problem]:
    """Return the samples and the constrained regression problem.

    `bounds="paper"` uses the paper's right-hand sides; which inequalities bind then depends on the seed.
    `bounds="binding"` sets them 0.3 below the values at the solution without inequalities, so that both bind.
    """
    train = dif.Samples(lambda params, z: 0.5 * (z[0] @ params["theta"] - z[1]) ** 2, data(seed), name="train")
    equality = (dif.linear(A_EQ) == B_EQ).named("sum")
    limits = torch.tensor(B_INEQ, dtype=torch.float64)
    if bounds == "binding":
        relaxed = dif.fit(dif.Problem(train.mean(), [equality]), start(), show_progress=False)
        limits = torch.tensor(A_INEQ, dtype=torch.float64) @ relaxed.theta - 0.3
    elif bounds != "paper":
        raise dif.InvalidInputError(f'`bounds` must be "paper" or "binding", not {bounds!r}.')
    return train, dif.Problem(train.mean(), [equality, (dif.linear(A_INEQ) <= limits).named("limits")])


def start() -> dict[str, Tensor]:
    """Return the initial parameters θ = 0."""
    return {"theta": torch.zeros(D, dtype=torch.float64)}


def retrain_with_cvxpy(seed: int, constrained: dif.Problem, removed: list[int], show_progress: bool = True) -> Tensor:
    """Return θ after removing each sample minus θ̄, (P, 5); CVXPY solves each problem."""
    X, y = (t.numpy() for t in data(seed))
    limits = constrained.constraints[1].tau.numpy()
    indices = np.arange(N)
    before = _solve_with_cvxpy(X, y, limits)
    changes = []
    with progress("CVXPY retraining", len(removed), show_progress) as report:
        for number, i in enumerate(removed):
            remaining = indices != i
            changes.append(_solve_with_cvxpy(X[remaining], y[remaining], limits) - before)
            report(number + 1)
    return torch.as_tensor(np.stack(changes))


def _solve_with_cvxpy(X: np.ndarray, y: np.ndarray, limits: np.ndarray) -> np.ndarray:
    import cvxpy as cp

    theta = cp.Variable(D)
    loss = cp.sum_squares(X @ theta - y) / (2 * len(y))
    constraints = [np.array(A_EQ) @ theta == B_EQ, np.array(A_INEQ) @ theta <= limits]
    tight = {"eps_abs": 1e-10, "eps_rel": 1e-10, "polishing": True, "max_iter": 100_000}
    cp.Problem(cp.Minimize(loss), constraints).solve(solver=cp.OSQP, **tight)
    assert theta.value is not None
    return theta.value


def build_penalty_estimators(solution: dif.Solution) -> Iterator[tuple[dict[str, Any], dif.PenaltyInfluence]]:
    """Yield penalty IF as printed (where only ρ matters) and at its own minimiser, over the grid of ρ and k."""
    for rho in RHOS:
        yield {"at_minimiser": False, "rho": rho, "k": 1.0}, dif.PenaltyInfluence(solution, rho, 1.0)
    for rho in RHOS:
        for k in KS:
            try:
                estimator = dif.PenaltyInfluence(solution, rho, k, at_minimiser=True)
            except dif.DifError:
                continue  # too ill-conditioned to be minimised
            yield {"at_minimiser": True, "rho": rho, "k": k}, estimator


def run(seed: int = 0, removals: int = 100, bounds: str = "paper", show_progress: bool = True) -> dict[str, Any]:
    """Score random removals with every estimator and compare with retraining by CVXPY."""
    if not 2 <= removals <= N:
        raise dif.InvalidInputError(f"`removals` must be between 2 and {N}, not {removals}.")
    train, constrained = problem(seed, bounds)
    solution = dif.fit(constrained, start(), show_progress=False)
    removed = np.random.default_rng([seed, 1]).choice(N, size=removals, replace=False).tolist()
    coordinates = dif.linear(torch.eye(D), name="theta")
    actual = retrain_with_cvxpy(seed, constrained, removed, show_progress)

    estimators: dict[str, Any] = {
        "DIF": dif.DirectionalInfluence(solution, switching=False),  # as in the paper
        "DIF (switching)": dif.DirectionalInfluence(solution, switching=True),
        "Newton": dif.NewtonInfluence(solution),
        RETRAINED: dif.Retraining(solution),
        "classical IF": dif.ClassicalInfluence(solution),
    }
    penalised = list(build_penalty_estimators(solution))
    agreements: dict[str, dict[str, Any]] = {}
    predictions: dict[str, dict[str, list[list[float]]]] = {}
    for convention, renormalise in (("paper", False), ("renormalised", True)):
        perturbations = train.remove_each(removed, renormalise=renormalise)
        scored = {
            name: estimator.scores(coordinates, perturbations, **({} if name == RETRAINED else {"assess": 0})).values
            for name, estimator in estimators.items()
        }
        rows = {name: asdict(dif.Agreement.of(values, actual)) for name, values in scored.items()}
        for at_minimiser, title in ((False, PRINTED), (True, MINIMISER)):
            grid = []
            for setting, estimator in penalised:
                if setting["at_minimiser"] == at_minimiser:
                    values = estimator.scores(coordinates, perturbations, assess=0).values
                    grid.append((dif.Agreement.of(values, actual), setting, values))
            best, setting, values = min(grid, key=lambda entry: entry[0].relative_error)
            scored[title] = values
            rows[title] = {**asdict(best), **setting, "grid": [{**s, **asdict(a)} for a, s, _ in grid]}
        agreements[convention] = rows
        predictions[convention] = {name: values.tolist() for name, values in scored.items()}
    return {
        "study": "regression",
        "version": dif.__version__,
        "seed": seed,
        "bounds": bounds,
        "limits": constrained.constraints[1].tau.tolist(),
        "theta": solution.theta.tolist(),
        "multipliers": solution.lam.tolist(),
        "binding": [solution.active.names[j] for j in solution.active.binding],
        "kkt_residual": solution.kkt.residual,
        "removed": removed,
        "agreement": agreements,
        "actual": actual.tolist(),
        "predicted": predictions,
    }


def reproduce(
    out: Path, seed: int = 0, removals: int = 100, bounds: str = "paper", show_progress: bool = True
) -> dict[str, Any]:
    """Run the study, write regression.json and regression.png, and return the numbers; reload them if they exist."""
    known = results.load_finished(out / "regression.json", out / "regression.png")
    if known is not None and (known["seed"], len(known["removed"]), known["bounds"]) == (seed, removals, bounds):
        return known
    out.mkdir(parents=True, exist_ok=True)
    result = run(seed, removals, bounds, show_progress)
    results.write(out / "regression.json", result)
    draw_figure(out / "regression.png", result)
    return result


def draw_figure(path: Path, result: dict[str, Any]) -> None:
    """Draw (a) classical and penalty IF and (b) DIF against retraining, with weights 1/n unchanged as in the paper."""
    from matplotlib.figure import Figure

    actual = torch.tensor(result["actual"])
    predicted = {name: torch.tensor(values) for name, values in result["predicted"]["paper"].items()}
    canvas = Figure(figsize=(11, 5), layout="constrained")
    left, right = canvas.subplots(1, 2)
    plots.predicted_vs_actual(predicted["classical IF"], actual, left, "classical IF", plots.BLUE)
    plots.predicted_vs_actual(predicted[PRINTED], actual, left, f"{PRINTED}, tuned", plots.GREEN, marker="s")
    plots.predicted_vs_actual(predicted["DIF"], actual, right, "DIF", plots.ORANGE)
    left.set_title("(a) without and with soft constraints")
    right.set_title("(b) directional influence")
    shown = torch.stack([actual, *(predicted[name] for name in ("classical IF", PRINTED, "DIF"))])
    room = 0.05 * float(shown.max() - shown.min())
    for ax in (left, right):
        ax.set(xlim=(float(shown.min()) - room, float(shown.max()) + room), aspect="equal")
        ax.set_ylim(ax.get_xlim())
        ax.locator_params(nbins=5)
    binding = ", ".join(result["binding"])
    canvas.suptitle(f"Δθ, {len(actual)} removals × {D} coordinates, seed {result['seed']}, binding: {binding}")
    canvas.savefig(path, dpi=150)
