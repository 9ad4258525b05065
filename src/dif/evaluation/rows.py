"""Terms compiled on a parameter layout: f(θ) = C·p(θ), where every distinct sum and function p is evaluated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.evaluation.sweeps import (
    batch_gauss_newton_products,
    batch_hessian_products,
    batch_pulled_back,
    forward,
    hessian_products,
    mapped_hessian,
    passes,
    pulled_back,
    sample_losses,
    sharing,
    stacked_losses,
)
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses
from dif.problem.term import Function, SampleSum, Term
from dif.runtime.distributed import added, alone, span
from dif.runtime.memory import within_memory
from dif.runtime.user_code import in_words

_TOGETHER = 256  # columns at once through a function of the parameters alone
_MAPPED = 16  # parameters from which the structure of a loss pays


@dataclass(frozen=True, eq=False)
class Table:
    """The weighted sums over one `Samples`: parts U·ℓ(θ), at consecutive positions of p."""

    samples: SampleLosses
    sums: tuple[SampleSum, ...]
    U: Tensor  # (k, n)


@dataclass(frozen=True, eq=False)
class Smooth:
    """A function of the parameters alone, on flat θ; linear ones by their matrix, without autograd."""

    function: Function
    parameters: Parameters
    size: int  # rows
    matrix: Tensor | None  # (rows, d)

    @classmethod
    def of(cls, f: Function, parameters: Parameters, theta: Tensor) -> Smooth:
        """Compile it on a layout."""
        if f.matrix is None:
            return cls(f, parameters, function_value(f, parameters, theta).numel(), None)
        matrix = torch.atleast_2d(f.matrix).to(theta)
        if f.of is not None:
            wide = theta.new_zeros((len(matrix), parameters.d))
            where = parameters.names.index(f.of)
            begin = sum(parameters.sizes[:where])
            wide[:, begin : begin + parameters.sizes[where]] = matrix
            matrix = wide
        return cls(f, parameters, len(matrix), matrix)

    def value(self, theta: Tensor) -> Tensor:
        """φ(θ), (rows,)."""
        if self.matrix is not None:
            return self.matrix @ theta
        return function_value(self.function, self.parameters, theta).reshape(-1)

    def forward(self, theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """φ(θ), and the map w → Jᵀw."""
        if (matrix := self.matrix) is not None:
            return matrix @ theta, lambda w: w @ matrix
        return forward(self.value, theta)

    def stacked(self, thetas: Tensor) -> Tensor:
        """φ at several θ (P, d), (P, rows)."""
        if self.matrix is not None:
            return thetas @ self.matrix.T
        if self.function.ridge is not None:
            return 0.5 * self.function.ridge * thetas.square().sum(1, keepdim=True)
        return torch.stack([self.value(theta).detach() for theta in thetas])

    def stacked_pullback(self, thetas: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """φ at several θ (P, d), (P, rows), and Jᵀw at each for its weights (P, rows), (P, d)."""
        if self.matrix is not None:
            return self.stacked(thetas), weights @ self.matrix
        if self.function.ridge is not None:
            return self.stacked(thetas), self.function.ridge * weights * thetas
        pulled = [self.forward(theta) for theta in thetas]
        values = torch.stack([value.detach() for value, _ in pulled])
        return values, torch.stack([pull(w).detach() for (_, pull), w in zip(pulled, weights, strict=True)])

    def gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """φ(θ), (rows,), and its Jacobian, (rows, d)."""
        if self.matrix is not None:
            return self.matrix @ theta, self.matrix
        value, gradient = pulled_back(self.value, theta, torch.eye(self.size).to(theta))
        return value.detach(), gradient.detach()


@dataclass(frozen=True, eq=False)
class Rows:
    """R rows f = C·p; p stacks the sums of each table, then the outputs of each function.

    All rows that use the same samples share one evaluation of their losses.
    """

    parameters: Parameters
    tables: tuple[Table, ...]
    functions: tuple[Smooth, ...]
    C: Tensor  # (R, K)

    @classmethod
    def compile(cls, terms: Sequence[Term], parameters: Parameters, theta: Tensor) -> tuple[Rows, list[torch.Size]]:
        """Lay out the rows of these terms; also returns each term's shape, () or (rows,)."""
        sums = list({id(s): s for term in terms for _, s in term.sums}.values())
        every_samples = list({id(s.samples): s.samples for s in sums}.values())
        functions = list({id(f): f for term in terms for _, f in term.functions}.values())
        tables, position = [], {}
        for samples in every_samples:
            mine = tuple(s for s in sums if s.samples is samples)
            for s in mine:
                position[id(s)] = len(position)
            tables.append(Table(samples, mine, torch.stack([s.weights for s in mine]).to(theta)))
        start, outputs = len(position), {}
        for f in functions:
            outputs[id(f)] = (start, function_value(f, parameters, theta).detach())
            start += outputs[id(f)][1].numel()

        blocks, shapes = [], []
        for term in terms:
            shape = _shape(term, [outputs[id(f)][1] for _, f in term.functions])
            block = theta.new_zeros((shape.numel(), start))
            for c, s in term.sums:
                block[:, position[id(s)]] += c
            for c, f in term.functions:
                begin, value = outputs[id(f)]
                if value.numel() == 1:
                    block[:, begin] += c
                else:
                    block[:, begin : begin + value.numel()] += c * torch.eye(value.numel()).to(theta)
            blocks.append(block)
            shapes.append(shape)
        C = torch.cat(blocks) if blocks else theta.new_zeros((0, start))
        return cls(parameters, tuple(tables), tuple(Smooth.of(f, parameters, theta) for f in functions), C), shapes

    def to(self, dtype: torch.dtype) -> Rows:
        """The same rows in another precision."""
        parameters = self.parameters.to(dtype)
        tables = tuple(Table(t.samples.to(dtype), t.sums, t.U.to(dtype)) for t in self.tables)
        functions = tuple(
            Smooth(f.function, parameters, f.size, None if f.matrix is None else f.matrix.to(dtype))
            for f in self.functions
        )
        return Rows(parameters, tables, functions, self.C.to(dtype))

    def columns(self, table: int) -> slice:
        """Where the sums of a table stand in p."""
        begin = sum(len(t.U) for t in self.tables[:table])
        return slice(begin, begin + len(self.tables[table].U))

    def curved(self) -> Tensor:
        """Which rows hold anything that is not linear, (R,) bool."""
        columns = [True] * sum(len(t.U) for t in self.tables)
        for f in self.functions:
            columns += [f.matrix is None] * f.size
        return (self.C[:, torch.tensor(columns, dtype=torch.bool, device=self.C.device)] != 0).any(1)

    def outweighs(self, mu: Tensor, than: Tensor) -> float:
        """How many times more a sample or curved function weighs in Σⱼ μⱼfⱼ than in another such sum, at most."""
        much, little = mu @ self.C, than @ self.C
        pairs = [(much[k] @ t.U, little[k] @ t.U) for k, t in ((self.columns(i), t) for i, t in enumerate(self.tables))]
        start = sum(len(t.U) for t in self.tables)
        for f in self.functions:
            if f.matrix is None:
                pairs.append((much[start : start + f.size], little[start : start + f.size]))
            start += f.size
        a, b = (torch.cat(parts).abs() for parts in zip(*pairs, strict=True))
        return float((a[a > 0] / b[a > 0]).max()) if bool((a > 0).any()) else 0.0

    def over(self, indices: Sequence[Tensor]) -> Rows:
        """The rows estimated from some samples of each table: weights grow so that the sums keep their size."""
        tables = tuple(
            Table(t.samples.take(some), t.sums, t.U[:, some.to(t.U.device)] * (len(t.samples) / len(some)))
            for t, some in zip(self.tables, indices, strict=True)
        )
        return Rows(self.parameters, tables, self.functions, self.C)

    def parts(self, theta: Tensor) -> Tensor:
        """p(θ), (K,)."""
        with torch.no_grad():
            pieces = [t.U @ sample_losses(t.samples, self.parameters, theta) for t in self.tables]
            pieces += [f.value(theta) for f in self.functions]
        return torch.cat(pieces)

    def values(self, theta: Tensor) -> Tensor:
        """f(θ), (R,)."""
        return self.C @ self.parts(theta)

    def stacked_values(self, thetas: Tensor) -> Tensor:
        """The rows at several θ (P, d), (P, R)."""
        parts = [stacked_losses(t.samples, self.parameters, thetas) @ t.U.T for t in self.tables]
        parts += [f.stacked(thetas) for f in self.functions]
        return torch.cat(parts, 1) @ self.C.T

    def part_gradients(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """p(θ), (K,), and ∇p(θ), (K, d), in one sweep."""
        values, gradients = [theta.new_zeros(0)], [theta.new_zeros((0, theta.numel()))]
        for number, table in enumerate(self.tables):
            value, gradient = self.pulled(number, theta, table.U)
            values.append(value)
            gradients.append(gradient)
        for f in self.functions:
            value, gradient = f.gradient(theta)
            values.append(value)
            gradients.append(gradient)
        return torch.cat(values), torch.cat(gradients)

    @within_memory
    def pulled(self, table: int, theta: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Σᵢ wᵢℓᵢ(θ), (k,), and Σᵢ wᵢ∇ℓᵢ(θ), (k, d), over the samples of a table, for each row w of weights (k, n)."""
        samples = self.tables[table].samples
        value, gradient = theta.new_zeros(len(weights)), theta.new_zeros((len(weights), theta.numel()))
        for place, _, loss in passes(samples, self.parameters, theta):
            losses, pulled = batch_pulled_back(samples, self.parameters, theta, loss, weights[:, place])
            value = value + weights[:, place] @ losses
            gradient = gradient + pulled
        return added(value), added(gradient)

    def gradients(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """f(θ), (R,), and its Jacobian, (R, d)."""
        p, Dp = self.part_gradients(theta)
        return self.C @ p, self.C @ Dp

    @within_memory
    def pullback(self, theta: Tensor, weigh: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """f(θ) and Σⱼ μⱼ∇fⱼ(θ) for the weights μ = weigh(f(θ)): one forward and one backward sweep."""
        pulls: list[Callable[[Tensor], Tensor]] = []
        values = []
        for table in self.tables:
            losses, pull = self._own(table, theta)
            pulls.append(pull)
            values.append(added(table.U[:, span(len(table.samples))] @ losses))
        for f in self.functions:
            value, pull = f.forward(theta)
            pulls.append(pull)
            values.append(value.detach())
        f_values = self.C @ torch.cat(values)
        parts = torch.split(weigh(f_values) @ self.C, [len(value) for value in values])
        of_samples, gradient = torch.zeros_like(theta), torch.zeros_like(theta)
        for number, (w, pull) in enumerate(zip(parts, pulls, strict=True)):
            if number < len(self.tables):
                of_samples = of_samples + pull(w @ self.tables[number].U)
            else:
                gradient = gradient + pull(w)
        return f_values, (gradient + added(of_samples)).detach()

    def _own(self, table: Table, theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The losses of this process's samples, and the map from weights of all samples to Σᵢ wᵢ∇ℓᵢ over its own."""
        mine, sweep = span(len(table.samples)), passes(table.samples, self.parameters, theta)
        first = next(sweep, None)
        if first is not None and first[0] == mine:  # keep the graph: the backward sweep needs no second forward one
            losses, pull = forward(first[2], theta)
            return losses.detach(), lambda w: pull(w[mine])
        with torch.no_grad():
            losses = [loss(theta) for _, _, loss in ([] if first is None else [first, *sweep])]
        return torch.cat([theta.new_zeros(0), *losses]), partial(self._swept_back, table.samples, theta)

    @within_memory
    def _swept_back(self, samples: SampleLosses, theta: Tensor, w: Tensor) -> Tensor:
        """Σᵢ wᵢ∇ℓᵢ(θ) over this process's samples, batch by batch."""
        total = torch.zeros_like(theta)
        for place, _, loss in passes(samples, self.parameters, theta):
            total += forward(loss, theta)[1](w[place]).detach()
        return total

    def hessian(self, theta: Tensor, mu: Tensor) -> Tensor:
        """Σⱼ μⱼ∇²fⱼ(θ), (d, d)."""
        return self.part_hessian(theta, mu @ self.C)

    @within_memory
    def part_hessian(self, theta: Tensor, weights: Tensor) -> Tensor:
        """Σₖ weightsₖ ∇²pₖ(θ), (d, d): losses of linear maps by their structure, the rest by products."""
        d = theta.numel()
        H, left = theta.new_zeros((d, d)), weights.clone()
        for number, table in enumerate(self.tables):
            w, those = self._weighed(number, weights)
            if len(w) == 0 or d < _MAPPED:
                continue
            part = mapped_hessian(table.samples, self.parameters, theta, w, those)
            if part is not None:
                H += part
                left[self.columns(number)] = 0
        if not torch.equal(left, weights) and not self._agrees(H, theta, weights - left):
            H, left = torch.zeros_like(H), weights
        if bool((left != 0).any()):
            H = H + self.hessian_products(theta, left, torch.eye(d).to(theta))
        return 0.5 * (H + H.T)

    def _agrees(self, H: Tensor, theta: Tensor, weights: Tensor) -> bool:
        """Whether a Hessian had by structure multiplies a random vector as autograd does, in each coordinate's unit."""
        root = H.diagonal().abs().sqrt()
        root = torch.where(root > 0, root, root.max() + (root.max() == 0))
        v = torch.randn(len(H), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(theta) / root
        gap = (H @ v - self.hessian_products(theta, weights, v[:, None])[:, 0]).abs() / root
        size = (H.abs() @ v.abs()) / root
        eps = torch.finfo(H.dtype).eps
        return bool((gap <= eps**0.625 * size + eps * size.max()).all())  # 2e-10 in float64

    def _weighed(self, table: int, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """What each sample weighs where it weighs anything, and which those are (None: all)."""
        w = weights[self.columns(table)] @ self.tables[table].U
        some = torch.nonzero(w).reshape(-1)
        return w[some], some if len(some) < len(w) else None

    @within_memory
    def hessian_products(self, theta: Tensor, weights: Tensor, V: Tensor, gauss_newton: bool = False) -> Tensor:
        """Σₖ weightsₖ ∇²pₖ(θ)·v for every column v of V (d, c), the sum over the data inside: one sweep, (d, c).

        With `gauss_newton` the samples' part without the curvature of the model.
        """
        total = torch.zeros_like(V)
        curved, start, alike = [], sum(len(t.U) for t in self.tables), weights.new_zeros(())
        for f in self.functions:
            here = weights[start : start + f.size]
            if f.function.ridge is not None:
                alike = alike + here[0] * f.function.ridge
            elif f.matrix is None and bool((here != 0).any()):
                curved.append((here, f.value))
            start += f.size

        def of_functions(t: Tensor) -> Tensor:
            # in float32, numbers without dimension turn to float64 under nested transforms
            return torch.stack([(w * value(t)).sum().to(w.dtype) for w, value in curved]).sum()

        later = of_functions if curved else None
        pending = later if alone() else None  # with the first batch, unless every process would add it
        for number, table in enumerate(self.tables):
            w, those = self._weighed(number, weights)  # samples of other groups have no part in it
            if len(w) == 0:
                continue
            at_most = sharing(table.samples, self.parameters, theta, V.shape[1])
            for place, batch, loss in passes(table.samples, self.parameters, theta, those, at_most):
                if gauss_newton:
                    total += batch_gauss_newton_products(table.samples, self.parameters, theta, batch, w[place], V)
                    continue

                def scalar(t: Tensor, f=loss, here=w[place], more=pending) -> Tensor:
                    return f(t) @ here if more is None else f(t) @ here + more(t)

                count = place.stop - place.start
                total += batch_hessian_products(table.samples, self.parameters, theta, scalar, count, V)
                pending, later = None, None if alone() else later
        total = added(total) + alike * V
        return total if later is None else total + hessian_products(later, theta, V, _TOGETHER, set())


def function_value(f: Function, parameters: Parameters, theta: Tensor) -> Tensor:
    """φ(θ), its shape and type checked."""
    return checked_value(f, parameters.bind(parameters.tensors(theta)), theta.dtype)


def checked_value(f: Function, params: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """What the function makes of the params, its shape and type checked."""
    with in_words(f"function {f.name!r}"):
        out = f.fn(params)
    if not isinstance(out, Tensor) or out.dim() > 1:
        raise InvalidInputError(
            f"what the function {f.name!r} returned",
            measured=f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__,
            threshold="a tensor of shape () or (rows,)",
            meaning="A function of the params gives one number, or one per row.",
            cure="Return a scalar tensor or a vector of them.",
        )
    if out.dtype != dtype:
        raise InvalidInputError(
            f"what the function {f.name!r} returned",
            measured=out.dtype,
            threshold=f"{dtype}, as the parameters",
            meaning="Other types have no derivative, or lose digits silently.",
            cure="Compute it in the parameters' type, without casts.",
        )
    return out


def _shape(term: Term, outputs: list[Tensor]) -> torch.Size:
    shapes = {out.shape for out in outputs if out.dim()} | ({term.constant.shape} if term.constant.dim() else set())
    if len(shapes) > 1:
        raise InvalidInputError(
            f"rows of {term!r}",
            measured=" and ".join(str(s[0]) for s in shapes),
            threshold="one number of rows",
            meaning="Functions and bounds in one expression must have as many rows as each other, or one.",
            cure="Check the rows of A against the length of b.",
        )
    return shapes.pop() if shapes else torch.Size([])
