"""Identities that hold exactly, whatever the problem."""

import numpy as np
import pytest
import torch
from problems import (
    bound_regression,
    fair_logistic,
    fit_problem,
    free_regression,
    regression_data,
    squared,
    weak_regression,
    zeros,
)

import dif


def close(a, b, tolerance):
    scale = max(float(b.abs().max()), 1e-12)
    assert float((a - b).abs().max()) <= tolerance * scale, (a, b)


def test_problems_are_what_they_say():
    for seed in range(3):
        assert fit_problem(free_regression(seed)[1]).active.active == ()
        active = fit_problem(bound_regression(seed)[1]).active
        assert (active.binding, active.weak, active.inactive) == ((0, 1), (), (2,))
        active = fit_problem(weak_regression(seed)[1]).active
        assert (active.binding, active.weak) == ((0,), (1,))
    active = fit_problem(fair_logistic()[1]).active
    assert (active.binding, active.weak, active.inactive) == ((0,), (), (1,))


@pytest.mark.parametrize("renormalise", [True, False])
def test_without_active_constraints_it_is_classical(renormalise):
    train, problem = free_regression()
    solution = fit_problem(problem)
    removals = train.remove_each(renormalise=renormalise)
    directional = dif.DirectionalInfluence(solution, switching=False).scores(train, removals).values
    classical = dif.ClassicalInfluence(solution).scores(train, removals).values
    close(directional, classical, 1e-10)
    switching = dif.DirectionalInfluence(solution, switching=True).scores(train, removals).values
    close(switching, classical, 1e-10)


@pytest.mark.parametrize("make", [bound_regression, weak_regression, fair_logistic])
def test_positively_homogeneous(make):
    train, problem, *_ = make()
    influence = dif.DirectionalInfluence(fit_problem(problem), switching=False)
    for i in range(5):
        one, three = influence.change(train.remove([i])), influence.change(3.0 * train.remove([i]))
        close(three.flat, 3 * one.flat, 1e-12)
        close(three.multipliers.flat, 3 * one.multipliers.flat, 1e-12)


@pytest.mark.parametrize("make", [bound_regression, weak_regression, fair_logistic])
def test_independent_of_rho(make):
    train, problem, *_ = make()
    solution = fit_problem(problem)
    chosen = dif.DirectionalInfluence(solution, switching=False).scores(train, train.remove_each())
    for rho in (0.01, 1.0, 100.0):
        close(
            dif.DirectionalInfluence(solution, switching=False, rho=rho).scores(train, train.remove_each()).values,
            chosen.values,
            1e-9,
        )


@pytest.mark.parametrize("make", [bound_regression, fair_logistic])
def test_linear_without_weak_constraints(make):
    train, problem, *_ = make()
    influence = dif.DirectionalInfluence(fit_problem(problem), switching=False)
    first, second = train.remove([0]), train.reweight(torch.linspace(-0.01, 0.02, len(train)))
    together = influence.change(first + 2.0 * second)
    close(together.flat, influence.change(first).flat + 2.0 * influence.change(second).flat, 1e-11)
    close(influence.change(-first).flat, -influence.change(first).flat, 1e-11)


def test_not_linear_with_a_weak_constraint():
    train, problem = weak_regression()
    influence = dif.DirectionalInfluence(fit_problem(problem), switching=False)
    gaps = []
    for i in range(10):
        there, back = influence.change(train.remove([i])), influence.change(-train.remove([i]))
        gaps.append(float((there.flat + back.flat).norm() / there.flat.norm()))
        on = float(there.multipliers["weak"]) > 0
        assert on != (float(back.multipliers["weak"]) > 0)  # exactly one of the branches holds the constraint
    assert min(gaps) > 1e-3


