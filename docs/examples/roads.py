# %% [markdown]
# # Link flows on a road network from noisy counts
# The road network of Sioux Falls has 24 junctions and 76 links. The capacities are those of the benchmark of LeBlanc,
# Morlok and Pierskalla (1975), as published in the collection TransportationNetworks. Vehicles are counted on some
# links, several times and with errors (the counts are simulated). Flows must be conserved at every junction (Aθ = 0),
# non-negative and within capacity (θ ≤ c). Which counts determine the flow on a link without counts, and how much of
# that influence is due to the constraints?

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import dif
from dif.report import plots

AFTER = """2 3|1 6|1 4 12|3 5 11|4 6 9|2 5 8|8 18|6 7 9 16|5 8 10|9 11 15 16 17|4 10 12 14|3 11 13|12 24|11 15 23|
10 14 19 22|8 10 17 18|10 16 19|7 16 20|15 17 20|18 19 21 22|20 22 24|15 20 21 23|14 22 24|13 21 23"""
links = [(a, int(b)) for a, several in enumerate(AFTER.split("|"), 1) for b in several.split()]
CAPACITY = {  # thousand vehicles, the same in both directions
    (1, 2): 25.900, (1, 3): 23.403, (2, 6): 4.958, (3, 4): 17.111, (3, 12): 23.403, (4, 5): 17.783, (4, 11): 4.909,
    (5, 6): 4.948, (5, 9): 10.000, (6, 8): 4.899, (7, 8): 7.842, (7, 18): 23.403, (8, 9): 5.050, (8, 16): 5.046,
    (9, 10): 13.916, (10, 11): 10.000, (10, 15): 13.512, (10, 16): 4.855, (10, 17): 4.994, (11, 12): 4.909,
    (11, 14): 4.877, (12, 13): 25.900, (13, 24): 5.091, (14, 15): 5.128, (14, 23): 4.925, (15, 19): 14.565,
    (15, 22): 9.599, (16, 17): 5.230, (16, 18): 19.680, (17, 19): 4.824, (18, 20): 23.403, (19, 20): 5.003,
    (20, 21): 5.060, (20, 22): 5.076, (21, 22): 5.230, (21, 24): 4.885, (22, 23): 5.000, (23, 24): 5.079,
}  # fmt: skip
c = torch.tensor([CAPACITY[min(a, b), max(a, b)] for a, b in links], dtype=torch.float64)
A = torch.zeros(24, 76, dtype=torch.float64)
for j, (a, b) in enumerate(links):
    A[a - 1, j], A[b - 1, j] = -1.0, 1.0

# %% Simulated counts: a circulation near capacity on some links, 6 counts on each of 40 links, 5 % errors
rng = np.random.default_rng(0)
wished = torch.tensor(rng.uniform(0.5, 1.3, 76)) * c
truth = dif.fit(
    dif.Problem(
        dif.Function(lambda p: ((p["flow"] - wished) ** 2 / c).sum()),
        [dif.linear(A[:-1]) == 0.0, dif.linear(torch.eye(76)) <= c, dif.linear(torch.eye(76)) >= 0.0],
    ),
    {"flow": 0.5 * c},
    show_progress=False,
).theta
counted = np.repeat(rng.choice(76, 40, replace=False), 6)
counts = truth.numpy()[counted] * (1 + 0.05 * rng.standard_normal(len(counted)))
seen = torch.tensor(np.eye(76)[counted])

# %% The problem (the balance of the last junction follows from the others, so its row is left out)
train = dif.Samples(
    lambda p, z: (z[0] @ p["flow"] - z[1]) ** 2 / z[2], (seen, torch.tensor(counts), c[counted]), name="count"
)
constraints = [
    (dif.linear(A[:-1], of="flow") == 0.0).named("conservation"),
    (dif.linear(torch.eye(76), of="flow") <= c).named("capacity"),
    (dif.linear(torch.eye(76), of="flow") >= 0.0).named("no negative flow"),
]
solution = dif.fit(dif.Problem(train.mean() + dif.ridge(1e-4), constraints), {"flow": 0.5 * c}, show_progress=False)
full = [links[j] for j in range(76) if float(solution.theta[j]) > float(c[j]) - 1e-9]
print(f"at capacity: {', '.join(f'{a}→{b}' for a, b in full)}")

# %% The target: the largest flow on a link without counts
hidden = [j for j in range(76) if j not in set(counted) and links[j] not in full]
link = max(hidden, key=lambda j: float(solution.theta[j]))
a, b = links[link]
target = dif.linear(torch.eye(76)[link], of="flow", name=f"flow {a}→{b}").as_term()
influence = dif.DirectionalInfluence(solution)
scores = influence.scores(target, train.remove_each(), show_progress=False)
top = [one.index for one in scores.top(30)]
places = sorted({links[counted[i]] for i in top})
print(f"{a}→{b} carries {float(solution.theta[link]):.2f} thousand; the 30 strongest counts are of {places}")

# %% Retraining without each of the strongest counts (without the constraints, a count does not affect other links)
removals = train.remove_each(top)
actual = dif.Retraining(solution).scores(target, removals, show_progress=False)
predicted = influence.scores(target, removals, show_progress=False)
print("DIF      ", predicted.compare(actual))
ignorant = dif.ClassicalInfluence(solution).scores(target, removals, show_progress=False, assess=0)
largest, seen = (float(one.values.abs().max()) for one in (actual, ignorant))
print(f"classical: {seen:.2g} at most, where {largest:.2g} happens: without conservation a count is alone")

# %% The figure
figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
axes[0].scatter(c, solution.theta, s=14, color=plots.BLUE)
axes[0].axline((0, 0), slope=1, color="0.6", ls="--")
axes[0].set_xlabel("capacity, thousand vehicles")
axes[0].set_ylabel("estimated flow")
plots.predicted_vs_actual(predicted.values[:, 0], actual.values[:, 0], axes[1], "DIF", plots.ORANGE)
axes[1].set_title(f"flow {a}→{b}, which is not counted, without each of 30 counts")
figure.savefig("roads.png", dpi=110)
