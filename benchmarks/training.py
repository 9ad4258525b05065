"""Measure what influence through training costs: time of the sweep against the training, memory against its length.

The model is the paper's network, pretrained for a moment on MNIST and fine-tuned under group constraints. On a CPU it
is small. On a GPU (`python training.py cuda DATA`, with a folder that has MNIST) it has its full size, and the memory
of trainings of several lengths is measured, too.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import table

import dif
from studies.finetune import Setting, Task, build_task, build_training

CPU = Setting(n=600, channels=3, side=14, pretraining=2, epochs=4, batch_size=60)
GPU = Setting(pretraining=3)
WIDTHS = {"cpu": (3, 8), "cuda": (8, 32, 172)}  # channels
LENGTHS = (100, 400, 1_600)  # steps, for the memory
TARGETS = (1, 6, 10)
REPEATS = 3  # the least time counts


def timed(device: str, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of some work and the least of its times."""
    best, result = float("inf"), None
    for _ in range(REPEATS):
        begun = time.perf_counter()
        result = work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return result, best


def state(setting: Setting, device: str, data: str | None) -> tuple[Task, dif.Training]:
    """Build the task of a setting and its training, whose losses are checked before it is measured."""
    with tempfile.TemporaryDirectory() as folder:
        task = build_task(setting, Path(folder), data, device, show_progress=False)
    training = build_training(task, setting)
    _ = training.loop
    return task, training


def measure_time(setting: Setting, device: str, data: str | None) -> list[str]:
    """Return a row: parameters, steps, seconds of the training, ratios of the sweeps to it."""
    task, training = state(setting, device, data)
    run, seconds = timed(device, lambda: training.run(show_progress=False))
    ratios = []
    for count in TARGETS:
        every = {f"{name} ({copy})": target for copy in "ab" for name, target in task.targets.items()}
        targets = dict(list(every.items())[:count])
        work = lambda targets=targets: dif.UnrolledInfluence(run).scores(  # noqa: E731
            targets, task.train.remove_each(), show_progress=False, probe=0
        )
        ratios.append(f"{timed(device, work)[1] / seconds:.1f}")
    return [f"{run.theta.numel():,}", f"{run.loop.length}", f"{seconds:.2f}", *ratios]


def measure_memory(setting: Setting, data: str | None) -> list[list[str]]:
    """Return a row for each length of training: states held and peak of the memory, of all states and of √T."""
    rows: list[list[str]] = []
    for length in LENGTHS:
        short = replace(setting, n=600, batch_size=60, epochs=length // 10, pretraining=1)
        task, training = state(short, "cuda", data)
        cells = [f"{length:,}"]
        for keep in ("all", "sqrt"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run = training.run(keep=keep, show_progress=False)
            dif.UnrolledInfluence(run).scores(
                task.targets["test loss"], task.train.remove_each(), show_progress=False, probe=0
            )
            held = len(run.states._kept) + len(run.states._recent)
            cells += [f"{held:,}", f"{(torch.cuda.max_memory_allocated() - before) / 2**20:,.0f}"]
            del run
        rows.append(cells)
    return rows


def section(device: str = "cpu", data: str | None = None) -> str:
    """Return the section of RESULTS.md."""
    setting = GPU if device == "cuda" else CPU
    times = [measure_time(replace(setting, channels=width), device, data) for width in WIDTHS[device]]
    names = [f"sweep / training, {count} target{'s' if count > 1 else ''}" for count in TARGETS]
    text = "## Influence through training\n\n" + table(["parameters", "steps", "training, s", *names], times) + "\n"
    if device == "cuda":
        headings = ["steps", "all: states", "all: peak, MiB", "√T: states", "√T: peak, MiB"]
        text += "\n" + table(headings, measure_memory(replace(setting, channels=WIDTHS[device][-1]), data)) + "\n"
    return text


if __name__ == "__main__":
    print(section(*sys.argv[1:] or ("cpu",)))
