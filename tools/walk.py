"""The walk of one score: which files and functions of dif `DirectionalInfluence(solution).scores(...)` passes through.

python tools/walk.py [--names]
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import dif

ROOT = str(Path(dif.__file__).parent)


def count_calls() -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Calls of each function, by file and name: while the estimator is prepared, and while it scores ten removals."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = X[:, 0] + torch.randn(40, generator=generator, dtype=torch.float64)
    train = dif.Samples(lambda p, z: (z[0] @ p["w"] - z[1]) ** 2, (X, y), name="train")
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [dif.linear([1.0, 0.0, 0.0]) <= 0.3])
    solution = dif.fit(problem, {"w": torch.zeros(3, dtype=torch.float64)}, show_progress=False)
    fresh = dif.Solution(problem, solution.params, solution.lam)
    removals, target = train.remove_each(range(10)), train.mean()
    prepared: Counter[tuple[str, str]] = Counter()
    scored: Counter[tuple[str, str]] = Counter()
    seen = prepared

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
            seen[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] += 1

    sys.setprofile(note)
    estimator = dif.DirectionalInfluence(fresh)
    seen = scored
    estimator.scores(target, removals, show_progress=False, assess=0)
    sys.setprofile(None)
    return prepared, scored


if __name__ == "__main__":
    for title, seen in zip(("preparing", "scoring"), count_calls(), strict=True):
        if "--names" in sys.argv:
            for (file, name), calls in sorted(seen.items()):
                print(f"{file:40} {name:60} {calls}")
        print(f"{title}: {len({file for file, _ in seen})} files, {len(seen)} functions")
