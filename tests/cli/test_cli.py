"""Commands about a user's own model, as a new user would try them: output, files and error messages."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from problems import retrainings
from typer.testing import CliRunner

import dif
from dif.cli import app, main
from dif.cli.description import TEMPLATE, Description
from dif.report.builder import Report, write_html

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


def change_template(path, old, new, name="other.py"):
    assert old in TEMPLATE
    other = path.with_name(name)
    other.write_text(TEMPLATE.replace(old, new))
    return other


def test_the_template_runs_and_is_not_overwritten(model):
    assert model.read_text() == TEMPLATE
    refused("init", model, words=["already exists and is not overwritten"])


def test_check_prints_the_certificate(model, tmp_path):
    folder = ["--out", str(tmp_path)]
    result = RUN.invoke(app, ["check", str(model), *folder])
    assert result.exit_code == 0
    assert "Is it a solution?" in result.output
    assert "optimality" in result.output
    assert "binding" in result.output
    assert "\x1b" not in result.output  # no colour in a pipe
    output = json.loads(RUN.invoke(app, ["check", str(model), "--json", *folder]).output)
    assert output["holds"]
    assert [row["state"] for row in output["constraints"]] == ["binding", "inactive", "inactive"]
    assert RUN.invoke(app, ["check", str(model), "--quiet", *folder]).output == ""


def test_score_retrain_report(model, tmp_path):
    out = tmp_path / "results"
    result = RUN.invoke(app, ["score", str(model), "--target", "gap", "--top", "5", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.output.count("person ") == 5
    scores, report = dif.Influence.load(out / "scores" / "gap-dif.npz"), Report.load(out / "report.json")
    assert len(scores) == 600
    assert [sample["index"] for sample in report.samples[:5]] == [sample.index for sample in scores.top(5)]
    assert report.certificate["holds"]
    parts = np.array([sample["parts"] for sample in report.samples])
    np.testing.assert_allclose(parts.sum(1), [sample["score"] for sample in report.samples], atol=1e-12)

    command = ["retrain", str(model), "--target", "gap", "--top", "5", "--out", str(out), "--json"]
    output = json.loads(RUN.invoke(app, command).output)
    assert output["agreement"]["n"] == 5
    assert output["agreement"]["pearson"] > 0.99
    assert len(retrainings(out / "retrained")) == 5
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert RUN.invoke(app, ["report", str(out)]).exit_code == 0
    assert (out / "report.html").read_text() == page

    first = json.loads(RUN.invoke(app, [*command[:2], "--top", "8", "--out", str(out), "--json"]).output)
    assert first["target"] == "risk"  # another question
    assert len(retrainings(out / "retrained")) > 5


@pytest.mark.parametrize("estimator", ["derivative", "switching", "newton", "classical"])
def test_other_estimators(model, tmp_path, estimator):
    result = RUN.invoke(app, ["score", str(model), "--estimator", estimator, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert len(output["samples"]) == 20
    assert output["verdict"]["sign"] == ("bad" if estimator == "classical" else "good")


def test_scores_that_cannot_be_trusted_are_marked(model, tmp_path):
    command = ["score", str(model), "--top", "3", "--out", str(tmp_path)]
    assert "?" not in RUN.invoke(app, command).output
    doubtful = RUN.invoke(app, [*command, "--estimator", "classical"]).output
    assert doubtful.count(" ? ") == 3
    assert "?: a prediction that cannot be trusted" in doubtful


def test_errors_are_printed_on_one_line(model, tmp_path):
    missing = tmp_path / "nothing.py"
    broken = change_template(model, "risk = train.mean()\n", "risk = tran.mean()\n", "broken.py")
    syntax = change_template(model, "risk = train.mean()\n", "risk = = 1\n", "syntax.py")
    unsolved = change_template(
        model, "solution = dif.fit(", "solution = (lambda p, w: dif.Solution(p, w))(", "unsolved.py"
    )
    nameless = change_template(model, "solution = dif.fit(", "answer = dif.fit(", "nameless.py")
    aimless = change_template(model, "targets = {", "wishes = {", "aimless.py")
    vague = change_template(model, '"risk": risk,', '"risk": 3.0,', "vague.py")
    short = change_template(model, "range(len(train))", "range(7)", "short.py")
    leaving = change_template(model, "import torch\n", "import sys\nsys.exit(3)\nimport torch\n", "leaving.py")
    for command in ([name, "--out", str(tmp_path / "o")] for name in ("check", "score", "retrain")):
        name, *more = command
        refused(name, missing, *more, words=["no file", "dif init"])
        refused(name, broken, *more, words=["NameError", "(line ", "Correct it until `python "])
        refused(name, syntax, *more, words=["SyntaxError"])
        refused(name, unsolved, *more, words=["KKT residual", "dif.fit(problem, solution.params)"])
        refused(
            name,
            nameless,
            *more,
            words=[
                f"{nameless} defines no `solution`; it must be a dif.Solution.",
                "Add `solution = dif.fit(problem, params)` at the top level",
            ],
        )
        if name != "check":  # which needs no target
            refused(name, aimless, *more, words=["defines no `targets`; it must be a dict of names and targets."])
            refused(name, vague, *more, words=["`targets['risk']` in", "has type float; it must be a dif.Term"])
        refused(name, tmp_path, *more, words=["is a folder"])
        refused(name, short, *more, words=["`names` in", "has 7 entries; it must be a list"])
        refused(name, leaving, *more, words=["SystemExit"])
    for name in ("score", "retrain"):
        words = ["defines no target 'loss'. Its targets are 'risk', 'gap'; use one of these"]
        refused(name, model, "--target", "loss", "--out", tmp_path, words=words)
        occupied = tmp_path / "occupied"
        occupied.write_text("")
        refused(name, model, "--out", occupied / "deeper", words=["Cannot write into", "--out"])
    refused("report", tmp_path / "empty", words=["There is no report.json in", "dif score FILE"])
    (tmp_path / "report.json").write_text("{}")
    refused(
        "report",
        tmp_path,
        words=["report.json' is damaged, or was not written by dif: KeyError: 'checksum'. Delete it and"],
    )


def test_without_an_active_constraint(model, tmp_path):
    loose = change_template(model, "risk + 0.02", "risk + 5.0", "loose.py")
    output = json.loads(RUN.invoke(app, ["retrain", str(loose), "--top", "4", "--out", str(tmp_path), "--json"]).stdout)
    assert output["agreement"]["n"] == 4
    report = Report.load(tmp_path / "report.json")
    parts, scores = (np.array([sample[key] for sample in report.samples]) for key in ("parts", "score"))
    assert not parts[:, 1:].any()
    np.testing.assert_allclose(parts[:, 0], scores, rtol=1e-12)


def test_a_file_is_run_once_and_its_prints_are_not_the_answer(model, tmp_path):
    counted = tmp_path / "counted.txt"
    extra = f"print('hello')\nopen({str(counted)!r}, 'a').write('x')\nimport torch\n"
    unseeded = change_template(model, "import torch\n", extra, "unseeded.py")
    unseeded.write_text(
        unseeded.read_text().replace("torch.manual_seed(0)", f"torch.manual_seed(len(open({str(counted)!r}).read()))")
    )
    result = RUN.invoke(app, ["retrain", str(unseeded), "--top", "4", "--out", str(tmp_path / "o"), "--json"])
    assert counted.read_text() == "x"
    assert json.loads(result.stdout)["agreement"]["pearson"] > 0.9


def test_what_was_found_for_another_model_is_not_reused(tmp_path):
    model = tmp_path / "model.py"

    def actual(old, new):
        change_template(model, old, new, "model.py")  # the user edits the file
        command = ["retrain", str(model), "--target", "gap", "--top", "3", "--out", str(tmp_path), "--json"]
        return json.loads(RUN.invoke(app, command).stdout)

    first = actual("person", "person")
    gap = "train.mean(where=group == 1) - train.mean(where=group == 0)"
    other = actual(gap, f"10 * ({gap})")
    assert other["value"] == pytest.approx(10 * first["value"])
    assert other["samples"][0]["score"] == pytest.approx(10 * first["samples"][0]["score"])
    renamed = actual("person", "client")
    assert renamed["samples"][0]["name"].startswith("client")
    kept = len(retrainings(tmp_path / "retrained"))
    actual("    [(train", "    [(train.mean() <= 9.0).named('far')] + [(train")
    assert len(retrainings(tmp_path / "retrained")) == kept + 3  # another problem, the same solution


def test_changes_of_the_size_of_rounding_are_not_ranked_in_silence(model, tmp_path):
    flat = change_template(model, '"risk": risk,', '"risk": dif.linear([0.0, 0.0, 0.0]),', "flat.py")
    command = ["retrain", str(flat), "--top", "4", "--out", str(tmp_path)]
    assert "so there is no ranking." in RUN.invoke(app, command).output
    output = RUN.invoke(app, [*command, "--json"]).stdout
    assert "NaN" not in output
    assert json.loads(output)["agreement"] is None
    assert "NaN" not in (tmp_path / "report.html").read_text()


def test_columns_go_by_position_and_images_are_made_small(model, tmp_path):
    pytest.importorskip("pandas")
    shuffled = change_template(model, "features = {", """
