"""The report as HTML: constraints in formulas and words, the CSV, what made it, and hostile labels as plain text."""

import base64
import csv
import io
from html.parser import HTMLParser

import pytest
import torch

import dif
from dif.report import write_report
from dif.report.builder import build_reports, load_reports, save_reports
from dif.report.subjects import SampleSets, Subjects
from dif.report.words import explain_constraint, format_number, format_percent, write_formulas

EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """The elements of a page, with their attributes and their text."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, **dict(attrs), "text": ""}
        self.elements.append(element)
        if tag not in ("meta", "input", "br"):
            self.open.append(element)

    def handle_endtag(self, tag):
        while self.open and self.open.pop()["tag"] != tag:
            pass

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data.replace("\xa0", " ")

    def find(self, **wanted):
        return [e for e in self.elements if all(e.get(key) == value for key, value in wanted.items())]


def build():
    """A regression with one constraint of each kind, and labels that would do harm as markup."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    y = X @ torch.tensor([1.0, -1.0]).double() + 0.1 * torch.randn(40, generator=generator, dtype=torch.float64)
    group = torch.arange(40) % 2
    train = dif.Samples(lambda p, z: (z[0] @ p["w"] - z[1]) ** 2, (X, y), name="train")
    constraints = [
        (dif.linear([1.0, 0.0]) <= 0.5).named(f"cap {EVIL}"),
        (dif.linear([0.0, 2.0]) >= -9.0).named("floor"),
        (train.mean(where=group == 1) - train.mean() <= 3.0).named("fair"),
    ]
    solution = dif.fit(dif.Problem(train.mean(), constraints), {"w": torch.zeros(2).double()}, show_progress=False)
    return train, group, solution


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    train, group, solution = build()
    targets = {"risk": train.mean(), EVIL: train.mean(where=group == 0)}
    removals = train.remove_each()
    scores = dif.DirectionalInfluence(solution).scores(list(targets.values()), removals, show_progress=False)
    scores = dif.Influence(scores.stored, removals, tuple(targets), scores.estimator, scores.diagnostics)
    few = train.remove_each([3, 8])
    actual = dif.Retraining(solution).scores(list(targets.values()), few, show_progress=False)
    actual = dif.Influence(actual.stored, few, tuple(targets), actual.estimator, actual.diagnostics)
    path = write_report(
        tmp_path_factory.mktemp("report") / "report.html",
        scores,
        solution,
        targets=targets,
        retrained=actual,
        names=["=1+1", EVIL, *(f"person {i}" for i in range(2, 40))],
        groups=[f"g{int(g)}" for g in group],
        features={"x": range(40), EVIL: ["-0.5"] * 40},
        title="regression",
    )
    return path, scores, actual, solution


def test_constraints_have_a_formula_a_value_a_limit_and_words(written):
    page, (_, _, _, solution) = Page(written[0]), written
    first = [e for e in page.find(tag="td") if e.get("data-label") == "rule"][:3]
    assert [e["text"] for e in first] == [
        "w[0] ≤ 0.5",
        "2·w[1] ≥ −9",
        "mean loss of train over group g1 (20 samples) − mean loss of train ≤ 3",
    ]
    values = [e["text"] for e in page.find(tag="td", **{"data-label": "value"})][:3]
    w = solution.params["w"]
    assert values[:2] == ["0.5", format_number(2 * float(w[1]))]
    assert [e["text"] for e in page.find(tag="td", **{"data-label": "limit"})][:3] == ["≤ 0.5", "≥ −9", "≤ 3"]
    words = [e["text"] for e in page.find(tag="td", **{"data-label": "in words"})][:3]
    price = 0.05 * float(solution.lam[0])
    assert words[0].startswith(
        "The limit is reached, and it shapes the model. Loosening it by 0.05 (10 % of it) would "
    )
    assert f"lower the objective by about {format_number(price)} (" in words[0]
    room = 9 + 2 * float(w[1])
    assert f"There is room of {format_number(room)}, {format_percent(room / 9)} of the limit." in words[1]


def test_the_price_in_words_is_that_of_another_fit(written):
    """Loosening the bound as the words say lowers the objective by nearly as much as they say."""
    train, _, solution = build()
    looser = dif.Problem(train.mean(), [dif.linear([1.0, 0.0]) <= 0.501, *solution.problem.constraints[1:]])
    after = dif.fit(looser, solution.params, show_progress=False)
    assert solution.objective - after.objective == pytest.approx(0.001 * float(solution.lam[0]), rel=0.01)


