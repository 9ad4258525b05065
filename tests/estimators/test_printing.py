"""What prints: the change of a solution, a path, the curve of a bound, a certificate."""

import pytest
import torch
from problems import bound_regression, fit_problem

import dif


@pytest.fixture(scope="module")
def solved():
    train, problem = bound_regression()
    return train, problem, fit_problem(problem)


def test_a_change_prints_its_largest_parts(solved):
    train, _, solution = solved
    change = dif.DirectionalInfluence(solution).change(train.remove([3]))
    first, *lines = str(change).splitlines()
    assert first == f"Change of the solution: ‖Δθ‖ = {float(change.flat.norm()):.4g}"
    assert lines[0].split() == ["parameter", "Δθ"]
    most = int(change.flat.abs().argmax())
    assert lines[1].split() == [f"theta[{most}]", f"{float(change.flat[most]):+.4g}"]
    assert [line.split()[0] for line in lines[5:]] == ["constraint", "sum[0]", "order", "far"]
    assert float(lines[7].split()[1]) == pytest.approx(float(change.multipliers["order"]), rel=1e-3)


def test_the_parameters_of_a_change_are_named_by_their_place():
    def loss(params, z):
        return ((z[0] @ params["matrix"]).sum(1) + params["offset"] - z[1]) ** 2

    X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    train = dif.Samples(loss, (X, X[:, 0]), name="train")
    start = {"matrix": torch.zeros(2, 3).double(), "offset": torch.tensor(0.0).double()}
    solution = dif.fit(dif.Problem(train.mean() + dif.ridge(0.1)), start, show_progress=False)
    change = dif.DirectionalInfluence(solution).change(train.remove([0]))
    by_name = dict(change.largest(7))
    assert by_name["matrix[1, 2]"] == float(change.theta["matrix"][1, 2])
    assert by_name["offset"] == float(change.theta["offset"])
    text = str(change)
    assert "the 5 largest of 7 entries" in text
    assert "constraint" not in text


def test_a_path_prints_its_length_and_events(solved):
    _, problem, solution = solved
    order = problem.constraints[1]
    path = dif.PathInfluence(solution).follow(order.shift(1.0))
    first, *events = str(path).splitlines()
    assert first.startswith("Path of the solution under 'shift order by +1': ε from 0 to 1 in ")
    assert f"‖Δθ‖ = {float((path.end.theta - solution.theta).norm()):.4g}, 1 event" in first
    assert events == [str(path.events[0])]


def test_a_curve_prints_as_a_table(solved):
    train, problem, solution = solved
    order = problem.constraints[1]
    now = float(order.tau)
    curve = dif.bound_curve(solution, order, [now - 0.1, now, now + 1.0], {"risk": train.mean()})
    first, headings, *rows = str(curve).splitlines()
    assert first == "Curve of the bound of order"
    assert headings.split() == ["bound", "objective", "price", "risk"]
    assert [float(x) for x in rows[1].split()] == pytest.approx(
        [now, solution.objective, float(solution.multipliers["order"]), solution.value(train.mean())], rel=1e-4
    )
    assert rows[3:] == [str(kink) for kink in curve.kinks]
    assert len(curve.kinks) == 1


def test_a_certificate_prints_questions_and_answers(solved):
    _, problem, solution = solved
    first, *lines = str(dif.Certificate.of(solution)).splitlines()
    assert first == "Certificate: holds"
    assert lines[0].startswith("yes  Is it a solution? The relative KKT residual is")
    assert lines[-1].startswith("far: ")
    moved = dif.Solution(problem, {"theta": solution.theta + 1.0}, solution.multipliers)
    first, *lines = str(dif.Certificate.of(moved)).splitlines()
    assert first == "Certificate: does NOT hold"
    assert any(line.startswith("NO   ") for line in lines)