def test_renormalised_and_paper_removal():
    """The identities of the two conventions, for an objective that is a mean and a removal from it alone."""
    train, problem = bound_regression()
    solution, n = fit_problem(problem), len(train)
    ratio = n / (n - 1)
    for i in range(5):
        renormalised = train.remove([i], terms=[problem.objective])
        paper = train.remove([i], terms=[problem.objective], renormalise=False)
        influence = dif.DirectionalInfluence(solution, switching=False)
        a, b = influence.change(renormalised), influence.change(paper)
        close(a.flat, ratio * b.flat, 1e-10)
        close(a.multipliers.flat, ratio * b.multipliers.flat + solution.lam / (n - 1), 1e-10)
        retrained = dif.Retraining(solution)
        close(retrained.change(renormalised).flat, retrained.change(paper).flat, 1e-9)
        newton = dif.NewtonInfluence(solution)
        close(newton.change(renormalised).flat, newton.change(paper).flat, 1e-9)


def test_with_a_ridge_the_conventions_are_not_parallel():
    train = dif.Samples(squared, regression_data(), name="train")
    problem = dif.Problem(train.mean() + dif.ridge(0.5), [dif.linear([1.0, 0.0, 0.0, 0.0]) <= -1.0])
    influence = dif.DirectionalInfluence(fit_problem(problem), switching=False)
    a = influence.change(train.remove([0])).flat
    b = influence.change(train.remove([0], renormalise=False)).flat
    assert abs(float(a @ b / (a.norm() * b.norm()))) < 1 - 1e-6


@pytest.mark.parametrize("make", [bound_regression, weak_regression, fair_logistic])
@pytest.mark.parametrize("renormalise", [True, False])
def test_solves_the_auxiliary_variational_inequality(make, renormalise):
    """Theorem 8: μΔε + AΔη + N_K(Δη) ∋ 0, with μ and A from per-sample derivatives taken one by one."""
    train, problem, *_ = make()
    solution = fit_problem(problem)
    influence = dif.DirectionalInfluence(solution, switching=False)
    theta, lam, active, n = solution.theta, solution.lam, solution.active, len(train)
    X, y = train.storage.data
    loss = train.loss
    losses = torch.func.jacrev(lambda t, X, y: loss({"theta": t}, (X, y)))
    L, DL = loss({"theta": theta}, (X, y)), losses(theta, X, y)  # (n,), (n, d)

    def weights(term):  # of every sample in a term, and after the removal of sample i
        w = sum((c * s.weights for c, s in term.sums), torch.zeros(n, dtype=theta.dtype))
        return w

    def moved(term, i):
        total = torch.zeros(n, dtype=theta.dtype)
        for c, s in term.sums:
            members = s.weights != 0
            left = members.clone()
            left[i] = False
            new = left / (left.sum() if renormalise else members.sum()).double()
            total += c * (new - s.weights)
        return total

    terms = [problem.objective, *(c.term for c in problem.constraints)]
    for i in range(6):
        change = influence.change(train.remove([i], renormalise=renormalise))
        omega, dlam = change.flat, change.multipliers.flat
        dw = [moved(t, i) for t in terms]
        b = dw[0] @ DL + sum(
            (float(weight) * (d @ DL) for weight, d in zip(lam, dw[1:], strict=True)), torch.zeros(len(theta))
        )
        r = torch.stack([d @ L for d in dw[1:]])
        assert float((b + solution.hessian @ omega + solution.G.T @ dlam).abs().max()) <= 1e-10
        rows = solution.G @ omega + r
        for j in active.binding:
            assert abs(float(rows[j])) <= 1e-10
        for j in active.weak:
            assert float(rows[j]) <= 1e-10
            assert float(dlam[j]) >= 0
            assert abs(float(rows[j] * dlam[j])) <= 1e-10
        for j in active.inactive:
            assert float(dlam[j]) == 0


@pytest.mark.parametrize("convention", [True, False])
def test_second_order_remainder(convention):
    """‖θ(ε) − θ̄ − ε·DIF‖ falls as ε² while the active set holds, and so does the multipliers' remainder."""
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    removal = train.remove([4, 7, 9, 10, 22], renormalise=convention)
    predicted = dif.DirectionalInfluence(solution, switching=False).change(removal)
    retrained = dif.Retraining(solution, tol=1e-13)
    gaps = []
    for epsilon in (0.2, 0.1, 0.05, 0.025):
        actual = retrained.change(epsilon * removal)
        gaps.append(
            [
                float((actual.flat - epsilon * predicted.flat).norm()),
                float((actual.multipliers.flat - epsilon * predicted.multipliers.flat).norm()),
            ]
        )
    orders = np.log2(np.array(gaps[:-1]) / np.array(gaps[1:]))
    assert orders.min() >= 1.9, orders


