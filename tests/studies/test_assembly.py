"""Assembling the Hessian of a solution in steps that are kept, where it is too expensive to be assembled by default."""

import numpy as np
import pytest
import torch
from problems import class_data, logistic

import dif
from dif.derivatives import hessian
from dif.derivatives.rows import Rows
from dif.runtime.archive import write_archive
from studies import assembly


@pytest.fixture
def expensive(monkeypatch):
    """Hessians count as too expensive to assemble."""
    for limit in ("_ANYWAY", "DENSE_LIMIT"):
        monkeypatch.setattr(hessian, limit, 0)
    monkeypatch.setattr(assembly, "_COLUMNS", 3)


def solve():
    train = dif.Samples(logistic, class_data(), name="train", batch_size=25)
    group, risk = torch.arange(60) % 3, train.mean()
    constraints = [train.mean(where=group == 1) <= risk - 0.02, dif.linear(torch.eye(4)) <= 1.2]
    problem = dif.Problem(risk + dif.ridge(0.05), constraints)
    return train, dif.fit(problem, {"theta": torch.zeros(4, dtype=torch.float64)}, show_progress=False)


def count_products(monkeypatch):
    counted, products = [], Rows.hessian_products

    def count(self, theta, weights, V, *more):
        counted.append(V.shape[1])
        return products(self, theta, weights, V, *more)

    monkeypatch.setattr(Rows, "hessian_products", count)
    return counted


def test_the_same_answers_as_with_products(expensive):
    train, solution = solve()
    assembled = assembly.assemble(solution, show_progress=False)
    assert not solution.curvature.assembled
    assert assembled.curvature.assembled
    X, y = class_data()
    theta, group = solution.theta, torch.arange(60) % 3

    def lagrangian(t):
        losses = logistic({"theta": t}, (X, y))
        gap = losses[group == 1].mean() - losses.mean()
        return losses.mean() + 0.025 * t @ t + solution.lam[0] * gap

    np.testing.assert_allclose(assembled.hessian, torch.func.hessian(lagrangian)(theta), atol=1e-14)
    np.testing.assert_allclose(assembled.curvature.product(torch.eye(4).double()[:, 1:]), assembled.hessian[:, 1:])
    np.testing.assert_allclose(assembled.active.curvature, solution.active.curvature, rtol=1e-6)
    removals = train.remove_each([0, 1, 2, 33])
    for make in (
        lambda at: dif.DirectionalInfluence(at),
        lambda at: dif.ClassicalInfluence(at),
        lambda at: dif.NewtonInfluence(at),
        lambda at: dif.Retraining(at),
    ):
        there, here = (make(at).scores(train.mean(), removals).values for at in (assembled, solution))
        np.testing.assert_allclose(there, here, rtol=1e-6, atol=1e-12)


def test_finished_columns_are_kept(expensive, tmp_path, monkeypatch):
    _, solution = solve()
    whole = assembly.assemble(solution, show_progress=False).part_hessians
    monkeypatch.setattr(assembly, "write_archive", fail_after(2, write_archive))
    with pytest.raises(KeyboardInterrupt):
        assembly.assemble(solution, tmp_path / "hessian", show_progress=False)
    monkeypatch.undo()
    monkeypatch.setattr(assembly, "_COLUMNS", 3)
    assert len(list((tmp_path / "hessian").iterdir())) == 2
    counted = count_products(monkeypatch)
    kept = assembly.assemble(solution, tmp_path / "hessian", show_progress=False).part_hessians
    columns = 4 * solution.program.rows.C.shape[1]
    assert sum(counted) == columns - 4
    assert torch.equal(kept, whole)
    counted.clear()
    moved = dif.Solution(solution.problem, {"theta": solution.theta + 1e-9}, solution.multipliers)
    assembly.assemble(moved, tmp_path / "hessian", show_progress=False)
    assert sum(counted) == columns


def fail_after(count, save):
    """Save this many times and then be interrupted."""
    calls = iter(range(count))

    def stop_soon(*args):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        save(*args)

    return stop_soon
