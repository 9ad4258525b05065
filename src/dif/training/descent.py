"""One step of constrained training on a mini-batch, as a differentiable function, and its derivatives.

θ moves by the optimiser along ∇θL and λ by ascent along f − τ, both from the same point. Weights a and b of the samples
in the batch say who takes part: a mean is Σ a ℓ / Σ b over its members in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from dif.derivatives.losses import NO_FORWARD, NO_SECOND_BACKWARD, cost
from dif.derivatives.program import Program
from dif.derivatives.rows import output_slices
from dif.errors import InvalidInputError
from dif.problem.data import leaves, map_tensors
from dif.runtime.inputs import check_number
from dif.training.step import VECTORS, Batch, Moves, Pulled, Seen, State, Weights, combine

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
    _decoupled: ClassVar[bool] = False  # whether weight decay shrinks θ itself, and is no part of the gradient

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
        if self.weight_decay and self._decoupled:
            theta = (1 - factor * self.lr * self.weight_decay) * theta
        elif self.weight_decay:
            g = g + self.weight_decay * theta
        (first, second), (beta1, beta2) = memory, self.betas
        first = first + (1 - beta1) * (g - first)
        second = beta2 * second + (1 - beta2) * g * g
        unbiased = second / (1 - beta2 ** (step + 1)) + self.eps_root
        move = first / (1 - beta1 ** (step + 1)) / (unbiased.sqrt() + self.eps)
        return theta - factor * self.lr * move, (first, second)

    def recover_gradient(self, theta: Tensor, memory: Memory, after: Memory) -> Tensor:
        """Return the gradient that took the first average from its value before to its value after."""
        g = memory[0] + (after[0] - memory[0]) / (1 - self.betas[0])
        return g if self._decoupled else g - self.weight_decay * theta


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`: θ shrinks by lr·weight_decay before each step.

    Args are those of `dif.Adam`.
    """

    weight_decay: float = 0.01
    _decoupled = True


