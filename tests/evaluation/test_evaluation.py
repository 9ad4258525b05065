"""Evaluation against oracles that share nothing with it: numpy's least squares, SciPy, scikit-learn."""

import warnings

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

import dif
from dif import evaluation

F64 = torch.float64
N, D = 40, 3
RIDGE = 0.1


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


X, NOISE, TEST_X = draw(N, D, seed=0), draw(N, seed=1), draw(5, D, seed=2)
Y = X.sum(1) + NOISE
TEST_Y = TEST_X.sum(1) + draw(5, seed=3)


def loss(params, z):
    return 0.5 * (z[0] @ params["w"] - z[1]) ** 2


SAMPLES = dif.Samples(loss, (X, Y))


def solve(kept):
    """Ridge regression on some of the samples, by numpy: the change of the loss of each test sample needs no dif."""
    A, b = X[kept].numpy(), Y[kept].numpy()
    return np.linalg.solve(A.T @ A / len(A) + RIDGE * np.eye(D), A.T @ b / len(A))


def held_out_losses(w):
    return 0.5 * (TEST_X.numpy() @ w - TEST_Y.numpy()) ** 2


def refit(removed):
    """Changes of the test losses after training without these samples."""
    kept = [i for i in range(N) if i not in set(removed)]
    return held_out_losses(solve(kept)) - held_out_losses(solve(list(range(N))))


@pytest.fixture(scope="module")
def fitted():
    train = dif.Samples(loss, (X, Y), name="train")
    test = dif.Samples(loss, (TEST_X, TEST_Y), name="test")
    problem = dif.Problem(train.mean() + dif.ridge(RIDGE))
    return train, test, dif.fit(problem, {"w": torch.zeros(D, dtype=F64)}, show_progress=False)


EXACT = np.array([refit([i]) for i in range(N)])  # leave-one-out, (N, 5)


def test_leave_one_out_is_that_of_least_squares(fitted):
    train, test, solution = fitted
    methods = {"Newton": dif.NewtonInfluence(solution), "DIF": dif.DirectionalInfluence(solution), "exact": EXACT}
    result = evaluation.leave_one_out_agreement(methods, dif.Retraining(solution), test, train, strongest=3, random=6)
    np.testing.assert_allclose(result.actual, EXACT[list(result.indices)], rtol=1e-6, atol=1e-9)
    strongest = np.argsort(-np.linalg.norm(EXACT, axis=1))[:3]
    drawn = torch.randperm(N, generator=torch.Generator().manual_seed(0))[:6].tolist()
    assert {*strongest.tolist(), *drawn} <= set(result.indices)
    assert result.agreements["exact"].relative_error < 1e-7
    assert result.agreements["Newton"].pearson > result.agreements["DIF"].pearson > 0.9
    expected = dif.Agreement.of(result.predicted["DIF"], torch.tensor(EXACT[list(result.indices)]))
    assert result.agreements["DIF"].pearson == pytest.approx(expected.pearson, abs=1e-7)
    assert "Leave-one-out agreement" in str(result)
    assert list(result.to_frame().index) == ["Newton", "DIF", "exact"]


