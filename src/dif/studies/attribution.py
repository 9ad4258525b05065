"""Data attribution under constraints on the digits: half the data left out, labels that are wrong, sets to remove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dif
from dif.optimality.targets import Targets
from dif.runtime.progress import progress
from dif.studies import results
from dif.studies.digits import L2, Digits, posed

STRICT = -0.03  # group 0 must fare better than the mean by this much
HALVES, ASKED = 50, 100  # random halves of the data; test samples asked about
CHECKPOINTS, BETWEEN, RATE = 10, 50, 1.0  # of the gradient descent that TracIn looks at
MARGIN, CLOSER = 0.5, 0.02  # of a prediction that is to flip; by which a gap is to fall
SEEDS, CHOSEN, SMALL = 10, 30, 600  # of the comparison of choices: repetitions, samples removed, samples trained on


class TracIn:
    """Dot products of gradients summed over checkpoints of training (Pruthi et al. 2020), in closed form.

    Training is gradient descent on the Lagrangian with the final multipliers, from zeros; like the original, a
    sample is known by the gradient of its own loss alone.
    """

    def __init__(self, stated: Digits, solution: dif.Solution) -> None:
        n = len(stated.train)
        weights = torch.full((n,), 1.0 / n, dtype=torch.float64)
        for g, price in enumerate(solution.lam.tolist()):
            mine = (stated.group == g).double()
            weights = weights + price * (mine / mine.sum() - 1.0 / n)
        self.inputs = _with_one(stated.X)
        self.test_inputs = _with_one(stated.test_X)
        self.residuals, self.test_residuals = [], []
        theta = torch.zeros(65, 10, dtype=torch.float64)
        for step in range(1, CHECKPOINTS * BETWEEN + 1):
            gap = _residual(self.inputs, theta, stated.labels)
            theta = theta - RATE * (self.inputs.T @ (weights[:, None] * gap) + L2 * theta)
            if step % BETWEEN == 0:
                self.residuals.append(_residual(self.inputs, theta, stated.labels))
                self.test_residuals.append(_residual(self.test_inputs, theta, stated.test_labels))

    def on_tests(self) -> Tensor:
        """How much each training sample (n) lowered the loss of each test sample (T), (n, T)."""
        alike = self.inputs @ self.test_inputs.T
        pairs = zip(self.residuals, self.test_residuals, strict=True)
        return sum((alike * (r @ t.T) for r, t in pairs), torch.zeros_like(alike))

    def on_itself(self) -> Tensor:
        """How much each sample lowered its own loss, (n,)."""
        size = (self.inputs**2).sum(1)
        return sum((size * (r**2).sum(1) for r in self.residuals), torch.zeros_like(size))


def _with_one(X: Tensor) -> Tensor:
    return torch.cat([X, torch.ones(len(X), 1, dtype=X.dtype)], 1)


def _residual(inputs: Tensor, theta: Tensor, labels: Tensor) -> Tensor:
    return torch.softmax(inputs @ theta, 1) - torch.nn.functional.one_hot(labels, 10)


def halves(stated: Digits, solution: dif.Solution) -> dict[str, float]:
    """Linear datamodeling score: rank correlation over random halves of the data, mean over test samples."""
    n = len(stated.train)
    generator = torch.Generator().manual_seed(2)
    removed = [torch.randperm(n, generator=generator)[: n // 2].tolist() for _ in range(HALVES)]
    groups, test = stated.train.remove_groups(removed), stated.test.take(torch.arange(ASKED))
    actual = dif.Retraining(solution, show_progress=False).scores(test, groups).values
    traced = TracIn(stated, solution).on_tests()[:, :ASKED]
    predicted = {
        "DIF": dif.DirectionalInfluence(solution, switching=False)
        .scores(test, groups, show_progress=False, assess=0)
        .values,
        "path": dif.PathInfluence(solution, show_progress=False).scores(test, groups).values,
        "classical IF": dif.ClassicalInfluence(solution).scores(test, groups, show_progress=False, assess=0).values,
        "TracIn": torch.stack([traced[index].sum(0) for index in removed]),
    }
    return {
        name: float(torch.tensor([dif.Agreement.of(values[:, t], actual[:, t]).spearman for t in range(ASKED)]).mean())
        for name, values in predicted.items()
    }


def wrong_labels() -> dict[str, float]:
    """A tenth of the labels flipped: the chance that a flipped sample ranks above another, for each way to rank."""
    stated = posed(tau=STRICT, bound=1, flipped=0.1)
    solution = stated.solved()
    each, held_out = stated.train.remove_each(), stated.test.mean()
    first, plain = dif.DirectionalInfluence(solution, switching=False), dif.ClassicalInfluence(solution)
    path, traced = dif.PathInfluence(solution, show_progress=False), TracIn(stated, solution)
    ranked = {
        "DIF, own loss": dif.self_influence(first, stated.train, show_progress=False).values[:, 0],
        "DIF, held-out loss": -first.scores(held_out, each, show_progress=False, assess=0).values[:, 0],
        "DIF, held-out loss through the objective": -first.by_term(held_out, each).values[:, 0],
        "DIF, price of the constraint": first.prices(each).values[:, 0].abs(),
        "path, own loss": dif.self_influence(path, stated.train, show_progress=False).values[:, 0],
        "path, held-out loss": -path.scores(held_out, each).values[:, 0],
        "classical IF, own loss": dif.self_influence(plain, stated.train, show_progress=False).values[:, 0],
        "classical IF, held-out loss": -plain.scores(held_out, each, show_progress=False, assess=0).values[:, 0],
        "TracIn, own loss": traced.on_itself(),
        "TracIn, held-out loss": -traced.on_tests().mean(1),
        "the loss itself": Targets(stated.train, solution).values(solution.theta),
    }
    return {name: area(values, stated.flipped) for name, values in ranked.items()}


def area(scores: Tensor, wanted: Tensor) -> float:
    """Under the ROC curve: how often a wanted one is above another."""
    above = (scores[wanted][:, None] > scores[~wanted]).double() + 0.5 * (scores[wanted][:, None] == scores[~wanted])
    return float(above.mean())


def choices(seeds: int = SEEDS) -> list[dict[str, Any]]:
    """The samples whose removal lowers the held-out loss most, chosen greedily and by ranking, both retrained."""
    found = []
    for seed in range(seeds):
        stated = posed(seed=seed, n=SMALL, tau=STRICT, bound=1)
        solution, target = stated.solved(), stated.test.mean()
        row: dict[str, Any] = {"seed": seed, "multiplier": float(solution.lam[0])}
        for name, greedy in (("greedy", True), ("ranking", False)):
            choice = dif.choose(solution, target, stated.train, CHOSEN, greedy=greedy, show_progress=False)
            row |= {"before": choice.before, name: choice.verified, f"{name}, predicted": choice.predicted,
                    f"{name}, samples": len(choice.indices)}  # fmt: skip
        found.append(row)
    return found


def sets() -> dict[str, Any]:
    """Small sets: one that flips a prediction, one that brings the gap between the groups down; both retrained."""
    stated = posed(seed=0, n=SMALL, tau=STRICT, bound=1)
    solution = stated.solved()

    def margin(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        X, y = batch
        scores = X @ params["W"] + params["b"]
        own = torch.nn.functional.one_hot(y, 10).bool()
        return (scores * own).sum(1) - scores.masked_fill(own, -torch.inf).amax(1)

    margins = dif.Samples(margin, (stated.test_X, stated.test_labels), name="margin")
    values = Targets(margins, solution).values(solution.theta)
    nearest = int((values - MARGIN).abs().argmin())
    flip = dif.smallest_set(
        solution, margins.take(torch.tensor([nearest])).mean(), stated.train, 0.0, show_progress=False
    )
    gap = stated.targets["gap"]
    wanted = float(Targets(gap, solution).values(solution.theta)[0]) - CLOSER
    close = dif.smallest_set(solution, gap, stated.train, wanted, show_progress=False)
    return {
        "flip": {"test sample": nearest, "margin": flip.before, "after": flip.verified, "removed": list(flip.indices)},
        "gap": {"before": close.before, "wanted": wanted, "after": close.verified, "removed": list(close.indices)},
    }


def reproduce(out: Path, show_progress: bool = True) -> dict[str, Any]:
    """Run it once, part by part, each kept in attribution.json; return the numbers."""
    kept = out / "attribution.json"
    result = results.finished(kept) or {"study": "attribution", "version": dif.__version__}
    out.mkdir(parents=True, exist_ok=True)
    parts = {
        "linear datamodeling score": lambda: halves(stated := posed(tau=STRICT, bound=1), stated.solved()),
        "wrong labels": wrong_labels,
        "sets": sets,
        "choices": choices,
    }
    with progress("attribution", len(parts), show_progress) as report:
        for number, (name, make) in enumerate(parts.items()):
            if name not in result:
                result[name] = make()
                results.write(kept, result)
            report(number + 1)
    return result
