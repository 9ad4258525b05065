"""How good are the scores? Four tests on a breast-cancer model whose risk for large tumours is bounded."""

# %% A constrained model
import tempfile

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier

import dif
from dif.report import plots

features, benign = load_breast_cancer(return_X_y=True)
X = torch.tensor((features - features.mean(0)) / features.std(0))
y = torch.tensor(2.0 * benign - 1.0)
large = X[:, 0] > X[:, 0].median()


def loss(params, batch):
    return torch.nn.functional.softplus(-batch[1] * (batch[0] @ params["w"]))


train = dif.Samples(loss, (X[:400], y[:400]), name="train")
test = dif.Samples(loss, (X[400:], y[400:]), name="test")
bound = train.mean(where=large[:400]) <= train.mean() + 0.01
solution = dif.fit(dif.Problem(train.mean() + dif.ridge(5e-2), [bound]), {"w": torch.zeros(30).double()})

# %% Methods: estimators, or scores from anywhere else, one per sample
methods = {
    "DIF": dif.DirectionalInfluence(solution),
    "classical IF": dif.ClassicalInfluence(solution),
    "own loss": loss(solution.params, (X[:400], y[:400])),
}
truth = dif.Retraining(solution, keep=tempfile.mkdtemp())  # a folder of yours: what is found there is not repeated

# %% Each test takes one line
singles = dif.evaluation.leave_one_out_agreement(methods, truth, test.mean(), train, strongest=10, random=10)
print(singles)
plots.predicted_vs_actual(singles.predicted["DIF"], singles.actual).figure.savefig("evaluation.png")
halves = dif.evaluation.linear_datamodelling_score(methods, truth, test, train, subsets=30)
print(halves)
curve = dif.evaluation.removal_curve(methods, truth, test.mean(), train, [10, 20, 40])
print(curve)

# %% Wrong labels, made on purpose
wrong = torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.1
labels = torch.where(wrong, -y[:400], y[:400])
noisy = dif.Samples(loss, (X[:400], labels), name="noisy")
refitted = dif.fit(dif.Problem(noisy.mean() + dif.ridge(5e-2)), {"w": torch.zeros(30).double()})
rankings = {"DIF": dif.DirectionalInfluence(refitted), "own loss": loss(refitted.params, (X[:400], labels))}
print(dif.evaluation.label_error_auc(rankings, wrong, noisy))

# %% A model that dif cannot train: do the scores of the linear model tell what a forest does without half of the data?


def train_forest(kept):  # numbers of the samples to train on
    forests = (RandomForestClassifier(20, random_state=seed).fit(X[kept], y[kept]) for seed in (0, 1))
    chances = sum(forest.predict_proba(X[400:]) for forest in forests) / 2
    return chances[range(169), (y[400:] < 0).long()]  # T targets: probability of the wrong class


linear = {"DIF of the linear model": methods["DIF"]}
print(dif.evaluation.linear_datamodelling_score(linear, train_forest, test, train, subsets=20))
