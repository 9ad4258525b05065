"""Cooper loops as runs of dif: the same steps, in a form that influence through training can differentiate.

Cooper's Lagrangians detach the multipliers, so that they cannot be differentiated in λ. The steps are therefore built
anew from the loss and the violations that the constrained problem returns.
"""
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import cooper
import torch
from torch import Tensor, nn

import dif
from dif import InvalidInputError
from dif.adapters.cooper import Constrained, trained_tensors

State = dict[str, Any]
Optimizer = dif.SGD | dif.Adam | dif.AdamW

_SCHEMES = {  # whether the dual step comes first (None: at the same time)
    cooper.optim.SimultaneousOptimizer: None,
    cooper.optim.AlternatingDualPrimalOptimizer: True,
    cooper.optim.AlternatingPrimalDualOptimizer: False,
}
_SHARED = ("lr", "weight_decay")  # options that all optimisers have
_OPTIONS = {  # what is read from each optimiser of torch
    torch.optim.SGD: (dif.SGD, (*_SHARED, "momentum", "nesterov")),
    torch.optim.Adam: (dif.Adam, (*_SHARED, "betas", "eps")),
    torch.optim.AdamW: (dif.AdamW, (*_SHARED, "betas", "eps")),
}


def unroll(
    optimizer: cooper.optim.ConstrainedOptimizer, batches: Iterable[Any], *, model: nn.Module | None = None,
    samples: dif.Samples | None = None, eps_root: float = 0.0, keep: Any = None, show_progress: bool = True,
) -> dif.Run:  # fmt: skip
    """Carry out a Cooper loop as a run, from where its model and multipliers are; these are not changed.

    Args:
        optimizer: A simultaneous or alternating optimiser of Cooper that has made no step yet, with SGD, Adam or AdamW
            for both sides and the learning rates that they have now: schedulers are not seen. Its problem is a
            `Constrained`, or your own with `compute_cmp_state(batch, weights)`, which multiplies the loss of each
            sample by its weight: (weights * losses).sum() / weights.sum() for a mean.
        batches: The numbers of the samples of each step.
        model: The model that your own problem evaluates; a `Constrained` knows it.
        samples: For your own problem, the samples that are numbered: it then gets their data as `batch`, otherwise
            their numbers.
        eps_root: Added inside the root of Adam, see `dif.Adam`.
        keep: As in `dif.Training.run`.
        show_progress: Show progress on a terminal.

    Returns:
        A run whose state has "params" and "multipliers", for `dif.UnrolledInfluence` and `dif.Retraining`.
    """
    scheme = next((first for kind, first in _SCHEMES.items() if type(optimizer) is kind), ...)
    if scheme is ...:
        raise InvalidInputError(
            f"The optimiser is of type {type(optimizer).__name__}.",
            f"It must be one of {', '.join(kind.__name__ for kind in _SCHEMES)}.",
            "Only these schemes can be built anew with derivatives.",
            "Write other schemes as a step of your own, see dif.unroll.",
        )
    cmp: Any = optimizer.cmp
    evaluate, params, population = _prepare(cmp, model, samples)
    step = _CooperStep(evaluate, list(cmp.named_constraints()), scheme)
    whole = cmp.params if isinstance(cmp, Constrained) else model
    kept = dif.variable(whole, list(params)) if isinstance(whole, nn.Module) else params
    dual: dict[str, Any] = {name: c.multiplier.weight for name, c in step.constraints if c.multiplier is not None}
    start: State = {"params": kept, "multipliers": {name: w.detach() for name, w in dual.items()}, "memory": {}}
    _read_optimizers(step, start, "params", params, optimizer.primal_optimizers, False, eps_root)
    _read_optimizers(step, start, "multipliers", dual, optimizer.dual_optimizers, True, eps_root)
    run = dif.unroll(step, start, batches, samples=population, keep=keep, show_progress=show_progress)
    _check_used(step, run)
    return run


