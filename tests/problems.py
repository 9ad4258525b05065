"""Small problems, each with what its solution should look like."""

import json

import numpy as np
import torch

import dif

F64 = torch.float64


def squared(params, z):
    return 0.5 * (z[0] @ params["theta"] - z[1]) ** 2


def logistic(params, z):
    return torch.nn.functional.softplus(-z[1] * (z[0] @ params["theta"]))


def regression_data(n=40, d=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=F64)
    y = X @ torch.randn(d, generator=generator, dtype=F64) + 0.3 * torch.randn(n, generator=generator, dtype=F64)
    return X, y


def class_data(n=60, d=4, seed=0):
    X, y = regression_data(n, d, seed)
    return X, torch.where(y > 0, 1.0, -1.0).to(F64)


def zeros(d=4):
    return {"theta": torch.zeros(d, dtype=F64)}


def free_regression(seed=0):
    """No constraint is active."""
    train = dif.Samples(squared, regression_data(seed=seed), name="train")
    return train, dif.Problem(train.mean() + dif.ridge(0.1), [dif.linear(torch.eye(4)) <= 100.0])


def bound_regression(seed=0, batch_size=None):
    """One equality and one inequality hold with λ > 0, one inequality is slack; objective a pure mean."""
    train = dif.Samples(squared, regression_data(seed=seed), name="train", batch_size=batch_size)
    free = dif.fit(dif.Problem(train.mean()), zeros(), show_progress=False).theta
    constraints = [
        (dif.linear([[1.0, 1.0, 1.0, 1.0]]) == float(free.sum()) + 0.5).named("sum"),
        (dif.linear([1.0, -1.0, 0.0, 0.0]) <= float(free[0] - free[1]) - 0.4).named("order"),
        (dif.linear([0.0, 0.0, 0.0, 1.0]) <= 50.0).named("far"),
    ]
    return train, dif.Problem(train.mean(), constraints)


def weak_regression(seed=0):
    """One inequality binds, another passes through the solution without force (weak)."""
    train = dif.Samples(squared, regression_data(seed=seed), name="train")
    limit = float(dif.fit(dif.Problem(train.mean()), zeros(), show_progress=False).theta[2]) - 0.5
    first = dif.Problem(train.mean(), [dif.linear([0.0, 0.0, 1.0, 0.0]) <= limit])
    theta = dif.fit(first, zeros(), show_progress=False).theta
    constraints = [
        (dif.linear([0.0, 0.0, 1.0, 0.0]) <= limit).named("binds"),
        (dif.linear([1.0, 1.0, 0.0, 0.0]) <= float(theta[0] + theta[1])).named("weak"),
    ]
    return train, dif.Problem(train.mean(), constraints)


def fair_logistic(seed=0, batch_size=None, tau=-0.02):
    """Logistic regression with a ridge; the risk of group 1 may exceed the mean risk by at most tau, which binds."""
    data = class_data(seed=seed)
    train = dif.Samples(logistic, data, name="train", batch_size=batch_size)
    group = torch.arange(60) % 3
    risk = train.mean()
    constraints = [
        (train.mean(where=group == g) <= risk + (tau if g == 1 else 0.3)).named(f"group {g}") for g in (1, 2)
    ]
    return train, dif.Problem(risk + dif.ridge(0.05), constraints), group


def fit_problem(problem, d=4):
    solution = dif.fit(problem, zeros(d), show_progress=False)
    assert solution.converged
    return solution


def retrainings(folder):
    """The finished retrainings that a folder keeps, by name, and when the file of each was written."""
    found = {}
    for path in folder.glob("*.npz"):
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
        for name, residual, goal in zip(about["names"], about["residual"], about["goal"], strict=True):
            if residual <= goal:
                found[name] = path.stat().st_mtime_ns
    return found
