# %% [markdown]
# # A curve that must rise and bend down
# Engel's data of 1857 (from statsmodels) contain the income of 235 Belgian households and their spending on food.
# According to theory, spending rises with income, but ever more slowly. We fit a piecewise linear curve under these two
# constraints. Which households determine the curve, and how do the constraints change their influence?

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from statsmodels.datasets import engel

import dif
from dif.report import plots

households = engel.load_pandas().data
income, food = households["income"].to_numpy() / 1000, households["foodexp"].to_numpy() / 1000
knots = np.quantile(income, np.linspace(0, 1, 10))
hats = np.array([[np.interp(x, knots, unit) for unit in np.eye(len(knots))] for x in income])  # (households, knots)

# %% The problem: the parameters are the values at the knots; the slopes must be ≥ 0 and decreasing
slopes = (np.eye(10, k=1) - np.eye(10))[:-1] / np.diff(knots)[:, None]
train = dif.Samples(
    lambda params, z: (z[0] @ params["value"] - z[1]) ** 2, (torch.tensor(hats), torch.tensor(food)), name="household"
)
shape = [
    (dif.linear(slopes, of="value") >= 0.0).named("rising"),
    (dif.linear(np.diff(slopes, axis=0), of="value") <= 0.0).named("bending down"),
]
start = {"value": torch.zeros(10).double()}
solution = dif.fit(dif.Problem(train.mean() + dif.ridge(1e-6), shape), start, show_progress=False)
held = [solution.active.names[j] for j in solution.active.binding]
print(f"{len(held)} of {solution.program.m} rows bind: {', '.join(held)}")

# %% Which households change the predicted spending at an income of 1500 francs?
there = np.array([np.interp(1.5, knots, unit) for unit in np.eye(10)])
target = dif.linear(there, of="value", name="food at 1500").as_term()
influence = dif.DirectionalInfluence(solution)
scores = influence.scores(target, train.remove_each(), show_progress=False)
top = [one.index for one in scores.top(30)]
removals = train.remove_each(top)
actual = dif.Retraining(solution).scores(target, removals, show_progress=False)
derivative = dif.DirectionalInfluence(solution, switching=False)
for name, estimator in (("DIF", influence), ("derivative", derivative), ("Newton", dif.NewtonInfluence(solution))):
    print(f"{name:15}", estimator.scores(target, removals, assess=0).compare(actual))

# %% What do the constraints change? Compare with the scores of a curve without constraints
bent = dif.fit(dif.Problem(train.mean() + dif.ridge(1e-6)), start, show_progress=False)
free = dif.DirectionalInfluence(bent).scores(target, train.remove_each(), assess=0).values[:, 0]
held = scores.values[:, 0]
piece = np.searchsorted(knots, 1.5)
far = torch.tensor((income < knots[piece - 2]) | (income > knots[min(piece + 1, 9)]))
here, there = (float(one[far].abs().sum()) for one in (held, free))
print(f"{int(far.sum())} households lie more than one piece away; their influences add up to {here:.4f} in size,")
print(f"{there:.4f} without the constraints, which carry them along the rows that bind.")

# %% The figure
figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
axes[0].scatter(income, food, s=8, color="0.6")
axes[0].scatter(income[top], food[top], s=16, color=plots.BLUE, label="30 most influential")
axes[0].plot(knots, solution.params["value"], "o-", color=plots.ORANGE, ms=3)
axes[0].set_xlabel("income, thousand francs")
axes[0].set_ylabel("food, thousand francs")
axes[0].legend()
predicted = influence.scores(target, removals, assess=0).values[:, 0]
plots.predicted_vs_actual(predicted, actual.values[:, 0], axes[1], "DIF", plots.ORANGE)
axes[1].set_title("predicted spending at 1500 francs, without each of them")
figure.savefig("curve.png", dpi=110)
