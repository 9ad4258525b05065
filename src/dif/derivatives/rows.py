"""Terms compiled for a parameter layout: f(θ) = C·p(θ), where each distinct sum or function in p is evaluated once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from dif.derivatives.compiled_function import CompiledFunction, evaluate_function, output_slices
from dif.derivatives.gauss_newton import can_map, gauss_newton_matrix, gauss_newton_products
from dif.derivatives.sweeps import (
    columns_per_chunk,
    evaluate_with_pullback,
    hessian_products,
    sample_losses,
    stacked_losses,
    structured_hessian,
    sweep_batches,
    weighted_gradients,
)
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses
from dif.problem.term import SampleSum, Term
from dif.runtime.distributed import is_single_process, span, sum_over_processes
from dif.runtime.memory import retry_with_smaller_batches

_FUNCTION_COLUMNS = 256  # columns that go through a function of the parameters at once, to limit memory
_STRUCTURED = 16  # number of parameters from which the linear structure of a loss is used


@dataclass(frozen=True, eq=False)
class Table:
    """The weighted sums over one `Samples`: U·ℓ(θ), at consecutive positions of p."""

    samples: SampleLosses
    sums: tuple[SampleSum, ...]
    U: Tensor  # (k, n)


@dataclass(frozen=True, eq=False)
class Rows:
    """R rows f = C·p, where p stacks the sums of each table and then the outputs of each function.

    All rows that use the same samples share one evaluation of their losses.
    """

    parameters: Parameters
    tables: tuple[Table, ...]
    functions: tuple[CompiledFunction, ...]
    C: Tensor  # (R, K)

    @classmethod
    def compile(cls, terms: Sequence[Term], parameters: Parameters, theta: Tensor) -> tuple[Rows, list[torch.Size]]:
        """Compile these terms to rows; return the rows and the shape of each term, () or (rows,)."""
        sums = list({id(s): s for term in terms for _, s in term.sums}.values())
        every_samples = list({id(s.samples): s.samples for s in sums}.values())
        functions = list({id(f): f for term in terms for _, f in term.functions}.values())
        tables, position = [], {}
        for samples in every_samples:
            own_sums = tuple(s for s in sums if s.samples is samples)
            for s in own_sums:
                position[id(s)] = len(position)
            tables.append(Table(samples, own_sums, torch.stack([s.weights for s in own_sums]).to(theta)))
        outputs = {id(f): evaluate_function(f, parameters, theta).detach() for f in functions}
        compiled = tuple(CompiledFunction.of(f, parameters, theta, outputs[id(f)].numel()) for f in functions)
        columns = {id(f.function): place for f, place in output_slices(compiled, len(position))}
        total = len(position) + sum(f.size for f in compiled)

        blocks, shapes = [], []
        for term in terms:
            shape = _common_shape(term, [outputs[id(f)] for _, f in term.functions])
            block = theta.new_zeros((shape.numel(), total))
            for c, s in term.sums:
                block[:, position[id(s)]] += c
            for c, f in term.functions:
                rows = outputs[id(f)].numel()
                block[:, columns[id(f)]] += c if rows == 1 else c * torch.eye(rows).to(theta)
            blocks.append(block)
            shapes.append(shape)
        C = torch.cat(blocks) if blocks else theta.new_zeros((0, total))
        return cls(parameters, tuple(tables), compiled, C), shapes

    def to(self, dtype: torch.dtype) -> Rows:
        """Convert to another precision."""
        parameters = self.parameters.to(dtype)
        tables = tuple(Table(t.samples.to(dtype), t.sums, t.U.to(dtype)) for t in self.tables)
        functions = tuple(
            CompiledFunction(f.function, parameters, f.size, None if f.matrix is None else f.matrix.to(dtype))
            for f in self.functions
        )
        return Rows(parameters, tables, functions, self.C.to(dtype))

    @cached_property
    def means(self) -> Tensor:
        """Which sums of the tables are means, (number of sums,) bool."""
        flags = [s.normalised for table in self.tables for s in table.sums]
        return torch.tensor(flags, dtype=torch.bool, device=self.C.device)

    @property
    def fallbacks(self) -> set[str]:
        """What torch could not do with the losses and functions, and what is done instead."""
        losses = [table.samples.fallbacks for table in self.tables]
        return set().union(*losses, *(f.function.fallbacks for f in self.functions))

    def columns(self, table: int) -> slice:
        """Return the positions in p of the sums of a table."""
        start = sum(len(t.U) for t in self.tables[:table])
        return slice(start, start + len(self.tables[table].U))

    def _function_columns(self) -> Iterator[tuple[CompiledFunction, slice]]:
        """Yield each function with the positions of its outputs in p."""
        return output_slices(self.functions, sum(len(t.U) for t in self.tables))

    def nonlinear_rows(self) -> Tensor:
        """Return which rows contain anything nonlinear, (R,) bool."""
        columns = [True] * sum(len(t.U) for t in self.tables)
        for f in self.functions:
            columns += [f.matrix is None] * f.size
        return (self.C[:, torch.tensor(columns, dtype=torch.bool, device=self.C.device)] != 0).any(1)

    def weight_ratio(self, mu: Tensor, than: Tensor) -> float:
        """Return the largest ratio of a sample's or nonlinear function's weights in Σⱼ muⱼfⱼ and Σⱼ thanⱼfⱼ."""
        first, second = mu @ self.C, than @ self.C
        tables = [(self.columns(number), table.U) for number, table in enumerate(self.tables)]
        pairs = [(first[columns] @ U, second[columns] @ U) for columns, U in tables]
        pairs += [(first[columns], second[columns]) for f, columns in self._function_columns() if f.matrix is None]
        a, b = (torch.cat(parts).abs() for parts in zip(*pairs, strict=True))
        return float((a[a > 0] / b[a > 0]).max()) if bool((a > 0).any()) else 0.0

    def over(self, indices: Sequence[Tensor]) -> Rows:
        """Estimate the rows from the samples listed for each table; their weights are scaled up to keep the sums."""
        tables = tuple(
            Table(t.samples.take(index), t.sums, t.U[:, index.to(t.U.device)] * (len(t.samples) / len(index)))
            for t, index in zip(self.tables, indices, strict=True)
        )
        return Rows(self.parameters, tables, self.functions, self.C)

    def values(self, theta: Tensor) -> Tensor:
        """Return f(θ), (R,)."""
        with torch.no_grad():
            parts = [t.U @ sample_losses(t.samples, self.parameters, theta) for t in self.tables]
            parts += [f.value(theta) for f in self.functions]
        return self.C @ torch.cat(parts)

    def stacked_values(self, thetas: Tensor) -> Tensor:
        """Return f at several θ (P, d), (P, R)."""
        parts = [stacked_losses(t.samples, self.parameters, thetas) @ t.U.T for t in self.tables]
        parts += [f.stacked_values(thetas) for f in self.functions]
        return torch.cat(parts, 1) @ self.C.T

    def part_gradients(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return p(θ), (K,), and ∇p(θ), (K, d), in one sweep."""
        parts = [(theta.new_zeros(0), theta.new_zeros((0, theta.numel())))]
        parts += [weighted_gradients(t.samples, self.parameters, theta, t.U) for t in self.tables]
        parts += [f.gradient(theta) for f in self.functions]
        return torch.cat([value for value, _ in parts]), torch.cat([gradient for _, gradient in parts])

    def gradients(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(θ), (R,), and its Jacobian, (R, d)."""
        p, Dp = self.part_gradients(theta)
        return self.C @ p, self.C @ Dp

    @retry_with_smaller_batches
    def pullback(self, theta: Tensor, weigh: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return f(θ) and Σⱼ μⱼ∇fⱼ(θ) with μ = weigh(f(θ)), in one forward and one backward sweep."""
        pulls: list[Callable[[Tensor], Tensor]] = []
        values = []
        for table in self.tables:
            losses, pull = self._local_losses(table, theta)
            pulls.append(pull)
            values.append(sum_over_processes(table.U[:, span(len(table.samples))] @ losses))
        for f in self.functions:
            value, pull = f.evaluate_with_pullback(theta)
            pulls.append(pull)
            values.append(value.detach())
        f_values = self.C @ torch.cat(values)
        weights = torch.split(weigh(f_values) @ self.C, [len(value) for value in values])
        sample_part, function_part = torch.zeros_like(theta), torch.zeros_like(theta)
        for number, (w, pull) in enumerate(zip(weights, pulls, strict=True)):
            if number < len(self.tables):
                sample_part = sample_part + pull(w @ self.tables[number].U)
            else:
                function_part = function_part + pull(w)
        return f_values, (function_part + sum_over_processes(sample_part)).detach()

    @retry_with_smaller_batches
    def weighted_gradient(self, theta: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(θ) and Σⱼ μⱼ∇fⱼ(θ), in one sweep: as `pullback`, with weights that do not depend on f."""
        weights, values, gradient = mu @ self.C, [], torch.zeros_like(theta)
        for number, table in enumerate(self.tables):
            w, value = weights[self.columns(number)] @ table.U, theta.new_zeros(len(table.U))
            for place, _, loss in sweep_batches(table.samples, self.parameters, theta):
                losses, part = loss.gradient(theta, w[place])
                value, gradient = value + table.U[:, place] @ losses, gradient + part
            values.append(sum_over_processes(value))
        gradient = sum_over_processes(gradient)
        for f, columns in self._function_columns():
            value, pull = f.evaluate_with_pullback(theta)
            values.append(value.detach())
            gradient = gradient + pull(weights[columns]).detach()
        return self.C @ torch.cat(values), gradient

    def _local_losses(self, table: Table, theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the losses of this process's samples, and the map w → Σᵢ wᵢ∇ℓᵢ over them; w has all n weights."""
        local, sweep = span(len(table.samples)), sweep_batches(table.samples, self.parameters, theta)
        first = next(sweep, None)
        if first is not None and first[0] == local and not first[2].compiled:  # keep the graph of the only batch
            losses, pull = evaluate_with_pullback(first[2], theta)
            return losses.detach(), lambda w: pull(w[local])
        losses = [loss.values(theta) for _, _, loss in ([] if first is None else [first, *sweep])]
        return torch.cat([theta.new_zeros(0), *losses]), partial(self._local_gradient, table.samples, theta)

    @retry_with_smaller_batches
    def _local_gradient(self, samples: SampleLosses, theta: Tensor, w: Tensor) -> Tensor:
        """Return Σᵢ wᵢ∇ℓᵢ(θ) over this process's samples, batch by batch."""
        total = torch.zeros_like(theta)
        for place, _, loss in sweep_batches(samples, self.parameters, theta):
            total += loss.gradient(theta, w[place])[1]
        return total

    def hessian(self, theta: Tensor, mu: Tensor) -> Tensor:
        """Return Σⱼ μⱼ∇²fⱼ(θ), (d, d)."""
        return self.part_hessian(theta, mu @ self.C)

    @retry_with_smaller_batches
    def part_hessian(self, theta: Tensor, weights: Tensor) -> Tensor:
        """Return Σₖ weightsₖ ∇²pₖ(θ), (d, d), by the structure of losses of linear maps, or by products."""
        d = theta.numel()
        H, rest = theta.new_zeros((d, d)), weights.clone()
        for number, table in enumerate(self.tables):
            w, indices = self._sample_weights(number, weights)
            if len(w) == 0 or d < _STRUCTURED:
                continue
            part = structured_hessian(table.samples, self.parameters, theta, w, indices)
            if part is not None:
                H += part
                rest[self.columns(number)] = 0
        if not torch.equal(rest, weights) and not self._agrees(H, theta, weights - rest):
            H, rest = torch.zeros_like(H), weights
        if bool((rest != 0).any()):
            H = H + self.hessian_products(theta, rest, torch.eye(d).to(theta))
        return 0.5 * (H + H.T)

    def gauss_newton(self, theta: Tensor, weights: Tensor) -> Tensor:
        """Return Σₖ weightsₖ ∇²pₖ(θ), (d, d), where the part of the samples leaves out the curvature of the model."""
        H, rest = theta.new_zeros((theta.numel(), theta.numel())), weights.clone()
        for number, table in enumerate(self.tables):
            w, indices = self._sample_weights(number, weights)
            if len(w) and can_map(table.samples, self.parameters, theta):
                H += gauss_newton_matrix(table.samples, self.parameters, theta, w, indices)
                rest[self.columns(number)] = 0
        return H + self.hessian_products(theta, rest, torch.eye(len(H)).to(theta), gauss_newton=True)

    def _agrees(self, H: Tensor, theta: Tensor, weights: Tensor) -> bool:
        """Return whether H·v agrees with autograd for a random v, with each coordinate scaled by its curvature."""
        root = H.diagonal().abs().sqrt()
        root = torch.where(root > 0, root, root.max() + (root.max() == 0))
        v = torch.randn(len(H), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(theta) / root
        gap = (H @ v - self.hessian_products(theta, weights, v[:, None])[:, 0]).abs() / root
        size = (H.abs() @ v.abs()) / root
        eps = torch.finfo(H.dtype).eps
        return bool((gap <= eps**0.625 * size + eps * size.max()).all())  # 2e-10 in float64

    def _sample_weights(self, table: int, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the nonzero weights of a table's samples, and the indices of these samples (None: all)."""
        w = weights[self.columns(table)] @ self.tables[table].U
        indices = torch.nonzero(w).reshape(-1)
        if self.tables[table].samples.compile and 2 * len(indices) > len(w):
            return w, None  # batches of other sizes would be compiled again
        return w[indices], indices if len(indices) < len(w) else None

    @retry_with_smaller_batches
    def hessian_products(self, theta: Tensor, weights: Tensor, V: Tensor, gauss_newton: bool = False) -> Tensor:
        """Return Σₖ weightsₖ ∇²pₖ(θ)·v for every column v of V (d, c), as (d, c), in one sweep over the data.

        With `gauss_newton`, the part of the samples leaves out the curvature of the model.
        """
        total = torch.zeros_like(V)
        nonlinear, alone, ridge = [], [], weights.new_zeros(())
        for f, columns in self._function_columns():
            w = weights[columns]
            if f.function.ridge is not None:
                ridge = ridge + w[0] * f.function.ridge
            elif f.matrix is None and bool((w != 0).any()):
                (alone if f.function.fallbacks else nonlinear).append((w, f))

        def function_sum(t: Tensor) -> Tensor:
            # the cast: in float32, zero-dimensional tensors become float64 under nested transforms
            return torch.stack([(w * f.value(t)).sum().to(w.dtype) for w, f in nonlinear]).sum()

        remaining = function_sum if nonlinear else None
        for number, table in enumerate(self.tables):
            w, indices = self._sample_weights(number, weights)  # samples without weight are skipped
            if len(w) == 0:
                continue
            single = table.samples.compile and not gauss_newton  # compiled code takes one column at a time
            columns = 0 if single else V.shape[1]
            sweep = sweep_batches(table.samples, self.parameters, theta, indices, columns=columns)
            for place, batch, loss in sweep:
                if gauss_newton:
                    total += gauss_newton_products(table.samples, self.parameters, theta, batch, w[place], V)
                    continue
                if loss.compiled:
                    total += torch.stack([loss.product(theta, w[place], v) for v in V.T], 1)
                    continue

                # functions join the first batch, unless it needs another method or every process would add them
                joins = remaining if is_single_process() and not table.samples.fallbacks else None

                def scalar(t: Tensor, f=loss, w=w[place], more=joins) -> Tensor:
                    return f(t) @ w if more is None else f(t) @ w + more(t)

                chunk_size = columns_per_chunk(table.samples, self.parameters, theta, place.stop - place.start)
                total += hessian_products(scalar, theta, V, chunk_size, table.samples.fallbacks)
                remaining = remaining if joins is None else None
        total = sum_over_processes(total) + ridge * V
        for w, f in alone:  # their method may differ from that of the losses
            value = lambda t, w=w, f=f: (w * f.value(t)).sum()  # noqa: E731
            total += hessian_products(value, theta, V, _FUNCTION_COLUMNS, f.function.fallbacks)
        return total if remaining is None else total + hessian_products(remaining, theta, V, _FUNCTION_COLUMNS, set())


def name_rows(names: Iterable[str], shapes: Iterable[torch.Size]) -> tuple[str, ...]:
    """Return a name for each row of terms with these names and shapes, () or (rows,)."""
    rows: list[str] = []
    for name, shape in zip(names, shapes, strict=True):
        rows += [f"{name}[{i}]" for i in range(shape[0])] if shape else [name]
    return tuple(rows)


def _common_shape(term: Term, outputs: list[Tensor]) -> torch.Size:
    """Return the shape of a term, () or (rows,), from its function outputs and its constant."""
    shapes = {out.shape for out in outputs if out.dim()} | ({term.constant.shape} if term.constant.dim() else set())
    if len(shapes) > 1:
        raise InvalidInputError(
            f"{term!r} combines vectors of {' and '.join(str(shape[0]) for shape in shapes)} rows.",
            "All its functions and bounds must have the same number of rows, or one row.",
            "Functions and bounds in one expression are added and compared row by row.",
            "Check the rows of A against the length of b.",
        )
    return shapes.pop() if shapes else torch.Size([])
