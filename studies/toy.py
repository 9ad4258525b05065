"""The paper's toy: least squares with ‖θ‖₁ ≤ 1, where only one-sided derivatives exist (paper, section 2.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dif
from dif.report import plots
from studies import results


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

    plots.landscape(solution, left, span=0.55)
    by_direction = result["changes"]["paper"]
    # each arrow is the change for Δε = ∓1/3
    for direction, label, colour in (
        ("removal", "ε → 0⁻ (weight falls): along the boundary", plots.ORANGE),
        ("opposite", "ε → 0⁺ (weight grows): into the interior", plots.GREEN),
    ):
        change = torch.tensor(by_direction[direction]["DIF"]["theta"])
        plots.arrow(solution.theta, change, left, label, colour)
    left.set_title("ε = 0: two one-sided derivatives")

    plots.landscape(after, right, span=0.55)
    right.plot(*solution.theta.numpy(), marker="o", color="black", markersize=6, zorder=5)
    for name, colour, style in (
        ("retraining", "black", ":"),
        ("DIF", plots.ORANGE, "-"),
        ("classical IF", plots.BLUE, "-"),
    ):
        change = torch.tensor(by_direction["removal"][name]["theta"])
        coordinates = ", ".join(_format_coordinate(x) for x in change.tolist())
        plots.arrow(solution.theta, change, right, f"{name}: ({coordinates})", colour, style)
    right.set_title("ε = −1/3: z₂ removed")
    left.legend(loc="lower left", fontsize=8)  # where the legends hide no corner of the feasible set
    right.legend(loc="upper right", fontsize=8)
    canvas.savefig(path, dpi=150)


def _format_coordinate(x: float) -> str:
    """Format a coordinate with three digits; what rounding leaves of 0 is 0, without a sign."""
    return f"{round(x, 9) + 0.0:.3g}".replace("-", "−")
