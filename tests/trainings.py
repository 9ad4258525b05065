"""A small classifier under group constraints, for the tests of training on mini-batches."""

import torch
from torch import nn

import dif

F64 = torch.float64


def classify(n=60, seed=0):
    """A two-layer classifier on random data, with a group of each sample."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, generator=generator, dtype=F64)
    y = torch.sign(X[:, 0] + 0.5 * torch.randn(n, generator=generator, dtype=F64))
    params = {
        "W": torch.randn(3, 2, generator=generator, dtype=F64),
        "v": torch.randn(2, generator=generator, dtype=F64),
    }
    return X, y, torch.arange(n) % 3, params


def logistic(p, z):
    return nn.functional.softplus(-z[1] * (torch.tanh(z[0] @ p["W"]) @ p["v"]))


def state_problem(X, y, group):
    """Bounded group losses and a linear equality."""
    train = dif.Samples(logistic, (X, y), name="train")
    risk = train.mean()
    constraints = [(train.mean(where=group == g) <= risk + 0.01).named(f"group {g}") for g in range(2)]
    return train, dif.Problem(risk + dif.ridge(0.01), [*constraints, dif.linear([1.0] + [0.0] * 7) == 0.1])


def violations(losses, group, first):
    """f − τ of the constraints in a batch; 0 for a group without members there."""
    gaps = [losses[group == g].mean() - losses.mean() - 0.01 for g in range(2)]
    rows = [gap if bool((group == g).any()) else torch.zeros_like(gap) for g, gap in enumerate(gaps)]
    return torch.stack([*rows, first - 0.1])
