"""The weight and bound changes (δw, δτ) of perturbations, stored as α·w plus sparse entries, never as n × P."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.batched_program import BatchedProgram
from dif.derivatives.probe import check_tensors
from dif.derivatives.program import Program
from dif.derivatives.rows import Rows, Table
from dif.derivatives.sweeps import sample_losses, sample_slopes, weighted_gradients
from dif.errors import InvalidInputError
from dif.problem.perturbation import Addition, Perturbation, Removal, Reweighting, Shift, check_shift, empty_term_error
from dif.problem.sample_losses import SampleLosses
from dif.runtime.inputs import check_instance


@dataclass(frozen=True, eq=False)
class Block:
    """The weight changes of one table: α_pk·w_k for sum k under perturbation p, plus s_ek on sample index[e]."""

    touch: Tensor  # (1 + m, k) coefficients of the table's sums in the changed rows, zero in the other rows
    columns: slice  # positions of the sums in p(θ)
    alpha: Tensor  # (P, k), or (1, k) if the same for all perturbations
    samples: SampleLosses  # of the table, or the added samples
    owner: Tensor | None  # (E,) perturbation of each entry; None: each entry belongs to all perturbations
    index: Tensor  # (E,) sample of each entry
    s: Tensor  # (E, k) weight changes


class Direction:
    """The directions (δw, δτ) of P perturbations on the rows of a program."""

    def __init__(self, program: Program, perturbation: Perturbation) -> None:
        check_perturbation(perturbation)
        program.parameters.check_mode()
        self.program = program
        self.perturbation = perturbation
        self.P = len(perturbation)
        self.blocks: list[Block] = []
        self.dtau = program.tau.new_zeros((self.P, program.m))
        for scale, piece in perturbation.pieces:
            if isinstance(piece, Shift):
                self._resolve_shift(scale, piece)
            else:
                self._resolve(scale, piece)

    @classmethod
    def resolve_single(cls, program: Program, perturbation: Perturbation) -> Direction:
        """Resolve a single perturbation; refuse several."""
        direction = cls(program, perturbation)
        if direction.P != 1:
            raise InvalidInputError(
                f"{direction.P} perturbations were given.",
                "There must be exactly one.",
                "A change or a path answers one perturbation.",
                "Select one with perturbations[i], or use scores(...), which takes many.",
            )
        return direction

    # Resolution of perturbations

    def _resolve_shift(self, scale: float, piece: Shift) -> None:
        """Add the bound changes of a shift."""
        rows = self.program.rows_of(piece.constraint)
        count = rows.stop - rows.start
        check_shift(piece, count)
        self.dtau[:, rows] += scale * piece.dtau.reshape(-1).to(self.dtau).expand(count)

    def _resolve(self, scale: float, piece: Removal | Addition | Reweighting) -> None:
        """Add the weight changes of a removal, addition or reweighting."""
        self.program.problem.check_action(piece)
        rows, population = self.program.rows, piece.samples.population
        C = rows.C * self.changed_rows(piece.terms)[:, None]
        views = [t for t, table in enumerate(rows.tables) if table.samples.population is population]
        views = [t for t in views if bool((C[:, rows.columns(t)] != 0).any())]
        if isinstance(piece, Addition):
            check_tensors(piece.new, self.program.parameters)
        refilled = any(
            isinstance(a, Addition) and a.samples.population is population for _, a in self.perturbation.pieces
        )
        for t in views:
            table, columns = rows.tables[t], rows.columns(t)
            used = (C[:, columns] != 0).any(0)  # (k,) the sums that the changed rows use
            if isinstance(piece, Reweighting):
                alpha, s, index, owner = _resolve_reweighting(piece, table)
            else:
                alpha, s, index, owner = _resolve_entries(piece, table, used, refilled)
            samples = piece.new.under(table.samples) if isinstance(piece, Addition) else table.samples
            owner = owner if len(piece) == self.P else None
            self.blocks.append(Block(C[:, columns], columns, scale * alpha, samples, owner, index, scale * s))

    def changed_rows(self, terms: tuple[Any, ...] | None) -> Tensor:
        """Return 1 for the rows of these terms (None: all rows) and 0 for the others, (1 + m,)."""
        changed = self.program.tau.new_zeros(1 + self.program.m)
        if terms is None:
            return changed + 1
        for term in terms:
            if term is self.program.problem.objective:
                changed[0] = 1
            else:
                rows = self.program.rows_of(term)
                changed[1 + rows.start : 1 + rows.stop] = 1
        return changed

    # First-order effects

    def first_order_effects(
        self, theta: Tensor, weights: Tensor, p: Tensor, Dp: Tensor, V: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return how each perturbation changes the rows and their weighted gradient at θ, to first order.

        Args:
            theta: The point θ, (d,).
            weights: Weights of the rows, (1 + m,); (1, λ̄) for the Lagrangian.
            p: Sums and function values p(θ), (K,).
            Dp: Their gradients, (K, d).
            V: Columns along which the gradient change is wanted, (d, c).

        Returns:
            bᵀV, (P, c), where b = Σⱼ weightsⱼ δ∇fⱼ; and δf, (P, 1 + m), without the bounds.
        """
        bV = theta.new_zeros((self.P, V.shape[1]))
        df = theta.new_zeros((self.P, 1 + self.program.m))
        for block in self.blocks:
            if bool((block.alpha != 0).any()):
                df += block.alpha @ (block.touch * p[block.columns]).T
                bV += (block.alpha * (weights @ block.touch)) @ (Dp[block.columns] @ V)
            distinct, place = _distinct(block.index, len(block.samples))
            losses, slopes = sample_slopes(block.samples, self.program.parameters, theta, V, distinct)
            losses, slopes = losses[place], slopes[place]
            bad = ~(torch.isfinite(losses) & torch.isfinite(slopes).all(1))
            if bool(bad.any()):
                raise _not_finite_error(block.samples.name, f"{int(bad.sum())} of {len(bad)}")
            row_weights = block.s @ block.touch.T  # (E, 1 + m)
            _accumulate(df, block.owner, losses[:, None] * row_weights)
            _accumulate(bV, block.owner, (row_weights @ weights)[:, None] * slopes)
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
            distinct, place = _distinct(block.index, len(block.samples))
            samples = block.samples.take(distinct)
            shared = mix.sum(1, keepdim=True).expand(-1, len(block.index))  # of entries that all perturbations have
            entries = shared if block.owner is None else mix[:, block.owner]  # (Z, E)
            row_weights = block.s @ block.touch.T  # (E, 1 + m)
            df += entries @ (sample_losses(samples, self.program.parameters, theta)[place][:, None] * row_weights)
            w = entries * (row_weights @ weights)
            if isinstance(place, Tensor):
                w = w.new_zeros((len(mix), len(samples))).index_add(1, place, w)
            b += weighted_gradients(samples, self.program.parameters, theta, w)[1]
        return b, df

    def first_order_effects_by_row(self, theta: Tensor, weights: Tensor, Dp: Tensor, v: Tensor) -> Tensor:
        """Return weightsⱼ δ∇fⱼ·v of each perturbation and each row j, (P, 1 + m)."""
        total = theta.new_zeros((self.P, 1 + self.program.m))
        for block in self.blocks:
            total += (block.alpha @ (block.touch * (Dp[block.columns] @ v)).T) * weights
            distinct, place = _distinct(block.index, len(block.samples))
            _, slopes = sample_slopes(block.samples, self.program.parameters, theta, v[:, None], distinct)
            _accumulate(total, block.owner, (block.s @ block.touch.T) * weights * slopes[place])
        return total

    # Effects of a single perturbation

    def first_order(self, p: int, theta: Tensor, parts: Tensor, Dp: Tensor) -> tuple[Tensor, Tensor]:
        """Return δf, (1 + m,), and δ∇f, (1 + m, d), of perturbation p at θ, given p(θ) as `parts` and its gradients."""
        df, DJ = self.changed_samples(p).gradients(theta)
        if not bool(torch.isfinite(df).all() and torch.isfinite(DJ).all()):
            raise _not_finite_error(", ".join(sorted({block.samples.name for block in self.blocks})), "some")
        A = self.rescaling(p)
        return df + A @ parts, DJ + A @ Dp

    def rescaling(self, p: int) -> Tensor:
        """Return A (1 + m, K), the rescaling in δf = A·p(θ) + `changed_samples(p)` of perturbation p."""
        A = torch.zeros_like(self.program.rows.C)
        for block in self.blocks:
            A[:, block.columns] += block.touch * block.alpha[p if len(block.alpha) > 1 else 0]
        return A

    def changed_samples(self, p: int) -> Rows:
        """Return the part of δf that is not a rescaling, as rows over the changed samples only."""
        tables, coefficients = [], []
        for block in self.blocks:
            mine = slice(None) if block.owner is None else block.owner == p
            distinct, place = _distinct(block.index[mine], len(block.samples))
            samples = block.samples.take(distinct)
            U = block.s.new_zeros((block.s.shape[1], len(samples)))
            U[:, place] = block.s[mine].T
            tables.append(Table(samples, (), U))
            coefficients.append(block.touch)
        C = torch.cat([self.program.rows.C[:, :0], *coefficients], 1)
        return Rows(self.program.parameters, tuple(tables), (), C)

    def perturbed_program(self, p: int) -> Program:
        """Return the program after perturbation p at ε = 1: weights w + δw, bounds τ + δτ."""
        rows = self.program.rows
        tables = [(t.samples, t.U, (rows.C + self.rescaling(p))[:, rows.columns(i)]) for i, t in enumerate(rows.tables)]
        functions = rows.C[:, sum(len(t.U) for t in rows.tables) :]
        for block in self.blocks:
            mine = slice(None) if block.owner is None else block.owner == p
            n, k = len(block.samples), block.s.shape[1]
            U = block.s.new_zeros((k, n)).index_add(1, block.index[mine].to(block.s.device), block.s[mine].T)
            known = [i for i, (samples, _, _) in enumerate(tables) if samples is block.samples]
            if known:
                samples, old, C = tables[known[0]]
                tables[known[0]] = (samples, torch.cat([old, U]), torch.cat([C, block.touch], 1))
            else:
                tables.append((block.samples, U, block.touch))
        perturbed = Rows(
            rows.parameters,
            tuple(Table(samples, (), U) for samples, U, _ in tables),
            rows.functions,
            torch.cat([*(C for _, _, C in tables), functions], 1),
        )
        return replace(self.program, rows=perturbed, tau=self.program.tau + self.dtau[p])

    def stack_programs(self) -> BatchedProgram:
        """Stack the programs after each perturbation at ε = 1, so that they are evaluated together."""
        programs = [self.perturbed_program(p) for p in range(self.P)]
        first = programs[0].rows
        start = sum(len(t.U) for t in first.tables)
        tables = tuple(
            (
                table.samples,
                torch.stack([each.rows.C[:, each.rows.columns(t)] @ each.rows.tables[t].U for each in programs]),
            )
            for t, table in enumerate(first.tables)
        )
        tau = torch.stack([each.tau for each in programs])
        return BatchedProgram(first.parameters, tables, first.functions, first.C[:, start:], tau)


