"""A credit score that may not serve the young worse: which of the bank's old credits make it fair, which make it good?

A description for the command line: dif check, dif score, dif retrain. Real data, 700 credits to train on, 300 to test.
"""

import torch

import dif
from dif.data.credit import german_credit

credit = german_credit()
young = credit.age <= 25
fitted, held_out = slice(0, 700), slice(700, 1000)


def loss(params, batch):  # logistic, one number per credit
    x, paid = batch
    return torch.nn.functional.softplus(-paid * (x @ params["w"]))


train = dif.Samples(loss, (credit.X[fitted], credit.paid[fitted]), name="train")
test = dif.Samples(loss, (credit.X[held_out], credit.paid[held_out]), name="test")
risk = train.mean()
problem = dif.Problem(
    risk + dif.ridge(0.01),
    [
        (train.mean(where=young[fitted]) <= risk + 0.02).named("25 or younger"),
        (train.mean(where=~young[fitted]) <= risk + 0.02).named("older than 25"),
    ],
)
solution = dif.fit(problem, {"w": torch.zeros(credit.X.shape[1], dtype=torch.float64)})
targets = {
    "test loss of the young": test.mean(where=young[held_out]),
    "test loss": test.mean(),
    "gap between young and old": test.mean(where=young[held_out]) - test.mean(where=~young[held_out]),
}

names = [f"credit {i + 1}" for i in range(700)]
groups = ["25 or younger" if y else "older than 25" for y in young[fitted].tolist()]
features = {name: column[fitted] for name, column in credit.features.items()}
