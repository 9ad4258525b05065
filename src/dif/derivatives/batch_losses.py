"""The losses of one batch as a function of θ, with their gradient and Hessian-vector products, compiled if asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp

from dif.errors import warn
from dif.problem.parameters import Parameters
from dif.problem.sample_losses import NO_SECOND_BACKWARD, NOT_COMPILED, SampleLosses
from dif.problem.structure import holds_only_tensors, leaves, map_tensors
from dif.runtime.user_code import is_out_of_memory

_BACKEND = "inductor"  # of torch.compile
_SMALLEST = 128  # samples in a batch from which it is compiled: each size takes seconds to minutes, small ones are rare
_ROUNDING = 1e4  # rounding errors by which compiled code may differ, relative to the largest entry


@dataclass(frozen=True, eq=False)
class BatchLosses:
    """The losses of one batch as a function of θ."""

    samples: SampleLosses
    parameters: Parameters
    batch: Any
    count: int

    def __call__(self, theta: Tensor) -> Tensor:
        """Return the losses, (count,), with their shape checked."""
        return self.samples.losses(self.parameters.bind(self.parameters.tensors(theta)), self.batch, self.count)

    @property
    def compiled(self) -> bool:
        """Whether the methods below run compiled code."""
        allowed = not self.samples.fallbacks & {NOT_COMPILED, NO_SECOND_BACKWARD}
        return self.samples.compile and self.count >= _SMALLEST and allowed

    def values(self, theta: Tensor) -> Tensor:
        """Return the losses, (count,), without a graph."""
        with torch.no_grad():
            return self._run(lambda other, t: other(t), theta)

    def gradient(self, theta: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses, (count,), and Σᵢ wᵢ∇ℓᵢ(θ), (d,)."""
        losses, gradient = self._run(_evaluate_gradient, theta, w)
        return losses.detach(), gradient.detach()

    def product(self, theta: Tensor, w: Tensor, v: Tensor) -> Tensor:
        """Return Σᵢ wᵢ∇²ℓᵢ(θ)·v, (d,)."""
        return self._run(_evaluate_product, theta, w, v).detach()

    def _run(self, fn: Callable[..., Any], theta: Tensor, *more: Tensor) -> Any:
        """Evaluate fn(losses, θ, …) of this batch, by compiled code if that is asked for and works."""
        if not self.compiled or not holds_only_tensors(self.batch):
            return fn(self, theta, *more)
        arguments = [t.contiguous() for t in (theta, *more, *leaves(self.batch))]
        # the layout belongs to the key, and is kept so that no other one gets its id
        key = (fn.__code__, id(self.parameters), *((t.shape, t.dtype, t.device) for t in arguments))
        if key not in self.samples.kernels:
            self.samples.kernels[key] = self._compile(fn, arguments, len(more)), self.parameters
        kernel, _ = self.samples.kernels[key]
        return fn(self, theta, *more) if kernel is None else kernel(*arguments)

    def _compile(self, fn: Callable[..., Any], arguments: list[Tensor], count: int) -> Callable[..., Any] | None:
        """Compile fn for arguments of these shapes: θ, `count` more tensors, the tensors of the batch.

        Returns None where torch cannot compile it, or the compiled code gives another result.
        """
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

        def flat(theta: Tensor, *rest: Tensor) -> Any:
            data = iter(rest[count:])
            batch = map_tensors(self.batch, lambda _: next(data))
            return fn(BatchLosses(self.samples, self.parameters, batch, self.count), theta, *rest[:count])

        try:
            traced = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
            traced.graph.eliminate_dead_code()  # checks of shapes, which torch.compile does not accept
            traced.recompile()
            kernel = torch.compile(traced, backend=_BACKEND, dynamic=False, fullgraph=True)
            if _agree(kernel(*arguments), flat(*arguments)):
                return kernel
            reason = "the compiled code gives other numbers"
        except Exception as error:  # torch raises many kinds; a fault of the loss itself shows again without compiling
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}"
        self.samples.fallbacks.add(NOT_COMPILED)
        warn(
            f"The loss of Samples {self.samples.name!r} is not compiled, so every evaluation takes longer ({reason}).",
            UserWarning,
        )
        return None


def _evaluate_gradient(losses: BatchLosses, theta: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    values, pull = vjp(losses, theta)[:2]
    return values, pull(w)[0]


def _evaluate_product(losses: BatchLosses, theta: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return vjp(grad(lambda t: losses(t) @ w), theta)[1](v)[0]


def _agree(first: Any, second: Any) -> bool:
    """Return whether two results agree up to rounding, NaN at the same places included."""
    pairs = list(zip(leaves(first), leaves(second), strict=True))
    return all(
        torch.allclose(a, b, rtol=0.0, atol=_ROUNDING * torch.finfo(b.dtype).eps * _largest(b), equal_nan=True)
        for a, b in pairs
    )


def _largest(t: Tensor) -> float:
    finite = t[torch.isfinite(t)]
    return float(finite.abs().max()) if len(finite) else 0.0
