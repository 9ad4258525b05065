"""Paths of solutions against re-solving: their ends, their events, and paths that are lost."""

import re

import numpy as np
import pytest
import torch
from problems import fair_logistic, fit_problem

import dif

F64 = torch.float64


def random_quadratic(seed, n=60, d=6):
    """Return least squares with four nearly active inequalities and an equality, solved, and a group to remove."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=g).double()
    y = X @ torch.randn(d, generator=g).double() + 0.5 * torch.randn(n, generator=g).double()
    A = torch.randn(4, d, generator=g).double()
    free = torch.linalg.lstsq(X, y).solution
    tau = A @ free + torch.tensor([-0.3, -0.05, 0.02, 0.2], dtype=F64)
    train = dif.Samples(lambda p, z: (z[0] @ p["t"] - z[1]) ** 2, (X, y), name="train")
    rows = [(dif.linear(A) <= tau).named("rows"), (dif.linear(torch.ones(d)) == float(free.sum())).named("sum")]
    solution = dif.fit(dif.Problem(train.mean(), rows), {"t": torch.zeros(d, dtype=F64)}, show_progress=False)
    size = int(torch.randint(1, int(0.3 * n) + 1, (1,), generator=g))
    return solution, train.remove(torch.randperm(n, generator=g)[:size].tolist())


def test_fifty_random_quadratic_programs():
    """The end agrees with re-solving to 1e-7; every event is confirmed by re-solving on both sides of its ε."""
    events = 0
    for seed in range(50):
        solution, removal = random_quadratic(seed)
        path = dif.PathInfluence(solution).follow(removal)
        retraining = dif.Retraining(solution)
        np.testing.assert_allclose(path.end.theta - solution.theta, retraining.change(removal).flat, atol=1e-7)
        assert path.end.kkt.residual < 1e-9
        assert bool((path.epsilons.diff() > 0).all())
        for event in path.events:
            for side in (-1e-5, 1e-5):
                change = retraining.change((event.epsilon + side) * removal)
                force = float((solution.lam + change.multipliers.flat)[event.row])
                assert (force > 1e-12) == (event.binds == (side > 0)), (seed, str(event))  # less is rounding of 0
        events += len(path.events)
    assert events > 5


def test_every_point_of_a_path_solves_its_problem():
    train, problem, *_ = fair_logistic()
    solution = fit_problem(problem)
    group = train.remove(list(range(0, len(train), 4)))
    path = dif.PathInfluence(solution).follow(group)
    retraining = dif.Retraining(solution)
    for epsilon, theta, lam in zip(path.epsilons, path.thetas, path.multipliers, strict=True):
        if 0 < float(epsilon) < 1:
            change = retraining.change(float(epsilon) * group)
            np.testing.assert_allclose(theta - solution.theta, change.flat, atol=1e-7)
            np.testing.assert_allclose(lam - solution.lam, change.multipliers.flat, atol=1e-6)


@pytest.mark.parametrize("share", [0.05, 0.33])
def test_groups_that_the_first_order_cannot_predict(share):
    train, problem, *_ = fair_logistic()
    solution = fit_problem(problem)
    n = len(train)
    groups = train.remove_groups(
        [torch.randperm(n, generator=torch.Generator().manual_seed(k))[: int(share * n)].tolist() for k in range(4)]
    )
    actual = dif.Retraining(solution).scores(train.mean(), groups)
    path = dif.PathInfluence(solution).scores(train.mean(), groups)
    np.testing.assert_allclose(path.values, actual.values, atol=1e-7)
    first = dif.DirectionalInfluence(solution).scores(train.mean(), groups)
    assert first.compare(actual).relative_error > 1e-2


def test_events_of_a_bound_that_moves():
    """min ½‖θ − (2, 1)‖² s.t. θ₁ ≤ τ, θ₁ + θ₂ ≤ 2, τ from 3 to 0.5: both events are known in closed form."""
    point = dif.Samples(lambda p, z: 0.5 * ((p["t"] - z) ** 2).sum(-1), torch.tensor([[2.0, 1.0]], dtype=F64))
    limit = (dif.linear([1.0, 0.0]) <= 3.0).named("limit")
    problem = dif.Problem(point.mean(), [limit, (dif.linear([1.0, 1.0]) <= 2.0).named("budget")])
    solution = dif.fit(problem, {"t": torch.zeros(2, dtype=F64)}, show_progress=False)
    path = dif.PathInfluence(solution).follow(limit.shift(-2.5))
    # θ = (1.5, 0.5) until τ = 1.5 (ε = 0.6); then (τ, 2 − τ) until the budget is slack, θ₂ = 1 at τ = 1 (ε = 0.8)
    assert [(event.name, event.binds) for event in path.events] == [("limit", True), ("budget", False)]
    np.testing.assert_allclose([event.epsilon for event in path.events], [0.6, 0.8], atol=1e-9)
    np.testing.assert_allclose(path.end.theta, [0.5, 1.0], atol=1e-9)
    change = dif.PathInfluence(solution).change(limit.shift(-2.5))
    assert change.diagnostics["events"] == ["ε = 0.6: limit becomes binding", "ε = 0.8: budget becomes inactive"]
    np.testing.assert_allclose(change.multipliers["limit"], 1.5, atol=1e-9)


def test_a_lost_path_is_reported():
    """θ⁴/4 − θ²/2 + aθ: the minimum at the right vanishes in a fold at a = 2/√27."""
    point = dif.Samples(lambda p, z: p["t"] ** 4 / 4 - p["t"] ** 2 / 2 + 0.0 * z, torch.zeros(1, dtype=F64))
    push = dif.Samples(lambda p, z: z * p["t"], torch.ones(1, dtype=F64), name="push")
    problem = dif.Problem(point.mean() + 1e-9 * push.sum())
    solution = dif.fit(problem, {"t": torch.tensor(1.0, dtype=F64)}, show_progress=False)
    near, far = (push.reweight(torch.tensor([a * 1e9])) for a in (0.38, 0.40))
    end = dif.PathInfluence(solution).follow(near).end.theta
    np.testing.assert_allclose(end**3 - end + 0.38, 0.0, atol=1e-8)
    with pytest.raises(dif.NotConvergedError, match=r"lost at ε = 0\.9") as caught:
        dif.PathInfluence(solution).follow(far)
    assert re.fullmatch(
        r"The path of the solution under '.*' was lost at ε = 0\.9\d* after \d+ steps\.", caught.value.found
    )
    assert caught.value.allowed == "It must reach ε = 1."
    assert caught.value.meaning == (
        "No solution was found beyond that ε: the path may fold back, or the constraints contradict each other."
    )
    with pytest.raises(dif.NotConvergedError, match="Raise max_steps") as caught:
        dif.PathInfluence(solution, max_steps=1).follow(far)
    assert caught.value.allowed == "It must reach ε = 1 within 1 step."
    assert caught.value.meaning == "The limit on steps was reached before the end of the path."
    lenient = dif.PathInfluence(solution, strict=False).scores(point.mean(), far)
    assert bool(lenient.values.isnan().all())
    assert "lost at" in lenient.diagnostics["unanswered"][far.labels[0]]


def test_stops_and_changes_along_a_path():
    train, problem, *_ = fair_logistic()
    solution = fit_problem(problem)
    removal = train.remove(list(range(0, 60, 5)))
    path = dif.PathInfluence(solution).follow(removal, stops=[0.3, 0.35, 0.9])
    assert {0.0, 0.3, 0.35, 0.9, 1.0} <= set(path.epsilons.tolist())
    at = path.epsilons.tolist().index(0.35)
    expected = dif.Retraining(solution).scores(train.mean(), 0.35 * removal)
    np.testing.assert_allclose(path.changes(train.mean())[at], expected.values[0], atol=1e-9)
    assert path.start is solution
    assert path.curvatures == 0  # the one at the start was enough
    for limit in (0, "a", 2.5):
        with pytest.raises(dif.InvalidInputError, match=f"`max_steps` must be an integer ≥ 1, not {limit!r}."):
            dif.PathInfluence(solution, max_steps=limit)
    with pytest.raises(dif.InvalidInputError, match="stops on a path"):
        dif.PathInfluence(solution).follow(removal, stops=["a"])
    for stops, outside in (([1.5], "1.5"), ([0.5, float("nan")], "nan"), ([-1.0, 2.0], "-1.0, 2.0")):
        with pytest.raises(dif.InvalidInputError) as caught:
            dif.PathInfluence(solution).follow(removal, stops=stops)
        assert str(caught.value) == (
            f"The stops on a path must be values of ε from 0 to 1, not {outside}; to go beyond 1, scale the "
            "perturbation: 2 * removal."
        )


def test_one_constraint_takes_over_from_another():
    """Two rows are active at a corner of the plane; a third row becomes active there and replaces one of them."""
    point = dif.Samples(lambda p, z: 0.5 * ((p["t"] - z) ** 2).sum(-1), torch.tensor([[5.0, 9.0]], dtype=F64))
    rows = dif.linear([[1.0, 0.0], [0.0, 1.0]]) <= torch.tensor([1.0, 1.0])
    third = (dif.linear([1.0, 1.0]) <= 3.0).named("third")
    problem = dif.Problem(point.mean(), [rows.named("box"), third])
    solution = dif.fit(problem, {"t": torch.zeros(2, dtype=F64)}, show_progress=False)
    path = dif.PathInfluence(solution).follow(third.shift(-1.5))
    # at a sum of 2 the third row holds too, with θ₂ ≤ 1 (force 8, of which it takes 4 until θ₁ ≤ 1 has none left)
    assert {(event.name, event.binds) for event in path.events} == {("third", True), ("box[0]", False)}
    np.testing.assert_allclose([event.epsilon for event in path.events], 2 / 3, atol=1e-9)
    np.testing.assert_allclose(path.end.theta, [0.5, 1.0], atol=1e-9)
    np.testing.assert_allclose(path.end.lam, [0.0, 3.5, 4.5], atol=1e-9)
    end = dif.Retraining(solution).change(third.shift(-1.5))
    np.testing.assert_allclose(path.end.theta - solution.theta, end.flat, atol=1e-8)
