"""Losses, operators and modules as people write them: each with its parameters, its data and what dif should do.

An animal is a loss (params, batch) → (n,), its start and its data. It ends "right" or "refused".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

F64 = torch.float64
N = 40


@dataclass(frozen=True)
class Animal:
    name: str
    loss: Callable[..., Tensor]
    params: Callable[[], Any]
    data: Callable[[], Any]
    ends: str = "right"
    ridge: float = 0.3
    tight: float = 0.1  # how far the bound lies below what the group has without it


ANIMALS: dict[str, Animal] = {}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(N, *shape, generator=generator(seed), dtype=F64)


def table() -> tuple[Tensor, Tensor]:
    """Three features and an answer."""
    X = rows(3)
    return X, X[:, 0] - 0.5 * X[:, 1] + 0.7 * rows(seed=2)


def signs() -> tuple[Tensor, Tensor]:
    X, y = table()
    return X, torch.where(y > 0, 1.0, -1.0).to(F64)


def counts() -> tuple[Tensor, Tensor]:
    X, y = table()
    return X, (2 * y.abs()).round() + 1


def classes() -> tuple[Tensor, Tensor]:
    X, y = table()
    return X, (y > 0).long() + (y > 1).long()


def series(steps: int = 4, width: int = 2) -> tuple[Tensor, Tensor]:
    x = rows(steps, width, seed=3)
    return x, x.sum((1, 2)).tanh() + 0.3 * rows(seed=4)


def images() -> tuple[Tensor, Tensor]:
    x = rows(1, 5, 5, seed=5)
    return x, x.mean((1, 2, 3)) + 0.3 * rows(seed=6)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 5, (N, 4), generator=generator(7)), table()[1]


def weights(*shape: int, scale: float = 0.3, **others: tuple[int, ...]) -> Callable[[], dict[str, Tensor]]:
    def made() -> dict[str, Tensor]:
        draw = generator(8)
        first = {"t": scale * torch.randn(shape, generator=draw, dtype=F64)}
        more = {name: scale * torch.randn(size, generator=draw, dtype=F64) for name, size in others.items()}
        return {**first, **more}

    return made


def add(name: str, loss, params=None, data=table, **how) -> None:
    assert name not in ANIMALS
    ANIMALS[name] = Animal(name, loss, params or weights(3), data, **how)


def score(p, z):
    return z[0] @ p["t"]


def off(p, z):
    return score(p, z) - z[1]


# Losses of a linear model

add("squared", lambda p, z: off(p, z) ** 2)
add("softplus", lambda p, z: F.softplus(-z[1] * score(p, z)), data=signs)
add("logsigmoid", lambda p, z: -F.logsigmoid(z[1] * score(p, z)), data=signs)
add(
    "bce with logits",
    lambda p, z: F.binary_cross_entropy_with_logits(score(p, z), (z[1] > 0).to(z[0]), reduction="none"),
    data=signs,
)
add("cross entropy", lambda p, z: F.cross_entropy(z[0] @ p["t"], z[1], reduction="none"), weights(3, 3), classes)
add(
    "label smoothing",
    lambda p, z: F.cross_entropy(z[0] @ p["t"], z[1], reduction="none", label_smoothing=0.1),
    weights(3, 3),
    classes,
)
add(
    "nll of log_softmax",
    lambda p, z: F.nll_loss(F.log_softmax(z[0] @ p["t"], 1), z[1], reduction="none"),
    weights(3, 3),
    classes,
)
add("focal", lambda p, z: (1 - torch.sigmoid(z[1] * score(p, z))) ** 2 * F.softplus(-z[1] * score(p, z)), data=signs)
add("poisson", lambda p, z: F.poisson_nll_loss(score(p, z), z[1], reduction="none"), data=counts)
add("negative binomial",
    lambda p, z: torch.lgamma(p["r"].exp()) - torch.lgamma(z[1] + p["r"].exp())
    + (z[1] + p["r"].exp()) * torch.log1p(score(p, z).exp()) - z[1] * score(p, z),
    weights(3, r=()), counts)  # fmt: skip
add("gamma deviance", lambda p, z: score(p, z) + z[1] * torch.exp(-score(p, z)), data=counts)
add("gaussian nll",
    lambda p, z: F.gaussian_nll_loss(score(p, z), z[1], F.softplus(p["s"]).expand(len(z[1])) + 0.1, reduction="none"),
    weights(3, s=()))  # fmt: skip
add("normal distribution",
    lambda p, z: -torch.distributions.Normal(score(p, z), p["s"].exp(), validate_args=False).log_prob(z[1]),
    weights(3, s=()))  # fmt: skip
add(
    "normal distribution that checks itself",
    lambda p, z: -torch.distributions.Normal(score(p, z), p["s"].exp()).log_prob(z[1]),
    weights(3, s=()),
)
add("student", lambda p, z: torch.log1p(off(p, z) ** 2 / 3))
add("cauchy", lambda p, z: torch.log1p(off(p, z) ** 2))
add("logcosh", lambda p, z: off(p, z) + F.softplus(-2 * off(p, z)))
add("smooth absolute value", lambda p, z: torch.sqrt(off(p, z) ** 2 + 0.01))
add("huber", lambda p, z: F.huber_loss(score(p, z), z[1], reduction="none", delta=0.3))
add("smooth l1", lambda p, z: F.smooth_l1_loss(score(p, z), z[1], reduction="none", beta=0.5))
add("squared hinge", lambda p, z: torch.relu(1 - z[1] * score(p, z)) ** 2, data=signs)
add("exponential", lambda p, z: torch.exp(-0.5 * z[1] * score(p, z)), data=signs)
add("soft margin", lambda p, z: F.soft_margin_loss(score(p, z), z[1], reduction="none"), data=signs)
add("multilabel soft margin",
    lambda p, z: F.multilabel_soft_margin_loss(z[0] @ p["t"], F.one_hot(z[1], 3).to(z[0]), reduction="none"),
    weights(3, 3), classes)  # fmt: skip
add("kullback leibler",
    lambda p, z: F.kl_div(F.log_softmax(z[0] @ p["t"], 1), torch.softmax(z[0], 1), reduction="none").sum(1),
    weights(3, 3))  # fmt: skip
# without regard to the length of θ its minimum would be at 0, where it is not smooth
add("cosine",
    lambda p, z: 1 - F.cosine_similarity(z[0] @ p["t"], z[0]) + (p["t"].norm() - 2) ** 2,
    weights(3, 3, scale=1.0))  # fmt: skip
add("probit", lambda p, z: -torch.special.log_ndtr(z[1] * score(p, z)), data=signs)
add("error function", lambda p, z: (torch.erf(score(p, z)) - z[1]) ** 2)
add("quantile, smooth", lambda p, z: 0.3 * off(p, z) + 0.1 * F.softplus(-off(p, z) / 0.1))
add("fourth power", lambda p, z: off(p, z) ** 4)
add("hinge", lambda p, z: torch.relu(1 - z[1] * score(p, z)), data=signs, ends="refused", ridge=0.05)
add("absolute value", lambda p, z: off(p, z).abs(), ends="refused", ridge=0.05)
add("pinball", lambda p, z: torch.maximum(0.3 * off(p, z), -0.7 * off(p, z)), ends="refused", ridge=0.05)
add("counted errors", lambda p, z: (z[1] * score(p, z) < 0).to(z[0]), data=signs, ends="refused")

# Linear and constant in the parameters

add("linear, by product", lambda p, z: z[0] @ p["t"])
add("linear, elementwise", lambda p, z: (z[0] * p["t"]).sum(1))
add("linear, einsum", lambda p, z: torch.einsum("ni,i->n", z[0], p["t"]))
add("constant and a square", lambda p, z: z[1] ** 2 + 0.5 * (p["t"] ** 2).sum())

# Operators

add("einsum", lambda p, z: (torch.einsum("ni,ij,nj->n", z[0], p["t"], z[0]) - z[1]) ** 2, weights(3, 3))
add("bmm", lambda p, z: (torch.bmm(z[0][:, None], p["t"].expand(len(z[0]), 3, 2)).sum((1, 2)) - z[1]) ** 2,
    weights(3, 2))  # fmt: skip
add("baddbmm",
    lambda p, z: torch.baddbmm(p["b"].expand(len(z[0]), 1, 2), z[0][:, None], p["t"].expand(len(z[0]), 3, 2))
    .square().sum((1, 2)) - z[1],
    weights(3, 2, b=(1, 2)))  # fmt: skip
add("tensordot", lambda p, z: (torch.tensordot(z[0], p["t"], dims=([1], [0])) - z[1]) ** 2)
add("addmv", lambda p, z: (torch.addmv(z[1], z[0], p["t"], alpha=-1)) ** 2)
add("outer", lambda p, z: (torch.outer(p["t"], p["t"]) * z[0][:, :, None] * z[0][:, None]).sum((1, 2)) + off(p, z) ** 2)
add("logsumexp", lambda p, z: torch.logsumexp(z[0] * p["t"], 1) + off(p, z) ** 2)
add("cumsum", lambda p, z: (torch.cumsum(z[0] * p["t"], 1) - z[1][:, None]).square().mean(1))
add("cumprod", lambda p, z: (torch.cumprod(1 + 0.1 * z[0] * p["t"], 1)[:, -1] - z[1]) ** 2)
add("products", lambda p, z: ((1 + 0.1 * z[0] * p["t"]).prod(1) - z[1]) ** 2)
add("norm of residuals", lambda p, z: torch.linalg.vector_norm(z[0] * p["t"] - z[1][:, None], dim=1))
add(
    "sorted",
    lambda p, z: (torch.sort(z[0] * p["t"], 1).values @ torch.arange(3.0, dtype=F64) - z[1]) ** 2,
    ends="either",
)
add("gathered", lambda p, z: (p["t"][z[1]] - z[0][:, 0]) ** 2, data=classes)
add("scattered",
    lambda p, z: torch.zeros_like(z[0]).scatter_add(1, z[1][:, None].expand(-1, 3), z[0] * p["t"]).square().sum(1),
    data=classes)  # fmt: skip
add("clamped", lambda p, z: (score(p, z).clamp(-1, 1) - z[1]) ** 2, ends="either")
add("where", lambda p, z: torch.where(z[1] > 0, 1.5, 0.5) * off(p, z) ** 2)
add("fourier", lambda p, z: torch.fft.rfft(z[0] * p["t"], dim=1).abs().square().sum(1) - z[1] * score(p, z), tight=0.01)
add(
    "interpolated",
    lambda p, z: (F.interpolate((z[0] * p["t"])[:, None], size=7, mode="linear").sum((1, 2)) - z[1]) ** 2,
    tight=0.01,
)
add("cholesky",
    lambda p, z: 0.5 * torch.linalg.solve_triangular(
        torch.linalg.cholesky(p["t"] + p["t"].T + 3 * torch.eye(3, dtype=F64)), z[0].T, upper=False).square().sum(0)
    + 0.5 * torch.logdet(p["t"] + p["t"].T + 3 * torch.eye(3, dtype=F64)),
    weights(3, 3, scale=0.1))  # fmt: skip
add("solve", lambda p, z: (torch.linalg.solve(torch.eye(3, dtype=F64) + p["t"], z[0].T).sum(0) - z[1]) ** 2,
    weights(3, 3, scale=0.1), ridge=1.0)  # fmt: skip
add("matrix exponential", lambda p, z: (z[0] @ torch.matrix_exp(p["t"]).sum(1) - z[1]) ** 2, weights(3, 3, scale=0.1))
add("distances by hand", lambda p, z: torch.logsumexp(-((z[0][:, None] - p["t"]) ** 2).sum(2), 1).neg(), weights(2, 3))
add(
    "distances by cdist",
    lambda p, z: torch.logsumexp(-torch.cdist(z[0], p["t"]), 1).neg(),
    weights(2, 3),
    ends="refused",
)
add(
    "gradient inside, torch.func",
    lambda p, z: (
        torch.func.vmap(torch.func.grad(lambda x: torch.tanh(x @ p["t"])))(z[0]).square().sum(1) + off(p, z) ** 2
    ),
)


class Module(nn.Module):
    """A module and a squared error."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1).sum(1)


