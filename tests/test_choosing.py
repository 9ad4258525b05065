"""Sets to remove, against trying them; samples that look wrong, against removing each."""

import itertools

import numpy as np
import pytest
import torch
from problems import bound_regression, fair_logistic, regression_data, solved, squared, zeros

import dif


def test_problem_without_samples():
    train, problem, group = fair_logistic()
    gone = [0, 7, 31]
    stays = torch.ones(60, dtype=torch.bool)
    stays[gone] = False
    risk = train.mean(where=stays)
    rows = [train.mean(where=stays & (group == g)) <= risk + tau for g, tau in ((1, -0.02), (2, 0.3))]  # written anew
    anew = solved(dif.Problem(risk + dif.ridge(0.05), rows))
    left = solved(problem.without(train, gone))
    np.testing.assert_allclose(left.theta, anew.theta, atol=1e-9)
    np.testing.assert_allclose(left.lam, anew.lam, atol=1e-8)
    change = dif.Retraining(solved(problem)).change(train.remove(gone))
    np.testing.assert_allclose(left.theta - solved(problem).theta, change.flat, atol=1e-8)
    further = dif.Retraining(left).change(train.remove([12]))
    both = dif.Retraining(solved(problem)).change(train.remove([*gone, 12]))
    np.testing.assert_allclose(left.theta + further.flat, solved(problem).theta + both.flat, atol=1e-8)
    with pytest.raises(dif.InvalidInputError, match="A term without samples is not defined"):
        problem.without(train, torch.nonzero(group == 1).reshape(-1).tolist())


def test_sums_are_not_renormalised():
    train, _ = bound_regression()
    problem = dif.Problem(train.sum() + dif.ridge(1.0)).without(train, [3])
    X, y = regression_data()
    keep = torch.arange(40) != 3
    exact = torch.linalg.solve(X[keep].T @ X[keep] + torch.eye(4), X[keep].T @ y[keep])
    np.testing.assert_allclose(solved(problem).theta, exact, atol=1e-9)


def test_greedy_is_verified_and_beats_the_ranking():
    train, problem, group = fair_logistic()
    solution = solved(problem)
    target = train.mean(where=group == 0)
    greedy = dif.choose(solution, target, train, 6, show_progress=False)
    ranked = dif.choose(solution, target, train, 6, greedy=False, show_progress=False)
    assert len(greedy.indices) == len(set(greedy.indices)) == len(greedy.followed) == 6
    for choice in (greedy, ranked):
        actual = dif.Retraining(solution).scores(target, train.remove(list(choice.indices))).values[0, 0]
        assert choice.verified - choice.before == pytest.approx(float(actual), abs=1e-8)
        assert choice.solution.kkt.residual < 1e-9
        assert choice.reached is None
    assert greedy.followed[-1] == pytest.approx(greedy.verified, abs=1e-8)
    assert greedy.verified < ranked.verified
    first = dif.DirectionalInfluence(solution).scores(target, train.remove_each())
    lowest = torch.argsort(first.values[:, 0])[:6].tolist()
    assert list(ranked.indices) == lowest
    assert ranked.predicted == pytest.approx(ranked.before + float(first.values[lowest, 0].sum()))
    assert "6 samples" in str(greedy)
    assert "retrained" in str(greedy)


def test_the_first_choice_of_few_is_the_best_one():
    """Least squares: with four candidates all pairs can be tried."""
    train, problem = bound_regression()
    solution = solved(problem)
    target, among = dif.linear([0.0, 0.0, 1.0, 0.0]), [1, 5, 9, 20]
    choice = dif.choose(solution, target, train, 2, among=among, lower=False, show_progress=False)
    tried = {
        pair: float(dif.Retraining(solution).scores(target, train.remove(list(pair))).values)
        for pair in itertools.combinations(among, 2)
    }
    assert set(choice.indices) <= set(among)
    best = max(tried.values())
    if len(choice.indices) == 2:
        assert tried[tuple(sorted(choice.indices))] >= 0.8 * best
    assert choice.verified > choice.before


def numbers(values):
    train = dif.Samples(lambda p, z: 0.5 * (p["m"] - z) ** 2, torch.tensor(values, dtype=torch.float64), name="train")
    start = {"m": torch.tensor(0.0, dtype=torch.float64)}
    solution = dif.fit(dif.Problem(train.mean()), start, show_progress=False)
    return train, solution, dif.Function(lambda p: p["m"], name="mean")


