# %% [markdown]
# # More than one credit at a time
# The model is a credit score with a bound on the loss of young applicants (real loans of a German bank). What changes
# if whole groups of loans are left out, what does fairness cost, and which loans should be removed?

# %%
import warnings

import matplotlib.pyplot as plt
import torch

import dif
from dif.data import german_credit
from dif.report import plots

credit = german_credit()
young = credit.age <= 25


def loss(params, batch):
    x, paid = batch
    return torch.nn.functional.softplus(-paid * (x @ params["w"]))


train = dif.Samples(loss, (credit.X[:700], credit.paid[:700]), name="train")
test = dif.Samples(loss, (credit.X[700:], credit.paid[700:]), name="test")
risk, fair = train.mean(), train.mean(where=young[:700])
limit = (fair <= risk + 0.02).named("25 or younger")
problem = dif.Problem(risk + dif.ridge(0.01), [limit])
solution = dif.fit(problem, {"w": torch.zeros(credit.X.shape[1], dtype=torch.float64)}, show_progress=False)
young_loss = test.mean(where=young[700:])

# %% Groups: a warning says where the first order cannot be trusted, and `accuracy` switches to a better estimator
order = torch.argsort(credit.age[:700]).tolist()
groups = train.remove_groups([order[-7:], order[-70:], order[-210:]])  # the oldest 1 %, 10 % and 30 %
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    dif.AdaptiveInfluence(solution).scores(young_loss, groups)
print(said[0].message)
careful = dif.AdaptiveInfluence(solution, accuracy=0.01).scores(young_loss, groups)
actual = dif.Retraining(solution).scores(young_loss, groups, show_progress=False)
for p, by in enumerate(careful.diagnostics["by"]):
    print(f"{by}: {float(careful.values[p, 0]):+.6f}, retrained {float(actual.values[p, 0]):+.6f}")

# %% The path: follow the solution during the removal, and find where the constraint becomes inactive
path = dif.PathInfluence(solution).follow(train.remove(order[:70]), stops=torch.linspace(0, 1, 21).tolist())
print(*path.events, sep="\n")

# %% What fairness costs: the price as a function of the bound, its kinks, and the samples that determine it
curve = dif.bound_curve(solution, limit, torch.linspace(-0.05, 0.1, 31), [young_loss, test.mean()])
print(*curve.kinks, sep="\n")
prices = dif.DirectionalInfluence(solution).prices(train.remove_each())
for one in prices.top(3):
    print(f"{one.label}: price {one.value:+.4f}")

# %% Which loans to leave out: chosen one by one, and verified by training without them
choice = dif.choose(solution, young_loss, train, 10, show_progress=False)
ranked = dif.choose(solution, young_loss, train, 10, greedy=False, show_progress=False)
print(f"greedy:  {choice}\nranking: {ranked}")

# %% A small set whose removal reduces the gap on the test set to 0.07
gap = young_loss - test.mean(where=~young[700:])
print(dif.smallest_set(solution, gap, train, 0.07, show_progress=False))

# %% The figure
figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
plots.multiplier_path(path, axes[0])
plots.bound_curve(curve, axes[1])
plots.bound_curve(curve, axes[2], target=0)
axes[0].set_title("the 70 youngest leave")
axes[1].set_title("what fairness costs")
axes[2].set_title("what it buys")
figure.savefig("groups.png", dpi=120)
