"""Random problems from everything that is legal: a public call answers or raises a DifError, nothing else.

Losses are linear, constant, piecewise or smooth; there are several Samples, views of them, and functions. Where the
derivative and a retraining with a small share of the perturbation both answer, they must agree.
"""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn.functional import huber_loss, softplus

import dif

F64 = torch.float64
QUIET = {"show_progress": False}
PROBLEMS, PARTS, MORE = 10, 2, 28
SHARE = 1e-5

LOSSES = {
    "squared": lambda p, z: (z[0] @ p["t"] - z[1]) ** 2,
    "logistic": lambda p, z: softplus(-z[1] * (z[0] @ p["t"])),
    "linear": lambda p, z: z[0] @ p["t"],
    "linear, elementwise": lambda p, z: (z[0] * p["t"]).sum(1),
    "constant": lambda p, z: z[1] ** 2,
    "of the parameters alone": lambda p, z: (p["t"] ** 2).sum() + 0 * z[1],
    "hinge": lambda p, z: torch.relu(1 - z[1] * (z[0] @ p["t"])),
    "absolute": lambda p, z: (z[0] @ p["t"] - z[1]).abs(),
    "pinball": lambda p, z: torch.maximum(0.3 * (z[0] @ p["t"] - z[1]), -0.7 * (z[0] @ p["t"] - z[1])),
    "clamped": lambda p, z: ((z[0] @ p["t"]).clamp(-1, 1) - z[1]) ** 2,
    "steps": lambda p, z: torch.sign(z[0] @ p["t"]),
    "huber": lambda p, z: huber_loss(z[0] @ p["t"], z[1], reduction="none", delta=0.5),
    "cosine": lambda p, z: torch.cos(z[0] @ p["t"]),
    "root": lambda p, z: torch.sqrt((z[0] @ p["t"] - z[1]).abs()),
}
LIKELY = ("squared", "logistic", "huber", "linear")
FUNCTIONS = {
    "ball": lambda p: (p["t"] ** 2).sum(),
    "rows": lambda p: torch.stack([p["t"].sum(), (p["t"] ** 2).sum()]),
    "norm": lambda p: p["t"].norm(),
    "largest": lambda p: p["t"].max(),
    "constant": lambda p: torch.ones((), dtype=F64),
    "product": lambda p: p["t"].prod(),
}


class Drawn:
    """A random problem, with random perturbations."""

    def __init__(self, number: int) -> None:
        self.rng = rng = np.random.default_rng([11, number])
        self.d = d = int(rng.integers(1, 5))
        self.tables: list[dif.Samples] = []
        for name in ("train", "more", "third")[: 1 + int(rng.integers(3))]:
            n = int(rng.integers(6, 26))
            X = torch.tensor(rng.normal(size=(n, d)))
            y = X[:, 0] + torch.tensor(rng.normal(size=n))
            base = dif.Samples(self.loss(), (X, y), name=name)
            self.tables.append(base)
            self.tables += [base.view(self.loss(), name=f"{name} {k}") for k in range(int(rng.integers(3)))]
        objective = self.data_term() + (self.data_term() if rng.random() < 0.3 else 0.0)
        if rng.random() < 0.8:
            objective = objective + dif.ridge(float(rng.choice([0.01, 0.1, 1.0])))
        self.constraints = [self.constraint() for _ in range(int(rng.integers(4)))]
        self.problem = dif.Problem(objective, self.constraints)
        self.start = {"t": torch.tensor(rng.normal(size=d)) * float(rng.choice([0.0, 0.1, 1.0]))}

    def loss(self):
        return LOSSES[str(self.rng.choice(LIKELY if self.rng.random() < 0.6 else list(LOSSES)))]

    def data_term(self):
        samples = self.tables[int(self.rng.integers(len(self.tables)))]
        kind, some = self.rng.integers(4), torch.tensor(self.rng.random(len(samples)) < 0.5)
        some[0] = True
        if kind == 0:
            return samples.mean()
        if kind == 1:
            return samples.mean(where=some)
        if kind == 2:
            return samples.sum() * 0.1
        return samples.weighted(torch.tensor(self.rng.normal(size=len(samples))) / len(samples))

    def constraint(self):
        kind = self.rng.integers(4)
        if kind == 0:
            term = self.data_term()
        elif kind == 1:
            term = dif.linear(self.rng.normal(size=(int(self.rng.integers(1, 3)), self.d)))
        elif kind == 2:
            name = str(self.rng.choice(list(FUNCTIONS)))
            term = dif.Function(FUNCTIONS[name], name=name)
        else:
            term = self.data_term() - self.data_term()
        bound = float(self.rng.choice([-1.0, 0.0, 0.3, 1.0, 5.0]))
        return term == bound if self.rng.random() < 0.2 else term <= bound

    def some(self, samples, most=3):
        return self.rng.choice(len(samples), size=int(self.rng.integers(1, most + 1)), replace=False).tolist()

    def perturbation(self):
        samples = self.tables[int(self.rng.integers(len(self.tables)))]
        d, kind = self.d, self.rng.integers(7)
        new = (torch.tensor(self.rng.normal(size=(1, d))), torch.tensor(self.rng.normal(size=1)))
        if kind == 0:
            return samples.remove(self.some(samples), renormalise=bool(self.rng.random() < 0.5))
        if kind == 1:
            return samples.remove_each()
        if kind == 2:
            return samples.remove_groups([self.some(samples), self.some(samples, len(samples))])
        if kind == 3:
            return samples.reweight(torch.tensor(self.rng.normal(size=len(samples))))
        if kind == 4:
            return samples.add(new)
        if kind == 5:
            return samples.replace(self.some(samples, 1), new)
        if self.constraints:
            return self.constraints[0].shift(0.1)
        return samples.remove([0]) - 0.5 * samples.remove([1])


