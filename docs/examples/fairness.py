# %% [markdown]
# # Four fairness constraints by name
# One logistic regression on the German credit data, under each of four constraints. How well does DIF predict what 100
# removals do, and what happens to the metrics that fairlearn reports?

# %%
import warnings

import numpy as np
import torch
from fairlearn.metrics import false_positive_rate, selection_rate, true_positive_rate
from sklearn.metrics import zero_one_loss

import dif
import dif.fairness
from dif.data import german_credit

credit = german_credit()
age = np.where(credit.age.numpy() <= 30, "young", "old")
train_rows, test_rows = slice(0, 700), slice(700, 1000)


def loss(params, batch):
    return torch.nn.functional.softplus(-batch[1] * score(params, batch))


def score(params, batch):
    return batch[0] @ params["w"]


train = dif.Samples(loss, (credit.X[train_rows], credit.paid[train_rows]), name="train")
test = dif.Samples(loss, (credit.X[test_rows], credit.paid[test_rows]), name="test")
start = {"w": torch.zeros(credit.X.shape[1]).double()}

# %% The constraints: lists of dif.Constraint on views of `train`, so that a removal acts on objective and constraints
groups, labels = {"sensitive_features": age[train_rows]}, {"labels": credit.paid[train_rows]}
constraints = {
    "bounded group loss": dif.fairness.bounded_group_loss(train, bound=0.535, **groups),
    "demographic parity": dif.fairness.demographic_parity(train, score, bound=0.02, **groups),
    "equal opportunity": dif.fairness.equal_opportunity(train, score, bound=0.02, **labels, **groups),
    "equalised odds": dif.fairness.equalised_odds(train, score, bound=0.01, **labels, **groups),
}
reported = {
    "bounded group loss": zero_one_loss,
    "demographic parity": selection_rate,
    "equal opportunity": true_positive_rate,
    "equalised odds": {"true positive rate": true_positive_rate, "false positive rate": false_positive_rate},
}

# %% Fit, certify, predict 100 removals, retrain without each
plain = dif.fit(dif.Problem(train.mean() + dif.ridge(0.02)), start, show_progress=False)
removals = train.remove_each(np.random.default_rng(0).permutation(700)[:100])
young = age[test_rows] == "young"
targets = [test.mean(), test.mean(where=young)]
for name, rows in constraints.items():
    solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.02), rows), start, show_progress=False)
    predicted = dif.DirectionalInfluence(solution).scores(targets, removals, show_progress=False)
    actual = dif.Retraining(solution).scores(targets, removals, show_progress=False)
    r = [np.corrcoef(predicted.values[:, t], actual.values[:, t])[0, 1] for t in range(len(targets))]
    print(
        f"\n{name}: certified {dif.Certificate.of(solution).holds}, r {r[0]:.4f} (test loss), {r[1]:.4f} (of the young)"
    )
    scores = {"before": credit.X[train_rows] @ plain.theta, "after": credit.X[train_rows] @ solution.theta}
    paid = (credit.paid[train_rows] > 0).int()
    print(dif.fairness.compare_metrics(reported[name], scores, labels=paid, **groups).round(3).to_string())

# %% A bounded group loss is hard to predict where one person moves the mean loss of the group by much of what the
# constraint takes away. These are errors of the first order: following the solution along the removal has none of them.
data = credit.X[train_rows], credit.paid[train_rows]
losses = loss(plain.params, data)
inside = credit.age[train_rows] <= 25
for bound in (0.57, 0.554, 0.529):
    rows = dif.fairness.bounded_group_loss(train, sensitive_features=inside, bound=bound)
    solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.02), rows), start, show_progress=False)
    actual = dif.Retraining(solution).scores(test.mean(), removals, show_progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dif.FirstOrderWarning)
        predicted = dif.DirectionalInfluence(solution).scores(test.mean(), removals, show_progress=False)
    path = dif.PathInfluence(solution).scores(test.mean(), removals, show_progress=False)
    fair = loss(solution.params, data)[inside]
    share = float((fair - fair.mean()).abs().max()) / (len(fair) - 1) / (float(losses[inside].mean()) - bound)
    print(
        f"loss of {len(fair)} people at most {bound}: one of them moves it by up to {share:.0%} of the room, "
        f"r {predicted.compare(actual).pearson:.3f}, along the path {path.compare(actual).pearson:.5f}, "
        f"trusted {predicted.trusted}"
    )
