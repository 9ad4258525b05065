"""Risks of the groups on the paper's network, with gradients and Hessians.

The Hessian is assembled layer by layer. The parameters of one output channel of a layer are taken together: their
tangents begin at that layer, and its own rows and those of later layers are all that is needed, since the matrix is
symmetric. That costs a fraction of as many products as there are parameters, most of it in the first layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dif import InvalidInputError
from dif.derivatives.fingerprint import encode_tensor, hash_all
from dif.runtime.archive import read_archive, write_archive
from studies.network import AllConvolutional

_GRADIENT_CHUNK = 50  # images whose activations stay in a processor's cache
_HESSIAN_CHUNK = 16  # the same for the tangents of one output channel
_GRADIENT_CHUNK_CUDA = 5_000  # images at once on a GPU
_IN_ONE_SUM = 128  # images whose Hessians are added up in the precision in which they are computed; on a GPU, at once
_KEPT_EVERY = 8  # such sums after which the total is written to a file

R = TypeVar("R")


@dataclass(frozen=True)
class Layer:
    """A convolution at given parameters."""

    weight: Tensor  # (out, in, k, k)
    bias: Tensor  # (out,)
    stride: int
    start: int  # position of its parameters in θ

    @property
    def padding(self) -> int:
        """Zeros on each side of the image."""
        return self.weight.shape[-1] // 2

    @property
    def inputs(self) -> int:
        """Number of weights of one output channel."""
        return self.weight[0].numel()

    def convolve(self, h: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Apply the convolution, without bias unless one is given."""
        return F.conv2d(h, self.weight if weight is None else weight, bias, self.stride, self.padding)

    def transpose(self, delta: Tensor, size: int) -> Tensor:
        """Apply the transposed convolution; its outputs have `size` pixels along each side."""
        if self.stride == 1:  # a convolution, which is several times faster on a processor
            return F.conv2d(delta, self.weight.flip(2, 3).transpose(0, 1), padding=self.padding)
        least = (delta.shape[-1] - 1) * self.stride - 2 * self.padding + self.weight.shape[-1]
        return F.conv_transpose2d(delta, self.weight, None, self.stride, self.padding, size - least)

    def patches(self, h: Tensor) -> Tensor:
        """Return what each weight of an output channel, and its bias, is multiplied by: (n, inputs + 1, pixels)."""
        some = F.unfold(h, self.weight.shape[-1], padding=self.padding, stride=self.stride)
        return torch.cat([some, torch.ones_like(some[:, :1])], 1)

    def spread(self, delta: Tensor, size: int) -> Tensor:
        """Return what each weight carries back to the inputs' pixels: (n, out, k, k, size, size)."""
        (n, out, side, _), kernel, edge = delta.shape, self.weight.shape[-1], self.padding
        wide = delta.new_zeros((n, out, kernel, kernel, size + 2 * edge, size + 2 * edge))
        for a in range(kernel):
            for b in range(kernel):
                rows, columns = (slice(i, i + (side - 1) * self.stride + 1, self.stride) for i in (a, b))
                wide[:, :, a, b, rows, columns] = delta
        return wide[..., edge : edge + size, edge : edge + size]

    def places(self, channel: int) -> Tensor:
        """Return the positions in θ of the weights of an output channel and of its bias."""
        begin = self.start + channel * self.inputs
        here = {"device": self.weight.device}
        weights, bias = torch.arange(begin, begin + self.inputs, **here), torch.tensor([self._bias + channel], **here)
        return torch.cat([weights, bias])

    @property
    def _bias(self) -> int:
        return self.start + self.weight.numel()


def read_layers(model: AllConvolutional, theta: Tensor) -> list[Layer]:
    """Return the convolutions of the model at the flat parameters θ."""
    convolutions = [layer for layer in model.layers if isinstance(layer, nn.Conv2d)]
    sizes = [layer.weight.numel() + layer.out_channels for layer in convolutions]
    starts = [0, *accumulate(sizes)]
    return [
        Layer(part[: -layer.out_channels].view_as(layer.weight), part[-layer.out_channels :], layer.stride[0], start)
        for layer, part, start in zip(convolutions, torch.split(theta, sizes), starts, strict=False)
    ]