@dataclass(frozen=True)
class Ascent:
    """Ascent on the multipliers: λ + lr·(f − τ), projected at 0 for inequalities.

    Args:
        lr: Learning rate.
    """

    lr: float

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr)


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

    def advance(self, t: int, state: State, batch: Batch, weights: Weights | None = None) -> tuple[State, Seen]:
        """Return the state after step t, and the objective, f − τ and λ before it.

        Without weights, they are those of the run itself.
        """
        lam, (mix, present) = state["lam"], self._mix(batch, weights)
        tau = self.program.tau if weights is None else self.program.tau + weights.dtau

        def lagrangian(theta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            f = _add_up(mix, self._evaluate(theta, batch))
            violations = torch.where(present, f[1:] - tau, 0.0)
            return f[0] + lam @ violations, (f[0], violations)

        g, (objective, violations) = grad(lagrangian, has_aux=True)(state["theta"])
        theta, memory = self.optimizer.update(state["theta"], state["memory"], g, self.factors[t], t)
        after = {"theta": theta, "lam": self.program.kinds.project(lam + self.dual.lr * violations), "memory": memory}
        return after, {"objective": objective, "violations": violations, "multipliers": lam}

    def advance_many(self, t: int, states: State, batch: Batch, weights: Weights) -> State:
        """Return the states after step t, for P states and the weights of each, all with a first dimension P."""

        def advance(state: State, a: Any, b: Any, dtau: Tensor) -> State:
            return self.advance(t, state, batch, Weights(a, b, dtau))[0]

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

    def _evaluate(self, theta: Tensor, batch: Batch) -> list[Tensor]:
        """Return the losses of each part of the batch at θ, (B,), and the values of each function, (rows,)."""
        parameters = self.program.parameters
        params = parameters.bind(parameters.tensors(theta))
        losses = [part.samples.losses(params, part.data, len(part.index)) for part in batch]
        # in forward mode a scalar's tangent may be float64
        return losses + [function(theta).double().to(theta.dtype) for function in self.program.rows.functions]

    def _mix(self, batch: Batch, weights: Weights | None = None) -> tuple[list[Tensor], Tensor]:
        """Return how the rows f add up from what `_evaluate` returns, (1 + m, …) each; and which are present, (m,)."""
        rows, (members, empty, present) = self.program.rows, self._count_members(batch, weights)
        share, mix = torch.where(empty, 0.0, rows.C[:, : len(rows.means)] / members), []
        for number, part in enumerate(batch):
            mine = share[:, rows.columns(part.table)]
            if weights is not None:
                mix.append(torch.einsum("jk,jkb,kb->jb", mine, weights.a[number], part.U))
            else:
                mix.append(mine @ part.U * (not part.extra))
        return [*mix, *(rows.C[:, at] for _, at in output_slices(rows.functions, rows.C.shape[1]))], present

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
        members = self._sum_tables(batch, parts)
        empty = rows.means & (members == 0)
        present = ~(empty & (rows.C[:, : len(rows.means)] != 0)).any(1)[1:]
        return torch.where(rows.means & ~empty, members, 1.0), empty, present

    def _sum_tables(self, batch: Batch, sums: Sequence[Any]) -> Tensor:
        """Add up the sums of all parts of each table, (…, k), and join the tables, (…, K)."""
        pairs = [(part.table, values) for part, values in zip(batch, sums, strict=True)]
        tables = range(len(self.program.rows.tables))
        return torch.cat([sum(values for number, values in pairs if number == table) for table in tables], -1)  # type: ignore[arg-type]

    # Derivatives, and finite changes of the weights

    def push_forward(self, t: int, state: State, batch: Batch, tangent: State, moves: Moves) -> State:
        """Return how the state after step t changes with the state before it and under a perturbation."""
        theta, lam, memory = state["theta"], state["lam"], state["memory"]
        like = lambda x: x.to(theta)  # noqa: E731  (in forward mode the tangent of a scalar may be float64)
        (after, seen), (pushed, _) = jvp(lambda s: self.advance(t, s, batch), (state,), (tangent,))[:2]
        if not len(moves.owners):
            return map_tensors(pushed, like)

        def change(theta: Tensor) -> tuple[Tensor, Tensor]:
            """Return by how much the perturbation changes the Lagrangian and f."""
            values, mix = self._evaluate(theta, batch), self._mix(batch)[0]
            rows = (_add_up(mix, values) - self._bounds)[None]
            moved = self._change_rows(batch, moves, [x[None] for x in values[: len(batch)]], rows)[0, 0]
            return self.program.weights(lam) @ moved, moved[1:]

        dg, df = grad(change, has_aux=True)(theta)
        g = self.optimizer.recover_gradient(theta, memory, after["memory"])
        update = lambda g: self.optimizer.update(theta, memory, g, self.factors[t], t)  # noqa: E731
        dtheta, dmemory = jvp(update, (g,), (dg,))[1]
        dlam = self._ascend(lam + self.dual.lr * seen["violations"], df, moves.exact)[0]
        return combine(lambda x, dx: like(x + dx), pushed, {"theta": dtheta, "lam": dlam, "memory": dmemory})

    def pull_back(
        self, t: int, state: State, after: State, batch: Batch, adjoint: State, moves: Moves
    ) -> tuple[State, Pulled]:
        """Return the adjoints of the state before step t, for T of the state after it, and what `effects` needs.

        The derivative of ∇θL along (u, ν) in (θ, λ) is ∇²L·u + Gᵀν. It comes from one pass for all targets, together
        with the slopes ∇ℓᵢ·u of the samples, which say how much the targets move along with a change of ∇θL.
        Everything else acts on each coordinate, sample or row by itself.
        """
        theta, lam, memory = state["theta"], state["lam"], state["memory"]
        g = self.optimizer.recover_gradient(theta, memory, after["memory"])
        factor = self.factors[t]
        pull = vjp(lambda x, m, g: self.optimizer.update(x, m, g, factor, t), theta, memory, g)[1]
        d_theta, d_memory, u = vmap(pull)((adjoint["theta"], adjoint["memory"]))  # (T, d)
        mix, present = self._mix(batch)
        passed = self.program.kinds.has_force(after["lam"]) | ~present  # rows whose λ was not projected
        d_lam = torch.where(passed, adjoint["lam"], 0.0)  # (T, m)
        weights, nu = (self.program.weights(x * present) for x in (lam, self.dual.lr * d_lam))
        nu[:, 0] = 0.0  # the objective
        c, dc = ([w @ A for A in mix] for w in (weights, nu))  # how ∇L adds up from the gradients of all values
        change, slopes, values = self._differentiate(theta, batch, c, dc, u)
        f, df = (_add_up(mix, x) for x in (values, slopes))  # (1 + m,) and (T, 1 + m)
        before = {"theta": d_theta + change, "lam": d_lam + torch.where(present, df[:, 1:], 0.0), "memory": d_memory}
        pairs = [(f - self._bounds, df), *zip(values[: len(batch)], slopes, strict=False)]
        return before, (lam, adjoint["lam"], *(torch.cat([x[None], dx]) for x, dx in pairs))

    def _differentiate(
        self, theta: Tensor, batch: Batch, c: list[Tensor], dc: list[Tensor], u: Tensor
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Return the change of Jᵀc along (u, dc) in (θ, c), (T, d), Ju, and the values of `_evaluate`, which J is of.

        For one target two backward passes are faster than forward over reverse mode; on an accelerator they are not,
        since second backward passes of convolutions are slow there. Some operators have only one of the two.
        """

        def pull(theta: Tensor, c: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            values, pull = vjp(lambda x: tuple(self._evaluate(x, batch)), theta)[:2]
            return pull(c)[0], values

        def push(u: Tensor, *dc: Tensor) -> Any:
            (_, values), moved = jvp(pull, (theta, tuple(c)), (u, dc))[:2]
            return moved, values

        fallbacks = self.program.rows.fallbacks
        if NO_FORWARD in fallbacks or (len(u) == 1 and not theta.is_cuda and NO_SECOND_BACKWARD not in fallbacks):
            (_, values), again = vjp(pull, theta, tuple(c))[:2]
            change, slopes = vmap(lambda u, *dc: again((u, dc)))(u, *dc)
            return change, slopes, values
        (change, slopes), values = vmap(push, out_dims=(0, None))(u, *dc)  # type: ignore[arg-type]
        return change, slopes, values

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
        mean = torch.where(empty, 0.0, self._sum_tables(batch, before) / divisor)  # (N, K)
        owners, places = ([getattr(m, name).to(device) for m in moves.parts] for name in ("owner", "place"))
        touched = [part.U.T[place][:, None] for part, place in zip(batch, places, strict=True)]  # (E, 1, k)

        def add_up(entries: list[Tensor]) -> Tensor:
            """Add up the entries of each perturbation, (Q, 1 + m, K)."""
            zeros = (x.new_zeros((len(moves.owners), *x.shape[1:])) for x in entries)
            return self._sum_tables(
                batch, [zero.index_add(0, *x) for zero, *x in zip(zeros, owners, entries, strict=True)]
            )

        exact = moves.exact.to(device)[:, None, None]
        more = add_up([m.db * u for m, u in zip(moves.parts, touched, strict=True)])
        left = self._sum_tables(batch, [0 * p.U[:, 0] if p.extra else (p.U != 0).sum(1).to(rows) for p in batch])
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


def _add_up(mix: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return the rows f, (…, 1 + m), from what `_mix` and `_evaluate` return."""
    return torch.stack([x @ A.mT for A, x in zip(mix, values, strict=True)]).sum(0)
