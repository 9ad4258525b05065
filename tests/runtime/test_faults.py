"""What goes wrong around the numbers: kills, full disks, shut folders, no memory, damaged and newer files, names."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import F64, class_data, fair_logistic, fit_problem

import dif

HERE = Path(__file__).parents[1]  # where the helpers are
PLACES = os.pathsep.join([str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1"}
COMMAND = Path(sys.executable).with_name("dif")


def python(*command, **options):
    return subprocess.run(
        [sys.executable, *map(str, command)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, **options
    )


@pytest.fixture(scope="module")
def scored():
    train, problem, _ = fair_logistic()
    influence = dif.DirectionalInfluence(fit_problem(problem))
    return train, influence, influence.scores(train, train.remove_each())


# Kills


SLOW = pytest.mark.slow


@pytest.mark.parametrize("kind", ["scores", pytest.param("farm", marks=SLOW), "training"])
def test_killed_twenty_times(kind, tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    run = python(HERE / "killed.py", kind, killed)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["killed"] == 20
    assert told["done"] == sorted(told["done"])  # nothing that was finished is lost
    assert told["done"][-1] > 0
    once = python("-c", f"import killed; killed.KILLS = 0; killed.main({kind!r}, killed.Path({str(whole)!r}))")
    assert once.returncode == 0, once.stderr
    alone = json.loads(once.stdout.splitlines()[-1])
    assert alone["attempts"] == 1
    # each kill costs at most the piece that was under way
    assert told["evaluations"] <= alone["evaluations"] + told["attempts"]
    if kind in ("farm", "training"):
        values = [np.load(folder / "values.npy") for folder in (killed, whole)]
    else:
        loaded = [dif.Influence.load(folder / "scores.npy") for folder in (killed, whole)]
        values = [one.values.numpy() for one in loaded]
        assert loaded[0].diagnostics == loaded[1].diagnostics
    assert np.isfinite(values[0]).all()
    assert values[0].tobytes() == values[1].tobytes()


# Streams


def test_scores_are_readable_while_they_grow(scored, tmp_path, monkeypatch):
    train, influence, _ = scored
    path, seen = tmp_path / "scores.npy", []
    monkeypatch.setattr("dif.estimators.first_order._SMALLEST", 10)
    monkeypatch.setattr("dif.estimators.first_order._CHUNKS", 6)
    held = influence.scores(train, train.remove_each())
    write = dif.runtime.score_array.FileScores.write

    def looked_at(self, block, **about):
        write(self, block, **about)
        now = dif.Influence.load(path)
        seen.append((now.diagnostics["rows"], int(torch.isnan(now.values).all(1).sum())))
        assert torch.equal(now.rows(0, 10), held.values[:10])

    monkeypatch.setattr("dif.runtime.score_array.FileScores.write", looked_at)
    found = influence.scores(train, train.remove_each(), out=path)
    assert seen == [(10 * k, 60 - 10 * k) for k in range(1, 7)]
    assert torch.equal(found.values, held.values)
    assert found.top(3, 5) == held.top(3, 5)
    loaded = dif.Influence.load(path)
    assert torch.equal(loaded.values, held.values)
    assert loaded.diagnostics["rows"] == 60
    assert sorted(p.name for p in tmp_path.iterdir()) == ["scores.npy", "scores.npy.journal"]
    # the same question again: nothing is done; another: begun anew
    monkeypatch.setattr("dif.estimators.first_order.by_chunk", lambda *_: lambda begin: pytest.fail("done again"))
    assert torch.equal(influence.scores(train, train.remove_each(), out=path).values, held.values)
    monkeypatch.undo()
    other = influence.scores(train.mean(), train.remove_each(), out=path)
    assert other.values.shape == (60, 1)
    assert torch.equal(dif.Influence.load(path).values, other.values)


LARGER = """
import sys, resource, torch, dif
from dif.estimators import first_order
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
X, y = torch.randn(20_000, 4, generator=generator).double(), torch.randn(20_000, generator=generator).double()
def loss(p, z):
    return 0.5 * (z[0] @ p["theta"] - z[1]) ** 2
train, test = dif.Samples(loss, (X, y)), dif.Samples(loss, (X[:2_500], y[:2_500]), name="test")
solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1)), {"theta": torch.zeros(4).double()}, show_progress=False)
influence = dif.DirectionalInfluence(solution)
influence.scores(train.mean(), train.remove_each([1]), out=sys.argv[1] + "/small.npy")  # loads what is loaded late
first_order._SLOPES = 2**18
used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + 350_000_000, resource.RLIM_INFINITY))  # maps of files do not count
try:
    influence.scores(test, train.remove_each(), show_progress=False)