def find_indispensable(program: Program, samples: SampleLosses) -> dict[int, str]:
    """Return the samples that are the only one in a term, which is undefined without them: index → term in words."""
    terms: dict[int, str] = {}
    for number, table in enumerate(program.rows.tables):
        if table.samples.population is samples.population:
            used = (program.rows.C[:, program.rows.columns(number)] != 0).any(0)
            members = table.U != 0
            for k in torch.nonzero(used & (members.sum(1) == 1)).reshape(-1).tolist():
                terms[int(members[k].long().argmax())] = table.sums[k].words
    return terms


def _resolve_entries(piece: Removal | Addition, table: Table, used: Tensor, refilled: bool):
    """Return alpha, s, index and owner of the Block of a removal or addition.

    `refilled`: the same perturbation also adds samples, as a replacement does. A sum may then lose all its members.
    """
    U, entries, sign = table.U, piece.entries, 1 if isinstance(piece, Addition) else -1
    owner, index = entries.owner.to(U.device), entries.index.to(U.device)
    weights = _weigh_added(piece, table, used) if isinstance(piece, Addition) else U.T[index]  # (E, k)
    counts = torch.zeros((len(entries), len(U)), dtype=torch.long, device=U.device)
    counts.index_add_(0, owner, (weights != 0).long())  # entries of each perturbation in each sum
    empty = ((U != 0).sum(1) == counts) & used
    if isinstance(piece, Removal) and (piece.renormalise or not refilled) and bool(empty.any()):
        p, k = (int(i) for i in torch.nonzero(empty)[0])
        raise empty_term_error(f"Perturbation {p} ({piece.labels()[p]})", table.sums[k].words)
    renormalised = torch.tensor([s.normalised and piece.renormalise for s in table.sums], device=U.device)
    moved = U.new_zeros(counts.shape).index_add(0, owner, weights)  # their weights
    left = U.sum(1) + sign * moved
    alpha = torch.where(renormalised & (left != 0), -sign * moved / torch.where(left != 0, left, 1.0), 0.0)
    return alpha, sign * (1.0 + alpha[owner]) * weights, index, owner


