# %% [markdown]
# # A network that is fine-tuned, not solved
# A small network scores credits (real loans of a German bank). It is trained without constraints, then fine-tuned on
# mini-batches under a bound on the loss of young applicants, and stopped after five epochs. What would the same
# fine-tuning have done without each of the loans?

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import dif
from dif.data import german_credit
from dif.report import plots

credit = german_credit()
young = credit.age <= 25
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(credit.X.shape[1], 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss(model, batch):
    x, paid = batch
    return nn.functional.softplus(-paid * model(x)[:, 0])


# %% Pretraining as usual: by SGD, which ends with steps as large as those of the fine-tuning
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
for _ in range(100):
    for index in torch.randperm(700).split(100):
        optimizer.zero_grad()
        loss(model, (credit.X[index], credit.paid[index])).mean().backward()
        optimizer.step()

# %% Fine-tuning under a constraint: descent on the parameters, ascent on the multiplier
train = dif.Samples(loss, (credit.X[:700], credit.paid[:700]), name="train")
test = dif.Samples(loss, (credit.X[700:], credit.paid[700:]), name="test")
risk = train.mean()
fair = (train.mean(where=young[:700]) <= risk + 0.02).named("25 or younger")
problem = dif.Problem(risk + dif.ridge(0.01), [fair])
training = dif.Training(
    problem, model, dif.SGD(0.05, momentum=0.9), dif.Ascent(0.5), batch_size=100, epochs=5, schedule="cosine"
)
run = training.run(show_progress=False)
print(run, "price of the bound:", float(run.multipliers[fair]))

# %% Predictions for all loans by one sweep back over the run; twelve of them are carried out as a check
target = test.mean(where=young[700:])
scores = dif.UnrolledInfluence(run).scores(target, train.remove_each(), show_progress=False)
print(*scores.top(3), sep="\n")
print("trusted:", scores.trusted, f"(estimated relative error {scores.diagnostics['assessment']['pooled']:.1%})")

# %% The 20 strongest, fine-tuned again without each: same start, same batches
removals = train.remove_each([entry.index for entry in scores.top(20)])
predicted = dif.UnrolledInfluence(run).scores(target, removals, show_progress=False)
actual = dif.Retraining(run).scores(target, removals, show_progress=False)
print(predicted.compare(actual))

# %% The figure
figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
plots.history(run, axes.flat[:3])
plots.predicted_vs_actual(predicted, actual, axes[1, 1], "20 strongest loans")
figure.savefig("finetune.png", dpi=120)
