# %% [markdown]
# # Who shapes a fair regression?
# A least-squares regression predicts the disease progression of 442 patients (scikit-learn's diabetes data). A fairness
# constraint limits how far the error for either sex may exceed the mean error. Which patients determine the
# coefficients, and which of them do so only because of the fairness constraint?

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_diabetes

import dif
from dif.report import plots

data = load_diabetes()
X = torch.tensor(data.data / data.data.std(0))
y = torch.tensor((data.target - data.target.mean()) / data.target.std())
sex = torch.tensor(data.data[:, data.feature_names.index("sex")] > 0)  # which code is which sex is not documented


# %% The problem: the error of each group is at most the mean error + 0.005
def squared(params, batch):
    return (batch[0] @ params["coef"] + params["intercept"] - batch[1]) ** 2


train = dif.Samples(squared, (X, y), name="patient")
risk, groups = train.mean(), {"sex 1": train.mean(where=~sex), "sex 2": train.mean(where=sex)}
start = {"coef": torch.zeros(10).double(), "intercept": torch.zeros(()).double()}
free = dif.fit(dif.Problem(risk + dif.ridge(1e-3)), start, show_progress=False)
fair = [(group <= risk + 0.005).named(name) for name, group in groups.items()]
solution = dif.fit(dif.Problem(risk + dif.ridge(1e-3), fair), start, show_progress=False)
print(solution.active)

# %% Every patient's influence on the prediction for the first patient, and the term through which it acts
prediction = dif.Samples(
    lambda params, x: x @ params["coef"] + params["intercept"], X[:1], name="prediction of patient"
)
influence = dif.DirectionalInfluence(solution)
scores = influence.scores(prediction.mean(), train.remove_each(), show_progress=False)
top = [one.index for one in scores.top(30)]
parts = influence.by_term(prediction.mean(), train.remove_each(top)).to_frame()
constraint = parts.drop(columns="objective").abs().sum(axis=1)
through = (constraint > parts["objective"].abs()).to_numpy()
print(f"{through.sum()} of the 30 strongest act mostly through the fairness constraint")

# %% Does retraining confirm it?
removals = train.remove_each(top)
actual = dif.Retraining(solution).scores(prediction.mean(), removals, show_progress=False)
predicted = influence.scores(prediction.mean(), removals, show_progress=False)
ignorant = dif.ClassicalInfluence(solution).scores(prediction.mean(), removals, show_progress=False, assess=0)
print("DIF      ", predicted.compare(actual))
print("classical", ignorant.compare(actual))

# %% The figure
figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for ax, found, colour in ((axes[0], predicted, plots.ORANGE), (axes[1], ignorant, plots.BLUE)):
    words = f"r = {found.compare(actual).pearson:.3f}"
    plots.predicted_vs_actual(found.values[:, 0], actual.values[:, 0], ax, words, colour)
    ax.set_title(found.estimator)
figure.suptitle("Prediction for the first patient without each of the 30 most influential ones")
figure.savefig("fair_diabetes.png", dpi=110)
sizes = np.abs(free.theta.numpy() - solution.theta.numpy())
print(f"The constraint moves {data.feature_names[int(sizes[:10].argmax())]!r} most: {sizes[:10].max():.3f} of a unit.")
