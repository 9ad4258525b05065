"""fit and Solution against CVXPY and closed forms; limits, scales, nn.Modules, precision."""

import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch
from problems import (
    F64,
    bound_regression,
    class_data,
    fair_logistic,
    fit_problem,
    logistic,
    regression_data,
    squared,
    zeros,
)
from scipy.optimize import minimize

import dif
import dif.fairness

X, Y = regression_data()
TIGHT = {"solver": cp.CLARABEL, "tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11}


def test_against_cvxpy_linear_and_quadratic_constraints():
    train = dif.Samples(squared, (X, Y), name="train")
    constraints = [
        dif.linear([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]) <= [0.3, -0.9],
        dif.Function(lambda p: (p["theta"] ** 2).sum(), name="ball") <= 1.5,
        dif.linear([1.0, 0.0, 0.0, 1.0]) == -0.8,
        train.mean(where=torch.arange(40) < 10) <= 0.9,
    ]
    solution = fit_problem(dif.Problem(train.mean(), constraints))
    theta = cp.Variable(4)
    x, y = X.numpy(), Y.numpy()
    rows = [
        np.array([[1.0, 1, 0, 0], [0, 0, 1, 1]]) @ theta <= [0.3, -0.9],
        cp.sum_squares(theta) <= 1.5,
        np.array([1.0, 0, 0, 1]) @ theta == -0.8,
        cp.sum_squares(x[:10] @ theta - y[:10]) / 20 <= 0.9,
    ]
    cp.Problem(cp.Minimize(cp.sum_squares(x @ theta - y) / 80), rows).solve(**TIGHT)
    np.testing.assert_allclose(solution.theta, theta.value, atol=1e-6)
    np.testing.assert_allclose(solution.multipliers[0], rows[0].dual_value, atol=1e-5)
    np.testing.assert_allclose(solution.multipliers[1], rows[1].dual_value, atol=1e-5)
    assert solution.kkt.residual <= 1e-10


def test_against_cvxpy_logistic():
    x, y = class_data()
    train = dif.Samples(logistic, (x, y), name="train")
    problem = dif.Problem(
        train.mean() + dif.ridge(0.1), [train.mean(where=y > 0) <= 0.28, dif.linear(torch.eye(4)) >= -0.5]
    )
    solution = fit_problem(problem)
    theta = cp.Variable(4)
    losses = cp.logistic(cp.multiply(-y.numpy(), x.numpy() @ theta))
    up = np.flatnonzero(y.numpy() > 0)
    rows = [cp.sum(losses[up]) / len(up) <= 0.28, theta >= -0.5]
    cp.Problem(cp.Minimize(cp.sum(losses) / len(y) + 0.05 * cp.sum_squares(theta)), rows).solve(**TIGHT)
    np.testing.assert_allclose(solution.theta, theta.value, atol=1e-6)
    assert len(solution.active.binding) >= 1


@pytest.mark.parametrize("objective_scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("row_scale", [1e-3, 1.0, 1e3])
def test_scales_do_not_matter(objective_scale, row_scale):
    train, problem = bound_regression()
    expected = fit_problem(problem)
    scaled = [
        row_scale * c.term == row_scale * c.tau if c.kind.value == "==" else row_scale * c.term <= row_scale * c.tau
        for c in problem.constraints
    ]
    solution = fit_problem(dif.Problem(objective_scale * train.mean(), scaled))
    np.testing.assert_allclose(solution.theta, expected.theta, rtol=1e-9)
    np.testing.assert_allclose(solution.lam * row_scale / objective_scale, expected.lam, rtol=1e-8, atol=1e-12)
    assert solution.active.binding == expected.active.binding
    np.testing.assert_allclose(solution.active.force, expected.active.force, rtol=1e-8, atol=1e-14)
    np.testing.assert_allclose(solution.active.margins, expected.active.margins, rtol=1e-8)


def test_flat_directions_held_by_constraints():
    """H singular, but positive on the tangent space: two equal features, their parameters tied."""
    x = torch.cat([X[:, :3], X[:, :1]], 1)
    train = dif.Samples(squared, (x, Y), name="train")
    problem = dif.Problem(
        train.mean(), [dif.linear([1.0, 0.0, 0.0, -1.0]) == 0.0, dif.linear([0.0, 1.0, 0.0, 0.0]) <= 0.5]
    )
    solution = fit_problem(problem)
    half = dif.Samples(squared, (torch.cat([2 * X[:, :1], X[:, 1:3]], 1), Y))
    three = fit_problem(dif.Problem(half.mean(), [dif.linear([0.0, 1.0, 0.0]) <= 0.5]), d=3)
    np.testing.assert_allclose(solution.theta[:3], three.theta, atol=1e-10)
    removal = dif.DirectionalInfluence(solution).change(train.remove([3])).flat
    np.testing.assert_allclose(removal[:3], dif.DirectionalInfluence(three).change(half.remove([3])).flat, atol=1e-10)


def test_limits_are_respected_and_reported():
    x, _ = class_data()
    separable = dif.Problem(dif.Samples(logistic, (x, torch.sign(x[:, 0]))).mean())
    for limit in ({"max_iter": 30}, {"max_seconds": 0.1}):
        with pytest.warns(dif.NotConvergedWarning, match="KKT residual is .*; it must be at most 1e-10"):
            solution = dif.fit(separable, zeros(), **limit)
        assert not solution.converged
        assert "NOT a solution" in repr(solution)
    with pytest.warns(dif.NotConvergedWarning):  # no minimum at finite θ: stops by itself
        dif.fit(separable, zeros())


def test_multipliers_are_recovered():
    for problem in (bound_regression()[1], fair_logistic()[1]):
        fitted = fit_problem(problem)
        again = dif.Solution.from_params(problem, fitted.params)
        np.testing.assert_allclose(again.lam, fitted.lam, atol=1e-9)
        assert again.active.binding == fitted.active.binding
        assert dif.Solution(problem, fitted.params, fitted.multipliers).kkt.residual <= 1e-10
        by_name = dict(fitted.multipliers.items())
        assert dif.Solution(problem, fitted.params, by_name).kkt.residual <= 1e-10
        assert dif.Solution(problem, fitted.params, fitted.lam.tolist()).kkt.residual <= 1e-10


def test_multipliers_by_position_name_and_constraint():
    _, problem = bound_regression()
    solution = fit_problem(problem)
    for j, (name, constraint) in enumerate(zip(problem.names, problem.constraints, strict=True)):
        assert torch.equal(solution.multipliers[j], solution.multipliers[name])
        assert torch.equal(solution.multipliers[j], solution.multipliers[constraint])
    assert len(solution.multipliers) == 3
    assert [v.shape for v in solution.multipliers] == [(1,), (), ()]
    assert "order" in repr(solution.multipliers)
    with pytest.raises(KeyError, match="The constraints are sum, order, far"):
        solution.multipliers["budget"]
    with pytest.raises(KeyError, match="identity"):
        solution.multipliers[problem.constraints[0].named("copy")]


def test_a_module_is_read_and_not_changed():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False, dtype=F64)
    before = model.weight.detach().clone()
    train = dif.Samples(lambda m, z: 0.5 * (m(z[0])[:, 0] - z[1]) ** 2, (X, Y), name="train")
    problem = dif.Problem(train.mean(), [dif.linear([1.0, 1.0, 1.0, 1.0], of="weight") == 0.3])
    solution = dif.fit(problem, model)
    plain = dif.Samples(squared, (X, Y))
    expected = fit_problem(dif.Problem(plain.mean(), [dif.linear([1.0] * 4) == 0.3]))
    np.testing.assert_allclose(solution.params["weight"][0], expected.params["theta"], atol=1e-10)
    change = dif.DirectionalInfluence(solution).change(train.remove([1]))
    assert change.theta["weight"].shape == (1, 4)
    np.testing.assert_allclose(
        change.flat, dif.DirectionalInfluence(expected).change(plain.remove([1])).flat, atol=1e-12
    )
    assert torch.equal(model.weight.detach(), before)
    assert model.weight.grad is None


def test_frozen_parameters_of_a_module_stay():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    for p in model[0].parameters():
        p.requires_grad_(False)
    train = dif.Samples(lambda m, z: (m(z[0])[:, 0] - z[1]) ** 2, (X, Y))
    solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1)), model)
    assert list(solution.params) == ["2.weight", "2.bias"]
    assert solution.converged


