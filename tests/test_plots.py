"""Pictures show the numbers they are given, on the axes they are given."""

import numpy as np
import pytest
from problems import bound_regression, fair_logistic, solved

import dif
from dif import plots

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.figure import Figure  # noqa: E402


@pytest.fixture
def ax():
    return Figure().subplots()


@pytest.fixture(scope="module")
def scored():
    train, problem, *_ = fair_logistic()
    solution = solved(problem)
    estimator = dif.DirectionalInfluence(solution)
    return train, solution, estimator, estimator.scores([train.mean()], train.remove_each(), show_progress=False)


def widths(ax):
    return [bar.get_width() for bar in ax.patches]


def test_ranking(scored, ax):
    scores = scored[3]
    assert plots.ranking(scores, ax, k=5, names=[f"<{i}>" for i in range(len(scores))]) is ax
    top = scores.top(5)[::-1]
    np.testing.assert_allclose(widths(ax), [one.value for one in top])
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"<{one.index}>" for one in top]


def test_by_group(scored, ax):
    scores = scored[3]
    groups = ["a" if i % 3 else "b" for i in range(len(scores))]
    assert plots.by_group(scores, groups, ax) is ax
    total = float(scores.values[[g == "a" for g in groups], 0].sum())
    assert ax.get_yticklabels()[0].get_text() == f"a\nΣ {total:+.3g}"
    with pytest.raises(dif.InvalidInputError, match=r"Scores are gathered by them."):
        plots.by_group(scores, groups[1:], ax)


def test_by_term(scored, ax):
    train, _, estimator, scores = scored
    parts = estimator.by_term(train.mean(), train.remove_each())
    assert plots.by_term(parts, ax, k=4) is ax
    together = ax.lines[0].get_xdata()
    np.testing.assert_allclose(together, [one.value for one in scores.top(4)[::-1]], atol=1e-12)
    assert sum(widths(ax)) == pytest.approx(sum(together))


def test_multipliers(scored, ax):
    train, solution, estimator, _ = scored
    change = estimator.change(train.remove([3]))
    assert plots.multipliers(solution, change, ax) is ax
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], change.multipliers.flat)
    assert [label.get_text() for label in ax.get_xticklabels()] == list(solution.program.names)


def test_path(ax):
    train, problem, *_ = bound_regression()
    solution = solved(problem)
    removal = train.remove([0])
    predicted, actual = dif.DirectionalInfluence(solution).change(removal), dif.Retraining(solution).change(removal)
    assert plots.path(solution, removal, predicted, ax, steps=2, most=1) is ax
    i = int(actual.flat.abs().argmax())
    retrained, straight = ax.lines
    assert retrained.get_ydata()[-1] == pytest.approx(float(actual.flat[i]), abs=1e-9)
    assert straight.get_ydata()[-1] == pytest.approx(float(predicted.flat[i]))
    assert len(retrained.get_xdata()) == 3


def test_predicted_vs_actual(ax):
    predicted, actual = np.array([0.1, -0.2]), np.array([0.11, -0.19])
    assert plots.predicted_vs_actual(predicted, actual, ax, "DIF") is ax
    np.testing.assert_allclose(ax.collections[0].get_offsets(), np.stack([actual, predicted], 1))
