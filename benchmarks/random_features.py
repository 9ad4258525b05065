"""Fit and score a convex model with a million parameters: logistic regression on random Fourier features of MNIST.

The multinomial logistic regression minimises the mean loss + ridge, subject to the risk of each of three groups of
digits (label mod 3) being at most the mean risk + tau. The script fits it without assembling a Hessian, scores every
training sample on a few test points, retrains without some of the most influential ones, and prints the seconds, the
columns of Hessian-vector products and the peak memory of each phase.

    python benchmarks/random_features.py --data DIR --features 100000 --device cuda --dtype float64
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import common  # noqa: F401 (puts `studies` on the path)
import numpy as np
import torch
from torch import Tensor

import dif
from dif.derivatives import rows
from dif.derivatives import weight_change as stack
from studies.data import mnist


def features(images: np.ndarray, count: int, device: str, dtype: torch.dtype) -> Tensor:
    """Compute √(2/F)·cos(Wx + b) with fixed random W and b."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(784, count, generator=generator).to(device=device, dtype=dtype) / 6
    b = 2 * np.pi * torch.rand(count, generator=generator).to(device=device, dtype=dtype)
    X = torch.as_tensor(images.reshape(len(images), 784) / 255, dtype=dtype, device=device)
    Z = torch.empty(len(X), count, dtype=dtype, device=device)
    for begin in range(0, len(X), 2000):
        Z[begin : begin + 2000] = torch.cos(X[begin : begin + 2000] @ W + b) * (2 / count) ** 0.5
    return Z


def loss(params, z):
    return torch.nn.functional.cross_entropy(z[0] @ params["W"], z[1], reduction="none")


class Counter:
    """Counts columns of Hessian-vector products."""

    def __init__(self) -> None:
        self.columns = 0
        self._count(rows.Rows, "hessian_products", lambda V: V.shape[1])
        self._count(stack.BatchedProgram, "products", lambda V: V.shape[0] * V.shape[2])

    def _count(self, owner, name, columns) -> None:
        plain = getattr(owner, name)

        def count(this, theta, weights, V, *more):
            self.columns += columns(V)
            return plain(this, theta, weights, V, *more)

        setattr(owner, name, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the four MNIST files (idx, gzip)")
    parser.add_argument("--features", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--l2", type=float, default=1e-4)
    parser.add_argument("--tau", type=float, default=0.01)
    parser.add_argument("--tol", type=float, default=1e-6)
    parser.add_argument("--targets", type=int, default=10)
    parser.add_argument("--retrain", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    counter, report = Counter(), {k: str(v) for k, v in vars(options).items()}

    def phase(name: str, begun: float) -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()
        memory = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else float("nan")
        report[name] = {"seconds": time.perf_counter() - begun, "product_columns": counter.columns, "peak_GiB": memory}
        print(f"{name}: {report[name]['seconds']:.1f} s, {counter.columns} columns, peak {memory:.1f} GiB", flush=True)
        counter.columns = 0

    begun = time.perf_counter()
    n = options.samples
    digits = mnist(n, 10_000, data=options.data)
    y, y_test = digits.train_labels.to(options.device), digits.test_labels.to(options.device)
    Z, Z_test = (features(t.numpy(), options.features, options.device, dtype) for t in (digits.train, digits.test))
    phase("features", begun)

    train = dif.Samples(loss, (Z, y), name="train")
    risk = train.mean()
    groups = [(train.mean(where=(y % 3 == g).cpu()) <= risk + options.tau).named(f"group {g}") for g in range(3)]
    start = {"W": torch.zeros(options.features, 10, dtype=dtype, device=options.device)}
    begun = time.perf_counter()
    problem = dif.Problem(risk + dif.ridge(options.l2), groups)
    solution = dif.fit(problem, start, tol=options.tol, max_seconds=options.seconds)
    phase("fit", begun)
    print(solution)
    begun = time.perf_counter()
    print(solution.active)
    phase("judge", begun)

    wrong = torch.nonzero((Z_test @ solution.params["W"]).argmax(1) != y_test).reshape(-1)[: options.targets]
    print(f"targets: misclassified test points {wrong.tolist()}")
    test = dif.Samples(loss, (Z_test[wrong], y_test[wrong]), name="test")
    begun = time.perf_counter()
    influence = dif.DirectionalInfluence(solution)
    phase("prepare", begun)
    begun = time.perf_counter()
    scores = influence.scores(test, train.remove_each())
    phase("score", begun)
    print(f"scored {scores.values.shape}, solver residual {scores.diagnostics['solver_residual']:.1e}")
    if options.retrain:
        chosen = train.remove_each([r.index for r in scores.top(options.retrain)])
        begun = time.perf_counter()
        actual = dif.Retraining(solution, tol=options.tol).scores(test, chosen)
        phase("retrain", begun)
        agreement = influence.scores(test, chosen).compare(actual)
        print(f"DIF against retraining of {options.retrain} samples: {agreement}")
        print(f"largest KKT residual of a retraining: {max(actual.diagnostics['residuals']):.1e}")
        report["agreement"] = str(agreement)
    report |= {"d": solution.theta.numel(), "solution": repr(solution)}
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
