"""A report from Python: the numbers of the scores, for all samples or some, with what retraining gave."""

import json
import re

import pytest
import torch
from problems import fair_logistic, fit_problem
from refusals import invalid

import dif


@pytest.fixture(scope="module")
def scored():
    train, problem, *_ = fair_logistic()
    solution = fit_problem(problem)
    targets = {"risk": train.mean(), "half": train.mean(where=torch.arange(len(train)) < 10)}
    scores = dif.DirectionalInfluence(solution).scores(targets, train.remove_each(), show_progress=False)
    return train, solution, targets, scores


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
    actual = dif.Retraining(solution, show_progress=False).scores(targets, train.remove_each(top))
    some = scores[sorted({*top, 0, 1, 2})]
    some.report(tmp_path / "report.html", retrained=actual)
    page = next(page for page in read(tmp_path / "report.html") if page["target"] == "risk")
    assert page["total"] == len(some) == len(page["samples"])
    found = {sample["name"]: sample["actual"] for sample in page["samples"] if sample.get("actual") is not None}
    values = actual.values[:, 0].tolist()
    assert found == {f"train[{i}]": pytest.approx(value) for i, value in zip(top, values, strict=True)}


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
    invalid(
        lambda: loaded.report(path),
        "do not know the solution",
        "A report shows the certificate of that solution, which neither a file nor a training run has.",
    )
    many = dif.DirectionalInfluence(solution).scores(train, train.remove_each([1]), assess=0)
    invalid(lambda: many.report(path), "The scores have", "Each target has a tab of its own.")
    assert not path.exists()
    dif.report.write_report(path, loaded, solution, targets=targets)
    assert path.exists()


ENTRY = "One entry is shown beside each score."
WRONG = {
    "path": [(3, "`path` is of type int", "It must be the path of a file."), (".", "`path` is '.', which is no file")],
    "retrained": [(3, "`retrained` is of type int", "It must be a dif.Influence.", "or leave it out.")],
    "title": [(3, "`title` is of type int", "It must be text.", "It is the heading of the page.")],
    "names": [(3, "`names` is of type int", ENTRY), ("ab", "`names` is of type str", "It must be a list, an array or")],
    "groups": [({"a": 1}, "`groups` is of type dict", ENTRY), (["a"], "`groups` has 1 entries", ENTRY)],
    "features": [
        (
            [1],
            "`features` is of type list",
            "It must be a dict of columns, or a data frame.",
            "Each column is shown under",
        ),
        ({"age": 3}, "`features['age']` is of type int", ENTRY),
        ({"age": [3]}, "`features['age']` has 1 entries", ENTRY),
    ],
    "images": [
        (3, "`images` is of type int", ENTRY),
        (torch.zeros(60, 3), "`images` has entries of shape (3,).", "Each must be an image of shape (height, width)"),
        ([None] * 60, "`images` cannot be displayed", "It must hold numeric pixels", "The report shows it for each"),
    ],
}


@pytest.mark.parametrize(("argument", "case"), [(name, case) for name, cases in WRONG.items() for case in cases])
def test_every_argument_is_checked(scored, tmp_path, argument, case):
    scores, (value, *texts) = scored[3], case
    given = {"path": tmp_path / "report.html", argument: value}
    assert len(scores) == 60
    invalid(lambda: scores.report(given.pop("path"), **given), *texts)
    assert not list(tmp_path.iterdir())


def test_targets_of_another_number_or_kind_are_refused(scored, tmp_path):
    train, solution, _, scores = scored
    write = dif.report.write_report
    meaning = "The report shows the present value of each target beside its scores."
    for targets, found in ((3, "1 target, some of type int"), ([train.mean()], "1 target."), ([1, 2], "of type int")):
        invalid(lambda t=targets: write(tmp_path / "r.html", scores, solution, targets=t), found, meaning)
    invalid(lambda: write(tmp_path / "r.html", 3), "`influence` is of type int", "A report shows the scores of an")
    invalid(lambda: write(tmp_path / "r.html", scores, 3), "`solution` is of type int", "at a solution of a problem.")
    predicted = dif.NewtonInfluence(solution).scores(train.mean().named("risk"), train.remove_each([1, 2]))
    scores.report(tmp_path / "r.html", retrained=predicted)  # any estimator may stand in for retraining
    shown = [s for s in read(tmp_path / "r.html")[0]["samples"] if s.get("actual") is not None]
    assert sorted(s["index"] for s in shown) == [1, 2]


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
    path = tmp_path / "report.html"
    reordered, other = "has the labels of the scores in another order", "has other labels than the scores"
    meaning = "What is shown beside each score would belong to another sample."
    for part, features, found in (
        (scores, frame[::-1], reordered),
        (scores[1:4], frame[1:4][::-1], reordered),
        (scores[::-1], frame[::-1], reordered),  # five rows are those of the data, in the order of the data
        (scores[1:3], frame[3:], other),
        (scores, frame.rename("patient {}".format), other),
    ):
        invalid(lambda p=part, f=features: p.report(path, features=f), f"`features` {found}", meaning)
    error = invalid(lambda: scores[1:3].report(path, features=frame[2:4]), "other labels than the scores: 'dee'.")
    assert error.cure.startswith("Pass features.loc[scores.index], or")
    ages = shown_ages(
        scores[::-1], path, features=frame.rename("patient {}".format).to_dict("list")
    )  # as the cure says
    assert ages == frame["age"].to_dict()
    path.unlink()
    error = invalid(lambda: scores[::-1].report(path, features=frame[::-1]), reordered)
    assert error.cure.startswith("Pass features.loc[X.index], or")
    assert "names.to_list()" in invalid(lambda: scores.report(path, names=frame["age"][::-1]), reordered).cure
    backwards = {"age": frame["age"][::-1]}
    invalid(lambda: scores.report(path, features=backwards), f"`features['age']` {reordered}")
    for name in ("names", "groups"):
        invalid(lambda n=name: scores.report(path, **{n: frame["age"][::-1]}), f"`{name}` {reordered}")
    assert not path.exists()


def test_a_default_index_names_nobody(people, tmp_path):
    frame, _ = people
    path, plain = tmp_path / "report.html", frame.reset_index(drop=True)
    scores = score_people(plain)
    expected = {str(i): age for i, age in enumerate(frame["age"])}
    for features in (frame, plain):
        assert shown_ages(scores, path, features=features) == expected
    invalid(lambda: scores.report(path, features=plain.sort_values("age")), "`features` has the labels of the scores")
    invalid(lambda: scores[1:3].report(path, features=plain[3:]), "`features` has other labels than the scores: 3, 4.")
