"""Data-attribution tests on the digits: linear datamodeling score, wrong labels, sets of samples to remove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dif
from dif.optimality.targets import Targets
from dif.runtime.progress import progress
from dif.studies import results
from dif.studies.digits import L2, Task, build_task

STRICT = -0.03  # τ: the risk of group 0 must be lower than the mean risk by 0.03
SUBSETS = 50  # random halves of the data
TESTS = 100  # test samples in the linear datamodeling score
CHECKPOINTS = 10  # checkpoints that TracIn sums over
STEPS = 50  # gradient steps between two checkpoints
RATE = 1.0  # learning rate of these steps
MARGIN = 0.5  # margin of the prediction that a small set is to flip
REDUCTION = 0.02  # how much a small set is to reduce the gap between the groups
SEEDS = 10  # repetitions of the comparison of choices
CHOSEN = 30  # samples that each choice removes
SMALL = 600  # training samples in the comparison of choices


class TracIn:
    """Dot products of gradients summed over checkpoints of training (Pruthi et al. 2020), in closed form.

    Training is gradient descent on the Lagrangian with the final multipliers, from zeros. As in the original, a
    sample enters only through the gradient of its own loss.
    """

    def __init__(self, task: Task, solution: dif.Solution) -> None:
        n = len(task.train)
        weights = torch.full((n,), 1.0 / n, dtype=torch.float64)
        for g, price in enumerate(solution.lam.tolist()):
            member = (task.group == g).double()
            weights = weights + price * (member / member.sum() - 1.0 / n)
        self.inputs = _append_one(task.X)
        self.test_inputs = _append_one(task.test_X)
        self.residuals, self.test_residuals = [], []
        theta = torch.zeros(65, 10, dtype=torch.float64)
        for step in range(1, CHECKPOINTS * STEPS + 1):
            residual = _residual(self.inputs, theta, task.labels)
            theta = theta - RATE * (self.inputs.T @ (weights[:, None] * residual) + L2 * theta)
            if step % STEPS == 0:
                self.residuals.append(_residual(self.inputs, theta, task.labels))
                self.test_residuals.append(_residual(self.test_inputs, theta, task.test_labels))

    def score_tests(self) -> Tensor:
        """Return how much each training sample lowered the loss of each test sample, (n, T)."""
        similarity = self.inputs @ self.test_inputs.T
        pairs = zip(self.residuals, self.test_residuals, strict=True)
        return sum((similarity * (r @ t.T) for r, t in pairs), torch.zeros_like(similarity))

    def score_own_loss(self) -> Tensor:
        """Return how much each training sample lowered its own loss, (n,)."""
        squared_norm = (self.inputs**2).sum(1)
        return sum((squared_norm * (r**2).sum(1) for r in self.residuals), torch.zeros_like(squared_norm))


def _append_one(X: Tensor) -> Tensor:
    """Append a column of ones, the input of the bias."""
    return torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], 1)


def _residual(inputs: Tensor, theta: Tensor, labels: Tensor) -> Tensor:
    """Return predicted probabilities minus one-hot labels, (n, 10)."""
    return torch.softmax(inputs @ theta, 1) - torch.nn.functional.one_hot(labels, 10)


def linear_datamodeling_score(task: Task, solution: dif.Solution) -> dict[str, float]:
    """Return, per estimator, the rank correlation with retraining over random halves, averaged over test samples."""
    n = len(task.train)
    generator = torch.Generator().manual_seed(2)
    removed = [torch.randperm(n, generator=generator)[: n // 2].tolist() for _ in range(SUBSETS)]
    groups, test = task.train.remove_groups(removed), task.test.take(torch.arange(TESTS))
    actual = dif.Retraining(solution, show_progress=False).scores(test, groups).values
    traced = TracIn(task, solution).score_tests()[:, :TESTS]
    predicted = {
        "DIF": dif.DirectionalInfluence(solution, switching=False)
        .scores(test, groups, show_progress=False, assess=0)
        .values,
        "path": dif.PathInfluence(solution, show_progress=False).scores(test, groups).values,
        "classical IF": dif.ClassicalInfluence(solution).scores(test, groups, show_progress=False, assess=0).values,
        "TracIn": torch.stack([traced[index].sum(0) for index in removed]),
    }
    return {
        name: float(torch.tensor([dif.Agreement.of(values[:, t], actual[:, t]).spearman for t in range(TESTS)]).mean())
        for name, values in predicted.items()
    }


def detect_wrong_labels() -> dict[str, float]:
    """Flip a tenth of the labels and return, for each way to rank samples, the ROC area of finding them."""
    task = build_task(tau=STRICT, bound=1, flipped=0.1)
    solution = task.fit()
    each, held_out = task.train.remove_each(), task.test.mean()
    derivative, classical = dif.DirectionalInfluence(solution, switching=False), dif.ClassicalInfluence(solution)
    path, traced = dif.PathInfluence(solution, show_progress=False), TracIn(task, solution)
    scores = {
        "DIF, own loss": dif.self_influence(derivative, task.train, show_progress=False).values[:, 0],
        "DIF, held-out loss": -derivative.scores(held_out, each, show_progress=False, assess=0).values[:, 0],
        "DIF, held-out loss through the objective": -derivative.by_term(held_out, each).values[:, 0],
        "DIF, price of the constraint": derivative.prices(each).values[:, 0].abs(),
        "path, own loss": dif.self_influence(path, task.train, show_progress=False).values[:, 0],
        "path, held-out loss": -path.scores(held_out, each).values[:, 0],
        "classical IF, own loss": dif.self_influence(classical, task.train, show_progress=False).values[:, 0],
        "classical IF, held-out loss": -classical.scores(held_out, each, show_progress=False, assess=0).values[:, 0],
        "TracIn, own loss": traced.score_own_loss(),
        "TracIn, held-out loss": -traced.score_tests().mean(1),
        "the loss itself": Targets(task.train, solution).values(solution.theta),
    }
    return {name: roc_area(values, task.flipped) for name, values in scores.items()}


def roc_area(scores: Tensor, wanted: Tensor) -> float:
    """Return the area under the ROC curve: how often a wanted sample scores higher than another."""
    above = (scores[wanted][:, None] > scores[~wanted]).double() + 0.5 * (scores[wanted][:, None] == scores[~wanted])
    return float(above.mean())


def compare_choices(seeds: int = SEEDS) -> list[dict[str, Any]]:
    """Choose samples whose removal lowers the held-out loss, greedily and by ranking, and retrain without them."""
    rows = []
    for seed in range(seeds):
        task = build_task(seed=seed, n=SMALL, tau=STRICT, bound=1)
        solution, target = task.fit(), task.test.mean()
        row: dict[str, Any] = {"seed": seed, "multiplier": float(solution.lam[0])}
        for name, greedy in (("greedy", True), ("ranking", False)):
            choice = dif.choose(solution, target, task.train, CHOSEN, greedy=greedy, show_progress=False)
            row |= {"before": choice.before, name: choice.verified, f"{name}, predicted": choice.predicted,
                    f"{name}, samples": len(choice.indices)}  # fmt: skip
        rows.append(row)
    return rows


def find_sets() -> dict[str, Any]:
    """Find a small set that flips a prediction and one that reduces the gap between the groups; retrain both."""
    task = build_task(seed=0, n=SMALL, tau=STRICT, bound=1)
    solution = task.fit()

    def margin(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        X, y = batch
        scores = X @ params["W"] + params["b"]
        is_label = torch.nn.functional.one_hot(y, 10).bool()
        return (scores * is_label).sum(1) - scores.masked_fill(is_label, -torch.inf).amax(1)

    margins = dif.Samples(margin, (task.test_X, task.test_labels), name="margin")
    values = Targets(margins, solution).values(solution.theta)
    nearest = int((values - MARGIN).abs().argmin())
    flip = dif.smallest_set(
        solution, margins.take(torch.tensor([nearest])).mean(), task.train, 0.0, show_progress=False
    )
    gap = task.targets["gap"]
    wanted = float(Targets(gap, solution).values(solution.theta)[0]) - REDUCTION
    closing = dif.smallest_set(solution, gap, task.train, wanted, show_progress=False)
    return {
        "flip": {"test sample": nearest, "margin": flip.before, "after": flip.verified, "removed": list(flip.indices)},
        "gap": {
            "before": closing.before,
            "wanted": wanted,
            "after": closing.verified,
            "removed": list(closing.indices),
        },
    }


def reproduce(out: Path, show_progress: bool = True) -> dict[str, Any]:
    """Run the study part by part, save each part in attribution.json, and return the numbers."""
    path = out / "attribution.json"
    result = results.load_finished(path) or {"study": "attribution", "version": dif.__version__}
    out.mkdir(parents=True, exist_ok=True)
    parts = {
        "linear datamodeling score": lambda: linear_datamodeling_score(
            task := build_task(tau=STRICT, bound=1), task.fit()
        ),
        "wrong labels": detect_wrong_labels,
        "sets": find_sets,
        "choices": compare_choices,
    }
    with progress("attribution", len(parts), show_progress) as report:
        for number, (name, make) in enumerate(parts.items()):
            if name not in result:
                result[name] = make()
                results.write(path, result)
            report(number + 1)
    return result
