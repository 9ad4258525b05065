"""The paper's toy: least squares with ‖θ‖₁ ≤ 1, where only one-sided derivatives exist (paper, section 2.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif.report import plots
from studies import results

_SPAN = 0.55  # half the width of a landscape


def build_problem() -> tuple[dif.Samples, dif.Problem]:
    """Return the three samples and the problem; ‖θ‖₁ ≤ 1 is written as four linear, hence smooth, constraints."""
    X = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    train = dif.Samples(lambda params, z: (z[0] @ params["theta"] - z[1]) ** 2, (X, y), name="train")
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    return train, dif.Problem(train.mean(), [(dif.linear(corners) <= 1.0).named("l1 ball")])


def run() -> dict[str, Any]:
    """Return every number of the toy: the solution, and the change that each estimator predicts for removing z₂.

    "opposite" is the perturbation in the opposite direction: z₂ gains the weight that the removal takes away.
    """
    train, problem = build_problem()
    solution = dif.fit(problem, {"theta": torch.zeros(2, dtype=torch.float64)}, show_progress=False)
    estimators = {
        "DIF": dif.DirectionalInfluence(solution, switching=False),  # the paper's
        "classical IF": dif.ClassicalInfluence(solution),
        "penalty IF": dif.PenaltyInfluence(solution),
        "Newton": dif.NewtonInfluence(solution),
        "retraining": dif.Retraining(solution),
    }
    changes: dict[str, Any] = {}
    for convention, renormalise in (("paper", False), ("renormalised", True)):
        removal = train.remove([1], renormalise=renormalise)
        directions = {"removal": removal, "opposite": -removal}
        changes[convention] = {
            direction: {
                name: {
                    "theta": estimator.change(perturbation).flat.tolist(),
                    "multipliers": estimator.change(perturbation).multipliers.flat.tolist(),
                }
                for name, estimator in estimators.items()
            }
            for direction, perturbation in directions.items()
        }
    return {
        "study": "toy",
        "version": dif.__version__,
        "theta": solution.theta.tolist(),
        "multipliers": solution.lam.tolist(),
        "weak": [solution.active.names[j] for j in solution.active.weak],
        "binding": [solution.active.names[j] for j in solution.active.binding],
        "kkt_residual": solution.kkt.residual,
        "changes": changes,
    }


def reproduce(out: Path) -> dict[str, Any]:
    """Run the study, write toy.json and toy.png, and return the numbers."""
    out.mkdir(parents=True, exist_ok=True)
    result = run()
    results.write(out / "toy.json", result)
    draw_figure(out / "toy.png", result)
    return result


def draw_figure(path: Path, result: dict[str, Any]) -> None:
    """Draw the two one-sided derivatives at ε = 0 (left) and the estimates for removing z₂ with the truth (right)."""
    from matplotlib.figure import Figure

    train, problem = build_problem()
    solution = dif.fit(problem, {"theta": torch.zeros(2, dtype=torch.float64)}, show_progress=False)
    removed = dif.Problem(train.weighted([1 / 3, 0.0, 1 / 3]), problem.constraints)
    after = dif.Solution.from_params(removed, {"theta": torch.tensor([0.75, 0.25], dtype=torch.float64)})
    canvas = Figure(figsize=(11, 5), layout="constrained")
    left, right = canvas.subplots(1, 2)

    draw_landscape(solution, left)
    by_direction = result["changes"]["paper"]
    # each arrow is the change for Δε = ∓1/3
    for direction, label, colour in (
        ("removal", "ε → 0⁻ (weight falls): along the boundary", plots.ORANGE),
        ("opposite", "ε → 0⁺ (weight grows): into the interior", plots.GREEN),
    ):
        change = torch.tensor(by_direction[direction]["DIF"]["theta"])
        _draw_arrow(solution.theta, change, left, label, colour)
    left.set_title("ε = 0: two one-sided derivatives")

    draw_landscape(after, right)
    right.plot(*solution.theta.numpy(), marker="o", color="black", markersize=6, zorder=5)
    for name, colour, style in (
        ("retraining", "black", ":"),
        ("DIF", plots.ORANGE, "-"),
        ("classical IF", plots.BLUE, "-"),
    ):
        change = torch.tensor(by_direction["removal"][name]["theta"])
        coordinates = ", ".join(_format_coordinate(x) for x in change.tolist())
        _draw_arrow(solution.theta, change, right, f"{name}: ({coordinates})", colour, style)
    right.set_title("ε = −1/3: z₂ removed")
    left.legend(loc="lower left", fontsize=8)  # where the legends hide no corner of the feasible set
    right.legend(loc="upper right", fontsize=8)
    canvas.savefig(path, dpi=150)


def draw_landscape(solution: dif.Solution, ax: Any) -> None:
    """Plot the objective, and the region of two parameters in which all inequalities hold, around a solution."""
    program, centre = solution.program, solution.theta
    axis = torch.linspace(-_SPAN, _SPAN, 81).to(centre)
    values = torch.stack([program.rows.values(centre + torch.stack([u, v])) for v in axis for u in axis])
    size = (len(axis), len(axis))
    x, y = (axis + centre[0]).numpy(), (axis + centre[1]).numpy()
    ax.contour(x, y, values[:, 0].reshape(size).numpy(), levels=18, cmap="Greys", linewidths=0.8, alpha=0.8)
    worst = np.max([_refine(row) for row in (values[:, 1:] - program.tau).T.reshape(-1, *size).numpy()], axis=0)
    fine = (np.linspace(axis[0], axis[-1], len(worst)) for axis in (x, y))
    where = (*fine, worst)
    ax.contourf(*where, levels=[-np.inf, 0.0], colors=[plots.BLUE], alpha=0.10)
    ax.contour(*where, levels=[0.0], colors=[plots.BLUE], linewidths=1.2)
    ax.plot(*centre.numpy(), marker="o", color="black", markersize=6, zorder=5)
    ax.set_aspect("equal")
    ax.set_xlabel("θ₁")
    ax.set_ylabel("θ₂")


def _refine(grid: np.ndarray, factor: int = 10) -> np.ndarray:
    """Interpolate values on a grid linearly, so that a corner of the maximum of several rows is drawn sharp."""
    for _ in range(2):  # along one axis, then along the other
        coarse, fine = np.arange(len(grid)), np.linspace(0, len(grid) - 1, factor * (len(grid) - 1) + 1)
        grid = np.stack([np.interp(fine, coarse, column) for column in grid.T])
    return grid


def _draw_arrow(start: Tensor, change: Tensor, ax: Any, label: str, colour: str, style: str = "-") -> None:
    """Draw a change of two parameters as an arrow."""
    begin, end = start.numpy(), (start + change).numpy()
    if np.linalg.norm(end - begin) > 0:
        shape = {"arrowstyle": "-|>", "color": colour, "lw": 2, "linestyle": style, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", xy=end, xytext=begin, arrowprops=shape, zorder=6)
    ax.plot([], [], color=colour, linestyle=style, linewidth=2, label=label)


def _format_coordinate(x: float) -> str:
    """Format a coordinate with three digits; what rounding leaves of 0 is 0, without a sign."""
    return f"{round(x, 9) + 0.0:.3g}".replace("-", "−")
