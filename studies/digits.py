"""Logistic regression on handwritten digits with a bound on the risk of each group; three studies use it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import dif
from studies.tracin import TracIn

L2 = 1e-2  # weight of the ridge
TAU = 0.005  # how much the risk of a group may exceed the mean risk
CHECKPOINTS = 10  # checkpoints that TracIn sums over
STEPS = 50  # gradient steps between two checkpoints
RATE = 1.0  # learning rate of these steps


@dataclass(frozen=True, eq=False)
class Task:
    """The problem, its data, and the initial parameters."""

    train: dif.Samples
    test: dif.Samples
    problem: dif.Problem
    start: dict[str, Tensor]
    X: Tensor  # (n, 64)
    labels: Tensor  # (n,) training labels, including the flipped ones
    group: Tensor  # (n,) 0: at most as much ink as the median digit, 1: more
    test_X: Tensor
    test_labels: Tensor
    test_group: Tensor
    flipped: Tensor  # (n,) bool, whose labels were made wrong

    def fit(self) -> dif.Solution:
        """Fit the model from zeros."""
        return dif.fit(self.problem, self.start, show_progress=False)

    def fit_without(self, removed: Iterable[int]) -> dif.Solution:
        """Fit the model without some samples, from zeros."""
        return dif.fit(self.problem.after(self.train.remove(removed)), self.start, show_progress=False)

    @property
    def targets(self) -> dict[str, dif.Term]:
        """Targets: the test loss, the test loss of group 0, and the gap between the groups."""
        thin, bold = (self.test.mean(where=self.test_group == g) for g in (0, 1))
        return {"test loss": self.test.mean(), "test loss of group 0": thin, "gap": thin - bold}


def loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a linear classifier, per sample."""
    X, y = batch
    return torch.nn.functional.cross_entropy(X @ params["W"] + params["b"], y, reduction="none")


def build_task(
    seed: int = 0, n: int = 1200, tau: float = TAU, flipped: float = 0.0, constrained: bool = True, bound: int = 2
) -> Task:
    """Build the task: min mean loss + ridge s.t. the risk of each of the first `bound` groups ≤ the mean risk + τ."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pixels), generator=generator)
    X, y = torch.tensor(pixels / 16)[order], torch.tensor(digits)[order]
    ink = X.sum(1)
    group = (ink > ink.median()).long()
    labels, wrong = flip_labels(y[:n], flipped, generator)
    train = dif.Samples(loss, (X[:n], labels), name="train")
    test = dif.Samples(loss, (X[n:], y[n:]), name="test")
    risk = train.mean()
    bounds = [(train.mean(where=group[:n] == g) <= risk + tau).named(f"group {g}") for g in range(bound)]
    problem = dif.Problem(risk + dif.ridge(L2), bounds if constrained else [])
    start = {"W": torch.zeros(64, 10, dtype=torch.float64), "b": torch.zeros(10, dtype=torch.float64)}
    return Task(train, test, problem, start, X[:n], labels, group[:n], X[n:], y[n:], group[n:], wrong)


def flip_labels(labels: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make a share of the labels wrong: each becomes one of the other labels, with equal chances.

    Returns:
        The labels, and the mask of those that are wrong.

    >>> labels, wrong = flip_labels(torch.tensor([0, 1, 1, 0]), 0.5, torch.Generator())
    >>> int(wrong.sum()), torch.equal(labels != torch.tensor([0, 1, 1, 0]), wrong)
    (2, True)
    """
    n, (classes, code) = len(labels), torch.unique(labels, return_inverse=True)
    wrong = torch.zeros(n, dtype=torch.bool)
    wrong[torch.randperm(n, generator=generator)[: int(share * n)]] = True
    other = (code + torch.randint(1, len(classes), (n,), generator=generator)) % len(classes)
    return torch.where(wrong, classes[other], labels), wrong


def trace_training(task: Task, solution: dif.Solution) -> TracIn:
    """Build TracIn from checkpoints of gradient descent on the Lagrangian with the final multipliers, from zeros."""
    n = len(task.train)
    weights = torch.full((n,), 1.0 / n, dtype=torch.float64)
    for g, price in enumerate(solution.lam.tolist()):
        member = (task.group == g).double()
        weights = weights + price * (member / member.sum() - 1.0 / n)
    inputs = torch.cat([task.X, torch.ones(n, 1, dtype=torch.float64)], 1)  # the last is the input of the bias
    theta, checkpoints = torch.zeros(65, 10, dtype=torch.float64), []
    for step in range(1, CHECKPOINTS * STEPS + 1):
        residual = torch.softmax(inputs @ theta, 1) - torch.nn.functional.one_hot(task.labels, 10)
        theta = theta - RATE * (inputs.T @ (weights[:, None] * residual) + L2 * theta)
        if step % STEPS == 0:
            checkpoints.append({"W": theta[:64], "b": theta[64]})
    return TracIn(solution, checkpoints, RATE * STEPS / n)
