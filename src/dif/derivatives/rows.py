"""Terms compiled for a parameter layout: f(θ) = C·p(θ), where each distinct sum or function in p is evaluated once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.func import vjp

from dif.derivatives.losses import (
    Differentiable,
    cost,
    gauss_newton_hessian,
    sample_losses,
    samples_at_once,
    stacked_losses,
    structured_hessian,
    sweep_batches,
    weighted_gradients,
)
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.samples import Samples
from dif.problem.term import Function, SampleSum, Term
from dif.runtime.guard import (
    convert_errors,
    holds_in_all_processes,
    retry_with_smaller_batches,
    span,
    sum_over_processes,
)

_DENSE = 2**18  # entries of C up to which it is multiplied as it is
_KEPT = 2**15  # numbers that one evaluation of a function is supposed to keep


@dataclass(frozen=True, eq=False)
class CompiledFunction(Differentiable):
    """A function of the parameters, evaluated at flat θ; a linear one is represented by its matrix."""

    function: Function
    parameters: Parameters
    size: int  # rows
    matrix: Tensor | None  # (rows, d)
    is_nonlinear: bool  # neither linear nor a ridge

    @classmethod
    def of(cls, f: Function, parameters: Parameters, theta: Tensor, size: int) -> CompiledFunction:
        """Compile a function with this many rows for a parameter layout."""
        matrix = None if f.matrix is None else torch.atleast_2d(f.matrix).to(theta)
        if matrix is not None and f.of is not None:
            parts = [theta.new_zeros((len(matrix), size)) for size in parameters.sizes]
            parts[parameters.names.index(f.of)] = matrix
            matrix = torch.cat(parts, 1)
        return cls(f.fallbacks, 0, _KEPT, f, parameters, size, matrix, matrix is None and f.ridge is None)

    def __call__(self, theta: Tensor) -> Tensor:
        """Return φ(θ), (rows,)."""
        if self.matrix is not None:
            return self.matrix @ theta
        if self.function.ridge is not None:
            return (0.5 * self.function.ridge * (theta @ theta)).reshape(1)
        with convert_errors(f"function {self.function.name!r}"):
            return self.function.fn(self.parameters.bind(theta)).reshape(-1)  # of the shape that it had when compiled

    def gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return φ(θ), (rows,), and its Jacobian, (rows, d)."""
        if self.matrix is not None:
            return self.matrix @ theta, self.matrix
        if self.function.ridge is not None:
            return self.values(theta), (self.function.ridge * theta)[None]
        return self.pull(theta, torch.eye(self.size).to(theta))


def output_slices(functions: Sequence[CompiledFunction], total: int) -> Iterator[tuple[CompiledFunction, slice]]:
    """Yield each function with the positions of its outputs, which are the last of `total` columns."""
    start = total - sum(f.size for f in functions)
    for f in functions:
        yield f, slice(start, start + f.size)
        start += f.size


def evaluate_function(f: Function, parameters: Parameters, theta: Tensor) -> Tensor:
    """Return φ(θ), () or (rows,), after checking its shape and type."""
    with convert_errors(f"function {f.name!r}"):
        out = f.fn(parameters.bind(theta))
    if not isinstance(out, Tensor) or out.dim() > 1:
        kind = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a value of type {type(out).__name__}"
        raise InvalidInputError(f"The function {f.name!r} must return a tensor of shape () or (rows,), not {kind}.")
    if out.dtype != theta.dtype:
        raise wrong_type_error(f"The function {f.name!r}", out, theta.dtype)
    return out


def wrong_type_error(source: str, out: Tensor, dtype: torch.dtype) -> InvalidInputError:
    """Build the error for an output of another type than the parameters."""
    return InvalidInputError(
        f"{source} must return {dtype}, the type of the parameters, not {out.dtype}; counts and booleans have no "
        "derivative, and other types lose digits."
    )


STRUCTURED = 16  # number of parameters from which the linear structure of a loss is used


