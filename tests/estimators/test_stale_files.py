"""A changed problem never reuses a file: single edits at random, in `out=` and in `keep=`.

θ̄ and λ̄ are given and stay as they are, so that only the problem itself tells two pieces of work apart. What an earlier
call wrote is overwritten with a number that no score has: if it comes back, the file was reused.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import hashlib
import operator
import shutil
import threading

import numpy as np
import pytest
import torch
from torch import nn

import dif
from dif.runtime.score_array import journal_of

pandas = pytest.importorskip("pandas")

F64 = torch.float64
N, D = 12, 3
PLANTED = 12345.0
EDITS, PARTS = 200, 4


class Scaled:
    """A loss with an attribute that scales it."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, p, z):
        return self.scale * (z[0] @ p["weight"][0] - z[1]) ** 2


class Net(nn.Module):
    def __init__(self, shift, buffer):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.full((1, D), 0.1, dtype=F64)), shift
        self.register_buffer("b", buffer)

    def forward(self, x):
        return (x @ self.weight.T)[:, 0] + self.shift + self.b.sum()


LINES = {  # the loss of the model, as somebody may rewrite it
    "plain": lambda m, z: (m(z[0]) - z[1]) ** 2,
    "doubled": lambda m, z: 2 * (m(z[0]) - z[1]) ** 2,
    "turned": lambda m, z: (z[1] - m(z[0])) ** 2 + 0.0,
    "bent": lambda m, z: torch.cosh(m(z[0]) - z[1]),
}


