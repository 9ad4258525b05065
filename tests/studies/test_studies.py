"""The studies reproduce the paper's numbers, called directly and through the command line."""

import json

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

import dif
from studies import attribution, cnn, digits, evaluation, groups, pictures, regression, toy
from studies.__main__ import app


def test_toy():
    result = toy.run()
    np.testing.assert_allclose(result["theta"], [0.5, 0.5], atol=1e-12)
    np.testing.assert_allclose(result["multipliers"], 0.0, atol=1e-12)
    assert result["weak"] == ["l1 ball[0]"]
    assert result["binding"] == []
    expected = {
        ("paper", "removal", "DIF"): [1 / 6, -1 / 6],
        ("paper", "opposite", "DIF"): [-1 / 4, 0],
        ("paper", "removal", "classical IF"): [1 / 4, 0],
        ("paper", "removal", "retraining"): [1 / 4, -1 / 4],
        ("paper", "removal", "Newton"): [1 / 4, -1 / 4],
        ("paper", "opposite", "retraining"): [-1 / 6, 0],
        ("renormalised", "removal", "DIF"): [1 / 4, -1 / 4],
        ("renormalised", "removal", "classical IF"): [3 / 8, 0],
        ("renormalised", "removal", "retraining"): [1 / 4, -1 / 4],
    }
    for (convention, direction, name), theta in expected.items():
        np.testing.assert_allclose(result["changes"][convention][direction][name]["theta"], theta, atol=1e-9)


def test_toy_as_one_row():
    """In the positive quadrant the constraint is θ₁ + θ₂ ≤ 1; the solution and its change are the same."""
    train, _ = toy.build_problem()
    problem = dif.Problem(train.mean(), [dif.linear([1.0, 1.0]) <= 1.0])
    solution = dif.fit(problem, {"theta": torch.zeros(2).double()})
    assert solution.active.weak == (0,)
    change = dif.DirectionalInfluence(solution).change(train.remove([1], renormalise=False))
    np.testing.assert_allclose(change.flat, [1 / 6, -1 / 6], atol=1e-9)
    np.testing.assert_allclose(change.multipliers[0], 1 / 9, atol=1e-9)
    back = dif.DirectionalInfluence(solution).change(-train.remove([1], renormalise=False))
    np.testing.assert_allclose(back.flat, [-1 / 4, 0], atol=1e-9)


@pytest.mark.parametrize(
    ("seed", "bounds", "binding"),
    [
        (3, "paper", 2),
        (1, "binding", 3),
        pytest.param(0, "paper", 1, marks=pytest.mark.slow),
        pytest.param(4, "paper", 2, marks=pytest.mark.slow),
    ],
)
def test_regression(seed, bounds, binding):
    result = regression.run(seed, 100, bounds)
    assert len(result["binding"]) == binding
    for convention in ("paper", "renormalised"):
        rows = result["agreement"][convention]
        assert rows["DIF"]["pearson"] >= 0.9999
        assert rows["DIF"]["relative_error"] <= 0.02
        assert rows["Newton"]["relative_error"] <= 1e-7
        assert rows["dif's retraining"]["relative_error"] <= 1e-7
        for name in ("classical IF", regression.PRINTED, regression.MINIMISER):
            assert {"pearson", "spearman", "slope", "relative_error", "sign"} <= set(rows[name])
        assert rows["classical IF"]["relative_error"] > 0.2


