"""Measure one library and print one JSON object: python measure.py NAME {time,memory}."""

import importlib
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import oracle
import problem
import torch

RUNS = 5  # timed runs per process


def resident() -> int:
    """Return the current resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(name: str) -> dict[str, object]:
    """Measure the seconds of each run after a warm-up, and the largest error relative to the largest exact score."""
    module = importlib.import_module(name)
    model, data = getattr(module, "load", problem.load)()
    out, seconds = module.scores(model, data), []
    for _ in range(RUNS):
        begun = time.perf_counter()
        module.scores(model, data)
        seconds.append(time.perf_counter() - begun)
    exact = getattr(module, "exact", oracle.scores)(model, data)
    error = float(np.abs(out - exact).max() / np.abs(exact).max())
    return {"seconds": seconds, "error": error, "r": float(np.corrcoef(out.ravel(), exact.ravel())[0, 1])}


def memory(name: str) -> dict[str, object]:
    """Measure the peak memory that one call adds, in bytes, after a warm-up on 20 points that triggers lazy imports."""
    module = importlib.import_module(name)
    model, data = getattr(module, "load", problem.load)()
    getattr(module, "warm", module.scores)(model, problem.Data(*(part[:20] for part in data)))
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    module.scores(model, data)
    high = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return {"peak": high - before}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"time": measure, "memory": memory}[sys.argv[2]](sys.argv[1])))
