"""A step that the user has written, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.program import Program
from dif.derivatives.step import Batch, State, WeightGradients, Weights, default_weights
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.structure import leaves, map_tensors
from dif.runtime.user_code import convert_errors, is_unsupported

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 0.1}  # relative error of a derivative against differences


@dataclass(frozen=True, eq=False)
class UserStep:
    """Steps given by a function of the state, the batch and the weights; implements `Step`.

    The targets depend on the params in a state: `state["params"]` if that is a dict, else its tensors.
    """

    function: Callable[[Any, Any, Any], Any]
    program: Program
    problem: None = None

    def advance(self, t: int, state: State, batch: Batch, weights: Weights | None = None) -> State:
        """Return the state after step t."""
        with torch.enable_grad():  # the step may call torch.autograd.grad
            after = self._call(_track(state), batch, _per_table(self._weights(batch, weights), batch))
        return map_tensors(after, torch.Tensor.detach)

    def observe(self, t: int, state: State, batch: Batch) -> tuple[State, None]:
        """Return the state after step t; there is nothing else to record."""
        return self.advance(t, state, batch), None

    def advance_many(self, t: int, states: State, batch: Batch, weights: Weights) -> State:
        """Return the states after step t: by one call that is mapped over them, or one by one."""
        if not self.is_mappable(batch, map_tensors(states, lambda x: x[0])):
            each = [map_tensors(states, lambda x, p=p: x[p]) for p in range(len(weights.dtau))]
            return stack([self.advance(t, state, batch, _row(weights, p)) for p, state in enumerate(each)])
        return self._map(states, batch, weights)

    def read_point(self, state: State) -> tuple[Tensor, Tensor]:
        """Return the params as θ, and no multipliers."""
        theta = flatten_params(state, self.program.parameters)
        return theta, theta.new_zeros((*theta.shape[:-1], 0))

    def make_adjoint(self, Q: Tensor, state: State) -> State:
        """Return the adjoints of a state for targets with gradients Q in θ, (T, d)."""
        zeros = map_tensors(state, lambda x: torch.zeros((len(Q), *x.shape), dtype=Q.dtype, device=Q.device))
        rows = [self.program.parameters.tensors(q) for q in Q]
        select_params(zeros).update({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        return zeros

    # Derivatives, by autograd alone, so that the step may use it, too

    def pull_back(
        self, t: int, state: State, after: State, batch: Batch, adjoint: State
    ) -> tuple[State, WeightGradients]:
        """Return the adjoints of the state before step t, and of its weights, for T adjoints of the state after it."""
        before, weights, then = self._trace(state, batch)
        inputs, outputs, weighing = _variables(before) + weights, _variables(then), leaves(adjoint)
        T = len(weighing[0])
        weighing = [w for w, x in zip(weighing, leaves(then), strict=True) if x.requires_grad]
        found = [_pull(outputs, inputs, [w[k] for w in weighing]) for k in range(T)]
        columns = iter([torch.stack(column) for column in zip(*found, strict=True)])
        like = weights[0]
        back = map_tensors(before, lambda x: next(columns) if x.requires_grad else like.new_zeros((T, *x.shape)))
        by_a = tuple(next(columns)[:, None, None] for _ in weights)
        zero = tuple(torch.zeros_like(a) for a in by_a)
        return back, WeightGradients(by_a, zero, like.new_zeros((T, 0)))

    def push_forward(self, t: int, state: State, batch: Batch, tangent: State, dweights: Weights) -> State:
        """Return the tangent of the state after step t: the derivative of Jᵀu in u is J."""
        before, weights, then = self._trace(state, batch)
        inputs, outputs = _variables(before) + weights, _variables(then)
        along = [v for v, x in zip(leaves(tangent), leaves(before), strict=True) if x.requires_grad]
        along += [a[0, 0] for a in dweights.a]
        u = [torch.zeros_like(x).requires_grad_() for x in outputs]
        columns = _pull(outputs, inputs, u, create_graph=True)
        moved = iter(_pull(columns, u, along))
        return map_tensors(then, lambda x: next(moved) if x.requires_grad else torch.zeros_like(x))

    def _trace(self, state: State, batch: Batch) -> tuple[State, list[Tensor], State]:
        """Return the state before a step and its weights, both tracked by autograd, and the state after it."""
        before, weights = _track(state), [w.detach().requires_grad_() for w in self._weights(batch, None)]
        with torch.enable_grad():
            return before, weights, self._call(before, batch, _per_table(weights, batch))

    def _weights(self, batch: Batch, weights: Weights | None) -> list[Tensor]:
        """Return the weights of each part of the batch, (B,)."""
        return [a[0, 0] for a in (default_weights(self.program, batch) if weights is None else weights).a]

    def _call(self, state: State, batch: Batch, weights: list[Tensor]) -> State:
        """Call the user's function and check that the state keeps its layout."""
        numbers = range(len(self.program.rows.tables))
        data = tuple(_join([part.data for part in batch if part.table == number]) for number in numbers)
        copied = map_tensors(state, lambda x: x)  # new containers: the step may write into them
        with convert_errors("step"):
            after = self.function(copied, *((data[0], weights[0]) if len(data) == 1 else (data, tuple(weights))))
        old, new = describe_state(state), describe_state(after)
        if old != new:
            changed = next(name for name in (*old, *new) if old.get(name) != new.get(name))
            raise InvalidInputError(
                f"The step returned {new.get(changed, 'nothing')} for the state's {changed}, which was "
                f"{old.get(changed, 'not there')}.",
                "The state must keep its names, shapes and types.",
                "Each step takes the state that the one before it returned.",
                "Return all parts of the state, with the shapes and types that the start has.",
            )
        return _reorder(after, state)

    def _map(self, states: State, batch: Batch, weights: Weights) -> State:
        """Return the states after a step by one call that is mapped over them."""

        def advance(state: State, a: tuple[Tensor, ...]) -> State:
            return self._call(state, batch, _per_table([x[0, 0] for x in a], batch))

        return map_tensors(torch.vmap(advance)(states, weights.a), torch.Tensor.detach)

    def is_mappable(self, batch: Batch, state: State) -> bool:
        """Return whether torch can map the step over states and weights; found out once."""
        if "mappable" not in self._known:
            a = tuple(x.expand(2, *x.shape) for x in default_weights(self.program, batch).a)
            twice = map_tensors(state, lambda x: x.expand(2, *x.shape))
            try:
                found = self._map(twice, batch, Weights(a, a, self.program.tau.new_zeros((2, 0))))
                one = self.advance(0, state, batch)
                self._known["mappable"] = all(
                    bool(torch.isclose(x[1].double(), y.double(), rtol=1e-3, atol=1e-4, equal_nan=True).all())
                    for x, y in zip(leaves(found), leaves(one), strict=True)
                )
            except Exception as error:
                if not is_unsupported(error):
                    raise
                self._known["mappable"] = False
        return self._known["mappable"]

    @cached_property
    def _known(self) -> dict[str, bool]:
        """What was found out about the step."""
        return {}


