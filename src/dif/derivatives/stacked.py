"""Several programs over the same samples, each at its own θ, evaluated together by vectorised maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dif.derivatives.rows import CompiledFunction, output_slices
from dif.derivatives.sweeps import sweep_batches
from dif.problem.parameters import Parameters
from dif.problem.samples import Samples
from dif.runtime.guard import retry_with_smaller_batches


@dataclass(frozen=True, eq=False)
class BatchedProgram:
    """P programs that weight the same samples differently: row j of program p is Σᵢ W_pji ℓᵢ(θ) + Σₖ Cⱼₖ φₖ(θ)."""

    parameters: Parameters
    tables: tuple[tuple[Samples, Tensor], ...]  # samples, W (P, 1 + m, n)
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
            for place, loss in sweep_batches(samples, self.parameters, thetas[0], shared=False):
                values, gradients = loss.stacked_pull(thetas, W[:, :, place])
                f += values
                J += gradients
        for function, columns in output_slices(self.functions, self.C.shape[1]):
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
            for place, loss in sweep_batches(samples, self.parameters, thetas[0], shared=False):
                values, gradients = loss.stacked_gradients(thetas, W[:, :, place], weights)
                f += values
                g += gradients
        for function, columns in output_slices(self.functions, self.C.shape[1]):
            C = self.C[:, columns]
            each = torch.eye(function.size).to(thetas).expand(len(thetas), -1, -1)
            values, gradients = function.stacked_gradients(thetas, each, weights @ C)
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
            for place, loss in sweep_batches(samples, self.parameters, thetas[0], shared=False):
                total += loss.stacked_products(thetas, w[:, place], V, mu, more)
                more = None
        return total

    def _nonlinear_functions(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the map (θ, μ) → Σₖ μₖφₖ(θ) over functions neither linear nor a ridge; None if there are none."""
        terms = [(columns, f) for f, columns in output_slices(self.functions, self.C.shape[1]) if f.is_nonlinear]
        if not terms:
            return None

        def value(theta: Tensor, mu: Tensor) -> Tensor:
            return torch.stack([(mu[columns] * phi(theta)).sum().to(mu.dtype) for columns, phi in terms]).sum()

        return value