except (MemoryError, RuntimeError) as error:
    print("in memory:", type(error).__name__)
found = influence.scores(test, train.remove_each(), out=sys.argv[1] + "/large.npy", show_progress=False)
print(found.top(1, 7)[0].index, tuple(found.rows(19_999, 20_000).shape), len(found))
"""


def test_more_scores_than_memory(tmp_path):
    """400 MB of scores where 350 MB may be had."""
    run = python("-c", LARGER, tmp_path)
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first.startswith("in memory:")
    assert second.endswith("(1, 2500) 20000")
    assert np.load(tmp_path / "large.npy", mmap_mode="r").shape == (20_000, 2_500)


def test_damage_is_noticed_and_mended(scored, tmp_path, monkeypatch):
    train, influence, _ = scored
    path = tmp_path / "scores.npy"
    monkeypatch.setattr("dif.estimators.first_order._SMALLEST", 10)
    monkeypatch.setattr("dif.estimators.first_order._CHUNKS", 6)
    held = influence.scores(train, train.remove_each())
    influence.scores(train, train.remove_each(), out=path)
    bytes_ = bytearray(path.read_bytes())
    bytes_[-5] ^= 1
    path.write_bytes(bytes_)
    with pytest.raises(dif.InvalidInputError, match="values from row 50 on differ from those that were written"):
        dif.Influence.load(path)
    assert torch.equal(influence.scores(train, train.remove_each(), out=path).values, held.values)
    assert torch.equal(dif.Influence.load(path).values, held.values)


def test_half_a_line_in_the_journal(scored, tmp_path, monkeypatch):
    train, influence, _ = scored
    path, journal = tmp_path / "scores.npy", tmp_path / "scores.npy.journal"
    monkeypatch.setattr("dif.estimators.first_order._SMALLEST", 10)
    monkeypatch.setattr("dif.estimators.first_order._CHUNKS", 6)
    held = influence.scores(train, train.remove_each())
    usual, done = dif.runtime.score_array.FileScores.write, []

    def interrupted(self, block, **about):
        if len(done) in (2, 5):
            done.append(None)
            with journal.open("a") as file:
                file.write('{"end": 30, "chec')
            raise KeyboardInterrupt
        usual(self, block, **about)
        done.append(self.done)

    monkeypatch.setattr("dif.runtime.score_array.FileScores.write", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            influence.scores(train, train.remove_each(), out=path)
    assert torch.equal(influence.scores(train, train.remove_each(), out=path).values, held.values)
    assert done == [10, 20, None, 30, 40, None, 50, 60]


# The same name for something else


def test_other_data_under_the_same_indices_are_another_question(scored, tmp_path):
    """Added, corrected and reordered samples are told apart by their data."""
    train, influence, _ = scored
    solution = influence.solution
    X, y = class_data()
    for number, data in enumerate([(X[:1], y[:1]), (-3 * X[:1], y[:1])]):
        for what in (train.add(data, like=1), train.replace([4], data)):
            fresh = dif.Retraining(solution).scores(train.mean(), what).values
            kept = dif.Retraining(solution, keep=tmp_path / "kept").scores(train.mean(), what).values
            assert torch.allclose(kept, fresh, rtol=1e-9, atol=1e-14), number
            fresh = influence.scores(train.mean(), what).values
            assert torch.equal(influence.scores(train.mean(), what, out=tmp_path / "scores.npy").values, fresh), number
    order = torch.arange(59, -1, -1)
    there = dif.Samples(train.loss, (X[order], y[order]), name="train")
    group = (torch.arange(60) % 3)[order]
    risk = there.mean()
    bounds = [there.mean(where=group == g) <= risk + (-0.02 if g == 1 else 0.3) for g in (1, 2)]
    other = dif.Solution(dif.Problem(risk + dif.ridge(0.05), bounds), solution.params, solution.lam)
    dif.Retraining(solution, keep=tmp_path / "kept").scores(train.mean(), train.remove([0]))
    found = dif.Retraining(other, keep=tmp_path / "kept").scores(risk, there.remove([0])).values
    assert torch.allclose(found, dif.Retraining(other).scores(risk, there.remove([0])).values, rtol=1e-9)


def test_one_object_sees_what_it_kept(scored, tmp_path, monkeypatch):
    train, influence, _ = scored
    retraining = dif.Retraining(influence.solution, keep=tmp_path)
    np.savez(tmp_path / "mine.npz", a=np.zeros(3))  # somebody else's
    first = retraining.scores(train, train.remove_each(range(20)))
    monkeypatch.setattr(dif.Retraining, "solve_together", lambda *_: pytest.fail("solved again"))
    assert torch.equal(retraining.scores(train, train.remove_each(range(20))).values, first.values)


def test_an_old_result_survives_a_new_one_of_its_name(scored, tmp_path):
    train, influence, held = scored
    path = tmp_path / "scores.npy"
    first = influence.scores(train, train.remove_each(), out=path)
    second = influence.scores(train.mean(), train.remove_each(), out=path)
    assert torch.equal(first.values, held.values)  # mapped still, though the name is another's now
    assert second.values.shape == (60, 1)


def test_what_others_wrote_is_not_overwritten(scored, tmp_path):
    train, influence, _ = scored
    np.save(tmp_path / "foreign.npy", np.arange(5.0))
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "folder.npy" / "precious.txt").write_text("x")
    (tmp_path / "file.npy").write_text("x")
    for name in ("foreign.npy", "file.npy", "folder.npy"):
        with pytest.raises(dif.InvalidInputError, match="exists and was not written by dif"):
            influence.scores(train, train.remove_each(), out=tmp_path / name)
    assert (tmp_path / "folder.npy" / "precious.txt").read_text() == "x"
    assert len(np.load(tmp_path / "foreign.npy")) == 5


def test_another_number_of_jobs_is_the_same_work(scored, tmp_path, monkeypatch):
    train, influence, held = scored
    path = tmp_path / "scores.npy"
    influence.scores(train, train.remove_each(), out=path, jobs=2)
    monkeypatch.setattr("dif.estimators.first_order.by_chunk", lambda *_: lambda begin: pytest.fail("done again"))
    found = influence.scores(train, train.remove_each(), out=path).values
    assert torch.allclose(found, held.values, rtol=1e-12, atol=1e-16)


# Files


# no file may be longer than 200 bytes: what a full disk does, without filling one
FULL = """
import sys, resource, dif, torch
from pathlib import Path
from problems import fair_logistic, fit_problem, zeros
train, problem, _ = fair_logistic()
influence, folder = dif.DirectionalInfluence(fit_problem(problem)), Path(sys.argv[1])
scores, solution = influence.scores(train.mean(), train.remove_each(), show_progress=False), influence.solution
training = dif.Training(problem, zeros(), dif.SGD(0.1), dif.Ascent(0.5), 20, 1)
works = {
    "npz": lambda: influence.scores(train, train.remove_each()).save(folder / "scores.npz"),
    "npy": lambda: influence.scores(train, train.remove_each(), out=folder / "scores.npy"),
    "kept": lambda: dif.Retraining(influence.solution, keep=folder / "kept").scores(train, train.remove_each()),
    "solution": lambda: solution.save(folder / "solution.npz"),
    "fit": lambda: dif.fit(problem, zeros(), checkpoint=folder / "fit.npz", show_progress=False),
    "run": lambda: training.run(keep=folder / "run", show_progress=False),
    "hessian": lambda: solution.assemble(folder / "hessian", show_progress=False),
    "report": lambda: scores.report(folder / "report.html"),
}
(folder / "scores.npz").write_bytes(b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
for name, work in works.items():
    try:
        work()
    except OSError as error:
        print(name, error.errno, Path(error.filename).relative_to(folder).parts[0])
assert (folder / "scores.npz").read_bytes() == b"old"
hidden = {path.name for path in folder.rglob(".*")} - {".lock"}
assert not hidden, "half-written files are left"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for name, work in works.items():
    work()
"""


def test_a_full_disk(scored, tmp_path):
    """The system's own error, with the file; nothing half-written passes for a result; with room the call works."""
    run = python("-c", FULL, tmp_path)
    assert run.returncode == 0, run.stderr
    named = {"npz": "scores.npz", "npy": "scores.npy.journal", "kept": "kept", "solution": "solution.npz"}
    named |= {"fit": "fit.npz", "run": "run", "hessian": "hessian", "report": "report.html"}
    assert run.stdout.splitlines() == [f"{name} {errno.EFBIG} {file}" for name, file in named.items()]
    for name in ("npz", "npy"):
        assert torch.equal(dif.Influence.load(tmp_path / f"scores.{name}").values, scored[2].values)


READ_ONLY = """
import sys, os, dif, torch
from problems import fair_logistic, fit_problem
train, problem, _ = fair_logistic()
influence = dif.DirectionalInfluence(fit_problem(problem))
if os.getuid() == 0:
    os.setuid(65534)  # nobody: for root there are no read-only folders
for work in (
    lambda: influence.scores(train, train.remove_each()).save(sys.argv[1] + "/scores.npz"),
    lambda: influence.scores(train, train.remove_each(), out=sys.argv[1] + "/scores.npy"),
    lambda: dif.Retraining(influence.solution, keep=sys.argv[1] + "/kept").scores(train, train.remove_each()),
    lambda: dif.fit(problem, {"theta": torch.zeros(4).double()}, checkpoint=sys.argv[1] + "/fit.npz"),
):
    try:
        work()
    except PermissionError as error:
        print("refused", error.filename)
"""


def test_a_read_only_folder(tmp_path):
    folder = tmp_path / "shut"
    folder.mkdir()
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == Path.home().owner() and str(path).startswith(str(Path("/tmp"))) and path != Path("/tmp"):
            path.chmod(0o755)
    folder.chmod(0o555)
    run = python("-c", READ_ONLY, folder)
    folder.chmod(0o755)
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    assert len(said) == 4
    assert all(line.startswith("refused") and str(folder) in line for line in said)
    assert list(folder.iterdir()) == []


def test_names_with_spaces_and_other_letters(scored, tmp_path):
    train, influence, held = scored
    folder = tmp_path / "Ergebnisse für Łódź 結果 (1)"
    folder.mkdir()
    held.save(folder / "scores ä.npz")
    assert torch.equal(dif.Influence.load(folder / "scores ä.npz").values, held.values)
    influence.scores(train, train.remove_each(), out=folder / "punkte ü.npy")
    assert torch.equal(dif.Influence.load(folder / "punkte ü.npy").values, held.values)
    kept = dif.Retraining(influence.solution, keep=folder / "kept 再").scores(train.mean(), train.remove_each([1, 2]))
    again = dif.Retraining(influence.solution, keep=folder / "kept 再").scores(train.mean(), train.remove_each([1, 2]))
    assert torch.equal(kept.values, again.values)
    dif.fit(influence.solution.problem, {"theta": torch.zeros(4, dtype=F64)}, checkpoint=folder / "fit é.npz")
    run = python(COMMAND, "init", folder / "Modell ß.py")
    assert run.returncode == 0, run.stderr
    run = python(COMMAND, "score", folder / "Modell ß.py", "--out", folder / "Bericht 1")
    assert run.returncode == 0, run.stderr
    assert (folder / "Bericht 1" / "report.html").exists()


# Memory

MEMORY = """
import sys, resource, warnings, torch, dif
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
n, d = 40_000, 60
X = torch.randn(n, d, generator=generator, dtype=torch.float64)
y = torch.where(X[:, 0] + torch.randn(n, generator=generator, dtype=torch.float64) > 0, 1.0, -1.0).double()
def loss(p, z):
    h = torch.tanh(z[0] @ p["A"])
    return torch.nn.functional.softplus(-z[1] * (h @ p["b"]))
A = 0.1 * torch.randn(d, 8, generator=generator, dtype=torch.float64)
params = {"A": A, "b": torch.ones(8, dtype=torch.float64)}
train = dif.Samples(loss, (X, y), batch_size=n if len(sys.argv) > 1 else None)
solution = dif.Solution(dif.Problem(train.mean() + dif.ridge(0.1)), params)
V = torch.randn(488, 8, generator=generator, dtype=torch.float64)
expected = solution.curvature.product(V)
import dif.runtime.guard, dif.derivatives.losses
dif.runtime.guard.NUMBERS_AT_ONCE = dif.derivatives.losses._PASS = 2**40  # as if there were room for everything
dif.runtime.guard.numbers_at_once.__defaults__ = (2**40,)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 20_000_000, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = solution.curvature.product(V)
print(len(said), {type(one.message).__name__ for one in said}, str(said[0].message)[:60])
print(float((found - expected).abs().max() / expected.abs().max()))
"""


def test_out_of_memory_halves_the_batch():
    run = python("-c", MEMORY)
    assert run.returncode == 0, run.stderr
    said, gap = run.stdout.splitlines()
    assert "MemoryWarning" in said
    assert "Memory ran out, so dif is going on with batches halved" in said
    assert float(gap) < 1e-12