def test_command_line_writes_figures_and_numbers(tmp_path):
    runner = CliRunner()
    out = tmp_path / "with space"
    shown = runner.invoke(app, ["toy", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "0.1667" in shown.output
    shown = runner.invoke(app, ["regression", "--seed", "3", "--removals", "5", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    for name in ("toy", "regression"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((out / f"{name}.json").read_text())["study"] == name


def test_command_line_refuses_in_one_line(tmp_path):
    runner = CliRunner()
    assert runner.invoke(app, ["regression", "--removals", "1"]).exit_code == 2
    (tmp_path / "file").write_text("")
    shown = runner.invoke(app, ["toy", "--out", str(tmp_path / "file")])
    assert shown.exit_code == 2
    assert "Traceback" not in shown.output
    assert len(shown.output.strip().splitlines()) == 1


def test_studies_check_their_input():
    for bad, words in (
        ({"removals": 1}, "`removals` must be between 2 and 1000, not 1"),
        ({"removals": 5000}, "not 5000"),
        ({"bounds": "loose"}, "`bounds` must be .* not 'loose'"),
    ):
        with pytest.raises(dif.InvalidInputError, match=words):
            regression.run(**{"removals": 5, **bad})


@pytest.fixture(scope="module")
def small_digits():
    task = digits.build_task(n=300, tau=-0.03, bound=1)
    return task, task.fit()


def test_groups_of_digits(small_digits, monkeypatch):
    task, solution = small_digits
    monkeypatch.setattr(groups, "SHARES", (0.05,))
    monkeypatch.setattr(groups, "choose_groups", lambda task, choose=groups.choose_groups: choose(task)[2:6])
    result = groups.compare_removals(task, solution)
    assert [group["kind"] for group in result["groups"]] == ["random", "one class", "one class", "protected group"]
    assert max(result["errors"]["path"]) < 1e-5
    assert max(result["errors"]["path"]) < min(result["errors"]["Newton"]) < min(result["errors"]["DIF"])
    warning = result["warning"]
    assert warning["fired beyond 10 %"] == 1.0
    assert warning["fired below 1 %"] == 0.0
    assert warning["below 1 %"] > 0
    assert max(result["accuracy"]["largest error"].values()) <= 0.015


def test_bound_of_digits(monkeypatch):
    task = digits.build_task(n=300)
    monkeypatch.setattr(groups, "BOUNDS", (0.0, 0.03, 3))
    curve = groups.sweep_bound(task, task.fit())["curve"]
    assert curve["largest_difference"] < 1e-6
    assert all(kink["confirmed"] for kink in curve["kinks"])
    assert len(curve["kinks"]) >= 1


def test_tracin_is_the_dot_product_of_gradients(small_digits):
    task, solution = small_digits
    traced = digits.trace_training(task, solution)
    pair = traced.scores(task.test.take(torch.tensor([3])), task.train.remove([7]))
    theta = {name: p.clone().requires_grad_() for name, p in task.start.items()}
    weights = torch.full((300,), 1 / 300, dtype=torch.float64)
    weights += float(solution.lam[0]) * ((task.group == 0).double() / (task.group == 0).sum() - 1 / 300)
    expected = 0.0
    for step in range(1, digits.CHECKPOINTS * digits.STEPS + 1):
        lagrangian = weights @ digits.loss(theta, (task.X, task.labels))
        ridge = sum(0.5 * digits.L2 * (p**2).sum() for p in theta.values())
        gradients = torch.autograd.grad(lagrangian + ridge, list(theta.values()))
        theta = {
            name: (p - digits.RATE * slope).detach().requires_grad_()
            for (name, p), slope in zip(theta.items(), gradients, strict=True)
        }
        if step % digits.STEPS == 0:
            gradients = []
            for X, y in ((task.X[7:8], task.labels[7:8]), (task.test_X[3:4], task.test_labels[3:4])):
                gradients.append(torch.autograd.grad(digits.loss(theta, (X, y)).sum(), list(theta.values())))
            expected += sum(float((a * b).sum()) for a, b in zip(*gradients, strict=True))
    assert float(pair.values) == pytest.approx(digits.RATE * digits.STEPS / 300 * expected, rel=1e-9)


def test_flipped_labels_are_others():
    labels = torch.tensor([3, 5, 9] * 100)
    flipped, wrong = digits.flip_labels(labels, 0.2, torch.Generator().manual_seed(1))
    assert int(wrong.sum()) == 60
    assert torch.equal(flipped != labels, wrong)
    assert set(flipped.tolist()) == {3, 5, 9}


def test_half_the_data(small_digits, monkeypatch):
    monkeypatch.setattr(attribution, "SUBSETS", 12)
    monkeypatch.setattr(attribution, "TESTS", 8)
    scores = attribution.linear_datamodeling_score(*small_digits)
    assert scores["path"] > 0.999
    assert scores["path"] >= scores["DIF"] > scores["TracIn"]


def test_evaluation_of_digits(tmp_path, monkeypatch):
    for name, value in {"SUBSETS": 10, "TESTS": 8, "COUNTS": (6, 15), "ORDERS": 2, "REMOVED": 4}.items():
        monkeypatch.setattr(evaluation, name, value)
    tables = evaluation.reproduce(tmp_path, n=300, show_progress=False)
    halves, raised, lowered, singles, labels = ({row[0]: row[1:] for row in table.rows} for table in tables)
    assert halves["DIF"][0] > halves["TracIn"][0]
    assert halves["DIF"][0] > halves["classical IF"][0] > abs(halves["random"][0])
    assert raised["DIF"][-1] > raised["classical IF"][-1] > 0 > lowered["DIF"][-1]
    assert singles["DIF"][0] > 0.95 > singles["classical IF"][0]
    assert min(labels[name][0] for name in ("DIF", "classical IF", "TracIn", "the loss itself")) > 0.9
    assert {"evaluation.png", "evaluation-single.png", "evaluation.json"} <= {file.name for file in tmp_path.iterdir()}
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "evaluation-retrainings").iterdir()}
    assert evaluation.reproduce(tmp_path, n=300, show_progress=False) == tables
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "evaluation-retrainings").iterdir()} == kept
    monkeypatch.setattr(evaluation, "reproduce", lambda out: tables)
    shown = CliRunner().invoke(app, ["evaluation", "--out", str(tmp_path)])
    assert shown.exit_code == 0
    assert "Linear datamodelling score: 10 subsets, 8 targets" in shown.output
    assert "evaluation-single.png" in shown.output


def test_a_finished_regression_is_read(tmp_path, monkeypatch):
    result = regression.reproduce(tmp_path, seed=3, removals=2, show_progress=False)
    monkeypatch.setattr(regression, "run", None)
    assert regression.reproduce(tmp_path, seed=3, removals=2, show_progress=False) == result
    with pytest.raises(TypeError):  # another setting is computed
        regression.reproduce(tmp_path, seed=3, removals=3, show_progress=False)


def test_what_has_no_score_is_drawn_with_a_dash():
    generator = torch.Generator().manual_seed(0)
    actual = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    removed = tuple((i,) for i in range(9))
    halves = dif.evaluation.DatamodellingScore(
        removed, actual, {"mine": actual + 0.1, "constant": torch.ones(9, 3)}, ("a", "b", "c")
    )
    ax = Figure().subplots()
    pictures.draw_correlations(halves, ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["constant\nLDS –", "mine\nLDS 1.000"]


def test_an_interrupted_study_says_what_it_keeps(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    kept = f"Interrupted. Finished parts are saved in {str(tmp_path)!r}; the same command with --resume continues"
    for study, name, said in ((toy, "toy", "Interrupted. Nothing was kept."), (cnn, "cnn", kept + " from there.")):
        monkeypatch.setattr(study, "reproduce", stop)
        result = CliRunner().invoke(app, [name, "--out", str(tmp_path)])
        assert result.exit_code == 130
        assert result.stderr == f"dif: {said}\n"


def test_all_commands_explain_themselves():
    shown = CliRunner().invoke(app, ["--help"]).output
    for name in ("demo", "toy", "regression", "cnn", "finetune", "credit", "groups", "attribution", "calibration",
                 "runs", "ablation", "evaluation"):  # fmt: skip
        assert name in shown
        assert "--out" in CliRunner().invoke(app, [name, "--help"]).output
