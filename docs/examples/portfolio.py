# %% [markdown]
# # Which weeks make an index tracker what it is?
# A portfolio of 20 stocks follows the S&P 500 without short sales (θ ≥ 0) and with all money invested (Σθ = 1). The
# prices come with the package skfolio. Some weights are exactly 0 (their bounds bind), others nearly so.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from skfolio.datasets import load_sp500_dataset, load_sp500_index

import dif
from dif.report import plots

prices = load_sp500_dataset().join(load_sp500_index()).loc["2019":"2022"]
weekly = 100 * prices.resample("W").last().pct_change().dropna()  # percent
index, stocks = torch.tensor(weekly.iloc[:, -1].to_numpy()), torch.tensor(weekly.iloc[:, :-1].to_numpy())
names, weeks = list(weekly.columns[:-1]), [day.strftime("%d %b %Y") for day in weekly.index]
print(f"{len(index)} weeks, {len(names)} stocks")

# %% The problem
train = dif.Samples(lambda params, z: (z[0] @ params["share"] - z[1]) ** 2, (stocks, index), name="week")
constraints = [
    (dif.linear(torch.eye(len(names)), of="share") >= 0.0).named("no short sales"),
    (dif.linear(torch.ones(len(names)), of="share") == 1.0).named("all invested"),
]
start = {"share": torch.full((len(names),), 1 / len(names)).double()}
solution = dif.fit(dif.Problem(train.mean(), constraints), start, show_progress=False)
share = solution.params["share"]
out = [name for name, held in zip(names, share, strict=True) if held < 1e-9]
print(f"tracking error {solution.objective**0.5:.2f} % a week; not held: {', '.join(out)}")

# %% How would the weight of the largest position change without each week?
largest = int(share.argmax())
target = dif.linear(torch.eye(len(names))[largest], of="share", name=f"weight of {names[largest]}").as_term()
influence = dif.DirectionalInfluence(solution)
scores = influence.scores(target, train.remove_each(), show_progress=False)
for one in scores.top(5):
    print(f"without the week to {weeks[one.index]}: {names[largest]} {100 * one.value:+.2f} points")

# %% Retraining without each of the 30 strongest weeks, compared with DIF and with an estimator without constraints
top = [one.index for one in scores.top(30)]
removals = train.remove_each(top)
actual = dif.Retraining(solution).scores(target, removals, show_progress=False)
found = {
    "DIF": influence.scores(target, removals, show_progress=False),
    "derivative": dif.DirectionalInfluence(solution, switching=False).scores(target, removals, assess=0),
    "classical": dif.ClassicalInfluence(solution).scores(target, removals, show_progress=False, assess=0),
}
for name, one in found.items():
    print(f"{name:15}", one.compare(actual))

# %% The figure: the weights, and predicted against retrained
figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
order = np.argsort(-share.numpy())
axes[0].bar([names[j] for j in order], 100 * share.numpy()[order], color=plots.ORANGE)
axes[0].tick_params(axis="x", rotation=90)
axes[0].set_ylabel("weight, %")
plots.predicted_vs_actual(found["DIF"].values[:, 0], actual.values[:, 0], axes[1], "DIF", plots.ORANGE)
axes[1].set_title(f"weight of {names[largest]} without each of 30 weeks")
figure.savefig("portfolio.png", dpi=110)
