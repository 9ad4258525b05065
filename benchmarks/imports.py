"""What importing dif adds to importing torch."""

from __future__ import annotations

import os
import statistics
import subprocess
import time

from common import ONE_THREAD, OURS

ROUNDS = 9


def seconds(statement: str) -> float:
    """Of a process that runs one statement."""
    begun = time.perf_counter()
    subprocess.run([str(OURS), "-c", statement], env=os.environ | ONE_THREAD, check=True)
    return time.perf_counter() - begun


def section() -> str:
    """A sentence."""
    pairs = [(seconds("import torch"), seconds("import torch, dif")) for _ in range(ROUNDS)]
    torch, both = (statistics.median(each) for each in zip(*pairs, strict=True))
    more = statistics.median(after - before for before, after in pairs)
    return f"""## Import

`import torch` takes {torch:.2f} s, `import torch, dif` {both:.2f} s; in pairs {more:.2f} s more (medians of
{ROUNDS} pairs of processes, in turn).
"""


if __name__ == "__main__":
    print(section())
