"""Data-attribution tests on the digits: linear datamodeling score, wrong labels, sets of samples to remove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dif
from dif.derivatives.program import Targets
from dif.runtime.work import progress
from studies import results
from studies.digits import Task, build_task, trace_training

STRICT = -0.03  # τ: the risk of group 0 must be lower than the mean risk by 0.03
SUBSETS = 50  # random halves of the data
TESTS = 100  # test samples in the linear datamodeling score
MARGIN = 0.5  # margin of the prediction that a small set is to flip
REDUCTION = 0.02  # how much a small set is to reduce the gap between the groups
SEEDS = 10  # repetitions of the comparison of choices
CHOSEN = 30  # samples that each choice removes
SMALL = 600  # training samples in the comparison of choices


def linear_datamodeling_score(task: Task, solution: dif.Solution) -> dict[str, float]:
    """Return, per estimator, the rank correlation with retraining over random halves, averaged over test samples.

    Estimators predict each half as a whole.
    """
    methods = {
        "DIF": dif.DirectionalInfluence(solution, switching=False),
        "path": dif.PathInfluence(solution),
        "classical IF": dif.ClassicalInfluence(solution),
        "TracIn": trace_training(task, solution),
    }
    retraining, test = dif.Retraining(solution), task.test.take(torch.arange(TESTS))
    result = dif.evaluation.linear_datamodelling_score(
        methods, retraining, test, task.train, subsets=SUBSETS, seed=2, jointly=True, show_progress=False
    )
    return result.scores


def detect_wrong_labels() -> dict[str, float]:
    """Flip a tenth of the labels and return, for each way to rank samples, the ROC area of finding them."""
    task = build_task(tau=STRICT, bound=1, flipped=0.1)
    solution = task.fit()
    each, held_out = task.train.remove_each(), task.test.mean()
    derivative, classical = dif.DirectionalInfluence(solution, switching=False), dif.ClassicalInfluence(solution)
    path, traced = dif.PathInfluence(solution), trace_training(task, solution)
    rankings = {
        "DIF, own loss": derivative,
        "DIF, held-out loss": -derivative.scores(held_out, each, show_progress=False, assess=0).values,
        "DIF, held-out loss through the objective": -derivative.by_term(held_out, each).values[:, 0],
        "DIF, price of the constraint": derivative.prices(each).values[:, 0].abs(),
        "path, own loss": path,
        "path, held-out loss": -path.scores(held_out, each).values,
        "classical IF, own loss": classical,
        "classical IF, held-out loss": -classical.scores(held_out, each, show_progress=False, assess=0).values,
        "TracIn, own loss": traced,
        "TracIn, held-out loss": -traced.scores(held_out, each, show_progress=False).values,
        "the loss itself": Targets(task.train, solution).values(solution.theta),
    }
    return dif.evaluation.label_error_auc(rankings, task.flipped, task.train, show_progress=False).areas


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
