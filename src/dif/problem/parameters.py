"""Flat θ inside, the user's structure at the border."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dif.errors import InvalidInputError, few


class BoundModule(dict[str, Tensor]):
    """The first argument of a loss when the params are an `nn.Module`.

    Call it like the module (`model(x)`), or read tensors by name (`model["0.weight"]`).
    """

    def __init__(
        self,
        module: nn.Module,
        tensors: dict[str, Tensor],
        fixed: dict[str, Tensor],
        padding: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__(tensors)
        self.module, self.fixed, self.padding = module, fixed, padding or {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with these tensors, and copies of what else it holds, in place of its own."""
        copies = {name: t.clone() for name, t in self.fixed.items()}
        padded = {name: self[name] * kept for name, kept in self.padding.items()}
        return torch.func.functional_call(self.module, {**self, **padded, **copies}, args, kwargs)


def variable(module: nn.Module, names: str | Iterable[str]) -> BoundModule:
    """Params of a module of which only some are variable: the last layer, adapters; the others stay as they are.

    Args:
        module: Read, never changed; `requires_grad` is not asked.
        names: Of parameters, or patterns such as "head.*" or "*lora*".

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> list(variable(model, "2.*"))
    ['2.weight', '2.bias']
    """
    patterns = [names] if isinstance(names, str) else list(names)
    own = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in own)]
    if idle or not patterns:
        raise InvalidInputError(
            "names of variable parameters",
            measured=", ".join(map(repr, idle)) or "none",
            threshold="names or patterns that match parameters of an nn.Module",
            meaning="Nothing would be variable under such a name.",
            cure=f"The parameters are {few(list(own))}." if own else "Pass the module first, then the names.",
        )
    chosen = {n: t.detach() for n, t in own.items() if any(fnmatchcase(n, p) for p in patterns)}
    return BoundModule(module, chosen, _fixed(module, chosen))


