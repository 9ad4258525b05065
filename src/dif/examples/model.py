"""Describes a model to dif. Use it with `dif check FILE`, `dif score FILE` and `dif retrain FILE`."""

import torch

import dif

torch.manual_seed(0)
X, group = torch.randn(600, 3).double(), torch.arange(600) % 2
y = torch.where(X[:, 0] + 0.8 * group + 0.3 * torch.randn(600) > 0.4, 1.0, -1.0).double()


def loss(params, batch):  # returns one loss per sample, not their mean
    x, label = batch
    return torch.nn.functional.softplus(-label * (x @ params["w"]))


def rate(params, batch):  # constraints may use other quantities: here the predicted probability of label +1
    return torch.sigmoid(batch[0] @ params["w"])


train = dif.Samples(loss, (X, y), name="train")
rates = train.view(rate, name="rates")  # the same samples: a removal affects both the loss and the rates
risk = train.mean()
problem = dif.Problem(
    risk + dif.ridge(1e-2),  # minimise this, with each group's risk ≤ the mean risk + 0.02 and similar rates
    [(train.mean(where=group == g) <= risk + 0.02).named(f"group {g}") for g in (0, 1)]
    + [(rates.mean(where=group == 1) - rates.mean(where=group == 0) <= 0.1).named("parity")],
)

# Required: the solution (fitted here; for a model that you trained: dif.Solution(problem, model, multipliers)),
# and the targets: the numbers whose change you want to predict.
solution = dif.fit(problem, {"w": torch.zeros(3).double()})
targets = {
    "risk": risk,
    "gap": train.mean(where=group == 1) - train.mean(where=group == 0),
}

# Optional, shown in the report: one entry per sample of `train`.
names = [f"person {i}" for i in range(len(train))]
groups = [f"group {int(g)}" for g in group]
features = {"x0": X[:, 0], "x1": X[:, 1], "x2": X[:, 2], "label": y}
# images = pixels  # (n, height, width)
