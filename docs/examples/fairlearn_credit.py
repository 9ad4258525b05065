# %% [markdown]
# # Which past loans decide whether a score is fair?
# The German credit data that ship with dif: 1000 loans. The score should accept applicants of 30 years or younger about
# as often as older ones, a constraint that fairlearn calls demographic parity.

# %%
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pandas
from fairlearn.metrics import selection_rate
from fairlearn.reductions import DemographicParity, GridSearch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score

import dif
import dif.fairness
from dif.adapters.fairlearn import FairClassifier, solution_of
from dif.data import german_credit

credit = german_credit()
X, paid = credit.X[:, :-1].numpy(), (credit.paid.numpy() > 0).astype(int)
age = np.where(credit.age.numpy() <= 30, "young", "old")
train, test = slice(0, 700), slice(700, 1000)

# %% The model, fitted to a certified solution of the smooth problem
parity = DemographicParity(difference_bound=0.01)
plain = FairClassifier(C=0.1).fit(X[train], paid[train])
fair = FairClassifier(parity, C=0.1).fit(X[train], paid[train], sensitive_features=age[train])
print(f"certified: {fair.certificate_.holds}, KKT residual {fair.kkt_residual_:.0e}")
print(dict(zip(fair.constraint_names_, fair.multipliers_.round(1).tolist(), strict=True)))

# %% The hard metrics of fairlearn's MetricFrame, and what the constraint is about: probabilities instead of decisions
metrics = {"selection rate": selection_rate, "accuracy": accuracy_score}
scores = {"plain": plain.decision_function(X[train]), "fair": fair.decision_function(X[train])}
print(dif.fairness.compare_metrics(metrics, scores, labels=paid[train], sensitive_features=age[train]).round(3))

# %% Whose loan moves the gap between young and old in new applications?
found = fair.influence_on_metrics(selection_rate, X[test], paid[test], sensitive_features=age[test])
strongest = found.top(20, "selection_rate, difference")
print("trusted:", found.trusted, "the strongest:", [(one.label, round(one.value, 5)) for one in strongest[:3]])

# %% Is it so? Fit again without each of the 20 strongest


def measure_gap(model):
    at_test = {"model": model.decision_function(X[test])}
    table = dif.fairness.compare_metrics(selection_rate, at_test, labels=paid[test], sensitive_features=age[test])
    return table.loc[("selection_rate", "difference")]["model"]


before, after = measure_gap(fair), []
for one in strongest:
    rows = np.delete(np.arange(700), one.index)
    refit = clone(fair).fit(X[rows], paid[rows], sensitive_features=age[rows])
    after.append(measure_gap(refit) - before)
predicted = np.array([one.value for one in strongest])
smoothed, hard = (np.array([change[kind] for change in after]) for kind in ("smoothed", "hard"))
agreement = dif.Agreement.of(predicted, smoothed)  # the slope is that of predicted against actual changes
print(f"smoothed gap: r {agreement.pearson:.4f}, slope {agreement.slope:.2f}")
unmoved, most = np.sum(hard == 0), np.abs(hard).max()
print(f"hard gap: {unmoved} of the 20 removals leave it as it is, the others move it by up to {most:.3f}")

# %% The mean loss of new applications as the target, the strongest retrained, and a report
tested = fair.test_samples(X[test], paid[test])
targets = {"mean test loss": tested.mean(), "of the young": tested.mean(where=age[test] == "young")}
scores = dif.DirectionalInfluence(fair.solution_).scores(targets, fair.samples_.remove_each(), show_progress=False)
again = fair.samples_.remove_each([one.index for one in scores.top(15)])
actual = dif.Retraining(fair.solution_).scores(targets, again, show_progress=False)
print(scores.compare(actual))  # matched by label: 15 of the 700 removals were retrained
features = pandas.DataFrame(X[train], columns=credit.columns[:-1])
folder = Path(mkdtemp())
scores.report(folder / "report.html", features=features, retrained=actual)

# %% The predictor that a GridSearch picks: the same question at its multipliers
picked = GridSearch(LogisticRegression(C=0.1, tol=1e-10), DemographicParity(), grid_size=9)
picked.fit(X[train], paid[train], sensitive_features=age[train])
solution = solution_of(picked)
(people,) = solution.problem.people
coefficient = dif.linear(np.eye(X.shape[1])[0], of="coef", name="coefficient of months")
influence = dif.DirectionalInfluence(solution).scores(coefficient, people.remove_each(), show_progress=False)
print("picked by the grid search:", influence.top(1))
