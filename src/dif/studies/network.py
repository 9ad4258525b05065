"""An all-convolutional network and the groups of the paper's fairness study (section 5.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PAPER = ((3, 1), (3, 2), (3, 1), (3, 2), (3, 1), (1, 1), (1, 1))  # kernel and stride of each convolution
SMALL = ((3, 2), (3, 2), (3, 2), (1, 1))


class AllConvolutional(nn.Module):
    """Convolutions with tanh in between and the mean over the image at the end.

    >>> sum(p.numel() for p in AllConvolutional(PAPER, 8).parameters())
    2578
    """

    def __init__(self, layers: tuple[tuple[int, int], ...], channels: int) -> None:
        super().__init__()
        widths = [1, *[channels] * (len(layers) - 1), 10]
        made = [
            nn.Conv2d(widths[i], widths[i + 1], kernel, stride, padding=kernel // 2)
            for i, (kernel, stride) in enumerate(layers)
        ]
        for layer in made:  # as torch begins, signals fade from layer to layer, and a ridge puts them out
            nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("tanh"))
            layer.bias = nn.Parameter(torch.zeros(layer.out_channels))
        self.layers = nn.ModuleList(made)

    def forward(self, images: Tensor) -> Tensor:
        """(n, side, side) → (n, 10)."""
        # double precision on a GPU: kernels of convolutions are slow there, products of matrices are not
        multiplied = images.is_cuda and images.dtype == torch.float64
        h = images[..., None] if multiplied else images[:, None]
        for number, layer in enumerate(self.layers):
            h = torch.tanh(h) if number else h
            h = _multiplied(h, layer) if multiplied else layer(h)
        return h.mean((1, 2) if multiplied else (2, 3))


def _multiplied(h: Tensor, layer: nn.Module) -> Tensor:
    """A convolution with the channels last, as one product of shifted images with the kernel."""
    assert isinstance(layer, nn.Conv2d)
    assert layer.bias is not None
    (kernel, _), (stride, _) = layer.kernel_size, layer.stride
    high, wide = ((size - 1) // stride + 1 for size in h.shape[1:3])
    edge = kernel // 2
    h = nn.functional.pad(h, (0, 0, edge, edge, edge, edge))
    spans = [(slice(i, i + (high - 1) * stride + 1, stride), i) for i in range(kernel)]
    across = [(slice(j, j + (wide - 1) * stride + 1, stride), j) for j in range(kernel)]
    shifted = torch.cat([h[:, rows, columns] for rows, _ in spans for columns, _ in across], -1)
    return shifted @ layer.weight.permute(2, 3, 1, 0).reshape(-1, layer.out_channels) + layer.bias


def cross_entropy(model: nn.Module, z: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of each sample."""
    return nn.functional.cross_entropy(model(z[0]), z[1], reduction="none")


def dealt(labels: Tensor, groups: int, alpha: float, seed: int) -> Tensor:
    """The group of each sample: a share α at random, the others sorted by label and dealt consecutively.

    >>> dealt(torch.tensor([2, 0, 1, 0, 2, 1]), 3, 0.0, 0).tolist()
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
