"""TracIn against gradients written out by hand, and as an estimator like any other."""

import numpy as np
import pytest
import torch

import dif
from studies.tracin import TracIn

F64 = torch.float64
N, D = 30, 3


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X, Y = draw(N, D, seed=0), draw(N, seed=1)
POINTS = [draw(D, seed=10 + k) for k in range(4)]
RATES = [0.5, 0.25, 0.125, 0.1]


def loss(params, z):
    return 0.5 * (z[0] @ params["w"] - z[1]) ** 2


def gradients(w):
    return (X @ w - Y)[:, None] * X


@pytest.fixture(scope="module")
def fitted():
    train = dif.Samples(loss, (X, Y), name="train")
    bound = train.mean(where=torch.arange(N) < 15) <= train.mean() - 0.01
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [bound])
    return train, dif.fit(problem, {"w": torch.zeros(D, dtype=F64)}, show_progress=False)


def test_scores_are_dot_products_of_gradients(fitted):
    train, solution = fitted
    traced = TracIn(solution, [{"w": w} for w in POINTS], RATES)
    assert isinstance(traced, dif.Estimator)
    target = train.mean()
    expected = sum(rate * gradients(w) @ gradients(w).mean(0) for rate, w in zip(RATES, POINTS, strict=True))
    scores = traced.scores(target, train.remove_each(), show_progress=False)
    np.testing.assert_allclose(scores.values[:, 0], expected, rtol=1e-10)
    groups = traced.scores(target, train.remove_groups([[3, 1, 8], [1]]), show_progress=False)
    np.testing.assert_allclose(groups.values[:, 0], [expected[[3, 1, 8]].sum(), expected[1]], rtol=1e-10)
    change = traced.change(train.remove([3, 1]))
    moved = sum(rate * gradients(w)[[3, 1]].sum(0) for rate, w in zip(RATES, POINTS, strict=True))
    np.testing.assert_allclose(change.flat, moved, rtol=1e-10)
    own = dif.self_influence(traced, train, show_progress=False).values[:, 0]
    squares = sum(rate * (gradients(w) ** 2).sum(1) for rate, w in zip(RATES, POINTS, strict=True))
    np.testing.assert_allclose(own, squares, rtol=1e-10)


def test_one_step_of_gradient_descent_is_predicted(fitted):
    """With the rate times the weight of a sample as η, the score is the effect of leaving out one small step."""
    train, solution = fitted
    start, rate = POINTS[0], 1e-4
    traced = TracIn(solution, [{"w": start}], rate / N)
    scores = traced.scores(train.mean(), train.remove_each(), show_progress=False).values[:, 0]
    held_out = lambda w: float((0.5 * (X @ w - Y) ** 2).mean())  # noqa: E731
    steps = gradients(start)
    full = held_out(start - rate * steps.mean(0))
    actual = [held_out(start - rate * (steps.sum(0) - steps[i]) / N) - full for i in range(N)]
    np.testing.assert_allclose(scores, actual, rtol=1e-2, atol=1e-9)


def test_epochs_of_a_run_are_checkpoints(fitted):
    train, solution = fitted
    training = dif.Training(solution.problem, {"w": torch.zeros(D, dtype=F64)}, dif.SGD(0.1), dif.Ascent(0.5), 10, 4)
    run = training.run(show_progress=False)
    traced = TracIn.of_run(run)
    assert len(traced.thetas) == 4
    assert torch.equal(traced.thetas[-1], run.theta)
    target, retraining = train.take(torch.arange(3)), dif.Retraining(run)
    result = dif.evaluation.linear_datamodelling_score(
        [dif.UnrolledInfluence(run), traced], retraining, target, train, share=0.1, subsets=20, show_progress=False
    )
    assert set(result.scores) == {"unrolled", "TracIn"}
    assert 0.9 < result.scores["unrolled"]
    assert result.scores["TracIn"] < result.scores["unrolled"]


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda train, at: TracIn(at, [at.params]).scores(train.mean(), 0.5 * train.remove([1])), "complete removals"),
        (lambda train, at: TracIn(at, [at.params]).scores(train.mean(), train.reweight(torch.ones(N))), "complete"),
        (lambda train, at: TracIn(at, []), "`checkpoints` must be a list"),
        (lambda train, at: TracIn(at, [{"v": torch.ones(2)}]), "must have the tensors of the solution"),
        (lambda train, at: TracIn(at, [at.params], [1.0, -2.0]), "`rates` must be a positive number, or 1"),
    ],
)
def test_refused(fitted, action, words):
    with pytest.raises(dif.InvalidInputError, match=words):
        action(*fitted)
