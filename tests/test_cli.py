"""Commands about a user's own model, as a new user would try them: what they print, write, refuse."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

import dif
from dif.cli import app
from dif.description import TEMPLATE
from dif.report import Report

RUN = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "model.py"
    assert RUN.invoke(app, ["init", str(path)]).exit_code == 0
    return path


def refused(*command, words=()):
    result = RUN.invoke(app, [str(part) for part in command])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("dif: ")
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.output
    return result


def changed(path, old, new, name="other.py"):
    assert old in TEMPLATE
    other = path.with_name(name)
    other.write_text(TEMPLATE.replace(old, new))
    return other


def test_the_template_runs_and_is_not_overwritten(model):
    assert model.read_text() == TEMPLATE
    refused("init", model, words=["is there already"])


def test_check_says_so_in_words(model):
    result = RUN.invoke(app, ["check", str(model)])
    assert result.exit_code == 0
    assert "Is it a solution? Yes" in " ".join(result.output.split())
    assert "binding" in result.output
    assert "\x1b" not in result.output  # no colour in a pipe
    said = json.loads(RUN.invoke(app, ["check", str(model), "--json"]).output)
    assert said["holds"]
    assert [one["state"] for one in said["constraints"]] == ["binding", "inactive"]
    assert RUN.invoke(app, ["check", str(model), "--quiet"]).output == ""


def test_score_retrain_report(model, tmp_path):
    out = tmp_path / "results"
    result = RUN.invoke(app, ["score", str(model), "--target", "gap", "--top", "5", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.output.count("person ") == 5
    scores, report = dif.Influence.load(out / "scores.npz"), Report.load(out / "report.json")
    assert len(scores) == 200
    assert [one["index"] for one in report.samples[:5]] == [one.index for one in scores.top(5)]
    assert report.certificate["holds"]
    parts = np.array([one["parts"] for one in report.samples])
    np.testing.assert_allclose(parts.sum(1), [one["score"] for one in report.samples], atol=1e-12)

    command = ["retrain", str(model), "--target", "gap", "--top", "5", "--out", str(out), "--json"]
    said = json.loads(RUN.invoke(app, command).output)
    assert said["agreement"]["n"] == 5
    assert said["agreement"]["pearson"] > 0.99
    assert len(list((out / "retrained").glob("*.npz"))) == 5
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert RUN.invoke(app, ["report", str(out)]).exit_code == 0
    assert (out / "report.html").read_text() == page

    first = json.loads(RUN.invoke(app, [*command[:2], "--top", "5", "--out", str(out), "--json"]).output)
    assert first["target"] == "risk"  # another question: scored anew
    assert len(list((out / "retrained").glob("*.npz"))) > 5


@pytest.mark.parametrize("estimator", ["switching", "newton", "classical"])
def test_other_estimators(model, tmp_path, estimator):
    result = RUN.invoke(app, ["score", str(model), "--estimator", estimator, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.output)["samples"]) == 20


def test_what_is_wrong_is_said_in_one_line(model, tmp_path):
    missing = tmp_path / "nothing.py"
    broken = changed(model, "risk = train.mean()\n", "risk = tran.mean()\n", "broken.py")
    syntax = changed(model, "risk = train.mean()\n", "risk = = 1\n", "syntax.py")
    unsolved = changed(model, "solution = dif.fit(", "solution = (lambda p, w: dif.Solution(p, w))(", "unsolved.py")
    nameless = changed(model, "solution = dif.fit(", "answer = dif.fit(", "nameless.py")
    aimless = changed(model, "targets = {", "wishes = {", "aimless.py")
    vague = changed(model, '"risk": risk,', '"risk": 3.0,', "vague.py")
    short = changed(model, "range(len(train))", "range(7)", "short.py")
    leaving = changed(model, "import torch\n", "import sys\nsys.exit(3)\nimport torch\n", "leaving.py")
    for command in (["check"], ["score", "--out", str(tmp_path / "o")], ["retrain", "--out", str(tmp_path / "o")]):
        name, *more = command
        refused(name, missing, *more, words=["no file", "dif init"])
        refused(
            name, broken, *more, words=["NameError", "(line ", "It describes the model to dif, and is run for that."]
        )
        refused(name, syntax, *more, words=["SyntaxError"])
        refused(name, unsolved, *more, words=["KKT residual", "dif.fit(problem, solution.params)"])
        refused(name, nameless, *more, words=["`solution`", "missing", "The file describes the model to dif."])
        refused(name, aimless, *more, words=["`targets`", "a dict of names and targets"])
        refused(name, vague, *more, words=["targets['risk']", "float"])
        refused(name, short, *more, words=["7 entries", "They are shown beside the samples."])
        refused(name, leaving, *more, words=["SystemExit"])
    for name in ("score", "retrain"):
        words = ["'loss'", "'risk', 'gap'", "The file defines no such target."]
        refused(name, model, "--target", "loss", "--out", tmp_path, words=words)
        occupied = tmp_path / "occupied"
        occupied.write_text("")
        refused(name, model, "--out", occupied / "deeper", words=["occupied"])
    refused("report", tmp_path / "empty", words=["no report.json", "dif score FILE"])
    (tmp_path / "report.json").write_text("{}")
    refused("report", tmp_path, words=["It was not written by `dif score`, is damaged, or comes from another version."])


def test_debug_shows_the_traceback(model):
    broken = changed(model, "risk = train.mean()\n", "risk = tran.mean()\n", "broken.py")
    command = [sys.executable, "-c", "from dif.cli import app; app()", "--debug", "check", str(broken)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" in result.stderr
    assert "tran" in result.stderr
    assert result.returncode == 1


def test_an_interrupted_farm_goes_on(model, tmp_path):
    command = [sys.executable, "-c", "from dif.cli import app; app()", "retrain", str(model), "--top", "150", "--out"]
    process = subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    kept, limit = tmp_path / "retrained", time.time() + 120
    while len(list(kept.glob("*.npz"))) < 10 and process.poll() is None and time.time() < limit:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    done = {path.name: path.stat().st_mtime_ns for path in kept.glob("*.npz")}
    if len(done) < 150:
        assert process.returncode == 130
        assert said.strip() == "dif: interrupted; finished parts are kept, the same command goes on from there"
    result = subprocess.run([*command, str(tmp_path)], capture_output=True, check=False, env=os.environ)
    assert result.returncode == 0
    after = {path.name: path.stat().st_mtime_ns for path in kept.glob("*.npz")}
    assert len(after) == 150
    assert {name: after[name] for name in done} == done


def test_the_example_that_comes_with_dif():
    from importlib.resources import as_file, files

    with as_file(files("dif") / "examples" / "credit.py") as path:
        said = json.loads(RUN.invoke(app, ["check", str(path), "--json"]).output)
    assert said["holds"]
    assert [one["state"] for one in said["constraints"]] == ["binding", "inactive"]


def test_help_teaches():
    for command in ("init", "check", "score", "retrain", "report", "demo"):
        assert "Example: dif " in RUN.invoke(app, [command, "--help"]).output
