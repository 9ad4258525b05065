"""Training by a step that the user has written, recorded and differentiated by autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dif.derivatives.checks import difference
from dif.derivatives.program import Program
from dif.errors import InvalidInputError
from dif.problem.data import leaves, map_tensors
from dif.problem.parameters import BoundModule, Parameters
from dif.problem.problem import Problem
from dif.problem.samples import Samples
from dif.problem.term import Term
from dif.runtime.guard import convert_errors, is_unsupported, numbers_at_once
from dif.runtime.inputs import as_tensor, check_list
from dif.training.run import Keep, Loop, Run, carry_out
from dif.training.step import VECTORS, Batch, Moves, Pulled, Seen, State, Weights, combine, default_weights

_LAYERS = 64  # of the size of the batch that a step is assumed to need, since it cannot be measured
_EXACT_BATCH = 64  # samples in a batch up to which the step is repeated without each; beyond, its derivative counts
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 0.1}  # relative error of a derivative against differences


@dataclass(frozen=True, eq=False)
class UserStep:
    """Steps given by a function of the state, the batch and the weights; implements `Step`.

    The targets depend on the params in a state: `state["params"]` if that is a dict, else its tensors.
    """

    function: Callable[[Any, Any, Any], Any]
    program: Program  # its losses know the function
    _mappable: list[bool] = field(default_factory=list)  # empty until it is known

    def advance(self, t: int, state: State, batch: Batch) -> tuple[State, Seen]:
        """Return the state after step t; there is nothing else to record."""
        return self.carry_out(state, batch, default_weights(self.program, batch).a), {}

    def carry_out(self, state: State, batch: Batch, a: Sequence[Tensor]) -> State:
        """Return the state after a step with weights a of each part of the batch."""
        with torch.enable_grad():  # the step may call torch.autograd.grad
            after = self._call(_track(state), batch, a)
        return map_tensors(after, torch.Tensor.detach)

    def advance_many(self, t: int, states: State, batch: Batch, weights: Weights) -> State:
        """Return the states after step t: by one call that is mapped over them if torch can do that, or one by one."""

        def advance_one(p: int) -> State:
            return self.carry_out(map_tensors(states, lambda x: x[p]), batch, [a[p] for a in weights.a])

        if self._mappable != [False]:
            try:
                after = torch.vmap(lambda state, a: self._call(state, batch, a))(states, weights.a)
            except Exception as error:
                if self._mappable or not is_unsupported(error):
                    raise
                self._mappable.append(False)
            else:
                if not self._mappable:
                    pair = _join_leaves(map_tensors(after, lambda x: x[-1])), _join_leaves(advance_one(-1))
                    self._mappable.append(torch.allclose(*pair, 1e-3, 1e-4, equal_nan=True))
                if self._mappable[0]:
                    return map_tensors(after, torch.Tensor.detach)
        return combine(lambda *x: torch.stack(x), *map(advance_one, range(len(weights.a[0]))))

    def memory(self, state: State, batch: Batch) -> int:
        """Return how many numbers a step needs for one more state."""
        batches = sum(x.numel() for part in batch for x in leaves(part.data))
        return VECTORS * sum(x.numel() for x in leaves(state)) + _LAYERS * batches

    def read_point(self, state: State) -> tuple[Tensor, Tensor]:
        """Return the params as θ, and no multipliers."""
        theta = flatten_params(state, self.program.parameters)
        return theta, theta.new_zeros((*theta.shape[:-1], 0))

    def make_adjoint(self, Q: Tensor, state: State) -> State:
        """Return the adjoints of a state for targets with gradients Q in θ, (T, d)."""
        zeros = map_tensors(state, lambda x: torch.zeros((len(Q), *x.shape), dtype=Q.dtype, device=Q.device))
        select_params(zeros).update(torch.vmap(self.program.parameters.tensors)(Q))
        return zeros

    # Derivatives, by autograd alone, so that the step may use it, too

    def pull_back(
        self, t: int, state: State, after: State, batch: Batch, adjoint: State, moves: Moves
    ) -> tuple[State, Pulled]:
        """Return the adjoints of the state before step t, for T of the state after it, and what `effects` needs.

        That is all of the effects, (Q, T, 1).
        """
        before, weights, then = self._trace(state, batch)
        inputs, outputs, weighing = _variables(before) + weights, _variables(then), leaves(adjoint)
        T = len(weighing[0])
        along = [w for w, x in zip(weighing, leaves(then), strict=True) if x.requires_grad]
        found = [_pull(outputs, inputs, [w[k] for w in along]) for k in range(T)]
        columns = iter([torch.stack(column) for column in zip(*found, strict=True)])
        total = weights[0].new_zeros((len(moves.owners), T))
        back = map_tensors(before, lambda x: next(columns) if x.requires_grad else total.new_zeros((T, *x.shape)))
        for slope, moved in zip(columns, moves.parts, strict=True):
            owner, place = moved.owner.to(total.device), moved.place.to(total.device)
            total.index_add_(0, owner, slope[:, 0, 0, place].T * moved.da[:, 0])
        for which, changes in self._change_exactly(t, state, batch, moves):
            pairs = zip(leaves(changes), weighing, strict=True)
            total[which] = sum(dx.reshape(len(dx), -1).to(w) @ w.reshape(T, -1).T for dx, w in pairs)  # type: ignore[arg-type]
        return back, (total[:, :, None],)

    def effects(self, t: int, batch: Batch, pulled: Pulled, moves: Moves) -> Tensor:
        """Return by how much perturbations change the targets, (Q, T, 1)."""
        return pulled[0]

    def push_forward(self, t: int, state: State, batch: Batch, tangent: State, moves: Moves) -> State:
        """Return how the state after step t changes with the state before it and under a perturbation."""
        start, exact = default_weights(self.program, batch), list(self._change_exactly(t, state, batch, moves))
        if exact:
            pushed = self.differentiate(state, batch, tangent, [torch.zeros_like(a) for a in start.a])
            return combine(lambda x, dx: x + dx[0], pushed, exact[0][1])
        after = moves.carry_out(start, torch.arange(len(moves.owners)), 1)
        return self.differentiate(state, batch, tangent, [y[0] - x for x, y in zip(start.a, after.a, strict=True)])

    def differentiate(self, state: State, batch: Batch, tangent: State, da: Sequence[Tensor]) -> State:
        """Return the derivative of the state after a step along changes of the state before it and of the weights.

        It is linear in them: the derivative of Jᵀu in u is J.
        """
        before, weights, then = self._trace(state, batch)
        inputs, outputs = _variables(before) + weights, _variables(then)
        along = [v for v, x in zip(leaves(tangent), leaves(before), strict=True) if x.requires_grad]
        along += da
        u = [torch.zeros_like(x).requires_grad_() for x in outputs]
        columns = _pull(outputs, inputs, u, create_graph=True)
        moved = iter(_pull(columns, u, along))
        return map_tensors(then, lambda x: next(moved) if x.requires_grad else torch.zeros_like(x))

    def _change_exactly(self, t: int, state: State, batch: Batch, moves: Moves) -> Iterator[tuple[Tensor, State]]:
        """Yield exact moves, (q,), and by how much they change the state after a step, (q, …), where batches are small.

        They are as many at once as fit into memory.
        """
        which = torch.nonzero(moves.exact).reshape(-1)
        if len(which) == 0 or sum(len(part.index) for part in batch if not part.extra) > _EXACT_BATCH:
            return
        start, Q = default_weights(self.program, batch), len(moves.owners)
        weights = moves.carry_out(start, torch.arange(Q), Q)
        like = weights.dtau
        for some in which.split(max(1, numbers_at_once(like) // self.memory(state, batch))):
            a = tuple(torch.cat([x[None], y[some.to(y.device)]]) for x, y in zip(start.a, weights.a, strict=True))
            P = len(some) + 1  # and the step as it is
            states = map_tensors(state, lambda x, P=P: x.expand(P, *x.shape))
            after = self.advance_many(t, states, batch, replace(start, a=a))
            yield some, map_tensors(after, lambda x: x[1:] - x[:1])

    def _trace(self, state: State, batch: Batch) -> tuple[State, list[Tensor], State]:
        """Return the state before a step and its weights, both tracked by autograd, and the state after it."""
        before, a = _track(state), [x.requires_grad_() for x in default_weights(self.program, batch).a]
        with torch.enable_grad():
            return before, a, self._call(before, batch, a)

    def _call(self, state: State, batch: Batch, a: Sequence[Tensor]) -> State:
        """Call the user's function and check that the state keeps its layout."""
        each = []  # data and weights of each table
        for k in range(len(self.program.rows.tables)):
            parts = [(part.data, x[0, 0]) for part, x in zip(batch, a, strict=True) if part.table == k]
            each.append(parts[0] if len(parts) == 1 else combine(lambda *x: torch.cat(x), *parts))
        copied = map_tensors(state, lambda x: x)  # new containers: the step may write into them
        with convert_errors("step"):
            after = self.function(copied, *(each[0] if len(each) == 1 else zip(*each, strict=True)))
        old, new = describe_state(state), describe_state(after)
        if old != new:
            changed = next(name for name in (*old, *new) if old.get(name) != new.get(name))
            raise InvalidInputError(
                f"`step` must return a state with the names, shapes and types of the start, not "
                f"{new.get(changed, 'nothing')} for {changed}, which was {old.get(changed, 'not there')}."
            )
        tensors = dict(zip(new, leaves(after), strict=True))
        each = iter([tensors[name] for name in old])  # dicts may have their entries in another order
        return map_tensors(state, lambda _: next(each))