def base():
    """Return every number of a problem that can be edited."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: torch.tensor(rng.normal(size=shape))  # noqa: E731
    return {
        "X": draw(N, D), "y": draw(N), "X of more": draw(N, D), "y of more": draw(N), "weights": draw(N).abs() + 0.1,
        "coefficients": draw(3).abs(), "bounds": draw(2) + 5, "ridge": torch.tensor([20.0]).double(),
        "matrix": draw(2, D), "function": draw(1), "closure": draw(1), "attribute": draw(1).abs(), "shift": draw(1),
        "buffer": draw(2), "test X": draw(4, D), "test y": draw(4), "test weights": draw(4), "target matrix": draw(D),
        "target scale": draw(1), "group": torch.arange(N) % 3, "line": "plain",
    }  # fmt: skip


def work(parts, folder):
    """Write scores to a file and retrainings to a folder."""
    model = Net(float(parts["shift"]), parts["buffer"]).eval()
    closure, constant = float(parts["closure"]), float(parts["function"])
    train = dif.Samples(LINES[parts["line"]], (parts["X"], parts["y"]), name="train")
    view = train.view(lambda m, z: closure * (m(z[0]) - z[1]), name="view")
    more = dif.Samples(Scaled(float(parts["attribute"])), (parts["X of more"], parts["y of more"]), name="more")
    test = dif.Samples(LINES["plain"], (parts["test X"], parts["test y"]), name="test")
    a, b, c = parts["coefficients"].tolist()
    objective = a * train.weighted(parts["weights"]) + b * more.mean() + dif.ridge(float(parts["ridge"]))
    bent = dif.Function(lambda m: constant * (m["weight"] ** 2).sum(), name="bent")
    constraints = [
        c * view.mean(where=parts["group"] == 0) + bent <= float(parts["bounds"][0]),
        dif.linear(parts["matrix"]) <= float(parts["bounds"][1]),
    ]
    solution = dif.Solution(dif.Problem(objective, constraints), model, torch.zeros(3, dtype=F64))
    targets = [
        1e9 * test.weighted(parts["test weights"]),
        float(parts["target scale"]) * dif.linear(parts["target matrix"]),
    ]
    removals = train.remove_each([3, 4])
    out = dif.DirectionalInfluence(solution, switching=False, strict=False, damping=100.0).scores(
        targets, removals, out=folder / "s.npy", show_progress=False, assess=0
    )
    retraining = dif.Retraining(solution, keep=folder / "kept", strict=False, max_iter=30)
    retraining.scores(targets, removals)
    return out.values.clone(), len(list((folder / "kept").glob("*.npz")))


def edit(parts, rng):
    """Change one number anywhere, by a little or a lot, or a line of code."""
    parts = copy.deepcopy(parts)
    name = str(rng.choice(list(parts)))
    if name == "line":
        parts["line"] = str(rng.choice([line for line in LINES if line != "plain"]))
    elif name == "group":
        k = int(rng.integers(N))
        parts["group"][k] = 1 if parts["group"][k] == 0 else 0
    else:
        flat = parts[name].view(-1)
        k = int(rng.integers(len(flat)))
        flat[k] = flat[k] * (1 + float(rng.choice([1e-14, 1e-9, 1e-3, 2.0])))
    return name, parts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, PARTS))])
def test_edits_are_noticed(part, tmp_path):
    _, kept = work(base(), tmp_path)
    journal = journal_of(tmp_path / "s.npy")
    (*about, piece), _ = journal.read()
    planted = np.load(tmp_path / "s.npy") * 0 + PLANTED

    def plant():
        np.save(tmp_path / "s.npy", planted)
        journal.write([*about, piece | {"checksum": hashlib.sha256(planted).hexdigest()}])

    plant()
    values, again = work(base(), tmp_path)
    assert bool((values == PLANTED).all())  # nothing changed: the file is taken as it is
    assert again == kept
    missed = []
    plant()
    for number in range(EDITS // PARTS):
        folder = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name} {number}"))
        name, parts = edit(base(), np.random.default_rng([part, number]))
        values, now = work(parts, folder)
        if bool((values == PLANTED).any()):
            missed.append(f"out: {name}")
        of_targets = name.startswith(("test", "target"))  # retrainings serve any target
        if (now == kept) != of_targets:
            missed.append(f"keep: {name}")
    assert missed == []


class Config:
    level = 1.0


class Shade(enum.Enum):
    DARK, LIGHT = 1.0, 2.0


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float


class Helped:
    factor = 1.0

    def helper(self, x):
        return x

    def __call__(self, p, z):
        return self.factor * self.helper(squared(p, z))


class Inherits(Helped):
    @property
    def factor(self):
        return 1.0


def squared(p, z):
    return (z[0] @ p["t"] - z[1]) ** 2


def fingerprint(loss):
    """Return the fingerprint of a loss."""
    from dif.derivatives.fingerprint import ObjectEncoder

    return b"".join(ObjectEncoder().encode(loss))


def variants():
    """Return pairs of losses that differ in one object that they refer to."""
    teacher, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with_attribute, changed = (lambda p, z: squared(p, z)), (lambda p, z: squared(p, z))
    with_attribute.scale, changed.scale = 1.0, 2.0
    slow, fast = (functools.cache(lambda x, k=k: k * x) for k in (1.0, 2.0))
    nested = [lambda p, z, k=k: (lambda: (lambda: (lambda: k)())())() * squared(p, z) for k in (1.0, 2.0)]

    class Better(Helped):
        def helper(self, x):
            return 2 * x

    class Darker(Helped):
        factor = 2.0

    frames = [pandas.DataFrame({"a": [1.0, 2.0], "b": ["x", word]}) for word in ("y", "z")]
    words = [np.array(["a", word]) for word in ("b", "c")]
    sparse = [(k * torch.eye(2)).to_sparse() for k in (1.0, 2.0)]
    of = lambda thing: lambda p, z: (thing, squared(p, z))[1]  # noqa: E731
    return {
        "teacher": (of(teacher), of(other)),
        "function attribute": (with_attribute, changed),
        "cached helper": (of(slow), of(fast)),
        "deep nesting": nested,
        "helper method": (Helped(), Better()),
        "class attribute": (Helped(), Darker()),
        "property": (Helped(), Inherits()),
        "slots": (of(Slotted(1.0)), of(Slotted(2.0))),
        "enum": (of(Shade.DARK), of(Shade.LIGHT)),
        "builtin": (of(torch.tanh), of(torch.sin)),
        "methodcaller": (of(operator.methodcaller("sum")), of(operator.methodcaller("mean"))),
        "deque": (of(collections.deque([1.0])), of(collections.deque([2.0]))),
        "range": (of(range(2)), of(range(3))),
        "frame of words": tuple(map(of, frames)),
        "array of words": tuple(map(of, words)),
        "sparse tensor": tuple(map(of, sparse)),
        "partial": (of(functools.partial(pow, 2)), of(functools.partial(pow, 3))),
        "set": (of({1, 2}), of({1, 3})),
    }


@pytest.mark.parametrize("name", variants())
def test_whatever_a_loss_refers_to_is_seen(name):
    before, after = variants()[name]
    assert fingerprint(before) == fingerprint(before)
    assert fingerprint(before) != fingerprint(after)


def test_globals_of_classes_are_seen():
    loss = lambda p, z: Config.level * squared(p, z)  # noqa: E731
    before = fingerprint(loss)
    Config.level = 2.0
    assert fingerprint(loss) != before
    Config.level = 1.0
    assert fingerprint(loss) == before


def test_what_cannot_be_followed_is_new_every_time():
    lock = threading.Lock()
    loss = lambda p, z: (lock, squared(p, z))[1]  # noqa: E731
    assert fingerprint(loss) != fingerprint(loss)


def test_a_checkpoint_of_another_problem_is_not_resumed(tmp_path):
    z = torch.linspace(-1, 1, 9, dtype=F64)

    def solve(c, start):
        train = dif.Samples(lambda p, z: (p["m"] ** 2 - 1) ** 2 + c * p["m"] + 0.1 * (p["m"] - z) ** 2, z)
        problem, start = dif.Problem(train.mean()), {"m": torch.tensor(start, dtype=F64)}
        return float(dif.fit(problem, start, checkpoint=tmp_path / "fit.npz", show_progress=False).theta)

    assert solve(0.05, 1.2) > 0
    assert solve(0.05, -1.2) > 0  # the same problem resumes
    with pytest.warns(UserWarning, match="belongs to another problem"):
        assert solve(0.06, -1.2) < 0


def test_keep_must_not_be_a_file(tmp_path):
    (tmp_path / "kept").write_text("")
    train = dif.Samples(squared, (torch.randn(9, 3, dtype=F64), torch.randn(9, dtype=F64)))
    solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1)), {"t": torch.zeros(3, dtype=F64)})
    for keep in (tmp_path / "kept", "", 3):
        with pytest.raises(dif.InvalidInputError, match="`keep` must be the path of a folder, not "):
            dif.Retraining(solution, keep=keep)
    with pytest.raises(dif.InvalidInputError, match=r"`keep` must be a folder, but a part of '.*kept/x' is a file\."):
        dif.Retraining(solution, keep=tmp_path / "kept" / "x")