@dataclass(frozen=True, eq=False)
class Parameters:
    """The layout of flat θ: names, shapes, order; the user's tensors are read, never written.

    >>> layout, theta = Parameters.of({"w": torch.ones(2), "b": torch.zeros(1)})
    >>> layout.names, tuple(theta.shape)
    (('w', 'b'), (3,))
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    module: nn.Module | None = None
    fixed: dict[str, Tensor] = field(default_factory=dict)  # the module's buffers and frozen parameters, copied
    padding: dict[str, Tensor] = field(default_factory=dict)  # of embeddings: (rows, 1), 0 for the padding, else 1

    @classmethod
    def of(cls, params: Mapping[str, Tensor] | nn.Module) -> tuple[Parameters, Tensor]:
        """Read the layout and the flat θ of a dict of tensors or of a module's trainable parameters."""
        module: nn.Module | None = None
        if isinstance(params, nn.Module):
            module = params
            tensors: dict[str, Tensor] = {k: v for k, v in params.named_parameters() if v.requires_grad}
        elif isinstance(params, BoundModule):  # what Solution.params of a module is
            module, tensors = params.module, dict(params)
        elif isinstance(params, Mapping):
            tensors = dict(params)
        else:
            raise InvalidInputError(
                "params",
                measured=type(params).__name__,
                threshold="a dict of tensors or an nn.Module",
                meaning="The names of the parameters are needed to hand them to your loss.",
                cure='Wrap a single tensor as {"theta": tensor}.',
            )
        _check_tensors(tensors)
        if module is not None:
            _refuse_training_mode(module)
        first = next(iter(tensors.values()))
        layout = cls(
            names=tuple(tensors),
            shapes=tuple(t.shape for t in tensors.values()),
            dtype=first.dtype,
            device=first.device,
            module=module,
            fixed={} if module is None else _fixed(module, tensors),
            padding={} if module is None else _padding(module, tensors),
        )
        return layout, torch.cat([t.detach().reshape(-1) for t in tensors.values()]).clone()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of scalars in each tensor."""
        return tuple(shape.numel() for shape in self.shapes)

    @property
    def d(self) -> int:
        """Length of flat θ."""
        return sum(self.sizes)

    def tensors(self, theta: Tensor) -> dict[str, Tensor]:
        """Flat θ → the named tensors."""
        chunks = torch.split(theta, list(self.sizes))
        return {n: c.reshape(s) for n, c, s in zip(self.names, chunks, self.shapes, strict=True)}

    def bind(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The named tensors → what a loss gets as its first argument."""
        if self.module is None:
            return tensors
        return BoundModule(self.module, tensors, self.fixed, self.padding)

    def to(self, dtype: torch.dtype) -> Parameters:
        """The same layout in another precision."""
        fixed = {k: t.to(dtype) if t.is_floating_point() else t for k, t in self.fixed.items()}
        return replace(self, dtype=dtype, fixed=fixed, padding={k: t.to(dtype) for k, t in self.padding.items()})

    def check_mode(self) -> None:
        """Refuse a module that was put into training mode since."""
        if self.module is not None:
            _refuse_training_mode(self.module)


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    if not tensors:
        raise InvalidInputError(
            "params",
            measured="no tensor",
            threshold="at least one",
            meaning="There is nothing to optimise.",
            cure="Pass at least one floating-point tensor (of a module: one with requires_grad=True).",
        )
    for name, t in tensors.items():
        if is_lazy(t):
            raise InvalidInputError(
                f"parameter {name!r}",
                measured="a lazy parameter without a shape",
                threshold="an initialised one",
                meaning="The module has not seen data yet, so it does not know its own size.",
                cure="Call the module once on a batch before handing it in.",
            )
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise InvalidInputError(
                f"parameter {name!r}",
                measured=t.dtype if isinstance(t, Tensor) else type(t).__name__,
                threshold="a floating-point tensor",
                meaning="Only real-valued parameters can be differentiated.",
                cure="Convert it with torch.as_tensor(value, dtype=torch.float64).",
            )
    for what in ("dtype", "device"):
        kinds = {name: getattr(t, what) for name, t in tensors.items()}
        if len(set(kinds.values())) > 1:
            raise InvalidInputError(
                f"{what} of the parameters",
                measured=", ".join(f"{n}: {k}" for n, k in kinds.items()),
                threshold=f"one {what} for all",
                meaning="Flat θ is one vector.",
                cure="Move all parameters with .to(...) first; float64 is best for influence.",
            )
    for name, t in tensors.items():
        if t.dtype not in (torch.float32, torch.float64) or t.device.type == "meta" or t.layout != torch.strided:
            raise InvalidInputError(
                f"parameter {name!r}",
                measured=f"{t.dtype}, {t.layout}, on {t.device}",
                threshold="float64 or float32, torch.strided, with values",
                meaning="Fewer digits do not carry a second derivative, sparse tensors do not flatten, and the meta "
                "device is empty.",
                cure="Convert it with .to(torch.float64), or .to_dense().",
            )
        if not bool(torch.isfinite(t).all()):
            raise InvalidInputError(
                f"parameter {name!r}",
                measured=f"{int((~torch.isfinite(t)).sum())} NaN or infinite of {t.numel()} entries",
                threshold="0",
                meaning="A point that is not finite cannot be a solution or a start.",
                cure="Train again from a finite start, with a smaller step if training diverged.",
            )


def _fixed(module: nn.Module, variable: dict[str, Tensor]) -> dict[str, Tensor]:
    others = [*module.named_buffers(), *((k, t) for k, t in module.named_parameters() if k not in variable)]
    return {name: t.detach().clone() for name, t in others}


def _padding(module: nn.Module, variable: dict[str, Tensor]) -> dict[str, Tensor]:
    """Which rows of embeddings are padding, a zero that stays zero: torch's backward pass leaves them out, no other."""
    found: dict[str, Tensor] = {}
    uses = Counter(id(t) for m in module.modules() for t in m.parameters(recurse=False))
    for place, m in module.named_modules():
        name = f"{place}.weight" if place else "weight"
        if isinstance(m, nn.Embedding) and m.padding_idx is not None and name in variable and uses[id(m.weight)] == 1:
            keep = torch.ones_like(variable[name][:, :1]).detach()
            keep[m.padding_idx] = 0.0
            if not bool(variable[name][m.padding_idx].any()):
                found[name] = keep
    return found


def _refuse_training_mode(module: nn.Module) -> None:
    noisy = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    found = [
        f"{name or 'the module itself'} ({type(m).__name__})"
        for name, m in module.named_modules()
        if m.training and (isinstance(m, noisy) or getattr(m, "track_running_stats", False))
    ]
    if found:
        raise InvalidInputError(
            "modules in training mode",
            measured=", ".join(found),
            threshold="none of dropout, batch norm or running statistics",
            meaning="Their losses are random, or depend on the other samples of the batch, so no sample has an "
            "influence of its own.",
            cure="Call model.eval() before handing the model to dif.",
        )