def select_params(state: State) -> dict[str, Tensor]:
    """Return the params in a state: its entry "params" if that is a dict, else its own floating-point tensors."""
    inner = state.get("params")
    return inner if isinstance(inner, dict) else state


def flatten_params(state: State, parameters: Parameters) -> Tensor:
    """Return the params in a state as θ, (d,); leading dimensions stay."""
    tensors = select_params(state)
    named = [(tensors[name], len(shape)) for name, shape in zip(parameters.names, parameters.shapes, strict=True)]
    return torch.cat([x.reshape(*x.shape[: x.ndim - dims], -1) for x, dims in named], -1)


def check_step(step: UserStep, t: int, state: State, batch: Batch) -> None:
    """Refuse a step that is random, ignores its weights, or whose derivative is not that of its values."""
    a = default_weights(step.program, batch).a
    once, again = (_join_leaves(step.carry_out(state, batch, a)) for _ in range(2))
    gap = float((once.nan_to_num() - again.nan_to_num()).abs().max())
    if gap > 0:
        raise InvalidInputError(
            f"Two calls of the step with the same state and batch differ by up to {gap:.3g}.",
            "They must return the same state.",
            "It is random (dropout, augmentation, sampling), so rerunning it without a sample would show the noise.",
            "Switch the randomness off, or draw it beforehand and look it up by the number of the sample.",
        )
    generator = torch.Generator().manual_seed(t)
    draw = lambda x: torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x) - 0.5  # noqa: E731
    still = map_tensors(state, torch.zeros_like)
    # in proportion, so that averages of squares stay positive
    moving = map_tensors(state, lambda x: draw(x) * x if x.is_floating_point() else torch.zeros_like(x))
    drawn = [draw(x) for x in a]
    other = _join_leaves(step.carry_out(state, batch, _shift(a, drawn, 0.5)))
    if t == 0 and torch.equal(other, once):
        raise InvalidInputError(
            "`step` must multiply the loss of each sample by its weight, but returns the same state for other weights; "
            "write (weights * losses).sum() / weights.sum() instead of losses.mean()."
        )
    tolerance = _TOLERANCE[drawn[0].dtype]
    for what, tangent, da in (
        ("the weights of its samples", still, drawn),
        ("its state", moving, [torch.zeros_like(x) for x in a]),
    ):
        error, size = _compare_with_differences(step, state, batch, tangent, da)
        if error > tolerance * size:
            raise InvalidInputError(
                f"The derivative of step {t + 1} in {what} is off by {error / size:.2g} of its size.",
                f"It may differ from differences of the step's values by at most {tolerance:g}.",
                "Something inside the step is cut off from autograd, so that influence through it would be wrong.",
                "Use torch.func.grad, or torch.autograd.grad with create_graph=True; no .detach(), .item(), no_grad.",
            )