def test_it_ends_where_nothing_helps():
    """The mean of five numbers: the largest go first; among the small ones none helps to raise it."""
    train, solution, mean = numbers([0.5, 1.0, 1.5, 4.0, 8.0])
    choice = dif.choose(solution, mean, train, 10, show_progress=False)
    assert choice.indices == (4, 3, 2, 1)  # the last one must stay
    assert choice.verified == pytest.approx(0.5)
    np.testing.assert_allclose(choice.followed, [1.75, 1.0, 0.75, 0.5], atol=1e-9)
    ended = dif.choose(solution, mean, train, 10, lower=False, among=[3, 4], show_progress=False)
    assert ended.indices == ()
    assert ended.verified == ended.before == pytest.approx(3.0)
    together = dif.choose(solution, mean, train, 2, per_round=2, show_progress=False)
    assert set(together.indices) == {3, 4}
    assert len(together.followed) == 1


def test_smallest_set_brings_a_mean_to_zero():
    """Six numbers: the fewest whose removal brings the mean to 1 or less are the two largest."""
    train, solution, mean = numbers([1.0, 0.5, 0.0, 1.5, 5.0, 7.0])
    choice = dif.smallest_set(solution, mean, train, 1.0, show_progress=False)
    assert set(choice.indices) == {4, 5}
    assert choice.reached
    assert choice.verified == pytest.approx(0.75)
    hopeless = dif.smallest_set(solution, mean, train, -1.0, show_progress=False)
    assert hopeless.reached is False
    already = dif.smallest_set(solution, mean, train, 2.5, show_progress=False)
    assert already.indices == ()
    assert already.reached


def test_smallest_set_flips_a_prediction():
    train, problem, _ = fair_logistic()
    solution = solved(problem)
    X = torch.tensor([[0.3, -0.2, 0.1, 0.4]], dtype=torch.float64)
    score = dif.Function(lambda p: (X @ p["theta"])[0], name="score")
    before = float((X @ solution.theta)[0])
    choice = dif.smallest_set(solution, score, train, 0.0, show_progress=False)
    assert choice.reached
    assert before * choice.verified <= 0
    left = dif.fit(problem.without(train, choice.indices), zeros(), show_progress=False)
    assert float((X @ left.theta)[0]) == pytest.approx(choice.verified, abs=1e-8)
    for i in choice.indices:  # none of them can be spared
        fewer = [j for j in choice.indices if j != i]
        if fewer:
            spared = dif.fit(problem.without(train, fewer), zeros(), show_progress=False)
            assert before * float((X @ spared.theta)[0]) > 0


def test_nothing_impossible_is_removed():
    """The one sample of a constraint must stay."""
    X, y = regression_data()
    train = dif.Samples(squared, (X, y), name="train")
    only = torch.arange(40) == 5
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [train.mean(where=only) <= 0.01])
    solution = solved(problem)
    choice = dif.choose(solution, train.mean(), train, 3, show_progress=False)
    assert 5 not in choice.indices


def test_errors():
    train, problem, _ = fair_logistic()
    solution = solved(problem)
    with pytest.raises(dif.InvalidInputError, match=r"So many samples are chosen at most, so many at a time."):
        dif.choose(solution, train.mean(), train, 0)
    with pytest.raises(dif.InvalidInputError, match=r"So many samples are chosen at most, so many at a time."):
        dif.smallest_set(solution, train.mean(), train, 0.1, per_round=0)
    with pytest.raises(dif.InvalidInputError, match=r"A set is chosen for one number."):
        dif.choose(solution, train, train, 2)
    with pytest.raises(dif.InvalidInputError, match="No such sample"):
        dif.choose(solution, train.mean(), train, 2, among=[99])
    with pytest.raises(dif.InvalidInputError, match="goal"):
        dif.smallest_set(solution, train.mean(), train, "low")


def test_self_influence_is_what_removal_does_to_the_own_loss():
    train, problem, _ = fair_logistic()
    solution = solved(problem)
    own = dif.self_influence(dif.DirectionalInfluence(solution), train, show_progress=False)
    assert own.values.shape == (60, 1)
    each = dif.DirectionalInfluence(solution).scores(train, train.remove_each())
    np.testing.assert_allclose(own.values[:, 0], each.values.diagonal(), atol=1e-12)
    some = dif.self_influence(dif.Retraining(solution, show_progress=False), train, [3, 11], show_progress=False)
    for k, i in enumerate((3, 11)):
        actual = dif.Retraining(solution).scores(train.take(torch.tensor([i])), train.remove([i])).values
        assert float(some.values[k, 0]) == pytest.approx(float(actual), abs=1e-9)
        assert float(own.values[i, 0]) == pytest.approx(float(actual), rel=0.3)