def _weigh_added(piece: Addition, table: Table, used: Tensor) -> Tensor:
    """Return the weights of added samples in the sums of a table, (E, k), before renormalisation."""
    U, index = table.U, piece.entries.index.to(table.U.device)
    if piece.like is not None:
        return U.T[piece.like.to(U.device)[index]]
    unclear = [s.words for s, is_used in zip(table.sums, used.tolist(), strict=True) if is_used and not s.everyone]
    if unclear:
        raise piece.membership_error(unclear)
    weights = (U.sum(1) / (U != 0).sum(1).clamp(min=1)).expand(len(index), len(U))  # the mean weight of the members
    return weights * torch.tensor([s.everyone for s in table.sums], device=U.device)


def _resolve_reweighting(piece: Reweighting, table: Table):
    """Return alpha, s, index and owner of the Block of a reweighting."""
    U = table.U
    index = torch.nonzero(piece.dw).reshape(-1).to(U.device)
    s = (U.T[index] != 0) * piece.dw.to(U)[index][:, None]
    return U.new_zeros((1, len(U))), s, index, torch.zeros_like(index)


def _distinct(index: Tensor, n: int) -> tuple[Tensor | None, Tensor | slice]:
    """Return the distinct samples (None: all n in order), and the position of each entry's sample among them."""
    if len(index) == n and bool((index == torch.arange(n, device=index.device)).all()):
        return None, slice(None)
    return torch.unique(index, return_inverse=True)


