"""Nearly weak constraints: removals under which a constraint becomes active or inactive within the step."""

import numpy as np
import pytest
import torch
from problems import bound_regression, fair_logistic, fit_problem, logistic, squared

import dif

N, D = 80, 4


def nearly_weak(seed):
    """A problem with a known solution, one constraint of which is nearly weak on the scale of a single removal.

    θ̄ and λ̄ are drawn first; a linear term in the objective makes them the solution.
    """
    rng = np.random.default_rng(seed)
    X, theta = torch.as_tensor(rng.standard_normal((N, D))), torch.as_tensor(rng.standard_normal(D))
    if seed % 2:
        truth = theta + torch.as_tensor(rng.standard_normal(D))
        loss, y = squared, X @ truth + torch.as_tensor(0.5 * rng.standard_normal(N))
    else:
        loss, y = logistic, torch.as_tensor(np.sign(rng.standard_normal(N)))
    train = dif.Samples(loss, (X, y), name="train")
    group = X[:, 0] + torch.as_tensor(0.5 * rng.standard_normal(N)) > 0  # groups that differ, as groups do
    base = train.mean() + dif.ridge(0.2)
    rows = [train.mean(where=group), dif.linear(rng.standard_normal(D)).as_term()]
    if seed % 3 == 0:
        rows.reverse()  # which of the two is nearly weak

    def state(lam, slack):
        """Build the problem whose solution is θ̄ with these multipliers and slacks."""
        at = dif.Solution(dif.Problem(base, [r <= 0.0 for r in rows]), {"theta": theta}, lam)
        pull = dif.linear(-(at.J[0] + at.lam @ at.G))
        constraints = [r <= float(f) + s for r, f, s in zip(rows, at.f[1:], slack, strict=True)]
        problem = dif.Problem(base + pull, constraints)
        return dif.Solution(problem, {"theta": theta}, lam)

    # the second constraint binds with a force far beyond that of a single sample
    firm = 0.5 / float(dif.Solution(dif.Problem(base, [r <= 0.0 for r in rows]), {"theta": theta}).scales.norms[1])
    probe = state([0.2, firm], [0.0, 0.0])  # the first constraint binds: how much does one removal move λ₁?
    moves = torch.stack(
        [dif.DirectionalInfluence(probe).change(r).multipliers.flat[0] for r in train.remove_each(range(8))]
    )
    share = rng.uniform(0.2, 1.0)
    if seed % 4 < 2:
        solution = state([share * float(moves.abs().median()), firm], [0.0, 0.0])
    else:
        loose = state([0.0, firm], [1.0, 0.0])
        steps = [
            float(loose.G[0] @ dif.DirectionalInfluence(loose).change(r).flat) for r in train.remove_each(range(8))
        ]
        solution = state([0.0, firm], [share * float(np.median(np.abs(steps))), 0.0])
    assert solution.kkt.residual < 1e-12
    return train, solution


def find_binding(multipliers, solution):
    """Return which constraints have a positive multiplier, on the scale of the problem."""
    return tuple((solution.scales.steps(solution.c, multipliers)[1] > 1e-9).tolist())


def test_switching_predicts_the_active_set():
    rng = np.random.default_rng(7)
    right, flips, no_worse, plain_errors, switching_errors = [], 0, [], [], []
    for seed in range(25):
        train, solution = nearly_weak(seed)
        plain = dif.DirectionalInfluence(solution, switching=False)
        switching = dif.DirectionalInfluence(solution, switching=True)
        auto = dif.DirectionalInfluence(solution)
        retrained = dif.Retraining(solution)
        for i in rng.choice(N, 9, replace=False).tolist():
            removal = train.remove([i])
            actual, first, second = retrained.change(removal), plain.change(removal), switching.change(removal)
            truth = find_binding(solution.lam + actual.multipliers.flat, solution)
            flips += truth != find_binding(solution.lam, solution)
            right.append(find_binding(solution.lam + second.multipliers.flat, solution) == truth)
            size = float(actual.flat.norm())
            assert float((auto.change(removal).flat - second.flat).norm()) <= 1e-10 * size
            errors = [float((c.flat - actual.flat).norm()) / size for c in (first, second)]
            plain_errors.append(errors[0])
            switching_errors.append(errors[1])
            no_worse.append(errors[1] <= errors[0] + 0.01)
    print(f"{len(right)} removals, {flips} flips, set right {np.mean(right):.1%}, no worse {np.mean(no_worse):.1%}, ")
    print(f"mean relative error {np.mean(plain_errors):.3f} -> {np.mean(switching_errors):.3f}")
    assert flips >= 50
    assert np.mean(right) >= 0.97
    assert np.mean(no_worse) >= 0.99
    assert np.mean(switching_errors) < 0.5 * np.mean(plain_errors)


def test_other_values_of_switching_are_refused():
    _, problem, _ = fair_logistic()
    for wrong in ("yes", None, 2):
        with pytest.raises(dif.InvalidInputError, match=f'`switching` must be "auto", True or False, not {wrong!r}.'):
            dif.DirectionalInfluence(fit_problem(problem), switching=wrong)


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("make", [bound_regression, fair_logistic])
def test_with_wide_margins_it_is_the_derivative(make, few, monkeypatch):
    monkeypatch.setattr("dif.estimators.directional._PARAMETERS", few)  # 0: what switches is looked for by mixtures
    train, problem, *_ = make()
    solution = fit_problem(problem)
    removals = 1e-3 * train.remove_each()  # no constraint is that near to switching
    plain = dif.DirectionalInfluence(solution, switching=False).scores(train, removals)
    switching = dif.DirectionalInfluence(solution, switching=True).scores(train, removals)
    auto = dif.DirectionalInfluence(solution).scores(train, removals)
    assert switching.diagnostics["switched"] == 0
    assert auto.diagnostics["within_reach"] == []
    scale = float(plain.values.abs().max())
    assert float((switching.values - plain.values).abs().max()) <= 1e-10 * scale
    assert torch.equal(auto.values, plain.values)


