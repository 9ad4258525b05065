"""Files that are damaged at random are named, or give the same answer to the last bit."""

import copy
import os
import re
import shutil
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import F64, fair_logistic, fit_problem, zeros
from typer.testing import CliRunner

import dif
from dif.cli import app
from dif.cli.description import TEMPLATE
from dif.cli.results_folder import KeptFits
from dif.report.builder import build_reports, load_reports, save_reports
from dif.report.subjects import Subjects
from dif.runtime.archive import Journal, open_atomically, read_archive, write_archive
from dif.solving.fit import Checkpoint, FitState
from studies.assembly import assemble

DAMAGES = 300  # to the files of each kind; where reading is slow, all of them only with -m slow
QUIET = {"show_progress": False}


@cache
def ground():
    """A solution, and the steps of a training with a start of its own."""
    train, problem, _ = fair_logistic()
    training = dif.Training(problem, zeros(), dif.SGD(0.1, momentum=0.9), dif.Ascent(0.5), 20, 2)
    return train, problem, fit_problem(problem), training


@cache
def ground_run():
    return ground()[3].run(**QUIET)


# Of each kind of file: what writes it into a folder, and what reads it. The reader returns all numbers and verdicts.


def write_solutions(folder):
    _, problem, solution, _ = ground()
    solution.save(folder / "a.npz")
    other = dif.Problem(problem.objective + dif.ridge(1.0), problem.constraints)
    dif.Solution(other, zeros()).save(folder / "b.npz")


def read_solution(folder):
    solution = dif.Solution.load(folder / "a.npz", ground()[1], zeros())
    return solution.theta, solution.lam, solution.tol, solution.converged


def write_checkpoints(folder):
    _, problem, solution, _ = ground()
    other = dif.Solution(dif.Problem(problem.objective), zeros()).program
    for name, program in (("a.npz", solution.program), ("b.npz", other)):
        Checkpoint.open(folder / name, program).save(FitState(solution.theta, solution.lam))


def read_checkpoint(folder):
    state = Checkpoint.open(folder / "a.npz", ground()[2].program).load()
    return vars(state)


def write_influence(folder):
    train, _, solution, _ = ground()
    estimator = dif.DirectionalInfluence(solution, strict=False)
    estimator.scores(train.mean(), train.remove_each(), **QUIET).save(folder / "a.npz")


def read_influence(folder):
    return picture(dif.Influence.load(next(folder.glob("a.np[yz]"))))


def picture(scores):
    return scores.values, scores.perturbations, scores.targets, scores.estimator, scores.diagnostics, scores.trusted


def write_chunks(folder):
    train, _, solution, _ = ground()
    estimator = dif.DirectionalInfluence(solution, strict=False)
    for name, target in (("a.npy", train.mean()), ("b.npy", 2 * train.mean())):
        estimator.scores(target, train.remove_each(), out=folder / name, **QUIET)


def write_retrainings(folder):
    retrain(folder, slice(0, 4))
    retrain(folder, slice(4, 8))


def retrain(folder, which=slice(0, 8)):
    train, _, solution, _ = ground()
    retraining = dif.Retraining(solution, keep=folder)
    return retraining.scores(train.mean(), train.remove_each(range(8))[which]).values


def write_run(folder):
    ground()[3].run(keep=folder, **QUIET)


def read_run(folder):
    """Return all that a run knows, and what is found by sweeping back over it."""
    train, _, _, training = ground()
    run = training.run(keep=folder, **QUIET)
    scores = dif.UnrolledInfluence(run).scores(train.mean(), train.remove_each(range(4)), probe=0, **QUIET)
    return [run.states[t] for t in range(7)], vars(run.history), scores.values


def write_run_and_sweep(folder):
    read_run(folder)


def read_hessian(folder):
    return assemble(ground()[2], folder, **QUIET).part_hessians


def read_kept_fit(folder):
    _, problem, _, _ = ground()
    return KeptFits(folder, Path(__file__)).fit(problem, zeros(), **QUIET).theta


def write_results(folder):
    """Fill a folder of the command line; the model file stands beside it."""
    small = TEMPLATE.replace("600", "40").replace("dif.ridge(1e-2)", "dif.ridge(1e-1)")
    (folder.parent / "model.py").write_text(small)
    read_results(folder)


def read_results(folder):
    """Ask for retrainings on both targets, and return what the folder then holds, but for the time."""
    for target in ("risk", "gap"):
        words = ["retrain", str(folder.parent / "model.py"), "--target", target, "--top", "2", "--out", str(folder)]
        result = CliRunner().invoke(app, words)
        if result.exit_code:
            raise dif.InvalidInputError(result.stderr)
    scores = [picture(dif.Influence.load(path)) for path in sorted(folder.glob("scores/*.npz"))]
    return [asdict(report) | {"run": {}} for report in load_reports(folder / "report.json")], scores