@dataclass(frozen=True)
class Sweep:
    """Activations of some images, and the derivatives of their weighted loss with respect to them."""

    patches: list[Tensor]  # per layer, (n, inputs + 1, pixels)
    slopes: list[Tensor]  # per layer but the last, tanh′ at its outputs
    bends: list[Tensor]  # per layer but the last, tanh″ times the derivative of the loss by tanh's value
    spreads: list[Tensor]  # per layer, see `Layer.spread`
    probabilities: Tensor  # (n, 10)
    sides: list[int]  # pixels along each side of the inputs of each layer, and of the last one's outputs

    @classmethod
    def of(cls, layers: Sequence[Layer], images: Tensor, labels: Tensor) -> Sweep:
        """Evaluate the network and its derivatives, each image with weight one."""
        h = z = images[:, None]
        values, patches, sides = [], [], []
        for layer in layers:
            sides.append(h.shape[-1])
            patches.append(layer.patches(h))
            z = layer.convolve(h, bias=layer.bias)
            h = torch.tanh(z)
            values.append(h)
        p = torch.softmax(z.mean((2, 3)), 1)
        delta = (p - F.one_hot(labels, p.shape[1]))[:, :, None, None].expand_as(z) / z[0, 0].numel()
        slopes = [1 - h**2 for h in values[:-1]]
        bends, spreads = [], []
        for number in range(len(layers) - 1, -1, -1):
            spreads.append(layers[number].spread(delta, sides[number]))
            if number:
                force = layers[number].transpose(delta.contiguous(), sides[number])
                delta = force * slopes[number - 1]
                bends.append(-2 * values[number - 1] * delta)
        return cls(patches, slopes, bends[::-1], spreads[::-1], p, [*sides, z.shape[-1]])


def add_hessian(H: Tensor, layers: Sequence[Layer], images: Tensor, labels: Tensor) -> None:
    """Add the sum of the Hessians of the images' losses to H, (d, d): its rows of later layers and the diagonal."""
    sweep = Sweep.of(layers, images, labels)
    for number, layer in enumerate(layers):
        for channel in range(len(layer.bias)):
            columns = layer.places(channel)
            for later, block in _channel_columns(sweep, layers, number, channel):
                shape = (len(later.bias), later.inputs + 1, len(columns))
                rows = torch.stack([later.places(o) for o in range(shape[0])]).reshape(-1)
                H[rows[:, None], columns] += block.reshape(-1, shape[2]).to(H)


def _channel_columns(
    sweep: Sweep, layers: Sequence[Layer], number: int, channel: int
) -> list[tuple[Layer, Tensor]]:  # fmt: skip
    """Return the columns of the Hessian for one output channel of a layer, by layer, (out, inputs + 1, directions)."""
    n, D, _ = sweep.patches[number].shape
    p, last = sweep.probabilities, len(layers) - 1
    values: dict[int, Tensor] = {}  # tangents before tanh, per layer
    tangents: dict[int, Tensor] = {}  # and after it
    z = sweep.patches[number].reshape(n * D, 1, sweep.sides[number + 1], -1)  # of this channel only
    for k in range(number, last):
        values[k] = z
        slope = sweep.slopes[k] if k > number else sweep.slopes[k][:, channel : channel + 1]
        tangents[k] = (z.unflatten(0, (n, D)) * slope[:, None]).flatten(0, 1)
        weight = layers[k + 1].weight
        z = layers[k + 1].convolve(tangents[k], weight if k > number else weight[:, channel : channel + 1])
    scores = z.mean((2, 3)).unflatten(0, (n, D))
    if number == last:
        scores = F.pad(scores, (channel, p.shape[1] - channel - 1))
    change = p[:, None] * (scores - (scores @ p[:, :, None]))
    pixels = sweep.sides[-1] ** 2
    delta = (change / pixels).flatten(0, 1)[:, :, None, None].expand(-1, -1, sweep.sides[-1], sweep.sides[-1])
    blocks = []
    for k in range(last, number - 1, -1):
        layer, patches = layers[k], sweep.patches[k]
        block = _contract(delta.unflatten(0, (n, D)).flatten(3), patches)  # (D, out, inputs + 1)
        if k > number:
            own = k - 1 > number
            tangent = tangents[k - 1].unflatten(0, (n, D)).flatten(3)  # (n, D, in or 1, pixels)
            spread = sweep.spreads[k].flatten(1, 3).flatten(2)  # (n, out·k·k, pixels)
            moved = _contract(tangent, spread).unflatten(2, (len(layer.bias), -1)).transpose(1, 2)
            inside = block[:, :, :-1].unflatten(2, (layer.weight.shape[1], -1))
            (inside if own else inside[:, :, channel : channel + 1]).add_(moved)
            force = layer.transpose(delta.contiguous(), sweep.sides[k]).unflatten(0, (n, D))
            delta = force * sweep.slopes[k - 1][:, None]
            part = values[k - 1].unflatten(0, (n, D))
            if own:
                delta.addcmul_(part, sweep.bends[k - 1][:, None].expand_as(part))
            else:
                bend = sweep.bends[k - 1][:, None, channel : channel + 1]
                delta[:, :, channel : channel + 1].addcmul_(part, bend.expand_as(part))
            delta = delta.flatten(0, 1)
        blocks.append((layer, block.permute(1, 2, 0)))
    return blocks


def _contract(left: Tensor, right: Tensor) -> Tensor:
    """Return Σ over images and pixels of left (n, D, c, pixels) times right (n, j, pixels), (D, c, j)."""
    _, D, c, _ = left.shape
    A = left.permute(1, 2, 0, 3).reshape(D * c, -1)
    return (A @ right.transpose(0, 1).reshape(right.shape[1], -1).T).view(D, c, -1)


