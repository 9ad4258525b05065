"""Terms, Functions and Constraints as expressions."""

import numpy as np
import pytest
import torch
from problems import F64, regression_data, squared

import dif

X, Y = regression_data()
TRAIN = dif.Samples(squared, (X, Y), name="train")
THETA = {"theta": torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=F64)}
LOSSES = squared(THETA, (X, Y))
MASK = torch.arange(40) % 3 == 1


def value(term):
    """A term's value at θ, read off the objective of a problem."""
    return dif.Solution(dif.Problem(term + 0 * TRAIN.mean()), THETA).objective


def rows(*constraints):
    """c = f − τ of constraints as stored."""
    return dif.Solution(dif.Problem(TRAIN.mean(), constraints), THETA).c


def test_values():
    total, norm = LOSSES.sum(), (THETA["theta"] ** 2).sum()
    risk, part = TRAIN.mean(), TRAIN.mean(where=MASK)
    expected = {
        risk: LOSSES.mean(),
        part: LOSSES[MASK].mean(),
        TRAIN.sum(): total,
        TRAIN.sum(where=MASK): LOSSES[MASK].sum(),
        TRAIN.weighted(torch.arange(40.0)): (torch.arange(40) * LOSSES).sum(),
        2 * risk - part / 4 + 3: 2 * LOSSES.mean() - LOSSES[MASK].mean() / 4 + 3,
        -(risk - 1): 1 - LOSSES.mean(),
        1 - risk: 1 - LOSSES.mean(),
        risk - risk + 0.5 * risk: 0.5 * LOSSES.mean(),
        risk + dif.ridge(0.3): LOSSES.mean() + 0.15 * norm,
        dif.ridge(2.0) * 3: 3 * norm,
        dif.linear([1.0, 2.0, 0.0, 0.0]) - 1: torch.tensor(-2.5),
        dif.Function(lambda p: p["theta"].prod()).as_term(): THETA["theta"].prod(),
        sum([risk, risk, part]): 2 * LOSSES.mean() + LOSSES[MASK].mean(),
        torch.tensor(2.0) * risk: 2 * LOSSES.mean(),
        np.float64(2.0) * risk: 2 * LOSSES.mean(),
    }
    for term, number in expected.items():
        assert value(term) == pytest.approx(float(number), rel=1e-12)


def test_comparisons_store_f_minus_tau():
    risk, part = TRAIN.mean(), TRAIN.mean(where=MASK)
    gap = float(LOSSES[MASK].mean() - LOSSES.mean())
    A = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    for constraint, expected in [
        (part <= risk + 0.1, [gap - 0.1]),
        (part - risk <= 0.1, [gap - 0.1]),
        (part >= risk + 0.1, [0.1 - gap]),
        (risk + 0.1 >= part, [gap - 0.1]),
        (part == risk, [gap]),
        (0.1 >= part - risk, [gap - 0.1]),
        (0.1 <= part - risk, [0.1 - gap]),
        (dif.linear(A) <= [1.0, 2.0], [-0.5, -3.0]),
        (dif.linear(A) >= np.array([1.0, 2.0]), [0.5, 3.0]),
        (np.array([1.0, 2.0]) >= dif.linear(A), [-0.5, -3.0]),
        (torch.tensor([1.0, 2.0]) >= dif.linear(A), [-0.5, -3.0]),
        (torch.tensor([1.0, 2.0]) == dif.linear(A), [-0.5, -3.0]),
        (dif.linear(A) <= 1.0, [-0.5, -2.0]),
        (dif.linear(A) + risk <= 1.0, [-0.5 + float(LOSSES.mean()), -2.0 + float(LOSSES.mean())]),
    ]:
        assert isinstance(constraint, dif.Constraint)
        np.testing.assert_allclose(rows(constraint), expected, rtol=1e-12, atol=1e-14)


def test_multipliers_of_both_senses_are_positive():
    low = dif.linear([1.0, 0.0, 0.0, 0.0]) >= 3.0
    solution = dif.fit(dif.Problem(TRAIN.mean(), [low]), THETA)
    assert float(solution.multipliers[low]) > 0
    assert float(solution.theta[0]) == pytest.approx(3.0)


def test_names():
    a, b = TRAIN.mean() <= 1.0, (TRAIN.mean() <= 2.0).named("second")
    problem = dif.Problem(TRAIN.mean(), [a, b])
    assert problem.names == ("constraint 0", "second")
    assert problem.constraints == (a, b)
    assert repr(problem) == "Problem(min mean of train, 2 constraints)"
    assert "second" in repr(b)


def test_identity():
    risk = TRAIN.mean()
    assert len({risk, risk}) == 1
    assert isinstance(risk == 1.0, dif.Constraint)
    problem = dif.Problem(risk)
    assert problem.objective is risk


def test_one_evaluation_serves_all_rows():
    """Objective and constraints over the same samples share each evaluation of the loss."""
    calls = []

    def loss(params, z):
        calls.append(len(z[1]))
        return squared(params, z)

    train = dif.Samples(loss, (X, Y), name="train")
    risk = train.mean()
    groups = [train.mean(where=torch.arange(40) % 4 == g) <= risk + 50.0 for g in range(4)]
    solution = dif.Solution(dif.Problem(risk, groups), THETA)
    counts = []
    for rows in (solution.program.rows, dif.Solution(dif.Problem(risk), THETA).program.rows):
        calls.clear()
        rows.gradients(solution.theta)
        counts.append(len(calls))
    assert counts == [1, 1]