def _accumulate(total: Tensor, owner: Tensor | None, entries: Tensor) -> None:
    """Add entries, (E, …), to the rows of their owners in `total`; to all rows if owner is None."""
    if owner is None:
        total += entries.sum(0)
    elif len(owner) == len(total) and bool((owner == torch.arange(len(owner), device=owner.device)).all()):
        total += entries
    else:
        total.index_add_(0, owner, entries)


def _not_finite_error(name: str, count: str) -> InvalidInputError:
    return InvalidInputError(
        f"The losses or gradients of {count} perturbed samples of {name!r} are not finite.",
        "They must all be finite.",
        "The influence of such a sample is not defined.",
        "Check these samples, and the loss where its derivative is infinite (sqrt or log at 0).",
    )


def check_perturbation(perturbation: object, name: str = "perturbation") -> None:
    """Refuse an object that is not a Perturbation."""
    check_instance(
        perturbation,
        Perturbation,
        name,
        meaning="Perturbations are made by train.remove(...), .reweight(...), .add(...), constraint.shift(...), "
        "or sums of these.",
        cure="For one sample write train.remove([i]).",
    )


def split_perturbation(perturbation: Perturbation, size: int = 2**14, begin: int = 0) -> Sequence[Perturbation]:
    """Split the perturbations from number `begin` on into chunks of at most `size`."""
    check_perturbation(perturbation)
    P = len(perturbation)
    if begin == 0 and size >= P:
        return [perturbation]
    return [perturbation[start : min(start + size, P)] for start in range(begin, P, size)]