@dataclass(frozen=True, eq=False)
class GroupRisks:
    """The mean loss of each group, evaluated in chunks of one group by several threads."""

    model: AllConvolutional
    images: Tensor  # (n, side, side)
    labels: Tensor
    group: Tensor
    threads: int = field(default_factory=torch.get_num_threads)

    def __call__(self, theta: Tensor) -> Tensor:
        """Return the risks as autograd sees them, once differentiable."""
        return _Risks.apply(theta, self)

    def values_and_gradients(self, theta: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Return the risks, (groups,), and their gradients, (groups, d), computed in `dtype`, summed in double."""
        values, gradients = (theta.new_zeros(shape) for shape in ((self._groups,), (self._groups, len(theta))))

        def work(chosen: Tensor) -> tuple[Tensor, Tensor]:
            flat = theta.to(dtype).detach().requires_grad_(True)
            h = self.images[chosen, None].to(dtype)
            for number, layer in enumerate(read_layers(self.model, flat)):
                h = layer.convolve(torch.tanh(h) if number else h, bias=layer.bias)
            loss = F.cross_entropy(h.mean((2, 3)), self.labels[chosen], reduction="sum")
            return loss.detach(), torch.autograd.grad(loss, flat)[0]

        size = _GRADIENT_CHUNK_CUDA if self.images.is_cuda else _GRADIENT_CHUNK
        for group, (value, gradient) in self._run(work, self._chunks(size, self._sizes)):
            values[group] += value
            gradients[group] += gradient
        return values / self._sizes, gradients / self._sizes[:, None]

    def hessians(
        self, theta: Tensor, share: float = 1.0, dtype: torch.dtype = torch.float32, keep: Path | None = None
    ) -> Tensor:
        """Return the Hessians of the risks, (groups, d, d), computed in `dtype`, from a share of each group.

        The sum so far is written to the file `keep` every few chunks; a later call with the same θ goes on from there.
        """
        layers = read_layers(self.model, theta.to(dtype))
        counts = (share * self._sizes).ceil().long()
        chunks = self._chunks(_IN_ONE_SUM, counts)
        name = hash_all((encode_tensor(theta), encode_tensor(counts), str(dtype).encode())).hex()
        H, done = theta.new_zeros((self._groups, len(theta), len(theta))), 0
        with suppress(FileNotFoundError, InvalidInputError):
            arrays, about = read_archive(keep or "", "part of a sum of Hessians", name=name)
            H, done = torch.from_numpy(arrays["H"]).to(theta), about["done"]

        def work(chosen: Tensor) -> Tensor:
            part = theta.new_zeros((len(theta), len(theta)), dtype=dtype)
            for some in chosen.split(_IN_ONE_SUM if self.images.is_cuda else _HESSIAN_CHUNK):
                add_hessian(part, layers, self.images[some].to(dtype), self.labels[some])
            return part

        for group, part in self._run(work, chunks[done:]):
            H[group] += part
            done += 1
            if keep is not None and done % _KEPT_EVERY == 0 and not H.is_cuda:  # there it takes seconds
                write_archive(keep, "part of a sum of Hessians", {"H": H}, {"name": name, "done": done})
        for k in range(1, len(layers)):  # what belongs to later layers is above the diagonal, too
            here = slice(layers[k].start, layers[k].start + layers[k].weight.numel() + len(layers[k].bias))
            H[:, : layers[k].start, here] = H[:, here, : layers[k].start].mT
        return 0.5 * (H + H.mT) / counts[:, None, None]

    @property
    def _groups(self) -> int:
        return int(self.group.max()) + 1

    @property
    def _sizes(self) -> Tensor:
        return torch.bincount(self.group)

    def _chunks(self, size: int, counts: Tensor) -> list[tuple[int, Tensor]]:
        """Divide the first members of each group, as many as given, into chunks: the group, and their numbers."""
        members = [torch.nonzero(self.group == g).reshape(-1)[: counts[g]] for g in range(self._groups)]
        return [(g, some) for g, numbers in enumerate(members) for some in numbers.split(size)]

    def _run(self, work: Callable[[Tensor], R], chunks: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, R]]:
        """Yield the group of each chunk and what `work` returns for it, in their order."""
        if self.images.is_cuda:
            torch.backends.cudnn.allow_tf32 = False
            yield from ((group, work(some)) for group, some in chunks)
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(self.threads) as pool:
                yield from zip(
                    (group for group, _ in chunks), pool.map(work, [some for _, some in chunks]), strict=True
                )
        finally:
            torch.set_num_threads(before)


class _Risks(torch.autograd.Function):
    """θ → risks, with the gradients that were computed in the same sweep."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, risks: GroupRisks) -> Tensor:
        with torch.enable_grad():
            values, ctx.gradients = risks.values_and_gradients(theta.detach())
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *weights: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return weights[0] @ ctx.gradients, None
