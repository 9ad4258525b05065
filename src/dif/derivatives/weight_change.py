"""The changes (δw, δτ) of perturbations, as α·w plus sparse entries, never n × P; several changed programs at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from dif.derivatives.checks import check_tensors
from dif.derivatives.losses import (
    STACKED,
    Differentiable,
    sample_losses,
    sample_slopes,
    stacked_losses,
    sweep_batches,
    weighted_gradients,
)
from dif.derivatives.program import Program
from dif.derivatives.rows import CompiledFunction, Rows, Table, output_slices
from dif.errors import InvalidInputError
from dif.problem.parameters import Parameters
from dif.problem.perturbation import Perturbation
from dif.problem.samples import Samples
from dif.problem.weights import Changes, check_shift
from dif.runtime.guard import retry_with_smaller_batches
from dif.runtime.inputs import check_instance

_CURE = "make it with train.remove([i]), say"


@dataclass(frozen=True, eq=False)
class Block:
    """The weight changes of one table: α_pk·w_k for sum k under perturbation p, plus s_ek on sample index[e]."""

    touch: Tensor  # (1 + m, k) coefficients of the table's sums in the changed rows, zero in the other rows
    columns: slice  # positions of the sums in p(θ)
    alpha: Tensor  # (P, k), or (1, k) if the same for all perturbations
    samples: Samples  # of the table, or the added samples
    count: int  # P, or 1 if each entry belongs to all perturbations
    owner: Tensor  # (E,) perturbation of each entry
    index: Tensor  # (E,) sample of each entry
    s: Tensor  # (E, k) weight changes
    distinct: Tensor | None  # the distinct samples; None: all, in order
    place: Tensor | slice  # (E,) place of each entry's sample among them

    def entries_of(self, p: int) -> Tensor:
        """Return which entries belong to perturbation p, (E,) bool."""
        return self.owner == (p if self.count > 1 else 0)


class Direction:
    """The directions (δw, δτ) of P perturbations on the rows of a program.

    Args:
        program: The compiled problem.
        perturbation: What is perturbed.
        changes: The resolved perturbation, if it is known.
    """

    def __init__(self, program: Program, perturbation: Perturbation, changes: Changes | None = None) -> None:
        if changes is None:
            check_instance(perturbation, Perturbation, "perturbations", cure=_CURE)
            program.parameters.check_mode()
            changes = Changes.of(program.problem, perturbation)
            for addition in {id(m.added): m.added for c in changes.sums for m in c.moves if m.added}.values():
                check_tensors(addition.new, program.parameters)
        self.program, self.perturbation, self.changes = program, perturbation, changes
        self.P, like = len(perturbation), program.tau
        self.blocks: list[Block] = []
        ends = accumulate(len(table.U) for table in program.rows.tables)
        places = {t.samples: slice(end - len(t.U), end) for t, end in zip(program.rows.tables, ends, strict=True)}
        for change in changes.sums:
            columns = places[change.samples]
            touched = torch.isin(program.terms, torch.tensor(change.terms, device=like.device))
            touch = program.rows.C[:, columns] * touched[:, None]
            alpha = (change.factor * change.alpha).to(like)
            for move in change.moves:
                samples = move.added.new.under(change.samples) if move.added else change.samples
                owner, index = move.entries.owner, move.entries.index.to(like.device)
                a = change.alpha if len(change.alpha) == 1 else change.alpha[owner]
                s = (change.factor * ((1.0 + a) * move.dw)).to(like)
                entries = move.entries.P, owner.to(like.device), index, s
                every = len(index) == len(samples) and torch.equal(index, torch.arange(len(index)).to(index))
                distinct, place = (None, slice(None)) if every else torch.unique(index, return_inverse=True)
                self.blocks.append(Block(touch, columns, alpha, samples, *entries, distinct, place))
                alpha = torch.zeros_like(alpha[:1])  # it belongs to the first move
        none = like.new_zeros((1, program.m)).expand(self.P, -1)
        self.dtau = none.clone() if changes.bounds else none
        for number, dtau in changes.bounds:
            mine = program.terms[1:] == number
            check_shift(program.problem.constraints[number - 1], dtau.shape[1], int(mine.sum()))
            self.dtau[:, mine] += dtau.to(like)

    def __getitem__(self, rows: slice) -> Direction:
        begin, end, _ = rows.indices(self.P)
        return self if (begin, end) == (0, self.P) else self.pick(torch.arange(begin, end))

    @classmethod
    def resolve_single(cls, program: Program, perturbation: Perturbation) -> Direction:
        """Resolve a single perturbation; refuse several."""
        check_instance(perturbation, Perturbation, "perturbation", cure=_CURE)
        if len(perturbation) != 1:
            raise InvalidInputError(
                f"{len(perturbation)} perturbations were given where there must be one; select it with "
                "perturbations[i], or use scores(...), which takes many."
            )
        return cls(program, perturbation)

    def pick(self, rows: Sequence[int] | Tensor) -> Direction:
        """Return the directions of some of the perturbations, which are not resolved again."""
        numbers = torch.as_tensor(rows)
        return Direction(self.program, self.perturbation.pick_known(numbers), self.changes.pick(numbers))

    # First-order effects

    def first_order_effects(
        self, theta: Tensor, weights: Tensor, p: Tensor, Dp: Tensor, V: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return how each perturbation changes the rows and their weighted gradient at θ, to first order.

        Takes one sweep over the changed samples, and stores no per-sample gradients.

        Args:
            theta: The point θ, (d,).
            weights: Weights of the rows, (1 + m,), such as (1, λ̄) for the Lagrangian; or several of them, (1 + m, g).
            p: Sums and function values p(θ), (K,).
            Dp: Their gradients, (K, d).
            V: Columns along which the gradient change is wanted, (d, c).

        Returns:
            bᵀV, (P, c) or (P, g, c), where b = Σⱼ weightsⱼ δ∇fⱼ; and δf, (P, 1 + m), without the bounds.
        """
        bV = theta.new_zeros((self.P, *weights.shape[1:], V.shape[1]))
        df = theta.new_zeros((self.P, 1 + self.program.m))
        for block in self.blocks:
            df += block.alpha @ (block.touch * p[block.columns]).T
            bV += torch.einsum("pk,k...,kc->p...c", block.alpha, block.touch.T @ weights, Dp[block.columns] @ V)
            losses, slopes = sample_slopes(block.samples, self.program.parameters, theta, V, block.distinct)
            losses, slopes = losses[block.place], slopes[block.place]
            bad = ~(torch.isfinite(losses) & torch.isfinite(slopes).all(1))
            if bool(bad.any()):
                raise _not_finite_error(block.samples.name, f"{int(bad.sum())} of {len(bad)}")
            row_weights = block.s @ block.touch.T  # (E, 1 + m)
            effects = torch.einsum("e...,ec->e...c", row_weights @ weights, slopes)
            df += df.new_zeros((block.count, *df.shape[1:])).index_add_(0, block.owner, losses[:, None] * row_weights)
            bV += bV.new_zeros((block.count, *bV.shape[1:])).index_add_(0, block.owner, effects)
        return bV, df

    def combine(self, mix: Tensor, theta: Tensor, weights: Tensor, p: Tensor, Dp: Tensor) -> tuple[Tensor, Tensor]:
        """Return b, (Z, d), and δf, (Z, 1 + m), of Z combinations Σₚ mix_zp · (perturbation p).

        Takes one sweep over the changed samples, for any number of combinations; the other arguments are as in
        `first_order_effects`.
        """
        b = theta.new_zeros((len(mix), theta.numel()))
        df = theta.new_zeros((len(mix), 1 + self.program.m))
        for block in self.blocks:
            alpha = mix @ block.alpha.expand(self.P, -1)  # (Z, k)
            df += alpha @ (block.touch * p[block.columns]).T
            b += (alpha * (weights @ block.touch)) @ Dp[block.columns]
            entries = (mix if block.count == self.P else mix.sum(1, keepdim=True))[:, block.owner]  # (Z, E)
            row_weights = block.s @ block.touch.T  # (E, 1 + m)
            losses = sample_losses(block.samples, self.program.parameters, theta, block.distinct)
            df += entries @ (losses[block.place][:, None] * row_weights)
            w = entries * (row_weights @ weights)
            if isinstance(block.place, Tensor):
                w = w.new_zeros((len(mix), len(losses))).index_add(1, block.place, w)
            b += weighted_gradients(block.samples, self.program.parameters, theta, w, block.distinct)[1]
        return b, df

    def bend(self, theta: Tensor, steps: Tensor, weights: Tensor) -> Tensor:
        """Return s⊤(δ∇²L)s for steps s (k, d), by second differences of the losses of the changed samples, (P, k)."""
        total, thetas = theta.new_zeros((self.P, len(steps))), torch.cat([theta[None], theta + steps, theta - steps])
        for block in self.blocks:
            values = stacked_losses(block.samples, self.program.parameters, thetas, block.distinct)
            here, ahead, behind = values.split([1, len(steps), len(steps)])
            bends = (ahead - 2 * here + behind).T[block.place] * (block.s @ (block.touch.T @ weights))[:, None]
            total += bends.new_zeros((block.count, len(steps))).index_add_(0, block.owner, bends)
        return total

    # Effects of a single perturbation

    def first_order(self, p: int, theta: Tensor, parts: Tensor, Dp: Tensor) -> tuple[Tensor, Tensor]:
        """Return δf, (1 + m,), and δ∇f, (1 + m, d), of perturbation p at θ, given p(θ) as `parts` and its gradients."""
        df, DJ = self.changed_samples(p).gradients(theta)
        if not bool(torch.isfinite(df).all() and torch.isfinite(DJ).all()):
            raise _not_finite_error(", ".join(sorted({block.samples.name for block in self.blocks})), "some")
        A = self.rescaling(p)  # of the sums, which come first
        return df + A @ parts[: A.shape[1]], DJ + A @ Dp[: A.shape[1]]

    def rescaling(self, p: int) -> Tensor:
        """Return A (1 + m, sums), the rescaling of sums in δf = A·p(θ) + `changed_samples(p)` of perturbation p."""
        A = torch.zeros_like(self.program.rows.C[:, : self.program.rows.sums])
        for block in self.blocks:
            A[:, block.columns] += block.touch * block.alpha[p if len(block.alpha) > 1 else 0]
        return A

    def changed_samples(self, p: int) -> Rows:
        """Return the part of δf that is not a rescaling, as rows over the changed samples only."""
        pairs = [(block, block.entries_of(p)) for block in self.blocks]
        tables = tuple(Table(block.samples.take(block.index[mine]), (), block.s[mine].T) for block, mine in pairs)
        C = torch.cat([self.program.rows.C[:, :0], *(block.touch for block in self.blocks)], 1)
        return Rows(self.program.parameters, tables, (), C)

    def perturbed_program(self, p: int) -> Program:
        """Return the program after perturbation p at ε = 1: weights w + δw, bounds τ + δτ."""
        rows, C = self.program.rows, self.rescaling(p)
        C += rows.C[:, : rows.sums]
        tables = {table.samples: (table.U, C[:, rows.columns(number)]) for number, table in enumerate(rows.tables)}
        for block in self.blocks:
            mine = block.entries_of(p)
            U = block.s.new_zeros((block.s.shape[1], len(block.samples)))
            U.index_add_(1, block.index[mine], block.s[mine].T)
            old, touch = tables.get(block.samples, (U[:0], block.touch[:, :0]))
            tables[block.samples] = (torch.cat([old, U]), torch.cat([touch, block.touch], 1))
        parts = tuple(Table(samples, (), U) for samples, (U, _) in tables.items())
        C = torch.cat([*(touch for _, touch in tables.values()), rows.C[:, rows.sums :]], 1)
        perturbed = Rows(rows.parameters, parts, rows.functions, C)
        return replace(self.program, rows=perturbed, tau=self.program.tau + self.dtau[p])

    def stack_programs(self) -> BatchedProgram:
        """Stack the programs after each perturbation at ε = 1, so that they are evaluated together."""
        rows, P = self.program.rows, self.P
        used = torch.nonzero((rows.C[:, : rows.sums] != 0).any(1)).reshape(-1)
        A = rows.C[used, : rows.sums].repeat(P, 1, 1)  # (P, r, sums)
        entries: dict[Samples, list[tuple[Tensor, ...]]] = {table.samples: [] for table in rows.tables}
        for block in self.blocks:
            A[:, :, block.columns] += block.touch[used] * block.alpha[:, None]
            each = block.owner, block.index, block.s @ block.touch[used].T
            if block.count < P:
                copies = torch.arange(P, device=block.owner.device).repeat_interleave(len(block.index))
                each = copies, block.index.repeat(P), each[2].repeat(P, 1)
            entries.setdefault(block.samples, []).append(each)
        sums = {table.samples: (table.U, A[:, :, rows.columns(t)]) for t, table in enumerate(rows.tables)}
        tables = []
        for samples, parts in entries.items():
            U, own = sums.get(samples, (A.new_zeros((0, len(samples))), A[:, :, :0]))
            parts.append((used[:0], used[:0], A.new_zeros((0, len(used)))))
            tables.append(BatchedTable(samples, U, own, *map(torch.cat, zip(*parts, strict=True))))
        C, tau = rows.C[:, rows.sums :], self.program.tau + self.dtau
        return BatchedProgram(rows.parameters, used, tuple(tables), rows.functions, C, rows.linear, tau)