@pytest.mark.parametrize("few", [0, 64])
def test_counts_the_samples_on_which_they_differ(few, monkeypatch):
    monkeypatch.setattr("dif.estimators.directional._PARAMETERS", few)
    train, solution = nearly_weak(1)
    removals = train.remove_each()
    coordinates = dif.linear(torch.eye(D))
    plain = dif.DirectionalInfluence(solution, switching=False).scores(coordinates, removals)
    auto = dif.DirectionalInfluence(solution).scores(coordinates, removals)
    switching = dif.DirectionalInfluence(solution, switching=True).scores(coordinates, removals)
    gap = (plain.values - switching.values).abs().max(1).values
    differ = int((gap > 1e-9 * float(plain.values.abs().max())).sum())
    assert 0 < differ < N
    assert switching.diagnostics["switched"] == differ
    assert auto.diagnostics["switched"] == differ
    assert auto.diagnostics["within_reach"] != []
    np.testing.assert_allclose(auto.values.numpy(), switching.values.numpy(), atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_newton_is_exact_when_rows_switch(seed):
    """One step solves a quadratic problem with linear constraints, whichever constraints switch."""
    rng = np.random.default_rng(seed)
    X, theta = torch.as_tensor(rng.standard_normal((20, 3))), torch.as_tensor(rng.standard_normal(3))
    train = dif.Samples(squared, (X, X @ theta + torch.as_tensor(rng.standard_normal(20))), name="train")
    free = dif.fit(dif.Problem(train.mean()), {"theta": torch.zeros(3).double()}, show_progress=False).theta
    limits = free + torch.tensor([-0.02, 0.02, 0.01])  # barely binding, barely slack, barely slack
    problem = dif.Problem(train.mean(), [(dif.linear(torch.eye(3)) <= limits).named("box")])
    solution = dif.fit(problem, {"theta": torch.zeros(3).double()}, show_progress=False)
    assert solution.active.binding == (0,)
    newton, retrained = dif.NewtonInfluence(solution), dif.Retraining(solution)
    deactivated = activated = 0
    for removal in train.remove_each():
        predicted, actual = newton.change(removal), retrained.change(removal)
        after = solution.lam + actual.multipliers.flat
        deactivated += float(after[0]) <= 1e-12
        activated += float(after[1:].max()) > 1e-12
        assert float((predicted.flat - actual.flat).norm()) <= 1e-7 * float(actual.flat.norm())
        assert float((predicted.multipliers.flat - actual.multipliers.flat).norm()) <= 1e-7
    assert deactivated > 0
    assert activated > 0


def bounded_many_times(m):
    """A regression of 20 parameters under m random half-spaces, of which some bind and most do not."""
    rng, d, n = np.random.default_rng(0), 20, 100
    X, A = rng.normal(size=(n, d)), rng.normal(size=(m, d))
    y = X @ rng.normal(size=d) + 0.3 * rng.normal(size=n)
    A /= np.linalg.norm(A, axis=1)[:, None]
    w, v = np.linalg.solve(X.T @ X / n + 0.01 * np.eye(d), X.T @ y / n), rng.normal(size=d)
    b = np.maximum(A @ w - 0.1, A @ (w + 0.6 * v / np.linalg.norm(v))) + 0.2 * rng.exponential(size=m)
    train = dif.Samples(squared, (torch.tensor(X), torch.tensor(y)), name="train")
    rows = dif.linear(torch.tensor(A), of="theta") <= torch.tensor(b)
    return train, fit_problem(dif.Problem(train.mean() + dif.ridge(0.01), [rows]), d=d)


@pytest.mark.parametrize("few", [0, 64])
def test_of_many_rows_only_those_that_switch_are_solved_for(few, monkeypatch):
    """The rows that are solved for, and the arrays that the assessment needs, do not grow with the number of rows."""
    from dif.derivatives.weight_change import Direction
    from dif.linalg.solvers import DenseCholesky
    from dif.optimality import kkt_system

    solved, systems, weights = [], [], []
    solve, qp, stack = DenseCholesky.solve, kkt_system.solve_reduced_qp, Direction.stack_programs

    def stacked(self):
        programs = stack(self)
        weights.extend(table.A.shape[1] * table.U.shape[1] for table in programs.tables)
        return programs

    monkeypatch.setattr("dif.estimators.directional._PARAMETERS", few)
    monkeypatch.setattr(DenseCholesky, "solve", lambda self, B: (solved.append(B.shape[1]), solve(self, B))[1])
    monkeypatch.setattr(kkt_system, "solve_reduced_qp", lambda S, *given: (systems.append(len(S)), qp(S, *given))[1])
    monkeypatch.setattr(Direction, "stack_programs", stacked)
    train, solution = bounded_many_times(600)
    assert 5 < len(solution.active.binding) <= 20
    every = dif.DirectionalInfluence(solution, switching=True).scores(train.mean(), train.remove_each(), assess=0)
    solved.clear(), systems.clear()
    scores = dif.DirectionalInfluence(solution).scores(train.mean(), train.remove_each(), show_progress=False)
    assert scores.diagnostics["switched"] > 10
    assert max(systems) <= 60
    assert max(solved) <= 60  # nor is H⁻¹Gᵀ of the rows that stay inactive
    assert weights == [len(train)] * len(weights)  # one row has samples
    np.testing.assert_allclose(scores.values, every.values, rtol=1e-9, atol=1e-12)
