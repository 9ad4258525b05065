"""A report from Python: the numbers of the scores, for all samples or some, with what retraining gave."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from problems import fair_logistic, fit_problem, logistic, zeros

import dif


@pytest.fixture(scope="module")
def scored():
    train, problem, *_ = fair_logistic()
    solution = fit_problem(problem)
    targets = {"risk": train.mean(), "half": train.mean(where=torch.arange(len(train)) < 10)}
    scores = dif.DirectionalInfluence(solution).scores(targets, train.remove_each(), show_progress=False)
    return train, solution, targets, scores


def refuse(words, action):
    """Check that an action is refused in these words."""
    with pytest.raises(dif.InvalidInputError, match=re.escape(words)):
        action()


def read(path):
    """The data of a page."""
    text = path.read_text("utf-8")
    (data,) = re.findall(r"<script[^>]*type=.?application/json[^>]*>(.*?)</script>", text, re.DOTALL)
    return json.loads(data)


def test_the_page_has_the_scores(scored, tmp_path):
    train, _, _, scores = scored
    path = tmp_path / "report.html"
    ages = [20 + i for i in range(len(train))]
    scores.report(path, features={"age": ages}, groups=["a", "b"] * (len(train) // 2), title="Loans 2.0")
    pages = {page["target"]: page for page in read(path)}
    assert set(pages) == {"risk", "half"}
    page = pages["half"]
    assert (page["title"], page["total"]) == ("Loans 2.0", len(train))
    top = scores.top(5, "half")
    assert [sample["index"] for sample in page["samples"][:5]] == [entry.index for entry in top]
    for sample, entry in zip(page["samples"], top, strict=False):
        assert sample["score"] == pytest.approx(entry.value)
        assert sample["features"]["age"] == str(20 + entry.index)
        assert sum(sample["parts"]) == pytest.approx(entry.value)
    assert page["terms"][0] == "objective"
    assert {row["group"] for row in page["by_group"]} == {"a", "b"}
    assert page["certificate"]["holds"]


def test_some_samples_with_what_retraining_gave(scored, tmp_path):
    train, solution, targets, scores = scored
    top = [entry.index for entry in scores.top(4)]
    actual = dif.Retraining(solution).scores(targets, train.remove_each(top))
    some = scores[sorted({*top, 0, 1, 2})]
    some.report(tmp_path / "report.html", retrained=actual)
    page = next(page for page in read(tmp_path / "report.html") if page["target"] == "risk")
    assert page["total"] == len(some) == len(page["samples"])
    found = {sample["name"]: sample["actual"] for sample in page["samples"] if sample.get("actual") is not None}
    values = actual.values[:, 0].tolist()
    assert found == {f"train[{i}]": pytest.approx(value) for i, value in zip(top, values, strict=True)}


def test_the_estimator_of_the_scores_is_asked(scored, tmp_path, monkeypatch):
    """Scores that know their estimator need no other: a derivative is split by term as it was scored."""
    train, solution, targets, _ = scored
    estimator = dif.DirectionalInfluence(solution, switching=False)
    scores = estimator.scores(targets, train.remove_each(), assess=0, show_progress=False)
    origin = SimpleNamespace(solution=solution, targets=scores.origin.targets, estimator=estimator)
    monkeypatch.setattr("dif.report.builder.DirectionalInfluence", None)
    replace(scores, origin=origin).report(tmp_path / "report.html")
    for page in read(tmp_path / "report.html"):
        for sample in page["samples"]:
            assert sum(sample["parts"]) == pytest.approx(sample["score"])


def test_other_estimators_show_no_terms(scored, tmp_path):
    train, solution, targets, _ = scored
    scores = dif.ClassicalInfluence(solution).scores(targets, train.remove_each(), assess=0, show_progress=False)
    scores.report(tmp_path / "report.html")
    assert all(page["terms"] == [] for page in read(tmp_path / "report.html"))


def test_the_index_of_a_frame_names_the_samples(tmp_path):
    pandas = pytest.importorskip("pandas")
    data = pandas.Series([0.0, 1.0, 5.0, 2.0], index=["ann", "bob", "cy", "dee"])
    train = dif.Samples(lambda params, z: (z - params["t"]) ** 2, data, name="train")
    solution = dif.fit(dif.Problem(train.mean()), {"t": torch.zeros(1).double()}, show_progress=False)
    scores = dif.DirectionalInfluence(solution).scores(train, train.remove_each(), assess=0)
    scores.report(tmp_path / "report.html")
    page = next(page for page in read(tmp_path / "report.html") if page["target"] == "train[2]")
    assert page["samples"][0]["name"] == "cy"
    assert page["samples"][0]["score"] == pytest.approx(scores.top(1, 2)[0].value)


def test_what_cannot_be_reported_is_refused(scored, tmp_path):
    train, solution, targets, scores = scored
    path = tmp_path / "report.html"
    scores.save(tmp_path / "scores.npz")
    loaded = dif.Influence.load(tmp_path / "scores.npz")
    refuse("do not know the solution that they were computed at. Call", lambda: loaded.report(path))
    many = dif.DirectionalInfluence(solution).scores(train, train.remove_each([1]), assess=0)
    refuse("The scores have 60 targets; a report shows at most 20", lambda: many.report(path))
    assert not path.exists()
    dif.report.write_report(path, loaded, solution, targets=targets)
    assert path.exists()


ENTRY = "it must be a list, an array or a column with 60 entries, one per sample."
WRONG = [
    ("path", 3, "`path`"),
    ("path", ".", "`path`"),
    ("retrained", 3, "`retrained` must be a dif.Influence, not of type int."),
    ("title", 3, "`title` must be a str, not of type int."),
    ("names", 3, f"`names` is of type int; {ENTRY}"),
    ("names", "ab", f"`names` is of type str; {ENTRY}"),
    ("groups", {"a": 1}, f"`groups` is of type dict; {ENTRY}"),
    ("groups", ["a"], f"`groups` has 1 entries; {ENTRY}"),
    ("features", [1], "`features` is of type list; it must be a dict of columns or a data frame."),
    ("features", {"age": 3}, f"`features['age']` is of type int; {ENTRY}"),
    ("features", {"age": None}, f"`features['age']` is of type NoneType; {ENTRY}"),
    ("features", {"age": [3]}, f"`features['age']` has 1 entries; {ENTRY}"),
    ("images", 3, f"`images` is of type int; {ENTRY}"),
    ("images", torch.zeros(60, 3), "`images` has entries of shape (3,); each must have shape (height, width)"),
    ("images", [None] * 60, "`images` cannot be displayed"),
]


@pytest.mark.parametrize(("argument", "value", "words"), WRONG)
def test_every_argument_is_checked(scored, tmp_path, argument, value, words):
    scores = scored[3]
    given = {"path": tmp_path / "report.html", argument: value}
    assert len(scores) == 60
    refuse(words, lambda: scores.report(given.pop("path"), **given))
    assert not list(tmp_path.iterdir())


def test_scores_and_targets_of_another_number_or_kind_are_refused(scored, tmp_path):
    train, solution, _, scores = scored
    path = tmp_path / "r.html"
    wanted = "`targets` must be the 2 Terms that were scored, one per column; "
    for words, values in (
        (f"{wanted}it has an entry of type int.", {"targets": 3}),
        (f"{wanted}it has an entry of type int.", {"targets": [1, 2]}),
        (f"{wanted}not 1.", {"targets": [train.mean()]}),
        (f"{wanted}not 0.", {"targets": []}),
        ("`influence` must be a dif.Influence, not of type int.", {"influence": 3}),
        ("`solution`", {"solution": 3}),
    ):
        given = {"influence": scores, "solution": solution, **values}
        refuse(words, lambda given=given: dif.report.write_report(path, **given))
    some = scores[:3]
    found = "of its 60 perturbations 3 were, and its targets are risk, half."
    refuse(found, lambda: some.report(path, retrained=scores))
    assert not path.exists()
    predicted = dif.NewtonInfluence(solution).scores(train.mean().named("risk"), train.remove_each([1, 2]))
    scores.report(path, retrained=predicted)  # any estimator may stand in for retraining
    shown = [s for s in read(path)[0]["samples"] if s.get("actual") is not None]
    assert sorted(s["index"] for s in shown) == [1, 2]


def test_a_report_costs_few_evaluations_of_the_losses(tmp_path):
    """Calls of the user's loss are counted, those that search for kinks, too."""
    calls = []

    def counted(params, z):
        calls.append(len(z[0]))
        return logistic(params, z)

    data, group = fair_logistic()[0].storage.data, torch.arange(60) % 3
    train = dif.Samples(counted, data, name="train")
    risk = train.mean()
    problem = dif.Problem(risk + dif.ridge(0.05), [train.mean(where=group == 1) <= risk - 0.02])
    solution = dif.fit(problem, zeros(), show_progress=False)
    targets = {"risk": risk, "half": train.mean(where=group == 0)}
    scores = dif.DirectionalInfluence(solution).scores(targets, train.remove_each(), assess=0, show_progress=False)
    calls.clear()
    scores.report(tmp_path / "report.html")
    assert 0 < len(calls) <= 60