import pandas
frame = pandas.DataFrame({"x0": X[:, 0].numpy()}, index=torch.randperm(600).numpy() + 1000)
names = frame["x0"]
images = (255 * torch.rand(600, 3, 200, 90)).byte()
features = frame
unused = {""", "shuffled.py")  # fmt: skip
    result = RUN.invoke(app, ["score", str(shuffled), "--out", str(tmp_path), "--quiet"])
    assert result.exit_code == 0, result.output
    report = Report.load(tmp_path / "report.json")
    for sample in report.samples[:5]:
        assert float(sample["name"]) == pytest.approx(float(sample["features"]["x0"]), rel=1e-5)
    assert report.samples[0]["image"]["height"] == 40
    assert (tmp_path / "report.html").stat().st_size < 5e6


def test_odd_columns_are_refused_and_odd_names_do_no_harm(model, tmp_path):
    for line in ("features = [1] * 600", "names = {i: i for i in range(600)}", "groups = set(range(600))"):
        odd = change_template(model, "# images = pixels", line + "  #", "odd.py")
        refused("score", odd, "--out", tmp_path)
    refused(
        "score", change_template(model, "# images = pixels", "images = ['a.png'] * 600  #", "odd.py"), "--out", tmp_path
    )
    evil = change_template(model, 'f"person {i}"', '"\\x1b[31mred\\n[bold]"', "evil.py")
    result = RUN.invoke(app, ["score", str(evil), "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "[bold]" in result.output


def test_workers_find_modules_beside_the_file(tmp_path):
    (tmp_path / "beside.py").write_text(
        "import torch\ndef loss(p, z):\n    return torch.nn.functional.softplus(-z[1] * (z[0] @ p['w']))\n"
        "def rate(p, z):\n    return torch.sigmoid(z[0] @ p['w'])\n"
    )
    start, end = TEMPLATE.index("def loss"), TEMPLATE.index("train = dif")
    (tmp_path / "mine.py").write_text(TEMPLATE[:start] + "from beside import loss, rate\n" + TEMPLATE[end:])
    command = [
        sys.executable,
        "-c",
        "from dif.cli import main; main()",
        "retrain",
        str(tmp_path / "mine.py"),
        "--top",
        "8",
    ]
    result = subprocess.run(
        [*command, "--jobs", "2", "--out", str(tmp_path / "o"), "--json"], capture_output=True, check=False, cwd="/"
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["agreement"]["n"] == 8


def run_program(*words, **options):
    command = [sys.executable, "-c", "from dif.cli import main; main()", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_debug_shows_the_traceback_wherever_it_stands(model, tmp_path):
    broken = change_template(model, "risk = train.mean()\n", "risk = tran.mean()\n", "broken.py")
    for words in (("--debug", "check", broken), ("check", broken, "--debug")):
        result = run_program(*words, "--out", tmp_path)
        assert "Traceback" in result.stderr
        assert "tran" in result.stderr
        assert result.returncode == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scor"], "No such command 'scor'. Did you mean 'score'? See: dif --help"),
        (["score"], "See: dif score --help"),
        (["score", "m.py", "--tpo", "3"], "--top"),
        (["retrain", "m.py", "--top", "x"], "--top"),
    ],
)
def test_a_wrong_command_is_answered_in_one_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dif", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # `main` ignores Ctrl-C at its end
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("dif: ")
    assert stderr.count("\n") == 1
    assert message in stderr


@pytest.mark.filterwarnings("ignore", "default::dif.errors.NotConvergedWarning")
def test_an_unconverged_model_is_answered_after_the_warning_of_its_fit(model, tmp_path):
    early = change_template(
        model, '{"w": torch.zeros(3).double()})', '{"w": torch.zeros(3).double()}, max_iter=1)', "early.py"
    )
    for command in ("check", "score", "retrain"):
        result = RUN.invoke(app, [command, str(early), "--out", str(tmp_path)])
        assert result.exit_code == 2
        warning, answer = result.stderr.splitlines()
        assert warning.startswith("dif: Note: `fit` stopped after 1 iterations (max_iter), before reaching its")
        assert answer.startswith("dif: ")
        assert "strict=False" not in result.stderr
        assert "dif.fit(problem, solution.params)" in result.stderr


def test_what_cannot_be_shown_is_refused_before_any_work(model, tmp_path):
    for new, name in (
        ('features = {"x": [X] * 600}  #', "features"),
        ("images = [['a']] * 600  #", "images"),
    ):
        odd = change_template(model, "# images = pixels", new, "odd.py")
        assert f"`{name}` in {odd} cannot be displayed (" in refused("score", odd, "--out", tmp_path / "none").stderr


def test_images_of_another_shape_are_refused(model, tmp_path):
    for shape in ("(600, 3)", "(600, 4, 4, 2)", "(600, 2, 8, 8)", "(600, 0, 5)"):
        odd = change_template(model, "# images = pixels", f"images = torch.zeros{shape}  #", "odd.py")
        refused(
            "score", odd, "--quiet", "--out", tmp_path / "none",
            words=[
                f"`images` in {odd} has entries of shape {eval(shape)[1:]}; each must have shape (height, width), "
                "(height, width, 3) or (3, height, width).",
            ],
        )  # fmt: skip
    for shape in ("(600, 5, 6)", "(600, 5, 6, 3)", "(600, 3, 5, 6)", "(600, 1, 5, 6)"):
        fine = change_template(model, "# images = pixels", f"images = torch.zeros{shape}  #", "odd.py")
        assert Description.read(fine).subjects.image(0) is not None


def test_a_file_name_with_spaces_is_quoted(tmp_path):
    path = tmp_path / "my model.py"
    assert RUN.invoke(app, ["init", str(path)]).output == f"Wrote {path}. Next: dif check '{path}'\n"
    refused("check", tmp_path / "no model.py", words=["Create one with `dif init 'no model.py'`."])
    refused("report", tmp_path / "no results", words=[f"Run `dif score FILE --out '{tmp_path / 'no results'}'` first."])


def test_ctrl_c_before_and_after_the_work_is_no_traceback():
    early = "import dif.cli\ndef app(**_): raise KeyboardInterrupt\ndif.cli.app = app\ndif.cli.main()"
    late = (
        "import atexit, os, signal\nfrom dif.cli import main\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\nmain()"
    )
    for program, code, said in ((early, 130, "dif: Interrupted.\n"), (late, 0, "")):
        result = subprocess.run(
            [sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stderr) == (code, said)


def test_terminals_without_our_letters(model, tmp_path):
    poor = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    result = run_program("score", model, "--top", "3", "--out", tmp_path, env=poor)
    assert result.returncode == 0, result.stderr


def test_targets_keep_their_names(model, tmp_path):
    RUN.invoke(app, ["score", str(model), "--target", "gap", "--out", str(tmp_path)])
    assert dif.Influence.load(tmp_path / "scores" / "gap-dif.npz").top(1, "gap")


def test_the_only_sample_in_a_term_has_no_score_and_the_others_have(model, tmp_path):
    """Its removal would leave a term undefined: the report says so, and all other samples are scored."""
    lonely = change_template(
        model, "for g in (0, 1)]\n", "for g in (0, 1)]\n    + [train.mean(where=group == 7) <= 9.0]\n", "lonely.py"
    )
    lonely.write_text(lonely.read_text().replace("torch.arange(600) % 2\n", "torch.arange(600) % 2\ngroup[5] = 7\n"))
    result = RUN.invoke(app, ["retrain", str(lonely), "--top", "600", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    report = Report.load(tmp_path / "report.json")
    missing = [sample for sample in report.samples if sample["score"] is None]
    assert [sample["index"] for sample in missing] == [5]
    assert "the only sample in" in missing[0]["why"]
    assert report.agreement["n"] == 599
    assert "1 sample cannot be scored. The first is person 5: It is the only sample in" in result.output
    assert "It is the only sample in" in (tmp_path / "report.html").read_text()
    scores = dif.Influence.load(tmp_path / "scores" / "risk-dif.npz")
    assert bool(scores.values[5].isnan())
    assert list(scores.diagnostics["unanswered"]) == [scores.perturbations[5]]


def test_why_a_retraining_failed_is_in_the_report(model, tmp_path):
    RUN.invoke(app, ["score", str(model), "--top", "5", "--out", str(tmp_path)])
    report = Report.load(tmp_path / "report.json")
    first, second = (sample["index"] for sample in report.samples[:2])
    labels = (f"remove train[{first}]", f"remove train[{second}]")
    values = torch.tensor([[0.1], [float("nan")]], dtype=torch.float64)
    actual = dif.Influence(values, labels, ("risk",), "retraining", {"failed": {labels[1]: "it <b>ran</b> away"}})
    updated = report.with_actual([first, second], actual, "dif retrain")
    assert updated.samples[0]["actual"] == 0.1
    assert updated.samples[1]["actual"] is None
    assert updated.samples[1]["failed"] == "it <b>ran</b> away"
    assert (
        f"1 sample could not be retrained. The first is {updated.samples[1]['name']}: it <b>ran</b> away"
        in updated.remarks[0]
    )
    write_html(tmp_path / "report.html", [updated])
    assert "<b>ran" not in (tmp_path / "report.html").read_text()


def test_an_interrupted_retraining_continues(model, tmp_path):
    command = [sys.executable, "-c", "from dif.cli import main; main()", "retrain", str(model), "--top", "150", "--out"]
    process = subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    kept, limit = tmp_path / "retrained", time.time() + 120
    while not list(kept.glob("*.npz")) and process.poll() is None and time.time() < limit:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    done = retrainings(kept)
    assert len(done) >= 16
    if len(done) < 150:
        assert process.returncode == 130
        assert stderr.strip() == (
            f"dif: Interrupted while retraining. {len(done)} of 150 retrainings are kept. The same command continues "
            "with the others."
        )
    result = subprocess.run([*command, str(tmp_path)], capture_output=True, check=False, env=os.environ)
    assert result.returncode == 0
    after = retrainings(kept)
    assert len(after) == 150
    assert {name: after[name] for name in done} == done


def test_the_example_that_comes_with_dif(tmp_path):
    from importlib.resources import as_file, files

    with as_file(files("dif") / "examples" / "credit.py") as path:
        output = json.loads(RUN.invoke(app, ["check", str(path), "--json", "--out", str(tmp_path)]).output)
    assert output["holds"]
    assert [row["state"] for row in output["constraints"]] == ["binding", "inactive"]


def test_help_teaches():
    for command in ("init", "check", "score", "retrain", "report", "demo"):
        assert "Example: dif " in RUN.invoke(app, [command, "--help"]).output


def test_python_runs_the_package_as_the_program():
    assert RUN.invoke(app, ["--version"]).output == f"{dif.__version__}\n"
    wrong = subprocess.run([sys.executable, "-m", "dif", "chek"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "dif: No such command 'chek'. Did you mean 'check'? See: dif --help\n"
