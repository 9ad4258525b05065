"""Several programs over the same samples, each at its own θ, evaluated together by vectorised maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dif.derivatives.compiled_function import CompiledFunction, output_slices
from dif.derivatives.sweeps import (
    stacked_gradients,
    stacked_products,
    stacked_pullback,
    sweep_batches,
    thetas_per_chunk,
)
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses
from dif.runtime.memory import retry_with_smaller_batches


@dataclass(frozen=True, eq=False)
class BatchedProgram:
    """P programs that weight the same samples differently: row j of program p is Σᵢ W_pji ℓᵢ(θ) + Σₖ Cⱼₖ φₖ(θ)."""

    parameters: Parameters
    tables: tuple[tuple[SampleLosses, Tensor], ...]  # samples, W (P, 1 + m, n)
    functions: tuple[CompiledFunction, ...]
    C: Tensor  # (1 + m, outputs of the functions)
    tau: Tensor  # (P, m)

    def __len__(self) -> int:
        return len(self.tau)

    def take(self, which: Tensor) -> BatchedProgram:
        """Select the programs listed in `which`."""
        tables = tuple((samples, W[which]) for samples, W in self.tables)
        return BatchedProgram(self.parameters, tables, self.functions, self.C, self.tau[which])

    @retry_with_smaller_batches
    def gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        """Return f, (P, 1 + m), and its Jacobian, (P, 1 + m, d), of each program at its own θ (P, d)."""
        P, d = thetas.shape
        f = thetas.new_zeros((P, len(self.C)))
        J = thetas.new_zeros((P, len(self.C), d))
        for samples, W in self.tables:
            for place, _, loss in sweep_batches(samples, self.parameters, thetas[0], shared=False):
                chunk_size = thetas_per_chunk(samples, self.parameters, thetas[0], place, len(self.C))
                values, gradients = stacked_gradients(loss, thetas, W[:, :, place], chunk_size)
                f += values
                J += gradients
        for function, columns in output_slices(self.functions):
            C = self.C[:, columns]
            for p in range(P):
                value, gradient = function.gradient(thetas[p])
                f[p] += C @ value
                J[p] += C @ gradient
        return f, J

    @retry_with_smaller_batches
    def pullback(self, thetas: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return f, (P, 1 + m), and Σⱼ weightsⱼ∇fⱼ, (P, d), of each program at its own θ (P, d).

        `weights` has shape (P, 1 + m).
        """
        f, g = thetas.new_zeros((len(thetas), len(self.C))), torch.zeros_like(thetas)
        for samples, W in self.tables:
            for place, _, loss in sweep_batches(samples, self.parameters, thetas[0], shared=False):
                if loss.compiled:
                    for p, w in enumerate(W[:, :, place]):
                        losses, gradient = loss.gradient(thetas[p], weights[p] @ w)
                        f[p] += w @ losses
                        g[p] += gradient
                    continue
                chunk_size = thetas_per_chunk(samples, self.parameters, thetas[0], place, 1)
                values, gradients = stacked_pullback(loss, thetas, W[:, :, place], weights, chunk_size)
                f += values
                g += gradients
        for function, columns in output_slices(self.functions):
            C = self.C[:, columns]
            values, gradients = function.stacked_pullback(thetas, weights @ C)
            f += values @ C.T
            g += gradients
        return f, g

    @retry_with_smaller_batches
    def products(self, thetas: Tensor, weights: Tensor, V: Tensor) -> Tensor:
        """Return Σⱼ weightsⱼ∇²fⱼ(θ)·v of each program, for weights (P, 1 + m) and columns V (P, d, c)."""
        function_sum = self._nonlinear_functions()
        mu = weights @ self.C
        ridges = [f.function.ridge or 0.0 for f in self.functions for _ in range(f.size)]
        total = (mu @ torch.tensor(ridges, dtype=torch.float64).to(mu))[:, None, None] * V
        for number, (samples, W) in enumerate(self.tables):
            w = torch.einsum("pj,pjn->pn", weights, W)
            more = function_sum if number == 0 else None  # the functions join the first batch
            for place, _, loss in sweep_batches(samples, self.parameters, thetas[0], shared=False):
                if loss.compiled and more is None:
                    each = zip(thetas, w[:, place], V, strict=True)
                    products = [torch.stack([loss.product(t, u, v) for v in columns.T], 1) for t, u, columns in each]
                    total += torch.stack(products)
                    continue

                def scalar(t: Tensor, w: Tensor, mu: Tensor, loss=loss, more=more) -> Tensor:
                    return loss(t) @ w if more is None else loss(t) @ w + more(t, mu)

                chunk_size = thetas_per_chunk(samples, self.parameters, thetas[0], place, V.shape[2])
                total += stacked_products(scalar, thetas, (w[:, place], mu), V, chunk_size)
                more = None
        return total

    def _nonlinear_functions(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the map (θ, μ) → Σₖ μₖφₖ(θ) over functions neither linear nor a ridge; None if there are none."""
        terms = [(columns, f.value) for f, columns in output_slices(self.functions) if f.is_nonlinear]
        if not terms:
            return None

        def value(theta: Tensor, mu: Tensor) -> Tensor:
            return torch.stack([(mu[columns] * phi(theta)).sum().to(mu.dtype) for columns, phi in terms]).sum()

        return value
