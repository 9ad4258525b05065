"""Retrainings of the paper's network by layers, against those of dif."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import retrainings

import dif
from studies import cnn, cnn_fit, cnn_retraining
from studies.cnn_retraining import describe_failures, list_moves, retrain_each

SETTING = cnn.Setting(n=200, tau=0.01, l2=0.05, model="small", channels=2, epochs=20)


def solve(setting, start=None):
    task = cnn.build_task(setting, None, "cpu")
    if start is None:
        solution = cnn.fit(task, setting, False)
    else:
        solution = dif.fit(task.problem, start.params, multipliers=start.lam, show_progress=False)
    solution.part_hessians = cnn.group_program(task).part_hessians(solution.theta)
    return task, solution


@pytest.fixture(scope="module")
def case():
    return solve(SETTING)


@pytest.fixture(scope="module")
def unbound(case):
    return solve(replace(SETTING, tau=10.0), case[1])[1]


def retrain(task, solution, removals, images, keep, tol=1e-10):
    return retrain_each(cnn.group_program(task), solution, removals, images, l2=SETTING.l2, tol=tol, keep=keep)


def check_against_dif(solution, removals, ends):
    expected = torch.stack([dif.Retraining(solution, strict=False).change(removal).flat for removal in removals])
    found = torch.stack(list_moves(solution, ends))
    assert float((found - expected).norm(dim=1).max()) <= 1e-6 * float(expected.norm(dim=1).min())


@pytest.mark.parametrize("renormalise", [True, False])
def test_they_are_those_of_dif(case, tmp_path, renormalise):
    task, solution = case
    images = [3, 17, 100, 199]
    removals = task.train.remove_each(images, renormalise=renormalise)
    ends = retrain(task, solution, removals, images, tmp_path)
    assert all(end.reached and end.goal == 1e-10 for end in ends)
    assert describe_failures(removals, ends) == {}
    check_against_dif(solution, removals, ends)


@pytest.mark.parametrize("room", [-1e-4, 1e-4])
def test_a_constraint_switches(unbound, tmp_path, room):
    """τ is so near the largest value that it has without constraints that some removals release it, or activate it."""
    largest = int(unbound.c.argmax())
    task, solution = solve(replace(SETTING, tau=10.0 + float(unbound.c[largest]) + room), unbound)
    assert (float(solution.lam[largest]) > 0) == (room < 0)
    images = torch.nonzero(task.group == largest).reshape(-1)[:6].tolist()
    removals = task.train.remove_each(images)
    ends = retrain(task, solution, removals, images, tmp_path)
    assert {bool(end.lam[largest] > 0) for end in ends} == {True, False}
    check_against_dif(solution, removals, ends)


def test_descent_takes_over_where_newton_fails(case, tmp_path, monkeypatch):
    task, solution = case
    newton, calls = cnn_fit.newton, []

    def fail_at_first(problem, state, *others):
        calls.append(state)
        return state if len(calls) == 1 else newton(problem, state, *others)

    monkeypatch.setattr(cnn_fit, "newton", fail_at_first)
    removals = task.train.remove_each([5])
    ends = retrain(task, solution, removals, [5], tmp_path)
    assert ends[0].iterations == len(calls) - 1 > 0
    check_against_dif(solution, removals, ends)


def test_killed_and_failed_retrainings(case, tmp_path, monkeypatch):
    task, solution = case
    images = [1, 2, 3]
    removals, settle, calls = task.train.remove_each(images), cnn_retraining.settle, []

    def count(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return settle(*args)

    monkeypatch.setattr(cnn_retraining, "settle", count)
    with pytest.raises(KeyboardInterrupt):
        retrain(task, solution, removals, images, tmp_path)
    first = retrainings(tmp_path)
    assert len(first) == 2
    ends = retrain(task, solution, removals, images, tmp_path)
    assert len(calls) == 4
    assert {name: retrainings(tmp_path)[name] for name in first} == first
    again = retrain(task, solution, removals, images, tmp_path)
    assert len(calls) == 4
    for one, other in zip(ends, again, strict=True):
        assert torch.equal(one.theta, other.theta)
    monkeypatch.setattr(cnn_fit, "_TRIES", 1)
    ends = retrain(task, solution, removals, images, tmp_path, tol=1e-30)
    assert not any(end.reached for end in ends)
    assert max(end.residual for end in ends) < 1e-8
    assert np.isnan(torch.stack(list_moves(solution, ends))).all()
    failed = describe_failures(removals, ends)
    assert list(failed) == [f"remove train[{i}]" for i in images]
    assert failed["remove train[1]"].startswith("Stopped at a KKT residual of ")
