"""More than one process: joblib's backends, Dask, Ray, torch.distributed; the same numbers, and what a kill costs."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest
from joblib import parallel_config
from problems import fair_logistic, fit_problem, retrainings

import dif

HERE = Path(__file__).parents[1]  # where the helpers are
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}


def estimators(solution):
    return dif.Retraining(solution), dif.DirectionalInfluence(solution)


@pytest.fixture(scope="module")
def serial():
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    retraining, influence = estimators(solution)
    removals = train.remove_each()
    return (
        train,
        solution,
        removals,
        retraining.scores(train, removals).values,
        influence.scores(train, removals).values,
    )


def assert_the_same(serial):
    train, solution, removals, retrained, scored = serial
    retraining, influence = estimators(solution)
    assert (retraining.scores(train, removals, jobs=2).values - retrained).abs().max() <= 1e-12
    assert (influence.scores(train, removals, jobs=2).values - scored).abs().max() <= 1e-12


@pytest.mark.parametrize("backend", ["loky", "threading", "multiprocessing"])
def test_backends_of_joblib(serial, backend):
    with parallel_config(backend=backend):
        assert_the_same(serial)


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with (
        warnings.catch_warnings(),
        distributed.LocalCluster(**settings) as cluster,
        distributed.Client(cluster) as client,
    ):
        warnings.simplefilter("ignore")
        client.run(sys.path.append, str(HERE))
        yield client


def test_dask(serial, cluster):
    with parallel_config(backend="dask"):
        assert_the_same(serial)


def build_doomed(tmp_path):
    """A problem whose losses, in the first worker that evaluates them, write its number and wait to be killed."""
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    parent, flag = os.getpid(), tmp_path / "victim"

    def loss(params, z, usual=train.loss):
        if os.getpid() != parent and not flag.exists():
            flag.write_text(str(os.getpid()))
            time.sleep(60)
        return usual(params, z)

    train.loss = loss
    return train, solution, flag


def killer(flag, kept):
    """Kills the waiting worker once others have finished something."""

    def kill():
        for _ in range(600):
            if flag.exists() and flag.read_text() and len(retrainings(kept)) >= 2:
                finished.update(retrainings(kept))
                os.kill(int(flag.read_text()), signal.SIGKILL)
                return
            time.sleep(0.05)

    finished: dict[str, int] = {}
    thread = threading.Thread(target=kill)
    thread.start()
    return thread, finished


def kill_in_the_middle(serial, tmp_path, removals=24):
    train, solution, flag = build_doomed(tmp_path)
    kept = tmp_path / "kept"
    kept.mkdir()
    thread, finished = killer(flag, kept)
    chosen = train.remove_each(range(removals))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = dif.Retraining(solution, keep=kept).scores(train, chosen, jobs=2).values
    thread.join()
    assert flag.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(flag.read_text()), 0)
    assert (found - serial[3][:removals]).abs().max() <= 1e-12
    after = retrainings(kept)
    assert len(after) == removals
    again = [name for name, written in finished.items() if after[name] != written]
    return [str(one.message) for one in said], again


def test_a_killed_process_costs_its_task(serial, tmp_path):
    with parallel_config(backend="loky"):
        said, _ = kill_in_the_middle(serial, tmp_path)  # joblib ends the other process too: its task is begun again
    assert any("A worker was lost" in words for words in said)


def test_a_killed_worker_of_dask_costs_its_task(serial, cluster, tmp_path):
    with parallel_config(backend="dask"):
        _, again = kill_in_the_middle(serial, tmp_path)
    assert again == []


def test_work_that_kills_every_worker_ends(tmp_path):
    train, problem, _ = fair_logistic()
    solution, parent = fit_problem(problem), os.getpid()

    def loss(params, z, usual=train.loss):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(params, z)

    train.loss = loss
    retraining = dif.Retraining(solution)
    with pytest.warns(UserWarning, match="A worker was lost"), pytest.raises(BrokenExecutor):
        retraining.scores(train, train.remove_each(range(8)), jobs=2)


@pytest.mark.slow
def test_ray(serial):
    ray = pytest.importorskip("ray")
    from ray.util.joblib import register_ray

    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": str(HERE)}})
    register_ray()
    try:
        with parallel_config(backend="ray"):
            assert_the_same(serial)
    finally:
        ray.shutdown()


def test_two_processes_of_torch_distributed():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, str(HERE / "sharded.py")], env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("all equal") == 2
    assert run.stdout.count("scores") == 2


def test_sharded_without_processes():
    with pytest.raises(dif.InvalidInputError) as caught, dif.sharded():
        pass
    assert "torch.distributed" in str(caught.value)
    assert "all processes would write the same file" in (HERE / "sharded.py").read_text()  # asserted there
