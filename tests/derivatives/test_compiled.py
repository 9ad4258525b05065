"""Compiled losses give the same derivatives, solutions and influence as uncompiled ones."""

import numpy as np
import pytest
import torch
from torch import nn

import dif
from dif.derivatives import sweeps
from dif.derivatives.batch_losses import BatchLosses
from dif.derivatives.cost import cost
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import NOT_COMPILED

F64 = torch.float64


@pytest.fixture(scope="module", autouse=True, params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request):
    """The stages of torch.compile that need no C++ compiler, and all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dif.derivatives.batch_losses._BACKEND", request.param)
        patch.setattr("dif.derivatives.batch_losses._SMALLEST", 20)
        yield


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def squared(model, z):
    return (model(z["x"])[:, 0] - z["y"]) ** 2


def state(compile, loss=squared, batch_size=20):
    generator = torch.Generator().manual_seed(1)
    data = {
        "x": torch.randn(60, 3, generator=generator, dtype=F64),
        "y": torch.randn(60, generator=generator, dtype=F64),
    }
    return dif.Samples(loss, data, name="train", batch_size=batch_size, compile=compile)


@pytest.fixture(scope="module")
def solutions(backend):
    """The same fairness-constrained network, with compiled losses and without."""
    group, found = torch.arange(60) % 2, []
    for compile in (True, False):
        train = state(compile)
        risk = train.mean()
        problem = dif.Problem(risk + dif.ridge(0.1), [train.mean(where=group == g) <= risk + 0.01 for g in range(2)])
        found.append((train, dif.fit(problem, network(), show_progress=False)))
    return found


def test_derivatives_agree():
    train = state(True)
    parameters, theta = Parameters.of(network())
    _, batch = next(train.batches(torch.arange(20)))
    losses = BatchLosses(train, parameters, batch, 20)
    w, v = torch.rand(20, dtype=F64), torch.randn_like(theta)
    assert losses.compiled
    np.testing.assert_allclose(losses.values(theta), losses(theta).detach(), rtol=1e-13)
    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(losses(leaf) @ w, leaf, create_graph=True)
    (product,) = torch.autograd.grad(gradient @ v, leaf)
    np.testing.assert_allclose(losses.gradient(theta, w)[1], gradient.detach(), atol=1e-13)
    np.testing.assert_allclose(losses.product(theta, w, v), product, atol=1e-12)
    assert not train.fallbacks
    assert len(train.kernels) == 3


def test_solutions_and_influence_agree(solutions):
    (compiled, first), (plain, second) = solutions
    assert compiled.kernels
    assert not compiled.fallbacks
    np.testing.assert_allclose(first.theta, second.theta, atol=1e-8)
    scores = [
        dif.DirectionalInfluence(solution).scores(train.mean(), train.remove_each([0, 7, 33]), assess=0).values
        for train, solution in ((compiled, first), (plain, second))
    ]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-8)
    retrained = [
        dif.Retraining(solution, show_progress=False).scores(train.mean(), train.remove_each([0, 7, 33])).values
        for train, solution in ((compiled, first), (plain, second))
    ]
    np.testing.assert_allclose(retrained[0], retrained[1], atol=1e-8)


def test_mini_batches_need_one_kernel():
    train = state(True, batch_size=None)
    problem = dif.Problem(train.mean() + dif.ridge(0.1))
    with pytest.warns(dif.NotConvergedWarning):
        dif.fit(problem, network(), epochs=1, batch_size=25, max_iter=3, show_progress=False)
    assert sum(key[-1][0] == (25,) for key in train.kernels) == 1  # value and gradient together


def test_a_loss_that_branches_on_values_is_not_compiled():
    def loss(model, z):
        return squared(model, z) if float(model["0.bias"].sum()) > 0 else 2 * squared(model, z)

    train = state(True, loss)
    parameters, theta = Parameters.of(network())
    _, batch = next(train.batches(torch.arange(20)))
    losses = BatchLosses(train, parameters, batch, 20)
    with pytest.warns(UserWarning, match=r"'train' is not compiled, so every evaluation takes longer \(\w+: "):
        losses.values(theta)
    for point in (theta, -theta):
        np.testing.assert_allclose(losses.values(point), losses(point).detach(), rtol=1e-13)
    assert train.fallbacks == {NOT_COMPILED}


def test_code_that_gives_other_numbers_is_not_used(monkeypatch):
    monkeypatch.setattr("dif.derivatives.batch_losses._agree", lambda first, second: False)
    train = state(True)
    parameters, theta = Parameters.of(network())
    _, batch = next(train.batches(torch.arange(20)))
    with pytest.warns(UserWarning, match=r"\(the compiled code gives other numbers\)"):
        BatchLosses(train, parameters, batch, 20).values(theta)


def test_few_sizes_are_compiled(solutions, monkeypatch):
    """Neither the samples that a check or a removal picks nor the number of columns leads to further sizes."""
    train, solution = solutions[0]
    room = 20 * (cost(train, solution.program.parameters, solution.theta).elements + 4)
    monkeypatch.setattr(sweeps, "numbers_at_once", lambda theta, cpu=0: room)
    monkeypatch.setattr(sweeps, "_FEWEST", 1)
    product, sizes = BatchLosses.product, []
    monkeypatch.setattr(BatchLosses, "product", lambda self, *args: sizes.append(self.count) or product(self, *args))
    V = torch.eye(len(solution.theta), dtype=F64)[:, :7]
    np.testing.assert_allclose(solution.curvature.product(V), solutions[1][1].curvature.product(V), atol=1e-7)
    assert sizes == [20] * 21
    assert {key[-1][0][0] for key in train.kernels} == {20}


def test_data_that_are_not_tensors_are_not_compiled():
    train = state(True)
    parameters, theta = Parameters.of(network())
    _, batch = next(train.batches(torch.arange(20)))
    losses = BatchLosses(train, parameters, {**batch, "names": ["a"] * 20}, 20)
    np.testing.assert_allclose(losses.values(theta), losses(theta).detach(), rtol=1e-13)
    assert not train.kernels


def test_compile_must_be_true_or_false():
    with pytest.raises(dif.InvalidInputError) as caught:
        dif.Samples(squared, torch.ones(3, 2), compile="yes")
    assert "It says whether torch.compile is used." in str(caught.value)
    assert "'yes'" in str(caught.value) or "str" in str(caught.value)