def estimators(solution, rng):
    strict = bool(rng.random() < 0.5)
    yield lambda: dif.DirectionalInfluence(solution, strict=strict)
    yield lambda: dif.DirectionalInfluence(solution, switching=bool(rng.random() < 0.5), strict=strict)
    yield lambda: dif.ClassicalInfluence(solution, strict=strict)
    yield lambda: dif.NewtonInfluence(solution, strict=strict)
    yield lambda: dif.PenaltyInfluence(solution, strict=strict, at_minimiser=bool(rng.random() < 0.3))
    yield lambda: dif.AdaptiveInfluence(solution, accuracy=0.05)
    yield lambda: dif.PathInfluence(solution)
    yield lambda: dif.Retraining(solution, strict=strict, max_iter=300)


class Calls:
    """Calls functions and counts how each ended; only DifErrors are caught."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.incomplete = 0

    def __call__(self, function):
        try:
            made = function()
        except dif.DifError as error:
            self.ends[type(error).__name__] += 1
            parts = [part.strip() for part in (error.found, error.allowed, error.meaning, error.cure)]
            self.incomplete += not (all(parts) or (parts[0].endswith(".") and not any(parts[1:])))  # four, or one
            return None
        self.ends["answered"] += 1
        return made


def try_problem(number: int, call: Calls, folder) -> None:
    drawn = Drawn(number)
    solution = call(lambda: dif.fit(drawn.problem, drawn.start, max_iter=300, **QUIET))
    if solution is None:
        solution = call(lambda: dif.Solution(drawn.problem, drawn.start))
    if solution is None:
        return
    call(lambda: repr(solution))
    targets = [drawn.data_term(), dif.linear(torch.ones(drawn.d))]
    for make in estimators(solution, drawn.rng):
        made = call(make)
        if made is None:
            continue
        what = drawn.perturbation()
        scores = call(lambda made=made, what=what: made.scores(targets, what))
        if hasattr(made, "change"):
            call(lambda made=made, what=what: made.change(what[0]))
        if hasattr(made, "by_term"):
            call(lambda made=made, what=what: made.by_term(targets[0], what))
        if scores is not None:
            call(lambda scores=scores: scores.top(1))
            call(lambda scores=scores: (scores.save(folder / "s.npz"), dif.Influence.load(folder / "s.npz")))
    call(lambda: dif.self_influence(dif.DirectionalInfluence(solution), drawn.tables[0]))
    call(lambda: dif.choose(solution, targets[0], drawn.tables[0], 2, **QUIET))
    if drawn.constraints:
        call(lambda: dif.bound_curve(solution, drawn.constraints[0], (0.0, 0.05)))
    check_derivative(solution, drawn, call)


def check_derivative(solution, drawn, call) -> None:
    """Compare the derivative along a removal with retraining after a small share of it."""
    removal = drawn.tables[0].remove(drawn.some(drawn.tables[0], 1))
    derivative = call(lambda: dif.DirectionalInfluence(solution, switching=False).change(removal))
    moved = call(lambda: dif.Retraining(solution, tol=1e-13).change(SHARE * removal))
    if derivative is None or moved is None:
        return
    off = float((moved.flat / SHARE - derivative.flat).norm())
    size = max(float(derivative.flat.norm()), 1e-4 * (1 + float(solution.theta.norm())))
    assert off <= 0.02 * size, (derivative.flat, moved.flat / SHARE)
    call.ends["agreed"] += 1


@pytest.mark.parametrize(
    "part", [*range(PARTS), *(pytest.param(PARTS + k, marks=pytest.mark.slow) for k in range(MORE))]
)
def test_only_dif_errors_are_raised(part, capsys, tmp_path):
    call = Calls()
    for k in range(PROBLEMS):
        number = part * PROBLEMS + k
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                try_problem(number, call, tmp_path)
            except Exception as error:
                raise AssertionError(f"problem {number}") from error
    with capsys.disabled():
        print(f"\n{PROBLEMS} problems: {dict(call.ends.most_common())}")
    assert call.incomplete == 0
    assert call.ends["agreed"] > 0
    assert call.ends["answered"] > 5 * PROBLEMS
