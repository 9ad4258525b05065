"""Every estimator has the same interface: the same methods and keywords, scores into files, several jobs."""

from __future__ import annotations

import inspect
from functools import partial

import numpy as np
import pytest
import torch
from problems import bound_regression, zeros

import dif

ESTIMATORS = {
    "directional": dif.DirectionalInfluence,
    "derivative": partial(dif.DirectionalInfluence, switching=False),
    "classical": dif.ClassicalInfluence,
    "penalty": dif.PenaltyInfluence,
    "newton": dif.NewtonInfluence,
    "path": dif.PathInfluence,
    "adaptive": partial(dif.AdaptiveInfluence, accuracy=1e-3),
    "adaptive, first order": dif.AdaptiveInfluence,
    "retraining": dif.Retraining,
    "unrolled": lambda solution: dif.UnrolledInfluence(train_along(solution)),
    "retraining of a run": lambda solution: dif.Retraining(train_along(solution)),
}
KEYWORDS = ("out", "jobs", "show_progress")
pytestmark = pytest.mark.filterwarnings("ignore::dif.FirstOrderWarning")


def train_along(solution):
    """Train the problem of a solution for a few steps."""
    start, optimizer = {"theta": torch.zeros(4, dtype=torch.float64)}, dif.SGD(0.05, momentum=0.9)
    return dif.Training(solution.problem, start, optimizer, batch_size=7, epochs=3).run(show_progress=False)


@pytest.fixture(scope="module")
def ground():
    train, problem = bound_regression()
    return train, dif.fit(problem, zeros(), show_progress=False)


@pytest.fixture(params=ESTIMATORS)
def estimator(request, ground):
    return ESTIMATORS[request.param](ground[1])


def test_it_is_an_estimator(estimator):
    assert isinstance(estimator, dif.Estimator)
    assert isinstance(estimator.name, str)
    parameters = inspect.signature(estimator.scores).parameters
    assert tuple(parameters)[:5] == ("target", "perturbations", *KEYWORDS)
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in KEYWORDS)


def test_changes_and_scores_belong_together(estimator, ground):
    train, solution = ground
    removals = train.remove_each(range(6))
    coordinates = dif.linear(torch.eye(4))
    scores = estimator.scores(coordinates, removals, show_progress=False)
    assert scores.values.shape == (6, 4)
    assert scores.values.dtype == torch.float64
    for p in range(6):
        change = estimator.change(removals[p])
        assert isinstance(change, dif.Change)
        torch.testing.assert_close(change.flat, scores.values[p], rtol=1e-3, atol=1e-9)
        assert change.theta["theta"].shape == (4,)
        assert len(change.multipliers.flat) == len(solution.lam)
    with pytest.raises(dif.InvalidInputError):
        estimator.change(removals)


def test_files_and_jobs_change_nothing(estimator, ground, tmp_path):
    train, _ = ground
    removals, target = train.remove_each(range(7)), [train.mean(), dif.linear(torch.eye(4))]
    plain = estimator.scores(target, removals, show_progress=False)
    shared = estimator.scores(target, removals, jobs=2, show_progress=False)
    np.testing.assert_allclose(shared.values.numpy(), plain.values.numpy(), rtol=1e-9, atol=1e-14)
    filed = estimator.scores(target, removals, out=tmp_path / "s.npy", show_progress=False)
    np.testing.assert_array_equal(filed.values.numpy(), plain.values.numpy())
    loaded = dif.Influence.load(tmp_path / "s.npy")
    np.testing.assert_array_equal(loaded.values.numpy(), plain.values.numpy())
    assert loaded.estimator == plain.estimator
    assert plain.diagnostics.keys() <= loaded.diagnostics.keys()
    again = estimator.scores(target, removals, out=tmp_path / "s.npy", show_progress=False)
    np.testing.assert_array_equal(again.values.numpy(), plain.values.numpy())


def test_malformed_questions_touch_no_file(estimator, ground, tmp_path):
    train, _ = ground
    other = dif.Samples(train.loss, (torch.randn(9, 4, dtype=torch.float64), torch.randn(9, dtype=torch.float64)))
    for target, what in ((None, train.remove_each()), (train.mean(), other.remove_each()), (train.mean(), None)):
        with pytest.raises(dif.InvalidInputError):
            estimator.scores(target, what, out=tmp_path / "s.npy", show_progress=False)
    with pytest.raises(dif.InvalidInputError):
        estimator.scores(train.mean(), train.remove_each(), jobs=0)
    assert list(tmp_path.iterdir()) == []
