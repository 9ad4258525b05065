"""Nothing depends on the units of features, rows or objective."""

import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from problems import F64, class_data, fit_problem, logistic, regression_data, squared, weak_regression, zeros

import dif


@pytest.mark.parametrize("units", [(1, 1), (1e4, 1), (1e4, 1e-2), (1e-6, 1e3), (1e8, 1e8)])
def test_units_of_the_features(units):
    """The same regression with its columns in other units: residuals, active set and influence are the same."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(50, 2))
    X, y = torch.as_tensor(base * units), torch.as_tensor(base.sum(1) + 0.1 * rng.normal(size=50))
    train = dif.Samples(lambda p, z: 0.5 * (z[0] @ p["theta"] - z[1]) ** 2, (X, y), name="train")
    problem = dif.Problem(train.mean(), [dif.linear([0.0, units[1]]) <= 0.9])
    solution = dif.fit(problem, zeros(2), show_progress=False)
    assert solution.active.binding == (0,)
    assert float(solution.active.force[0]) == pytest.approx(3.4564645240489624, rel=1e-6)
    natural = dif.linear(np.diag(units))
    predicted = dif.DirectionalInfluence(solution).scores(natural, train.remove_each())
    actual = dif.Retraining(solution).scores(natural, train.remove_each())
    assert predicted.compare(actual).relative_error == pytest.approx(0.02824800731645, rel=1e-6)
    assert float(predicted.values[:, 1].abs().max()) <= 1e-12  # the bound holds θ₂
    bad = solution.theta.clone()
    bad[1] *= 0.6
    assert dif.Solution(problem, {"theta": bad}).kkt.residual > 0.1
    with pytest.raises(dif.NotASolutionError):
        dif.DirectionalInfluence(dif.Solution(problem, {"theta": torch.zeros(2, dtype=F64)}))


def test_raw_income_and_age():
    """Logistic regression on income ≈ 4e4, age ≈ 40 and a constant whose weight is capped."""
    rng = np.random.default_rng(1)
    income, age = 4e4 + 1e4 * rng.normal(size=80), 40 + 10 * rng.normal(size=80)
    y = np.sign((income - 4e4) / 1e4 + 0.5 * (age - 40) / 10 + rng.normal(size=80))
    results = []
    for unit in (1.0, 1e-5):
        X = torch.as_tensor(np.stack([income * unit, age, np.ones(80)], 1))
        train = dif.Samples(logistic, (X, torch.as_tensor(y)), name="train")
        problem = dif.Problem(train.mean(), [dif.linear([0.0, 0.0, 1.0]) >= -2.0])
        solution = dif.fit(problem, zeros(3), show_progress=False)
        assert solution.active.binding == (0,)
        scores = dif.DirectionalInfluence(solution).scores(train, train.remove_each())
        results.append(scores.values)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6, 1e6])
def test_multipliers_of_weak_rows_are_recovered_as_zero(scale):
    train, problem = weak_regression()
    solution = fit_problem(problem)
    scaled = dif.Problem(scale * train.mean(), problem.constraints)
    again = dif.Solution.from_params(scaled, solution.params)
    assert again.converged
    assert (again.active.binding, again.active.weak) == ((0,), (1,))
    np.testing.assert_allclose(again.lam / scale, solution.lam, atol=1e-9)


def test_float32_with_a_ridge():
    X, y = regression_data()
    values = []
    for dtype in (torch.float64, torch.float32):
        train = dif.Samples(squared, (X.to(dtype), y.to(dtype)), name="train")
        square = dif.Function(lambda p: 0.5 * (p["theta"] @ p["theta"]), name="half square")
        problem = dif.Problem(train.mean() + dif.ridge(0.1), [square <= 0.4])
        solution = dif.fit(problem, {"theta": torch.full((4,), 0.1, dtype=dtype)}, show_progress=False)
        assert solution.active.binding == (0,)
        values.append(dif.DirectionalInfluence(solution).scores(train, train.remove_each()).values)
    np.testing.assert_allclose(values[1], values[0], atol=1e-5)


# Losses that torch cannot map over samples, or differentiate forwards

X, Y = class_data(n=24)


def masked(params, z):
    losses = logistic(params, z).clone()
    losses[z[1] > 0] *= 2
    return losses


def branching(params, z):
    losses = logistic(params, z)
    return torch.where(z[1] > 0, 2 * losses, losses) if float(z[0].abs().max()) > -1 else losses


def straight(params, z):
    return torch.where(z[1] > 0, 2.0, 1.0) * logistic(params, z)


class Cube(torch.autograd.Function):
    """A kernel with a backward, but no forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def custom(params, z):
    return 0.01 * Cube.apply(z[0] @ params["theta"] + 9.0) + logistic(params, z)


