"""The paper's network with and without the fast engine: seconds for fit, curvature and retrainings, in one run.

"before" has an ordinary loss. "after" names the outputs of the model, so that `fit` works in
Gauss–Newton coordinates. Both start at the same parameters and are solved to the same tolerance.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import common  # noqa: F401 (puts `studies` on the path)
import torch

import dif
from studies.cnn import SMALL_STUDY, Setting, build_task, find_target, fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="the small network, on images that come with dif")
    parser.add_argument("--data", help="folder with the four MNIST files (idx, gzip)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--removals", type=int, default=100, help="how many of the strongest removals are retrained")
    parser.add_argument("--out", type=Path, help="file for the results, in JSON")
    options = parser.parse_args()
    setting = SMALL_STUDY if options.small else Setting()
    report = {name: measure(setting, fast, options) for name, fast in (("before", False), ("after", True))}
    for stage in report["before"]:
        before, after = report["before"][stage], report["after"][stage]
        print(f"{stage:24} before {before:10.4g}   after {after:10.4g}   ratio {before / after:.2f}")
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


def measure(setting: Setting, fast: bool, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of each stage, the objective at the solution and the largest residual of a retraining."""
    task = build_task(setting, options.data, options.device, fast)
    seconds: dict[str, float] = {}
    begun = time.perf_counter()

    def note(stage: str) -> None:
        nonlocal begun
        if options.device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds[stage] = time.perf_counter() - begun
        print(f"{'after' if fast else 'before'}: {stage}, {seconds[stage]:.1f} s", flush=True)
        begun = time.perf_counter()

    solution = fit(task, setting, show_progress=False)
    note("fit, s")
    solution.check()
    solution.active.check()
    note("curvature, s")
    _, _, _, test = find_target(task, solution)
    scores = dif.DirectionalInfluence(solution, switching=False).scores(
        test, task.train.remove_each(), show_progress=False, assess=0
    )
    strongest = task.train.remove_each([entry.index for entry in scores.top(options.removals)])
    note("scores, s")
    with tempfile.TemporaryDirectory() as folder:
        retraining = dif.Retraining(solution, keep=folder, strict=False)
        actual = retraining.scores(test, strongest)
    note("retraining, s")
    return {
        **seconds,
        "KKT residual": solution.kkt.residual,
        "objective": solution.value(task.problem.objective),
        "retraining residual": max(actual.diagnostics["residuals"]),
    }


if __name__ == "__main__":
    main()
