"""PenaltyInfluence against the penalised objective, written out and differentiated."""

import numpy as np
import pytest
import torch
from problems import F64, bound_regression, class_data, fair_logistic, fit_problem, logistic

import dif

RHO, K = 30.0, 50.0


def penalise(train, weights, bounds, kind):
    """Return L̃(θ, w): the objective with weights w on the samples, plus ρ/2 (equality)² and k (inequality)₊³."""
    X, y = train.storage.data

    def value(theta, w):
        losses = train.loss({"theta": theta}, (X, y))
        if kind == "regression":
            total, gaps = w @ losses, bounds[0] @ theta - bounds[1]
            equality = torch.tensor([True, False, False])
        else:
            group = torch.arange(60) % 3
            risk = w @ losses
            masks = [(group == g).double() / 20 for g in (1, 2)]
            shares = [m + (w - 1 / 60) * 3 * (group == g) for m, g in zip(masks, (1, 2), strict=True)]
            gaps = torch.stack([s @ losses - risk for s in shares]) - bounds
            total, equality = risk + 0.025 * (theta**2).sum(), torch.tensor([False, False])
        soft = torch.where(equality, 0.5 * RHO * gaps**2, K * gaps.clamp(min=0) ** 3)
        return total + soft.sum()

    return value


@pytest.mark.parametrize("at_minimiser", [False, True])
@pytest.mark.parametrize("kind", ["regression", "groups"])
def test_against_the_penalised_objective(kind, at_minimiser):
    if kind == "regression":
        train, problem = bound_regression()
        n = 40
    else:
        train, problem, _ = fair_logistic()
        n = 60
    solution = fit_problem(problem)
    bounds = (solution.G, solution.program.tau) if kind == "regression" else solution.program.tau
    value = penalise(train, None, bounds, kind)
    w = torch.full((n,), 1 / n, dtype=F64)
    theta = solution.theta
    if at_minimiser:  # plain Newton on L̃
        for _ in range(100):
            g = torch.func.grad(value)(theta, w)
            theta = theta - torch.linalg.solve(torch.func.hessian(value)(theta, w), g)
        assert float(g.norm()) <= 1e-10
    H = torch.func.hessian(value)(theta, w)
    cross = torch.func.jacrev(torch.func.grad(value), argnums=1)(theta, w)  # (d, n)
    penalty = dif.PenaltyInfluence(solution, RHO, K, at_minimiser=at_minimiser)
    for i in range(6):
        # removal with 1/N kept: w falls by 1/n (in the group's mean by 3/n, which `shares` follows)
        expected = torch.linalg.solve(H, cross[:, i] / n)
        change = penalty.change(train.remove([i], renormalise=False)).flat
        np.testing.assert_allclose(change, expected, rtol=1e-7, atol=1e-12)


def test_classical_is_the_objective_alone():
    X, y = class_data()
    train = dif.Samples(logistic, (X, y), name="train")
    problem = dif.Problem(train.mean() + dif.ridge(0.05), [dif.linear([1.0, 0.0, 0.0, 0.0]) <= 0.1])
    solution = fit_problem(problem)

    def objective(theta, w):
        return w @ logistic({"theta": theta}, (X, y)) + 0.025 * (theta**2).sum()

    w = torch.full((60,), 1 / 60, dtype=F64)
    H = torch.func.hessian(objective)(solution.theta, w)
    cross = torch.func.jacrev(torch.func.grad(objective), argnums=1)(solution.theta, w)
    for i in range(5):
        change = dif.ClassicalInfluence(solution).change(train.remove([i], renormalise=False)).flat
        np.testing.assert_allclose(change, torch.linalg.solve(H, cross[:, i] / 60), rtol=1e-9)
