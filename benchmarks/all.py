"""`make bench`: every comparison in one run, written to RESULTS.md."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version

import constrained
import growth
import imports
import unconstrained
from common import HERE, PEERS, alone, machine

SHOWN = ("torch", "pyDVL", "captum", "dattri", "kronfluence", "pyinfluence")
ASKED = "import json; from importlib.metadata import version; print(json.dumps({n: version(n) for n in %r}))"


def main() -> None:
    """Measure, print, write."""
    peers = ", ".join(f"{name} {number}" for name, number in alone(PEERS, "-c", ASKED % (SHOWN,)).items())
    ours = ", ".join(
        f"{name} {version(name)}" for name in ("dif", "torch", "numpy", "daqp", "osqp", "clarabel", "cvxpy")
    )
    text = f"""# Benchmarks

Written by `make bench`. {machine()}. {ours}. Peers, in an environment of their own: {peers}. Every
ratio is of times within this run. NumPy, BLAS and torch are held to one thread.

"""
    for part in (unconstrained, constrained, imports, growth):
        begun = time.perf_counter()
        text += part.section() + "\n"
        print(f"{part.__name__}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        (HERE / "RESULTS.md").write_text(text.rstrip() + "\n")
    print(text)


if __name__ == "__main__":
    main()
