"""Measure the scoring sweep: time per column of V relative to a plain forward pass, and whether memory grows with N.

Besides the solves, the cost of scoring every sample is that of the per-sample slopes ∇ℓᵢ·v for all samples and all
columns v. A Dataset generates the data on the fly, or they are in memory. Peak memory is measured in a separate process
for each N.

    python benchmarks/sweep.py            CPU, and the accelerator if there is one
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

import dif
from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.estimators.first_order import FirstOrderEstimator
from dif.estimators.protocol import by_chunk, fill_scores
from dif.optimality.kkt_system import KKTSystem
from dif.optimality.solution import Solution


def cross_entropy(model, z):
    return nn.functional.cross_entropy(model(z[0]), z[1], reduction="none")


def conv(into, out, size, stride):
    return nn.Sequential(nn.Conv2d(into, out, size, stride, padding=size // 2), nn.Tanh())


def models():
    yield "logistic", nn.Linear(784, 10), (784,)
    yield "tanh 784-256-10", nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10)), (784,)
    layers = [conv(1, 8, 3, 1), conv(8, 8, 3, 2), conv(8, 8, 3, 1), conv(8, 8, 3, 2), conv(8, 10, 1, 1)]
    yield "5 convolutions", nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), (1, 28, 28)


class Made(torch.utils.data.Dataset):
    """Generates samples on demand and stores none."""

    def __init__(self, n, shape, dtype):
        self.n, self.shape, self.dtype = n, shape, dtype

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.full(self.shape, 0.001 * (i % 997), dtype=self.dtype), i % 10

    def __getitems__(self, indices):
        index = torch.tensor(indices)
        X = (0.001 * (index % 997)).to(self.dtype).reshape(-1, *(1 for _ in self.shape)).expand(-1, *self.shape)
        return list(zip(X, index % 10, strict=True))


def solution_of(model, data, batch_size=None):
    train = dif.Samples(cross_entropy, data, name="train", batch_size=batch_size)
    problem = dif.Problem(train.mean() + dif.ridge(0.01), [train.mean() <= 100.0])
    return train, Solution(problem, model, [0.0])


def seconds(work, device, repeats=3):
    best = float("inf")
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


def times(device, dtype, many, report):
    for name, model, shape in models():
        n = many if len(shape) == 1 else many // 10  # convolutions take longer
        model = model.to(device=device, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        X = torch.rand(n, *shape, device=device, dtype=dtype)
        y = torch.randint(0, 10, (n,), generator=generator).to(device)
        train, solution = solution_of(model, (X, y))
        step = 2000 if device == "cpu" else 50_000

        def plain(model=model, X=X, y=y, step=step, n=n):
            with torch.no_grad():
                for begin in range(0, n, step):
                    cross_entropy(model, (X[begin : begin + step], y[begin : begin + step]))

        base = seconds(plain, device)
        direction = Direction(solution.program, train.remove_each())
        weights = solution.program.weights(solution.lam)
        for columns in (1, 4, 16, 64):
            V = torch.randn(solution.theta.numel(), columns, generator=generator).to(solution.theta)
            at = (solution.theta, weights, solution.parts, solution.part_gradients, V)
            took = seconds(lambda at=at, direction=direction: direction.first_order_effects(*at), device)
            ratio = took / base / columns
            key = f"{device} {dtype}, {name}, {columns} columns".replace("torch.", "")
            report[key] = ratio
            print(f"{key}: {ratio:.2f} forward passes per column ({took:.3f} s, forward {base:.3f} s)", flush=True)


class Unprepared:
    """Replaces the solver by the identity, so that only the sweep is measured."""

    residual, steps = 0.0, 0

    def solve(self, B):
        """Return B unchanged."""
        return B

    approximate = solve


def host_peak():
    """Return the peak resident memory of this process in MiB (getrusage would include the parent's at the fork)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def memory(device, n):
    """Print the peak memory in MiB of scoring n samples on 10 targets, with the scores written to disk."""
    model = nn.Sequential(nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)
    # CPU: data generated on the fly; accelerator, where only its own memory is measured: one image repeated n times
    y = torch.zeros(1, dtype=torch.long).expand(n)
    data = Made(n, (784,), torch.float32) if device == "cpu" else (torch.rand(1, 784).expand(n, 784), y)
    train, solution = solution_of(model, data, batch_size=4096)
    test = dif.Samples(cross_entropy, Made(10, (784,), torch.float32), name="test")
    none = torch.zeros(0, dtype=torch.long, device=device)
    system = KKTSystem(solution.objective_curvature, solution.G[:0], none.bool(), none.float(), Unprepared())
    system, estimator = system.start(none, none.bool()), FirstOrderEstimator(solution, 0.0, False)
    estimator.weights, targets = solution.program.weights(solution.lam), Targets(test, solution)
    columns, direction = targets.gradients(solution.theta), Direction(solution.program, train.remove_each())

    def score(chunk):
        values = estimator.answer(system, chunk, columns)[0]
        return values.double().cpu(), {}

    with tempfile.TemporaryDirectory() as folder:
        chunks, out = by_chunk(score, direction, 2**14), f"{folder}/scores.npy"
        done = fill_scores(estimator, solution, targets, direction, chunks, {}, name="sweep", out=out)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else host_peak()
    print(json.dumps({"peak": peak, "scored": len(done)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000, help="samples in the timings; 50 times as many on CUDA")
    parser.add_argument("--memory", type=int, default=20_000, help="N for the peak memory, also taken at 10 N")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device", help="cpu or cuda (default: all that are available)")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        memory(options.device, options.peak_of)
        return
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = [options.device] if options.device else devices
    report: dict[str, object] = {}
    for device in devices:
        n = options.samples * (50 if device == "cuda" else 1)
        times(device, torch.float64 if device == "cpu" else torch.float32, n, report)
    for device in devices:
        found = []
        for n in (options.memory, 10 * options.memory):
            command = [sys.executable, __file__, "--peak-of", str(n), "--device", device]
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found.append(json.loads(answer.splitlines()[-1]))
        small, large = (f["peak"] for f in found)
        print(f"{device}: peak memory {small:.0f} MiB for N = {options.memory}, {large:.0f} MiB for ten times as many")
        report[f"{device} memory, MiB"] = [small, large]
    if options.out:
        with open(options.out, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
