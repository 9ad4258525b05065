"""Errors and warnings of `fit`."""

import re
from contextlib import suppress

import pytest
import torch
from refusals import (
    F64,
    PROBLEM,
    TRAIN,
    invalid,
    logistic,
    point,
    refused,
    roots,
    samples,
    solution,
    solve,
    table,
    untouched,
)

import dif


def read_violation(error):
    """Return the constraint that an InfeasibleError names, and its violation."""
    match = re.fullmatch(r"The least infeasible point found violates '(.+)' by (\S+)\.", error.found)
    return match[1], float(match[2])


def test_an_infeasible_problem_is_named_with_its_violation():
    low, high = (dif.linear([1.0, 0.0]) <= -1.0).named("low"), (dif.linear([1.0, 0.0]) >= 2.0).named("high")
    error = refused(
        dif.InfeasibleError,
        lambda: solve(TRAIN.mean(), [low, high]),
        "The constraints contradict each other, or no point near the start satisfies them.",
    )
    assert error.allowed == "At least one point must satisfy all constraints."
    name, violation = read_violation(error)
    assert name in ("low", "high")
    assert violation == pytest.approx(1.5, rel=1e-3)  # half of the gap for each
    twice = [dif.linear([1.0, 0.0]) == 1.0, dif.linear([1.0, 0.0]) == 2.0]
    name, violation = read_violation(refused(dif.InfeasibleError, lambda: solve(TRAIN.mean(), twice)))
    assert name.startswith("constraint")
    assert violation == pytest.approx(0.5, rel=1e-3)


def test_an_infeasible_constraint_on_the_data():
    least = float(solve(TRAIN.mean()).objective)
    action = lambda: solve(dif.ridge(1.0) + 0 * TRAIN.mean(), [(TRAIN.mean() <= 0.01).named("tight")])  # noqa: E731
    name, violation = read_violation(refused(dif.InfeasibleError, action, "Loosen that bound"))
    assert name == "tight"
    assert violation == pytest.approx(least - 0.01, rel=1e-2)


UNBOUNDED = {
    "linear": (lambda: solve(dif.linear([1.0, 1.0])), "penalty raised 0 times"),
    "concave": (lambda: solve(-TRAIN.mean()), "penalty raised 0 times"),
    "along a constraint": (lambda: solve(dif.linear([1.0, 1.0]), [dif.linear([1.0, 0.0]) >= 0.0]), "penalty raised"),
}


@table(UNBOUNDED)
def test_an_unbounded_problem_is_refused(case):
    action, text = case
    meaning = "The objective is unbounded below on the feasible set, or on the way to it."
    error = refused(dif.UnboundedError, action, meaning, "Add a ridge")
    assert text in error.found
    assert error.allowed == "It must have a minimum at finite θ."


LIMITS = {
    "max_iter": ({"max_iter": 1}, "after 1 iterations (max_iter)"),
    "max_seconds": ({"max_seconds": 1e-9}, "(max_seconds)"),
}


@table(LIMITS)
def test_fit_warns_when_a_limit_is_reached_first(case):
    limit, text = case
    with untouched(), pytest.warns(dif.NotConvergedWarning) as caught:
        solution = solve(samples(logistic).mean() + dif.ridge(0.1), **limit)
    (message,) = (str(w.message) for w in caught if w.category is dif.NotConvergedWarning)
    assert f"The KKT residual is {solution.kkt.residual:.3g} ({solution.kkt}); it must be at most 1e-10." in message
    assert text in message
    assert "The point is not a solution. Raise max_iter or max_seconds" in message
    assert not solution.converged
    assert solution.kkt.residual > solution.tol
    refused(dif.NotASolutionError, lambda: dif.DirectionalInfluence(solution), f"{solution.kkt.residual:.3g}")


ARGUMENTS = {
    "no iterations": (lambda: solve(TRAIN.mean(), max_iter=0), "`max_iter` must be an integer ≥ 1, not 0."),
    "no time": (lambda: solve(TRAIN.mean(), max_seconds=0), "`max_seconds` must be a positive number, not 0."),
    "no iterations to retrain": (
        lambda: dif.Retraining(solution(), max_iter=0).change(TRAIN.remove(0)),
        "`max_iter` must be an integer ≥ 1, not 0.",
    ),
    "a negative multiplier": (
        lambda: dif.fit(PROBLEM, point(0.0, 0.0), multipliers=[-1.0]),
        "The multiplier of the inequality 'cap' must be ≥ 0, not -1.",
    ),
    "a negative multiplier of a training": (
        lambda: dif.Training(PROBLEM, point(0.0, 0.0), dif.SGD(0.1), multipliers={"cap": -1.0}).run(),
        "The multiplier of the inequality 'cap' must be ≥ 0, not -1.",
    ),
}


@table(ARGUMENTS)
def test_wrong_arguments_are_refused(case):
    invalid(*case)


def test_multipliers_of_a_solution_are_a_start():
    """Rounding may leave a multiplier just below 0, and that of an equality may have any sign."""
    start = dict(zip(PROBLEM.names, [-1e-17], strict=True))
    assert dif.fit(PROBLEM, point(0.0, 0.0), multipliers=start, show_progress=False).converged
    equal = dif.Problem(PROBLEM.objective, [dif.linear([1.0, 1.0]) == -1.0])
    assert dif.fit(equal, point(0.0, 0.0), multipliers=[-1.0], show_progress=False).converged


def test_inference_mode_is_named():
    with torch.inference_mode():
        invalid(
            lambda: dif.fit(PROBLEM, point(0.0, 0.0)),
            "inference_mode() must be off",
            "nothing can be differentiated inside it",
        )


def test_fit_from_a_point_without_a_derivative_is_refused():
    train = dif.Samples(roots, torch.tensor([0.0, 1.0], dtype=F64), name="roots")
    action = lambda: solve(train.mean(), params={"t": torch.zeros((), dtype=F64)})  # noqa: E731
    text = "There is no derivative at this point (sqrt or log at 0, a norm at its kink), so it cannot be judged."
    invalid(action, "The gradient of the objective at the given parameters is NaN or infinite.", text)


@pytest.mark.parametrize(
    "barrier",
    [
        lambda p: (p["w"] - p["w"].log()).sum(),
        lambda p: (p["w"] ** 2 - p["w"].log()).sum() + (p["w"][0] * p["w"][1]).sqrt(),
    ],
    ids=["one at a time", "coupled"],
)
def test_an_objective_with_a_domain_is_not_called_unbounded(barrier):
    with suppress(dif.NotConvergedWarning, dif.InvalidInputError):  # these are allowed, an UnboundedError is not
        assert solve(dif.Function(barrier, name="barrier"), params=point(100.0, 200.0)).converged


def test_a_value_that_diverges_is_reported_as_a_value():
    falling = dif.Function(lambda p: -p["w"].exp().sum(), name="falling")
    error = refused(dif.UnboundedError, lambda: solve(falling), "The objective still falls at a value of -")
    assert "‖θ‖ > 1e+09" not in error.found
