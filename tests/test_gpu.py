"""The same numbers on an accelerator."""

import warnings

import numpy as np
import pytest
import torch
from problems import class_data, logistic

import dif
from dif.derivatives.losses import sample_slopes

pytestmark = pytest.mark.gpu


def answers(device):
    X, y = (t.to(device) for t in class_data())
    group = torch.arange(60) % 3  # masks may stay on the CPU
    train = dif.Samples(logistic, (X, y), name="train", batch_size=25)
    risk = train.mean()
    constraints = [train.mean(where=group == 1) <= risk - 0.02, dif.linear(torch.eye(4)) <= 1.2]
    problem = dif.Problem(risk + dif.ridge(0.05), constraints)
    solution = dif.fit(problem, {"theta": torch.zeros(4, dtype=torch.float64, device=device)})
    assert solution.theta.device.type == device
    removals = train.remove_groups([[0], [1, 4], [2, 3, 5]]) + constraints[0].shift(0.001)
    found = [solution.theta, solution.lam]
    for estimator in (
        dif.DirectionalInfluence(solution),
        dif.DirectionalInfluence(solution, switching=True),
        dif.ClassicalInfluence(solution),
        dif.PenaltyInfluence(solution, at_minimiser=True),
        dif.NewtonInfluence(solution),
        dif.Retraining(solution),
    ):
        found += [estimator.scores(train, removals).values, estimator.change(removals[1]).flat]
    found.append(dif.DirectionalInfluence(solution).change(train.add((X[:1], -y[:1]), like=1)).flat)
    found.append(dif.DirectionalInfluence(solution).change(train.reweight(torch.linspace(0, 0.01, 60))).flat)
    return [t.cpu().numpy() for t in found]


def test_same_as_on_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
    for there, here in zip(answers("cuda"), answers("cpu"), strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-8, atol=1e-10)


def network(n, batch_size=None, device="cuda"):
    """A tanh network with a ridge at some point: no solution, but everything can be multiplied."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, 50, generator=generator, dtype=torch.float64)
    y = torch.where(X[:, 0] > 0, 1.0, -1.0).double()

    def loss(params, z):
        return torch.nn.functional.softplus(-z[1] * (torch.tanh(z[0] @ params["A"]) @ params["b"]))

    start = {"A": 0.1 * torch.randn(50, 40, generator=generator, dtype=torch.float64), "b": torch.ones(40).double()}
    train = dif.Samples(loss, (X.to(device), y.to(device)), batch_size=batch_size)
    group = torch.arange(n) % 2 == 0
    stated = dif.Problem(train.mean() + dif.ridge(0.1), [train.mean(where=group) <= 0.3])
    return train, dif.Solution(stated, {k: t.to(device) for k, t in start.items()}, [0.5])


def waits(work):
    """How often the host waits for the device."""
    work()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in said)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("what", ["products", "gradients", "slopes", "some samples"])
def test_no_round_trip_per_batch(what):
    """Twenty times as many batches, and the host does not wait for the device once more."""
    counts = []
    for batch_size in (2000, 100):
        train, at = network(4000, batch_size)
        rows, V = at.program.rows, torch.ones(2040, 3, dtype=torch.float64, device="cuda")
        only = torch.tensor([0.0, 1.0], dtype=torch.float64, device="cuda")  # the constraint: every other sample
        works = {
            "products": lambda at=at, V=V: at.curvature.product(V),
            "gradients": lambda rows=rows, at=at: rows.gradients(at.theta),
            "slopes": lambda train=train, at=at, V=V: sample_slopes(train, at.program.parameters, at.theta, V),
            "some samples": lambda rows=rows, at=at, V=V, only=only: rows.hessian_products(at.theta, only @ rows.C, V),
        }
        counts.append(waits(works[what]))
    assert counts[0] == counts[1], counts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_out_of_memory_halves_the_batch(monkeypatch):
    _, at = network(200_000)
    V = torch.ones(2040, 16, dtype=torch.float64, device="cuda")
    expected = at.curvature.product(V)
    monkeypatch.setattr("dif.runtime.guard._short", [0])
    monkeypatch.setattr(
        "dif.runtime.guard.numbers_at_once.__defaults__", (2**40,)
    )  # as if there were room for everything
    monkeypatch.setattr("dif.runtime.guard._ACCELERATED", 2**40)
    monkeypatch.setattr("dif.derivatives.losses._PASS", 2**40)
    torch.cuda.empty_cache()
    room = torch.cuda.memory_allocated() + 2**29
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.warns(dif.MemoryWarning, match="going on with batches halved"):
            found = at.curvature.product(V)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