@dataclass(frozen=True, eq=False)
class Table:
    """The weighted sums over one `Samples`: U·ℓ(θ), at consecutive positions of p."""

    samples: Samples
    sums: tuple[SampleSum, ...]
    U: Tensor  # (k, n)

    @cached_property
    def used(self) -> tuple[Tensor | None, Tensor]:
        """The samples with a weight in any sum, None for all; and their columns of U."""
        chosen = torch.nonzero((self.U != 0).any(0)).reshape(-1)
        return (None, self.U) if len(chosen) == self.U.shape[1] else (chosen, self.U[:, chosen])


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
    def compile(
        cls, terms: Sequence[Term], parameters: Parameters, theta: Tensor
    ) -> tuple[Rows, list[torch.Size], list[str]]:
        """Compile these terms to rows; return them, the shape of each term, () or (rows,), and the name of each row."""
        sums = list({id(s): s for term in terms for _, s in term.sums}.values())
        every_samples = list({id(s.samples): s.samples for s in sums}.values())
        functions = list({id(f): f for term in terms for _, f in term.functions}.values())
        tables, position = [], {}
        for samples in every_samples:
            own_sums = tuple(s for s in sums if s.samples is samples)
            position |= {id(s): len(position) + k for k, s in enumerate(own_sums)}
            tables.append(Table(samples, own_sums, torch.stack([s.weights for s in own_sums]).to(theta)))
        outputs = {id(f): evaluate_function(f, parameters, theta).detach() for f in functions}
        compiled = tuple(CompiledFunction.of(f, parameters, theta, outputs[id(f)].numel()) for f in functions)
        total = len(position)
        for f in compiled:
            position[id(f.function)] = slice(total, total + f.size)
            total += f.size

        blocks, shapes, names = [theta.new_zeros((0, total))], [], []
        for term in terms:
            different = {outputs[id(f)].shape for _, f in term.functions if outputs[id(f)].dim()}
            different |= {term.constant.shape} if term.constant.dim() else set()
            if len(different) > 1:
                raise InvalidInputError(
                    f"The functions and bounds of {term!r} must have the same number of rows, or one row, not "
                    f"{' and '.join(str(s[0]) for s in different)}; check the rows of A against the length of b."
                )
            shapes.append(different.pop() if different else torch.Size([]))
            names += [f"{term.label}[{i}]" for i in range(shapes[-1][0])] if shapes[-1] else [term.label]
            block = theta.new_zeros((shapes[-1].numel(), total))
            for c, s in term.sums:
                block[:, position[id(s)]] += c
            for c, f in term.functions:
                rows = outputs[id(f)].numel()
                block[:, position[id(f)]] += c if rows == 1 else c * torch.eye(rows).to(theta)
            blocks.append(block)
        return cls(parameters, tuple(tables), compiled, torch.cat(blocks)), shapes, names

    def to(self, dtype: torch.dtype) -> Rows:
        """Convert to another precision."""
        parameters = self.parameters.to(dtype)
        tables = tuple(Table(t.samples.to(dtype), t.sums, t.U.to(dtype)) for t in self.tables)
        functions = tuple(
            replace(f, parameters=parameters, matrix=None if f.matrix is None else f.matrix.to(dtype))
            for f in self.functions
        )
        return Rows(parameters, tables, functions, self.C.to(dtype))

    @cached_property
    def A(self) -> Tensor:
        """C for products, sparse where it is large: most outputs of functions are in one row only."""
        return self.C.to_sparse() if self.C.numel() > _DENSE else self.C

    @cached_property
    def means(self) -> Tensor:
        """Which sums of the tables are means, (number of sums,) bool."""
        flags = [s.normalised for table in self.tables for s in table.sums]
        return torch.tensor(flags, dtype=torch.bool, device=self.C.device)

    @property
    def sums(self) -> int:
        """How many sums the tables have: the first entries of p."""
        return sum(len(table.U) for table in self.tables)

    @cached_property
    def linear(self) -> Tensor | None:
        """Gradients of the part of each row that is linear in θ, (R, d); None if no function is linear."""
        outputs = [(f.matrix, columns) for f, columns in output_slices(self.functions, self.C.shape[1])]
        if all(matrix is None for matrix, _ in outputs):
            return None
        M = self.C.new_zeros((self.C.shape[1], sum(self.parameters.sizes)))
        for matrix, columns in outputs:
            M[columns] = 0.0 if matrix is None else matrix
        return self.A @ M

    @property
    def fallbacks(self) -> set[str]:
        """What torch could not do with the losses and functions, and what is done instead."""
        losses = [table.samples.fallbacks for table in self.tables]
        return set().union(*losses, *(f.fallbacks for f in self.functions))

    def columns(self, table: int) -> slice:
        """Return the positions in p of the sums of a table."""
        start = sum(len(before.U) for before in self.tables[:table])
        return slice(start, start + len(self.tables[table].U))

    def split(self, weights: Tensor) -> tuple[list[tuple[Samples, Tensor]], list[tuple[CompiledFunction, Tensor]]]:
        """Split weights of p (K,) into those of each table's samples, (n,), and those of each function, (rows,)."""
        sizes, count = [*(len(t.U) for t in self.tables), *(f.size for f in self.functions)], len(self.tables)
        parts = torch.split(weights, sizes)
        samples = [(t.samples, part @ t.U) for t, part in zip(self.tables, parts[:count], strict=True)]
        return samples, list(zip(self.functions, parts[count:], strict=True))

    def weight_ratio(self, mu: Tensor, than: Tensor) -> float:
        """Return the largest ratio of a sample's or nonlinear function's weights in Σⱼ muⱼfⱼ and Σⱼ thanⱼfⱼ."""
        largest = []
        for weights in (self.A.T @ mu, self.A.T @ than):
            samples, functions = self.split(weights)
            parts = [w for _, w in samples] + [w for f, w in functions if f.matrix is None]
            largest.append(torch.cat([weights[:0], *parts]).abs())
        a, b = largest
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
            parts += [f(theta) for f in self.functions]
        return self.A @ torch.cat(parts)

    def stacked_values(self, thetas: Tensor) -> Tensor:
        """Return f at several θ (P, d), (P, R)."""
        used = [(t.samples, *t.used) for t in self.tables]
        parts = [stacked_losses(samples, self.parameters, thetas, index) @ U.T for samples, index, U in used]
        parts += [f.evaluate_at(thetas)[0] for f in self.functions]
        return (self.A @ torch.cat(parts, 1).T).T

    def part_gradients(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return p(θ), (K,), and ∇p(θ), (K, d), in one sweep."""
        parts = [(theta.new_zeros(0), theta.new_zeros((0, theta.numel())))]
        parts += [weighted_gradients(t.samples, self.parameters, theta, t.U) for t in self.tables]
        p, Dp = zip(*parts, *(f.gradient(theta) for f in self.functions), strict=True)
        return torch.cat(p), torch.cat(Dp)

    def gradients(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(θ), (R,), and its Jacobian, (R, d)."""
        p, Dp = self.part_gradients(theta)
        return self.A @ p, self.A @ Dp

    @retry_with_smaller_batches
    def pullback(self, theta: Tensor, weigh: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return f(θ) and Σⱼ μⱼ∇fⱼ(θ) with μ = weigh(f(θ)).

        Where every table is one batch, its graph is kept and the losses are evaluated once, otherwise twice.
        """
        if not holds_in_all_processes(all(self._is_one_batch(t.samples, theta) for t in self.tables), theta):
            return self.weighted_gradient(theta, weigh(self.values(theta)))
        pulls, values = [], []
        for table in self.tables:
            place, loss = next(sweep_batches(table.samples, self.parameters, theta))
            losses, pull = vjp(loss, theta)[:2]
            pulls.append(lambda w, pull=pull, place=place: sum_over_processes(pull(w[place])[0]))
            values.append(sum_over_processes(table.U[:, place] @ losses.detach()))
        for f in self.functions:
            value, pull = vjp(f, theta)[:2]
            pulls.append(lambda w, pull=pull: pull(w)[0])
            values.append(value.detach())
        f_values = self.A @ torch.cat(values)
        samples, functions = self.split(self.A.T @ weigh(f_values))
        gradient = torch.zeros_like(theta)
        for pull, (_, w) in zip(pulls, [*samples, *functions], strict=True):
            gradient = gradient + pull(w).detach()
        return f_values, gradient

    def _is_one_batch(self, samples: Samples, theta: Tensor) -> bool:
        """Return whether this process's part of the samples is a single batch."""
        local, most = span(len(samples)), samples_at_once(cost(samples, self.parameters, theta), theta)
        return 0 < local.stop - local.start <= min(most, samples.batch_size or most)

    def weighted_gradient(self, theta: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(θ) and Σⱼ μⱼ∇fⱼ(θ), in one sweep: as `pullback`, with weights that do not depend on f."""
        values, gradient = [], torch.zeros_like(theta)
        every_samples, functions = self.split(self.A.T @ mu)
        parts = [
            weighted_gradients(samples, self.parameters, theta, w[None], of_losses=table.U)
            for table, (samples, w) in zip(self.tables, every_samples, strict=True)
        ]
        for value, part in parts + [f.pull(theta, w[None]) for f, w in functions]:
            values.append(value)
            gradient = gradient + part[0]
        return self.A @ torch.cat(values), gradient

    def hessian(self, theta: Tensor, mu: Tensor) -> Tensor:
        """Return Σⱼ μⱼ∇²fⱼ(θ), (d, d)."""
        return self.part_hessian(theta, self.A.T @ mu)

    @retry_with_smaller_batches
    def part_hessian(self, theta: Tensor, weights: Tensor, gauss_newton: bool = False, compare: bool = True) -> Tensor:
        """Return Σₖ weightsₖ ∇²pₖ(θ), (d, d), by the structure of the losses where they have one, else by products.

        With `gauss_newton`, the part of the samples leaves out the curvature of the model. With `compare`, what the
        structure gives is compared with a product.
        """
        d, assemble = theta.numel(), gauss_newton_hessian if gauss_newton else structured_hessian
        H, weights, ridge = theta.new_zeros((d, d)), weights.clone(), weights.new_zeros(())
        every_samples, functions = self.split(weights)
        for f, w in functions:
            if not f.is_nonlinear:
                ridge = ridge + w.sum() * (f.function.ridge or 0.0)
                w.zero_()  # in the weights
        rest = weights.clone()
        for number, (samples, w) in enumerate(every_samples):
            chosen = torch.nonzero(w).reshape(-1)
            if len(chosen) and (gauss_newton or d >= STRUCTURED):
                only = chosen if len(chosen) < len(w) else None
                assembled = assemble(samples, self.parameters, theta, w[chosen], only)
                if assembled is not None:
                    H += assembled
                    rest[self.columns(number)] = 0.0
        compare = compare and not gauss_newton and not torch.equal(rest, weights)
        if compare and not self._agrees(H, theta, weights - rest):
            H, rest = torch.zeros_like(H), weights
        if bool((rest != 0).any()):
            H = H + self.hessian_products(theta, rest, torch.eye(d).to(theta), gauss_newton)
        H = 0.5 * (H + H.T)
        H.diagonal().add_(ridge)
        return H

    def _agrees(self, H: Tensor, theta: Tensor, weights: Tensor) -> bool:
        """Return whether H·v agrees with autograd for a random v, with each coordinate scaled by its curvature."""
        root = H.diagonal().abs().sqrt()
        root = torch.where(root > 0, root, root.max() + (root.max() == 0))
        v = torch.randn(len(H), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(theta) / root
        gap = (H @ v - self.hessian_products(theta, weights, v[:, None])[:, 0]).abs() / root
        size = (H.abs() @ v.abs()) / root
        eps = torch.finfo(H.dtype).eps
        return bool((gap <= eps**0.625 * size + eps * size.max()).all())  # 2e-10 in float64

    @retry_with_smaller_batches
    def hessian_products(self, theta: Tensor, weights: Tensor, V: Tensor, gauss_newton: bool = False) -> Tensor:
        """Return Σₖ weightsₖ ∇²pₖ(θ)·v for every column v of V (d, c), as (d, c), in one sweep over the data.

        With `gauss_newton`, the part of the samples leaves out the curvature of the model.
        """
        total, (every_samples, functions) = torch.zeros_like(V), self.split(weights)
        for samples, w in every_samples:
            chosen = torch.nonzero(w).reshape(-1)  # samples without weight are skipped
            only = chosen if len(chosen) < len(w) else None
            for place, loss in sweep_batches(samples, self.parameters, theta, only, columns=V.shape[1]):
                products = loss.gauss_newton_products if gauss_newton else loss.products
                total += products(theta, w[chosen[place]], V)
        total = sum_over_processes(total)
        for f, w in functions:
            if f.function.ridge is not None:
                total = total + w[0] * f.function.ridge * V
            elif f.matrix is None and bool((w != 0).any()):
                total = total + f.products(theta, w, V)
        return total
