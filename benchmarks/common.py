"""Helpers shared by all benchmarks: timing, subprocesses with one thread, Markdown tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
OURS = HERE.parent / ".venv" / "bin" / "python"
PEERS = HERE / ".peers" / "bin" / "python"
LAYERS = HERE / ".layers" / "bin" / "python"
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "VECLIB", "NUMEXPR")}

A = TypeVar("A")

sys.path.append(str(HERE.parent))  # of the package `studies`


def clock(function: Callable[[], A], repeat: int) -> tuple[float, A]:
    """Call the function `repeat` times; return the median time in seconds and the last result."""
    seconds = []
    for _ in range(repeat):
        begun = time.perf_counter()
        answer = function()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), answer


def run_alone(python: Path, *arguments: str, folder: Path = HERE) -> dict[str, Any]:
    """Run Python in a subprocess with one thread; return the last line that it prints, parsed as JSON."""
    done = subprocess.run(
        [str(python), "-W", "ignore", *arguments],
        cwd=folder, env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; all columns but the first are right-aligned."""
    lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def machine() -> str:
    """Describe the processor, the Python version and the date."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, one thread used, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )
