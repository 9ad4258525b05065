"""The paper's numbers, through the same code as the command line."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dif
from dif.cli import app
from dif.studies import regression, toy


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
    train, _ = toy.problem()
    problem = dif.Problem(train.mean(), [dif.linear([1.0, 1.0]) <= 1.0])
    solution = dif.fit(problem, {"theta": torch.zeros(2).double()})
    assert solution.active.weak == (0,)
    change = dif.DirectionalInfluence(solution).change(train.remove([1], renormalise=False))
    np.testing.assert_allclose(change.flat, [1 / 6, -1 / 6], atol=1e-9)
    np.testing.assert_allclose(change.multipliers[0], 1 / 9, atol=1e-9)
    back = dif.DirectionalInfluence(solution).change(-train.remove([1], renormalise=False))
    np.testing.assert_allclose(back.flat, [-1 / 4, 0], atol=1e-9)


@pytest.mark.parametrize(
    ("seed", "bounds", "held"), [(0, "paper", 1), (3, "paper", 2), (4, "paper", 2), (1, "binding", 3)]
)
def test_regression(seed, bounds, held):
    result = regression.run(seed, 100, bounds)
    assert len(result["binding"]) == held
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
    shown = runner.invoke(app, ["reproduce", "toy", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "0.1667" in shown.output
    shown = runner.invoke(app, ["reproduce", "regression", "--seed", "3", "--removals", "5", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    for name in ("toy", "regression"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((out / f"{name}.json").read_text())["study"] == name


def test_command_line_refuses_in_one_line(tmp_path):
    runner = CliRunner()
    assert runner.invoke(app, ["reproduce", "regression", "--removals", "1"]).exit_code == 2
    (tmp_path / "file").write_text("")
    shown = runner.invoke(app, ["reproduce", "toy", "--out", str(tmp_path / "file")])
    assert shown.exit_code == 2
    assert "Traceback" not in shown.output
    assert len(shown.output.strip().splitlines()) == 1
    assert runner.invoke(app, ["--version"]).output.strip() == dif.__version__


def test_studies_check_their_input():
    for bad in ({"removals": 1}, {"removals": 5000}, {"bounds": "loose"}):
        with pytest.raises(dif.InvalidInputError):
            regression.run(**{"removals": 5, **bad})
