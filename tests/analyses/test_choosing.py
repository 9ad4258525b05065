"""Sets to remove, compared with retraining; self-influence, compared with removing each sample."""

import itertools

import numpy as np
import pytest
import torch
from problems import bound_regression, fair_logistic, fit_problem, regression_data, squared, zeros

import dif
from dif.analyses import removal_sets


def test_problem_without_samples():
    train, problem, group = fair_logistic()
    gone = [0, 7, 31]
    stays = torch.ones(60, dtype=torch.bool)
    stays[gone] = False
    risk = train.mean(where=stays)
    rows = [train.mean(where=stays & (group == g)) <= risk + tau for g, tau in ((1, -0.02), (2, 0.3))]
    rewritten = fit_problem(dif.Problem(risk + dif.ridge(0.05), rows))
    left = fit_problem(problem.after(train.remove(gone)))
    np.testing.assert_allclose(left.theta, rewritten.theta, atol=1e-9)
    np.testing.assert_allclose(left.lam, rewritten.lam, atol=1e-8)
    change = dif.Retraining(fit_problem(problem)).change(train.remove(gone))
    np.testing.assert_allclose(left.theta - fit_problem(problem).theta, change.flat, atol=1e-8)
    further = dif.Retraining(left).change(train.remove([12]))
    both = dif.Retraining(fit_problem(problem)).change(train.remove([*gone, 12]))
    np.testing.assert_allclose(left.theta + further.flat, fit_problem(problem).theta + both.flat, atol=1e-8)
    with pytest.raises(dif.InvalidInputError, match="a term must keep at least one"):
        problem.after(train.remove(torch.nonzero(group == 1).reshape(-1).tolist()))


def test_sums_are_not_renormalised():
    train, _ = bound_regression()
    problem = dif.Problem(train.sum() + dif.ridge(1.0)).after(train.remove([3]))
    X, y = regression_data()
    keep = torch.arange(40) != 3
    exact = torch.linalg.solve(X[keep].T @ X[keep] + torch.eye(4), X[keep].T @ y[keep])
    np.testing.assert_allclose(fit_problem(problem).theta, exact, atol=1e-9)


def test_greedy_is_verified_and_beats_the_ranking():
    train, problem, group = fair_logistic()
    solution = fit_problem(problem)
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
    solution = fit_problem(problem)
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


def test_choosing_ends_where_no_removal_helps():
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


@pytest.mark.parametrize("find", ["choose", "smallest_set"])
def test_verification_starts_where_the_choice_arrived(find, monkeypatch):
    """From the old parameters another solution may be found, or none; the choice arrived at a certified point."""
    train, problem, group = fair_logistic()
    solution, target, fits = fit_problem(problem), train.mean(where=group == 0), []

    def record(problem, params, **options):
        fits.append(dif.Solution(problem, params, options.get("multipliers")).kkt.residual)
        return dif.fit(problem, params, **options)

    monkeypatch.setattr(removal_sets, "fit", record)
    if find == "choose":
        dif.choose(solution, target, train, 3, show_progress=False)
    else:
        goal = float(solution.value(target)) - 0.004
        assert dif.smallest_set(solution, target, train, goal, show_progress=False).reached
    assert fits[-1] < 1e-8


def test_smallest_set_flips_a_prediction():
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    X = torch.tensor([[0.3, -0.2, 0.1, 0.4]], dtype=torch.float64)
    score = dif.Function(lambda p: (X @ p["theta"])[0], name="score")
    before = float((X @ solution.theta)[0])
    choice = dif.smallest_set(solution, score, train, 0.0, show_progress=False)
    assert choice.reached
    assert before * choice.verified <= 0
    left = dif.fit(problem.after(train.remove(choice.indices)), zeros(), show_progress=False)
    assert float((X @ left.theta)[0]) == pytest.approx(choice.verified, abs=1e-8)
    for i in choice.indices:  # each of them is needed
        fewer = [j for j in choice.indices if j != i]
        if fewer:
            refitted = dif.fit(problem.after(train.remove(fewer)), zeros(), show_progress=False)
            assert before * float((X @ refitted.theta)[0]) > 0


def test_the_only_sample_of_a_constraint_is_not_chosen():
    """The constraint would not be defined without it."""
    X, y = regression_data()
    train = dif.Samples(squared, (X, y), name="train")
    only = torch.arange(40) == 5
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [train.mean(where=only) <= 0.01])
    solution = fit_problem(problem)
    choice = dif.choose(solution, train.mean(), train, 3, show_progress=False)
    assert 5 not in choice.indices


def test_errors():
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    risk = train.mean()
    for words, action in (
        ("`count` must be an integer ≥ 1, not 0", lambda: dif.choose(solution, risk, train, 0)),
        ("`limit` must be an integer ≥ 1, not 2.5", lambda: dif.smallest_set(solution, risk, train, 0.1, limit=2.5)),
        (
            "`per_round` must be an integer ≥ 1, not 0",
            lambda: dif.smallest_set(solution, risk, train, 0.1, per_round=0),
        ),
        ("`target` must be one number, not 60", lambda: dif.choose(solution, train, train, 2)),
        ("must be integers from 0", lambda: dif.choose(solution, risk, train, 2, among=[99])),
        ("`estimator` must be an estimator of a dif.Solution, not int", lambda: dif.self_influence(3, train)),
    ):
        with pytest.raises(dif.InvalidInputError, match=words):
            action()
    for goal in ("low", "0.1", None, [0.1, 0.2], float("nan"), float("inf")):
        with pytest.raises(
            dif.InvalidInputError,
            match=r"`goal`.* finite number",
        ):
            dif.smallest_set(solution, risk, train, goal)


