"""The change of the solution under one perturbation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.program import PerConstraint, Program
from dif.runtime.inputs import check_count
from dif.runtime.text_table import TextTable

_SHOWN = 5  # entries of Δθ that are printed, the largest


@dataclass(frozen=True, eq=False)
class Change:
    """The change of the parameters and multipliers, Δθ and Δλ, under one perturbation."""

    theta: dict[str, Tensor]  # Δθ in the structure of the params
    multipliers: PerConstraint  # Δλ per constraint
    flat: Tensor  # Δθ as one vector
    diagnostics: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, dtheta: Tensor, dlam: Tensor, diagnostics: dict[str, Any]) -> Change:
        """Build from Δθ, (d,), and Δλ, (m,)."""
        return cls(program.parameters.tensors(dtheta), PerConstraint.of(program, dlam), dtheta, diagnostics)

    def largest(self, k: int) -> list[tuple[str, float]]:
        """Return the name and the change of the k parameters that change most, such as ("w[0, 2]", 0.1)."""
        check_count(k, "k", meaning="It is the number of parameters listed.", cure="Leave it out, or pass k=5, say.")
        order = torch.argsort(torch.nan_to_num(self.flat.abs(), nan=-1.0), descending=True, stable=True)[:k].tolist()
        return [(self._name(i), float(self.flat[i])) for i in order]

    def _name(self, position: int) -> str:
        """Return the name of one entry of flat θ."""
        for name, tensor in self.theta.items():
            if position < tensor.numel():
                place = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(position), tensor.shape))
                return f"{name}[{place}]" if place else name
            position -= tensor.numel()
        raise IndexError(position)

    def plot(self, ax: Any = None, k: int = 15) -> Any:
        """Draw the k largest changes of parameters as bars, on new axes if `ax` is None; return the axes."""
        from dif.plots import parameter_change

        return parameter_change(self, ax, k)

    def __str__(self) -> str:
        size, shown = float(self.flat.norm()), self.largest(_SHOWN)
        more = f", the {_SHOWN} largest of {len(self.flat)} entries" if len(self.flat) > _SHOWN else ""
        parameters = TextTable(("parameter", "Δθ"), tuple((name, f"{value:+.4g}") for name, value in shown))
        text = f"Change of the solution: ‖Δθ‖ = {size:.4g}{more}\n{parameters}"
        rows = tuple(
            (name if value.dim() == 0 else f"{name}[{i}]", f"{number:+.4g}")
            for name, value in self.multipliers.items()
            for i, number in enumerate(value.reshape(-1).tolist())
        )
        return f"{text}\n{TextTable(('constraint', 'Δλ'), rows)}" if rows else text