def add_module(name: str, make: Callable[[], nn.Module], data=table, **how) -> None:
    def params() -> nn.Module:
        torch.manual_seed(0)
        return Module(make()).double().eval()

    add(name, lambda m, z: (m(z[0]) - z[1]) ** 2, params, data, **{"ridge": 0.1, "tight": 0.02, **how})


class Last(nn.Module):
    """The last output of a recurrent net."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0][:, -1]


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.net, self.need = nn.MultiheadAttention(2, 2, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, x, x, need_weights=self.need)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.register_buffer("mask", torch.tensor([1.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net(x)) * self.mask


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(3), torch.randn(3)])
        self.named = nn.ParameterDict({"a": torch.randn(2)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.stack([x @ p for p in self.many], 1)) * self.named["a"]


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class Fixed(nn.Module):
    """One activation between two small layers."""

    def __init__(self, activation: nn.Module, width: int = 2, out: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), activation, nn.Linear(out or width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# Modules

for made in (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.ELU, nn.Softsign, nn.Tanhshrink):
    add_module(f"net of {made.__name__}", lambda made=made: Fixed(made()))
for made in (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Hardswish):
    add_module(f"net of {made.__name__}", lambda made=made: Fixed(made()), ends="either")
add_module("gated", lambda: Fixed(nn.GLU(), 4, 2))
add_module(
    "bilinear",
    lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Unflatten(1, (1, 2)), nn.Flatten(), nn.Linear(2, 1)),
)
add_module("layer norm", lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)))
add_module("rms norm", lambda: nn.Sequential(nn.RMSNorm(3), nn.Linear(3, 1)))
add_module("group norm", lambda: nn.Sequential(nn.GroupNorm(1, 3), nn.Linear(3, 1)))
add_module("batch norm with statistics", lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)))
add_module("batch norm without statistics",
           lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 1)),
           ends="refused")  # fmt: skip
add_module("dropout, switched off", lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.Tanh()))
add_module("convolution 1d", lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Tanh()))
add_module("convolution 2d", lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(3)), images)
add_module(
    "transposed convolution",
    lambda: nn.Sequential(nn.Conv2d(1, 1, 3, stride=2), nn.Tanh(), nn.ConvTranspose2d(1, 1, 2)),
    images,
)
add_module("max pool", lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2)), images, ends="either")
add_module("adaptive pool", lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1)), images)
add_module(
    "instance norm", lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2, affine=True), nn.Tanh()), images
)
add_module("recurrent", lambda: Last(nn.RNN(2, 2, batch_first=True)), series)
add_module("lstm", lambda: Last(nn.LSTM(2, 1, batch_first=True)), series)
add_module("gru", lambda: Last(nn.GRU(2, 1, batch_first=True)), series)
add_module("attention", lambda: Attention(False), series, ridge=0.02)
add_module("attention with its weights", lambda: Attention(True), series, ridge=0.02)
add_module(
    "transformer layer", lambda: nn.TransformerEncoderLayer(2, 1, 2, batch_first=True, activation="gelu"), series
)
add_module("embedding", lambda: nn.Embedding(5, 2), tokens)
add_module("embedding with padding", lambda: nn.Embedding(5, 2, padding_idx=0), tokens)
add_module("embedding bag, sum", lambda: nn.EmbeddingBag(5, 2, mode="sum"), tokens, ends="refused")
add_module(
    "embedding bag, mean, padded", lambda: nn.EmbeddingBag(5, 2, mode="mean", padding_idx=1), tokens, ends="refused"
)
add_module("embedding by frequency", lambda: nn.Embedding(5, 2, scale_grad_by_freq=True), tokens, ends="refused")
add_module("embedding of bounded norm", lambda: nn.Embedding(5, 2, max_norm=0.5), tokens, ends="refused")
add_module("sparse embedding", lambda: nn.Embedding(5, 2, sparse=True), tokens, ends="refused")
add_module("tied weights", Tied, ridge=0.3, tight=0.005)
add_module("frozen weights", Frozen)
add_module("buffers", Buffered)
add_module("lists of parameters", Listed)
add_module(
    "weight norm", lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)), nn.Tanh()), ends="refused"
)
add_module("orthogonal", lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.Tanh()))
add_module("checkpointed", Checkpointed, ends="refused")
add_module("data parallel", lambda: nn.DataParallel(nn.Linear(3, 1)))
add_module("scripted", lambda: torch.jit.script(nn.Linear(3, 1)))


# Functions with a derivative of their own


class Square(torch.autograd.Function):
    """x², written for torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g

    @staticmethod
    def jvp(ctx, t):
        return 2 * ctx.saved_tensors[0] * t


