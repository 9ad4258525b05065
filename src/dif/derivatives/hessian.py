"""The Hessian of the Lagrangian, ∇²L, as an operator on flat vectors; assembled where that is affordable."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.losses import cost, jacobians_at_once, sample_slopes, weighted_gradients
from dif.derivatives.rows import STRUCTURED, Rows
from dif.linalg.solvers import Matrix, coordinate_curvature, positive
from dif.runtime.guard import UserCodeError

DENSE_LIMIT = 5000  # largest number of parameters for which the Hessian is assembled
_AFFORDABLE = {"cpu": 2.5e11, "cuda": 5e13}  # multiplications that take seconds, by device type
_ONCE = {"cpu": 1, "cuda": 40}  # multiple of _AFFORDABLE that an assembly may cost if it is needed only once
_ANYWAY = 1000  # number of parameters up to which it is always assembled: iterative solves need as many products
_PER_PRODUCT = 8  # loss evaluations that one Hessian-vector product costs
_PER_INPUT = 64  # multiplications that take as long as reading a number of the data twice
_PER_SOLVE = 64  # multiplications that take as long as what a solve does with one entry of the factor
_OVERHEAD = 1e7  # multiplications that take as long as the steps of Python around a pass
_PER_GRADIENT = 3  # loss evaluations that one gradient costs
_PER_ELEMENT = 128  # multiplications that take as long as writing and reading one intermediate number
_SKETCH_MIN = 256  # smallest number of samples in a sketch of the Hessian
_SKETCH_PER_PARAMETER = 24  # samples per parameter beyond which a sketch hardly improves, even in flat directions
_PROBES = 16  # random sign vectors for estimates of a diagonal


@dataclass(frozen=True, eq=False)
class Curvature:
    """H_ρ = Σⱼ μⱼ∇²fⱼ(θ) + GᵀRG + δI. Each product sums over all data.

    >>> import torch
    >>> from dif.problem.parameters import Parameters
    >>> from dif.problem.term import Function
    >>> layout, theta = Parameters.of({"w": torch.ones(2, dtype=torch.float64)})
    >>> rows, *_ = Rows.compile([Function(lambda p: (p["w"] ** 3).sum()).as_term()], layout, theta)
    >>> Curvature(rows, theta, torch.ones(1, dtype=torch.float64)).dense().tolist()
    [[6.0, 0.0], [0.0, 6.0]]
    """

    rows: Rows
    theta: Tensor
    weights: Tensor  # (R,) weights of the rows, (1, λ) for the Lagrangian
    G: Tensor | None = None  # (k, d)
    R: Tensor | None = None  # (k,)
    damping: float = 0.0
    plain: Curvature | None = None  # this operator without GᵀRG and δI; None if it has neither
    gauss_newton: bool = False  # leave out the curvature of the model
    assumed: Tensor | None = None  # (d,) curvature of each coordinate, known from a point nearby
    compared: bool = True  # whether a matrix from the structure of the losses is compared with a product
    parts: Tensor | None = None  # (K, d, d) Hessians of the parts of the rows at θ, where they are known

    d: int = field(init=False)  # number of parameters
    share: float = field(init=False)  # how much of the matrix this device assembles in seconds
    price: float = field(init=False)  # about how many gradients and solves the matrix and its factor cost
    cheap: bool = field(init=False)  # whether the matrix takes seconds, so that it can be assembled at every step
    assembled: bool = field(init=False)  # whether the matrix is known, or may be assembled if it is needed only once
    _kept: dict[str, Any] = field(init=False, default_factory=dict, repr=False)  # matrices and sketches made so far

    def __post_init__(self) -> None:
        d, device = self.theta.numel(), self.theta.device.type
        multiplications = of_gradient = 0.0
        for table in self.rows.tables:
            c = cost(table.samples, self.rows.parameters, self.theta)
            once = c.flops + _PER_ELEMENT * c.elements  # memory traffic as multiplications
            each = _PER_PRODUCT * d * once
            if c.maps is not None and d >= STRUCTURED and not self.gauss_newton:
                each = (c.maps[0] * c.maps[1]) ** 2 + _PER_PRODUCT * c.maps[1] * _PER_ELEMENT * c.elements
            multiplications += len(table.samples) * each
            of_gradient += len(table.samples) * (_PER_GRADIENT * once + _PER_INPUT * c.inputs)
        share = _AFFORDABLE.get(device, 2.5e11) / max(multiplications, 1)
        affordable = d <= _ANYWAY or _ONCE.get(device, 1) * share >= 1
        known = self.parts is not None and not self.gauss_newton
        assembled = known or (d <= DENSE_LIMIT and affordable)
        parts = None if self.gauss_newton else self.parts
        price = (multiplications + d**3 / 3 + _OVERHEAD) / (of_gradient + _PER_SOLVE * d**2 + _OVERHEAD)
        cheap = d <= DENSE_LIMIT and share >= 1
        vars(self).update(d=d, share=share, price=price, cheap=cheap, assembled=assembled, parts=parts)

    def sketch(self, evaluations: float | None = None) -> Curvature | None:
        """Estimate the operator from as many samples as make the matrix affordable; None if those are too few.

        `evaluations` is the number of evaluations of all losses that the matrix may cost; None: what takes seconds.
        """
        if self.parts is not None:
            return self
        sizes = [len(t.samples) for t in self.rows.tables]
        counts = [int(min(self.share, 1.0) * n) for n in sizes]
        if evaluations is not None:
            larger_share = min(evaluations / (_PER_PRODUCT * self.d), 1.0)
            enough = _SKETCH_PER_PARAMETER * self.d
            counts = [max(k, min(int(larger_share * n), enough)) for k, n in zip(counts, sizes, strict=True)]
        if self.d > DENSE_LIMIT or (counts != sizes and min(counts) < _SKETCH_MIN):
            return None
        if counts == sizes:
            return self
        base, key = self.plain or self, str(counts)
        if key not in base._kept:
            generator = torch.Generator().manual_seed(0)
            indices = [torch.randperm(n, generator=generator)[:k] for k, n in zip(counts, sizes, strict=True)]
            base._kept[key] = replace(base, rows=self.rows.over(indices))
        sketch = base._kept[key]
        return sketch if self.plain is None else replace(self, rows=sketch.rows, plain=sketch)

    @property
    def has_gauss_newton(self) -> bool:
        """Whether the Gauss–Newton matrix can be assembled from the Jacobians of the samples."""
        samples = [table.samples for table in self.rows.tables]
        named = self.d <= DENSE_LIMIT and all(each.parted is not None for each in samples)
        return named and all(jacobians_at_once(each, self.rows.parameters, self.theta) for each in samples)

    def metric_matrix(self, evaluations: float) -> Tensor | None:
        """Return a matrix, (d, d), that scales the coordinates: rough, but cheap; None if even that is expensive.

        It is the Gauss–Newton matrix of all samples where they name the outputs of the model, and else the matrix of
        some samples, which may cost as many evaluations of all losses as given.
        """
        if self.has_gauss_newton:
            plain = None if self.plain is None else replace(self.plain, gauss_newton=True)
            return replace(self, gauss_newton=True, plain=plain).dense()
        sketch = self.sketch(evaluations)
        return None if sketch is None else sketch.rough()

    def with_rows(self, G: Tensor, R: Tensor, damping: float = 0.0) -> Curvature:
        """Add GᵀRG and δI to the operator."""
        if self.G is not None and self.R is not None:
            G, R = torch.cat([self.G, G]), torch.cat([self.R, R])
        return replace(self, G=G, R=R, damping=self.damping + damping, plain=self.plain or self)

    def product(self, V: Tensor) -> Tensor:
        """Return H_ρ·v for every column v of V (d, c)."""
        if V.shape[1] == 0:
            return V
        if self.parts is not None:
            return self.dense() @ V
        HV = self.rows.hessian_products(self.theta, self.rows.A.T @ self.weights, V, self.gauss_newton)
        if self.G is not None and self.R is not None and len(self.G):
            HV = HV + self.G.T @ (self.R[:, None] * (self.G @ V))
        return HV + self.damping * V if self.damping else HV

    def dense(self) -> Tensor:
        """Return the matrix, (d, d); it is assembled on the first call."""
        if "dense" not in self._kept:
            weights = self.rows.A.T @ self.weights
            if self.plain is not None and self.G is not None and self.R is not None:
                H = Matrix(self.plain.dense()).with_rows(self.G, self.R, self.damping).H
            elif self.parts is not None:
                H = torch.tensordot(weights, self.parts, 1)
            else:
                H = self.rows.part_hessian(self.theta, weights, self.gauss_newton, self.compared)
            self._kept["dense"] = H
        return self._kept["dense"]

    def rough(self) -> Tensor:
        """Return the matrix, (d, d), from cheaper products in single precision, if the losses allow it."""
        if self.plain is not None and self.G is not None and self.R is not None:
            return Matrix(self.plain.rough()).with_rows(self.G, self.R, self.damping).H
        if self.parts is not None:
            return self.dense()
        if "rough" not in self._kept:
            cudnn, theta, weights = torch.backends.cudnn, self.theta.float(), self.weights.float()
            try:
                with cudnn.flags(cudnn.enabled, cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic, False):
                    single = self.rows.to(torch.float32)
                    H = single.part_hessian(theta, single.A.T @ weights, self.gauss_newton).to(self.theta)
            except UserCodeError:  # a loss that works in double precision only
                return self.dense()
            self._kept["rough"] = 0.5 * (H + H.T) if bool(torch.isfinite(H).all()) else self.dense()
        return self._kept["rough"]

    def scale(self) -> Tensor:
        """Return the positive curvature of each coordinate, (d,): the absolute diagonal, or for large d an estimate."""
        return positive(self.own)

    @cached_property
    def own(self) -> Tensor:
        """The curvature of each coordinate, (d,), with 0 for coordinates without curvature."""
        if self.cheap or self.parts is not None:
            return coordinate_curvature(self.dense())
        if self.plain is None or self.G is None or self.R is None:
            return self._estimate_scale() if self.assumed is None else self.assumed
        return self.plain.own + (self.R[:, None] * self.G**2).sum(0) + self.damping

    def _estimate_scale(self) -> Tensor:
        """Estimate the curvature of each coordinate, (d,).

        For the samples, squared gradients give the ratios between coordinates and a few Hessian-vector products give
        the overall size. For the functions, a few products suffice. The sample part is noisy, so coordinates within a
        factor of four of the median of their tensor get that median.
        """
        weights, squares = self.rows.A.T @ self.weights, torch.zeros_like(self.theta)
        for samples, w in self.rows.split(weights)[0]:
            signs = _signs(w, _PROBES).T * w.abs().sqrt()  # (probes, n)
            gradients = weighted_gradients(samples, self.rows.parameters, self.theta, signs)[1]
            squares += (gradients**2).mean(0)
        squares = torch.cat([_replace_by_median(t) for t in torch.split(squares, list(self.rows.parameters.sizes))])
        signs = _signs(self.theta, _PROBES)
        mean = abs(float((signs * self.product(signs)).sum())) / signs.numel()
        of_functions = weights.clone()
        of_functions[: self.rows.sums] = 0
        curved = (signs * self.rows.hessian_products(self.theta, of_functions, signs)).mean(1).abs()
        total, rest = float(squares.mean()), max(mean - float(curved.mean()), 1e-3 * mean)
        if not (0 < total < float("inf") and 0 < mean < float("inf")):
            return torch.full_like(self.theta, mean if 0 < mean < float("inf") else 1.0)
        return (squares * (rest / total) + curved).clamp(min=1e-12 * mean)

    @cached_property
    def noise(self) -> float:
        """How far random weights on the samples move √D·θ: √Σᵢ μᵢ²‖(∇ℓᵢ − mean)/√D‖²."""
        directions = _signs(self.theta, 2) / self.scale().sqrt()[:, None]
        centred = uncentred = 0.0
        for samples, w in self.rows.split(self.rows.A.T @ self.weights)[0]:
            _, slopes = sample_slopes(samples, self.rows.parameters, self.theta, directions)
            size = w.abs()[:, None]
            mean = (size * slopes).sum(0) / size.sum().clamp(min=torch.finfo(size.dtype).tiny)
            centred += float(((size * (slopes - mean)) ** 2).sum()) / directions.shape[1]
            uncentred += float(((size * slopes) ** 2).sum()) / directions.shape[1]
        return (centred if centred > 1e-20 * uncentred else uncentred) ** 0.5


def _signs(like: Tensor, columns: int) -> Tensor:
    """Draw random signs ±1, (len(like), columns), the same on every call."""
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randint(0, 2, (len(like), columns), generator=generator) - 1).to(like)


def _replace_by_median(D: Tensor) -> Tensor:
    """Replace the entries within a factor of four of the median by the median."""
    median = D.median()
    return torch.where((0.25 * median < D) & (4 * median > D), median, D)
