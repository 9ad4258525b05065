# %% [markdown]
# # Data in a pandas DataFrame
# The index of the frame follows the samples into every result.

# %%
from pathlib import Path
from tempfile import mkdtemp

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import dif

frame = load_breast_cancer(as_frame=True).frame.rename(index="patient {}".format)
columns = ["mean radius", "mean texture", "mean smoothness"]
X = ((frame[columns] - frame[columns].mean()) / frame[columns].std()).assign(intercept=1)
X_train, X_test, y_train, y_test = train_test_split(X, frame["target"], test_size=0.3, random_state=0)
large = X_train["mean radius"] > 0


def loss(params, batch):
    x, benign = batch
    logits = x @ params["w"]
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, benign.double(), reduction="none")


train = dif.Samples(loss, (X_train, y_train), name="train")
test = dif.Samples(loss, (X_test, y_test), name="test")
gap = train.mean(where=large) - train.mean(where=~large)
problem = dif.Problem(train.mean() + dif.ridge(0.1), [(gap <= 0.01).named("large tumours")])
solution = dif.fit(problem, {"w": torch.zeros(4).double()})
print(solution, solution.value(test.mean()), sep="\n")

# %% Scores, by name
targets = {"test loss": test.mean(), "gap": gap}
scores = dif.DirectionalInfluence(solution).scores(targets, train.remove_each())
print(scores.summary(k=3))  # in a notebook, `scores` alone shows a table, and scores.plot() a chart
print(scores.to_frame().join(frame["mean radius"]).sort_values("gap").head(3))
print(scores.opponents(1, "gap")[0].name, "widens the gap most;", len(scores[large]), "have large tumours")

# %% The 15 strongest, by training again
strongest = train.remove_each([one.index for one in scores.top(15)])
actual = dif.Retraining(solution).scores(targets, strongest)
print(scores.compare(actual))  # matched by label: 15 of the removals were retrained

# %% Files
folder = Path(mkdtemp())
solution.save(folder / "solution.npz")  # dif.Solution.load(path, problem, params) reads it again
scores.report(folder / "report.html", features=X_train, retrained=actual)