def write_reports(folder):
    train, _, solution, _ = ground()
    scores = dif.DirectionalInfluence(solution, strict=False).scores(train.mean(), train.remove_each(range(9)), **QUIET)
    subjects = Subjects.of(scores.carried_out, solution)
    save_reports(folder / "report.json", build_reports(scores, subjects, [train.mean()], title="a"))


def read_reports(folder):
    return [asdict(report) for report in load_reports(folder / "report.json")]


def train_again(folder):
    """Retrain a training run, of which some was kept."""
    train, run = ground()[0], ground_run()
    return dif.Retraining(run, keep=folder).scores(train.mean(), train.remove_each(range(4)), **QUIET).values


KINDS = {
    "solution": (write_solutions, read_solution, 50),
    "fit checkpoint": (write_checkpoints, read_checkpoint, DAMAGES),
    "influence": (write_influence, read_influence, DAMAGES),
    "chunked scores": (write_chunks, read_influence, DAMAGES),
    "retrainings": (write_retrainings, retrain, DAMAGES),
    "run": (write_run, read_run, 30),
    "run and sweep": (write_run_and_sweep, read_run, 30),
    "columns of a Hessian": (read_hessian, read_hessian, 100),
    "kept fit": (read_kept_fit, read_kept_fit, 8),
    "kept trainings": (train_again, train_again, DAMAGES),
    "reports": (write_reports, read_reports, DAMAGES),
    "results of the command line": (write_results, read_results, 3),
}


