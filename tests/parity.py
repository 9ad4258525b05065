"""Demographic parity on the `fair` data of statsmodels: the rates are a view of the people that the loss is about."""

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

FILE = """
import numpy as np
import statsmodels.api as sm
import torch

import dif

frame = sm.datasets.fair.load_pandas().data.sample(600, random_state=0).reset_index(drop=True)
columns = ["rate_marriage", "age", "yrs_married", "religious", "educ"]
scaled = (frame[columns] - frame[columns].mean()) / frame[columns].std()
X = torch.tensor(np.column_stack([np.ones(len(frame)), scaled.values]))
y = torch.tensor((frame.affairs > 0).values).double() * 2 - 1
parents = torch.tensor((frame.children > 0).values)


def loss(params, batch):
    return torch.nn.functional.softplus(-batch[1] * (batch[0] @ params["w"]))


def rate(params, batch):
    return torch.sigmoid(batch[0] @ params["w"])


train = dif.Samples(loss, (X, y), name="train")
rates = train.view(rate, name="rates")
problem = dif.Problem(
    train.mean() + dif.ridge(1e-2),
    [
        (rates.mean(where=parents) - rates.mean(where=~parents) <= 0.03).named("parity"),
        (rates.mean() <= 0.30).named("budget"),
    ],
)
solution = dif.fit(problem, {"w": torch.zeros(X.shape[1]).double()}, show_progress=False)
targets = {"risk of the childless": train.mean(where=~parents)}
"""


def resolve_without(told, gone):
    """The change of the target when one person has left the loss and the rates, by SciPy's SLSQP."""
    X, y, parents = (told[name].numpy() for name in ("X", "y", "parents"))
    here = np.arange(len(y)) != gone

    def rates(w):
        chance = expit(X @ w)
        slope = (chance * (1 - chance))[:, None] * X
        a, b = here & parents, here & ~parents
        values = np.array([chance[a].mean() - chance[b].mean() - 0.03, chance[here].mean() - 0.30])
        return values, np.stack([slope[a].mean(0) - slope[b].mean(0), slope[here].mean(0)])

    def objective(w):
        margin = y * (X @ w)
        pull = (-y * expit(-margin))[:, None] * X
        return np.logaddexp(0, -margin)[here].mean() + 0.005 * w @ w, pull[here].mean(0) + 0.01 * w

    start = told["solution"].theta.numpy()
    limits = {"type": "ineq", "fun": lambda w: -rates(w)[0], "jac": lambda w: -rates(w)[1]}
    found = minimize(
        objective, start, jac=True, constraints=[limits], method="SLSQP", options={"ftol": 1e-15, "maxiter": 500}
    )
    risk = lambda w: np.logaddexp(0, -y * (X @ w))[~parents].mean()  # noqa: E731
    return risk(found.x) - risk(start)
