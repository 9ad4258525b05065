# %% [markdown]
# # An audit of a credit score
# A bank gives you a model and a rule: the mean loss of applicants of 25 years or younger may exceed that of all by at
# most 0.02. Is the rule kept, what does it cost, whom does it depend on, and what is the model without these people?

# %%
from pathlib import Path
from tempfile import mkdtemp

import torch

import dif
from dif.data import german_credit

credit = german_credit()
young = credit.age <= 25


def loss(params, batch):
    x, paid = batch
    return torch.nn.functional.softplus(-paid * (x @ params["w"]))


train = dif.Samples(loss, (credit.X[:700], credit.paid[:700]), name="loan")
test = dif.Samples(loss, (credit.X[700:], credit.paid[700:]), name="test")
rule = (train.mean(where=young[:700]) <= train.mean() + 0.02).named("25 or younger")
problem = dif.Problem(train.mean() + dif.ridge(0.01), [rule])

# %% Is the rule kept? The model is checked as it was handed over, here by fitting it first
handed_over = dif.fit(problem, {"w": torch.zeros(28).double()}, show_progress=False)
solution = dif.Solution(problem, handed_over.params, handed_over.multipliers)
print(dif.Certificate.of(solution))

# %% What does it cost? The test loss as the bound moves
gap = test.mean(where=young[700:]) - test.mean(where=~young[700:])
curve = dif.bound_curve(solution, rule, [0.0, 0.01, 0.02, 0.05, 0.1], {"test loss": test.mean(), "gap": gap})
print(curve)

# %% Whom does the gap between young and old depend on? And can that be believed?
scores = dif.DirectionalInfluence(solution).scores({"gap": gap}, train.remove_each(), show_progress=False)
print(scores.summary(k=3))

# %% The ten strongest, by training again without each
strongest = [one.index for one in scores.top(10)]
retrained = dif.Retraining(solution).scores({"gap": gap}, train.remove_each(strongest))
print(scores.compare(retrained))

# %% Verified removal: the model without all ten, with its certificate
removal = dif.PathInfluence(solution).follow(train.remove(strongest))
print(removal.end.kkt, "gap before and after:", solution.value(gap), removal.end.value(gap))

# %% One file for those who asked
folder = Path(mkdtemp())
ages = {"age": credit.age[:700].int().tolist()}
scores.report(folder / "audit.html", features=ages, retrained=retrained, title="Audit of a credit score")
print("wrote", (folder / "audit.html").name)
