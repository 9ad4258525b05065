"""Cooper: train a dif.Problem with its mini-batch primal–dual optimisers, and take over what it has trained.

What mini-batches end at is near a solution, not at one: `Solution.kkt` says how far, `dif.fit` goes the rest.
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
    raise ImportError('dif.adapters.cooper needs Cooper: pip install "dif[cooper]"') from error

Params = nn.Module | dict[str, Tensor]


class Constrained(cooper.ConstrainedMinimizationProblem):
    """A dif.Problem as Cooper sees it: the loss and the violations, from all samples or estimated from some.

    Args:
        problem: Its constraints keep their names; λ has the same sign and scale in both.
        params: An nn.Module, or a dict of tensors that require gradients; trained in place by Cooper's optimisers.
        formulation: Of every constraint; an augmented Lagrangian takes a `penalty` too.
        penalty: Makes the penalty coefficient for a number of rows, where the formulation needs one.

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
        first = next(iter(_tensors(params).values()))
        for name, constraint in zip(problem.names, problem.constraints, strict=True):
            size = _rows(constraint, params)
            kind = cooper.ConstraintType.EQUALITY if constraint.kind.value == "==" else cooper.ConstraintType.INEQUALITY
            multiplier = cooper.multipliers.DenseMultiplier(
                num_constraints=size, device=first.device, dtype=first.dtype
            )
            options = {} if penalty is None else {"penalty_coefficient": penalty(size)}
            made = cooper.Constraint(
                constraint_type=kind, formulation_type=formulation, multiplier=multiplier, **options
            )
            self._register_constraint(name, made)

    def compute_cmp_state(self, indices: Tensor | Mapping[Any, Tensor] | None = None) -> cooper.CMPState:
        """The loss and the violations.

        indices: Which samples they are estimated from: of the problem's Samples, or per Samples where there are
        several. None: all of them.
        """
        bound, observed = _bound(self.params), {}
        known = {id(samples): self._losses(samples, indices, bound) for samples in self.problem.samples}
        loss = self._evaluated(self.problem.objective, bound, known).reshape(())
        for constraint, mine in zip(self.problem.constraints, self.constraints(), strict=True):
            violation = self._evaluated(constraint.term, bound, known) - constraint.tau.to(loss)
            observed[mine] = cooper.ConstraintState(violation=violation.reshape(-1))
        return cooper.CMPState(loss=loss, observed_constraints=observed)

    @staticmethod
    def _evaluated(term: Any, bound: dict[str, Tensor], known: dict[int, tuple[Tensor, Tensor | None]]) -> Tensor:
        """A Term at the params as they are, sums over samples scaled up from those that are looked at."""
        first = next(iter(bound.values()))
        total = term.constant.to(first)
        for factor, part in term.sums:
            losses, which = known[id(part.samples)]
            weights = part.weights.to(first) if which is None else part.weights[which].to(first)
            total = total + factor * len(part.samples) / len(weights) * (weights @ losses)
        for factor, function in term.functions:
            total = total + factor * function.fn(bound)
        return total

    @staticmethod
    def _losses(samples: Any, indices: Any, bound: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        which = indices.get(samples) if isinstance(indices, Mapping) else indices
        which = None if which is None else torch.as_tensor(which).cpu()
        device = next(iter(bound.values())).device
        return torch.cat([samples.loss(bound, batch) for _, batch in samples.batches(which, device=device)]), which


def solution_of(
    problem: dif.Problem,
    params: Params,
    cmp: cooper.ConstrainedMinimizationProblem,
    *,
    signs: Mapping[str, float] | None = None,
) -> dif.Solution:
    """Where Cooper ended, as a Solution: the multipliers of `cmp` by the names of the problem's constraints.

    Args:
        problem: Its constraints are named as the attributes of `cmp`: (a <= b).named("fair") for cmp.fair.
        params: What was trained.
        cmp: Yours, or `Constrained`.
        signs: Factors for constraints whose violation `cmp` measures otherwise: −1 for an equality written the other
            way round, s where it is s times as large (λ of dif is s times λ of Cooper).

    Returns:
        Not polished: `solution.kkt` tells how far it is from a solution, `dif.fit(problem, params,
        multipliers=solution.lam)` goes the rest of the way.
    """
    found = dict(cmp.named_multipliers())
    unknown = [name for name in signs or {} if name not in problem.names]
    if unknown:
        raise InvalidInputError(
            "signs",
            measured=", ".join(map(repr, unknown)),
            threshold=f"names of constraints: {', '.join(problem.names)}",
            meaning="No constraint of the problem has such a name.",
            cure="Use the names of the dif.Problem's constraints.",
        )
    missing = [name for name in problem.names if name not in found]
    if missing:
        raise InvalidInputError(
            "multipliers of the Cooper problem",
            measured=f"none for {', '.join(missing)}; there are {', '.join(found) or 'none'}",
            threshold="one for each constraint of the problem",
            meaning="Multipliers are taken over by name.",
            cure="Name the constraints of the dif.Problem like the attributes of the Cooper problem: .named('fair').",
        )
    lam = []
    for name, constraint in zip(problem.names, problem.constraints, strict=True):
        weight = getattr(found[name], "weight", None)
        if weight is None:
            raise InvalidInputError(
                f"multiplier of {name!r}",
                measured=type(found[name]).__name__,
                threshold="a DenseMultiplier or an IndexedMultiplier",
                meaning="An implicit multiplier has no value of its own for each row.",
                cure="Leave the multipliers to dif: dif.Solution(problem, params) finds those nearest to stationarity.",
            )
        rows = _rows(constraint, params)
        if weight.numel() != rows:
            raise InvalidInputError(
                f"multiplier of {name!r}",
                measured=f"{weight.numel()} values",
                threshold=f"{rows}, one per row of the constraint",
                meaning="Every row of every constraint has one multiplier.",
                cure="State the constraint in dif with the rows that Cooper has.",
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
    """Train by mini-batches: Adam on θ, ascent on λ, rates that fall to zero; the point it ends at, as it is.

    Args:
        problem: What is trained.
        params: The start; not changed.
        epochs: Passes over the data.
        batch_size: Samples per mini-batch.
        rate: Of Adam.
        dual_rate: Of the ascent on the multipliers; too large, λ swings without end.
        optimizer: Cooper's class that rolls both (one that does with torch's own optimisers).
        seed: Of the order of the samples.
    """
    if min(epochs, batch_size) < 1:
        raise InvalidInputError(
            "training",
            measured=f"epochs={epochs}, batch_size={batch_size}",
            threshold="both at least 1",
            meaning="Nothing would be trained.",
            cure="Leave them out for the defaults.",
        )
    nothing = [torch.zeros(_rows(constraint, params)) for constraint in problem.constraints]
    dif.Solution(problem, params, nothing)  # refuses losses and data that cannot be trained, before any training
    model = _copied(params)
    cmp = Constrained(problem, model)
    primal = torch.optim.Adam(_tensors(model).values(), lr=rate)
    dual = torch.optim.SGD(
        list(cmp.dual_parameters()) or [torch.zeros(1, requires_grad=True)], lr=dual_rate, maximize=True
    )
    together = optimizer(cmp=cmp, primal_optimizers=primal, dual_optimizers=dual)
    falling = [torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=epochs) for one in (primal, dual)]
    generator = torch.Generator().manual_seed(seed)
    steps = max((-(-len(samples) // batch_size) for samples in problem.samples), default=1)
    for _ in range(epochs):
        orders = {samples: torch.randperm(len(samples), generator=generator) for samples in problem.samples}
        for step in range(steps):
            indices = {samples: _turn(order, step, batch_size) for samples, order in orders.items()}
            together.roll(compute_cmp_state_kwargs={"indices": indices})
        for schedule in falling:
            schedule.step()
    return solution_of(problem, model, cmp)


def _rows(constraint: dif.Constraint, params: Params) -> int:
    """How many it has: sums over samples are numbers, functions may be vectors."""
    with torch.no_grad():
        parts = [function.fn(_bound(params)) for _, function in constraint.term.functions]
    return max(part.numel() for part in (constraint.tau, *parts))


def _turn(order: Tensor, step: int, batch_size: int) -> Tensor:
    """Batch number `step` of an order, from its beginning again where it ends."""
    size = min(batch_size, len(order))
    return order[torch.arange(step * size, (step + 1) * size) % len(order)]


def _tensors(params: Params) -> dict[str, Tensor]:
    if isinstance(params, nn.Module):
        return {name: t for name, t in params.named_parameters() if t.requires_grad}
    return params


def _bound(params: Params) -> dict[str, Tensor]:
    """What a loss gets as its first argument, with the tensors themselves in it."""
    if not isinstance(params, nn.Module):
        return params
    bound = dif.variable(params, list(_tensors(params)))
    bound.update(_tensors(params))
    return bound


def _copied(params: Params) -> Params:
    if isinstance(params, nn.Module):
        return deepcopy(params)
    return {name: t.detach().clone().requires_grad_() for name, t in params.items()}
