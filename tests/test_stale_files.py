"""A changed problem never reuses a file: single edits at random, in `out=` and in `keep=`.

θ̄ and λ̄ are given and stay as they are, so that only the problem itself tells two pieces of work apart. What an earlier
call wrote is overwritten with a number that no score has: if it comes back, the file was reused.
"""

from __future__ import annotations

import copy
import json
import shutil
import zlib

import numpy as np
import pytest
import torch
from torch import nn

import dif

F64 = torch.float64
N, D = 12, 3
PLANTED = 12345.0
EDITS, PARTS = 200, 4


class Scaled:
    """A loss with a number of its own."""

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
    """Every number of a problem that can be edited."""
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
    """Scores into a file, and retrainings into a folder."""
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
    retraining = dif.Retraining(solution, keep=folder / "kept", strict=False, max_iter=30, show_progress=False)
    retraining.scores(targets, removals)
    return out.values.clone(), len(list((folder / "kept").glob("*.npz")))


def edited(parts, rng):
    """One number changed, anywhere, by a little or a lot; or a line of code."""
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
@pytest.mark.parametrize("part", range(PARTS))
def test_edits_are_noticed(part, tmp_path):
    _, kept = work(base(), tmp_path)
    about = json.loads((tmp_path / "s.npy.json").read_text())
    planted = np.load(tmp_path / "s.npy") * 0 + PLANTED

    def plant():
        np.save(tmp_path / "s.npy", planted)
        (piece,) = about["streamed"]["pieces"]
        piece["checksum"] = zlib.crc32(planted.tobytes())
        (tmp_path / "s.npy.json").write_text(json.dumps(about))

    plant()
    values, again = work(base(), tmp_path)
    assert bool((values == PLANTED).all())  # nothing changed: the file is taken as it is
    assert again == kept
    missed = []
    plant()
    for number in range(EDITS // PARTS):
        folder = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name} {number}"))
        name, parts = edited(base(), np.random.default_rng([part, number]))
        values, now = work(parts, folder)
        if bool((values == PLANTED).any()):
            missed.append(f"out: {name}")
        of_targets = name.startswith(("test", "target"))  # retrainings serve any target
        if (now == kept) != of_targets:
            missed.append(f"keep: {name}")
    assert missed == []
