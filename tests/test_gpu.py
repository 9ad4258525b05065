"""The same numbers on an accelerator."""

import numpy as np
import pytest
import torch
from problems import class_data, logistic

import dif

pytestmark = pytest.mark.gpu


def answers(device):
    X, y = (t.to(device) for t in class_data())
    group = torch.arange(60) % 3  # masks may stay on the CPU
    train = dif.Samples(logistic, (X, y), name="train", batch_size=25)
    risk = train.mean()
    constraints = [train.mean(where=group == 1) <= risk - 0.02, dif.linear(torch.eye(4)) <= 1.2]
    problem = dif.Problem(risk + dif.ridge(0.05), constraints)
    solution = dif.fit(problem, {"theta": torch.zeros(4, dtype=torch.float64, device=device)})
    assert solution.theta.device.type == device
    removals = train.remove_groups([[0], [1, 4], [2, 3, 5]]) + constraints[0].shift(0.001)
    found = [solution.theta, solution.lam]
    for estimator in (
        dif.DirectionalInfluence(solution),
        dif.DirectionalInfluence(solution, switching=True),
        dif.ClassicalInfluence(solution),
        dif.PenaltyInfluence(solution, at_minimiser=True),
        dif.NewtonInfluence(solution),
        dif.Retraining(solution),
    ):
        found += [estimator.scores(train, removals).values, estimator.change(removals[1]).flat]
    found.append(dif.DirectionalInfluence(solution).change(train.add((X[:1], -y[:1]), like=1)).flat)
    found.append(dif.DirectionalInfluence(solution).change(train.reweight(torch.linspace(0, 0.01, 60))).flat)
    return [t.cpu().numpy() for t in found]


def test_same_as_on_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
    for there, here in zip(answers("cuda"), answers("cpu"), strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-8, atol=1e-10)
