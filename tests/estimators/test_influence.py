"""Scores behave like a table: they are selected, ranked, matched by label, and keep the index of a data frame."""

import json

import numpy as np
import pytest
import torch
from problems import bound_regression, fit_problem, regression_data, squared, zeros
from refusals import invalid

import dif


@pytest.fixture(scope="module")
def scored():
    """Scores of all samples, and retraining without the strongest, in the order of their rank."""
    train, problem = bound_regression()
    solution = fit_problem(problem)
    targets = {"first": train.mean(where=torch.arange(40) < 5), "weight": dif.linear([1.0, 0.0, 0.0, 0.0])}
    scores = dif.DirectionalInfluence(solution).scores(targets, train.remove_each())
    top = train.remove_each([entry.index for entry in scores.top(8)])
    return train, solution, targets, scores, dif.Retraining(solution).scores(targets, top)


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        (3, [3]),
        (-1, [39]),
        (slice(3, 10), range(3, 10)),
        (slice(None, None, -13), [39, 26, 13, 0]),
        ("train[17]", [17]),
        ("remove train[17]", [17]),
        (["train[17]", "remove train[2]"], [17, 2]),
        ([5, 1, -2], [5, 1, 38]),
        (np.array([5, 1]), [5, 1]),
        (torch.arange(40) % 20 == 7, [7, 27]),
        ([i == 9 for i in range(40)], [9]),
    ],
)
def test_selection(scored, key, rows):
    scores, rows = scored[3], list(rows)
    some = scores[key]
    assert torch.equal(some.values, scores.values[rows])
    assert some.perturbations == tuple(f"remove train[{i}]" for i in rows)
    assert (some.targets, some.estimator) == (scores.targets, scores.estimator)
    assert torch.equal(some.expected_error.nan_to_num(-1.0), scores.expected_error[rows].nan_to_num(-1.0))
    assert some.trusted is scores.trusted
    assert some.diagnostics["kkt"] == scores.diagnostics["kkt"]


def test_a_selection_can_be_scored_selected_and_saved_again(scored, tmp_path):
    _, solution, targets, scores, _ = scored
    some = scores[10:20]
    assert torch.equal(some["train[12]"].values, scores.values[12:13])
    again = dif.DirectionalInfluence(solution).scores(targets, some.carried_out)
    torch.testing.assert_close(again.values, some.values)
    some.save(tmp_path / "some.npz")
    loaded = dif.Influence.load(tmp_path / "some.npz")
    assert loaded[2:4].perturbations == ("remove train[12]", "remove train[13]")
    assert [len(one) for one in scores[:3]] == [1, 1, 1]


def test_diagnostics_follow_the_selection(scored):
    retrained = scored[4]
    assert retrained[2:4].diagnostics["residuals"] == retrained.diagnostics["residuals"][2:4]
    labels, about = ("a", "b", "c"), {"unanswered": {"a": "x", "c": "y"}, "assessment": None, "rows": 2}
    scores = dif.Influence(torch.zeros(3, 1), labels, ("t",), "test", about)
    assert scores[1:].unanswered == (1, "y")
    assert scores[1].unanswered is None
    assert scores[1:].diagnostics["rows"] == 1
    assert scores.unanswered == (2, "x")


def test_scores_on_disk_are_selected(scored, tmp_path):
    train, solution, targets, scores, _ = scored
    path = tmp_path / "scores.npy"
    dif.DirectionalInfluence(solution).scores(targets, train.remove_each(), out=path)
    loaded = dif.Influence.load(path)
    assert torch.equal(loaded[[30, 2, 17]].values, scores.values[[30, 2, 17]])
    assert torch.equal(loaded[5:9].values, scores.values[5:9])


def test_what_selects_nothing_is_refused(scored):
    scores = scored[3]
    ways = (
        "Scores are selected by an integer, a slice, a label, a mask of 40 entries, or a list of integers or labels, "
    )
    columns = "take columns, the targets, from influence.to_frame()."
    invalid(lambda: scores[5:5], f"{ways}not by slice(5, 5, None), which selects none;", columns)
    invalid(lambda: scores[torch.zeros(40, dtype=torch.bool)], f"{ways}not by one that selects none;", columns)
    invalid(lambda: scores[[True] * 39], f"{ways}not by a mask of 39;", columns)
    invalid(lambda: scores[[1, 2.5]], f"{ways}not by a list that includes 2.5;", columns)
    invalid(lambda: scores[None], f"{ways}not by an object of type NoneType;", columns)
    found = (
        "No perturbation has the label 'train[40]'; write it as in `influence.perturbations`, with or without its verb"
    )
    invalid(lambda: scores["train[40]"], found, "'remove train[0]', 'remove train[1]'")
    for outside in (40, -41, [40]):
        with pytest.raises(IndexError, match="scores of 40 perturbations, but index"):
            scores[outside]