def select_params(state: State) -> dict[str, Tensor]:
    """Return the params in a state: its entry "params" if that is a dict, else its own floating-point tensors."""
    inner = state.get("params")
    if isinstance(inner, dict):
        return inner
    return state


def flatten_params(state: State, parameters: Parameters) -> Tensor:
    """Return the params in a state as θ, (d,); leading dimensions stay."""
    tensors = select_params(state)
    named = [(tensors[name], len(shape)) for name, shape in zip(parameters.names, parameters.shapes, strict=True)]
    return torch.cat([x.reshape(*x.shape[: x.ndim - dims], -1) for x, dims in named], -1)


def check_step(step: UserStep, state: State, batch: Batch) -> None:
    """Refuse a step that is random, ignores its weights, or whose derivative is not that of its values."""
    once, tables = check_repeats(step, state, batch), default_weights(step.program, batch)
    generator = torch.Generator().manual_seed(0)
    draw = lambda x: torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x) - 0.5  # noqa: E731
    dweights = Weights(tuple(draw(a) for a in tables.a), tables.b, tables.dtau)
    moved = tuple(a + 0.5 * da for a, da in zip(tables.a, dweights.a, strict=True))
    other = step.advance(0, state, batch, Weights(moved, tables.b, tables.dtau))
    if all(torch.equal(x, y) for x, y in zip(leaves(other), leaves(once), strict=True)):
        raise InvalidInputError(
            "The state after the first step is the same for other weights of its samples.",
            "The step must multiply the loss of each sample by its weight.",
            "A sample is removed by setting its weight to 0, so no removal would change anything.",
            "Write (weights * losses).sum() / weights.sum() instead of losses.mean().",
        )
    check_derivative(step, 0, state, batch)


def check_repeats(step: UserStep, state: State, batch: Batch) -> State:
    """Return the state after a step; refuse a step that is random, or that counts its calls."""
    once, again = (step.advance(0, state, batch) for _ in range(2))
    pairs = [
        (x.double().nan_to_num(), y.double().nan_to_num()) for x, y in zip(leaves(once), leaves(again), strict=True)
    ]
    gap = max(float((x - y).abs().amax()) for x, y in pairs if x.numel())
    if gap > 0:
        raise InvalidInputError(
            f"Two calls of the step with the same state and batch differ by up to {gap:.3g}.",
            "They must return the same state.",
            "It is random (dropout, augmentation, sampling), so rerunning it without a sample would show the noise.",
            "Switch the randomness off, or draw it beforehand and look it up by the number of the sample.",
        )
    return once