class Half(Square):
    """x², with half of its gradient."""

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g


class Backward(torch.autograd.Function):
    """x², without a forward mode."""

    generate_vmap_rule = True
    forward, setup_context, backward = Square.forward, Square.setup_context, Square.backward


class Slanted(Square):
    """x², whose forward mode is wrong."""

    @staticmethod
    def jvp(ctx, t):
        return ctx.saved_tensors[0] * t


class Old(torch.autograd.Function):
    """x², as it was written before torch.func."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


add("custom function", lambda p, z: Square.apply(off(p, z)))
add("custom function, reverse only", lambda p, z: Backward.apply(off(p, z)))
add("custom function, wrong forward", lambda p, z: Slanted.apply(off(p, z)))
add("custom function, wrong gradient", lambda p, z: Half.apply(off(p, z)), ends="refused")
add("custom function of old", lambda p, z: Old.apply(off(p, z)), ends="refused")
add("detached weights", lambda p, z: torch.sigmoid(score(p, z)).detach() * off(p, z) ** 2, ends="refused")


def without_gradient(p, z):
    with torch.no_grad():
        w = torch.sigmoid(score(p, z))
    return w * off(p, z) ** 2


def gradient_inside(p, z):
    x = z[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(x @ p["t"]).sum(), x, create_graph=True)
    return slope.square().sum(1) + off(p, z) ** 2


add("weights without gradient", without_gradient, ends="refused")
add("gradient inside, torch.autograd", gradient_inside, ends="refused")

# Batches of other shapes

add("nested batch", lambda p, z: (z["x"]["a"] @ p["t"] + z["x"]["b"][0] * p["c"] - z["y"]) ** 2, weights(3, c=()),
    lambda: {"x": {"a": rows(3), "b": (rows(seed=2),)}, "y": rows(seed=3)})  # fmt: skip
add("one tensor", lambda p, z: (z @ p["t"] - 1) ** 2, data=lambda: rows(3))
add("integers and numbers", lambda p, z: (z[0].to(F64) @ p["t"] - z[1]) ** 2,
    data=lambda: (torch.randint(-2, 3, (N, 3), generator=generator()), rows(seed=2)))  # fmt: skip
add("scalars", lambda p, z: (p["t"] + p["c"] * z[0][:, 0] - z[1]) ** 2, weights(c=()), tight=0.01)
add(
    "loss that branches on its data",
    lambda p, z: torch.stack([(x @ p["t"] - y) ** 2 * (2.0 if bool(y > 0) else 1.0) for x, y in zip(*z, strict=True)]),
)
