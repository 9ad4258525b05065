"""Cooper: train a dif.Problem with mini-batch primal–dual optimisers, and read what Cooper has trained.

Mini-batch training ends near a solution, not at one. `Solution.kkt` measures the distance; `dif.fit` continues from it.
"""
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import dif
from dif import InvalidInputError

try:
    import cooper
except ImportError as error:
    raise ImportError('dif.adapters.cooper needs Cooper: pip install "directional-influence[cooper]"') from error

Params = nn.Module | dict[str, Tensor]  # parameters that Cooper trains


class Constrained(cooper.ConstrainedMinimizationProblem):
    """A dif.Problem as a Cooper problem: loss and constraint violations, exact or estimated from a mini-batch.

    Args:
        problem: The problem. Its constraints keep their names, and λ has the same sign and scale in dif and Cooper.
        params: An nn.Module, or a dict of tensors that require gradients; trained in place by Cooper's optimisers.
        formulation: Cooper's formulation of every constraint.
        penalty: Function of the number of rows that builds the penalty coefficient, for formulations that need one
            (augmented Lagrangian).

    Example:
        cmp = Constrained(problem, model)
        optimizer = cooper.optim.SimultaneousOptimizer(
            cmp=cmp,
            primal_optimizers=torch.optim.Adam(model.parameters(), lr=1e-2),
            dual_optimizers=torch.optim.SGD(cmp.dual_parameters(), lr=1e-1, maximize=True),
        )
        for indices in loader:
            optimizer.roll(compute_cmp_state_kwargs={"indices": indices})
    """

    def __init__(
        self,
        problem: dif.Problem,
        params: Params,
        *,
        formulation: Any = cooper.formulations.Lagrangian,
        penalty: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__()
        self.problem, self.params = problem, params
        first = next(iter(trained_tensors(params).values()))
        for name, constraint in zip(problem.names, problem.constraints, strict=True):
            rows = _count_rows(constraint, params)
            types = {"==": cooper.ConstraintType.EQUALITY, "<=": cooper.ConstraintType.INEQUALITY}
            kind = types[constraint.kind.value]
            multiplier = cooper.multipliers.DenseMultiplier(
                num_constraints=rows, device=first.device, dtype=first.dtype
            )
            options = {} if penalty is None else {"penalty_coefficient": penalty(rows)}
            registered = cooper.Constraint(
                constraint_type=kind, formulation_type=formulation, multiplier=multiplier, **options
            )
            self._register_constraint(name, registered)

    def compute_cmp_state(
        self, indices: Tensor | Mapping[Any, Tensor] | None = None, weights: Mapping[Any, Tensor] | None = None
    ) -> cooper.CMPState:
        """Evaluate the loss and the constraint violations.

        indices: Samples to estimate them from, as indices into the problem's Samples, or as a dict with indices for
        each Samples. None: all samples.
        weights: Of these samples, for each Samples: 1 for those in the batch, 0 for those taken out of it. None: 1.
        """
        return self.evaluate(_loss_arguments(self.params), indices, weights)

    def evaluate(self, arguments: dict[str, Tensor], indices: Any, weights: Any) -> cooper.CMPState:
        """Evaluate the loss and the constraint violations for the first argument of the losses."""
        observed = {}
        losses = {
            id(samples): self._evaluate_losses(samples, indices, arguments, weights) for samples in self.problem.samples
        }
        loss = self._evaluate_term(self.problem.objective, arguments, losses).reshape(())
        for constraint, registered in zip(self.problem.constraints, self.constraints(), strict=True):
            violation = self._evaluate_term(constraint.term, arguments, losses) - constraint.tau.to(loss)
            observed[registered] = cooper.ConstraintState(violation=violation.reshape(-1))
        return cooper.CMPState(loss=loss, observed_constraints=observed)

    @staticmethod
    def _evaluate_term(
        term: Any, arguments: dict[str, Tensor], losses: dict[int, tuple[Tensor, Tensor | None, Any]]
    ) -> Tensor:
        """Evaluate a Term at the current params; a sum over a mini-batch is scaled up to all samples."""
        first = next(iter(arguments.values()))
        total = term.constant.to(first)
        for factor, part in term.sums:
            values, which, count = losses[id(part.samples)]
            weights = part.weights.to(first) if which is None else part.weights[which].to(first)
            total = total + factor * len(part.samples) / count * (weights @ values)
        for factor, function in term.functions:
            total = total + factor * function.fn(arguments)
        return total

    @staticmethod
    def _evaluate_losses(
        samples: Any, indices: Any, arguments: dict[str, Tensor], weights: Mapping[Any, Tensor] | None
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Return the weighted losses of the selected samples, their indices (None for all), and their total weight."""
        which = indices.get(samples) if isinstance(indices, Mapping) else indices
        which = None if which is None else torch.as_tensor(which).cpu()
        device = next(iter(arguments.values())).device
        losses = [samples.loss(arguments, batch) for _, batch in samples.batches(which, device=device)]
        values = torch.cat(losses)
        return (
            (values, which, len(values))
            if weights is None
            else (weights[samples] * values, which, weights[samples].sum())
        )


def solution_of(
    problem: dif.Problem,
    params: Params,
    cmp: cooper.ConstrainedMinimizationProblem,
    *,
    signs: Mapping[str, float] | None = None,
) -> dif.Solution:
    """Return the point at which Cooper ended, with the multipliers of `cmp`, as a Solution.

    Args:
        problem: The problem. Its constraints have the names of the attributes of `cmp`: (a <= b).named("fair") for
            cmp.fair.
        params: The trained parameters.
        cmp: The trained Cooper problem, your own or `Constrained`.
        signs: Factors s for constraints whose violation in `cmp` is s times that in dif: −1 for an equality with its
            sides exchanged. λ of dif is s times λ of Cooper.

    Returns:
        The point as it is. `solution.kkt` measures how far it is from a solution; `dif.fit(problem, params,
        multipliers=solution.lam)` continues from it.
    """
    multipliers = dict(cmp.named_multipliers())
    unknown = [name for name in signs or {} if name not in problem.names]
    if unknown:
        raise InvalidInputError(
            f"`signs` has the names {', '.join(map(repr, unknown))}.",
            f"Its names must be among those of the constraints: {', '.join(problem.names)}.",
            "No constraint of the problem has such a name.",
            "Use the names of the constraints of the dif.Problem.",
        )
    missing = [name for name in problem.names if name not in multipliers]
    if missing:
        raise InvalidInputError(
            f"There are no multipliers for {', '.join(missing)}, only for {', '.join(multipliers) or 'no constraint'}.",
            "The Cooper problem must have one for each constraint of the dif.Problem.",
            "Multipliers are matched to constraints by name.",
            "Name the constraints of the dif.Problem after the attributes of the Cooper problem: .named('fair').",
        )
    lam = []
    for name, constraint in zip(problem.names, problem.constraints, strict=True):
        weight = getattr(multipliers[name], "weight", None)
        if weight is None:
            raise InvalidInputError(
                f"The multiplier of {name!r} is of type {type(multipliers[name]).__name__}.",
                "It must be a DenseMultiplier or an IndexedMultiplier.",
                "An implicit multiplier does not store a value for each row.",
                "Use dif.Solution(problem, params), which finds the multipliers nearest to stationarity.",
            )
        rows = _count_rows(constraint, params)
        if weight.numel() != rows:
            raise InvalidInputError(
                f"The multiplier of {name!r} has {weight.numel()} values.",
                f"It must have {rows}.",
                "Each row of the constraint has one multiplier.",
                "Write the constraint in dif with the same rows as in Cooper.",
            )
        lam.append(float((signs or {}).get(name, 1.0)) * weight.detach().reshape(-1).clone())
    return dif.Solution(problem, params, lam)


def train(
    problem: dif.Problem,
    params: Params,
    *,
    epochs: int = 100,
    batch_size: int = 64,
    rate: float = 1e-2,
    dual_rate: float = 1e-2,
    optimizer: Any = cooper.optim.SimultaneousOptimizer,
    seed: int = 0,
) -> dif.Solution:
    """Train by mini-batches with Adam on θ and gradient ascent on λ; return the last point, without polishing.

    Both learning rates decrease to zero (cosine schedule).

    Args:
        problem: The problem to train.
        params: The start; not changed.
        epochs: Passes over the data.
        batch_size: Samples per mini-batch.
        rate: Initial learning rate of Adam.
        dual_rate: Initial learning rate of the multipliers. If it is too large, λ oscillates.
        optimizer: Cooper's class that combines both optimisers; it must accept plain torch optimisers.
        seed: Seed of the order of the samples.

    Raises:
        InvalidInputError: epochs or batch_size is less than 1, or a loss cannot be evaluated on its data.
    """
    if min(epochs, batch_size) < 1:
        raise InvalidInputError(
            f"`epochs` is {epochs} and `batch_size` is {batch_size}.",
            "Both must be at least 1.",
            "Otherwise no training step is made.",
            "Leave them out to use the defaults.",
        )
    zeros = [torch.zeros(_count_rows(constraint, params)) for constraint in problem.constraints]
    dif.Solution(problem, params, zeros)  # raises for invalid losses and data before training starts
    model = _copy_params(params)
    cmp = Constrained(problem, model)
    primal = torch.optim.Adam(trained_tensors(model).values(), lr=rate)
    dual = torch.optim.SGD(
        list(cmp.dual_parameters()) or [torch.zeros(1, requires_grad=True)], lr=dual_rate, maximize=True
    )
    joint = optimizer(cmp=cmp, primal_optimizers=primal, dual_optimizers=dual)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(part, T_max=epochs) for part in (primal, dual)]
    generator = torch.Generator().manual_seed(seed)
    steps = max((-(-len(samples) // batch_size) for samples in problem.samples), default=1)
    for _ in range(epochs):
        orders = {samples: torch.randperm(len(samples), generator=generator) for samples in problem.samples}
        for step in range(steps):
            indices = {samples: _take_batch(order, step, batch_size) for samples, order in orders.items()}
            joint.roll(compute_cmp_state_kwargs={"indices": indices})
        for schedule in schedules:
            schedule.step()
    return solution_of(problem, model, cmp)


def _count_rows(constraint: dif.Constraint, params: Params) -> int:
    """Return the number of rows of a constraint: sums over samples are scalars, functions may be vectors."""
    with torch.no_grad():
        parts = [function.fn(_loss_arguments(params)) for _, function in constraint.term.functions]
    return max(part.numel() for part in (constraint.tau, *parts))


def _take_batch(order: Tensor, step: int, batch_size: int) -> Tensor:
    """Return batch number `step` of the order, starting over at its end."""
    size = min(batch_size, len(order))
    return order[torch.arange(step * size, (step + 1) * size) % len(order)]


def trained_tensors(params: Params) -> dict[str, Tensor]:
    """Return the tensors to train, by name."""
    if isinstance(params, nn.Module):
        return {name: t for name, t in params.named_parameters() if t.requires_grad}
    return params


def _loss_arguments(params: Params) -> dict[str, Tensor]:
    """Return the first argument of a loss, containing the tensors to train themselves."""
    if not isinstance(params, nn.Module):
        return params
    arguments = dif.variable(params, list(trained_tensors(params)))
    arguments.update(trained_tensors(params))
    return arguments


def _copy_params(params: Params) -> Params:
    """Return a copy of the params that can be trained."""
    if isinstance(params, nn.Module):
        return deepcopy(params)
    return {name: t.detach().clone().requires_grad_() for name, t in params.items()}
