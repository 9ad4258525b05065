"""A credit score that is nearly as accurate for young customers as for all: which past loans make it so?

A model file for the command line (dif check, dif score, dif retrain) on real data: 700 loans to train on, 300 to test.
"""

import torch

import dif
from dif.data import german_credit

credit = german_credit()
young = credit.age <= 25
train_rows, test_rows = slice(0, 700), slice(700, 1000)


def loss(params, batch):  # logistic loss, one number per loan
    x, paid = batch
    return torch.nn.functional.softplus(-paid * (x @ params["w"]))


train = dif.Samples(loss, (credit.X[train_rows], credit.paid[train_rows]), name="train")
test = dif.Samples(loss, (credit.X[test_rows], credit.paid[test_rows]), name="test")
risk = train.mean()
problem = dif.Problem(
    risk + dif.ridge(0.01),
    [
        (train.mean(where=young[train_rows]) <= risk + 0.02).named("25 or younger"),
        (train.mean(where=~young[train_rows]) <= risk + 0.02).named("older than 25"),
    ],
)
solution = dif.fit(problem, {"w": torch.zeros(credit.X.shape[1], dtype=torch.float64)})
targets = {
    "test loss of the young": test.mean(where=young[test_rows]),
    "test loss": test.mean(),
    "gap between young and old": test.mean(where=young[test_rows]) - test.mean(where=~young[test_rows]),
}

names = [f"credit {i + 1}" for i in range(700)]
groups = ["25 or younger" if y else "older than 25" for y in young[train_rows].tolist()]
features = {name: column[train_rows] for name, column in credit.features.items()}
