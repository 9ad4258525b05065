"""What `fit` refuses, and what it warns of."""

from contextlib import suppress

import pytest
import torch
from refusals import F64, PROBLEM, TRAIN, invalid, logistic, point, refused, roots, samples, solve, table, untouched

import dif


def test_an_infeasible_problem_is_named_with_its_violation():
    low, high = (dif.linear([1.0, 0.0]) <= -1.0).named("low"), (dif.linear([1.0, 0.0]) >= 2.0).named("high")
    error = refused(
        dif.InfeasibleError, lambda: solve(TRAIN.mean(), [low, high]), "The constraints contradict each other"
    )
    assert error.what.split()[:3] in (["violation", "of", "low"], ["violation", "of", "high"])
    assert float(error.measured) == pytest.approx(1.5, rel=1e-3)  # half of the gap for each
    twice = [dif.linear([1.0, 0.0]) == 1.0, dif.linear([1.0, 0.0]) == 2.0]
    error = refused(dif.InfeasibleError, lambda: solve(TRAIN.mean(), twice), "violation of constraint")
    assert float(error.measured) == pytest.approx(0.5, rel=1e-3)


def test_an_infeasible_constraint_on_the_data():
    least = float(solve(TRAIN.mean()).objective)
    action = lambda: solve(dif.ridge(1.0) + 0 * TRAIN.mean(), [(TRAIN.mean() <= 0.01).named("tight")])  # noqa: E731
    error = refused(dif.InfeasibleError, action, "violation of tight", "Loosen that bound")
    assert float(error.measured) == pytest.approx(least - 0.01, rel=1e-2)


UNBOUNDED = {
    "linear": (lambda: solve(dif.linear([1.0, 1.0])), "penalty raised 0 times"),
    "concave": (lambda: solve(-TRAIN.mean()), "penalty raised 0 times"),
    "along a constraint": (lambda: solve(dif.linear([1.0, 1.0]), [dif.linear([1.0, 0.0]) >= 0.0]), "penalty raised"),
}


@table(UNBOUNDED)
def test_an_unbounded_problem_is_refused(case):
    action, text = case
    error = refused(dif.UnboundedError, action, text, "The objective falls without end", "Add a ridge")
    assert error.threshold == "a minimum at finite θ"


LIMITS = {
    "max_iter": ({"max_iter": 1}, "after 1 iterations (max_iter)"),
    "max_seconds": ({"max_seconds": 1e-9}, "(max_seconds)"),
}


@table(LIMITS)
def test_fit_warns_where_a_limit_came_first(case):
    limit, text = case
    with untouched(), pytest.warns(dif.NotConvergedWarning) as caught:
        found = solve(samples(logistic).mean() + dif.ridge(0.1), **limit)
    message = str(caught[0].message)
    assert f"measured residual {found.kkt.residual:.3g} ({found.kkt}), allowed 1e-10" in message
    assert text in message
    assert "The point is not a solution. Raise max_iter or max_seconds" in message
    assert not found.converged
    assert found.kkt.residual > found.tol
    refused(dif.NotASolutionError, lambda: dif.DirectionalInfluence(found), f"{found.kkt.residual:.3g}")


def test_inference_mode_is_named():
    with torch.inference_mode():
        invalid(lambda: dif.fit(PROBLEM, point(0.0, 0.0)), "on", "Nothing can be differentiated inside it.")


def test_fit_from_a_point_without_a_derivative_is_refused():
    train = dif.Samples(roots, torch.tensor([0.0, 1.0], dtype=F64), name="roots")
    action = lambda: solve(train.mean(), params={"t": torch.zeros((), dtype=F64)})  # noqa: E731
    invalid(
        action, "NaN or infinite for the objective", "gradients at the given parameters", "The point has no derivative"
    )


@pytest.mark.parametrize(
    "barrier",
    [
        lambda p: (p["w"] - p["w"].log()).sum(),
        lambda p: (p["w"] ** 2 - p["w"].log()).sum() + (p["w"][0] * p["w"][1]).sqrt(),
    ],
    ids=["one at a time", "coupled"],
)
def test_an_objective_with_a_domain_is_not_called_unbounded(barrier):
    with suppress(dif.NotConvergedWarning, dif.InvalidInputError):  # said in words
        assert solve(dif.Function(barrier, name="barrier"), params=point(100.0, 200.0)).converged


def test_an_unbounded_value_is_measured_as_such():
    falling = dif.Function(lambda p: -p["w"].exp().sum(), name="falling")
    assert "‖θ‖ > 1e+09" not in refused(dif.UnboundedError, lambda: solve(falling)).measured
