# %% [markdown]
# # A network that must obey a law
# A small network u(t) is fitted to the population of the United States (millions) in the censuses from 1790 to 1990. It
# must nearly obey Verhulst's law u' = r·u·(1 − u/K): a constraint bounds the mean squared residual of the equation over
# the years. r and K are fitted too, and appear only in the law. Which censuses determine the limit K?

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import dif
from dif.report import plots

years = np.arange(1790, 2000, 10)
millions = np.array(
    [3.929, 5.308, 7.240, 9.638, 12.866, 17.069, 23.192, 31.443, 38.558, 50.189, 62.980, 76.212, 92.228, 106.021,
     123.203, 132.165, 151.326, 179.323, 203.302, 226.542, 248.710]
)  # fmt: skip
t, u = torch.tensor((years - 1890) / 100).reshape(-1, 1), torch.tensor(millions / 100)
between = torch.linspace(-1.0, 1.0, 41, dtype=torch.float64).reshape(-1, 1)


# %% The network, its derivative in time, and the law
def network(p, t):
    return torch.tanh(t * p["w"] + p["b"]) @ p["v"] + p["c"]


def slope(p, t):
    return (1 - torch.tanh(t * p["w"] + p["b"]) ** 2) @ (p["w"] * p["v"])


def law(p):
    n = network(p, between)
    return ((slope(p, between) - p["r"] * n * (1 - n / p["K"])) ** 2).mean()


census = dif.Samples(lambda p, z: (network(p, z[0]) - z[1]) ** 2, (t, u), name="census")
start = {
    "w": torch.tensor([0.5, 1.0, 1.5]), "b": torch.tensor([-0.5, 0.0, 0.5]), "v": torch.tensor([0.5, 0.5, 0.5]),
    "c": torch.tensor(1.0), "r": torch.tensor(2.0), "K": torch.tensor(3.0),
}  # fmt: skip
start = {name: value.double() for name, value in start.items()}
shrunk = dif.Function(lambda p: 1.5e-3 * sum((p[name] ** 2).sum() for name in "wbvc"), "½·0.003‖weights‖²")
problem = dif.Problem(census.mean() + shrunk, [(dif.Function(law, "law") <= 1e-3).named("Verhulst's law")])
solution = dif.fit(problem, start, show_progress=False)
limit, rate = 100 * float(solution.params["K"]), float(solution.params["r"])
print(f"K = {limit:.0f} million, r = {rate:.2f} per century; the law's price λ = {float(solution.lam):.3g}")
print(solution.active)

# %% Which censuses determine K?
target = dif.Function(lambda p: 100 * p["K"], "K").as_term()
influence = dif.DirectionalInfluence(solution)
predicted = influence.scores(target, census.remove_each(), show_progress=False)
actual = dif.Retraining(solution).scores(target, census.remove_each(), show_progress=False)
for one in predicted.top(4):
    retrained = float(actual.values[one.index, 0])
    print(f"without the census of {years[one.index]}: K {one.value:+.1f} million, retrained {retrained:+.1f}")
ignorant = dif.ClassicalInfluence(solution, damping=0.1).scores(target, census.remove_each(), assess=0)
print("DIF      ", predicted.compare(actual))
print(f"classical: {float(ignorant.values.abs().max()):.1g} for every census, as K is in the law alone")

# %% The figure
figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
future = torch.linspace(-1.0, 1.6, 100, dtype=torch.float64).reshape(-1, 1)
axes[0].plot(1890 + 100 * future[:, 0], 100 * network(solution.params, future), color=plots.ORANGE, label="network")
axes[0].axhline(limit, color="0.6", ls="--", label="K")
axes[0].scatter(years, millions, s=14, color=plots.BLUE, label="census")
axes[0].set_ylabel("millions")
axes[0].legend()
plots.predicted_vs_actual(predicted.values[:, 0], actual.values[:, 0], axes[1], "DIF", plots.ORANGE)
axes[1].set_title("K, in millions, without each census")
figure.savefig("physics.png", dpi=110)