def test_float32_agrees_with_float64():
    results = []
    for dtype in (torch.float64, torch.float32):
        train = dif.Samples(squared, (X.to(dtype), Y.to(dtype)), name="train")
        problem = dif.Problem(train.mean(), [dif.linear([1.0, 1.0, 0.0, 0.0]) <= -1.0])
        solution = dif.fit(problem, {"theta": torch.zeros(4, dtype=dtype)})
        assert solution.active.binding == (0,)
        assert solution.theta.dtype == dtype
        scores = dif.DirectionalInfluence(solution).scores(train, train.remove_each()).values
        results.append((solution.theta.double(), scores))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-5)
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-5)


def test_a_dataset_is_read_item_by_item():
    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return X[i], Y[i]

    tensors, items = (dif.Samples(squared, data, batch_size=16) for data in ((X, Y), Pairs()))
    values = []
    for train in (tensors, items):
        solution = fit_problem(dif.Problem(train.mean(), [dif.linear([1.0, 1.0, 0.0, 0.0]) <= -1.0]))
        values.append(dif.DirectionalInfluence(solution).scores(train, train.remove_each()).values)
    np.testing.assert_allclose(values[0], values[1], rtol=1e-10, atol=1e-14)


def test_dict_data_and_several_tensors():
    w, b = torch.zeros(3, dtype=F64), torch.zeros(1, dtype=F64)
    x = torch.cat([X[:, :3], torch.ones(40, 1, dtype=F64)], 1)
    named = dif.Samples(lambda p, z: 0.5 * (z["x"] @ p["w"] + p["b"] - z["y"]) ** 2, {"x": X[:, :3], "y": Y})
    flat = dif.Samples(squared, (x, Y))
    a = dif.fit(dif.Problem(named.mean(), [dif.linear([[0.0, 0.0, 1.0, 1.0]]) == 0.2]), {"w": w, "b": b})
    c = fit_problem(dif.Problem(flat.mean(), [dif.linear([[0.0, 0.0, 1.0, 1.0]]) == 0.2]))
    np.testing.assert_allclose(a.theta, c.theta, atol=1e-10)
    assert {k: v.shape for k, v in a.params.items()} == {"w": (3,), "b": (1,)}