def test_linear_datamodelling_score_is_the_mean_rank_correlation(fitted):
    train, test, solution = fitted
    methods = {"DIF": dif.DirectionalInfluence(solution), "exact": EXACT, "one for all": EXACT.mean(1)}
    result = evaluation.linear_datamodelling_score(methods, dif.Retraining(solution), test, train, subsets=12, seed=3)
    assert all(len(set(removed)) == N // 2 for removed in result.removed)
    actual = np.array([refit(removed) for removed in result.removed])
    np.testing.assert_allclose(result.actual, actual, rtol=1e-6, atol=1e-9)
    single = dif.DirectionalInfluence(solution).scores(test, train.remove_each()).values.numpy()
    for name, scores in (("DIF", single), ("exact", EXACT), ("one for all", EXACT.mean(1)[:, None].repeat(5, 1))):
        sums = np.array([scores[list(removed)].sum(0) for removed in result.removed])
        expected = [spearmanr(sums[:, t], actual[:, t]).statistic for t in range(5)]
        np.testing.assert_allclose(result.correlations[name], expected, atol=1e-12)
        assert result.scores[name] == pytest.approx(np.mean(expected))
        assert 0 < result.standard_errors[name] < 1
    kept = [[i for i in range(N) if i not in removed] for removed in map(set, result.removed)]
    opposite = np.array([-EXACT[indices].sum(0) for indices in kept])  # sums over the kept samples, as in TRAK
    expected = [spearmanr(opposite[:, t], actual[:, t]).statistic for t in range(5)]
    np.testing.assert_allclose(result.correlations["exact"], expected, atol=1e-12)


def test_groups_are_predicted_as_a_whole_on_request(fitted):
    train, test, solution = fitted
    exact = dif.NewtonInfluence(solution)  # of a quadratic objective
    both = [
        evaluation.linear_datamodelling_score([exact], dif.Retraining(solution), test, train, subsets=8, jointly=joint)
        for joint in (True, False)
    ]
    assert both[0].scores["Newton"] == pytest.approx(1.0)
    assert both[1].scores["Newton"] < 1.0
    assert both[0].removed == both[1].removed


def test_standard_error_shrinks_with_more_subsets():
    random = torch.Generator().manual_seed(0)
    actual = torch.randn(400, 3, generator=random, dtype=F64)
    predicted = {"noisy": actual + torch.randn(400, 3, generator=random, dtype=F64)}
    few, many = (
        evaluation.DatamodellingScore(tuple((i,) for i in range(m)), actual[:m],
                                      {"noisy": predicted["noisy"][:m]}, ("a", "b", "c")).standard_errors["noisy"]
        for m in (25, 400)
    )  # fmt: skip
    assert 2 < few / many < 8  # √(400/25) = 4


def test_removal_curve_is_that_of_refits(fitted):
    train, test, solution = fitted
    first = EXACT.mean(1)
    methods = {"exact": first, "DIF": dif.DirectionalInfluence(solution)}
    for lower in (False, True):
        curve = evaluation.removal_curve(
            methods, dif.Retraining(solution), test.mean(), train, [8, 2, 4], lower=lower, random=3, seed=5
        )
        order = np.argsort(first if lower else -first, kind="stable")
        assert curve.counts == (2, 4, 8)
        assert curve.orders["exact"] == tuple(order[:8].tolist())
        expected = [refit(order[:k]).mean() for k in curve.counts]
        np.testing.assert_allclose(curve.changes["exact"], expected, rtol=1e-6, atol=1e-9)
        assert (curve.changes["exact"][-1] < curve.random[:, -1].min()) == lower
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randperm(N, generator=generator) for _ in range(3)]
    expected = [[refit(order[:k].tolist()).mean() for k in curve.counts] for order in drawn]
    np.testing.assert_allclose(curve.random, expected, rtol=1e-6, atol=1e-9)


def test_area_under_the_roc_curve_is_that_of_scikit_learn(fitted):
    train, _, solution = fitted
    wrong = torch.arange(N) % 4 == 0
    ties = torch.round(draw(N, seed=7))
    estimator = dif.DirectionalInfluence(solution)
    result = evaluation.label_error_auc({"ties": ties, "DIF": estimator}, wrong, train, show_progress=False)
    own = dif.self_influence(estimator, train, show_progress=False).values[:, 0]
    assert result.areas["ties"] == pytest.approx(roc_auc_score(wrong, ties))
    assert result.areas["DIF"] == pytest.approx(roc_auc_score(wrong, own))
    top = torch.argsort(ties, descending=True, stable=True)[:10]
    assert result.table().rows[0][2] == pytest.approx(float(wrong[top].sum()) / 10)
    assert "10 of 40 labels are wrong" in str(result)
    alone = evaluation.label_error_auc({"ties": ties.numpy()}, wrong.numpy())
    assert alone.areas["ties"] == result.areas["ties"]


def own_training(kept):
    return held_out_losses(solve(kept))


def test_a_training_of_ones_own_is_a_ground_truth(fitted):
    train, test, solution = fitted
    truths = dif.Retraining(solution), own_training
    both = [
        evaluation.linear_datamodelling_score({"exact": EXACT}, truth, test, train, subsets=6, show_progress=False)
        for truth in truths
    ]
    np.testing.assert_allclose(both[0].actual, both[1].actual, rtol=1e-6, atol=1e-9)
    assert both[1].targets == tuple(f"target {t}" for t in range(5))


