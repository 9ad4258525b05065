"""What all benchmarks share: one thread, medians, tables, processes of their own."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
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


def timed(function: Callable[[], A], repeat: int) -> tuple[float, A]:
    """Median seconds, and the last answer."""
    seconds = []
    for _ in range(repeat):
        begun = time.perf_counter()
        answer = function()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), answer


def alone(python: Path, *arguments: str, folder: Path = HERE) -> dict[str, Any]:
    """What a script prints last, as JSON; it runs in a process of its own with one thread."""
    done = subprocess.run(
        [str(python), "-W", "ignore", *arguments],
        cwd=folder, env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown, numbers to the right."""
    lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def machine() -> str:
    """On what and when."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, one thread used, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )
