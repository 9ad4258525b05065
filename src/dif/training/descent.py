"""One step of constrained training on a mini-batch, as a differentiable function, and its derivatives.

θ moves by the optimiser along ∇θL and λ by ascent along f − τ, both from the same point. Weights a and b of the samples
in the batch say who takes part: a mean is Σ a ℓ / Σ b over its members in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from dif.derivatives.losses import cost
from dif.derivatives.program import Program
from dif.errors import InvalidInputError
from dif.problem.data import leaves, map_tensors
from dif.problem.problem import Problem
from dif.runtime.inputs import check_number
from dif.training.step import VECTORS, Batch, Moves, Observation, Pulled, State, Weights

Memory = tuple[Tensor, ...]

_MEMBER = 1e-6  # members of a mean in a batch below which it counts as empty: they are counted with their weights


@runtime_checkable
class Optimizer(Protocol):
    """Updates θ from a gradient, coordinate by coordinate, with a memory of its own."""

    def start(self, theta: Tensor) -> Memory:
        """Return the memory before the first step."""
        ...

    def update(self, theta: Tensor, memory: Memory, g: Tensor, factor: float, step: int) -> tuple[Tensor, Memory]:
        """Return θ and the memory after step number `step` with gradient g; `factor` scales the learning rate."""
        ...

    def recover_gradient(self, theta: Tensor, memory: Memory, after: Memory) -> Tensor:
        """Return the gradient of a step from the memory before and after it (any, where the update is linear in it)."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Args:
        lr: Learning rate.
        momentum: Of the velocity; 0 for none.
        nesterov: Look ahead along the velocity.
        weight_decay: Adds weight_decay·θ to the gradient.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if not isinstance(self.nesterov, bool):
            raise InvalidInputError(f"`nesterov` must be True or False, not {self.nesterov!r}.")
        if self.nesterov and not self.momentum:
            raise InvalidInputError("`momentum` must be above 0 for Nesterov's method, which looks ahead along it.")

    def start(self, theta: Tensor) -> Memory:
        """Return a velocity of zero, or nothing without momentum."""
        return (torch.zeros_like(theta),) if self.momentum else ()

    def update(self, theta: Tensor, memory: Memory, g: Tensor, factor: float, step: int) -> tuple[Tensor, Memory]:
        """Return θ and the velocity after a step."""
        g = g + self.weight_decay * theta if self.weight_decay else g
        if not self.momentum:
            return theta - factor * self.lr * g, ()
        velocity = self.momentum * memory[0] + g
        move = g + self.momentum * velocity if self.nesterov else velocity
        return theta - factor * self.lr * move, (velocity,)

    def recover_gradient(self, theta: Tensor, memory: Memory, after: Memory) -> Tensor:
        """Return zero: the update is linear in the gradient, so its derivative does not depend on it."""
        return torch.zeros_like(theta)


@dataclass(frozen=True)
class Adam:
    """Adam, as `torch.optim.Adam`.

    Args:
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the root of the average square.
        weight_decay: Adds weight_decay·θ to the gradient.
        eps_root: Added inside the root. The root of an average square near 0 has an unbounded derivative, so that
            influence through training needs eps_root > 0 (1e-8, say). Coordinates with gradients below √eps_root then
            move less than with Adam as it is.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    eps_root: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise InvalidInputError(f"`betas` must be a pair of numbers such as (0.9, 0.999), not {self.betas!r}.")
        beta1, beta2 = self.betas
        _check_rates(lr=self.lr, weight_decay=self.weight_decay, eps=self.eps, eps_root=self.eps_root)
        _check_rates(beta1=beta1, beta2=beta2)

    def start(self, theta: Tensor) -> Memory:
        """Return averages of zero."""
        return torch.zeros_like(theta), torch.zeros_like(theta)

    def update(self, theta: Tensor, memory: Memory, g: Tensor, factor: float, step: int) -> tuple[Tensor, Memory]:
        """Return θ and the averages after a step."""
        return self._move(theta, memory, g + self.weight_decay * theta if self.weight_decay else g, factor, step)

    def _move(self, theta: Tensor, memory: Memory, g: Tensor, factor: float, step: int) -> tuple[Tensor, Memory]:
        (first, second), (beta1, beta2) = memory, self.betas
        first = first + (1 - beta1) * (g - first)
        second = beta2 * second + (1 - beta2) * g * g
        unbiased = second / (1 - beta2 ** (step + 1)) + self.eps_root
        move = first / (1 - beta1 ** (step + 1)) / (unbiased.sqrt() + self.eps)
        return theta - factor * self.lr * move, (first, second)

    def recover_gradient(self, theta: Tensor, memory: Memory, after: Memory) -> Tensor:
        """Return the gradient that took the first average from its value before to its value after."""
        return self._recover(memory, after) - self.weight_decay * theta

    def _recover(self, memory: Memory, after: Memory) -> Tensor:
        return memory[0] + (after[0] - memory[0]) / (1 - self.betas[0])


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`: θ shrinks by lr·weight_decay before each step.

    Args are those of `dif.Adam`.
    """

    weight_decay: float = 0.01

    def update(self, theta: Tensor, memory: Memory, g: Tensor, factor: float, step: int) -> tuple[Tensor, Memory]:
        """Return θ and the averages after a step."""
        return self._move((1 - factor * self.lr * self.weight_decay) * theta, memory, g, factor, step)

    def recover_gradient(self, theta: Tensor, memory: Memory, after: Memory) -> Tensor:
        """Return the gradient that took the first average from its value before to its value after."""
        return self._recover(memory, after)


@dataclass(frozen=True)
class Ascent:
    """Ascent on the multipliers: λ + lr·(f − τ), projected at 0 for inequalities.

    Args:
        lr: Learning rate.
    """

    lr: float

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr)


def is_optimizer(thing: Any) -> bool:
    """Return whether an object, not a class, is an optimiser."""
    return isinstance(thing, Optimizer) and not isinstance(thing, type)


