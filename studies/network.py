"""The networks and the groups of the fairness studies (paper, section 5.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dif

PAPER = ((3, 1), (3, 2), (3, 1), (3, 2), (3, 1), (1, 1), (1, 1))  # kernel and stride of each convolution
SMALL = ((3, 2), (3, 2), (3, 2), (1, 1))  # the same for the small version
REEVALUATED = ", re-evaluated"  # suffix of an estimator whose predicted parameters are put into the test loss
RENORMALISED = "renormalised"  # removal convention: the mean over the remaining samples
_BRIGHTNESS, _CONTRAST = 0.1307, 0.3081  # mean and standard deviation of a pixel of MNIST's training images


class AllConvolutional(nn.Module):
    """Convolutions with tanh between them, followed by the mean over the image.

    >>> sum(p.numel() for p in AllConvolutional(PAPER, 8).parameters())
    2578
    """

    def __init__(self, layers: tuple[tuple[int, int], ...], channels: int) -> None:
        super().__init__()
        widths = [1, *[channels] * (len(layers) - 1), 10]
        convolutions = [
            nn.Conv2d(widths[i], widths[i + 1], kernel, stride, padding=kernel // 2)
            for i, (kernel, stride) in enumerate(layers)
        ]
        for (
            layer
        ) in convolutions:  # with torch's default, activations shrink from layer to layer and a ridge kills them
            nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("tanh"))
            layer.bias = nn.Parameter(torch.zeros(layer.out_channels))
        self.layers = nn.ModuleList(convolutions)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of the images: (n, side, side) → (n, 10)."""
        # in double precision on a GPU, convolution kernels are slow and matrix products fast
        by_matmul = images.is_cuda and images.dtype == torch.float64
        h = images[..., None] if by_matmul else images[:, None]
        for number, layer in enumerate(self.layers):
            h = torch.tanh(h) if number else h
            h = _convolve_by_matmul(h, layer) if by_matmul else layer(h)
        return h.mean((1, 2) if by_matmul else (2, 3))


class RowTransformer(nn.Module):
    """A transformer that reads an image row by row, and the mean over its rows.

    >>> sum(p.numel() for p in RowTransformer(28, 160, 4).parameters())
    1247850
    """

    def __init__(self, side: int, width: int, depth: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(side, width)
        self.position = nn.Parameter(0.02 * torch.randn(side, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "attention": nn.Linear(width, 3 * width),
                    "project": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "expand": nn.Linear(width, 4 * width),
                    "contract": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of the images: (n, side, side) → (n, 10)."""
        h = self.embed(images) + self.position
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            parts = block["attention"](block["norm"](h)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
            q, k, v = (part.transpose(-2, -3) for part in parts)  # (n, heads, rows, width / heads)
            share = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)  # plain products: they can be differentiated twice
            h = h + block["project"]((share @ v).transpose(-2, -3).flatten(-2))
            h = h + block["contract"](nn.functional.gelu(block["expand"](block["norm2"](h))))
        return self.head(h.mean(-2))


def _convolve_by_matmul(h: Tensor, layer: nn.Module) -> Tensor:
    """Apply a convolution, channels last, as one matrix product of shifted images with the kernel."""
    assert isinstance(layer, nn.Conv2d)
    assert layer.bias is not None
    (kernel, _), (stride, _) = layer.kernel_size, layer.stride
    height, width = ((size - 1) // stride + 1 for size in h.shape[1:3])
    edge = kernel // 2
    h = nn.functional.pad(h, (0, 0, edge, edge, edge, edge))
    row_slices = [slice(i, i + (height - 1) * stride + 1, stride) for i in range(kernel)]
    column_slices = [slice(j, j + (width - 1) * stride + 1, stride) for j in range(kernel)]
    shifted = torch.cat([h[:, rows, columns] for rows in row_slices for columns in column_slices], -1)
    return shifted @ layer.weight.permute(2, 3, 1, 0).reshape(-1, layer.out_channels) + layer.bias


def preprocess(images: Tensor, side: int, device: str, dtype: torch.dtype) -> Tensor:
    """Standardise the pixels and average them down to side × side."""
    pixels = (images.to(device=device, dtype=dtype) / 255 - _BRIGHTNESS) / _CONTRAST
    step = 28 // side
    return pixels.reshape(len(pixels), side, step, side, step).mean((2, 4))


def cross_entropy(model: nn.Module, z: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of each sample."""
    return nn.functional.cross_entropy(model(z[0]), z[1], reduction="none")


def class_scores(model: nn.Module, z: tuple[Tensor, Tensor]) -> Tensor:
    """Return the class scores of each sample."""
    return model(z[0])


def score_losses(scores: Tensor, z: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of each sample from its class scores."""
    return nn.functional.cross_entropy(scores, z[1], reduction="none")


def assign_groups(labels: Tensor, groups: int, alpha: float, seed: int) -> Tensor:
    """Return the group of each sample: a share α at random, the others sorted by label and split evenly.

    >>> assign_groups(torch.tensor([2, 0, 1, 0, 2, 1]), 3, 0.0, 0).tolist()
    [2, 0, 1, 0, 2, 1]
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    uniform = round(alpha * len(labels))
    group = torch.empty(len(labels), dtype=torch.long)
    group[order[:uniform]] = torch.arange(uniform) % groups
    rest = order[uniform:].sort().values
    rest = rest[torch.argsort(labels[rest], stable=True)]
    group[rest] = torch.arange(len(rest)) * groups // max(1, len(rest))
    return group


def bound_group_risks(
    train: dif.Samples, group: Tensor, groups: int, tau: float
) -> tuple[list[dif.Term], dif.Term, list[dif.Constraint]]:
    """Return the risks Rᵢ of the groups, their mean R̄, and the constraints Rᵢ ≤ R̄ + τ."""
    risks: list[dif.Term] = [train.mean(where=group == g) for g in range(groups)]
    mean = (1 / groups) * sum(risks[1:], risks[0])
    return risks, mean, [(risk <= mean + tau).named(f"group {g}") for g, risk in enumerate(risks)]


def check_removals(removals: int, n: int) -> None:
    """Refuse more single removals than there are training images."""
    if removals > n:
        raise dif.InvalidInputError(
            f"`removals` is {removals}, but there are {n} training images. Each image is removed at most once."
        )