def _compare_with_differences(
    step: UserStep, state: State, batch: Batch, tangent: State, da: Sequence[Tensor]
) -> tuple[float, float]:
    """Return how far a directional derivative is from differences to both sides, and the size of the differences.

    Where the sides differ, at a kink such as a projection, anything between them is right.
    """
    a, h = default_weights(step.program, batch).a, torch.finfo(da[0].dtype).eps ** (1 / 3)

    def at(h: float) -> Tensor:
        point = combine(lambda x, dx: x + h * dx if x.is_floating_point() else x, state, tangent)
        return _join_leaves(step.carry_out(point, batch, _shift(a, da, h)))

    slopes = _join_leaves(step.differentiate(state, batch, tangent, da))
    expected, _, bend = difference(at, at(0.0), h)
    return float(((slopes - expected).abs() - 0.5 * bend).clamp(min=0).norm()), float(expected.norm())


def _join_leaves(state: State) -> Tensor:
    """Return all numbers of a state as one vector in double precision."""
    return torch.cat([x.double().reshape(-1) for x in leaves(state)])


def _shift(a: Sequence[Tensor], da: Sequence[Tensor], h: float) -> list[Tensor]:
    return [x + h * dx for x, dx in zip(a, da, strict=True)]


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


def unroll(
    step: Callable[[Any, Any, Any], Any], start: Mapping[str, Any], batches: Iterable[Any], *,
    samples: Samples | Sequence[Samples] | None = None, keep: Keep = None, show_progress: bool = True,
) -> Run:  # fmt: skip
    """Carry out a training whose steps you have written, for `UnrolledInfluence` and `Retraining`.

    Args:
        step: `step(state, batch, weights)` returns the next state. It is written with torch operations, multiplies the
            loss of each sample by its weight, (B,), which is 1 for all of them in the run itself. Alternating updates,
            extragradient, an augmented Lagrangian, or an optimiser of your own can be written like this. For influence,
            the step is repeated without a sample in batches of up to 64; in larger ones its derivative is used.
        start: The state before the first step: a dict of tensors, also nested, with the parameters, multipliers, and
            whatever the optimiser remembers. Targets depend on `state["params"]` if that is a dict of tensors, and
            otherwise on all tensors of the state. Of an `nn.Module` as "params" the step gets the named tensors, for
            `torch.func.functional_call(model, state["params"], x)`, and targets get what is called like the module.
        batches: For each step the numbers of its samples; the step gets them as `batch`.
        samples: The samples that are numbered: the step then gets their data as `batch`, and new samples can be added.
            With several Samples a batch is a tuple of numbers, one for each, and so are the data and the weights.
            Without it, `run.samples[0]` makes the perturbations.
        keep: As in `Training.run`.
        show_progress: Show progress on a terminal.

    Examples:
        >>> y = torch.tensor([1.0, 2.0, 6.0])
        >>> def step(state, batch, weights):
        ...     slope = (weights * (state["mean"] - y[batch])).sum() / weights.sum()
        ...     return {"mean": state["mean"] - 0.5 * slope}
        >>> run = unroll(step, {"mean": torch.zeros(())}, [[0, 1, 2]] * 20, show_progress=False)
        >>> run.state["mean"]
        tensor(3.0000)
    """
    try:
        inspect.signature(step).bind(None, None, None)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"`step` must be a function step(state, batch, weights) ({error}).") from error
    parameters, state = _check_start(start)
    several = isinstance(samples, Iterable)
    per_step = check_list(batches, "batches", "numbers of samples, one entry per step")
    split = [tuple(batch) if several and isinstance(batch, Iterable) else (batch,) for batch in per_step]
    numbers = [[as_tensor(part, f"batch {t}") for part in batch] for t, batch in enumerate(split)]
    named = _name_samples(samples, step, numbers)
    indices = tuple(_check_numbers(t, batch, named) for t, batch in enumerate(numbers))
    total = sum((s.sum() for s in named), Term())
    own = UserStep(step, Program.compile(Problem(total), parameters, flatten_params(state, parameters)))
    loop = Loop(own, indices, (range(len(indices)),), state)
    devices = [x.device for x in leaves(state) if x.is_cuda][:1]
    with torch.random.fork_rng(devices):
        check_step(own, 0, state, loop.batch(0))
    run = carry_out(loop, keep, show_progress)
    late = loop.length - 1
    with torch.random.fork_rng(devices):
        check_step(own, late, run.states[late], loop.batch(late))  # multipliers are at work by now
    return run


