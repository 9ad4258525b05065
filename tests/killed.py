"""Run as a script: work that is killed again and again, at random moments, and goes on; prints what came of it as JSON.

python killed.py scores|farm|training FOLDER. Each attempt is a process forked after everything is loaded.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from problems import F64, retrainings

import dif
from dif.runtime.archive import read_archive
from dif.runtime.score_array import journal_of

KILLS, ROWS, PIECE, REMOVALS = 20, 960, 20, 320
LATEST = {"scores": 0.1, "farm": 0.3, "training": 0.2}  # seconds after which an attempt is killed


def make_loss(log):
    """A loss that says so whenever it is evaluated on a whole piece, and takes a moment for it."""

    def loss(params, z):
        if len(z[0]) == PIECE and log.exists():
            with log.open("a") as file:
                file.write(f"{float(z[1][0])!r}\n")
            time.sleep(0.03)
        return torch.nn.functional.softplus(-z[1] * (z[0] @ params["theta"]))

    return loss


def problem(log):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, 4, generator=generator, dtype=F64)
    y = 1.0 + 0.001 * torch.arange(ROWS, dtype=F64)  # tells the pieces apart
    y = y * torch.where(X.sum(1) + torch.randn(ROWS, generator=generator, dtype=F64) > 0, 1.0, -1.0)
    train = dif.Samples(make_loss(log), (X, y), name="train")
    group = torch.arange(ROWS) % 2 == 0
    stated = dif.Problem(train.mean() + dif.ridge(0.05), [train.mean(where=group) <= train.mean() - 0.01])
    return train, dif.fit(stated, {"theta": torch.zeros(4, dtype=F64)}, show_progress=False)


def score(train, solution, path):
    from dif.estimators import first_order

    first_order._SMALLEST = PIECE  # many small chunks
    first_order._CHUNKS = ROWS // PIECE
    derivative = dif.DirectionalInfluence(solution, switching=False)
    derivative.scores(train, train.remove_each(), out=path, show_progress=False, assess=0)


def retrain(train, solution, folder):
    def slower(self, direction, usual=dif.Retraining.solve_together):
        with (folder.parent / "log").open("a") as file:
            file.write(f"{direction.perturbation.labels[0]}\n")
        return usual(self, direction)

    dif.Retraining.solve_together = slower
    return dif.Retraining(solution, keep=folder).scores(train, train.remove_each(range(REMOVALS)))


def log_calls(owner, name, log):
    """Let a function say so whenever it is called, and take a moment for it."""
    usual = getattr(owner, name)

    def call(*args, **options):
        with log.open("a") as file:
            file.write(f"{name}\n")
        time.sleep(0.01)
        return usual(*args, **options)

    setattr(owner, name, call)


def train_and_sweep(train, problem, folder):
    """Train, sweep back, and train again without some samples; everything is kept in the folder."""
    from dif.estimators import retraining
    from dif.training import adjoint
    from dif.training.descent import TrainingStep
    from dif.training.run import Loop

    adjoint._SECONDS = -1.0  # a checkpoint after every step
    for owner, name in ((Loop, "advance"), (TrainingStep, "pull_back"), (retraining, "rerun")):
        log_calls(owner, name, folder / "log")
    start = {"theta": torch.zeros(4, dtype=F64)}
    training = dif.Training(problem, start, dif.SGD(0.1, momentum=0.9), dif.Ascent(0.5), 60, 3)
    run = training.run(keep=folder / "run", show_progress=False)
    removals = train.remove_each(range(REMOVALS))
    swept = dif.UnrolledInfluence(run).scores(train.mean(), removals, show_progress=False, probe=0)
    again = dif.Retraining(run, keep=folder / "kept").scores(train.mean(), removals)
    return torch.cat([swept.values, again.values], 1)


def work(kind, train, solution, folder):
    if kind == "training":
        np.save(folder / "values.npy", train_and_sweep(train, solution.problem, folder).numpy())
        return
    if kind == "farm":
        values = retrain(train, solution, folder / "kept").values
        np.save(folder / "values.npy", values.numpy())
    else:
        score(train, solution, folder / "scores.npy")


def count_finished(kind, folder):
    """How much is done."""
    if kind == "training":
        kept = retrainings(folder / "kept") if (folder / "kept").exists() else []
        swept = sum(48 - read_archive(file, "sweep")[1]["t"] for file in (folder / "run").glob("sweep_*.npz"))
        return len(list((folder / "run").glob("state_*.npz"))) + swept + len(kept)
    if kind == "farm":
        return len(retrainings(folder / "kept"))
    journal = journal_of(folder / "scores.npy")
    entries = journal.read()[0] if journal.path.exists() else []
    return entries[-1].get("end", 0) if entries else 0


def main(kind, folder):
    torch.set_num_threads(1)
    rng, log, latest = random.Random(kind), folder / "log", LATEST[kind]
    train, solution = problem(log)
    done, killed, attempts = [], 0, 0
    while attempts < 200:
        attempts += 1
        log.touch()
        child = os.fork()
        if child == 0:
            try:
                work(kind, train, solution, folder)
            finally:
                os._exit(0)
        if killed < KILLS:
            time.sleep(rng.uniform(0.005, latest))
            os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)[1]
        killed += ended == signal.SIGKILL
        if not ended:
            break
        done.append(count_finished(kind, folder))
        latest *= 1.0 if done[-1] else 1.5  # a busy machine gets nothing done so soon
    evaluations = log.read_text().splitlines()
    log.unlink()
    print(json.dumps({"killed": killed, "done": done, "attempts": attempts, "evaluations": len(evaluations)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