def test_proponents_raise_and_opponents_lower_the_target(scored):
    scores = scored[3]
    column = scores.values[:, 0]
    up, down = scores.proponents(4), scores.opponents(4)
    assert [entry.value for entry in up] == sorted(column.tolist(), reverse=True)[:4]
    assert [entry.value for entry in down] == sorted(column.tolist())[:4]
    assert all(entry.label == f"remove train[{entry.index}]" for entry in up + down)
    assert len(scores.proponents(40, "weight")) == int((scores.values[:, 1] > 0).sum())
    assert len(scores.opponents(40)) + len(scores.proponents(40)) == 40
    missing = dif.Influence(torch.tensor([[1.0], [float("nan")], [-2.0]]), ("a", "b", "c"), ("t",), "test")
    assert [entry.label for entry in missing.proponents()] == ["a"]
    assert [entry.label for entry in missing.opponents()] == ["c"]
    assert [entry.label for entry in missing.top()] == ["b", "c", "a"]  # it may be the strongest
    assert [entry.label for entry in missing.top(1)] == ["b"]
    invalid(lambda: scores.proponents(0), "`k` must be an integer ≥ 1, not 0.")
    invalid(lambda: scores.opponents(3, "gap"), "`target` must be a number from 0 to 1 or one of the names ", "'gap'.")


def test_a_helpful_sample_is_a_proponent_of_its_own_loss(scored):
    train, solution = scored[:2]
    own = dif.DirectionalInfluence(solution).scores(train.mean(where=torch.arange(40) == 7), train.remove_each())
    assert 7 in [entry.index for entry in own.proponents(40)]
    assert 7 not in [entry.index for entry in own.opponents(40)]


def test_compare_matches_by_label(scored):
    _, _, _, scores, retrained = scored
    rows = [scores.perturbations.index(label) for label in retrained.perturbations]
    expected = dif.Agreement.of(scores.values[rows], retrained.values)
    assert scores.compare(retrained) == expected
    assert scores.compare(retrained[::-1]).pearson == pytest.approx(expected.pearson)
    backwards = retrained.compare(scores)
    assert backwards == dif.Agreement.of(retrained.values, scores.values[rows])
    swapped = dif.Influence(retrained.values[:, [1, 0]], retrained.perturbations, ("weight", "first"), "retraining")
    assert scores.compare(swapped).relative_error == pytest.approx(expected.relative_error)


def test_some_targets_are_compared_by_name(scored):
    _, _, _, scores, retrained = scored
    rows = [scores.perturbations.index(label) for label in retrained.perturbations]
    for column, name in enumerate(scores.targets):
        one = dif.Influence(retrained.values[:, [column]], retrained.perturbations, (name,), "retraining")
        expected = dif.Agreement.of(scores.values[rows][:, [column]], retrained.values[:, [column]])
        assert scores.compare(one) == expected
        backwards = dif.Agreement.of(retrained.values[:, [column]], scores.values[rows][:, [column]])
        assert one.compare(scores) == backwards
    overlapping = dif.Influence(torch.zeros(3, 2), ("remove train[0]", "remove train[1]", "x"), scores.targets, "other")
    invalid(
        lambda: scores.compare(overlapping), "they share 2 perturbations and 2 targets;", "and likewise the targets, "
    )


def test_what_cannot_be_matched_is_refused(scored):
    _, _, _, scores, retrained = scored
    foreign = dif.Influence(torch.zeros(2, 2), ("remove test[0]", "remove train[1]"), scores.targets, "other")
    twice = dif.Influence(torch.zeros(2, 2), ("remove train[1]",) * 2, scores.targets, "other")
    renamed = dif.Influence(retrained.values, retrained.perturbations, ("first", "gap"), "other")
    for other in (foreign, twice, renamed):
        invalid(lambda other=other: scores.compare(other), "scores they share ")
    found = "`other` must be a dif.Influence, not of type float; score the same perturbations and targets with both "
    invalid(lambda: scores.compare(3.0), found)