def _name_samples(samples: Any, step: Callable[[Any, Any, Any], Any], numbers: list[list[Tensor]]) -> list[Samples]:
    """Return what the batches number, with the step in place of a loss; without Samples, as many as the numbers say."""
    if samples is None:
        largest = max((int(x.max()) for (x,) in numbers if x.numel()), default=0)
        return [Samples(_Unstated(step), torch.arange(largest + 1))]
    given = list(samples) if isinstance(samples, Iterable) else [samples]
    if not given or not all(isinstance(s, Samples) for s in given):
        raise InvalidInputError(f"`samples` must be dif.Samples, one or several, not {samples!r}.")
    return [s.view(_Unstated(step), name=s.name) for s in given]


@dataclass(frozen=True)
class _Unstated:
    """Stands in for the loss of samples that only a step evaluates, so that perturbations of them can be resolved."""

    step: Callable[[Any, Any, Any], Any]

    def __call__(self, params: Any, batch: Any) -> Tensor:
        """Return zeros."""
        first = next(iter(params.values()))
        return (0 * first.sum()).expand(len(leaves(batch)[0]))


def _check_start(start: Any) -> tuple[Parameters, dict[str, Any]]:
    """Return the layout of the params and the start as tensors that do not change; refuse what has no derivative."""
    model = start.get("params") if isinstance(start, Mapping) else None
    parameters = None
    if isinstance(model, nn.Module | BoundModule):
        parameters, theta = Parameters.of(model)
        start = {**start, "params": parameters.tensors(theta)}
    found = describe_state(start) if isinstance(start, Mapping) else {"": f"an object of type {type(start).__name__}"}
    wrong = {name: text for name, text in found.items() if text.startswith(("float16", "bfloat16", "an object"))}
    kinds = {x.dtype for x in leaves(start) if x.is_floating_point()} if not wrong else set()
    if wrong or len(kinds) != 1:
        name, text = next(iter(wrong.items())) if wrong else ("", f"tensors of types {sorted(map(str, kinds))}")
        raise InvalidInputError(
            "`start` must be a dict of tensors, also nested, those with fractions all float64 or all float32; "
            f"{f'start{name}' if name else 'it'} {'is' if wrong else 'has'} {text}."
        )
    state = map_tensors(dict(start), lambda x: x.detach().clone())
    if parameters is None:
        tensors = {k: x for k, x in select_params(state).items() if isinstance(x, Tensor) and x.is_floating_point()}
        parameters, _ = Parameters.of(tensors)
    return parameters, state


def _check_numbers(t: int, found: list[Tensor], named: Sequence[Samples]) -> tuple[Tensor, ...]:
    """Return the numbers of the samples of step t."""
    whole = len(found) == len(named) and all(
        x.dtype in (torch.int32, torch.int64) and x.dim() == 1 and len(x) for x in found
    )
    if not whole or any(int(x.min()) < 0 or int(x.max()) >= len(s) for x, s in zip(found, named, strict=True)):
        described = " and ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in found)
        span = f" from {min(int(x.min()) for x in found)} to {max(int(x.max()) for x in found)}" if whole else ""
        raise InvalidInputError(
            f"Batch {t} must list numbers of samples from 0 to {' and '.join(str(len(s) - 1) for s in named)}, with "
            f"several Samples in a tuple, not {described}{span}."
        )
    return tuple(x.long().cpu() for x in found)
