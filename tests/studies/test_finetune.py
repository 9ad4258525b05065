"""The fine-tuning study: a small version of the protocol, its command, and resuming after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from problems import retrainings
from typer.testing import CliRunner

import dif
from studies import finetune
from studies.__main__ import app

TINY = replace(
    finetune.STUDIES["quick"], n=300, channels=2, pretraining=20, batch_size=50, removals=12, groups=4, dampings=(1.0,)
)
RUN = CliRunner()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp("finetune")
    return out, finetune.reproduce(TINY, out, show_progress=False)


@pytest.mark.slow
def test_the_study_that_a_laptop_can_run(tmp_path):
    result = finetune.reproduce(finetune.STUDIES["quick"], tmp_path, show_progress=False)
    assert max(result["multipliers"]) > 0.05
    for rows in result["r"].values():
        assert min(rows["unrolled"]) > 0.95
        for peer in ("DIF", "classical IF"):
            assert np.mean(rows["unrolled"]) > np.mean(rows[peer])


def test_small_study(study):
    out, result = study
    assert max(result["multipliers"]) > 0.01
    assert result["gradient"] > 1e-3  # the end is no solution
    assert {kind: len(changes) for kind, changes in result["actual"].items()} == {"single": 12, "1%": 4, "5%": 4}
    assert min(result["r"]["single"]["unrolled"]) > 0.95
    assert result["targets"][:2] == ["test loss", "gap of groups 0 and 1"]
    assert len(result["removed"]) == len(set(result["removed"])) == 12
    assert {path.name for path in out.glob("*.png")} == set(finetune.FIGURES)
    assert json.loads((out / "finetune.json").read_text()) == json.loads(json.dumps(result))


def test_a_finished_study_is_not_computed_again(study, monkeypatch):
    out, result = study

    def fail(*_, **__):
        raise AssertionError("computed twice")

    for owner, name in (
        (finetune, "pretrain"), (dif.Retraining, "scores"), (dif.DirectionalInfluence, "scores"),
        (dif.ClassicalInfluence, "scores"), (dif.training.run.Loop, "advance"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, fail)
    (out / finetune.FIGURES[0]).unlink()
    again = finetune.reproduce(TINY, out, show_progress=False)
    assert again == json.loads(json.dumps(result))
    assert (out / finetune.FIGURES[0]).stat().st_size > 10_000


def test_what_cannot_be_carried_out_is_refused(study, tmp_path):
    out, _ = study
    with pytest.raises(dif.InvalidInputError, match=r"a study with tau 0\.002 \(now 0\.1\)\. Choose another folder"):
        finetune.reproduce(replace(TINY, tau=0.1), out)
    with pytest.raises(dif.InvalidInputError, match=r"`removals` is 301, but there are 300 training images"):
        finetune.reproduce(replace(TINY, removals=301), tmp_path)
    with pytest.raises(dif.InvalidInputError, match=r"`channels` must be a multiple of \d+ for the transformer, not 6"):
        finetune.reproduce(replace(TINY, model="transformer", channels=6), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_transformer_is_fine_tuned(tmp_path):
    setting = replace(
        finetune.STUDIES["transformer"], n=100, side=14, channels=8, pretraining=1, epochs=1, removals=3, groups=2
    )
    result = finetune.reproduce(setting, tmp_path, show_progress=False)
    assert list(result["r"]["single"]) == ["unrolled"]  # DIF and classical influence are left out
    assert np.isfinite(result["actual"]["5%"]).all()


COMMAND = ["finetune", "--quick", "--n", "300", "--channels", "2", "--pretraining", "5", "--epochs", "2",
           "--removals", "20", "--groups", "2", "--no-peers", "--out"]  # fmt: skip


@pytest.fixture(scope="module")
def commanded(tmp_path_factory):
    out = tmp_path_factory.mktemp("commanded")
    return out, RUN.invoke(app, [*COMMAND, str(out)])


def test_command(commanded):
    _, shown = commanded
    assert shown.exit_code == 0, shown.output
    for words in ("20 single samples", "2 groups of 5 %", "group 2", "seconds: training", "finetune-history.png"):
        assert words in shown.output
    assert "Example: python -m studies finetune" in RUN.invoke(app, ["finetune", "--help"]).output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--quick", "--model", "transformer"], "--quick is a version of --model small, not of transformer."),
        (["--device", "abacus"], "Device 'abacus' is not available"),
        (["--data", "nowhere"], "the four files of MNIST"),
        (["--removals", "7000"], "Each image is removed at most once."),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, options, words):
    shown = RUN.invoke(app, ["finetune", *options, "--out", str(tmp_path)])
    assert shown.exit_code == 2
    assert shown.stderr.count("\n") == 1
    assert words in shown.stderr


def _start(out):
    command = [sys.executable, "-m", "studies", *COMMAND, str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def test_a_killed_study_resumes(commanded, tmp_path):
    (whole, _), killed = commanded, tmp_path / "killed"
    process, kept = _start(killed), killed / "retrained"
    limit = time.time() + 240
    while not list(kept.glob("*.npz")) and process.poll() is None and time.time() < limit:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = retrainings(kept)
    assert len(done) >= 16  # a chunk
    assert _start(killed).wait(timeout=300) == 0
    after = retrainings(kept)
    assert len(after) == 24
    assert {name: after[name] for name in done} == done
    numbers = [json.loads((folder / "finetune.json").read_text()) for folder in (whole, killed)]
    assert numbers[0]["actual"] == numbers[1]["actual"]
    assert numbers[0]["predicted"] == numbers[1]["predicted"]
    assert "retraining single" in numbers[0]["seconds"]
    assert "retraining single" not in numbers[1]["seconds"]  # the time of a part would be misleading