def _check_rates(**rates: float) -> None:
    """Check that rates are numbers ≥ 0, and that decay rates are below 1."""
    for name, rate in rates.items():
        check_number(rate, name, zero=True)
        if name in ("momentum", "beta1", "beta2") and not rate < 1:
            raise InvalidInputError(f"`{name}` must be below 1, not {rate!r}; an average that keeps all never moves.")


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """The steps of descent on θ and ascent on λ, which implement `Step`."""

    program: Program
    optimizer: Optimizer
    dual: Ascent
    factors: tuple[float, ...]  # of the learning rate at each step

    def start(self, theta: Tensor, lam: Tensor) -> State:
        """Return the state before the first step."""
        return {"theta": theta, "lam": lam, "memory": self.optimizer.start(theta)}

    @property
    def problem(self) -> Problem:
        """What is minimised under which constraints."""
        return self.program.problem

    @property
    def settings(self) -> tuple[Optimizer, Ascent, tuple[float, ...]]:
        """What the steps depend on besides the program."""
        return self.optimizer, self.dual, self.factors

    def advance(self, t: int, state: State, batch: Batch, weights: Weights | None = None) -> State:
        """Return the state after step t."""
        return self._advance(t, state, batch, weights)[0]

    def observe(self, t: int, state: State, batch: Batch) -> tuple[State, Observation]:
        """Return the state after step t, and the objective, f − τ and λ before it."""
        after, objective, violations = self._advance(t, state, batch, None)
        return after, Observation(objective, violations, state["lam"])

    def _advance(self, t: int, state: State, batch: Batch, weights: Weights | None) -> tuple[State, Tensor, Tensor]:

        def lagrangian(theta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            f, violations = self._rows(theta, self._losses(theta, batch), batch, weights)
            return f[0] + state["lam"] @ violations, (f[0], violations)

        g, (objective, violations) = grad(lagrangian, has_aux=True)(state["theta"])
        theta, memory = self.optimizer.update(state["theta"], state["memory"], g, self.factors[t], t)
        lam = self.program.kinds.project(state["lam"] + self.dual.lr * violations)
        return {"theta": theta, "lam": lam, "memory": memory}, objective, violations

    def advance_many(self, t: int, states: State, batch: Batch, weights: Weights) -> State:
        """Return the states after step t, for P states and the weights of each, all with a first dimension P."""

        def advance(state: State, a: Any, b: Any, dtau: Tensor) -> State:
            return self.advance(t, state, batch, Weights(a, b, dtau))

        return vmap(advance)(states, weights.a, weights.b, weights.dtau)

    def memory(self, state: State, batch: Batch) -> int:
        """Return how many numbers a step needs for one more state."""
        each = [cost(part.samples, self.program.parameters, state["theta"]) for part in batch]
        losses = sum(len(part.index) * (x.inputs + 2 * x.elements) for part, x in zip(batch, each, strict=True))
        return VECTORS * sum(x.numel() for x in leaves(state)) + losses

    def read_point(self, state: State) -> tuple[Tensor, Tensor]:
        """Return θ and λ of a state."""
        return state["theta"], state["lam"]

    def make_adjoint(self, Q: Tensor, state: State) -> State:
        """Return the adjoints of a state for targets with gradients Q in θ, (T, d)."""
        zeros = map_tensors(state, lambda tensor: tensor.new_zeros((len(Q), *tensor.shape)))
        return {**zeros, "theta": Q}

    def _losses(self, theta: Tensor, batch: Batch) -> list[Tensor]:
        """Return the losses of each part of the batch at θ, (B,)."""
        parameters = self.program.parameters
        params = parameters.bind(parameters.tensors(theta))
        return [part.samples.losses(params, part.data, len(part.index)) for part in batch]

    def _rows(
        self, theta: Tensor, losses: Sequence[Tensor], batch: Batch, weights: Weights | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the rows f, (1 + m,), and f − τ of the constraints, (m,), 0 for those that are not present."""
        rows, (members, empty, present) = self.program.rows, self._count_members(batch, weights)
        if weights is None:
            parts = [0.0 if part.extra else part.U @ ell for part, ell in zip(batch, losses, strict=True)]
        else:
            parts = [((part.U * a) * ell).sum(-1) for part, a, ell in zip(batch, weights.a, losses, strict=True)]
        means = torch.where(empty, 0.0, self._add_up(batch, parts) / members)
        f, start = (rows.C[:, : len(rows.means)] * means).sum(1), len(rows.means)
        for function in rows.functions:
            value = function(theta).double().to(theta.dtype)  # in forward mode a scalar's tangent may be float64
            f = f + rows.C[:, start : start + function.size] @ value
            start += function.size
        tau = self.program.tau if weights is None else self.program.tau + weights.dtau
        return f, torch.where(present, f[1:] - tau, 0.0)

    def _count_members(self, batch: Batch, weights: Weights | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return what sums are divided by, which means have no members, and which constraints are present.

        The first two are (K,), with weights (1 + m, K), the last is (m,). A constraint is present unless one of its
        means has no members.
        """
        rows = self.program.rows
        if weights is None:
            parts = [0.0 if part.extra else part.U.sum(1) for part in batch]
        else:
            parts = [(part.U * b).sum(-1) for part, b in zip(batch, weights.b, strict=True)]
        members = self._add_up(batch, parts)
        empty = rows.means & (members == 0)
        present = ~(empty & (rows.C[:, : len(rows.means)] != 0)).any(1)[1:]
        return torch.where(rows.means & ~empty, members, 1.0), empty, present

    def _add_up(self, batch: Batch, sums: Sequence[Any]) -> Tensor:
        """Add up the sums of all parts of each table, (…, k), and join the tables, (…, K)."""
        pairs = [(part.table, values) for part, values in zip(batch, sums, strict=True)]
        tables = range(len(self.program.rows.tables))
        return torch.cat([sum(values for number, values in pairs if number == table) for table in tables], -1)  # type: ignore[arg-type]

    # Derivatives, and finite changes of the weights

    def push_forward(self, t: int, state: State, batch: Batch, tangent: State, moves: Moves) -> State:
        """Return how the state after step t changes with the state before it and under a perturbation."""
        theta, lam, memory = state["theta"], state["lam"], state["memory"]

        def lagrangian(theta: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
            f, violations = self._rows(theta, self._losses(theta, batch), batch)
            return f[0] + lam @ violations, violations

        def change(theta: Tensor) -> tuple[Tensor, Tensor]:
            losses = self._losses(theta, batch)
            rows = self._rows(theta, losses, batch)[0] - self._bounds
            moved = self._change_rows(batch, moves, [values[None] for values in losses], rows[None])[0, 0]
            return self.program.weights(lam) @ moved, moved[1:]

        like = lambda x: x.to(theta)  # noqa: E731  (in forward mode the tangent of a scalar may be float64)
        (g, violations), (dg, df) = map_tensors(
            jvp(grad(lagrangian, has_aux=True), (theta, lam), (tangent["theta"], tangent["lam"])), like
        )
        ahead = lam + self.dual.lr * violations
        passed = self.program.kinds.has_force(ahead) | ~self._count_members(batch)[2]
        dlam = torch.where(passed, tangent["lam"] + self.dual.lr * df, 0.0)
        if len(moves.owners):
            more, df = grad(change, has_aux=True)(theta)
            dg, dlam = dg + more, dlam + self._ascend(ahead, df, moves.exact)[0]
        update = lambda x, m, g: self.optimizer.update(x, m, g, self.factors[t], t)  # noqa: E731
        moved = jvp(update, (theta, memory, g), (tangent["theta"], tangent["memory"], dg))[1]
        return map_tensors({"theta": moved[0], "lam": dlam, "memory": moved[1]}, like)

    def pull_back(
        self, t: int, state: State, after: State, batch: Batch, adjoint: State, moves: Moves
    ) -> tuple[State, Pulled]:
        """Return the adjoints of the state before step t, for T of the state after it, and what `effects` needs.

        The derivative of ∇θL along (u, ν) in (θ, λ) is ∇²L·u + Gᵀν. It comes from one pass of forward over reverse
        mode for all targets, together with the slopes ∇ℓᵢ·u of the samples, which say how much the targets move along
        with a change of ∇θL. Everything else acts on each coordinate, sample or row by itself.
        """
        theta, lam, memory = state["theta"], state["lam"], state["memory"]
        g = self.optimizer.recover_gradient(theta, memory, after["memory"])
        factor = self.factors[t]
        pull = vjp(lambda x, m, g: self.optimizer.update(x, m, g, factor, t), theta, memory, g)[1]
        d_theta, d_memory, u = vmap(pull)((adjoint["theta"], adjoint["memory"]))  # (T, d)
        present = self._count_members(batch)[2]
        passed = self.program.kinds.has_force(after["lam"]) | ~present  # rows whose λ was not projected
        d_lam = torch.where(passed, adjoint["lam"], 0.0)  # (T, m)

        def lagrangian(theta: Tensor, lam: Tensor) -> tuple[Tensor, Any]:
            losses = self._losses(theta, batch)
            f, violations = self._rows(theta, losses, batch)
            return f[0] + lam @ violations, (f, *losses)

        def along(u: Tensor, nu: Tensor) -> tuple[Any, Any]:
            at, moved = jvp(grad(lagrangian, has_aux=True), (theta, lam), (u, nu))[:2]
            return moved, at[1]

        nu = self.dual.lr * present * d_lam
        (change, (df, *slopes)), (f, *losses) = vmap(along, out_dims=(0, None))(u, nu)  # type: ignore[arg-type]
        before = {"theta": d_theta + change, "lam": d_lam + torch.where(present, df[:, 1:], 0.0), "memory": d_memory}
        pairs = [(f - self._bounds, df), *zip(losses, slopes, strict=True)]
        return before, (lam, adjoint["lam"], *(torch.cat([x[None], dx]) for x, dx in pairs))

    def effects(self, t: int, batch: Batch, pulled: Pulled, moves: Moves) -> Tensor:
        """Return by how much perturbations change the targets through each row of step t, (Q, T, 1 + m)."""
        lam, d_lam, rows, *values = pulled
        change = self._change_rows(batch, moves, values, rows)  # (Q, 1 + T, 1 + m)
        violations = torch.where(self._count_members(batch)[2], rows[0, 1:], 0.0)
        total = change[:, 1:] * self.program.weights(lam)
        total[:, :, 1:] += self._ascend(lam + self.dual.lr * violations, change[:, 0, 1:], moves.exact)[:, None] * d_lam
        return total

    @property
    def _bounds(self) -> Tensor:
        """0 for the objective and τ for the constraints, (1 + m,)."""
        return torch.cat([self.program.tau.new_zeros(1), self.program.tau])

    def _ascend(self, ahead: Tensor, df: Tensor, exact: Tensor) -> Tensor:
        """Return the changes of λ after the step, (Q, m), for changes of f − τ; `ahead` is λ before its projection."""
        kinds, moved = self.program.kinds, self.dual.lr * df
        finite = kinds.project(ahead + moved) - kinds.project(ahead)
        return torch.where(exact.to(ahead.device)[:, None], finite, torch.where(kinds.has_force(ahead), moved, 0.0))

    def _change_rows(self, batch: Batch, moves: Moves, values: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Return by how much perturbations change N functions of each row, (Q, N, 1 + m).

        A mean S/D over members in the batch becomes (S + δS)/(D + δD). It changes by (δS − δD·S/D)/(D + δD), to first
        order by the same over D. A mean that loses its last member is left out, and a constraint without it is 0.

        Args:
            batch: The samples of the step.
            moves: The perturbations.
            values: The N functions of each sample, (N, B) for each part: its loss, or slopes of it.
            rows: The same functions of the rows, (N, 1 + m), of those not present, too. The first is f − τ.
        """
        means, C, device = self.program.rows.means, self.program.rows.C[:, : len(self.program.rows.means)], rows.device
        divisor, empty, present = self._count_members(batch)
        before = [0.0 if part.extra else x @ part.U.T for part, x in zip(batch, values, strict=True)]
        mean = torch.where(empty, 0.0, self._add_up(batch, before) / divisor)  # (N, K)
        owners, places = ([getattr(m, name).to(device) for m in moves.parts] for name in ("owner", "place"))
        touched = [part.U.T[place][:, None] for part, place in zip(batch, places, strict=True)]  # (E, 1, k)

        def add_up(entries: list[Tensor]) -> Tensor:
            """Add up the entries of each perturbation, (Q, 1 + m, K)."""
            zeros = (x.new_zeros((len(moves.owners), *x.shape[1:])) for x in entries)
            return self._add_up(batch, [zero.index_add(0, *x) for zero, *x in zip(zeros, owners, entries, strict=True)])

        exact = moves.exact.to(device)[:, None, None]
        more = add_up([m.db * u for m, u in zip(moves.parts, touched, strict=True)])
        left = self._add_up(batch, [0 * p.U[:, 0] if p.extra else (p.U != 0).sum(1).to(rows) for p in batch])
        left = left + exact * add_up([m.db * (u != 0) for m, u in zip(moves.parts, touched, strict=True)])
        gone = means & (left.abs() < _MEMBER)
        share = C / torch.where(means & ~gone, torch.where(empty, 0.0, divisor) + exact * more, 1.0)
        change = torch.einsum("qjk,nk->qnj", -torch.where(gone, C, share * more) * means, mean)
        for part, x, m, u, owner, place in zip(batch, values, moves.parts, touched, owners, places, strict=True):
            columns = self.program.rows.columns(part.table)
            kept = torch.where(gone, 0.0, share)[:, :, columns][owner]  # (E, 1 + m, k)
            entries = x[:, place].T[..., None] * (kept * m.da * u).sum(2)[:, None]  # (E, N, 1 + m)
            change = change.index_add(0, owner, entries)
        bounds = torch.zeros_like(change)
        bounds[:, 0, 1:] = moves.dtau
        still = ~(gone & (C != 0)).any(2)
        still[:, 0] = True  # the objective
        return torch.where(still[:, None], rows + change - bounds, 0.0) - torch.where(
            torch.cat([present.new_ones(1), present]), rows, 0.0
        )
