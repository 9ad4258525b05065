# %% [markdown]
# # Not only removal
# This example shows other perturbations: groups of samples, reweighting, adding and correcting samples, and shifting a
# bound. It also shows how the multipliers change.

# %%
import torch

import dif

torch.manual_seed(1)
X = torch.randn(100, 4).double()
y = X @ torch.tensor([1.0, -0.5, 0.3, 0.0]).double() + 0.1 * torch.randn(100).double()


def squared(params, z):
    return (z[1] - z[0] @ params["w"]) ** 2


train = dif.Samples(squared, (X, y), name="train")
budget = (dif.linear([1.0, 1.0, 1.0, 1.0]) <= 0.5).named("budget")
problem = dif.Problem(train.mean() + dif.ridge(0.01), [budget])
solution = dif.fit(problem, {"w": torch.zeros(4).double()})
dif_ = dif.DirectionalInfluence(solution)

# %% Remove one sample, half of its weight, or several samples at once
print(dif_.change(train.remove([3])).theta["w"])
print(dif_.change(0.5 * train.remove([3])).theta["w"])
print(dif_.change(train.remove([3, 8, 21])).theta["w"])

# %% Add a sample; correct a label (remove the old sample and add the corrected one)
new = (torch.zeros(1, 4).double(), torch.ones(1).double())
print(dif_.change(train.add(new)).theta["w"])
corrected = train.remove([3]) + train.add((X[3:4], y[3:4] + 0.5))
print(dif_.change(corrected).theta["w"])

# %% What if the budget were a little larger? Δθ and the change of the price λ
change = dif_.change(problem.constraints[0].shift(0.01))
print(change.theta["w"], change.multipliers["budget"])
