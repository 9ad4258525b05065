# %% [markdown]
# # A small network under a fairness constraint
# This example starts with an untrained `nn.Module`, scores every sample, and verifies the ten strongest by retraining.

# %%
import torch
from torch import nn

import dif

torch.manual_seed(0)
X = torch.randn(400, 5).double()
group = torch.arange(400) % 2
y = ((X[:, 0] * X[:, 1] + 0.7 * group + 0.3 * torch.randn(400)) > 0.3).double()

# %% The model and its loss per sample


def loss(model, z):
    return nn.functional.binary_cross_entropy_with_logits(model(z[0])[:, 0], z[1], reduction="none")


model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()

# %% The problem: the risk of each group is at most 0.01 above the mean risk
train = dif.Samples(loss, (X, y), name="train")
risk = train.mean()
problem = dif.Problem(
    risk + dif.ridge(0.02), [(train.mean(where=group == g) <= risk + 0.01).named(f"group {g}") for g in (0, 1)]
)

# %% Train on mini-batches, then solve from there, with full-batch steps to a certified solution
run = dif.Training(problem, model, dif.Adam(1e-2), batch_size=64, epochs=20, schedule="cosine").run()
solution = dif.fit(problem, run.params, multipliers=run.multipliers)
print(solution.kkt)
print(solution.active)

# %% Score every sample and verify the ten strongest
estimator = dif.DirectionalInfluence(solution)
scores = estimator.scores(risk, train.remove_each())
strongest = [one.index for one in scores.top(10)]
actual = dif.Retraining(solution).scores(risk, train.remove_each(strongest))
print(estimator.scores(risk, train.remove_each(strongest)).compare(actual))

# %% Through which constraint do they act?
print(estimator.by_term(risk, train.remove_each(strongest)).to_frame().round(5))
