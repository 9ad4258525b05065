"""The folder of results: kept fits, several targets and runs in one report, and what an interrupted run says."""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from problems import retrainings
from typer.testing import CliRunner

import dif
from dif.cli import analysis, app, check, results_folder, retrain, score
from dif.cli.description import TEMPLATE
from dif.cli.results_folder import ResultsFolder
from dif.report.builder import Report, load_reports
from dif.runtime.archive import lock_folder

RUN = CliRunner()
SMALL = TEMPLATE.replace("600", "60").replace("dif.ridge(1e-2)", "dif.ridge(1e-1)")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SMALL)
    return path


@pytest.fixture
def fits(monkeypatch):
    """How many times a model was fitted."""
    counted = []

    def count(*words, **options):
        counted.append(words)
        return dif.solving.fit.fit(*words, **options)

    monkeypatch.setattr(results_folder, "fit", count)
    return counted


def ask(command, file, *options, out=None):
    """Return what a command answers as JSON."""
    words = [command, str(file), "--out", str(out or file.parent / "out"), "--json", *options]
    result = RUN.invoke(app, words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def scores_of(file, answer):
    return dif.Influence.load(answer["scores"]).values


def test_the_fit_is_kept_until_the_file_or_the_data_change(file, fits):
    (file.parent / "data.txt").write_text("0")
    file.write_text(
        SMALL.replace("torch.manual_seed(0)", f"torch.manual_seed(int(open('{file.parent}/data.txt').read()))")
    )
    first = ask("score", file)
    assert len(fits) == 1
    ask("check", file)
    again = ask("score", file)
    assert len(fits) == 1
    assert scores_of(file, again).equal(scores_of(file, first))  # to the last bit
    (file.parent / "data.txt").write_text("1")  # other data, the same file
    other = ask("score", file)
    assert len(fits) == 2
    assert other["value"] != first["value"]
    file.write_text(file.read_text() + "# another file, the same data\n")
    assert ask("score", file)["value"] == other["value"]
    assert len(fits) == 3
    assert len(list((file.parent / "out" / "fits").glob("*.npz"))) == 1  # those of earlier versions are gone


def test_a_damaged_kept_fit_is_not_used(file, fits):
    first = ask("score", file)
    (kept,) = (file.parent / "out" / "fits").glob("*.npz")
    kept.write_bytes(b"damaged")
    assert ask("score", file)["samples"] == first["samples"]
    assert len(fits) == 2


@pytest.mark.parametrize("lost", ["missing", "damaged", "another"])
def test_scores_beside_the_report_are_those_it_lists(file, lost):
    gap, risk = ask("score", file, "--target", "gap"), ask("score", file, "--target", "risk")
    path, whole = Path(risk["scores"]), scores_of(file, risk)
    damages = {"missing": path.unlink, "damaged": lambda: path.write_bytes(b"damaged")}
    damages.get(lost, lambda: path.write_bytes(Path(gap["scores"]).read_bytes()))()
    ask("retrain", file, "--target", "risk", "--top", "2")
    assert scores_of(file, risk).equal(whole)


def test_the_kept_fit_is_named(file):
    words = ["score", str(file), "--out", str(file.parent / "out")]
    assert "kept fit" not in RUN.invoke(app, words).stderr
    assert "The kept fit was used: neither the model file nor its data have changed." in RUN.invoke(app, words).stderr
    assert RUN.invoke(app, [*words, "--quiet"]).output == ""


def test_a_warning_of_fit_is_shown_each_time(file, fits, monkeypatch):
    def warn(*words, **options):
        dif.errors.warn("`fit` stopped early.", dif.NotConvergedWarning)
        fits.append(words)
        return dif.solving.fit.fit(*words, **options)

    monkeypatch.setattr(results_folder, "fit", warn)
    words = ["check", str(file), "--out", str(file.parent / "out")]
    for _ in range(2):
        assert "dif: Note: `fit` stopped early.\n" in RUN.invoke(app, words).stderr
    assert len(fits) == 1
    assert RUN.invoke(app, [*words, "--quiet"]).stderr == ""


def test_targets_and_estimators_live_in_one_report(file):
    out = file.parent / "out"
    risk, gap = ask("score", file, "--target", "risk"), ask("score", file, "--target", "gap")
    newton = ask("retrain", file, "--target", "gap", "--estimator", "newton", "--top", "4")
    assert newton["estimator"] == "Newton"
    assert newton["agreement"]["relative_error"] < 0.02
    reports = load_reports(out / "report.json")
    assert [(r.target, r.method) for r in reports] == [("risk", "dif"), ("gap", "dif"), ("gap", "newton")]
    assert Report.load(out / "report.json", "risk").value == risk["value"]
    with pytest.raises(dif.InvalidInputError, match=r"has no answer about 'loss'\. Run `dif score` with that target"):
        Report.load(out / "report.json", "loss")
    assert len({gap["scores"], risk["scores"], newton["scores"]}) == 3
    page = (out / "report.html").read_text()
    assert page.count("data-choice=") == 3


def test_score_keeps_what_retrain_found(file):
    found = ask("retrain", file, "--target", "gap", "--top", "3")["samples"][:3]
    assert all(sample["actual"] is not None for sample in found)
    again = ask("score", file, "--target", "gap")
    assert again["samples"][:3] == found
    assert again["agreement"]["n"] == 3
    other = ask("score", file, "--target", "gap", "--estimator", "newton")["samples"]
    known = {sample["index"]: sample["actual"] for sample in other if sample["actual"] is not None}
    assert known == {sample["index"]: sample["actual"] for sample in found}  # whatever predicts them
    assert ask("score", file, "--target", "risk")["agreement"] is None
    file.write_text(SMALL.replace("dif.ridge(1e-1)", "dif.ridge(2e-1)"))  # another model: nothing of it is known
    assert ask("score", file, "--target", "gap")["agreement"] is None


def test_people_without_a_prediction_come_first_and_are_retrained(file, monkeypatch):
    """The two strongest have none, as where a path ends early; what the folder knows of them is not done again."""
    strongest = [sample["index"] for sample in ask("score", file, "--top", "2")["samples"]]
    ask("retrain", file, "--top", "1")
    cured = file.parent / "out" / "retrained"

    def lose(self, targets, removals, **options):
        found = dif.DirectionalInfluence(self.solution).scores(targets, removals, **options)
        values = found.stored.clone()
        values[strongest] = float("nan")
        reasons = {found.perturbations[i]: "The path ends early." for i in strongest}
        return replace(found, stored=values, diagnostics=found.diagnostics | {"unanswered": reasons})

    monkeypatch.setattr(dif.AdaptiveInfluence, "scores", lose)
    assert len(retrainings(cured)) == 1
    found = ask("score", file, "--accuracy", "0.05", "--top", "5")
    assert len(retrainings(cured)) == 2  # one of the two was there
    first, others = found["samples"][:2], found["samples"][2:]
    assert sorted(sample["index"] for sample in first) == sorted(strongest)
    assert all(sample["score"] is None and sample["actual"] is not None for sample in first)
    assert all(sample["score"] is not None and sample["actual"] is None for sample in others)
    assert found["verdict"]["sign"] == "good"
    said = "2 removals have no answer: The path ends early. The model was trained again without each of them."
    assert said in found["verdict"]["words"]
    again = ask("retrain", file, "--accuracy", "0.05", "--top", "3")
    assert again["samples"][:2] == first
    assert [sample["actual"] is None for sample in again["samples"]] == [False] * 3
    assert again["agreement"] is None  # of one pair


def test_an_answer_about_an_earlier_version_is_kept_and_named(file):
    ask("score", file, "--target", "risk")
    file.write_text(SMALL.replace("dif.ridge(1e-1)", "dif.ridge(2e-1)"))
    ask("score", file, "--target", "gap")
    page = (file.parent / "out" / "report.html").read_text()
    assert page.count("This answer is about an earlier version of the model file or of the data.") == 1
    current, old = re.findall("<button type=.button. data-choice=.*?</button>", page)
    assert "✓</span> gap <small>DIF</small>" in current
    assert "!</span> risk <small>DIF, earlier version</small>" in old
    assert "<code>dif retrain</code> verifies the strongest." in page
    ask("score", file, "--target", "risk")
    assert "earlier version" not in (file.parent / "out" / "report.html").read_text()


def test_another_model_file_is_refused(file):
    ask("score", file)
    other = file.with_name("other.py")
    other.write_text(SMALL.replace("dif.ridge(1e-1)", "dif.ridge(2e-1)"))
    result = RUN.invoke(app, ["score", str(other), "--out", str(file.parent / "out")])
    assert result.exit_code == 2
    assert "holds results on another model file, 'mine.py'. Choose another folder with --out" in result.stderr
    assert len(load_reports(file.parent / "out" / "report.json")) == 1
    other.write_text(file.read_text())  # the same model
    ask("score", other, out=file.parent / "out")


def test_a_missing_file_is_named_before_other_results(file):
    ask("score", file)
    out = file.parent / "out"
    for wrong, said in ((file.with_name("none.py"), "There is no file "), (file.parent, "is a folder.")):
        for folder in (out, file.parent / "new"):
            result = RUN.invoke(app, ["score", str(wrong), "--out", str(folder)])
            assert result.exit_code == 2
            assert said in result.stderr
            assert "another model file" not in result.stderr
    assert not (file.parent / "new").exists()


def test_a_report_of_another_version_is_refused_before_any_work(file, fits):
    out = file.parent / "out"
    out.mkdir()
    (out / "report.json").write_text('{"format": "dif report 2"}')
    result = RUN.invoke(app, ["score", str(file), "--out", str(out)])
    assert result.exit_code == 2
    assert "Delete it and run `dif score` again, or choose another folder with --out." in result.stderr
    assert not fits


def test_hostile_target_names_stay_in_the_folder(file):
    file.write_text(SMALL.replace('"risk": risk', '"../../risk <b>": risk'))
    answer = ask("score", file)
    assert answer["target"] == "../../risk <b>"
    assert [path.name[:7] for path in (file.parent / "out" / "scores").iterdir()] == ["risk-b-"]
    assert {path.name for path in file.parent.iterdir()} == {"mine.py", "out"}


def test_runs_at_the_same_time_lose_nothing(file):
    """Each run adds its answer while the others do, so the last one to write must have read those of all others."""
    out, names = file.parent / "out", [f"t{k}" for k in range(6)]
    ask("retrain", file, "--top", "2")
    template = Report.load(out / "report.json")
    folder = ResultsFolder(out, file)
    together = threading.Barrier(len(names))

    def add(name):
        together.wait()
        folder.add(replace(template, target=name, mark=name))

    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(r.target for r in load_reports(out / "report.json")) == ["risk", *names]
    page = (out / "report.html").read_text()
    assert all(f"predictions for {name} be trusted" in page for name in names)


def test_a_second_run_is_told_of_the_first(file):
    out = file.parent / "out"
    out.mkdir()
    with lock_folder(out, ".in-use", wait=False) as alone:
        assert alone
        result = RUN.invoke(app, ["score", str(file), "--out", str(out)])
    assert result.exit_code == 0
    assert f"dif: Note: Another run of dif is using {str(out)!r}. The answers of both are kept." in result.stderr
    assert "Another run" not in RUN.invoke(app, ["score", str(file), "--out", str(out)]).stderr


def test_a_lock_keeps_others_waiting(tmp_path):
    order = []

    def enter():
        with lock_folder(tmp_path):
            order.append("second")

    with lock_folder(tmp_path):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def interrupt(monkeypatch, place, name, words):
    """Return what a command says that is interrupted when it calls a function."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, name, stop)
        result = RUN.invoke(app, words)
    assert result.exit_code == 130
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("dif: ").strip()


def test_an_interrupted_run_says_what_is_true(file, monkeypatch):
    out = file.parent / "out"
    words = ["retrain", str(file), "--top", "3", "--out", str(out)]
    said = interrupt(monkeypatch, results_folder, "fit", words)
    assert said == "Interrupted while running the model file. Nothing new was kept. The same command starts again."
    assert not list(out.rglob("*.npz"))
    said = interrupt(monkeypatch, analysis, "_score_all", words)
    assert said == "Interrupted while scoring. The fit is kept. The same command starts again with that fit."
    assert len(list(out.rglob("*.npz"))) == 1
    said = interrupt(monkeypatch, dif.Retraining, "scores", words)
    assert said == (
        "Interrupted while retraining. 0 of 3 retrainings are kept. The same command continues with the others."
    )
    assert len(Report.load(out / "report.json").samples) == 60
    said = interrupt(monkeypatch, Report, "with_actual", words)
    assert said == (
        "Interrupted while writing the report. 3 of 3 retrainings are kept. Run the same command again to complete the "
        "report."
    )
    assert len(retrainings(out / "retrained")) == 3


def test_an_interrupted_fit_is_continued(file, monkeypatch):
    """It stops after its first save and goes on from there."""
    from dif.solving.fit import Checkpoint

    words = ["check", str(file), "--out", str(file.parent / "out")]
    save, loaded = Checkpoint.save, []

    def save_and_stop(*state):
        save(*state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", save_and_stop)
        result = RUN.invoke(app, words)
    assert result.exit_code == 130
    assert result.stderr == (
        "dif: Interrupted while running the model file. The unfinished fit is kept; the same command continues it.\n"
    )
    load = Checkpoint.load
    monkeypatch.setattr(Checkpoint, "load", lambda file: loaded.append(load(file)) or loaded[-1])
    assert RUN.invoke(app, words).exit_code == 0
    assert float(loaded[0].theta.norm()) > 0
    assert not list((file.parent / "out" / "fits").glob("*unfinished*"))


def test_the_commands_that_are_documented_exist():
    for command in (check, score, retrain):
        assert "--out" in RUN.invoke(app, [command.__name__, "--help"]).output
    assert "--estimator" in RUN.invoke(app, ["retrain", "--help"]).output