def _not_finite_error(name: str, count: str) -> InvalidInputError:
    return InvalidInputError(
        f"The losses or gradients of {count} perturbed samples of {name!r} are not finite, so their influence is not "
        "defined; check these samples, and the loss where its derivative is infinite (sqrt or log at 0)."
    )


@dataclass(frozen=True, eq=False)
class BatchedTable:
    """How P programs weight the same samples: row j of program p by Σₖ A_pjk U_k, plus s_ej on sample index[e]."""

    samples: Samples
    U: Tensor  # (k, n)
    A: Tensor  # (P, r, k)
    owner: Tensor  # (E,) program of each entry
    index: Tensor  # (E,) sample of each entry
    s: Tensor  # (E, r)

    def take(self, which: Tensor) -> BatchedTable:
        """Select the programs listed in `which`, each at most once."""
        place = which.new_full((len(self.A),), -1)
        place[which] = torch.arange(len(which), device=which.device)
        owner = place[self.owner]
        mine = owner >= 0
        return BatchedTable(self.samples, self.U, self.A[which], owner[mine], self.index[mine], self.s[mine])

    def batch(self, place: slice) -> BatchedTable:
        """Restrict to consecutive samples."""
        mine = (self.index >= place.start) & (self.index < place.stop)
        entries = self.owner[mine], self.index[mine] - place.start, self.s[mine]
        return BatchedTable(self.samples, self.U[:, place], self.A, *entries)

    def weigh(self, mu: Tensor) -> Tensor:
        """Return the weights of the samples in k combinations Σⱼ μⱼ·(row j) of each program, (P, k, n), μ (P, k, r)."""
        W = mu @ self.A @ self.U
        added = (mu[self.owner] @ self.s[:, :, None])[:, :, 0]
        return W.mT.index_put_((self.owner, self.index), added, accumulate=True).mT

    def add_up(self, losses: Tensor) -> Tensor:
        """Return the rows, (P, r), for losses (P, n)."""
        sums = (self.A @ (losses @ self.U.T)[:, :, None])[:, :, 0]
        return sums.index_add(0, self.owner, self.s * losses[self.owner, self.index][:, None])