def custom_by_hand(params, z):
    return 0.01 * (z[0] @ params["theta"] + 9.0) ** 3 + logistic(params, z)


def test_a_kernel_without_second_derivative_is_named():
    def distances(params, z):
        return torch.cdist(z[0], params["theta"][None])[:, 0]

    train = dif.Samples(distances, (X, Y), name="train")
    with pytest.raises(dif.InvalidInputError, match=r"cannot differentiate a loss or function twice.*cdist"):
        dif.fit(dif.Problem(train.mean()), zeros(), show_progress=False)


@pytest.mark.parametrize(("odd", "plain"), [(masked, straight), (branching, straight), (custom, custom_by_hand)])
def test_losses_that_cannot_be_transformed_take_another_way(odd, plain):
    values = []
    for loss in (odd, plain):
        train = dif.Samples(loss, (X, Y), name="train")
        problem = dif.Problem(train.mean() + dif.ridge(0.1), [dif.linear([1.0, 1.0, 1.0, 0.0]) == 0.2])
        solution = dif.fit(problem, zeros(), show_progress=False)
        influence = dif.DirectionalInfluence(solution)
        values.append([influence.scores(t, train.remove_each()).values for t in (train, train.mean())])
    for a, b in zip(*values, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-10)


# Data as people have them

Pair = namedtuple("Pair", ["x", "y"])


