"""Scores split by term: the columns add up, and each is the effect of that term alone."""

import numpy as np
import pytest
import torch
from problems import bound_regression, fair_logistic, fit_problem, weak_regression
from test_switching import nearly_weak

import dif

TARGET = dif.linear([1.0, -2.0, 0.5, 3.0])


def test_each_column_is_the_perturbation_of_that_term_alone():
    train, problem, *_ = fair_logistic()
    estimator = dif.DirectionalInfluence(fit_problem(problem))
    parts = estimator.by_term(TARGET, train.remove_each())
    assert parts.targets == ("objective", *estimator.solution.program.names)
    scale = float(parts.values.abs().max())
    for column, term in enumerate((problem.objective, *problem.constraints)):
        alone = estimator.scores(TARGET, train.remove_each(terms=[term])).values[:, 0]
        np.testing.assert_allclose(parts.values[:, column], alone, atol=1e-12 * scale)


@pytest.mark.parametrize("make", [bound_regression, fair_logistic, weak_regression])
@pytest.mark.parametrize("switching", [False, True])
@pytest.mark.parametrize("renormalise", [False, True])
def test_columns_add_up(make, switching, renormalise):
    train, problem, *_ = make()
    estimator = dif.DirectionalInfluence(fit_problem(problem), switching=switching)
    removals = train.remove_each(renormalise=renormalise)
    total = estimator.scores(TARGET, removals).values[:, 0]
    parts = estimator.by_term(TARGET, removals).values.sum(1)
    np.testing.assert_allclose(parts, total, atol=1e-12 * float(total.abs().max()))


def test_columns_add_up_where_constraints_switch():
    train, solution = nearly_weak(1)
    target = dif.linear(torch.arange(1.0, 1 + len(solution.theta)).double())
    estimator = dif.DirectionalInfluence(solution, switching=True)
    scores = estimator.scores(target, train.remove_each())
    assert scores.diagnostics["switched"] > 0
    parts = estimator.by_term(target, train.remove_each())
    scale = float(scores.values.abs().max())
    np.testing.assert_allclose(parts.values.sum(1), scores.values[:, 0], atol=1e-12 * scale)


def test_a_bound_acts_through_its_constraint():
    _, problem, *_ = bound_regression()
    estimator = dif.DirectionalInfluence(fit_problem(problem))
    shift = problem.constraints[0].shift(0.01)
    parts = estimator.by_term(TARGET, shift).values
    assert int((parts.abs() > 1e-12 * parts.abs().max()).sum()) == 1  # the slack of another row is a rounding error
    assert float(parts[0, 1]) == pytest.approx(float(estimator.scores(TARGET, shift).values[0, 0]), rel=1e-12)


def test_one_target_at_a_time():
    train, problem, *_ = bound_regression()
    with pytest.raises(dif.InvalidInputError, match=f"`by_term` takes exactly 1 target, not {len(train)}"):
        dif.DirectionalInfluence(fit_problem(problem)).by_term(train, train.remove_each())


def test_parts_that_are_not_unique_are_refused():
    X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    train = dif.Samples(lambda p, z: (z @ p["t"] - 1) ** 2, X, name="train")
    twice = [dif.linear([1.0, 0.0]) == 0.1, dif.linear([1.0, 0.0]) == 0.1]
    problem = dif.Problem(train.mean(), twice)
    solution = dif.fit(problem, {"t": torch.zeros(2, dtype=torch.float64)}, show_progress=False)
    estimator = dif.DirectionalInfluence(solution, switching=False, strict=False)
    with pytest.raises(dif.DegenerateError) as caught:
        estimator.by_term(train.mean(), train.remove_each([0]))
    assert caught.value.meaning == "The part that acts through each of them is not unique, only their sum is."