def test_self_influence_is_the_effect_of_removal_on_the_own_loss():
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    own = dif.self_influence(dif.DirectionalInfluence(solution), train, show_progress=False)
    assert own.values.shape == (60, 1)
    assert "assessment" not in own.diagnostics
    each = dif.DirectionalInfluence(solution).scores(train, train.remove_each())
    np.testing.assert_allclose(own.values[:, 0], each.values.diagonal(), atol=1e-12)
    exact = dif.self_influence(dif.Retraining(solution), train, [3, 11], show_progress=False)
    for k, i in enumerate((3, 11)):
        actual = dif.Retraining(solution).scores(train.take(torch.tensor([i])), train.remove([i])).values
        assert float(exact.values[k, 0]) == pytest.approx(float(actual), abs=1e-9)
        assert float(own.values[i, 0]) == pytest.approx(float(actual), rel=0.3)


def build_contradiction():
    """½‖t − (1, 1)‖² with t₁ ≥ −0.3 and mean(t₁ − z) ≤ 0.1, z = 1, 0.5, −2: without the first two there is none."""
    point = dif.Samples(lambda p, z: 0.5 * ((p["t"] - z) ** 2).sum(-1), torch.tensor([[1.0, 1.0]]).double(), name="s")
    limit = dif.Samples(lambda p, z: p["t"][0] - z, torch.tensor([1.0, 0.5, -2.0]).double(), name="z")
    problem = dif.Problem(point.mean(), [dif.linear([1.0, 0.0]) >= -0.3, limit.mean() <= 0.1])
    start = {"t": torch.zeros(2, dtype=torch.float64)}
    return limit, problem, start, dif.fit(problem, start, show_progress=False)


def test_sets_without_which_there_is_no_solution():
    limit, problem, _, solution = build_contradiction()
    first = dif.linear([1.0, 0.0])
    greedy = dif.choose(solution, first, limit, 2, show_progress=False)
    left = [i for i in range(3) if i not in greedy.indices]
    assert float(greedy.solution.theta[0]) == pytest.approx(
        min(1.0, float(np.mean([[1, 0.5, -2][i] for i in left])) + 0.1)
    )
    assert greedy.solution.theta[0] >= -0.3 - 1e-9
    ranked = dif.choose(solution, first, limit, 2, greedy=False, show_progress=False)
    assert not {0, 1} & set(ranked.indices)  # without either of them no point is feasible
    with pytest.raises(dif.InfeasibleError) as caught:
        dif.fit(problem.after(limit.remove([0, 1])), solution.params, show_progress=False)
    assert "contradict each other" in str(caught.value)


def test_unbounded_multipliers_do_not_hide_a_violation():
    """Two rows clash, one made of samples: multipliers without bound must not make the violation look small."""
    _, problem, start, _ = build_contradiction()
    limit = dif.Samples(lambda p, z: p["t"][0] - z, torch.tensor([-2.0]).double(), name="z")
    rows = [problem.constraints[0], limit.mean() <= 0.1]
    with pytest.raises(dif.InfeasibleError):
        dif.fit(dif.Problem(problem.objective, rows), start, show_progress=False)
    forced = dif.Solution(
        dif.Problem(problem.objective, rows), {"t": torch.tensor([-1.1, 1.0]).double()}, [8.9e9, 8.9e9 + 2.1]
    )
    with pytest.raises(dif.DifError) as caught:
        forced.check()
    if isinstance(caught.value, dif.InfeasibleError):
        assert caught.value.meaning == (
            "The constraints contradict each other: their forces cancel and grow without bound."
        )


def test_constants_of_a_target_count():
    train, solution, mean = numbers([1.0, 0.5, 0.0, 1.5, 5.0, 7.0])
    plain = dif.smallest_set(solution, mean, train, 1.0, show_progress=False)
    shifted = dif.smallest_set(solution, mean - 1.0, train, 0.0, show_progress=False)
    assert set(shifted.indices) == set(plain.indices) == {4, 5}
    assert shifted.before == pytest.approx(plain.before - 1.0)
    assert shifted.verified == pytest.approx(plain.verified - 1.0)
    assert shifted.target != plain.target
    both = dif.DirectionalInfluence(solution).scores([mean, mean - 1.0], train.remove_each())
    np.testing.assert_allclose(both.values[:, 0], both.values[:, 1])


def test_unknown_samples_are_refused():
    train, problem, _ = fair_logistic()
    for indices in ([-1], [1.5], [500]):
        with pytest.raises(dif.InvalidInputError, match=r"Indices of Samples .* must be integers from 0"):
            problem.after(train.remove(indices))
    with pytest.raises(dif.InvalidInputError, match=r"no term of the problem uses these samples"):
        problem.after(dif.Samples(squared, regression_data(), name="other").remove([0]))


def test_a_set_of_only_indispensable_samples_is_refused():
    X, y = regression_data()
    train = dif.Samples(squared, (X, y), name="train")
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [train.mean(where=torch.arange(40) == 5) <= 0.01])
    solution = fit_problem(problem)
    with pytest.raises(
        dif.InvalidInputError, match="None of the 1 candidates can be removed: each is the only sample in"
    ):
        dif.choose(solution, train.mean(), train, 1, among=[5])
    own = dif.self_influence(dif.DirectionalInfluence(solution), train, show_progress=False)
    assert torch.isnan(own.values[:, 0]).nonzero().reshape(-1).tolist() == [5]