@pytest.fixture(scope="module")
def people():
    """Scores of people with names, and a frame of what is known about them."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [0.0, 1.0, 5.0, 2.0, 4.0]}, index=["ann", "bob", "cy", "dee", "eve"])
    return frame, score_people(frame)


def score_people(frame):
    train = dif.Samples(lambda params, z: (z[:, 0] - params["t"]) ** 2, frame, name="train")
    solution = dif.fit(dif.Problem(train.mean()), {"t": torch.zeros(1).double()}, show_progress=False)
    return dif.DirectionalInfluence(solution).scores(train.mean(), train.remove_each(), assess=0)


def shown_ages(scores, path, **given):
    scores.report(path, **given)
    (page,) = read(path)
    return {sample["name"]: float(sample["features"]["age"]) for sample in page["samples"]}


def test_features_are_those_of_the_people_that_were_scored(people, tmp_path):
    frame, scores = people
    path, ages = tmp_path / "report.html", frame["age"].to_dict()
    assert shown_ages(scores, path, features=frame) == ages
    for part, rows in ((scores[1:3], frame[1:3]), (scores[[3, 0]], frame.iloc[[3, 0]])):
        assert len(part) == 2
        for features in (frame, rows, rows.reset_index(drop=True), {"age": list(rows["age"])}):
            assert shown_ages(part, path, features=features) == rows["age"].to_dict()


def test_features_of_other_people_are_refused(people, tmp_path):
    frame, scores = people
    path, ages = tmp_path / "report.html", frame["age"]
    reordered, other = "has the labels of the scores in another order. Pass", "has other labels than the scores:"
    for part, given, words in (
        (scores, {"features": frame[::-1]}, f"`features` {reordered} features.loc[X.index], or"),
        (scores[1:4], {"features": frame[1:4][::-1]}, f"`features` {reordered} features.loc[scores.index], or"),
        # five rows are those of the data, in the order of the data
        (scores[::-1], {"features": frame[::-1]}, f"`features` {reordered} features.loc[X.index], or"),
        (scores[1:3], {"features": frame[3:]}, f"`features` {other} 'dee', 'eve'. Pass"),
        (scores[1:3], {"features": frame[2:4]}, f"`features` {other} 'dee'. Pass features.loc[scores.index], or"),
        (scores, {"features": frame.rename("patient {}".format)}, f"`features` {other}"),
        (scores, {"features": {"age": ages[::-1]}}, f"`features['age']` {reordered}"),
        (scores, {"names": ages[::-1]}, f"`names` {reordered} names.loc[X.index], or, if its rows are in order "
         "already, names.to_list()."),
        (scores, {"groups": ages[::-1]}, f"`groups` {reordered}"),
    ):  # fmt: skip
        refuse(words, lambda part=part, given=given: part.report(path, **given))
    assert not path.exists()
    as_told = frame.rename("patient {}".format).to_dict("list")
    assert shown_ages(scores[::-1], path, features=as_told) == ages.to_dict()


def test_a_default_index_names_nobody(people, tmp_path):
    frame, _ = people
    path, plain = tmp_path / "report.html", frame.reset_index(drop=True)
    scores = score_people(plain)
    expected = {str(i): age for i, age in enumerate(frame["age"])}
    for features in (frame, plain):
        assert shown_ages(scores, path, features=features) == expected
    reordered = plain.sort_values("age")
    refuse("`features` has the labels of the scores in another", lambda: scores.report(path, features=reordered))
    refuse("`features` has other labels than the scores: 3, 4.", lambda: scores[1:3].report(path, features=plain[3:]))