def test_summary_and_notebook_view(scored):
    scores, retrained = scored[3:]
    text = scores.summary(k=3)
    assert text.startswith("Influence(DIF: 40 perturbations × 2 targets)\nTrusted: the estimated relative error is ")
    strongest = scores.top(1)[0]
    assert f"{strongest.label} {strongest.value:+.4g}" in " ".join(text.split())
    assert "Largest changes of first:" in text
    assert "Largest changes of weight:" in text
    assert f"{float(scores.values[:, 1].max()):+.4g}" in text
    page = scores._repr_html_()
    assert page.count("<tr>") == 11
    assert "… and 30 more perturbations" in page
    assert "Trusted" not in retrained._repr_html_()  # nothing was assessed
    harmful = dif.Influence(torch.zeros(1, 1), ("remove <b>[0]",), ("<script>",), "test", {})
    assert "<script>" not in harmful._repr_html_()
    assert "&lt;b&gt;[0]" in harmful._repr_html_()
    assessment = {"rows": [], "errors": [], "by_target": [], "pooled": None, "failed": "a reason"}
    about = {"assessment": assessment, "unanswered": {"a": "why"}}
    doubtful = dif.Influence(torch.full((1, 1), float("nan")), ("a",), ("t",), "test", about)
    assert "1 without an answer (NaN): why. NOT trusted: no error could be estimated (a reason)." in doubtful.summary()


def test_many_targets_are_cut_short(scored):
    train, solution = scored[:2]
    scores = dif.DirectionalInfluence(solution).scores(train, train.remove_each([1, 2]))
    assert "… and 34 more targets" in scores.summary()
    assert "34 more targets" in scores._repr_html_()


def fit_frame(index):
    pandas = pytest.importorskip("pandas")
    X, y = (part.numpy() for part in regression_data())
    train = dif.Samples(squared, (pandas.DataFrame(X, index=index), pandas.Series(y, index=index)), name="train")
    solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1)), zeros(), show_progress=False)
    return train, dif.DirectionalInfluence(solution).scores(train.mean(), train.remove_each())


def test_the_index_of_a_data_frame_is_kept(tmp_path):
    pandas = pytest.importorskip("pandas")
    index = pandas.Index([f"P{i}" for i in range(40)], name="person")
    train, scores = fit_frame(index)
    assert scores.to_frame().index.equals(index)
    assert scores.to_frame().index.name == "person"
    best = scores.top(1)[0]
    assert best.name == f"P{best.index}"
    assert list(scores[5:7].to_frame().index) == ["P5", "P6"]
    assert torch.equal(scores["P9"].values, scores["train[9]"].values)
    assert best.name in scores.summary()
    assert f"<td>{best.name}</td>" in scores._repr_html_()
    scores.save(tmp_path / "scores.npz")
    loaded = dif.Influence.load(tmp_path / "scores.npz")
    assert list(loaded[3:5].to_frame().index) == ["P3", "P4"]
    assert loaded.compare(scores).relative_error == 0.0
    groups = dif.DirectionalInfluence(scores.origin.solution).scores(train.mean(), train.remove_groups([[1, 2], [3]]))
    assert list(groups.to_frame().index) == ["remove train[1, 2]", "remove train[3]"]


def test_numbers_dates_and_levels_as_index_survive_a_file(tmp_path):
    pandas = pytest.importorskip("pandas")
    days, pairs = (
        pandas.DatetimeIndex(pandas.date_range("2024-01-01", periods=40).to_numpy()),
        [(i % 2, f"p{i}") for i in range(40)],
    )
    hours, periods = pandas.Index(days.tz_localize("Europe/Paris"), name="hour"), days.to_period("D")
    levels = pandas.MultiIndex.from_arrays([days, range(40), list("ab") * 20], names=["day", None, "site"])
    numbers = pandas.RangeIndex(100, 140)
    for index in (numbers, days, days - days[0], hours, periods, pandas.MultiIndex.from_tuples(pairs), levels):
        _, scores = fit_frame(index)
        assert scores.to_frame().index.equals(index)
        scores.save(tmp_path / "scores.npz")
        loaded = dif.Influence.load(tmp_path / "scores.npz")
        pandas.testing.assert_index_equal(loaded.to_frame().index, index, exact="equiv")
        pandas.testing.assert_index_equal(loaded[[7, 3]].to_frame().index, index[[7, 3]], exact="equiv")
        assert loaded.top(3) == scores.top(3)
        assert len(loaded.to_frame().join(pandas.DataFrame({"x": 1.0}, index=index)).dropna()) == 40
    best = scores.top(1)[0]
    expected = f"({days[best.index]}, {best.index}, '{'ab'[best.index % 2]}')"
    assert expected in scores.summary()
    assert torch.equal(scores[expected].values, scores[best.index].values)
    json.dumps(scores.diagnostics)