def test_retrainings_of_subsets_are_kept_and_resumed(fitted, tmp_path, monkeypatch):
    train, test, solution = fitted
    calls = []

    def interrupted(self, direction, usual=dif.Retraining.solve_together):
        calls.append(len(direction.perturbation))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return usual(self, direction)

    def evaluate(folder):
        truth = dif.Retraining(solution, keep=tmp_path / folder)
        return evaluation.linear_datamodelling_score({"exact": EXACT}, truth, test, train, subsets=40, seed=1)

    monkeypatch.setattr(dif.Retraining, "solve_together", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate("kept")
    resumed = evaluate("kept")
    assert sum(calls) == 40 + calls[1]
    assert torch.equal(resumed.actual, evaluate("other").actual)


def test_trainings_that_fail_are_left_out():
    def train(kept):
        return np.full(5, np.nan) if 0 not in kept else own_training(kept)

    result = evaluation.linear_datamodelling_score(
        {"exact": EXACT}, train, None, SAMPLES, subsets=12, show_progress=False
    )
    failed = sum(0 in removed for removed in result.removed)
    assert 0 < failed < 10
    assert f"({failed} trainings failed)" in str(result)
    rows = [m for m, removed in enumerate(result.removed) if 0 not in removed]
    expected = spearmanr(result.predicted["exact"][rows, 0], result.actual[rows, 0]).statistic
    assert float(result.correlations["exact"][0]) == pytest.approx(expected)
    singles = evaluation.leave_one_out_agreement(
        {"exact": EXACT}, train, None, SAMPLES, strongest=N, random=0, show_progress=False
    )
    assert singles.agreements["exact"].n == 5 * (N - 1)
    assert "39 samples, 5 targets (1 training failed)" in str(singles)
    curve = evaluation.removal_curve(
        {"exact": -np.arange(N)}, lambda kept: train(kept)[0], None, SAMPLES, [1],
        random=0, show_progress=False,
    )  # fmt: skip
    assert str(curve).splitlines()[-1].split() == ["exact", "–"]


def test_a_constant_method_or_truth_has_a_dash():
    def row(result, name):
        return next(line for line in str(result).splitlines() if line.startswith(name)).removeprefix(name).split()

    def evaluate(methods, train):
        return evaluation.linear_datamodelling_score(methods, train, None, SAMPLES, subsets=6, show_progress=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = evaluate({"exact": EXACT, "constant": np.ones(N)}, own_training)
        assert row(result, "constant") == ["–"] * 4
        assert "–" not in row(result, "exact")
        assert np.isnan([result.scores["constant"], result.standard_errors["constant"]]).all()
        assert row(evaluate({"exact": EXACT}, lambda kept: np.ones(5)), "exact") == ["–"] * 4
        mixed = evaluate({"exact": EXACT}, lambda kept: np.array([1.0, *own_training(kept)[1:]]))
    expected = result.correlations["exact"][1:]
    assert [row(mixed, "exact")[i] for i in (2, 3)] == [f"{float(x):.4f}" for x in (expected.min(), expected.max())]
    assert mixed.scores["exact"] == pytest.approx(float(expected.mean()))


def test_tables_as_text_markdown_and_frames():
    methods = {"exact": EXACT[:, 0], "random": draw(N, seed=9)}
    curve = evaluation.removal_curve(
        methods, lambda kept: own_training(kept)[0], None, SAMPLES, [2, 5], random=2, show_progress=False
    )
    table = curve.table()
    assert str(table).splitlines()[0] == "Change of target 0 without the k samples that should raise it most"
    assert table.to_markdown().splitlines()[0] == "| method | k = 2 | k = 5 |"
    assert [row.split("|")[1].strip() for row in table.to_markdown().splitlines()[2:]] == [
        "exact",
        "random",
        "random, mean of 2",
        "random, standard deviation",
    ]
    assert curve.to_frame().loc["exact", "k = 5"] == float(curve.changes["exact"][1])
    tiny = evaluation.Table("t", ("m", "x"), (("a", 1.5e-9), ("b", -2e-12)))
    assert [row[1] for row in tiny.format_rows()] == ["1.500e-09", "-2.000e-12"]