def damage(folder, rng):
    """Damage one of the files; return what was done to which."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = files[rng.integers(len(files))]
    whole, what = path.read_bytes(), rng.choice(["flip", "cut", "empty", "append", "swap", "digit", "lose"])
    k = int(rng.integers(len(whole)))
    if what == "flip":
        changed = bytearray(whole)
        changed[k] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
    elif what == "cut":
        path.write_bytes(whole[:k])
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "append":
        path.write_bytes(whole + rng.bytes(int(rng.integers(1, 40))))
    elif what == "swap":
        other = rng.choice([each for each in files if each.suffix == path.suffix])
        path.write_bytes(other.read_bytes())
        other.write_bytes(whole)
    elif what == "digit":  # of the text, which is written with four bytes a letter in an archive
        places = [match.start() for match in re.finditer(rb"[0-9]", whole)]
        changed = bytearray(whole)
        changed[places[rng.integers(len(places))]] = ord("0") + int(rng.integers(10))
        path.write_bytes(changed)
    else:
        lines = whole.split(b"\n")
        del lines[rng.integers(len(lines))]
        path.write_bytes(b"\n".join(lines))
    return what, path


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        *((kind, False) for kind in KINDS),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in KINDS if KINDS[kind][2] < DAMAGES),
    ],
)
def test_damage_is_named_or_changes_nothing(kind, whole, tmp_path):
    write, read, number = KINDS[kind]
    sound = tmp_path / "sound"
    sound.mkdir()
    write(sound)
    expected, named = copy.deepcopy(read(sound)), 0
    for seed in range(DAMAGES if whole else number):
        folder = shutil.copytree(sound, tmp_path / str(seed))
        done = damage(folder, np.random.default_rng([7, seed]))
        found, error = attempt(read, folder)
        again = kind == "fit checkpoint" and found is None  # it belongs to another problem: the fit starts again
        assert (str(folder) in error) if error else again or same(found, expected), (done, error)
        blocked = error and done[0] != "swap" and done[1].name.startswith("sweep_")
        assert not blocked, (done, error)  # a checkpoint of a sweep is begun anew
        named += bool(error)
        shutil.rmtree(folder)
    mended = kind in ("columns of a Hessian", "kept fit", "results of the command line")  # computed, at least in part
    assert named or mended


def test_damage_to_an_archive_is_found(tmp_path):
    """What the files of all kinds have in common."""
    path, other = tmp_path / "a.npz", tmp_path / "b.npz"
    arrays = {"x": torch.arange(12.0, dtype=F64).reshape(4, 3), "y": torch.zeros(2)}
    named = 0
    for seed in range(DAMAGES):
        write_archive(path, "thing", arrays, {"name": "a", "number": 0.123})
        write_archive(other, "thing", arrays, {"name": "b", "number": 0.123})
        expected = read_archive(path, "thing", name="a")
        done = damage(tmp_path, np.random.default_rng([8, seed]))
        found, error = attempt(lambda _: read_archive(path, "thing", name="a"), path)
        assert (str(path) in error) if error else same_archive(found, expected), (done, error)
        named += bool(error)
    assert named > DAMAGES // 4


def attempt(read, folder):
    """Return what is read, and the error; one of the two is None."""
    try:
        return read(folder), None
    except (dif.InvalidInputError, FileNotFoundError) as error:
        return None, str(error)


def same_archive(one, other):
    (arrays, about), (others, text) = one, other
    equal = all(arrays[name].tobytes() == x.tobytes() for name, x in others.items())
    return about == text and arrays.keys() == others.keys() and equal


def test_rows_to_come_are_nan_whatever_is_in_the_file(tmp_path):
    write_chunks(tmp_path)
    path = tmp_path / "a.npy"
    journal = dif.runtime.score_array.journal_of(path)
    (head, *entries), _ = journal.read()
    journal.write([{**head, "finished": False}, *(entry for entry in entries if "end" not in entry)])
    loaded = dif.Influence.load(path)
    assert loaded.diagnostics["rows"] == 0
    assert bool(loaded.values.isnan().all())
    assert not np.isnan(np.load(path)).any()  # the file itself stays as it is


def test_an_archive_is_read_as_what_it_is(tmp_path):
    path = tmp_path / "a.npz"
    arrays = {"x": torch.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 4)), "number": np.array(3)}
    write_archive(path, "thing", arrays, {"name": "a", "n": [1, 2]})
    found, about = read_archive(path, "thing", name="a", n=[1, 2])
    assert {name: x.shape for name, x in found.items()} == {"x": (2, 3), "empty": (0, 4), "number": ()}
    assert found["x"].dtype == np.float32
    assert (about["name"], about["n"]) == ("a", [1, 2])
    for options, words in (
        ({"kind": "other"}, "it is 'thing', version 1, not 'other', version 1."),
        ({"kind": "thing", "name": "b"}, "it has another name."),
        ({"kind": "thing", "absent": 1}, "KeyError: 'absent'."),
        ({"kind": "thing", "name": "b", "cure": "Delete it."}, "it has another name. Delete it."),
    ):
        with pytest.raises(dif.InvalidInputError) as caught:
            read_archive(path, **options)
        assert str(caught.value) == f"{str(path)!r} is damaged, or was not written by dif: {words}"
    with pytest.raises(FileNotFoundError, match=r"There is no thing file '.*b.npz'."):
        read_archive(tmp_path / "b.npz", "thing")
    with pytest.raises(FileNotFoundError, match=r"There is no folder '.*none' to save 'b.npz' in. Create it first."):
        write_archive(tmp_path / "none" / "b.npz", "thing", {}, {})


def test_a_journal_keeps_what_comes_before_the_damage(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path, "thing")
    journal.write([{"n": 0}])
    for n in (1, 2):
        journal.append({"n": n})
    assert Journal(path, "thing").read() == ([{"n": 0}, {"n": 1}, {"n": 2}], True)
    assert Journal(path, "other").read() == ([], False)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines)[:-1])  # the last line was cut off
    assert Journal(path, "thing").read() == ([{"n": 0}, {"n": 1}], True)
    path.write_bytes(lines[0] + lines[2] + lines[1])
    assert Journal(path, "thing").read() == ([{"n": 0}], False)


def test_errors_of_the_system_name_the_file(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '.*a.npz'"), open_atomically(tmp_path / "a.npz"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
    write_archive(os.fspath(tmp_path / "b.npz"), "thing", {}, {})  # a path may be text
    assert read_archive(os.fspath(tmp_path / "b.npz"), "thing")[0] == {}


@pytest.mark.filterwarnings("ignore")
def test_what_another_training_left_is_not_taken(tmp_path):
    """Full batches from the solution: no step moves θ, so the runs differ in nothing but how they were made."""
    X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    train = dif.Samples(lambda p, z: 0.5 * (z[0] @ p["w"] - z[1]) ** 2, (X, X[:, 0] + 0.1), name="train")
    problem, target = dif.Problem(train.mean() + dif.ridge(0.01)), dif.linear([1.0, 0.0, 0.0])
    solution = dif.fit(problem, {"w": torch.zeros(3, dtype=F64)}, **QUIET)
    removal, seen = train.remove_each([7]), []
    for optimizer, epochs in ((dif.SGD(0.01), 2), (dif.SGD(0.01), 9), (dif.SGD(0.1), 9), (dif.Adam(0.1), 9)):
        run = dif.Training(problem, solution.params, optimizer, batch_size=20, epochs=epochs).run(**QUIET)
        again, unrolled = dif.Retraining(run), dif.UnrolledInfluence(run, strict=False)
        kept = dif.Retraining(run, keep=tmp_path / "kept")
        assert torch.equal(kept.scores(target, removal).values, again.scores(target, removal).values)
        fresh = unrolled.scores(target, removal, probe=0, **QUIET).values
        out = unrolled.scores(target, removal, probe=0, out=tmp_path / "s.npy", **QUIET).values
        assert torch.equal(out.nan_to_num(), fresh.nan_to_num())
        seen.append(run.identity)
    assert len(set(seen)) == 4
    assert len(list((tmp_path / "kept").iterdir())) == 4
