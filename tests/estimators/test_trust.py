"""How far predictions can be trusted: estimated errors, margins, kinks, the verdict."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from oracle import Oracle, Point, Removal, weights_of
from parity import FILE as PARITY
from problems import class_data, fair_logistic, fit_problem, logistic, squared
from typer.testing import CliRunner

import dif
from dif.cli import app
from dif.cli.description import TEMPLATE, Description
from dif.optimality.judgement import Certificate
from dif.report.builder import Report, is_loss
from dif.report.words import Verdict
from studies import calibration

F64 = torch.float64
RUN = CliRunner()
QUIET = {"show_progress": False}


# Constraints within reach of a removal


def within_reach(seed):
    """Build a problem with a constraint whose slack or multiplier is 0.1 to 2 times what a removal moves."""
    rng = np.random.default_rng(seed)
    n, d = 80, 4
    X, group = rng.normal(size=(n, d)), rng.random(n) < 0.4
    X[group, 0] += 0.7
    loss = ("squared", "logistic")[seed % 2]
    y = X @ rng.normal(size=d) + 0.7 * rng.normal(size=n) + group * (X @ rng.normal(size=d))  # groups that differ
    y = y if loss == "squared" else np.sign(y)
    everyone = np.ones(n, dtype=bool)
    means = (((1.0, everyone),), ((1.0, group),))
    B = np.zeros((2, d, d))
    B[0] = 0.1 * np.eye(d)
    W = np.stack([weights_of(m, n) for m in means])
    free = Oracle(loss, X, y, means, W, B, np.zeros((2, d)), np.array([1e9]), np.zeros(1, dtype=bool))
    nothing = Point(np.zeros(d), np.zeros(1), np.zeros(1, dtype=bool))
    start = free.minimum(nothing)
    at = free.values(start.theta)[1]
    moves = []
    for i in range(n):
        changed = free.moved(Removal(np.arange(n) == i, (0, 1), True), 1.0)
        moves.append(changed.values(changed.minimum(start).theta)[1] - at)
    side = 1 if seed % 4 < 2 else -1  # outside of the bound, or held by it with a small force
    tau = at + side * rng.uniform(0.1, 2.0) * float(np.median(np.abs(moves)))
    truth = Oracle(loss, X, y, means, W, B, np.zeros((2, d)), np.array([tau]), np.zeros(1, dtype=bool))

    train = dif.Samples(squared if loss == "squared" else logistic, (torch.tensor(X), torch.tensor(y)), name="train")
    mask = torch.tensor(group)
    risk = train.mean(where=mask)
    solution = fit_problem(dif.Problem(train.mean() + dif.ridge(0.1), [(risk <= tau).named("group")]))
    return train, risk, solution, truth


def test_constraints_within_reach_of_a_removal():
    """Compare with numpy on 30 problems, each solved again without each sample."""
    found = []
    for seed in range(30):
        train, risk, solution, truth = within_reach(seed)
        n, at = len(train), Point(solution.theta.numpy(), solution.lam.numpy(), solution.lam.numpy() > 0)
        base = truth.values(at.theta)[1]
        actual = []
        for i in range(n):
            changed = truth.moved(Removal(np.arange(n) == i, (0, 1), True), 1.0)
            actual.append(truth.values(changed.minimum(at).theta)[1] - base)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", dif.FirstOrderWarning)
            scores = dif.DirectionalInfluence(solution).scores(risk, train.remove_each(), **QUIET)
        assert scores.diagnostics["within_reach"] == ["group"]
        r = dif.Agreement.of(scores.values[:, 0], torch.tensor(actual)).pearson
        warned = any(issubclass(one.category, dif.FirstOrderWarning) for one in said)
        assert warned == (scores.trusted is False)
        assert r >= 0.9 or warned
        plain = dif.DirectionalInfluence(solution, switching=False).scores(risk, train.remove_each(), **QUIET, assess=0)
        found.append((r, dif.Agreement.of(plain.values[:, 0], torch.tensor(actual)).pearson))
    r, derivative = np.median(found, 0)
    print(f"median r {r:.4f}, smallest {min(one for one, _ in found):.4f}; the derivative's {derivative:.4f}")
    assert r >= 0.98
    assert derivative < 0.95


def test_a_constraint_that_nearly_binds():
    torch.manual_seed(0)
    X, group = torch.randn(200, 3).double(), torch.arange(200) % 2
    y = torch.where(X[:, 0] + 0.8 * group + 0.3 * torch.randn(200) > 0.4, 1.0, -1.0).double()
    train = dif.Samples(logistic, (X, y), name="train")
    risk = train.mean()
    free = fit_problem(dif.Problem(risk + dif.ridge(1e-2)), d=3)
    losses = logistic(free.params, (X, y))
    tau = float(losses[group == 0].mean() - losses.mean()) + 3e-4
    problem = dif.Problem(risk + dif.ridge(1e-2), [(train.mean(where=group == 0) - risk <= tau).named("group 0")])
    solution = fit_problem(problem, d=3)
    gap, removals = train.mean(where=group == 1) - train.mean(where=group == 0), train.remove_each()
    predictor = dif.DirectionalInfluence(solution)
    actual = dif.Retraining(solution).scores(gap, removals)
    assert predictor.scores(gap, removals).compare(actual).pearson > 0.99
    plain = dif.DirectionalInfluence(solution, switching=False).scores(gap, removals)
    assert plain.compare(actual).pearson < 0.5
    assert plain.trusted is False

    finding = Certificate.of(solution, predictor.margins(removals)).findings[-2]
    assert finding.what == "Is it clear which constraints bind, whoever is removed?"
    assert finding.verdict == "note"
    assert finding.measured.startswith("group 0: slack 0.0003, one removal moves it by ")
    assert "can make these constraints active or inactive" in finding.meaning


def centres(n, spread):
    """Build points whose mean is the solution where no constraint is active."""
    z = torch.zeros(n, 2, dtype=F64)
    z[:, 0] = torch.randn(n, dtype=F64, generator=torch.Generator().manual_seed(0))
    z[:, 1] = spread * torch.linspace(-1, 1, n, dtype=F64)
    z -= z.mean(0)
    return z, dif.Samples(lambda p, b: 0.5 * ((p["t"] - b) ** 2).sum(1), z, name="train")


def test_a_row_that_is_reached_by_way_of_another():
    """Where A becomes active, θ moves along it and reaches B, whatever the number of perturbations."""
    z, train = centres(60, 0.0)
    move = float((z[:, 0] / 59).abs().max())
    rows = [dif.linear([1.0, -1.0]) <= 0.05 * move, dif.linear([0.0, 1.0]) <= 0.1 * move]
    solution = dif.fit(dif.Problem(train.mean(), rows), {"t": torch.zeros(2, dtype=F64)}, **QUIET)
    removals, targets = train.remove_each(), dif.linear(torch.eye(2))
    auto = dif.DirectionalInfluence(solution).scores(targets, removals, **QUIET)
    actual = dif.Retraining(solution).scores(targets, removals)
    np.testing.assert_allclose(auto.values.numpy(), actual.values.numpy(), atol=1e-9 * move)
    few = dif.DirectionalInfluence(solution).scores(targets, removals[:7], **QUIET)
    np.testing.assert_allclose(few.values.numpy(), auto.values[:7].numpy(), atol=1e-12 * move)
    assert len(auto.diagnostics["within_reach"]) == 2


def test_removals_without_an_answer_give_a_warning(tmp_path):
    z, train = centres(60, 1.0)
    floor = train.view(lambda p, b: b[:, 1] - p["t"][1] + 0 * p["t"][0], name="floor")
    rows = [(floor.mean() <= 0.0).named("floor"), (dif.linear([0.0, 1.0]) <= 0.004).named("cap")]
    solution = dif.fit(dif.Problem(train.mean(), rows), {"t": torch.zeros(2, dtype=F64)}, **QUIET)
    lost = -z[:, 1] / 59 > 0.004  # the floor rises above the cap
    with pytest.warns(dif.FirstOrderWarning, match=f"{int(lost.sum())} of 60 perturbations have no answer"):
        scores = dif.DirectionalInfluence(solution).scores(dif.linear([1.0, 0.0]), train.remove_each(), **QUIET)
    assert torch.equal(torch.isnan(scores.values[:, 0]), lost)
    with pytest.raises(dif.DegenerateError):
        dif.DirectionalInfluence(solution).change(train.remove([int(lost.long().argmax())]))
    adaptive = dif.AdaptiveInfluence(solution, accuracy=0.01, strict=False)
    with pytest.warns(dif.FirstOrderWarning, match="have no answer"):
        again = adaptive.scores(dif.linear([1.0, 0.0]), train.remove_each())
    assert torch.equal(torch.isnan(again.values[:, 0]), lost)
    assert again.trusted
    assert len(again.diagnostics["unanswered"]) == int(lost.sum())


def test_a_change_of_zero_predicted_as_zero_is_trusted():
    """A target that a constraint keeps constant: the predicted and the actual change are 0."""
    _, train = centres(60, 1.0)
    pinned, free = dif.linear([1.0, 0.0]), dif.linear([0.0, 1.0])
    problem = dif.Problem(train.mean(), [pinned == 0.3])
    solution = dif.fit(problem, {"t": torch.zeros(2, dtype=F64)}, **QUIET)
    for targets in ([pinned], [pinned, free]):
        scores = dif.DirectionalInfluence(solution).scores(targets, train.remove_each(), **QUIET)
        assert scores.trusted
        assert float(scores.values[:, 0].abs().max()) < 1e-15


def test_margins_are_what_retraining_moves():
    train, problem, _ = fair_logistic()
    solution = fit_problem(problem)
    some = 0.01 * train.remove_each()
    binding, inactive = dif.DirectionalInfluence(solution).margins(some)
    moved = [dif.Retraining(solution).change(one) for one in some]
    priced = torch.stack([change.multipliers.flat[0].abs() for change in moved])
    assert binding.largest == pytest.approx(float(priced.max()), rel=0.05)
    assert binding.median == pytest.approx(float(priced.median()), rel=0.05)
    weighed = dif.derivatives.weight_change.Direction(solution.program, some)
    values = torch.stack(
        [
            weighed.perturbed_program(p).rows.values(solution.theta + moved[p].flat)[2] - solution.f[2]
            for p in range(len(some))
        ]
    ).abs()
    assert inactive.largest == pytest.approx(float(values.max()), rel=0.05)
    found = Certificate.of(solution, [binding, inactive])
    assert [row.largest for row in found.constraints] == [binding.largest, inactive.largest]


# Expected errors


def fair(n=900):
    """State logistic regression with an active group bound and enough samples for a first-order prediction."""
    X, y = class_data(n)
    train = dif.Samples(logistic, (X, y), name="train")
    group = (X[:, 1] + 0.5 * X[:, 2] > 0).long()
    problem = dif.Problem(train.mean() + dif.ridge(0.05), [train.mean(where=group == 1) <= train.mean() - 0.01])
    return train, problem, group


def test_expected_errors_are_carried_along(tmp_path):
    train, problem, group = fair()
    solution = fit_problem(problem)
    targets = [train.mean(), 1e6 * train.mean(where=group == 1)]
    scores = dif.DirectionalInfluence(solution).scores(targets, train.remove_each(), **QUIET, assess=5)
    errors = scores.expected_error
    assert int(torch.isfinite(errors).sum()) == 10
    sizes = (scores.values / scores.values.norm(dim=0)).norm(dim=1)
    assert bool(torch.isfinite(errors[sizes.argmax()]))
    actual = dif.Retraining(solution).scores(targets, train.remove_each())
    for i in torch.nonzero(torch.isfinite(errors)).reshape(-1).tolist():
        unit = scores.values.norm(dim=0)
        off = ((scores.values[i] - actual.values[i]) / unit).norm() / (actual.values[i] / unit).norm()
        assert float(errors[i]) == pytest.approx(float(off), rel=0.3, abs=0.02)
    scores.save(tmp_path / "scores.npz")
    again = dif.Influence.load(tmp_path / "scores.npz")
    assert torch.equal(torch.nan_to_num(again.expected_error), torch.nan_to_num(errors))
    assert again.trusted == scores.trusted
    silent = dif.DirectionalInfluence(solution).scores(targets, train.remove_each(), **QUIET, assess=0)
    assert silent.trusted is None
    assert bool(torch.isnan(silent.expected_error).all())
    streamed = dif.DirectionalInfluence(solution).scores(
        targets, train.remove_each(), **QUIET, assess=5, out=tmp_path / "scores.npy"
    )
    assert torch.equal(torch.nan_to_num(streamed.expected_error), torch.nan_to_num(errors))
    for wrong in (-1, 2.5, "all"):
        with pytest.raises(dif.InvalidInputError, match="`assess` must be an integer ≥ 0, not"):
            dif.DirectionalInfluence(solution).scores(targets, train.remove_each(), assess=wrong)


def test_small_targets_are_not_hidden_behind_large_ones():
    """A large target must not hide the error of a target in smaller units."""
    train, problem, _ = fair()
    solution = fit_problem(problem)
    steep = dif.Function(lambda p: (40 * p["theta"]).sum().sin() * 1e-9, name="steep")
    good = dif.DirectionalInfluence(solution).scores([train.mean()], train.remove_each(), **QUIET)
    with pytest.warns(dif.FirstOrderWarning):
        both = dif.DirectionalInfluence(solution).scores([1e3 * train.mean(), steep], train.remove_each(), **QUIET)
    assert good.trusted
    assert both.trusted is False


@pytest.mark.parametrize("make", [dif.DirectionalInfluence, dif.NewtonInfluence, dif.AdaptiveInfluence])
def test_a_target_that_a_constraint_pins_does_not_move(make):
    """With two weights pinned, by an equality and by a bound, their changes of 1e-17 are no errors."""
    X = torch.randn(200, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = X @ torch.tensor([1.0, 1.0, -0.3, 0.0], dtype=F64) + X[:, 0] ** 2
    train = dif.Samples(squared, (X, y), name="train")
    pinned, sign = [1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]
    solution = fit_problem(dif.Problem(train.mean(), [dif.linear(pinned) == 0.0, dif.linear(sign) >= 0.7]), d=4)
    assert len(solution.active.binding) == 2
    targets = {"pinned": dif.linear(pinned), "sign": dif.linear(sign), "free": dif.linear([0.0, 0.0, 0.0, 1.0])}
    with warnings.catch_warnings():
        warnings.simplefilter("error", dif.FirstOrderWarning)
        scores = make(solution).scores(targets, 0.1 * train.remove_each(), **QUIET)
    assert float(scores.values[:, :2].abs().max()) < 1e-14 < float(scores.values[:, 2].abs().max())
    assert scores.trusted_by_target == {"pinned": True, "sign": True, "free": True}


def test_a_minimised_target_counts_where_no_other_moves():
    X = torch.randn(100, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    train = dif.Samples(squared, (X, X[:, 0] + X[:, 1] ** 2), name="train")
    solution = fit_problem(dif.Problem(train.mean()), d=3)
    with pytest.warns(dif.FirstOrderWarning, match="These predictions cannot be trusted"):
        alone = dif.DirectionalInfluence(solution).scores(train.mean(), train.remove_each(), **QUIET)
    assert alone.trusted is False
    assert "NOT trusted: the estimated relative error is " in alone.summary()


def test_each_target_has_its_own_verdict(tmp_path):
    """A target that hardly moves, because it is minimised, takes no trust from a target that does."""
    X = torch.randn(200, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(200, dtype=F64, generator=torch.Generator().manual_seed(1))
    y = X @ torch.tensor([1.0, -0.5, 0.3, 0.0], dtype=F64) + 0.5 * noise
    train = dif.Samples(squared, (X, y), name="train")
    solution = fit_problem(dif.Problem(train.mean()), d=4)
    targets = {"coefficient": dif.linear([1.0, 0.0, 0.0, 0.0]), "risk": train.mean()}
    with pytest.warns(dif.FirstOrderWarning, match="The predictions for risk cannot be trusted.* other targets can"):
        scores = dif.DirectionalInfluence(solution).scores(targets, train.remove_each(), **QUIET)
    assert scores.trusted_by_target == {"coefficient": True, "risk": False}
    assert scores.trusted is True  # to first order risk does not move, whatever is removed
    assert "\nTrusted: the estimated relative error is 0.0" in scores.summary()
    assert ". To first order risk does not move; its scores are not trusted." in scores.summary()
    actual = dif.Retraining(solution).scores(targets, train.remove_each(), **QUIET)
    off = (scores.values - actual.values).norm(dim=0) / actual.values.norm(dim=0)
    np.testing.assert_allclose(scores.diagnostics["assessment"]["by_target"], off, rtol=0.3, atol=0.02)
    scores.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Predictions for this model can be trusted: they are off by " in page
    assert "No sample is predicted to change risk by more than rounding error, so there is no ranking." in page
    single = dif.DirectionalInfluence(solution).scores(targets["coefficient"], train.remove_each(), **QUIET)
    assert single.trusted
    assert dif.DirectionalInfluence(solution).scores(
        targets, train.remove_each(), **QUIET, assess=0
    ).trusted_by_target == {"coefficient": None, "risk": None}


@pytest.mark.parametrize("estimator", [dif.ClassicalInfluence, dif.NewtonInfluence, dif.PenaltyInfluence])
def test_every_predictor_says_how_far_it_can_be_trusted(estimator):
    train, problem, _ = fair()
    solution = fit_problem(problem)
    actual = dif.Retraining(solution).scores(train.mean(), train.remove_each())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dif.FirstOrderWarning)
        found = estimator(solution).scores(train.mean(), train.remove_each())
    assert found.trusted == (found.compare(actual).relative_error <= 0.25)


def test_any_perturbation_to_a_wanted_accuracy():
    train, problem, _ = fair()
    solution = fit_problem(problem)
    X, y = (t[:1] for t in train.storage.data)
    dw = torch.zeros(900, dtype=F64)
    dw[3] = -0.001
    adaptive = dif.AdaptiveInfluence(solution, accuracy=0.01)
    retraining = dif.Retraining(solution)
    for one in (
        train.remove([1, 2, 3]),
        train.reweight(dw),
        train.replace(0, (X, -y)),
        train.add((X + 1, y), like=4),
        problem.constraints[0].shift(-0.01),
    ):
        found, actual = adaptive.scores(train.mean(), one), retraining.scores(train.mean(), one)
        assert float(found.values) == pytest.approx(float(actual.values), rel=0.012)
        assert float(found.expected_error) <= 0.01
    assert dif.AdaptiveInfluence is dif.AdaptiveInfluence


SOME = [s for s in calibration.settings() if s.kind != "tanh" and s.n < 2000] + [
    calibration.Setting("tanh", 100, 6, (12,), ridge=1e-1, seed=1),
    calibration.Setting("tanh", 100, 6, (12,), ridge=1e-2, constrained=True, seed=7),
    calibration.Setting("tanh", 400, 6, (12,), ridge=1e-2, seed=8),
]


def test_expected_and_actual_errors_agree():
    rows = [{"name": one.name, **calibration.measure(one)} for one in SOME]
    found = calibration.summary(rows)
    assert found["models"] >= 20
    assert found["of these not trusted"] == found["off by more than 50 %"] > 3
    assert found["of these trusted"] == found["off by less than 10 %"] > 0
    close = [abs(np.log(row["expected"] / row["actual"])) for row in rows if row["actual"] and row["actual"] < 0.4]
    assert np.median(close) < 0.2


@pytest.mark.slow
def test_calibration(tmp_path):
    found = calibration.reproduce(tmp_path, show_progress=False)
    assert found["models"] >= 40
    assert found["of these not trusted"] >= 0.95 * found["off by more than 50 %"]
    assert found["of these trusted"] >= 0.95 * found["off by less than 10 %"]
    kept = json.loads((tmp_path / "calibration.json").read_text())
    assert [row["name"] for row in kept["rows"]] == [one.name for one in calibration.settings()]


# The verdict


@pytest.mark.parametrize("hidden", [(12, 6), pytest.param((40, 20), marks=pytest.mark.slow)])
def test_a_flat_network_is_not_trusted(tmp_path, hidden):
    """The derivative of a 30-40-20-2 tanh network on 400 samples (or a smaller one) exists but predicts nothing."""
    (tmp_path / "model.py").write_text(f'''
import torch, dif
a, b = {hidden}
from sklearn.datasets import load_breast_cancer
X, y = load_breast_cancer(return_X_y=True)
X, y = torch.tensor((X - X.mean(0)) / X.std(0)), torch.tensor(y)
torch.manual_seed(0)
order = torch.randperm(len(X))
X, y = X[order], y[order]
large = X[:400, 0] > 0
model = torch.nn.Sequential(torch.nn.Linear(30, a), torch.nn.Tanh(), torch.nn.Linear(a, b), torch.nn.Tanh(),
                            torch.nn.Linear(b, 2)).double()
def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
train = dif.Samples(loss, (X[:400], y[:400]), name="train")
test = dif.Samples(loss, (X[400:], y[400:]), name="test")
risk = train.mean()
fair = [(train.mean(where=one) <= risk + 0.01).named(name) for one, name in ((large, "large"), (~large, "small"))]
problem = dif.Problem(risk + dif.ridge(1e-2), fair)
run = dif.Training(problem, model, dif.Adam(1e-3), epochs=30, schedule="cosine").run(show_progress=False)
solution = dif.fit(problem, run.params, multipliers=run.multipliers, show_progress=False)
targets = {{"test loss": test.mean()}}
''')  # fmt: skip
    out = tmp_path / "out"
    result = RUN.invoke(app, ["retrain", str(tmp_path / "model.py"), "--top", "4", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["verdict"]["sign"] == "bad"
    assert said["verdict"]["words"].startswith(
        "Predictions for this model cannot be trusted: 4 samples were removed, one at a time, and the model "
        "was trained again, and the predictions were off by "
    )
    assert said["verdict"]["words"] in result.stderr
    report = Report.load(out / "report.json")
    assert report.assessment["pooled"] > 0.5
    page = (out / "report.html").read_text()
    assert page.index("cannot be trusted") < page.index("Is it a solution?")


def test_parity_through_the_command_line(tmp_path):
    """Two losses of the same people, with one row per person, as in test_views."""
    from parity import resolve_without

    (tmp_path / "model.py").write_text(PARITY)
    result = RUN.invoke(app, ["retrain", str(tmp_path / "model.py"), "--top", "8", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["verdict"]["sign"] == "good"
    told = {}
    exec(compile(PARITY, "model.py", "exec"), told)
    report = Report.load(tmp_path / "report.json")
    for one in report.samples[:8]:
        actual = resolve_without(told, one["index"])
        assert one["score"] == pytest.approx(actual, rel=0.1)
        assert one["actual"] == pytest.approx(actual, rel=1e-4)
        assert set(one["losses"]) == {"train", "rates"}
    assert len(report.samples) == 600
    assert report.loss


def test_two_samples_over_the_same_people_are_noticed_by_the_command_line(tmp_path):
    twice = PARITY.replace('train.view(rate, name="rates")', 'dif.Samples(rate, (X, y), name="rates")')
    (tmp_path / "model.py").write_text(twice)
    result = RUN.invoke(app, ["check", str(tmp_path / "model.py"), "--out", str(tmp_path), "--json"])
    assert "dif: Note: Samples 'train' and 'rates' hold the same data." in result.stderr
    findings = {one["what"]: one for one in json.loads(result.stdout)["findings"]}
    asked = findings["Are all losses of a person changed together?"]
    assert asked["verdict"] == "note"
    assert "train.view(loss, name='rates')" in asked["meaning"]


def test_check_leads_with_the_verdict(tmp_path):
    (tmp_path / "model.py").write_text(TEMPLATE)
    result = RUN.invoke(app, ["check", str(tmp_path / "model.py"), "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert result.output.startswith("✓ Predictions for this model can be trusted: they are off by about ")
    shaky = TEMPLATE.replace("600", "40").replace("dif.ridge(1e-2)", "dif.ridge(1e-4)")
    (tmp_path / "shaky.py").write_text(shaky)
    result = RUN.invoke(app, ["check", str(tmp_path / "shaky.py"), "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.output.startswith("✗ Predictions for this model cannot be trusted: they are off by about ")
    better = ["retrain", str(tmp_path / "shaky.py"), "--accuracy", "0.02", "--top", "10", "--out", str(tmp_path)]
    said = json.loads(RUN.invoke(app, [*better, "--json"]).stdout)
    assert said["verdict"]["sign"] == "good"
    assert said["agreement"]["relative_error"] < 0.03
    both = ["score", str(tmp_path / "shaky.py"), "--accuracy", "0.1", "--estimator", "newton", "--out", str(tmp_path)]
    assert "leave out --estimator newton" in RUN.invoke(app, both).stderr
    aimless = TEMPLATE.replace("targets = {", "wishes = {")
    (tmp_path / "aimless.py").write_text(aimless)
    result = RUN.invoke(app, ["check", str(tmp_path / "aimless.py"), "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "No prediction was checked: the file names no `targets`" in result.output


def test_verdicts_in_words():
    sound = {"findings": [{"verdict": "good", "what": "", "meaning": "", "cure": ""}]}
    expected = {"rows": [1, 2, 3], "errors": [0.1, 0.2, 0.3], "pooled": 0.034, "failed": None}
    right = {"n": 20, "relative_error": 0.041, "wrong_signs": 0}
    assert Verdict.of(sound, expected, right).words == (
        "Predictions for this model can be trusted: 20 samples were removed, one at a time, and the model was trained "
        "again, and the predictions were off by 4.1 % overall, all in the right direction (3.4 % was expected)."
    )
    assert Verdict.of(sound, expected, None).sign == "good"
    assert Verdict.of(sound, None, None).sign == "note"
    failed = {"rows": [], "errors": [], "pooled": None, "failed": "it is flat"}
    assert Verdict.of(sound, failed, None).words.endswith("they could not be checked (it is flat).")
    wrong = Verdict.of(sound, expected, {"n": 1, "relative_error": 30.0, "wrong_signs": 1})
    assert wrong.sign == "bad"
    assert (
        "1 sample was removed and the model was trained again, and the predictions were off by 100 % or more"
        in wrong.words
    )
    lost = Verdict.of(sound, expected, None, (3, "the constraints contradict each other"))
    assert lost.sign == "note"
    assert lost.words.endswith("3 removals have no answer: the constraints contradict each other.")
    jumping = Verdict.of(sound, expected | {"pooled": 3.0}, None, None, "the loss of hits[0] jumps (lt)")
    assert jumping.words == (
        "Predictions for this model cannot be trusted: the target is not smooth (the loss of hits[0] jumps (lt))."
    )
    flat = {
        "findings": [
            {"verdict": "bad", "what": "Is it a solution?", "meaning": "The point is none.", "cure": "Train on."}
        ]
    }
    assert Verdict.of(flat, expected, right).words == (
        "Predictions for this model cannot be trusted. The point is none."
    )


def test_words_for_targets(tmp_path):
    (tmp_path / "model.py").write_text(TEMPLATE)
    told = Description.read(tmp_path / "model.py")
    risk, gap = told.targets["risk"], told.targets["gap"]
    rates = next(s for s in told.solution.problem.samples if s.name == "rates")
    test = dif.Samples(told.train.loss, tuple(t[:9] for t in told.train.storage.data), name="test")
    assert is_loss(risk, told.solution)
    assert is_loss(test.mean() + dif.ridge(0.1), told.solution)
    for other in (gap, -1 * risk, rates.mean(), dif.linear([1.0, 0.0, 0.0]), test.weighted(-torch.ones(9).double())):
        assert not is_loss(other, told.solution)


# Refused points and kinks


def test_a_refused_point_gets_no_ticks():
    X = torch.randn(40, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    train = dif.Samples(logistic, (X, torch.sign(X[:, 0])), name="train")  # separable, no ridge
    with pytest.warns(dif.NotConvergedWarning):
        solution = dif.fit(dif.Problem(train.mean()), {"theta": torch.zeros(2, dtype=F64)}, max_iter=60, **QUIET)
    if solution.converged:  # it runs off: tight enough a judgement refuses it anyway
        solution = dif.Solution(solution.problem, solution.params, tol=1e-30)
    found = Certificate.of(solution)
    assert not found.holds
    assert [one.verdict for one in found.findings if one.verdict == "good"] == []


def test_a_function_with_a_kink_is_named():
    X, y = class_data(60)
    train = dif.Samples(logistic, (X, y), name="train")
    lasso = dif.Function(lambda p: 0.2 * p["theta"].abs().sum(), name="lasso")
    with pytest.warns(dif.NotConvergedWarning, match=r"The function lasso has a kink \(abs\)"):
        dif.fit(dif.Problem(train.mean() + lasso), {"theta": torch.zeros(4, dtype=F64)}, max_iter=60, **QUIET)


def test_smooth_losses_are_smooth_in_single_precision_too():
    X, y = (t.float() for t in class_data(60))
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    train = dif.Samples(lambda m, z: torch.nn.functional.softplus(-z[1] * m(z[0])[:, 0]), (X, y), name="train")
    assert dif.Solution(dif.Problem(train.mean() + dif.ridge(0.1)), net).kinks == ()


def test_a_target_that_jumps_is_named(tmp_path):
    hits = '"hits": dif.Samples(lambda p, z: (z[1] * (z[0] @ p["w"]) > 0).double(), (X, y), name="hits").mean()'
    (tmp_path / "model.py").write_text(TEMPLATE.replace('"risk": risk,', f"{hits},"))
    for command in ("check", "score"):
        result = RUN.invoke(app, [command, str(tmp_path / "model.py"), "--out", str(tmp_path)])
        assert "the target is not smooth (the loss of hits[" in " ".join(result.output.split())
        assert "jumps (gt)" in " ".join(result.output.split())


def test_whose_members_are_removed_is_not_guessed(tmp_path):
    other = "other = dif.Samples(loss, (X + 1.0, y.clone()), name='other')\nrisk = train.mean()"
    text = TEMPLATE.replace("risk = train.mean()", other).replace("risk + dif.ridge", "risk + other.mean() + dif.ridge")
    text = text.replace("train = dif.Samples", "people = train = dif.Samples").replace(
        "# Required", "del train\n# Required"
    )
    text = text.replace("train.mean(where=group == 1) - train.mean(where=group == 0)", "people.mean()")
    text = text.replace("range(len(train))", "range(600)")
    (tmp_path / "model.py").write_text(text)
    result = RUN.invoke(app, ["check", str(tmp_path / "model.py"), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "No prediction was checked: the file names no `train`" in " ".join(result.output.split())


def test_perturbations_are_picked_by_number():
    _, train = centres(9, 1.0)
    removals = train.remove_each()
    assert removals.pick([3, 1]).labels == ["remove train[3]", "remove train[1]"]
    for wrong, found in (
        ([-1, 3], "-1"),
        ([9], "9"),
        ([], "an empty list"),
        (["a"], "'a'"),
        (3, "3"),
        ("a", "'a'"),
    ):
        with pytest.raises(dif.InvalidInputError) as caught:
            removals.pick(wrong)
        assert str(caught.value).startswith("`rows` must be a list of integers from 0 to ")
        assert str(caught.value).endswith(f", not {found}.")


LOSSES = {
    "hinge": (lambda p, z: (1 - z[1] * (z[0] @ p["theta"])).clamp(min=0), "clamp"),
    "absolute": (lambda p, z: (z[0] @ p["theta"] - z[1]).abs(), "abs"),
    "pinball": (lambda p, z: torch.maximum(z[1] - z[0] @ p["theta"], 3 * (z[0] @ p["theta"] - z[1])), "maximum"),
    "relu": (lambda p, z: torch.relu(z[0] @ p["theta"] - z[1]), "relu"),
    "branches": (lambda p, z: torch.where(z[0] @ p["theta"] > 0, z[0] @ p["theta"], 0.0), "where"),
    "largest": (lambda p, z: (z[0] * p["theta"]).amax(1), "amax"),
}  # fmt: skip
SMOOTH = {
    "logistic": logistic,
    "squared": squared,
    "linear": lambda p, z: z[0] @ p["theta"],
    "poisson": lambda p, z: (z[0] @ p["theta"]).exp() - z[1] * (z[0] @ p["theta"]),
    "sharp": lambda p, z: torch.nn.functional.softplus(-z[1] * (z[0] @ p["theta"]), beta=50),
    "smoothed absolute": lambda p, z: (1e-4 + (z[0] @ p["theta"] - z[1]) ** 2).sqrt(),
    "huber": lambda p, z: torch.nn.functional.huber_loss(z[0] @ p["theta"], z[1], reduction="none"),
    "gelu": lambda p, z: torch.nn.functional.gelu(z[0] @ p["theta"]),
}


def at_some_point(loss):
    X, y = torch.randn(60, 4, dtype=F64, generator=torch.Generator().manual_seed(1)), torch.ones(60, dtype=F64)
    train = dif.Samples(loss, (X, y), name="train")
    theta = 0.3 * torch.randn(4, dtype=F64, generator=torch.Generator().manual_seed(2))
    return dif.Solution(dif.Problem(train.mean() + dif.ridge(0.1)), {"theta": theta})


@pytest.mark.parametrize("name", LOSSES)
def test_kinks_are_found_by_probing(name):
    loss, operator = LOSSES[name]
    (kink,) = at_some_point(loss).kinks
    assert not kink.jumps
    assert operator in kink.operators
    assert str(kink).startswith("the loss of train[")


def test_jumps_are_told_from_kinks():
    (kink,) = at_some_point(lambda p, z: (z[0] @ p["theta"] < 0).double() + squared(p, z)).kinks
    assert kink.jumps
    assert "lt" in kink.operators


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_losses_have_none(name):
    assert at_some_point(SMOOTH[name]).kinks == ()


def test_a_relu_network_is_told_about_its_kinks():
    torch.manual_seed(0)
    X = torch.randn(80, 4, dtype=F64)
    y = (X[:, 0] * X[:, 1] > 0).long()
    net = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU(), torch.nn.Linear(10, 2)).double()
    train = dif.Samples(
        lambda m, z: torch.nn.functional.cross_entropy(m(z[0]), z[1], reduction="none"), (X, y), name="train"
    )
    with pytest.warns(dif.NotConvergedWarning, match=r"has a kink \(relu.*polishing does not help") as said:
        solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.02)), net, max_iter=150, **QUIET)
    assert "Raise max_iter" not in str(said[0].message)
    with pytest.raises(dif.NotASolutionError, match="Use a smooth loss or activation"):
        dif.DirectionalInfluence(solution)
    findings = {one.what: one for one in Certificate.of(solution).findings}
    assert findings["Are the losses smooth?"].verdict == "bad"
    assert "smooth" in findings["Is it a solution?"].cure


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("ridge", [1e-3, 1e-6])
def test_the_only_member_of_a_category_is_assessed(ridge, constrained):
    """The fit follows it, so that its prediction is among the smallest, while its removal moves the test loss most."""
    rng = np.random.default_rng(0)
    X = np.c_[rng.normal(size=(300, 3)), np.ones(300), np.zeros(300)]
    X[17, 4] = 1
    y = X[:, :3] @ [1, -1, 0.5] + 0.5 * rng.normal(size=300) + 3 * X[:, 4]
    train = dif.Samples(
        lambda p, z: 0.5 * (z[0] @ p["w"] - z[1]) ** 2, (torch.tensor(X), torch.tensor(y)), name="train"
    )
    test = train.mean(where=torch.isin(torch.arange(300), torch.tensor([17, *range(100, 140)])))
    rows = [dif.linear([1.0, 1.0, 0, 0, 0], of="w") == 0.2] if constrained else []
    problem = dif.Problem(train.mean() + dif.ridge(ridge), rows)
    solution = dif.fit(problem, {"w": torch.zeros(5).double()}, show_progress=False)
    held_out = dif.Samples(train.loss, (torch.tensor(X[17:18]), torch.tensor(y[17:18])), name="member").mean()
    with pytest.warns(dif.FirstOrderWarning, match=r"remove train\[17\]"):
        scores = dif.DirectionalInfluence(solution).scores([test, held_out], train.remove_each(), show_progress=False)
    (actual,) = dif.Retraining(solution).scores(held_out, train.remove_each([17]), show_progress=False).values
    assert actual > 1
    assert float(scores.values[17, 1]) < 0.1 * actual
    assert scores.trusted is False
    assert float(scores.expected_error[17]) > 0.5
