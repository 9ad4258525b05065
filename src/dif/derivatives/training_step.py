"""One step of constrained training on a mini-batch, as a differentiable function, and its derivatives.

θ moves by the optimiser along ∇θL and λ by ascent along f − τ, both from the same point. Weights a and b of the samples
in the batch say who takes part: a mean is Σ a ℓ / Σ b over its members in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from dif.derivatives.optimizers import Ascent, Optimizer
from dif.derivatives.program import Program
from dif.derivatives.step import Batch, Observation, State, WeightGradients, Weights, default_weights
from dif.problem.problem import Problem
from dif.problem.structure import map_tensors


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

    def advance(self, t: int, state: State, batch: Batch, weights: Weights | None = None) -> State:
        """Return the state after step t."""
        return self._advance(t, state, batch, weights)[0]

    def observe(self, t: int, state: State, batch: Batch) -> tuple[State, Observation]:
        """Return the state after step t, and the objective, f − τ and λ before it."""
        after, objective, violations = self._advance(t, state, batch, None)
        return after, Observation(objective, violations, state["lam"])

    def _advance(self, t: int, state: State, batch: Batch, weights: Weights | None) -> tuple[State, Tensor, Tensor]:

        def lagrangian(theta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            f, violations, _ = self._rows(theta, self._losses(theta, batch), batch, weights)
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
        self, theta: Tensor, losses: Sequence[Tensor], batch: Batch, weights: Weights | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows f, (1 + m,), f − τ of the constraints, (m,), and the sums of each row, (1 + m, K)."""
        rows, R = self.program.rows, 1 + self.program.m
        totals, members = [], []
        for number, table in enumerate(rows.tables):
            total = member = theta.new_zeros((R, len(table.U)))
            for p, part in enumerate(batch):
                if part.table == number and weights is not None:
                    total = total + ((part.U * weights.a[p]) * losses[p]).sum(-1)
                    member = member + (part.U * weights.b[p]).sum(-1)
                elif part.table == number and not part.extra:
                    total, member = total + part.U @ losses[p], member + part.U.sum(1)
            totals.append(total)
            members.append(member)
        total, member, C = torch.cat(totals, 1), torch.cat(members, 1), rows.C[:, : len(self.program.rows.means)]
        empty = self.program.rows.means & (member == 0)
        sums = torch.where(empty, 0.0, total / torch.where(self.program.rows.means & ~empty, member, 1.0))
        f, start = (C * sums).sum(1), len(self.program.rows.means)
        for function in rows.functions:
            value = function.value(theta).double().to(theta.dtype)  # in forward mode a scalar's tangent may be float64
            f = f + rows.C[:, start : start + function.size] @ value
            start += function.size
        tau = self.program.tau if weights is None else self.program.tau + weights.dtau
        absent = (empty & (C != 0)).any(1)[1:]
        return f, torch.where(absent, 0.0, f[1:] - tau), sums

    # Derivatives

    def push_forward(self, t: int, state: State, batch: Batch, tangent: State, dweights: Weights) -> State:
        """Return the tangent of the state after step t, for tangents of the state before it and of the weights."""
        keys = ("theta", "lam", "memory")

        def after(theta: Tensor, lam: Tensor, memory: Any, a: Any, b: Any, dtau: Tensor) -> Any:
            now = {"theta": theta, "lam": lam, "memory": memory}
            then = self.advance(t, now, batch, Weights(a, b, dtau))
            return tuple(then[key] for key in keys)

        weights = default_weights(self.program, batch)
        at = (*(state[key] for key in keys), weights.a, weights.b, weights.dtau)
        along = (*(tangent[key] for key in keys), dweights.a, dweights.b, dweights.dtau)
        moved = jvp(after, at, along)[1]
        like = state["theta"]  # in forward mode the tangent of a scalar may be float64
        return {key: map_tensors(value, lambda x: x.to(like)) for key, value in zip(keys, moved, strict=True)}

    def pull_back(
        self, t: int, state: State, after: State, batch: Batch, adjoint: State
    ) -> tuple[State, WeightGradients]:
        """Return the adjoints of the state before step t, and of its weights, for T adjoints of the state after it.

        The derivative of ∇θL along (u, ν) in (θ, λ) is ∇²L·u + Gᵀν. It comes from one pass of forward over reverse
        mode for all targets, together with the slopes ∇ℓᵢ·u of the samples. Everything else acts on each coordinate,
        sample or row by itself.
        """
        theta, lam, memory = state["theta"], state["lam"], state["memory"]
        g = self.optimizer.recover_gradient(theta, memory, after["memory"])
        factor = self.factors[t]
        pull = vjp(lambda x, m, g: self.optimizer.update(x, m, g, factor, t), theta, memory, g)[1]
        d_theta, d_memory, u = vmap(pull)((adjoint["theta"], adjoint["memory"]))  # (T, d)
        present = self._present(batch)
        passed = self.program.kinds.has_force(after["lam"]) | ~present  # rows whose λ was not projected
        d_lam = torch.where(passed, adjoint["lam"], 0.0)  # (T, m)
        nu = self.dual.lr * present * d_lam

        def lagrangian(theta: Tensor, lam: Tensor) -> tuple[Tensor, Any]:
            losses = self._losses(theta, batch)
            f, violations, sums = self._rows(theta, losses, batch, None)
            return f[0] + lam @ violations, (tuple(losses), violations, sums)

        def along(u: Tensor, nu: Tensor) -> tuple[Any, Any]:
            at, moved = jvp(grad(lagrangian, has_aux=True), (theta, lam), (u, nu))[:2]
            return moved, at[1]

        (change, (slopes, d_rows, d_sums)), (losses, _, sums) = vmap(along, out_dims=(0, None))(u, nu)  # type: ignore[arg-type]
        before = {"theta": d_theta + change, "lam": d_lam + d_rows, "memory": d_memory}
        weight = torch.cat([lam.new_ones(1), lam * present])  # (1 + m,)
        nu_rows = torch.cat([nu.new_zeros((len(nu), 1)), nu], 1)  # (T, 1 + m), 0 for the objective
        mean = (weight[:, None] * d_sums + nu_rows[..., None] * sums) * self.program.rows.means  # (T, 1 + m, K)
        divisor = self._divisors(batch)
        by_a, by_b = [], []
        for part, ell, slope in zip(batch, losses, slopes, strict=True):
            columns = self.program.rows.columns(part.table)
            share = (self.program.rows.C[:, columns] / divisor[columns])[..., None] * part.U  # (1 + m, k, B)
            moved = weight[:, None] * slope[:, None] + nu_rows[..., None] * ell  # (T, 1 + m, B)
            by_a.append(share * moved[:, :, None])
            by_b.append(-share * mean[:, :, columns, None])
        return before, WeightGradients(tuple(by_a), tuple(by_b), -nu)

    def _members(self, batch: Batch) -> Tensor:
        """Return the total weight of each sum's members in the batch, (K,)."""
        members = [torch.zeros_like(table.U[:, 0]) for table in self.program.rows.tables]
        for part in batch:
            if not part.extra:
                members[part.table] = members[part.table] + part.U.sum(1)
        return torch.cat([self.program.tau.new_zeros(0), *members])

    def _divisors(self, batch: Batch) -> Tensor:
        """Return what each sum is divided by, (K,)."""
        members = self._members(batch)
        return torch.where(self.program.rows.means & (members != 0), members, 1.0)

    def _present(self, batch: Batch) -> Tensor:
        """Return which constraints have members in the batch, (m,) bool."""
        empty = self.program.rows.means & (self._members(batch) == 0)
        return ~(empty & (self.program.rows.C[1:, : len(self.program.rows.means)] != 0)).any(1)
