"""Convert between the user's parameters (a dict of tensors or a module) and flat θ."""

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
from dif.problem.data import cast

Tensors = dict[str, Tensor]  # by name


class BoundModule(dict[str, Tensor]):
    """The first argument of a loss when the params are an `nn.Module`.

    Call it like the module (`model(x)`), or read tensors by name (`model["0.weight"]`).
    """

    def __init__(self, module: nn.Module, tensors: Tensors, fixed: Tensors, padding: Tensors | None = None) -> None:
        super().__init__(tensors)
        self.module, self.fixed, self.padding = module, fixed, padding or {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with these tensors, and with copies of its buffers and other parameters."""
        copies = {name: t.clone() for name, t in self.fixed.items()}
        padded = {name: self[name] * mask for name, mask in self.padding.items()}
        return torch.func.functional_call(self.module, {**self, **padded, **copies}, args, kwargs)


def variable(module: nn.Module, names: str | Iterable[str]) -> BoundModule:
    """Select the parameters of a module that are variable, such as the last layer or adapters; the others stay fixed.

    Args:
        module: Read, never changed; `requires_grad` is ignored.
        names: Names of parameters, or patterns such as "head.*" or "*lora*".

    Returns:
        The params for `dif.fit` or `dif.Solution`.

    Raises:
        InvalidInputError: Where a name matches no parameter.

    Examples:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> list(variable(model, "2.*"))
        ['2.weight', '2.bias']
    """
    patterns = [names] if isinstance(names, str) else list(names)
    own = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    unmatched = [p for p in patterns if not any(fnmatchcase(name, p) for name in own)]
    if unmatched or not patterns:
        raise InvalidInputError(
            "`names` must be names or patterns of parameters of an nn.Module, which here are "
            f"{few(list(own)) or 'none'}, not {unmatched or names!r}."
        )
    selected = {n: t.detach() for n, t in own.items() if any(fnmatchcase(n, p) for p in patterns)}
    return BoundModule(module, selected, _copy_fixed(module, selected))


@dataclass(frozen=True, eq=False)
class Parameters:
    """The layout of flat θ: names, shapes and order. The user's tensors are read, never written.

    >>> layout, theta = Parameters.of({"w": torch.ones(2), "b": torch.zeros(1)})
    >>> layout.names, tuple(theta.shape)
    (('w', 'b'), (3,))
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    module: nn.Module | None = None
    fixed: Tensors = field(default_factory=dict)  # the module's buffers and frozen parameters, copied
    padding: Tensors = field(default_factory=dict)  # by embedding: (rows, 1), 0 for the padding row, else 1

    @classmethod
    def of(cls, params: Mapping[str, Tensor] | nn.Module) -> tuple[Parameters, Tensor]:
        """Return the layout and the flat θ of a dict of tensors or of a module's trainable parameters."""
        module: nn.Module | None = None
        if isinstance(params, nn.Module):
            module = params
            tensors: Tensors = {k: v for k, v in params.named_parameters() if v.requires_grad}
        elif isinstance(params, BoundModule):  # `Solution.params` of a module
            module, tensors = params.module, dict(params)
        elif isinstance(params, Mapping):
            tensors = dict(params)
        else:
            raise InvalidInputError(
                f"`params` must be a dict of tensors or an nn.Module, not of type {type(params).__name__}; wrap a "
                'single tensor as {"theta": tensor}.'
            )
        _check_tensors(tensors)
        first = next(iter(tensors.values()))
        layout = cls(
            names=tuple(tensors),
            shapes=tuple(t.shape for t in tensors.values()),
            dtype=first.dtype,
            device=first.device,
            module=module,
            fixed={} if module is None else _copy_fixed(module, tensors),
            padding={} if module is None else _mask_padding(module, tensors),
        )
        layout.check_mode()
        return layout, torch.cat([t.detach().reshape(-1) for t in tensors.values()]).clone()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of scalars in each tensor."""
        return tuple(shape.numel() for shape in self.shapes)

    def tensors(self, theta: Tensor) -> Tensors:
        """Split flat θ into the named tensors."""
        return dict(self.bind(theta))

    def bind(self, given: Tensor | Tensors) -> Tensors:
        """Return what a loss gets as its first argument, for flat θ or named tensors: a dict, or a BoundModule."""
        if isinstance(given, Tensor):
            chunks = torch.split(given, [shape.numel() for shape in self.shapes])
            given = {n: c.reshape(s) for n, c, s in zip(self.names, chunks, self.shapes, strict=True)}
        return given if self.module is None else BoundModule(self.module, given, self.fixed, self.padding)

    def to(self, dtype: torch.dtype) -> Parameters:
        """Return the same layout in another precision."""
        return replace(self, dtype=dtype, fixed=cast(self.fixed, dtype), padding=cast(self.padding, dtype))

    def check_mode(self) -> None:
        """Refuse a module in training mode, if its losses are then random or depend on the batch."""
        noisy = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
        training = [
            f"{name or 'the module itself'} ({type(m).__name__})"
            for name, m in (self.module.named_modules() if self.module is not None else ())
            if m.training and (isinstance(m, noisy) or getattr(m, "track_running_stats", False))
        ]
        if training:
            raise InvalidInputError(
                f"The model has modules in training mode: {', '.join(training)}. Their losses are random, or depend on "
                "the other samples; call model.eval()."
            )


def _check_tensors(tensors: Tensors) -> None:
    """Refuse parameters that cannot form one finite vector in double or single precision."""
    if not tensors:
        raise InvalidInputError(
            "`params` must have at least one tensor to optimise; of a module, one with requires_grad=True."
        )
    for name, t in tensors.items():
        if is_lazy(t):
            raise InvalidInputError(
                f"The parameter {name!r} is lazy and has no shape yet; call the module once on a batch."
            )
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise InvalidInputError(
                f"The parameter {name!r} must be a floating-point tensor, not of type "
                f"{t.dtype if isinstance(t, Tensor) else type(t).__name__}."
            )
    for what in ("dtype", "device"):
        kinds = {name: getattr(t, what) for name, t in tensors.items()}
        if len(set(kinds.values())) > 1:
            raise InvalidInputError(
                f"All parameters must have the same {what}, not {', '.join(f'{n}: {k}' for n, k in kinds.items())}."
            )
    for name, t in tensors.items():
        if t.dtype not in (torch.float32, torch.float64) or t.device.type == "meta" or t.layout != torch.strided:
            raise InvalidInputError(
                f"The parameter {name!r} must be float64 or float32, dense (.to_dense()), and on a device that holds "
                f"values; it is {t.dtype}, {t.layout}, on {t.device}."
            )
        if not bool(torch.isfinite(t).all()):
            raise InvalidInputError(
                f"The parameter {name!r} has {int((~torch.isfinite(t)).sum())} NaN or infinite of {t.numel()} entries; "
                "all must be finite."
            )


def _copy_fixed(module: nn.Module, variable: Tensors) -> Tensors:
    """Copy the buffers of a module, and its parameters that are not variable."""
    others = [*module.named_buffers(), *((k, t) for k, t in module.named_parameters() if k not in variable)]
    return {name: t.detach().clone() for name, t in others}


def _mask_padding(module: nn.Module, variable: Tensors) -> Tensors:
    """Return masks that keep the padding rows of embeddings at zero, (rows, 1), by name of the embedding's weight.

    Torch's own backward pass leaves these rows out; other derivatives would not.
    """
    masks: Tensors = {}
    uses = Counter(id(t) for m in module.modules() for t in m.parameters(recurse=False))
    for place, m in module.named_modules():
        name = f"{place}.weight" if place else "weight"
        if isinstance(m, nn.Embedding) and m.padding_idx is not None and name in variable and uses[id(m.weight)] == 1:
            mask = torch.ones_like(variable[name][:, :1]).detach()
            mask[m.padding_idx] = 0.0
            if not bool(variable[name][m.padding_idx].any()):
                masks[name] = mask
    return masks
