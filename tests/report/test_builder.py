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
