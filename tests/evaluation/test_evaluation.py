"""Evaluation against oracles that share nothing with it: numpy's least squares, SciPy, scikit-learn."""

import os
import warnings

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
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
    assert result.share_found("ties", 0.25) == pytest.approx(float(wrong[top].sum()) / 10)
    assert "10 of 40 labels are wrong" in str(result)
    alone = evaluation.label_error_auc({"ties": ties.numpy()}, wrong.numpy())
    assert alone.areas["ties"] == result.areas["ties"]


def test_flipped_labels_are_others():
    labels = np.array([3, 5, 9] * 100)
    flipped, wrong = evaluation.flip_labels(labels, 0.2, seed=1)
    assert int(wrong.sum()) == 60
    assert torch.equal(flipped != torch.as_tensor(labels), wrong)
    assert set(flipped.tolist()) == {3, 5, 9}
    again = evaluation.flip_labels(labels, 0.2, seed=torch.Generator().manual_seed(1))
    assert torch.equal(again[0], flipped)


def own_training(kept, seed=0):
    return held_out_losses(solve(kept))


def test_a_training_of_ones_own_is_a_ground_truth(fitted):
    train, test, solution = fitted
    truths = dif.Retraining(solution), evaluation.OwnTraining(own_training, N)
    both = [
        evaluation.linear_datamodelling_score({"exact": EXACT}, truth, test, train, subsets=6, show_progress=False)
        for truth in truths
    ]
    np.testing.assert_allclose(both[0].actual, both[1].actual, rtol=1e-6, atol=1e-9)
    alone = evaluation.linear_datamodelling_score({"exact": EXACT}, truths[1], None, N, subsets=6, show_progress=False)
    assert torch.equal(alone.actual, both[1].actual)
    assert alone.targets == tuple(f"target {t}" for t in range(5))


def test_targets_are_averaged_over_seeds():
    truth = evaluation.OwnTraining(lambda kept, seed: float(len(kept) * seed), 10, seeds=[1, 2, 6])
    samples = dif.Samples(loss, (X[:10], Y[:10]))
    scores = truth.scores(None, samples.remove_groups([[0, 1], [5]]), show_progress=False)
    np.testing.assert_allclose(scores.values, [[-6.0], [-3.0]])


def test_killed_and_resumed_gives_the_same_bits(tmp_path):
    log = tmp_path / "log"

    def train(kept, seed):
        with log.open("a") as file:
            file.write(f"{kept}\n")
        if len(log.read_text().splitlines()) == 5:
            os._exit(9)  # as a kill would: nothing is cleaned up
        return own_training(kept)

    def evaluate(keep):
        truth = evaluation.OwnTraining(train, N, keep=keep)
        return evaluation.linear_datamodelling_score({"exact": EXACT}, truth, None, N, subsets=8, show_progress=False)

    child = os.fork()
    if child == 0:
        evaluate(tmp_path / "kept")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    resumed = evaluate(tmp_path / "kept")
    lines = log.read_text().splitlines()
    assert len(lines) == 1 + 8 + 1  # all samples, the subsets, and the one that was killed
    assert len(set(lines)) == 9
    fresh = evaluate(tmp_path / "other")
    assert torch.equal(resumed.actual, fresh.actual)
    assert resumed.removed == fresh.removed
    assert evaluate(tmp_path / "kept").scores == resumed.scores
    assert len(log.read_text().splitlines()) == 10 + 9


def test_kept_trainings_are_repeated_once_the_function_changes(tmp_path):
    called, samples = [], dif.Samples(loss, (X[:10], Y[:10]))

    def measure(setting, *, keep=tmp_path / "kept"):
        def train(kept, seed):
            log(kept)
            return setting["factor"] * len(kept)

        count = len(called)
        truth = evaluation.OwnTraining(train, 10, keep=keep)
        return truth.scores(None, samples.remove([1, 2]), show_progress=False).values.item(), len(called) - count

    log = Log(called)
    assert measure({"factor": 1.0}) == (-2.0, 2)
    assert measure({"factor": 1.0}) == (-2.0, 0)
    assert measure({"factor": 3.0}) == (-6.0, 2)  # the code is the same, what it refers to is not
    assert measure({"factor": 1.0}) == (-2.0, 0)


class Log:
    """Counts calls without being part of what a fingerprint sees."""

    def __init__(self, called):
        self.called = called

    def __call__(self, kept):
        self.called.append(len(kept))

    def __reduce__(self):
        return (Log, ([],))


def test_a_function_that_cannot_be_inspected_is_reported(tmp_path):
    generator = (number for number in range(3))
    with pytest.warns(UserWarning, match="`train` refers to an object that cannot be inspected, so nobody can tell"):
        evaluation.OwnTraining(lambda kept, seed: next(generator), 10, keep=tmp_path)