def test_the_csv_has_the_values_of_the_page(written):
    page, (_, scores, actual, _) = Page(written[0]), written
    links = page.find(tag="a", **{"class": "csv"})
    assert [link["download"] for link in links] == ["regression-risk.csv", f"regression-{EVIL}.csv"]
    for column, link in enumerate(links):
        text = base64.b64decode(link["href"].partition("base64,")[2]).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text)))
        places = {name: i for i, name in enumerate(["'=1+1", EVIL, *(f"person {i}" for i in range(2, 40))])}
        assert len(rows) == 40
        for row in rows:
            i = places[row["sample"]]
            assert float(row["predicted change"]) == float(scores.values[i, column])  # in full precision
            assert (row["group"], row["feature x"]) == (f"g{i % 2}", str(i))
            assert row[f"feature {EVIL}"] == "-0.5"  # a number, not a formula
        found = {places[r["sample"]]: float(r["retrained change"]) for r in rows if r["retrained change"]}
        assert found == {3: float(actual.values[0, column]), 8: float(actual.values[1, column])}


def test_labels_are_text_and_nothing_is_loaded(written):
    page = Page(written[0])
    assert len(page.find(tag="script")) == 2
    assert page.find(tag="nav")[0]["text"].count(EVIL) == 1
    assert any(EVIL in e["text"] for e in page.find(tag="th"))
    for element in page.elements:
        assert not any(key.startswith("on") for key in element)
        for key in ("src", "href"):
            assert element.get(key, "#").startswith(("#", "data:text/csv"))


def test_the_head_says_what_made_it(written):
    page = Page(written[0])
    (made,) = page.find(tag="p", **{"class": "made"})
    assert made["text"].startswith("20")
    assert f"dif {dif.__version__}" in made["text"]
    everything = page.find(tag="main")[0]["text"]
    assert "SHA-256 of the data" in everything
    assert torch.__version__ in everything
    assert page.find(tag="title")[0]["text"] == f"regression: influence on risk, {EVIL}"
    explained = [e["text"] for e in page.find(tag="dt")]
    assert {"score", "multiplier λ", "KKT residual", "binding", "slope"} <= set(explained)
    folded = page.find(tag="summary")
    assert [e["text"] for e in folded][-2:] == ["What the words mean", "How this report was made"]
    verdict = written[0].read_text().index('class="verdict')
    assert verdict < written[0].read_text().index("Constraints</h2>") < written[0].read_text().index("<table")


def test_a_report_of_groups_and_of_scores_from_a_file(written, tmp_path):
    """What is perturbed need not be one sample, and labels are enough."""
    train, _, solution = build()
    groups = dif.DirectionalInfluence(solution).scores(
        train.mean(), train.remove_groups([[1, 2], [5]]) + 0 * train.remove([0]), show_progress=False
    )
    text = write_report(tmp_path / "groups.html", groups, solution, names=["two", "one"]).read_text()
    assert '"name": "two"' in text
    written[1].save(tmp_path / "scores.npz")
    loaded = dif.Influence.load(tmp_path / "scores.npz")
    assert '"name": "train[7]"' in write_report(tmp_path / "loaded.html", loaded, solution).read_text()


def test_what_is_saved_is_what_is_read(written, tmp_path):
    _, scores, actual, solution = written
    subjects = Subjects.of(scores.carried_out, solution)
    report = build_reports(scores, subjects, [None, None], title="x")[0].with_actual([3, 8], actual)
    save_reports(tmp_path / "report.json", [report])
    assert load_reports(tmp_path / "report.json") == [report]
    again = report.with_retrained([{"index": 3, "actual": 7.0, "failed": ""}])
    assert again.retrained[0]["actual"] == 7.0
    assert len(again.retrained) == 2


def test_formulas_without_names_for_the_groups():
    train, _, solution = build()
    unknown = SampleSets.of(None, None, {})
    formula = "mean loss of train over 20 samples (1, 3, 5, …) − mean loss of train ≤ 3"
    assert write_formulas(solution, unknown)[2] == formula
    wide = dif.Problem(train.mean() + dif.ridge(1.0), [dif.linear(torch.ones(2, 2)) == torch.tensor([1.0, 1.0])])
    point = dif.Solution(wide, {"w": torch.full((2,), 0.5).double()}, [[0.0, 0.0]])
    assert write_formulas(point, unknown) == ["w[0] + w[1] = 1"] * 2