@dataclass(frozen=True, eq=False)
class BatchedProgram:
    """P programs that weight the same samples differently; Σₖ Cⱼₖ φₖ(θ) is added to row j of each."""

    parameters: Parameters
    used: Tensor  # (r,) the rows with samples
    tables: tuple[BatchedTable, ...]
    functions: tuple[CompiledFunction, ...]
    C: Tensor  # (1 + m, outputs of the functions)
    linear: Tensor | None  # (1 + m, d) gradients of the linear part of the rows
    tau: Tensor  # (P, m)

    def __len__(self) -> int:
        return len(self.tau)

    def take(self, which: Tensor) -> BatchedProgram:
        """Select the programs listed in `which`, each at most once."""
        return replace(self, tables=tuple(table.take(which) for table in self.tables), tau=self.tau[which])

    @retry_with_smaller_batches
    def gradients(self, thetas: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return f, (P, 1 + m), and its Jacobian, (P, 1 + m, d), of each program at its own θ (P, d).

        With `weights`, (P, 1 + m), it is Σⱼ weightsⱼ∇fⱼ, (P, d), instead of the Jacobian.
        """
        P, R = len(thetas), len(self.C)
        f, J = thetas.new_zeros((P, R)), thetas.new_zeros((P, R if weights is None else 1, thetas.shape[1]))
        for numbers, rows, add_up, W in self._curved_parts(thetas, weights):
            values, gradients = numbers.evaluate_at(thetas, W)
            f[:, rows] += add_up(values)
            J[:, rows if weights is None else slice(None)] += gradients
        if self.linear is not None:
            f += thetas @ self.linear.T
            J += self.linear if weights is None else weights[:, None] @ self.linear
        return f, J if weights is None else J[:, 0]

    def _curved_parts(
        self, thetas: Tensor, weights: Tensor | None
    ) -> Iterator[tuple[Differentiable, Tensor, Callable[[Tensor], Tensor], Tensor]]:
        """Yield numbers as functions of θ, and the rows that they are in, (k,).

        With them come a function that adds them up in these rows, and their weights in Σⱼ weightsⱼfⱼ, (P, 1, n), or,
        without weights, in each of the rows, (P, k, n).
        """
        every = torch.eye(len(self.used)).to(thetas).expand(len(thetas), -1, -1)
        mu = every if weights is None else weights[:, None, self.used]
        for table in self.tables:
            few = 1 + STACKED // len(thetas)
            for place, loss in sweep_batches(table.samples, self.parameters, thetas[0], at_most=few, shared=False):
                batch = table.batch(place)
                yield loss, self.used, batch.add_up, batch.weigh(mu)
        for function, columns in output_slices(self.functions, self.C.shape[1]):
            if function.matrix is None:
                rows = torch.nonzero((self.C[:, columns] != 0).any(1)).reshape(-1)
                C = self.C[rows, columns]
                W = C.expand(len(thetas), -1, -1) if weights is None else weights[:, None, rows] @ C
                yield function, rows, lambda values, C=C: values @ C.T, W

    @retry_with_smaller_batches
    def products(self, thetas: Tensor, weights: Tensor, V: Tensor) -> Tensor:
        """Return Σⱼ weightsⱼ∇²fⱼ(θ)·v of each program, for weights (P, 1 + m) and columns V (P, d, c)."""
        total = torch.zeros_like(V)
        for numbers, _, _, W in self._curved_parts(thetas, weights):
            if isinstance(numbers, CompiledFunction) and numbers.function.ridge is not None:
                total += numbers.function.ridge * W * V
            else:
                total += numbers.stacked_products(thetas, W[:, 0], V)
        return total