def test_a_damaged_training_is_refused(tmp_path):
    truth = evaluation.OwnTraining(lambda kept, seed: 1.0, 10, keep=tmp_path)
    samples = dif.Samples(loss, (X[:10], Y[:10]))
    truth.scores(None, samples.remove([1]), show_progress=False)
    for path in tmp_path.glob("*.npy"):
        path.write_bytes(b"noise")
    with pytest.raises(dif.InvalidInputError, match="Delete the file; that training is then repeated") as caught:
        evaluation.OwnTraining(truth.train, 10, keep=tmp_path).scores(None, samples.remove([1]), show_progress=False)
    assert caught.value.meaning == "It is damaged."


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
    def train(kept, seed):
        return np.full(5, np.nan) if 0 not in kept else own_training(kept)

    truth = evaluation.OwnTraining(train, N)
    result = evaluation.linear_datamodelling_score({"exact": EXACT}, truth, None, N, subsets=12, show_progress=False)
    failed = sum(0 in removed for removed in result.removed)
    assert 0 < failed < 10
    assert f"({failed} trainings failed)" in str(result)
    rows = [m for m, removed in enumerate(result.removed) if 0 not in removed]
    expected = spearmanr(result.predicted["exact"][rows, 0], result.actual[rows, 0]).statistic
    assert float(result.correlations["exact"][0]) == pytest.approx(expected)
    singles = evaluation.leave_one_out_agreement(
        {"exact": EXACT}, truth, None, N, strongest=N, random=0, show_progress=False
    )
    assert singles.agreements["exact"].n == 5 * (N - 1)
    assert "39 samples, 5 targets (1 training failed)" in str(singles)
    curve = evaluation.removal_curve(
        {"exact": -np.arange(N)}, evaluation.OwnTraining(lambda kept, seed: train(kept, seed)[0], N), None, N, [1],
        random=0, show_progress=False,
    )  # fmt: skip
    assert str(curve).splitlines()[-1].split() == ["exact", "–"]


def test_a_constant_method_or_truth_has_a_dash():
    def row(result, name):
        return next(line for line in str(result).splitlines() if line.startswith(name)).removeprefix(name).split()

    def evaluate(methods, train):
        truth = evaluation.OwnTraining(lambda kept, seed: train(kept), N)
        return evaluation.linear_datamodelling_score(methods, truth, None, N, subsets=6, show_progress=False)

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
    assert "LDS –" in [label.get_text().splitlines()[1] for label in result.plot().get_yticklabels()]


@pytest.fixture(scope="module")
def results():
    truth = evaluation.OwnTraining(lambda kept, seed: own_training(kept)[0], N)
    methods = {"exact": EXACT[:, 0], "random": draw(N, seed=9)}
    options = {"show_progress": False}
    return [
        evaluation.linear_datamodelling_score(methods, truth, None, N, subsets=5, **options),
        evaluation.leave_one_out_agreement(methods, truth, None, N, strongest=2, random=2, **options),
        evaluation.removal_curve(methods, truth, None, N, [2, 5], random=2, **options),
        evaluation.label_error_auc(methods, torch.arange(N) < 5, **options),
    ]


def test_results_come_back_from_disk(results, tmp_path):
    for result in results[:3]:
        result.save(tmp_path / "result.npz")
        again = type(result).load(tmp_path / "result.npz")
        assert str(again) == str(result)
        for name, value in vars(result).items():
            kept = getattr(again, name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(kept, value)
            elif name in ("predicted", "changes"):
                assert all(torch.equal(kept[key], value[key]) for key in value)
            elif name in ("removed", "targets", "indices", "counts", "orders", "target", "lower"):
                assert kept == value


def test_pictures_need_no_axes(results, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    from matplotlib import pyplot

    for result in results:
        drawn = result.plot()
        panels = drawn if isinstance(drawn, list) else [drawn]
        assert all(ax.get_xlabel() for ax in panels)
        own = Figure().subplots(1, 2)
        axes = result.plot(own) if isinstance(drawn, list) else [result.plot(own[0])]
        assert axes[0] is own[0]
        pyplot.close(panels[0].figure)


def test_tables_as_text_markdown_and_frames(results):
    table = results[2].table()
    assert str(table).splitlines()[0] == "Change of target 0 without the k samples that should raise it most"
    assert table.to_markdown().splitlines()[0] == "| method | k = 2 | k = 5 |"
    assert [row.split("|")[1].strip() for row in table.to_markdown().splitlines()[2:]] == [
        "exact",
        "random",
        "random, mean of 2",
        "random, standard deviation",
    ]
    assert results[2].to_frame().loc["exact", "k = 5"] == float(results[2].changes["exact"][1])
    tiny = evaluation.Table("t", ("m", "x"), (("a", 1.5e-9), ("b", -2e-12)))
    assert [row[1] for row in tiny.format_rows()] == ["1.500e-09", "-2.000e-12"]
