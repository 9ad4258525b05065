"""Plots show the given numbers on the given axes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import bound_regression, fair_logistic, fit_problem
from trainings import classify, state_problem

import dif
from dif.report import plots

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.figure import Figure  # noqa: E402


@pytest.fixture
def ax():
    return Figure().subplots()


@pytest.fixture(scope="module")
def scored():
    train, problem, *_ = fair_logistic()
    solution = fit_problem(problem)
    estimator = dif.DirectionalInfluence(solution)
    return train, solution, estimator, estimator.scores([train.mean()], train.remove_each(), show_progress=False)


def widths(ax):
    return [bar.get_width() for bar in ax.patches]


def test_ranking(scored, ax):
    scores = scored[3]
    assert plots.ranking(scores, ax, k=5, names=[f"<{i}>" for i in range(len(scores))]) is ax
    top = scores.top(5)[::-1]
    np.testing.assert_allclose(widths(ax), [sample.value for sample in top])
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"<{sample.index}>" for sample in top]


def test_scores_that_cannot_be_trusted_are_marked(ax):
    """One target is not trusted as a whole; of the other, one score."""
    values = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=torch.float64)
    about = {"assessment": {"rows": [0, 1], "errors": [0.1, 0.4], "by_target": [0.5, 0.1], "pooled": 0.5}}
    scores = dif.Influence(values, ("a", "b"), ("wild", "tame"), "DIF", about)
    for target, label, hatched in (("wild", "DIF, not trusted", [True, True]), ("tame", "DIF", [True, False])):
        plots.ranking(scores, ax, target=target)
        assert ax.get_xlabel() == f"change of {target} ({label})"
        assert [bar.get_hatch() == "//" for bar in ax.patches] == hatched
        ax.clear()
    plots.by_group(scores, ["x", "y"], ax, "wild")
    assert ax.get_xlabel() == "change of wild (DIF, not trusted)"


def test_by_group(scored, ax):
    scores = scored[3]
    groups = ["a" if i % 3 else "b" for i in range(len(scores))]
    assert plots.by_group(scores, groups, ax) is ax
    total = float(scores.values[[g == "a" for g in groups], 0].sum())
    assert ax.get_yticklabels()[0].get_text() == f"a\nΣ {total:+.3g}"
    with pytest.raises(dif.InvalidInputError, match=r"`groups` has \d+ entries; .* one per perturbation."):
        plots.by_group(scores, groups[1:], ax)


def test_path(ax):
    train, problem, *_ = bound_regression()
    solution = fit_problem(problem)
    removal = train.remove([0])
    predicted, actual = dif.DirectionalInfluence(solution).change(removal), dif.Retraining(solution).change(removal)
    followed = dif.PathInfluence(solution).follow(removal, stops=[0.5])
    assert plots.path(followed, ax, predicted, most=1) is ax
    i = int(actual.flat.abs().argmax())
    retrained, straight = ax.lines
    assert retrained.get_ydata()[-1] == pytest.approx(float(actual.flat[i]), abs=1e-9)
    assert straight.get_ydata()[-1] == pytest.approx(float(predicted.flat[i]))
    assert 0.5 in retrained.get_xdata()


def test_paths_of_multipliers_and_bounds(ax):
    train, problem, *_ = bound_regression()
    solution, order = fit_problem(problem), problem.constraints[1]
    followed = dif.PathInfluence(solution).follow(order.shift(1.0))
    assert [event.binds for event in followed.events] == [False]
    assert plots.multiplier_path(followed, ax) is ax
    named = {line.get_label(): line for line in ax.lines}
    assert {"sum[0]", "order"} <= set(named)
    assert float(named["order"].get_ydata()[-1]) == 0.0
    assert [text.get_text() for text in ax.texts] == ["order becomes inactive"]
    assert followed.events[0].epsilon in [line.get_xdata()[0] for line in ax.lines]
    ax.clear()
    bound = float(order.tau)
    curve = dif.bound_curve(solution, order, [bound - 0.5, bound, bound + 1.0], train.mean())
    plots.bound_curve(curve, ax)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), curve.price)
    assert ax.get_ylabel() == "price λ"
    ax.clear()
    plots.bound_curve(curve, ax, target=0)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), curve.values[:, 0])
    for target in (5, "nothing"):
        with pytest.raises(dif.InvalidInputError, match=r"`target` must be one of the targets"):
            plots.bound_curve(curve, ax, target=target)


def test_predicted_vs_actual(ax):
    predicted, actual = np.array([0.1, -0.2]), np.array([0.11, -0.19])
    assert plots.predicted_vs_actual(predicted, actual, ax, "DIF") is ax
    np.testing.assert_allclose(ax.collections[0].get_offsets(), np.stack([actual, predicted], 1))


def test_predictions_are_drawn_whatever_holds_them(ax):
    values = torch.tensor([[1.0], [2.0]], dtype=torch.float64, requires_grad=True)
    scores = dif.Influence(values.detach(), ("a", "b"), ("t",), "DIF")
    plots.predicted_vs_actual(scores, values, ax, "both")
    np.testing.assert_array_equal(ax.collections[0].get_offsets(), [[1.0, 1.0], [2.0, 2.0]])
    for predicted, actual in ((values[:1], values), (values[:0], values[:0])):
        with pytest.raises(dif.InvalidInputError, match=r"predicted and . actual changes; there must be equally many"):
            plots.predicted_vs_actual(predicted, actual, ax, "none")


def test_groups_with_an_unanswered_score_keep_their_box(ax):
    values = torch.tensor([[1.0], [2.0], [float("nan")], [4.0]], dtype=torch.float64)
    plots.by_group(dif.Influence(values, tuple("abcd"), ("loss",), "DIF"), ["x", "x", "x", "y"], ax, target="loss")
    boxes = [line for line in ax.lines if len(line.get_xdata()) == 5]
    assert len(boxes) == 2
    assert all(np.isfinite(line.get_xdata()).all() for line in boxes)


def test_history_of_a_run():
    _, problem = state_problem(*(data := classify())[:3])
    run = dif.Training(problem, data[3], dif.SGD(0.1), batch_size=20, epochs=2).run(show_progress=False)
    axes = Figure().subplots(3, 1)
    assert plots.history(run, axes) is axes
    objective, violations, multipliers = ([line for line in ax.lines if len(line.get_xdata()) > 2] for ax in axes)
    np.testing.assert_array_equal(objective[0].get_xdata(), range(6))
    np.testing.assert_array_equal(objective[0].get_ydata(), run.history.objective)
    for lines, rows in ((violations, run.history.violations), (multipliers, run.history.multipliers)):
        np.testing.assert_array_equal([line.get_ydata() for line in lines], np.array(rows).T)
        assert [line.get_label() for line in lines] == list(run.end.program.names)
    with pytest.raises(dif.InvalidInputError, match=r"`axes` must be 3 axes of matplotlib, .* not 2\."):
        plots.history(run, axes[:2])


def test_results_draw_themselves_on_new_axes(scored):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    train, solution, estimator, scores = scored
    pyplot.close("all")  # those of other tests
    ax = scores.plot(k=5)
    np.testing.assert_allclose(widths(ax), [sample.value for sample in scores.top(5)[::-1]])
    change = estimator.change(train.remove([3]))
    ax = change.plot(k=2)
    np.testing.assert_allclose(widths(ax), change.flat[change.flat.abs().argsort()][-2:])
    assert ax.get_yticklabels()[-1].get_text() == f"theta[{int(change.flat.abs().argmax())}]"
    followed = dif.PathInfluence(solution).follow(train.remove([3]))
    moved = followed.end.theta - solution.theta
    assert followed.plot().lines[0].get_ydata()[-1] == pytest.approx(float(moved[moved.abs().argmax()]))
    constraint = solution.problem.constraints[0]
    curve = dif.bound_curve(solution, constraint, [0.0, float(constraint.tau)], {"risk": train.mean()})
    np.testing.assert_allclose(curve.plot().lines[0].get_ydata(), curve.price)
    np.testing.assert_allclose(curve.plot(target="risk").lines[0].get_ydata(), curve.values[:, 0])
    assert plots.predicted_vs_actual(scores, scores).get_legend() is None
    assert len({id(pyplot.figure(number)) for number in pyplot.get_fignums()}) == 6  # a new figure each
    pyplot.close("all")


def test_a_corner_of_the_feasible_set_is_drawn_sharp():
    from studies import toy

    _, problem = toy.build_problem()
    solution = dif.fit(problem, {"theta": torch.zeros(2, dtype=torch.float64)}, show_progress=False)
    ax = Figure().subplots()
    toy.draw_landscape(solution, ax)
    boundary = np.concatenate([path.vertices for path in ax.collections[-1].get_paths()])
    assert np.linalg.norm(boundary - [1.0, 0.0], axis=1).min() < 2e-3  # where θ₁ + θ₂ = 1 and θ₁ − θ₂ = 1 meet


def test_figures_of_the_studies(tmp_path, monkeypatch):
    """No coordinate is "−0", both axes of the regression have one scale, and no two panels of the network are equal."""
    from studies import cnn_figures, regression, toy

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    toy.draw_figure(tmp_path / "toy.png", toy.run())
    labels = [text.get_text() for text in drawn[-1].axes[1].get_legend().get_texts()]
    assert labels[1:] == ["DIF: (0.167, −0.167)", "classical IF: (0.25, 0)"]
    predicted = {name: [[3.0], [-1.0]] for name in ("classical IF", regression.PRINTED, "DIF")}
    numbers = {"actual": [[1.0], [2.0]], "predicted": {"paper": predicted}, "binding": ["sum"], "seed": 0}
    regression.draw_figure(tmp_path / "regression.png", numbers)
    for ax in drawn[-1].axes:
        assert ax.get_xlim() == ax.get_ylim() == drawn[-1].axes[0].get_xlim()
        assert ax.get_aspect() == 1.0
    kept = Path(__file__).parents[2] / "docs" / "results" / "cnn-60000" / "cnn.json"
    cnn_figures.draw_figure(tmp_path / "cnn.png", json.loads(kept.read_text()))
    titles = [ax.get_title() for ax in drawn[-1].axes]
    assert titles == ["DIF = DIF (switching)", "classical IF = penalty IF\ndamped by 0.1", "Newton"]


def test_wrong_arguments_are_refused_in_words(scored):
    train, _, estimator, scores = scored
    change = estimator.change(train.remove([3]))
    for action, words in (
        (lambda: scores.plot(3), "`ax` must be axes of matplotlib, or None for a new figure, not int."),
        (lambda: scores.plot(k=0), "k"),
        (lambda: scores.plot(target="gap"), "target"),
        (lambda: scores.plot(names=["a"]), "`names` has 1 entries; it must be"),
        (lambda: scores.plot(names=np.array(3)), "`names` is of type ndarray; it must be"),
        (lambda: plots.ranking(3), "`influence` must be a dif.Influence, not of type int."),
        (lambda: plots.by_group(scores, range(len(scores)), None, "gap"), "`target` must be one of the targets"),
        (lambda: plots.history(3), "`run` must be a dif.Run, not of type int; it comes from dif.Training(...).run()."),
        (lambda: plots.predicted_vs_actual("a", "b"), "changes"),
        (lambda: change.plot(k="a"), "`k` must be an integer"),
    ):
        with pytest.raises(dif.InvalidInputError, match=re.escape(words)):
            action()