def check_derivative(step: UserStep, t: int, state: State, batch: Batch) -> None:
    """Refuse a step whose derivative in the state and in the weights is not that of its values."""
    tables, generator = default_weights(step.program, batch), torch.Generator().manual_seed(t)
    draw = lambda x: torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x) - 0.5  # noqa: E731
    still = map_tensors(state, torch.zeros_like)
    # in proportion, so that averages of squares stay positive
    moving = map_tensors(state, lambda x: draw(x) * x if x.is_floating_point() else torch.zeros_like(x))
    drawn = tuple(draw(a) for a in tables.a)
    tolerance = _TOLERANCE[tables.a[0].dtype]
    for what, tangent, da in (
        ("the weights of its samples", still, drawn),
        ("its state", moving, tuple(map(torch.zeros_like, drawn))),
    ):
        error, size = _compare_with_differences(step, t, state, batch, tangent, Weights(da, tables.b, tables.dtau))
        if error > tolerance * size:
            raise InvalidInputError(
                f"The derivative of step {t + 1} in {what} is off by {error / size:.2g} of its size.",
                f"It may differ from differences of the step's values by at most {tolerance:g}.",
                "Something inside the step is cut off from autograd, so that influence through it would be wrong.",
                "Use torch.func.grad, or torch.autograd.grad with create_graph=True; no .detach(), .item(), no_grad.",
            )


def _compare_with_differences(
    step: UserStep, t: int, state: State, batch: Batch, tangent: State, dweights: Weights
) -> tuple[float, float]:
    """Return how far a directional derivative is from differences to both sides, and the size of the differences.

    Where the sides differ, at a kink such as a projection, the nearer one counts.
    """
    tables = default_weights(step.program, batch)
    h = torch.finfo(tables.a[0].dtype).eps ** (1 / 3)

    def at(h: float) -> list[Tensor]:
        along = iter(leaves(tangent))
        point = map_tensors(state, lambda x: x + h * next(along) if x.is_floating_point() else (next(along), x)[1])
        a = tuple(a + h * da for a, da in zip(tables.a, dweights.a, strict=True))
        return [x.double() for x in leaves(step.advance(t, point, batch, Weights(a, tables.b, tables.dtau)))]

    below, here, above = at(-h), at(0.0), at(h)
    slopes = [x.double() for x in leaves(step.push_forward(t, state, batch, tangent, dweights))]
    error = size = 0.0
    for low, mid, high, slope in zip(below, here, above, slopes, strict=True):
        sides = torch.stack([(high - low) / (2 * h), (high - mid) / h, (mid - low) / h])
        error += float((sides - slope).abs().amin(0).square().sum())
        size += float(sides[0].square().sum())
    return error**0.5, size**0.5


def describe_state(state: Any, name: str = "") -> dict[str, str]:
    """Return the type and shape of every tensor of a state, by name."""
    if isinstance(state, Mapping):
        parts = [(f"{name}[{key!r}]", value) for key, value in state.items()]
    elif isinstance(state, tuple | list):
        parts = [(f"{name}[{k}]", value) for k, value in enumerate(state)]
    elif isinstance(state, Tensor):
        return {name: f"{str(state.dtype).removeprefix('torch.')}{list(state.shape)}"}
    else:
        return {name: f"an object of type {type(state).__name__}"}
    return {key: text for part in parts for key, text in describe_state(part[1], part[0]).items()}


def stack(states: Sequence[State]) -> State:
    """Stack states along a new first dimension."""
    columns = iter([torch.stack(column) for column in zip(*map(leaves, states), strict=True)])
    return map_tensors(states[0], lambda x: next(columns))


def _track(state: State) -> State:
    """Return the state with floating-point tensors that autograd tracks."""
    return map_tensors(state, lambda x: x.detach().requires_grad_() if x.is_floating_point() else x)


def _variables(state: State) -> list[Tensor]:
    return [x for x in leaves(state) if x.requires_grad]


def _pull(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weighing: Sequence[Tensor], create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Return Jᵀ·weighing; 0 where an input does not matter."""
    tracked = [(x, w) for x, w in zip(outputs, weighing, strict=True) if x.requires_grad]
    if not tracked:
        return tuple(torch.zeros_like(x) for x in inputs)
    outs, along = zip(*tracked, strict=True)
    return torch.autograd.grad(
        outs, inputs, along, retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def _per_table(weights: Sequence[Tensor], batch: Batch) -> list[Tensor]:
    """Join the weights of the parts of each table."""
    tables = 1 + max(part.table for part in batch)
    return [torch.cat([w for w, part in zip(weights, batch, strict=True) if part.table == k]) for k in range(tables)]


def _join(parts: Sequence[Any]) -> Any:
    """Join batches of the same structure along their first dimension."""
    columns = iter([torch.cat(column) for column in zip(*map(leaves, parts), strict=True)])
    return parts[0] if len(parts) == 1 else map_tensors(parts[0], lambda x: next(columns))


def _reorder(state: Any, like: Any) -> Any:
    """Return a state with the entries of its dicts in the order of another one."""
    if isinstance(like, Mapping):
        return {key: _reorder(state[key], value) for key, value in like.items()}
    if isinstance(like, tuple | list):
        parts = [_reorder(*pair) for pair in zip(state, like, strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
    return state


def _row(weights: Weights, p: int) -> Weights:
    return Weights(tuple(a[p] for a in weights.a), tuple(b[p] for b in weights.b), weights.dtau[p])
