"""Measure how much time `import dif` adds to `import torch`."""

from __future__ import annotations

import os
import statistics
import subprocess
import time

from common import ONE_THREAD, OURS

ROUNDS = 9  # pairs of processes


def seconds(statement: str) -> float:
    """Measure the seconds of a process that runs one statement."""
    begun = time.perf_counter()
    subprocess.run([str(OURS), "-c", statement], env=os.environ | ONE_THREAD, check=True)
    return time.perf_counter() - begun


def section() -> str:
    """Measure the imports and return the result as Markdown."""
    pairs = [(seconds("import torch"), seconds("import torch, dif")) for _ in range(ROUNDS)]
    torch, both = (statistics.median(each) for each in zip(*pairs, strict=True))
    more = statistics.median(after - before for before, after in pairs)
    return f"""## Import

`import torch` takes {torch:.2f} s and `import torch, dif` takes {both:.2f} s. The median difference within a pair is
{more:.2f} s (medians of {ROUNDS} pairs of processes, alternating).
"""


if __name__ == "__main__":
    print(section())