class Items(torch.utils.data.Dataset):
    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return self.item(X[i], Y[i], i)


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (Pair(X, Y), lambda z: (z.x, z.y)),
        (({"x": X}, Y), lambda z: (z[0]["x"], z[1])),
        ({"a": (X, Y)}, lambda z: z["a"]),
        (Items(lambda x, y, i: Pair(x, y)), lambda z: (z.x, z.y)),
        (Items(lambda x, y, i: (x, y, f"id {i}")), lambda z: (z[0], z[1])),
        (Items(lambda x, y, i: ({"x": x}, y)), lambda z: (z[0]["x"], z[1])),
    ],
    ids=["named tuple", "nested", "nested in a dict", "items of named tuples", "items with text", "nested items"],
)
def test_structures_of_data(data, read):
    values = []
    for given, how in ((data, read), ((X, Y), lambda z: z)):
        train = dif.Samples(lambda p, z, how=how: logistic(p, how(z)), given, name="train", batch_size=7)
        solution = fit_problem(dif.Problem(train.mean() + dif.ridge(0.1), [dif.linear([1.0, 1.0, 1.0, 0.0]) == 0.2]))
        influence = dif.DirectionalInfluence(solution)
        newton = dif.NewtonInfluence(solution).change(train.remove([2, 5])).flat
        values.append(
            (influence.scores(train, train.remove_each()).values, influence.change(train.remove(3)).flat, newton)
        )
    for a, b in zip(*values, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_numpy_numbers_scale_perturbations():
    train, problem = weak_regression()
    influence = dif.DirectionalInfluence(fit_problem(problem))
    expected = influence.change(0.01 * train.remove(3)).flat
    for factor in (np.float64(0.01), np.float32(0.01), torch.tensor(0.01, dtype=F64)):
        for perturbation in (factor * train.remove(3), train.remove(3) * factor):
            np.testing.assert_allclose(influence.change(perturbation).flat, expected, rtol=1e-6, atol=1e-15)
    with pytest.raises(TypeError):
        train.remove(3) * "2"


def test_multipliers_keyed_by_constraint():
    _, problem = weak_regression()
    solution = fit_problem(problem)
    keyed = dict(zip(problem.constraints, solution.multipliers, strict=True))
    assert torch.equal(dif.Solution(problem, solution.params, keyed).lam, solution.lam)


def test_what_could_not_be_answered_comes_first():
    values = torch.tensor([[float("nan")], [0.1], [-0.5]], dtype=F64)
    influence = dif.Influence(values, ("a", "b", "c"), ("t",), "none")
    assert [r.label for r in influence.top(3)] == ["a", "c", "b"]


def test_a_kink_is_not_called_infeasible():
    """‖θ‖₁ ≤ 1 written with abs is not smooth: not solved, but not a contradiction either."""
    train = dif.Samples(squared, regression_data(), name="train")
    kinked = dif.Problem(train.mean(), [dif.Function(lambda p: p["theta"].abs().sum(), name="l1") <= 1.0])
    with pytest.warns(dif.NotConvergedWarning):
        dif.fit(kinked, {"theta": torch.full((4,), 0.1, dtype=F64)}, show_progress=False)


def test_sums_that_cancel():
    train = dif.Samples(squared, regression_data(), name="train")
    alone = train.mean(where=torch.arange(40) == 7)
    cancelled = 0.1 * alone + 0.2 * alone - 0.3 * alone
    problem = dif.Problem(train.mean() + cancelled, [dif.linear([1.0, 0.0, 0.0, 0.0]) <= -1.0])
    change = dif.DirectionalInfluence(fit_problem(problem)).change(train.remove(7))
    assert bool(torch.isfinite(change.flat).all())


# What one odd coordinate must not hide


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6, 1e7])
def test_an_uncentred_target(offset):
    """A huge intercept must not make a binding constraint look weak, nor a wrong θ look right."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    data = (torch.as_tensor(np.c_[X, np.ones(60)]), torch.as_tensor(X[:, 0] + offset + 0.1 * rng.normal(size=60)))
    train = dif.Samples(squared, data, name="train")
    problem = dif.Problem(train.mean(), [dif.linear([1.0, 0.0, 0.0]) <= 0.9])
    solution = dif.fit(problem, zeros(3), show_progress=False)
    assert solution.active.binding == (0,)
    scores = dif.DirectionalInfluence(solution).scores(dif.linear([1.0, 0.0, 0.0]), train.remove_each())
    assert float(scores.values.abs().max()) <= 1e-12
    bad = solution.theta.clone()
    bad[1] += 0.5
    assert not dif.Solution(problem, {"theta": bad}).converged


@pytest.mark.parametrize("unit", [1.0, 1e-4, 1e-6, 1e3, 1e4, 1e6])
def test_parameters_that_curve_only_together(unit):
    """a₀a₁ has no diagonal; its rows must be read whatever the units of the features beside it."""
    X, y = regression_data(60, 1)
    train = dif.Samples(lambda p, z: 0.5 * (unit * z[0] @ p["w"] - z[1]) ** 2, (X, y + 1), name="train")
    product = dif.Function(lambda p: p["a"][0] * p["a"][1] - p["a"].sum(), name="product")
    constraints = [dif.linear([1.0, -1.0], of="a") == 0.2, dif.linear([1.0, 1.0], of="a") <= 1.9]
    start = {"w": torch.zeros(1, dtype=F64), "a": torch.zeros(2, dtype=F64)}
    solution = dif.fit(dif.Problem(train.mean() + product, constraints), start, show_progress=False)
    np.testing.assert_allclose(solution.lam, [0.1, 0.05], rtol=1e-6)
    assert solution.active.binding == (0, 1)
    change = dif.DirectionalInfluence(solution).change(constraints[1].shift(0.05))
    np.testing.assert_allclose(change.flat, [0.0, 0.025, 0.025], atol=1e-9)


@pytest.mark.parametrize("unit", [1.0, 1e3, 2e5])
def test_a_slack_variable(unit):
    X, y = regression_data(60, 3, seed=1)
    train = dif.Samples(lambda p, z: 0.5 * (unit * (z[0] @ p["w"]) - z[1]) ** 2, (X, y), name="train")
    free = torch.linalg.lstsq(X, y[:, None]).solution[:, 0]
    soft = dif.linear([unit, 0.0, 0.0], of="w") - dif.linear([1.0], of="s") <= float(free[0]) - 1.0
    cap = dif.linear([0.0, 0.0, unit], of="w") <= float(free[2]) - 1e-3
    problem = dif.Problem(train.mean() + 0.1 * dif.linear([1.0], of="s"), [soft, dif.linear([1.0], of="s") >= 0, cap])
    start = {"w": torch.zeros(3, dtype=F64), "s": torch.zeros(1, dtype=F64)}
    solution = dif.fit(problem, start, show_progress=False)
    assert (solution.active.binding, solution.active.inactive) == ((0, 2), (1,))
    derivative = dif.DirectionalInfluence(solution, switching=False)
    scores = derivative.scores(dif.linear([0.0, 0.0, unit, 0.0]), train.remove_each())
    assert float(scores.values.abs().max()) <= 1e-12
    whole = dif.DirectionalInfluence(solution).scores(dif.linear([0.0, 0.0, unit, 0.0]), train.remove_each())
    if unit < 1e5:  # beyond it the curvature is too uneven to let rows go
        assert float(whole.values.abs().max()) > 1e-3  # some removals lift the cap


@pytest.mark.parametrize(("curvature", "reached"), [(1e-6, 1e-8), (1e-14, 1e-5)])
def test_a_coordinate_that_hardly_curves_is_still_held_by_its_constraints(curvature, reached):
    X, y = regression_data(60, 2, seed=2)

    def loss(p, z):
        return squared(p, z) + 0.5 * curvature * p["s"][0] ** 2 + p["s"][0]

    train = dif.Samples(loss, (X, y), name="train")
    above = dif.linear([1.0], of="s") - dif.linear([1.0, 0.0], of="theta") <= 9.0
    problem = dif.Problem(train.mean(), [dif.linear([1.0], of="s") >= -1, above])
    start = {"theta": torch.zeros(2, dtype=F64), "s": torch.zeros(1, dtype=F64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at 1e-14 rounding stops it at 6e-7, and it says so
        solution = dif.fit(problem, start, show_progress=False)
    assert float(solution.params["s"]) == pytest.approx(-1.0, abs=reached)
    wrong = {**solution.params, "s": torch.full((1,), -1.02, dtype=F64)}
    assert not dif.Solution(problem, wrong).converged


def test_units_without_the_matrix(monkeypatch):
    monkeypatch.setattr("dif.derivatives.hessian.DENSE_LIMIT", 100)
    d, n = 260, 60
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, d)) / np.sqrt(d) * 3
    y, forces = X[:, 1:] @ rng.normal(size=d - 1), []
    for unit in (1.0, 2e4):
        x = X.copy()
        x[:, 0] = unit * X[:, 0] * np.sqrt(d) / 3
        train = dif.Samples(squared, (torch.as_tensor(x), torch.as_tensor(y)), name="train")
        problem = dif.Problem(train.mean() + dif.ridge(0.1), [dif.linear(np.eye(d)[1]) <= -0.2])
        solution = dif.fit(problem, zeros(d), show_progress=False)
        assert not solution.curvature.assembled
        assert solution.active.binding == (0,)
        scores = dif.DirectionalInfluence(solution).scores(dif.linear(np.eye(d)[1]), train.remove_each(range(3)))
        assert float(scores.values.abs().max()) <= 1e-12
        forces.append(float(solution.active.force[0]))
    assert forces[1] == pytest.approx(forces[0], rel=0.3)


def test_solvers_on_unscaled_features():
    X, y = regression_data(60, 3, seed=1)
    train = dif.Samples(squared, (X * torch.tensor([1e4, 1.0, 1e-4]), y), name="train")
    solution = dif.fit(dif.Problem(train.mean(), [dif.linear([1e4, 0.0, 0.0]) <= 0.1]), zeros(3), show_progress=False)
    exact = dif.DirectionalInfluence(solution).change(train.remove([0])).flat
    change = dif.DirectionalInfluence(solution, solver=dif.ConjugateGradients).change(train.remove([0])).flat
    np.testing.assert_allclose(change, exact, rtol=1e-8, atol=1e-18)


def test_multipliers_without_bound_are_refused():
    """A group risk at its own minimum leaves no point inside: λ grows without bound."""
    X, y = regression_data(60, 3)
    train = dif.Samples(squared, (X, y), name="train")
    group = train.mean(where=torch.arange(60) < 6)
    least = dif.fit(dif.Problem(group), zeros(3), show_progress=False).objective
    with pytest.warns(dif.NotConvergedWarning):
        solution = dif.fit(dif.Problem(train.mean(), [group <= least]), zeros(3), show_progress=False)
    with pytest.raises((dif.DegenerateError, dif.NotASolutionError)):
        dif.DirectionalInfluence(solution)


def test_tiny_factors_keep_their_term():
    train = dif.Samples(squared, regression_data(), name="train")
    assert (1e-15 * train.mean()).sums[0][0] == 1e-15


@pytest.mark.parametrize("mix", ["sorted classes", "only large batches", "twins"])
def test_mixing_losses_are_found(mix):
    X, y = class_data(n=24)
    if mix == "sorted classes":
        order = torch.argsort(y)
        X, y = X[order], y[order]
    if mix == "twins":
        X, y = torch.cat([X[:1], X]), torch.cat([y[:1], y])

    def loss(p, z):
        plain = logistic(p, z)
        if mix == "sorted classes":
            share = (z[1] > 0).double().mean().clamp(0.1, 0.9)
            return torch.where(z[1] > 0, 1 / share, 1 / (1 - share)) * plain
        return 0.5 * plain + 0.5 * plain.mean() if mix == "twins" or len(plain) > 4 else plain

    with pytest.raises(dif.InvalidInputError, match="depends on the other samples of its batch"):
        dif.fit(dif.Problem(dif.Samples(loss, (X, y)).mean() + dif.ridge(0.1)), zeros(), show_progress=False)