def test_sets_of_samples_have_names():
    """The sets over which equalised odds takes its means: a group among one of the labels, and all with that label."""
    train, group, _ = build()
    label, region = torch.arange(40) % 3 == 0, ["north", "south"] * 20
    sets = SampleSets.of(train, group.tolist(), {"label": label.long(), "x": range(40)})
    for members, name in (
        (torch.nonzero(label & (group == 1)), "label = 1, group 1 (7 samples)"),
        (torch.nonzero(~label), "label = 0 (26 samples)"),
        (torch.nonzero(group == 0), "group 0 (20 samples)"),
        (torch.tensor([[3], [8]]), "2 samples (3, 8)"),
    ):
        assert sets.describe(train, members.reshape(-1).tolist()) == name
    called = SampleSets.of(train, [f"Group {int(g)}" for g in group], {"region": region})
    assert called.describe(train, list(range(0, 40, 2))) == "region = north (20 samples)"
    assert called.describe(train, [0]) == "1 sample (0)"
    for nothing in (None, float("nan"), torch.tensor(float("nan"))):  # a missing value names no set
        partial = SampleSets.of(train, None, {"text": ["a", nothing] * 20})
        assert partial.describe(train, list(range(0, 40, 2))) == "text = a (20 samples)"
        assert partial.describe(train, list(range(1, 40, 2))) == "20 samples (1, 3, 5, …)"
    other = dif.Samples(train.loss, (torch.zeros(40, 2), torch.zeros(40)), name="other")
    assert called.describe(other, [0, 2, 4, 6]) == "4 samples (0, 2, 4, …)"  # the columns are about other samples


def test_labels_in_the_data_name_the_sets_of_equalised_odds(tmp_path):
    from dif import fairness

    group = torch.arange(40) % 2
    y = (torch.arange(40) % 4 < 2).double()
    data = (torch.randn(40, 2, generator=torch.Generator().manual_seed(1)).double(), y)
    people = dif.Samples(lambda p, z: (z[0] @ p["w"] - z[1]) ** 2, data, name="people")
    rules = fairness.equalised_odds(
        people, lambda p, z: z[0] @ p["w"], labels=y, sensitive_features=group.tolist(), bound=0.5
    )
    solution = dif.fit(dif.Problem(people.mean(), rules), {"w": torch.zeros(2).double()}, show_progress=False)
    scores = dif.DirectionalInfluence(solution).scores({"risk": people.mean()}, people.remove_each([0, 1]))
    path = write_report(tmp_path / "report.html", scores, groups=group)
    shown = [e["text"] for e in Page(path).find(tag="td") if e.get("data-label") == "rule"]
    assert "mean of probability of people over z1 = 0, group 1 (10 samples)" in shown[0]
    assert "− mean of probability of people over z1 = 0 (20 samples) ≤ 0.5" in shown[0]
    assert [e["text"] for e in Page(path).find(tag="th") if "equalised odds, label 0" in e["text"]]


ROW = {"relation": "≤", "state": "inactive", "slack": 0.5, "limit": 2.0, "multiplier": 0.0, "uncertain": False}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "The limit is not reached, so it does not shape the model. There is room of 0.5, 25 % of the limit."),
        ({"largest": 0.6}, "Without a single sample it may be reached."),
        ({"state": "weak", "slack": 0.0}, "The limit is just reached without shaping the model"),
        ({"state": "violated", "slack": -0.1}, "Violated by 0.1."),
        ({"state": "violated", "slack": 0.1, "relation": "="}, "Violated by 0.1."),
        ({"state": "binding", "slack": 0.0, "multiplier": 3.0}, "by about 0.6 (15 %)."),
        ({"state": "binding", "slack": 0.0, "multiplier": 3.0, "largest": 4.0}, "it may no longer be reached."),
        ({"state": "binding", "slack": 0.0, "multiplier": 3.0, "limit": 0.0}, "Loosening it by 0.01 would lower the"),
        ({"relation": "=", "multiplier": -3.0}, "Must be met exactly, so it always shapes the model. Moving it by 0.2"),
        ({"uncertain": True}, "Whether it is reached is uncertain."),
    ],
)
def test_constraints_in_words(changes, words):
    assert words in explain_constraint({**ROW, "largest": None, **changes}, 4.0)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"), (-0.0, "0"), (1.0, "1"), (0.02, "0.02"), (-0.000123456, "−0.0001235"), (99999.6, "100000"),
        (1234.5678, "1235"), (12.30001, "12.3"), (2.5e-7, "2.5e−7"), (-3e9, "−3e9"), (None, "—"), (float("nan"), "—"),
    ],
)  # fmt: skip
def test_numbers_have_one_format(number, text):
    assert format_number(number) == text
