"""Targets by name, and the value of a Term at a solution."""

import pytest
import torch
from problems import bound_regression, fit_problem
from refusals import invalid

import dif


@pytest.fixture(scope="module")
def solved():
    train, problem = bound_regression()
    return train, fit_problem(problem)


def test_targets_are_named_by_a_dict_or_by_themselves(solved):
    train, solution = solved
    first, size = train.mean(where=torch.arange(40) < 5), dif.Function(lambda p: (p["theta"] ** 2).sum(), name="norm")
    removals, estimator = train.remove_each([3, 7]), dif.DirectionalInfluence(solution)
    listed = estimator.scores([first, size], removals)
    named = estimator.scores({"first five": first, "size": size}, removals)
    assert listed.targets == ("mean of 5 of train", "norm")
    assert named.targets == ("first five", "size")
    assert torch.equal(named.values, listed.values)
    assert estimator.scores([first.named("first five"), size.named("size")], removals).targets == named.targets
    assert list(named.to_frame().columns) == ["first five", "size"]
    curve = dif.bound_curve(solution, solution.problem.constraints[1], [0.0], {"first five": first})
    assert curve.targets == ("first five",)


def test_rows_of_a_named_vector_are_numbered(solved):
    train, solution = solved
    theta = dif.linear(torch.eye(4))
    scores = dif.DirectionalInfluence(solution).scores({"weight": theta}, train.remove_each([0]))
    assert scores.targets == ("weight[0]", "weight[1]", "weight[2]", "weight[3]")


def test_a_name_is_shown_and_does_not_outlive_the_term(solved):
    train, _ = solved
    risk = train.mean().named("risk")
    assert repr(risk) == "Term(risk: mean of train)"
    assert risk.label == "risk"
    assert (risk + 1.0).name is None
    assert (risk <= 1.0).name is None


def test_value_is_what_the_loss_says(solved):
    train, solution = solved
    losses = train.loss(solution.params, train.storage.data)
    assert solution.value(train.mean()) == pytest.approx(float(losses.mean()), rel=1e-14)
    half = train.mean(where=torch.arange(40) < 20)
    assert solution.value(2.0 * half - 1.0) == pytest.approx(2 * float(losses[:20].mean()) - 1, rel=1e-14)
    assert solution.value(dif.ridge(2.0)) == pytest.approx(float(solution.theta @ solution.theta), rel=1e-14)
    assert solution.value(solution.problem.objective) == pytest.approx(solution.objective, rel=1e-14)


def test_what_is_no_target_is_refused(solved):
    train, solution = solved
    wanted = "The target must be a Term, a list of Terms, a dict of Terms by name, or Samples, not of type"
    invalid(lambda: solution.value("loss"), "not of type str;", wanted)  # type: ignore[arg-type]
    estimator, removals = dif.DirectionalInfluence(solution), train.remove_each([0])
    invalid(lambda: estimator.scores({"test": train}, removals), "of type dict with an entry of type Samples", wanted)
    invalid(lambda: estimator.scores({}, removals), "not of type dict;", wanted)
    invalid(
        lambda: solution.value(dif.linear(torch.eye(4))),
        "`term` has 4 values",
        "The value of a Term is one number.",
    )
