"""∇²L as an operator on flat vectors, shifted and damped; dense where the number of parameters allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dif.evaluation.cost import cost
from dif.evaluation.rows import Rows
from dif.evaluation.sweeps import sample_slopes
from dif.linalg.operator import Matrix, curved, positive
from dif.runtime.user_code import UserCodeError

DENSE_LIMIT = 5000  # parameters up to which a Hessian is assembled,
_AFFORDABLE = {"cpu": 2.5e11, "cuda": 5e13}  # if it takes no more multiplications than this (seconds),
_ONCE = {"cpu": 1, "cuda": 40}  # so many times that (minutes) where it is needed but once,
_ANYWAY = 1000  # or has no more columns than solving without it would take
_PER_PRODUCT = 8  # evaluations of the losses that one product with the Hessian costs
_PER_ELEMENT = 128  # multiplications that a number made on the way is worth: written, read, and more than once
_FEWEST = 256  # samples from which a Hessian may be sketched,
_PLENTY = 8  # and per parameter so many that more would hardly change it
_PROBES = 16


@dataclass(frozen=True, eq=False)
class Curvature:
    """H_ρ = Σⱼ μⱼ∇²fⱼ(θ) + GᵀRG + δI. Sums over the data happen inside each product.

    >>> import torch
    >>> from dif.problem.parameters import Parameters
    >>> from dif.problem.term import Function
    >>> layout, theta = Parameters.of({"w": torch.ones(2, dtype=torch.float64)})
    >>> rows, _ = Rows.compile([Function(lambda p: (p["w"] ** 3).sum()).as_term()], layout, theta)
    >>> Curvature(rows, theta, torch.ones(1, dtype=torch.float64)).dense().tolist()
    [[6.0, 0.0], [0.0, 6.0]]
    """

    rows: Rows
    theta: Tensor
    weights: Tensor  # (R,) of the rows, (1, λ) for the Lagrangian
    G: Tensor | None = None  # (k, d)
    R: Tensor | None = None  # (k,)
    damping: float = 0.0
    plain: Curvature | None = None  # the same without GᵀRG and δI
    gauss_newton: bool = False  # without the curvature of the model itself
    assumed: Tensor | None = None  # (d,) how much each coordinate curves, known from a point nearby

    @property
    def d(self) -> int:
        """Number of parameters."""
        return self.theta.numel()

    @property
    def like(self) -> Tensor:
        """A tensor of its type, on its device."""
        return self.theta

    @property
    def price(self) -> float:
        """Multiplications that it takes to assemble the matrix, or what else takes as long."""
        known = [(len(t.samples), cost(t.samples, self.rows.parameters, self.theta)) for t in self.rows.tables]
        return float(_PER_PRODUCT * self.d * sum(n * (c.flops + _PER_ELEMENT * c.elements) for n, c in known))

    @property
    def cheap(self) -> bool:
        """Whether the matrix is a matter of seconds, so that it can be had at every step."""
        return self.d <= DENSE_LIMIT and self.price <= self._affordable

    @property
    def _affordable(self) -> float:
        return _AFFORDABLE.get(self.theta.device.type, 2.5e11)

    @property
    def assembled(self) -> bool:
        """Whether the matrix can be had at a fair price, once."""
        once = _ONCE.get(self.theta.device.type, 1) * self._affordable
        return self.d <= min(DENSE_LIMIT, _ANYWAY) or (self.d <= DENSE_LIMIT and self.price <= once)

    def sketched(self, evaluations: float | None = None) -> Curvature | None:
        """The same from as many samples as make the matrix affordable; None if those are too few.

        `evaluations`: how many of all losses the matrix may cost. None: so many that it takes seconds.
        """
        sizes = [len(t.samples) for t in self.rows.tables]
        share = self._affordable / max(self.price, 1.0)
        some = [int(min(share, 1.0) * n) for n in sizes]
        if evaluations is not None:
            dearer = evaluations / (_PER_PRODUCT * self.d)
            some = [
                max(few, min(int(min(dearer, 1.0) * n), _PLENTY * self.d)) for few, n in zip(some, sizes, strict=True)
            ]
        if self.d > DENSE_LIMIT or (some != sizes and min(some) < _FEWEST):
            return None
        if some == sizes:
            return self
        base = self.plain or self
        known = base._sketches.get(tuple(some))
        if known is None:
            generator = torch.Generator().manual_seed(0)
            drawn = [torch.randperm(n, generator=generator)[:k] for k, n in zip(some, sizes, strict=True)]
            known = base._sketches[tuple(some)] = replace(base, rows=self.rows.over(drawn))
        return known if self.plain is None else replace(self, rows=known.rows, plain=known)

    @cached_property
    def _sketches(self) -> dict[tuple[int, ...], Curvature]:
        return {}

    def with_rows(self, G: Tensor, R: Tensor, damping: float = 0.0) -> Curvature:
        """With GᵀRG and δI in it, beside what is there already."""
        if self.G is not None and self.R is not None:
            G, R = torch.cat([self.G, G]), torch.cat([self.R, R])
        return replace(self, G=G, R=R, damping=self.damping + damping, plain=self.plain or self)

    def to(self, dtype: torch.dtype) -> Curvature:
        """The same operator in another precision."""
        G, R = (None if t is None else t.to(dtype) for t in (self.G, self.R))
        moved = (self.theta.to(dtype), self.weights.to(dtype))
        return Curvature(self.rows.to(dtype), *moved, G=G, R=R, damping=self.damping, gauss_newton=self.gauss_newton)

    def product(self, V: Tensor) -> Tensor:
        """H_ρ·v for every column v of V (d, c)."""
        HV = self.rows.hessian_products(self.theta, self.weights @ self.rows.C, V, self.gauss_newton)
        return self._extended(HV, V)

    def _extended(self, HV: Tensor, V: Tensor) -> Tensor:
        if self.G is not None and self.R is not None and len(self.G):
            HV = HV + self.G.T @ (self.R[:, None] * (self.G @ V))
        return HV + self.damping * V if self.damping else HV

    def dense(self) -> Tensor:
        """The matrix, (d, d), assembled once."""
        return self._dense

    @cached_property
    def _dense(self) -> Tensor:
        if self.plain is not None:
            return self._around(self.plain.dense())
        if not self.gauss_newton:
            return self.rows.part_hessian(self.theta, self.weights @ self.rows.C)
        H = self.product(torch.eye(self.d).to(self.theta))
        return 0.5 * (H + H.T)

    def _around(self, H: Tensor) -> Tensor:
        """An assembled matrix with this operator's GᵀRG and δI in it."""
        return H if self.G is None or self.R is None else Matrix(H).with_rows(self.G, self.R, self.damping).H

    def rough(self) -> Tensor:
        """The matrix by products in single precision, where the losses allow it: a fraction of the price."""
        H = (self.plain or self)._rough
        return H if self.plain is None else self._around(H)

    @cached_property
    def _rough(self) -> Tensor:
        now = torch.backends.cudnn
        try:
            with now.flags(now.enabled, now.benchmark, now.benchmark_limit, now.deterministic, False):
                H = self.to(torch.float32).product(torch.eye(self.d, device=self.theta.device)).to(self.theta)
        except UserCodeError:  # double precision inside a loss
            return self.dense()
        return 0.5 * (H + H.T) if bool(torch.isfinite(H).all()) else self.dense()

    def scale(self) -> Tensor:
        """How much each coordinate curves, (d,): the absolute diagonal, or where d is large an estimate of it."""
        return self._scale

    @cached_property
    def _scale(self) -> Tensor:
        return positive(self.own)

    @cached_property
    def own(self) -> Tensor:
        """The same, 0 for coordinates that do not curve at all."""
        if self.cheap:
            return curved(self._dense)
        if self.plain is None or self.G is None or self.R is None:
            return self._estimated_scale() if self.assumed is None else self.assumed
        return self.plain.own + (self.R[:, None] * self.G**2).sum(0) + self.damping

    def _estimated_scale(self) -> Tensor:
        """Samples: their squared slopes tell the coordinates apart, a few products how large they are together.

        Functions: a few products. What is estimated of samples is noisy, so coordinates that differ by less than a
        factor of four from the middle of their tensor count as curved alike.
        """
        weights = self.weights @ self.rows.C
        squares = torch.zeros_like(self.theta)
        for number, table in enumerate(self.rows.tables):
            mu = (weights[self.rows.columns(number)] @ table.U).abs().sqrt()
            signs = _signs(mu, _PROBES).T * mu  # (probes, n)
            squares += (self.rows.pulled(number, self.theta, signs)[1] ** 2).mean(0)
        squares = torch.cat([_levelled(t) for t in torch.split(squares, list(self.rows.parameters.sizes))])
        signs = _signs(self.theta, _PROBES)
        mean = abs(float((signs * self.product(signs)).sum())) / signs.numel()
        apart = weights.clone()
        apart[: sum(len(table.U) for table in self.rows.tables)] = 0
        smooth = (signs * self.rows.hessian_products(self.theta, apart, signs)).mean(1).abs()
        total, rest = float(squares.mean()), max(mean - float(smooth.mean()), 1e-3 * mean)
        if not (0 < total < float("inf") and 0 < mean < float("inf")):
            return torch.full_like(self.theta, mean if 0 < mean < float("inf") else 1.0)
        return (squares * (rest / total) + smooth).clamp(min=1e-12 * mean)

    @cached_property
    def noise(self) -> float:
        """How far, in √D·θ, random weights on the samples move θ: √Σᵢ μᵢ²‖(∇ℓᵢ − mean)/√D‖²."""
        directions = _signs(self.theta, 2) / self.scale().sqrt()[:, None]
        weights, spread, plain = self.weights @ self.rows.C, 0.0, 0.0
        for number, table in enumerate(self.rows.tables):
            mu = weights[self.rows.columns(number)] @ table.U
            _, slopes = sample_slopes(table.samples, self.rows.parameters, self.theta, directions)
            size = mu.abs()[:, None]
            middle = (size * slopes).sum(0) / size.sum().clamp(min=torch.finfo(size.dtype).tiny)
            spread += float(((size * (slopes - middle)) ** 2).sum()) / directions.shape[1]
            plain += float(((size * slopes) ** 2).sum()) / directions.shape[1]
        return (spread if spread > 1e-20 * plain else plain) ** 0.5


def _signs(like: Tensor, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randint(0, 2, (len(like), columns), generator=generator) - 1).to(like)


def _levelled(D: Tensor) -> Tensor:
    """D, with the middle of all for those within a factor of four of it."""
    middle = D.median()
    return torch.where((0.25 * middle < D) & (4 * middle > D), middle, D)