@pytest.mark.parametrize("make", [bound_regression, weak_regression, fair_logistic])
def test_one_percent_of_a_removal(make):
    """`0.01 * removal` retrained, divided by 0.01, is DIF to 1 %; multipliers too."""
    train, problem, *_ = make()
    solution = fit_problem(problem)
    for i in range(5):
        removal = train.remove([i])
        predicted = dif.DirectionalInfluence(solution, switching=False).change(removal)
        actual = dif.Retraining(solution).change(0.01 * removal)
        close(actual.flat / 0.01, predicted.flat, 0.01)
        close(actual.multipliers.flat / 0.01, predicted.multipliers.flat, 0.01)


def test_classical_is_the_one_step_estimate_of_statsmodels():
    import statsmodels.api as sm
    from statsmodels.stats.outliers_influence import MLEInfluence

    X, y = regression_data()
    train = dif.Samples(squared, (X, y), name="train")
    solution = fit_problem(dif.Problem(train.mean()))
    results = sm.GLM(y.numpy(), X.numpy(), family=sm.families.Gaussian()).fit()
    influence = MLEInfluence(results)
    leverage = influence.hat_matrix_diag[:, None]  # statsmodels divides its one step by 1 − leverage
    one_step = -influence.d_params * (1 - leverage)
    classical = dif.ClassicalInfluence(solution)
    coordinates = dif.linear(torch.eye(4))
    ours = classical.scores(coordinates, train.remove_each(renormalise=False)).values
    exact = -sm.OLS(y.numpy(), X.numpy()).fit().get_influence().dfbeta  # θ̂₍ᵢ₎ − θ̂
    np.testing.assert_allclose(ours.numpy(), one_step, rtol=1e-9, atol=1e-13)
    newton = dif.NewtonInfluence(solution).scores(coordinates, train.remove_each()).values
    np.testing.assert_allclose(newton.numpy(), exact, rtol=1e-9, atol=1e-13)
    retrained = dif.Retraining(solution).scores(coordinates, train.remove_each()).values
    np.testing.assert_allclose(retrained.numpy(), exact, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("make", [bound_regression, fair_logistic])
def test_batch_size_changes_nothing(make):
    results = []
    for batch_size in (None, 1, 7):
        train, problem, *_ = make(batch_size=batch_size)
        solution = fit_problem(problem)
        influence = dif.DirectionalInfluence(solution, switching=False)
        removals = train.remove_each()
        results.append(
            [
                influence.scores(dif.linear([1.0, 2.0, -1.0, 3.0]), removals).values,
                influence.scores(train, removals).values,
                influence.change(removals[3]).flat,
                dif.ClassicalInfluence(solution)
                .scores(train.mean(where=torch.arange(len(train)) < 9), removals)
                .values,
                dif.NewtonInfluence(solution).change(removals[3]).flat,
            ]
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            close(a, b, 1e-12)


def test_change_and_scores_agree():
    for make in (bound_regression, weak_regression, fair_logistic):
        train, problem, *_ = make()
        for estimator in (
            dif.DirectionalInfluence(fit_problem(problem), switching=False),
            dif.DirectionalInfluence(fit_problem(problem), switching=True),
            dif.ClassicalInfluence(fit_problem(problem)),
            dif.PenaltyInfluence(fit_problem(problem), at_minimiser=True),
            dif.NewtonInfluence(fit_problem(problem)),
        ):
            removals = train.remove_groups([[0], [1, 5], [2, 3, 4]])
            scores = estimator.scores(dif.linear(torch.eye(4)), removals).values
            rows = torch.stack([estimator.change(one).flat for one in removals])
            close(scores, rows, 1e-10)


def test_zero_start_is_untouched():
    start = zeros()
    fit_problem(bound_regression()[1])
    assert torch.equal(start["theta"], torch.zeros(4, dtype=torch.float64))
