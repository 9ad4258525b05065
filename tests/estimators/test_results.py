"""The results: Influence, Change and Agreement."""

import json
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import torch
from problems import bound_regression, fit_problem

import dif


@pytest.fixture(scope="module")
def scored():
    train, problem = bound_regression()
    solution = fit_problem(problem)
    removals = train.remove_each()
    targets = [train.mean(where=torch.arange(40) < 5), dif.linear([1.0, 0.0, 0.0, 0.0], name="first")]
    return dif.DirectionalInfluence(solution).scores(targets, removals), dif.Retraining(solution).scores(
        targets, removals
    )


def test_shape_and_names(scored):
    predicted, actual = scored
    assert predicted.values.shape == (40, 2)
    assert predicted.targets == ("mean of 5 of train", "first")
    assert predicted.perturbations[17] == "remove train[17]"
    assert (predicted.estimator, actual.estimator) == ("DIF", "retraining")
    assert "40 perturbations × 2 targets" in repr(predicted)


def test_diagnostics_say_how_far_to_trust(scored):
    predicted, actual = scored
    assert predicted.diagnostics["binding"] == ["sum[0]", "order"]
    assert predicted.diagnostics["kkt"]["stationarity"] <= 1e-10
    assert predicted.diagnostics["licq"] > 0.1
    assert predicted.diagnostics["curvature"] > 0.1
    assert predicted.diagnostics["solver_residual"] <= 1e-12
    assert predicted.diagnostics["damping"] == 0
    assert len(actual.diagnostics["residuals"]) == 40
    assert max(actual.diagnostics["residuals"]) <= 1e-10
    json.dumps(predicted.diagnostics)


def test_top(scored):
    predicted, _ = scored
    top = predicted.top(3)
    order = predicted.values[:, 0].abs().argsort(descending=True)[:3].tolist()
    assert [r.index for r in top] == order
    assert top[0].label == predicted.perturbations[order[0]]
    assert top[0].value == float(predicted.values[order[0], 0])
    assert predicted.top(1, "first")[0].index == int(predicted.values[:, 1].abs().argmax())
    assert len(predicted.top(1000)) == 40


def test_frame(scored):
    frame = scored[0].to_frame()
    assert frame.shape == (40, 2)
    assert frame.loc["remove train[3]", "first"] == float(scored[0].values[3, 1])


def test_save_and_load(scored, tmp_path):
    path = tmp_path / "größe und maß.npz"
    scored[0].save(path)
    again = dif.Influence.load(path)
    assert torch.equal(again.values, scored[0].values)
    assert again.perturbations == scored[0].perturbations
    assert again.targets == scored[0].targets
    assert again.diagnostics == json.loads(json.dumps(scored[0].diagnostics))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing unfinished is left
    again.save(path)
    assert again.compare(scored[1]) == scored[0].compare(scored[1])


def test_agreement_against_scipy(scored):
    agreement = scored[0].compare(scored[1])
    p, a = (x.values.reshape(-1).numpy() for x in scored)
    assert agreement.pearson == pytest.approx(scipy.stats.pearsonr(p, a).statistic, abs=1e-12)
    assert agreement.spearman == pytest.approx(scipy.stats.spearmanr(p, a).statistic, abs=1e-12)
    assert agreement.slope == pytest.approx(scipy.stats.linregress(a, p).slope, abs=1e-12)
    assert agreement.relative_error == pytest.approx(np.linalg.norm(p - a) / np.linalg.norm(a), abs=1e-12)
    assert agreement.sign == np.mean(np.sign(p) == np.sign(a))
    assert "slope" in str(agreement)


def test_agreement_with_ties_and_constants():
    x, y = torch.tensor([1.0, 1.0, 2.0, 3.0, 3.0]), torch.tensor([2.0, 1.0, 2.0, 2.0, 5.0])
    assert dif.Agreement.of(x, y).spearman == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)
    flat = dif.Agreement.of(torch.zeros(3), torch.ones(3))
    assert np.isnan(flat.pearson)
    assert flat.relative_error == 1.0


def test_the_sign_of_a_score():
    """Removing a sample with a positive score on a loss raises that loss: the sample was helpful."""
    train, problem = bound_regression()
    solution = fit_problem(problem)
    scores = dif.DirectionalInfluence(solution).scores(train.mean(where=torch.arange(40) == 7), train.remove_each())
    assert float(scores.values[7, 0]) > 0  # a sample helps its own loss
    actual = dif.Retraining(solution).change(train.remove([7])).flat
    loss = train.loss
    before, after = (
        float(loss({"theta": t}, (train.storage.data[0], train.storage.data[1]))[7])
        for t in (solution.theta, solution.theta + actual)
    )
    assert after > before


def test_import_needs_no_extras():
    """Importing dif must not pull in matplotlib, cvxpy, pandas or the like."""
    extras = "{'matplotlib', 'cvxpy', 'pandas', 'statsmodels', 'sklearn'}"
    code = f"import sys, dif; print(sorted({{m.split('.')[0] for m in sys.modules}} & {extras}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
