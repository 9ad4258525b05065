"""Run every comparison and write RESULTS.md (`make bench`)."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version

import constrained
import growth
import imports
import instead
import unconstrained
from common import HERE, PEERS, machine, run_alone

# packages whose versions are listed, and the command that prints those of the other libraries
SHOWN = ("torch", "pyDVL", "captum", "dattri", "kronfluence", "pyinfluence")
ASKED = "import json; from importlib.metadata import version; print(json.dumps({n: version(n) for n in %r}))"


def main() -> None:
    """Run all benchmarks, print the report and write it to RESULTS.md after each part."""
    peers = ", ".join(f"{name} {number}" for name, number in run_alone(PEERS, "-c", ASKED % (SHOWN,)).items())
    packages = ("directional-influence", "torch", "numpy", "daqp", "osqp", "clarabel", "cvxpy")
    ours = ", ".join(f"{name} {version(name)}" for name in packages)
    text = f"""# Benchmarks

Written by `make bench`. {machine()}. {ours}. Other libraries, in a separate environment: {peers}.
All ratios compare times within this run. NumPy, BLAS and torch use one thread.

"""
    for part in (unconstrained, constrained, instead, imports, growth):
        begun = time.perf_counter()
        text += part.section() + "\n"
        print(f"{part.__name__}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        (HERE / "RESULTS.md").write_text(text.rstrip() + "\n")
    print(text)


if __name__ == "__main__":
    main()
