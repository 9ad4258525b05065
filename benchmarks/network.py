"""Train a float32 network with a million parameters under group constraints, score every sample, time each phase.

The model is a tanh network 784-1000-300-10 on MNIST. It minimises the mean loss + ridge, subject to the risk of two of
three groups of digits (label mod 3: 0 and 2) being at most the mean risk plus tau. A constraint on the third group
would depend on the others where all are at their bounds. In float32 the curvature is not certified to be positive
everywhere, so damping is needed and reported. Conjugate gradients raise an error if they still meet negative curvature.
"""

import argparse
import json
import time
from pathlib import Path

import common  # noqa: F401 (puts `studies` on the path)
import torch

import dif
from studies.data import mnist


def outputs(model, z):
    return model(z[0])


def loss(logits, z):
    return torch.nn.functional.cross_entropy(logits, z[1], reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the four MNIST files (idx, gzip)")
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--widths", type=int, nargs=2, default=(1000, 300))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--l2", type=float, default=1e-3)
    parser.add_argument("--tau", type=float, default=0.003)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=60, help="time limit of the full-batch phases of fit")
    parser.add_argument("--damping", type=float, nargs="+", default=[5e-3])
    parser.add_argument("--targets", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, n = options.device, options.samples
    report = {k: str(v) for k, v in vars(options).items()}

    def phase(name: str, begun: float) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
        report[name] = {"seconds": time.perf_counter() - begun, "peak_GiB": memory}
        print(f"{name}: {report[name]['seconds']:.1f} s, peak {memory:.2f} GiB", flush=True)

    digits = mnist(n, 10_000, data=options.data)
    X, X_test = ((t.reshape(len(t), 784) / 255).to(device) for t in (digits.train, digits.test))
    y, y_test = digits.train_labels.to(device), digits.test_labels.to(device)
    torch.manual_seed(0)
    a, b = options.widths
    layers = torch.nn.Linear(784, a), torch.nn.Tanh(), torch.nn.Linear(a, b), torch.nn.Tanh(), torch.nn.Linear(b, 10)
    model = torch.nn.Sequential(*layers).to(device)
    train = dif.Samples(loss, (X, y), name="train", outputs=outputs)
    risk, group = train.mean(), (y % 3).cpu()
    constraints = [(train.mean(where=group == g) <= risk + options.tau).named(f"group {g}") for g in (0, 2)]
    problem = dif.Problem(risk + dif.ridge(options.l2), constraints)

    begun = time.perf_counter()
    training = dif.Training(
        problem, model, dif.Adam(1e-3), dif.Ascent(0.01), batch_size=512, epochs=options.epochs, schedule="cosine"
    )
    start = training.run()
    phase("mini-batches", begun)
    begun = time.perf_counter()
    solution = dif.fit(problem, start.params, multipliers=start.multipliers, max_seconds=options.seconds, tol=1e-3)
    phase("fit, whole data", begun)
    print(f"d = {solution.theta.numel():,}; {solution}; λ = {solution.lam.tolist()}")
    begun = time.perf_counter()
    print(solution.active)
    phase("judge", begun)
    report |= {"d": solution.theta.numel(), "solution": repr(solution)}

    predicted = solution.params(X_test).argmax(1)
    wrong = torch.nonzero(predicted != y_test).reshape(-1)[: options.targets]
    print(f"test error {float((predicted != y_test).float().mean()):.4f}; targets: test points {wrong.tolist()}")
    test = dif.Samples(loss, (X_test[wrong], y_test[wrong]), name="test", outputs=outputs)
    previous = None
    for gauss_newton in (False, True):
        for damping in options.damping:
            name = f"{'Gauss–Newton' if gauss_newton else 'Hessian'}, damping {damping:g}"
            try:
                begun = time.perf_counter()
                influence = dif.DirectionalInfluence(
                    solution,
                    damping=damping,
                    gauss_newton=gauss_newton,
                    solver=lambda H: dif.ConjugateGradients(H, tolerance=1e-3),
                    strict=False,
                )
                phase(f"prepare ({name})", begun)
                begun = time.perf_counter()
                scores = influence.scores(test, train.remove_each())
                phase(f"score ({name})", begun)
            except dif.DifError as error:
                print(f"{name}: no scores. {error}")
                report[name] = f"refused: {error}"
                continue
            found = scores.diagnostics
            print(f"{name}: {tuple(scores.values.shape)} scores, solver residual {found['solver_residual']:.1e}")
            report[name] = {"residual": found["solver_residual"], "steps": found["solver_steps"]}
            if found["unanswered"]:
                print(f"  perturbations without an answer (dependent constraints): {len(found['unanswered'])}")
            elif previous is not None:
                print(f"  compared with the previous setting: {scores.compare(previous)}")
            previous = scores if not found["unanswered"] else previous
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
