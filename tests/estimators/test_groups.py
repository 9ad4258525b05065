"""AdaptiveInfluence on groups: estimated against actual errors, and which estimator is chosen."""

import warnings

import numpy as np
import pytest
import torch
from problems import bound_regression, fair_logistic, fit_problem

import dif


def random_groups(train, sizes, count=4):
    generator = torch.Generator().manual_seed(3)
    return train.remove_groups(
        [torch.randperm(len(train), generator=generator)[:k].tolist() for k in sizes for _ in range(count)]
    )


@pytest.fixture(scope="module")
def fair():
    train, problem, group = fair_logistic()
    return train, fit_problem(problem), group


def score(estimator, target, groups):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dif.FirstOrderWarning)
        return estimator.scores(target, groups)


def test_the_estimated_error_is_the_actual_error(fair):
    train, solution, group = fair
    groups = random_groups(train, (1, 3, 6, 12))
    target = train.mean(where=group == 0)
    found = score(dif.AdaptiveInfluence(solution), target, groups)
    plain = dif.DirectionalInfluence(solution).scores(target, groups)
    actual = dif.Retraining(solution).scores(target, groups)
    np.testing.assert_allclose(found.values, plain.values, atol=1e-12)
    actual_error = ((plain.values - actual.values) / actual.values).abs()[:, 0]
    estimated = torch.tensor(found.diagnostics["remainders"])
    assert bool((estimated[actual_error > 0.1] > 0.03).all())
    assert bool((estimated[actual_error < 0.01] < 0.03).all())
    assert float((estimated / actual_error).log().abs().median()) < 0.35  # right to a third, typically
    assert set(found.diagnostics["by"]) == {"DIF"}


@pytest.mark.parametrize("accuracy", [0.1, 1e-2, 1e-3, 0.0])
def test_accuracy_moves_up(fair, accuracy):
    train, solution, group = fair
    groups = random_groups(train, (1, 6, 18))
    targets = [train.mean(where=group == 0), train.mean(where=group == 1)]
    found = dif.AdaptiveInfluence(solution, accuracy=accuracy).scores(targets, groups)
    actual = dif.Retraining(solution).scores(targets, groups)
    error = (found.values - actual.values).norm(dim=1) / actual.values.norm(dim=1)
    assert float(error.max()) <= 1.5 * accuracy + 1e-7
    for by, remainder in zip(found.diagnostics["by"], found.diagnostics["remainders"], strict=True):
        assert remainder <= accuracy
        assert by in ("DIF", "Newton", "path")
    if accuracy == 0.0:
        assert set(found.diagnostics["by"]) == {"path"}
    if accuracy == 1e-2:
        assert len(set(found.diagnostics["by"])) > 1


def test_inaccurate_predictions_give_a_warning(fair):
    train, solution, _ = fair
    text = r"first-order prediction is above 0\.03 for 2 of 2 perturbations \(0, 1\)\. It is largest, .* Pass accuracy="
    with pytest.warns(dif.FirstOrderWarning, match=text):
        dif.AdaptiveInfluence(solution).scores(train.mean(), random_groups(train, (18,), count=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", dif.FirstOrderWarning)
        dif.AdaptiveInfluence(solution).scores(train.mean(), 1e-3 * train.remove([4]))


def test_constraints_that_switch_are_named():
    """On a quadratic problem Newton's step is exact, even where constraints switch; DIF's estimated error is large."""
    train, problem = bound_regression()
    solution = fit_problem(problem)
    loosen = 3.0 * problem.constraints[1].shift(1.0)
    found = score(dif.AdaptiveInfluence(solution), train.mean(), loosen)
    assert found.diagnostics["crossed"] == {loosen.labels[0]: ["order"]}
    assert found.diagnostics["remainders"][0] > 0.03
    exact = dif.AdaptiveInfluence(solution, accuracy=1e-6).scores(train.mean(), loosen)
    assert exact.diagnostics["by"] == ["Newton"]
    np.testing.assert_allclose(exact.values, dif.Retraining(solution).scores(train.mean(), loosen).values, atol=1e-9)


def test_each_estimator_is_more_accurate_than_the_last(fair):
    train, solution, _ = fair
    groups = random_groups(train, (6,), count=2)
    actual = dif.Retraining(solution).scores(train.mean(), groups)
    estimators = [make(solution) for make in (dif.DirectionalInfluence, dif.NewtonInfluence, dif.PathInfluence)]
    errors = [score(one, train.mean(), groups).compare(actual).relative_error for one in estimators]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-7


def test_accuracy_is_a_number(fair):
    with pytest.raises(dif.InvalidInputError, match=r"`accuracy` must be a number ≥ 0, not -1\.0\."):
        dif.AdaptiveInfluence(fair[1], accuracy=-1.0)


def test_a_group_without_an_answer_leaves_the_others_unaffected():
    """½(t − 1)² with t ≥ −0.3 and mean(t − z) ≤ 0.1, z = 1, 0.5, −2: without the first z there is no point left."""
    point = dif.Samples(lambda p, z: 0.5 * (p["t"] - z) ** 2, torch.ones(1, dtype=torch.float64), name="s")
    limit = dif.Samples(lambda p, z: p["t"] - z, torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64), name="z")
    problem = dif.Problem(point.mean(), [dif.linear([1.0]) >= -0.3, limit.mean() <= 0.1])
    solution = dif.fit(problem, {"t": torch.tensor(0.0, dtype=torch.float64)}, show_progress=False)
    value = dif.Function(lambda p: p["t"], name="t")
    groups = limit.remove_each()
    found = score(dif.AdaptiveInfluence(solution), value, groups)
    assert bool(torch.isfinite(found.values[2]).all())
    lenient = dif.AdaptiveInfluence(solution, accuracy=1e-6, strict=False).scores(value, groups)
    # the mean of what is left, + 0.1: −0.65, −0.4, 0.85, of which the first two lie below −0.3
    assert torch.isnan(lenient.values[:, 0]).tolist() == [True, True, False]
    assert float(lenient.values[2, 0] + solution.theta[0]) == pytest.approx(0.85, abs=1e-8)
    with pytest.raises(dif.NotConvergedError, match="lost at"):
        dif.AdaptiveInfluence(solution, accuracy=1e-6).scores(value, groups)
