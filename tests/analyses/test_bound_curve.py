"""Curves against a bound, and effects of samples on prices, compared with solving again."""

import numpy as np
import pytest
import torch
from problems import fair_logistic, fit_problem, zeros

import dif

F64, NAN = torch.float64, float("nan")


def test_closed_form():
    """min ½‖θ − (2, 1)‖² s.t. θ₁ ≤ τ, θ₁ + θ₂ ≤ 2: three pieces, kinks at τ = 1 and 1.5."""
    point = dif.Samples(lambda p, z: 0.5 * ((p["t"] - z) ** 2).sum(-1), torch.tensor([[2.0, 1.0]], dtype=F64))
    limit = (dif.linear([1.0, 0.0]) <= 1.2).named("limit")
    problem = dif.Problem(point.mean() + 3.0, [limit, (dif.linear([1.0, 1.0]) <= 2.0).named("budget")])
    solution = dif.fit(problem, {"t": torch.zeros(2, dtype=F64)}, show_progress=False)
    bounds = torch.tensor([0.0, 0.5, 1.2, 1.4, 1.6, 3.0], dtype=F64)
    curve = dif.bound_curve(solution, limit, bounds, dif.linear([0.0, 1.0]))
    second = [1.0, 1.0, 0.8, 0.6, 0.5, 0.5]
    first = [0.0, 0.5, 1.2, 1.4, 1.5, 1.5]
    np.testing.assert_allclose(curve.values[:, 0], second, atol=1e-9)
    objective = [3 + 0.5 * ((a - 2) ** 2 + (b - 1) ** 2) for a, b in zip(first, second, strict=True)]
    np.testing.assert_allclose(curve.objective, objective, atol=1e-9)
    # λ of the limit: 2 − τ alone, 3 − 2τ where the budget is binding too, 0 beyond
    np.testing.assert_allclose(curve.price, [2.0, 1.5, 0.6, 0.2, 0.0, 0.0], atol=1e-9)
    assert [(k.name, k.binds) for k in curve.kinks] == [("budget", "above"), ("limit", "below")]
    np.testing.assert_allclose([k.bound for k in curve.kinks], [1.0, 1.5], atol=1e-9)
    assert str(curve.kinks[1]) == "bound 1.5: limit is binding below it"
    assert curve.lost == ()
    frame = curve.to_frame()
    assert list(frame.columns[:2]) == ["objective", "price"]
    assert frame.index.name == "bound of limit"


def test_grid_of_solutions():
    train, problem, group = fair_logistic()
    solution = fit_problem(problem)
    limited, other = problem.constraints
    curve = dif.bound_curve(solution, limited, np.linspace(-0.05, 0.1, 9), train.mean(where=group == 0))
    for k, bound in enumerate(curve.bounds):
        moved = dif.Problem(problem.objective, [limited.term <= float(bound), other])
        again = dif.fit(moved, zeros(), show_progress=False)
        np.testing.assert_allclose(curve.thetas[k], again.theta, atol=1e-7)
        np.testing.assert_allclose(curve.price[k], again.lam[0], atol=1e-6)
        np.testing.assert_allclose(curve.objective[k], again.objective, atol=1e-9)
    assert len(curve.kinks) >= 1
    for kink in curve.kinks:
        row = solution.program.names.index(kink.name)
        for side in (-1e-6, 1e-6):
            moved = dif.Problem(problem.objective, [limited.term <= kink.bound + side, other])
            force = float(dif.fit(moved, zeros(), show_progress=False).lam[row])
            assert (force > 1e-12) == (kink.binds == ("below" if side < 0 else "above"))


def test_a_constraint_written_with_at_least():
    _, problem, _ = fair_logistic()
    limited, other = problem.constraints
    turned = (-1.0 * limited.term >= 0.02).named("turned")
    solution = fit_problem(dif.Problem(problem.objective, [turned, other]))
    curve = dif.bound_curve(solution, turned, [0.0, 0.04])
    straight = dif.bound_curve(fit_problem(problem), limited, [-0.04, 0.0])
    np.testing.assert_allclose(curve.price, straight.price.flip(0), atol=1e-7)


def test_bounds_that_cannot_be_met():
    """θ ≥ 1 and θ ≤ τ: for τ below 1 no point is feasible."""
    point = dif.Samples(lambda p, z: 0.5 * (p["t"] - z) ** 2, torch.zeros(1, dtype=F64))
    limit = (dif.linear([1.0]) <= 2.0).named("limit")
    problem = dif.Problem(point.mean(), [limit, (dif.linear([1.0]) >= 1.0).named("floor")])
    solution = dif.fit(problem, {"t": torch.tensor(1.5, dtype=F64)}, show_progress=False)
    curve = dif.bound_curve(solution, limit, [0.5, 1.5, 3.0])
    assert torch.isnan(curve.price).tolist() == [True, False, False]
    assert "lost at" in curve.lost[0]


def test_errors():
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    boxed = dif.Problem(train.mean() + dif.ridge(0.1), [dif.linear(torch.eye(4)) <= 10.0])
    at, (box,), (limit, _) = fit_problem(boxed), boxed.constraints, problem.constraints
    for words, action in (
        (
            "`bounds` must be finite numbers, .* not 0.1, nan",
            lambda: dif.bound_curve(solution, limit, [0.1, NAN]),
        ),
        ("`bounds` must be finite numbers, at least one, not none", lambda: dif.bound_curve(solution, limit, [])),
        ("`constraint` must have one row, not 4", lambda: dif.bound_curve(at, box, [0.1])),
    ):
        with pytest.raises(dif.InvalidInputError, match=words):
            action()


def test_prices_are_the_changes_of_multipliers():
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    estimator, removals = dif.DirectionalInfluence(solution), train.remove_each(range(6))
    prices = estimator.prices(removals)
    assert prices.targets == ("group 1", "group 2")
    for p, removal in enumerate(removals):
        np.testing.assert_allclose(prices.values[p], estimator.change(removal).multipliers.flat, atol=1e-12)
    small = 1e-6 * train.remove([7])
    differences = dif.Retraining(solution, tol=1e-14).change(small).multipliers.flat
    np.testing.assert_allclose(estimator.prices(small).values[0], differences, atol=1e-9)


def test_rows_that_meet_where_the_problem_becomes_infeasible():
    """Target (−3, −1), x + y ≤ 2, x + y ≥ low, x ≤ 0: several rows meet on the way; low > 2 is infeasible."""
    point = dif.Samples(lambda p, z: 0.5 * ((p["t"] - z) ** 2).sum(-1), torch.tensor([[-3.0, -1.0]], dtype=F64))
    low = (dif.linear([1.0, 1.0]) >= 0.0).named("low")
    rows = [(dif.linear([1.0, 1.0]) <= 2.0).named("high"), low, (dif.linear([1.0, 0.0]) <= 0.0).named("left")]
    solution = dif.fit(dif.Problem(point.mean(), rows), {"t": torch.zeros(2, dtype=F64)}, show_progress=False)
    curve = dif.bound_curve(solution, low, [-1, 0, 1, 3])
    assert torch.isnan(curve.price).tolist() == [False, False, False, True]
    assert len(curve.lost) == 1
    np.testing.assert_allclose(curve.thetas[:3].sum(1), [-1.0, 0.0, 1.0], atol=1e-9)
