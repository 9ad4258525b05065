"""Several programs over the same samples, each at its own θ: evaluated together by one vectorised map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dif.evaluation.rows import Smooth
from dif.evaluation.sweeps import fitting, passes, stacked_gradients, stacked_products, stacked_pullback
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import SampleLosses
from dif.runtime.memory import within_memory


@dataclass(frozen=True, eq=False)
class Stack:
    """P programs whose rows weigh the samples differently: row j of program p is Σᵢ W_pji ℓᵢ(θ) + Σₖ Cⱼₖ φₖ(θ)."""

    parameters: Parameters
    tables: tuple[tuple[SampleLosses, Tensor], ...]  # samples, W (P, 1 + m, n)
    functions: tuple[Smooth, ...]
    C: Tensor  # (1 + m, outputs of the functions)
    tau: Tensor  # (P, m)

    def __len__(self) -> int:
        return len(self.tau)

    def take(self, which: Tensor) -> Stack:
        """Some of the programs."""
        tables = tuple((samples, W[which]) for samples, W in self.tables)
        return Stack(self.parameters, tables, self.functions, self.C, self.tau[which])

    @within_memory
    def gradients(self, thetas: Tensor) -> tuple[Tensor, Tensor]:
        """f, (P, 1 + m), and its Jacobian, (P, 1 + m, d), of each program at its θ (P, d)."""
        P, d = thetas.shape
        f = thetas.new_zeros((P, len(self.C)))
        J = thetas.new_zeros((P, len(self.C), d))
        for samples, W in self.tables:
            for place, _, loss in passes(samples, self.parameters, thetas[0], shared=False):
                together = fitting(samples, self.parameters, thetas[0], place, len(self.C))
                value, slope = stacked_gradients(loss, thetas, W[:, :, place], together)
                f += value
                J += slope
        start = 0
        for function in self.functions:
            C = self.C[:, start : start + function.size]
            for p in range(P):
                value, slope = function.gradient(thetas[p])
                f[p] += C @ value
                J[p] += C @ slope
            start += function.size
        return f, J

    @within_memory
    def pullback(self, thetas: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """f, (P, 1 + m), and Σⱼ weightsⱼ∇fⱼ, (P, d), of each program at its θ (P, d), for weights (P, 1 + m)."""
        f, g = thetas.new_zeros((len(thetas), len(self.C))), torch.zeros_like(thetas)
        for samples, W in self.tables:
            for place, _, loss in passes(samples, self.parameters, thetas[0], shared=False):
                together = fitting(samples, self.parameters, thetas[0], place, 1)
                value, slope = stacked_pullback(loss, thetas, W[:, :, place], weights, together)
                f += value
                g += slope
        start = 0
        for function in self.functions:
            C = self.C[:, start : start + function.size]
            values, slopes = function.stacked_pullback(thetas, weights @ C)
            f += values @ C.T
            g += slopes
            start += function.size
        return f, g

    @within_memory
    def products(self, thetas: Tensor, weights: Tensor, V: Tensor) -> Tensor:
        """Σⱼ weightsⱼ∇²fⱼ(θ)·v of each program, for weights (P, 1 + m) and columns V (P, d, c)."""
        pending = self._curved_functions()
        mu = weights @ self.C
        total = (mu @ self._ridges(mu))[:, None, None] * V
        for number, (samples, W) in enumerate(self.tables):
            w = torch.einsum("pj,pjn->pn", weights, W)
            more = pending if number == 0 else None
            for place, _, loss in passes(samples, self.parameters, thetas[0], shared=False):

                def scalar(t: Tensor, w: Tensor, mu: Tensor, loss=loss, more=more) -> Tensor:
                    return loss(t) @ w if more is None else loss(t) @ w + more(t, mu)

                together = fitting(samples, self.parameters, thetas[0], place, V.shape[2])
                total += stacked_products(scalar, thetas, (w[:, place], mu), V, together)
                more = None
        return total

    def _ridges(self, like: Tensor) -> Tensor:
        """How much each function's output curves alike in all directions, (K,)."""
        every = [f.function.ridge or 0.0 for f in self.functions for _ in range(f.size)]
        return torch.tensor(every, dtype=like.dtype, device=like.device)

    def _curved_functions(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """(θ, μ) → Σₖ μₖφₖ(θ) over the functions that curve; None if there are none."""
        curved, start = [], 0
        for function in self.functions:
            if function.matrix is None and function.function.ridge is None:
                curved.append((slice(start, start + function.size), function.value))
            start += function.size
        if not curved:
            return None

        def value(theta: Tensor, mu: Tensor) -> Tensor:
            return torch.stack([(mu[where] * phi(theta)).sum().to(mu.dtype) for where, phi in curved]).sum()

        return value