def test_warm_start_from_the_solution_is_immediate():
    _, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = dif.fit(problem, solution.params, multipliers=solution.multipliers, max_iter=2)
    np.testing.assert_allclose(again.theta, solution.theta, atol=1e-12)


def test_text_of_the_active_set():
    text = str(fit_problem(bound_regression()[1]).active)
    assert "order: binding" in text
    assert "far: inactive" in text
    assert "tangent curvature" in text


def steep_odds(rng, twice):
    """Equalised odds between four groups of 120 people, with probabilities that are nearly steps."""
    X, group = rng.normal(size=(120, 4)), rng.integers(0, 4, 120)
    group[: 8 if twice else 4] = [0, 1, 2, 3] * (1 + twice)
    X[:, 0] += 0.2 * group
    X = np.column_stack([X, np.ones(120)])
    y = np.sign(X[:, 0] + 0.5 * X[:, 1] + 0.8 * rng.normal(size=120) - 0.3)
    score = lambda p, z: z[0] @ p["w"]  # noqa: E731
    loss = lambda p, z: torch.nn.functional.softplus(-z[1] * score(p, z))  # noqa: E731
    train = dif.Samples(loss, (torch.tensor(X), torch.tensor(y)), name="train")
    link = lambda f: torch.sigmoid(3 * f)  # noqa: E731
    rows = dif.fairness.equalised_odds(
        train, score, labels=(y > 0).astype(int), sensitive_features=group, bound=0.01, link=link
    )
    return dif.Problem(train.mean() + dif.ridge(0.02), rows)


@pytest.mark.parametrize("case", ["ended infeasible", "ended worse than at the start"])
def test_from_a_feasible_start_fit_ends_feasible_and_not_worse(case):
    """The augmented Lagrangian leaves the start, which is feasible, and does not find back; SLSQP from there does."""
    rng = np.random.default_rng(16 if case == "ended infeasible" else 0)
    if case != "ended infeasible":
        rng.choice(2, 2)
    problem, start = steep_odds(rng, case != "ended infeasible"), torch.zeros(5, dtype=torch.float64)
    begun = dif.Solution(problem, {"w": start})
    assert float(begun.c.max()) < 0
    solution = dif.fit(problem, {"w": start}, show_progress=False)
    assert solution.converged
    assert float(solution.c.max()) < 1e-10
    assert solution.objective < begun.objective

    rows, tau = solution.program.rows, solution.program.tau
    limits = {
        "type": "ineq",
        "fun": lambda w: (tau - rows.values(torch.tensor(w))[1:]).numpy(),
        "jac": lambda w: -rows.gradients(torch.tensor(w))[1][1:].numpy(),
    }
    found = minimize(
        lambda w: float(rows.values(torch.tensor(w))[0]),
        start.numpy(),
        jac=lambda w: rows.gradients(torch.tensor(w))[1][0].numpy(),
        method="SLSQP",
        constraints=limits,
        options={"ftol": 1e-14, "maxiter": 300},
    )
    assert solution.objective == pytest.approx(found.fun, abs=1e-6)
