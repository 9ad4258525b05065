"""A solution leaves as a file and as text, and comes back only to its own problem."""

import subprocess
import sys
from threading import Lock

import numpy as np
import pytest
import torch
from problems import bound_regression, fit_problem, free_regression, regression_data, squared, zeros
from refusals import invalid

import dif


@pytest.fixture(scope="module")
def solved():
    train, problem = bound_regression()
    return train, problem, fit_problem(problem)


def test_what_is_saved_comes_back_the_same(solved, tmp_path):
    train, problem, solution = solved
    path = tmp_path / "solution.npz"
    solution.save(path)
    again = dif.Solution.load(path, problem, zeros())
    assert torch.equal(again.theta, solution.theta)
    assert torch.equal(again.lam, solution.lam)
    assert again.tol == solution.tol
    assert again.converged
    removals = train.remove_each([0, 1, 2])
    first, second = (dif.DirectionalInfluence(s).scores(train.mean(), removals).values for s in (solution, again))
    assert torch.equal(first, second)
    with np.load(path, allow_pickle=False) as file:
        assert set(file) == {"theta", "lam", "about", "checksum"}


def test_a_problem_is_recognised_in_another_process(tmp_path):
    program = """
import sys, torch, dif
def loss(params, z):
    return (z - params["t"]) ** 2
train = dif.Samples(loss, torch.arange(6.0).double(), name="train")
problem, start = dif.Problem(train.mean(), [dif.linear([1.0]) <= 2.0]), {"t": torch.zeros(1).double()}
if sys.argv[1] == "save":
    dif.fit(problem, start, show_progress=False).save(sys.argv[2])
else:
    print(float(dif.Solution.load(sys.argv[2], problem, start).theta))
"""
    (tmp_path / "model.py").write_text(program)
    for what in ("save", "load"):
        command = [sys.executable, str(tmp_path / "model.py"), what, str(tmp_path / "solution.npz")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(2.0, abs=1e-9)


def test_a_file_of_another_problem_is_refused(solved, tmp_path):
    _, problem, solution = solved
    path = tmp_path / "solution.npz"
    solution.save(path)
    load = dif.Solution.load
    meaning = "state the problem as when it was saved, or fit this one."
    _, other = free_regression()
    invalid(lambda: load(path, other, zeros()), "belongs to another problem: it has constraints", meaning)
    X, y = regression_data()
    moved = dif.Samples(squared, (X + 1e-9, y), name="train")
    same = dif.Problem(moved.mean(), problem.constraints)
    invalid(lambda: load(path, same, zeros()), "but other data, weights, bounds or code", meaning)
    total, order, far = problem.constraints
    bound = dif.Problem(problem.objective, [total, (order.term <= 0.1).named("order"), far])
    invalid(lambda: load(path, bound, zeros()), "but other data, weights, bounds or code", meaning)


def test_other_parameters_are_refused_before_any_loss_is_called(tmp_path):
    def loss(params, z):
        return ((z * params["w"]).sum(-1) - params["b"]) ** 2

    start = {"w": torch.zeros(3).double(), "b": torch.zeros(()).double()}
    train = dif.Samples(loss, torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).double())
    problem = dif.Problem(train.mean() + dif.ridge(0.1))
    path = tmp_path / "solution.npz"
    dif.fit(problem, start, show_progress=False).save(path)

    def refuse(params, found):
        cause = "pass the parameters of the model that was saved, with any values."
        invalid(lambda: dif.Solution.load(path, problem, params), found, cause)

    bias = start["b"]
    refuse({"w": torch.zeros(4).double(), "b": bias}, "have w of shape (4,), and the file has w of shape (3,);")
    many = {name: torch.zeros(3).double() for name in "pqrst"}
    refuse(start | many, "have p of shape (3,), q of shape (3,), r of shape (3,) and 2 more, and the file has nothing")
    refuse({"b": bias, "w": start["w"]}, "they have the same entries in another order;")
    refuse({k: v.float() for k, v in start.items()}, "they have dtype float32, and the file has float64;")


def test_a_file_that_is_none_is_refused(solved, tmp_path):
    _, problem, solution = solved
    path = tmp_path / "broken.npz"
    with pytest.raises(FileNotFoundError, match="no solution file"):
        dif.Solution.load(path, problem, zeros())
    path.write_bytes(b"no archive")
    damaged = f"'{path}' is damaged, or was not written by dif: "
    invalid(lambda: dif.Solution.load(path, problem, zeros()), damaged)
    np.savez(path, theta=np.array([object()], dtype=object), lam=np.zeros(3), about=np.array("{}"))
    invalid(lambda: dif.Solution.load(path, problem, zeros()), damaged)  # pickles are not read
    for wrong in (None, 3, tmp_path):
        invalid(lambda wrong=wrong: solution.save(wrong), "`path` must be the path of a file, not ")
        invalid(lambda wrong=wrong: dif.Solution.load(wrong, problem, zeros()), "`path` must be the path of a file, ")


def test_a_problem_that_cannot_be_recognised_is_not_saved(tmp_path):
    lock = Lock()

    def loss(params, z):
        with lock:
            return (z - params["t"]) ** 2

    train = dif.Samples(loss, torch.arange(4.0).double())
    solution = dif.fit(dif.Problem(train.mean()), {"t": torch.zeros(1).double()}, show_progress=False)
    invalid(lambda: solution.save(tmp_path / "solution.npz"), "cannot be inspected, so the problem would never be")
    assert list(tmp_path.iterdir()) == []


def test_a_solution_prints_as_a_summary(solved):
    _, problem, solution = solved
    first, *table = str(solution).splitlines()
    assert first.startswith(f"Solution: 4 parameters, objective {solution.objective:.6g}, relative KKT residual ")
    assert [line.split()[:2] for line in table] == [
        ["constraint", "state"],
        ["sum[0]", "binding"],
        ["order", "binding"],
        ["far", "inactive"],
    ]
    assert float(table[2].split()[-1]) == pytest.approx(float(solution.multipliers["order"]), rel=1e-3)
    assert float(table[3].split()[2]) == pytest.approx(50 - float(solution.theta[3]), rel=1e-3)
    assert str(dif.Solution(problem, zeros())).startswith("NOT a solution: 4 parameters")
    free, _ = free_regression()
    unconstrained = dif.fit(dif.Problem(free.mean()), zeros(), show_progress=False)
    assert str(unconstrained).endswith("no constraints")
