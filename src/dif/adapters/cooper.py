"""Cooper: train a dif.Problem with Cooper's primal–dual optimisers, and read what Cooper has trained.

Mini-batch training ends near a solution, not at one. `Solution.kkt` measures the distance; `dif.fit` continues from it.
`unroll` carries out a Cooper loop as a run of dif, which influence through training can differentiate. Cooper's
Lagrangians detach the multipliers, so its steps are built anew from the loss and the violations of the problem.
"""
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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


class Constrained(cooper.ConstrainedMinimizationProblem):
    """A dif.Problem as a Cooper problem: loss and constraint violations, exact or estimated from a mini-batch.

    Args:
        problem: The problem. Its constraints keep their names, and λ has the same sign and scale in dif and Cooper.
        params: An nn.Module, or a dict of tensors that require gradients; trained in place by Cooper's optimisers.
        formulation: Cooper's formulation of every constraint.
        penalty: Function of the number of rows that builds the penalty coefficient, for formulations that need one
            (augmented Lagrangian).

    Examples:
        ```python
        cmp = Constrained(problem, model)
        optimizer = cooper.optim.SimultaneousOptimizer(
            cmp=cmp,
            primal_optimizers=torch.optim.Adam(model.parameters(), lr=1e-2),
            dual_optimizers=torch.optim.SGD(cmp.dual_parameters(), lr=1e-1, maximize=True),
        )
        for indices in loader:
            optimizer.roll(compute_cmp_state_kwargs={"indices": indices})
        ```
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
        first = next(iter(_trained_tensors(params).values()))
        kinds = {"==": cooper.ConstraintType.EQUALITY, "<=": cooper.ConstraintType.INEQUALITY}
        for name, constraint in zip(problem.names, problem.constraints, strict=True):
            rows, kind = _count_rows(constraint, params), kinds[constraint.kind.value]
            multiplier = cooper.multipliers.DenseMultiplier(rows, device=first.device, dtype=first.dtype)
            options = {} if penalty is None else {"penalty_coefficient": penalty(rows)}
            self._register_constraint(name, cooper.Constraint(kind, formulation, multiplier=multiplier, **options))

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
        values = torch.cat([samples.loss(arguments, batch) for _, batch in samples.batches(which, device=device)])
        if weights is None:
            return values, which, len(values)
        return weights[samples] * values, which, weights[samples].sum()


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
        raise InvalidInputError(f"`signs` must name constraints ({', '.join(problem.names)}), not {unknown[0]!r}.")
    missing = [name for name in problem.names if name not in multipliers]
    if missing:
        raise InvalidInputError(
            f"There are no multipliers for {', '.join(missing)}, only for {', '.join(multipliers) or 'no constraint'}; "
            "name the constraints of the dif.Problem after the attributes of the Cooper problem: .named('fair')."
        )
    lam = []
    for name, constraint in zip(problem.names, problem.constraints, strict=True):
        weight = getattr(multipliers[name], "weight", None)
        if weight is None:
            raise InvalidInputError(
                f"The multiplier of {name!r}, a {type(multipliers[name]).__name__}, stores no value for each row; use "
                "dif.Solution(problem, params), which finds multipliers."
            )
        rows = _count_rows(constraint, params)
        if weight.numel() != rows:
            raise InvalidInputError(f"The multiplier of {name!r} must have {rows} values, not {weight.numel()}.")
        lam.append(float((signs or {}).get(name, 1.0)) * weight.detach().reshape(-1).clone())
    return dif.Solution(problem, params, lam)


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
        kinds = ", ".join(kind.__name__ for kind in _SCHEMES)
        raise InvalidInputError(
            f"The optimiser must be one of {kinds}, not a {type(optimizer).__name__}; write other schemes as a step of "
            "your own, see dif.unroll."
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
            f"The multipliers of {', '.join(sorted(set(indexed)))} must be DenseMultipliers, without features."
        )
    if not isinstance(cmp, Constrained):
        if model is None:
            raise InvalidInputError(f"`model` must be the nn.Module that the {type(cmp).__name__} evaluates, not None.")
        inside = _Inside(model, cmp)

        def evaluate(params: dict[str, Tensor], batch: Any, weights: Any) -> cooper.CMPState:
            renamed = {f"model.{name}": tensor for name, tensor in params.items()}
            return torch.func.functional_call(inside, renamed, (batch, weights))

        return evaluate, _trained_tensors(model), samples
    params = _trained_tensors(cmp.params)
    populations = list(dict.fromkeys(s.population for s in cmp.problem.samples))
    numbered = [_number(s) for s in populations]

    def evaluate_stated(params: dict[str, Tensor], batch: Any, weights: Any) -> cooper.CMPState:
        batch, weights = ((batch,), (weights,)) if len(populations) == 1 else (batch, weights)
        each = {s: populations.index(s.population) for s in cmp.problem.samples}
        numbers, shares = ({s: part[k] for s, k in each.items()} for part in (batch, weights))
        return cmp.evaluate(_loss_arguments(cmp.params, params), numbers, shares)

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
            f"The problem does not depend on {', '.join(unused[:6])}; pass the model that it evaluates, and set "
            "requires_grad=False for what is not used."
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
                    f"The optimiser of the {part} must be a new SGD, Adam or AdamW of torch, without dampening and "
                    f"amsgrad, not a {type(optimizer).__name__}{' that has made steps' if optimizer.state else ''}."
                )
            own = {name: group[name] for name in options}
            moved = kind(**own, **({} if kind is dif.SGD else {"eps_root": eps_root}))  # type: ignore[misc]
            for tensor in group["params"]:
                if id(tensor) in names:
                    step.optimizers[part, names[id(tensor)]] = moved
                    start["memory"][part][names[id(tensor)]] = (tensor.new_zeros(()), *moved.start(tensor.detach()))


def _count_rows(constraint: dif.Constraint, params: Params) -> int:
    """Return the number of rows of a constraint: sums over samples are scalars, functions may be vectors."""
    with torch.no_grad():
        parts = [function.fn(_loss_arguments(params)) for _, function in constraint.term.functions]
    return max(part.numel() for part in (constraint.tau, *parts))


def _trained_tensors(params: Params) -> dict[str, Tensor]:
    """Return the tensors to train, by name."""
    if isinstance(params, nn.Module):
        return {name: t for name, t in params.named_parameters() if t.requires_grad}
    return params


def _loss_arguments(params: Params, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the first argument of a loss, containing these tensors, or those to train themselves."""
    if tensors is None:
        tensors = _trained_tensors(params)
    if not isinstance(params, nn.Module):
        return tensors
    arguments = dif.variable(params, list(tensors))
    arguments.update(tensors)
    return arguments