@dataclass(frozen=True, eq=False)
class _CooperStep:
    """One roll of a Cooper optimiser, as a function of the state."""

    evaluate: Callable[[dict[str, Tensor], Any, Any], cooper.CMPState]
    constraints: list[tuple[str, cooper.Constraint]]
    dual_first: bool | None
    optimizers: dict[tuple[str, str], Optimizer] = field(default_factory=dict)  # by part of the state and name

    def __call__(self, state: State, batch: Any, weights: Any) -> State:
        before, multipliers, dual_memory = state["params"], state["multipliers"], state["memory"]["multipliers"]

        def lagrangian(params: dict[str, Tensor], multipliers: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            found = self.evaluate(params, batch, weights)
            return self._lagrangian(found, multipliers), self._violations(found)

        if self.dual_first:
            violations = self._violations(self.evaluate(before, batch, weights))
            multipliers, dual_memory = self._update(state, "multipliers", violations)
        slopes, violations = torch.func.grad(lagrangian, has_aux=True)(before, multipliers)
        params, memory = self._update(state, "params", slopes)
        if not self.dual_first:
            if self.dual_first is False:
                violations = self._violations(self.evaluate(params, batch, weights))
            multipliers, dual_memory = self._update(state, "multipliers", violations)
        return {
            "params": params,
            "multipliers": multipliers,
            "memory": {"params": memory, "multipliers": dual_memory},
        }

    def _update(self, state: State, part: str, slopes: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the parameters or multipliers after the step of their optimiser, and its memory."""
        values, memory = dict(state[part]), dict(state["memory"][part])
        kinds = {name: constraint.constraint_type for name, constraint in self.constraints}
        for name, slope in slopes.items():
            if (part, name) not in self.optimizers:
                continue  # no optimiser moves it
            up = -1.0 if part == "multipliers" else 1.0
            steps, *before = memory[name]
            value, after = self.optimizers[part, name].update(values[name], tuple(before), up * slope, 1.0, steps)
            memory[name] = (steps + 1, *after)
            positive = part == "multipliers" and kinds[name] == cooper.ConstraintType.INEQUALITY
            values[name] = torch.relu(value) if positive else value
        return values, memory

    def _lagrangian(self, found: cooper.CMPState, multipliers: dict[str, Tensor]) -> Tensor:
        """Return the primal Lagrangian as Cooper's formulations define it, without detaching λ."""
        total = found.loss
        assert total is not None
        for name, constraint in self.constraints:
            seen = found.observed_constraints.get(constraint)
            if seen is None or not seen.contributes_to_primal_update:
                continue
            g, at_most = seen.violation.reshape(-1), constraint.constraint_type == cooper.ConstraintType.INEQUALITY
            lam = multipliers.get(name, torch.zeros_like(g))
            if constraint.penalty_coefficient is None:
                total = total + (lam * g).sum()
                continue
            c = constraint.penalty_coefficient().detach().to(g)
            if at_most and constraint.multiplier is not None:
                total = total + ((torch.relu(lam + c * g) ** 2 - lam**2) / (2 * c)).sum()
            else:
                size = torch.relu(g) if at_most else g
                total = total + (lam * g).sum() + 0.5 * (c * size**2).sum()
        return total

    def _violations(self, found: cooper.CMPState) -> dict[str, Tensor]:
        """Return the gradient of the dual Lagrangian: the violations, strict ones where they are given."""
        violations = {}
        for name, constraint in self.constraints:
            seen = found.observed_constraints.get(constraint)
            if seen is not None and seen.contributes_to_dual_update and constraint.multiplier is not None:
                value = seen.violation if seen.strict_violation is None else seen.strict_violation
                violations[name] = value.reshape(-1)
        return violations


def _prepare(
    cmp: Any, model: nn.Module | None, samples: dif.Samples | None
) -> tuple[Callable[..., cooper.CMPState], dict[str, Tensor], Any]:
    """Return how to evaluate the problem for given params, the params to train, and the samples."""
    indexed = [
        name for name, c in cmp.named_constraints() if c.multiplier is not None and not hasattr(c.multiplier, "weight")
    ]
    indexed += [name for name, c in cmp.named_constraints() if getattr(c.multiplier, "expects_constraint_features", 0)]
    if indexed:
        raise InvalidInputError(
            f"The multipliers of {', '.join(sorted(set(indexed)))} depend on features or parameters.",
            "They must be DenseMultipliers.",
            "Only these are updated by the violations themselves.",
            "Write the training as a step of your own, see dif.unroll.",
        )
    if not isinstance(cmp, Constrained):
        if model is None:
            raise InvalidInputError(
                f"`model` is missing for a problem of type {type(cmp).__name__}.",
                "It must be the nn.Module that the problem evaluates.",
                "Its parameters are part of the state of each step.",
                "Pass model=model.",
            )
        inside = _Inside(model, cmp)

        def evaluate(params: dict[str, Tensor], batch: Any, weights: Any) -> cooper.CMPState:
            renamed = {f"model.{name}": tensor for name, tensor in params.items()}
            return torch.func.functional_call(inside, renamed, (batch, weights))

        return evaluate, trained_tensors(model), samples
    params = trained_tensors(cmp.params)
    populations = list(dict.fromkeys(s.population for s in cmp.problem.samples))
    numbered = [_number(s) for s in populations]

    def evaluate_stated(params: dict[str, Tensor], batch: Any, weights: Any) -> cooper.CMPState:
        arguments = params
        if isinstance(cmp.params, nn.Module):
            arguments = dif.variable(cmp.params, list(params))
            arguments.update(params)
        batch, weights = ((batch,), (weights,)) if len(populations) == 1 else (batch, weights)
        each = {s: populations.index(s.population) for s in cmp.problem.samples}
        numbers, shares = ({s: part[k] for s, k in each.items()} for part in (batch, weights))
        return cmp.evaluate(arguments, numbers, shares)

    return evaluate_stated, params, numbered[0] if len(numbered) == 1 else numbered


def _check_used(step: _CooperStep, run: dif.Run) -> None:
    """Refuse parameters that the problem does not depend on: torch does not move them, and weight decay would."""
    parts = run.loop.batch(0)
    batch, weights = [p.data for p in parts], [torch.ones(len(p.index)).to(run.theta) for p in parts]
    both = (batch[0], weights[0]) if len(batch) == 1 else (tuple(batch), tuple(weights))
    params = {name: t.detach().requires_grad_() for name, t in run.params.items()}
    total = step._lagrangian(step.evaluate(params, *both), run.state["multipliers"])
    found = torch.autograd.grad(total, list(params.values()), allow_unused=True) if total.requires_grad else ()
    unused = [name for name, slope in zip(params, found, strict=False) if slope is None] if found else list(params)
    if unused:
        raise InvalidInputError(
            f"The problem does not depend on {', '.join(unused[:6])}.",
            "It must depend on every parameter of the model that requires gradients.",
            "The model may not be the one that the problem evaluates, or a part of it is not used.",
            "Pass the model of the problem, and set requires_grad=False for what is not used.",
        )


class _Inside(nn.Module):
    """A problem of Cooper as a module around its model, so that the model's parameters can be exchanged in a call."""

    def __init__(self, model: nn.Module, cmp: cooper.ConstrainedMinimizationProblem) -> None:
        super().__init__()
        self.model, self.cmp = model, cmp

    def forward(self, batch: Any, weights: Any) -> cooper.CMPState:
        """Evaluate the problem."""
        return self.cmp.compute_cmp_state(batch, weights)


def _number(samples: Any) -> dif.Samples:
    """Return the same samples with their numbers as data."""
    numbered = dif.Samples(samples.loss, torch.arange(len(samples)), name=samples.name)
    numbered.population = samples.population
    return numbered


def _read_optimizers(
    step: _CooperStep, start: State, part: str, tensors: dict[str, Tensor], optimizers: Any, maximize: bool,
    eps_root: float,
) -> None:  # fmt: skip
    """Find the optimiser of every tensor, and put its memory into the start: the number of steps, and the rest."""
    start["memory"][part] = dict.fromkeys(tensors, ())
    names = {id(tensor): name for name, tensor in tensors.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            kind, options = _OPTIONS.get(type(optimizer), (None, ()))
            fit = kind is not None and not optimizer.state and group["maximize"] == maximize
            if not fit or group.get("dampening") or group.get("amsgrad"):
                raise InvalidInputError(
                    f"The optimiser of the {part} is a {type(optimizer).__name__}"
                    f"{' that has made steps' if optimizer.state else ''}.",
                    "It must be a new SGD, Adam or AdamW of torch, without dampening and amsgrad.",
                    "Every step of it is built anew with derivatives.",
                    "Use one of these, or write the training as a step of your own, see dif.unroll.",
                )
            own = {name: group[name] for name in options}
            moved = kind(**own, **({} if kind is dif.SGD else {"eps_root": eps_root}))  # type: ignore[misc]
            for tensor in group["params"]:
                if id(tensor) in names:
                    step.optimizers[part, names[id(tensor)]] = moved
                    start["memory"][part][names[id(tensor)]] = (tensor.new_zeros(()), *moved.start(tensor.detach()))
