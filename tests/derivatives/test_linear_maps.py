"""Hessians of losses of linear maps equal those of autograd; other losses are recognised and use products."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, softplus

from dif import Samples
from dif.derivatives.linear_structure import evaluate_maps
from dif.derivatives.losses import cost, structured_hessian, sweep_batches
from dif.derivatives.rows import Rows
from dif.problem.parameters import Parameters

N = 40
generator = torch.Generator().manual_seed(0)
X = torch.randn(N, 7, generator=generator, dtype=torch.float64)
X2 = torch.randn(N, 3, generator=generator, dtype=torch.float64)
y = torch.randint(0, 4, (N,), generator=generator)
w = torch.rand(N, generator=generator, dtype=torch.float64)
data = {"X": X, "X2": X2, "y": y}


def params(**shapes):
    """Draw parameters of these shapes."""
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}


def logits(p, z):
    return z["X"] @ p["W"] + p["b"]


def inspected(h, b):
    """Use h without gradients before a second layer."""
    with torch.no_grad():
        h.amax(1)
    return softplus(torch.tanh(h) @ b)


MAPPED = {
    "softmax": (params(W=(7, 4), b=(4,)), lambda p, z: cross_entropy(logits(p, z), z["y"], reduction="none")),
    "transposed": (params(W=(4, 7)), lambda p, z: cross_entropy(linear(z["X"], p["W"]), z["y"], reduction="none")),
    "one output": (params(w=(7,), b=()), lambda p, z: softplus(-(2 * z["y"] - 3) * (z["X"] @ p["w"] + p["b"]))),
    "column": (params(w=(7, 1), b=(1,)), lambda p, z: softplus(z["X"] @ p["w"] + p["b"]).squeeze(-1)),
    "two maps": (params(a=(7,), c=(3,)), lambda p, z: torch.exp(0.1 * (z["X"] @ p["a"]) * torch.sin(z["X2"] @ p["c"]))),
    "sum of two": (params(a=(7,), c=(3,)), lambda p, z: softplus(z["X"] @ p["a"] + z["X2"] @ p["c"])),
    "shared": (params(a=(7,)), lambda p, z: torch.sin(z["X"] @ p["a"]) * torch.cos((z["X"] ** 2) @ p["a"])),
    "views": (params(v=(28,)), lambda p, z: cross_entropy(z["X"] @ p["v"].view(4, 7).T, z["y"], reduction="none")),
    "slices": (params(v=(10,)), lambda p, z: (z["X"] @ p["v"][:7] - 1) ** 2 * (1 + torch.exp(z["X2"] @ p["v"][7:]))),
    "offset": (params(w=(7,)), lambda p, z: softplus(z["y"].double() + z["X"] @ p["w"])),
    "scalar bias for all": (
        params(W=(7, 4), b=(1,)),
        lambda p, z: cross_entropy(z["X"] @ p["W"] + p["b"], z["y"], reduction="none") + logits(p, z).pow(2).sum(1),
    ),
    "a map and a nonlinear one": (
        params(u=(7,), v=(7,)),
        lambda p, z: (z["X"] @ p["u"] + torch.tanh(z["X"] @ p["v"]) - z["y"]) ** 2,
    ),
    "nonlinear first": (params(u=(7,), v=(3,)), lambda p, z: softplus(torch.sin(z["X2"] @ p["v"]) + z["X"] @ p["u"])),
    "link": (params(e=(7,)), lambda p, z: z["y"] * torch.exp(-(z["X"] @ p["e"])) + z["X"] @ p["e"]),
    "quadratic": (params(W=(7, 4)), lambda p, z: ((z["X"] @ p["W"]) ** 2).sum(1)),
}
CURVED = {
    "a network": (params(A=(7, 5), B=(5, 4)), lambda p, z: (torch.tanh(z["X"] @ p["A"]) @ p["B"]).pow(2).sum(1)),
    "two linear layers": (params(A=(7, 5), B=(5, 4)), lambda p, z: (z["X"] @ p["A"] @ p["B"]).pow(2).sum(1)),
    "a second layer on activations used without gradients": (
        params(A=(7, 5), b=(5,)),
        lambda p, z: inspected(z["X"] @ p["A"], p["b"]),
    ),
    "a squared parameter": (params(w=(7,)), lambda p, z: softplus(z["X"] @ p["w"] ** 2)),
    "a scaled parameter": (params(w=(7,)), lambda p, z: softplus(z["X"] @ (2 * p["w"]))),
    "a ridge inside": (params(w=(7,)), lambda p, z: softplus(z["X"] @ p["w"]) + (p["w"] ** 2).sum()),
    "temperature": (params(w=(7,), t=()), lambda p, z: softplus(p["t"] * (z["X"] @ p["w"]))),
    "elementwise": (params(w=(7,)), lambda p, z: softplus((z["X"] * p["w"]).sum(1))),
}


@pytest.fixture(autouse=True)
def use_structure_for_few_parameters(monkeypatch):
    monkeypatch.setattr("dif.derivatives.rows.STRUCTURED", 1)


def compile_loss(start, loss, **options):
    """Return samples, layout, θ, rows and the exact Hessian of the weighted sum of a loss."""
    samples = Samples(loss, data, **options)
    layout, theta = Parameters.of(start)
    rows, *_ = Rows.compile([samples.weighted(w)], layout, theta)
    exact = torch.autograd.functional.hessian(lambda t: loss(layout.tensors(t), data) @ w, theta)
    return samples, layout, theta, rows, exact


@pytest.mark.parametrize("name", MAPPED)
def test_structure_is_found_and_exact(name):
    samples, layout, theta, _, exact = compile_loss(*MAPPED[name])
    H = structured_hessian(samples, layout, theta, w)
    assert H is not None
    assert torch.allclose(H, exact, rtol=1e-12, atol=1e-12 * float(exact.abs().max()))


@pytest.mark.parametrize("name", CURVED)
def test_other_losses_are_recognised(name):
    samples, layout, theta, rows, exact = compile_loss(*CURVED[name])
    assert cost(samples, layout, theta).maps is None
    assert torch.allclose(rows.part_hessian(theta, torch.ones(1).double()), exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("batch_size", [1, 3, 40])
def test_batches_and_subsets(batch_size):
    start, loss = MAPPED["softmax"]
    samples, layout, theta, _, exact = compile_loss(start, loss, batch_size=batch_size)
    assert torch.allclose(structured_hessian(samples, layout, theta, w), exact, rtol=1e-12, atol=1e-13)
    some = torch.tensor([3, 17, 20])
    few = {k: t[some] for k, t in data.items()}
    exact = torch.autograd.functional.hessian(lambda t: loss(layout.tensors(t), few) @ w[some], theta)
    assert torch.allclose(structured_hessian(samples, layout, theta, w[some], some), exact, rtol=1e-12, atol=1e-13)


def test_modules():
    module = torch.nn.Linear(7, 4).double()
    samples = Samples(lambda model, z: cross_entropy(model(z["X"]), z["y"], reduction="none"), data)
    layout, theta = Parameters.of(module)
    exact = torch.autograd.functional.hessian(lambda t: samples.loss(layout.bind(layout.tensors(t)), data) @ w, theta)
    assert torch.allclose(structured_hessian(samples, layout, theta, w), exact, rtol=1e-12, atol=1e-13)


def changing(p, z):
    """Compute another loss on the few samples on which the structure is detected."""
    return softplus(z["X"] @ (p["w"] if len(z["X"]) <= 8 else p["w"] ** 2))


def unseen(p, z):
    """Hide a dependence on the parameters from the tracing, on large batches."""
    out = z["X"] @ p["w"]
    return softplus(out) if len(out) <= 8 else softplus(out) * (1 + _hidden(p["w"].sum()))


def _hidden(t):
    return torch.Tensor.as_subclass(t, torch.Tensor) ** 2


@pytest.mark.parametrize("loss", [changing, unseen])
def test_a_wrongly_detected_structure_is_noticed(loss):
    samples, layout, theta, rows, exact = compile_loss(params(w=(7,)), loss)
    assert cost(samples, layout, theta).maps == (7, 1)
    assert torch.allclose(rows.part_hessian(theta, torch.ones(1).double()), exact, rtol=1e-11, atol=1e-11)


def test_a_wrong_matrix_is_noticed():
    _, _, theta, rows, exact = compile_loss(*MAPPED["softmax"])
    one = torch.ones(1).double()
    assert rows._agrees(exact, theta, one)
    off = exact.clone()
    off[3, 4] += 1e-7 * float(exact.abs().max())
    assert not rows._agrees(off, theta, one)


def test_small_coordinates_beside_large_ones_are_checked():
    """A wrong entry is found although curvatures differ by a factor of 1e12."""
    large, small = 1e6 * X, X
    start, data_ = params(w=(7,), u=(7,)), (large, small)
    samples = Samples(lambda p, z: 0.5 * (z[0] @ p["w"]) ** 2 + softplus(z[1] @ p["u"]), data_)
    layout, theta = Parameters.of(start)
    rows, *_ = Rows.compile([samples.weighted(w)], layout, theta)
    one = torch.ones(1).double()
    H = structured_hessian(samples, layout, theta, w)
    assert rows._agrees(H, theta, one)
    H[8, 9] += 1e-5 * float(H[8, 8])
    assert not rows._agrees(H, theta, one)


def test_samples_without_weight():
    """An inactive constraint over other samples has no effect on the Hessian."""
    start, loss = MAPPED["softmax"]
    train, other = Samples(loss, data), Samples(MAPPED["quadratic"][1], data, name="other")
    layout, theta = Parameters.of(start)
    rows, *_ = Rows.compile([train.weighted(w), other.mean()], layout, theta)
    exact = torch.autograd.functional.hessian(lambda t: loss(layout.tensors(t), data) @ w, theta)
    H = rows.hessian(theta, torch.tensor([1.0, 0.0]).double())
    assert torch.allclose(H, exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", MAPPED)
def test_several_points_in_one_product_are_those_one_by_one(name):
    tensors, loss = MAPPED[name]
    layout, theta = Parameters.of(tensors)
    _, plain = next(sweep_batches(Samples(loss, data), layout, theta))
    mapped = replace(plain, by_maps=True)
    assert not plain.by_maps
    draw = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)  # noqa: E731
    thetas, W = theta + 0.1 * draw(4, len(theta)), draw(4, 3, N)
    assert evaluate_maps(plain.samples, layout, thetas, plain.batch)[0].shape == (4, N)
    thetas[0, 0] = float("nan")  # at one point, which must not spoil the others
    for arguments in ((theta[None], W[:1]), (thetas,), (thetas, W)):
        torch.testing.assert_close(
            mapped.evaluate_at(*arguments), plain.evaluate_at(*arguments), rtol=1e-12, atol=1e-12, equal_nan=True
        )