def test_targets_with_one_name_are_refused(scored):
    train, solution = scored[:2]
    halves = [train.mean(where=torch.arange(40) % 2 == side).named("half") for side in (0, 1)]
    for targets in (halves, {1: halves[0], "1": halves[1]}, [dif.Function(lambda params: params["theta"].sum())] * 2):
        invalid(
            lambda targets=targets: dif.DirectionalInfluence(solution).scores(targets, train.remove_each()),
            "Each target must have a name of its own, but 2 are called '",
            'pass a dict of targets by name, such as {"group a": term, "group b": other}.',
        )


def test_names_that_dif_makes_up_differ_and_are_matched(scored):
    train, solution = scored[:2]
    halves = [train.mean(where=torch.arange(40) % 2 == side) for side in (0, 1)]
    estimator = dif.DirectionalInfluence(solution)
    scores, swapped = (estimator.scores(targets, train.remove_each()) for targets in (halves, halves[::-1]))
    assert scores.targets == ("mean of 20 of train (0, 2, 4, …)", "mean of 20 of train (1, 3, 5, …)")
    assert swapped.targets == scores.targets[::-1]
    assert scores.compare(swapped).relative_error == 0.0
    assert not torch.equal(scores.values[:, 0], scores.values[:, 1])
    assert scores.top(1, scores.targets[1])[0].value == scores.top(1, 1)[0].value
    weights = [dif.linear([1.0, 0.0, 0.0, 0.0]), dif.linear([0.0, -2.0, 0.0, 0.0], of="theta")]
    assert estimator.scores(weights, train.remove([0])).targets == ("linear (1·θ[0])", "linear (-2·theta[1])")


def test_scores_of_a_file_with_one_name_twice_are_not_compared(scored):
    scores = scored[3]
    twice = dif.Influence(scores.values, scores.perturbations, ("gap", "gap"), "other")
    invalid(lambda: twice.compare(twice), "scores two targets have the same name;")


def test_careless_arguments_are_refused_in_words(scored, tmp_path):
    scores = scored[3]
    for key in (slice("a", "b"), slice(None, None, 0), slice(1.5, None)):
        invalid(lambda key=key: scores[key], "Scores are selected by an integer, a slice, a label, ", "not by slice(")
    for k in (0, 1.5, "five", None):
        invalid(lambda k=k: scores.summary(k), f"`k` must be an integer ≥ 1, not {k!r}.")
    for target in (None, 1.5, 2, -3, "gap", [0]):
        invalid(lambda target=target: scores.top(3, target), "`target` must be ", f"not {target!r}.")
    assert scores.top(1, -1) == scores.top(1, "weight")
    for path in (3, None, "", tmp_path):
        for action in (scores.save, dif.Influence.load) if path != tmp_path else (scores.save,):
            invalid(lambda action=action, path=path: action(path), "`path` must be the path of a file, not ")
    invalid(lambda: dif.Agreement.of("a", "b"), "given as predicted changes cannot be read as numbers")


def test_a_mask_in_another_order_is_refused(tmp_path):
    pandas = pytest.importorskip("pandas")
    index = pandas.Index([f"P{i}" for i in range(40)])
    _, scores = fit_frame(index)
    scores.save(tmp_path / "scores.npz")
    mask = pandas.Series([i % 7 == 3 for i in range(40)], index=index)
    for known in (scores, dif.Influence.load(tmp_path / "scores.npz")):
        for right in (mask, mask.reset_index(drop=True), mask.to_numpy()):
            assert torch.equal(known[right].values, scores.values[3::7])
        invalid(
            lambda known=known: known[mask.sort_index()],
            "The mask has the labels of the scores in another order.",
            "so values of different samples would be combined.",
            "or, if its rows are in order already, pass .to_numpy().",
        )


def test_two_selections_are_refused(scored):
    scores = scored[3]
    for key in ((3, 1), (slice(None), "weight"), (1, 2, 3)):
        invalid(
            lambda key=key: scores[key],
            f"One selection may be given, not {len(key)} separated by commas: write ",
            "influence.values[3, 1] for one score, influence[[3, 1]] for two rows, and influence.to_frame() for ",
        )


def test_the_top_of_a_slice_is_carried_out_again(scored):
    _, solution, targets, scores, _ = scored
    for part in (scores[torch.arange(40) % 2 == 1], scores[[30, 2, 17, 5, 9]]):
        top = part.top(3)
        again = part.carried_out.pick([one.index for one in top])
        assert again.labels == [one.label for one in top]
        assert [part.perturbations[one.index] for one in top] == again.labels
        predicted = dif.DirectionalInfluence(solution).scores(targets, again).values[:, 0]
        assert predicted.tolist() == pytest.approx([one.value for one in top], rel=1e-9)
