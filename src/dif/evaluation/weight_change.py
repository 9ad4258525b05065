"""A Perturbation resolved on a Program: δw as α·w plus a few rows per perturbation, never an n × P matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError
from dif.evaluation.batched_program import Stack
from dif.evaluation.probe import check_tensors
from dif.evaluation.program import Program
from dif.evaluation.rows import Rows, Table
from dif.evaluation.sweeps import sample_losses, sample_slopes
from dif.problem.perturbation import Addition, Perturbation, Removal, Reweighting, Shift
from dif.problem.sample_losses import SampleLosses


@dataclass(frozen=True, eq=False)
class Block:
    """How one piece moves the weights of one table: part k by α_pk·w_k, plus s_ek on sample index[e]."""

    touch: Tensor  # (1 + m, k) coefficients of the touched rows on the table's sums, zero elsewhere
    columns: slice  # of p
    alpha: Tensor  # (P, k), or (1, k) for all
    samples: SampleLosses  # the table's, or the added ones
    owner: Tensor | None  # (E,); None: the entries belong to every perturbation
    index: Tensor  # (E,)
    s: Tensor  # (E, k)


class Direction:
    """P directions (δw, δτ) on the rows of a program."""

    def __init__(self, program: Program, perturbation: Perturbation) -> None:
        check_kind(perturbation)
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
    def single(cls, program: Program, perturbation: Perturbation) -> Direction:
        """Resolve what must be one perturbation."""
        direction = cls(program, perturbation)
        if direction.P != 1:
            raise InvalidInputError(
                "perturbations given to change",
                measured=direction.P,
                threshold="1",
                meaning="A Change is the answer to one perturbation.",
                cure="Use scores(...) for many, or change(perturbations[i]).",
            )
        return direction

    @property
    def touched(self) -> int:
        """How many samples are touched, at most."""
        return sum(len(block.index) for block in self.blocks)

    # Resolving

    def _resolve_shift(self, scale: float, piece: Shift) -> None:
        rows = self.program.where(piece.constraint)
        shape = self.program.shapes[[c is piece.constraint for c in self.program.problem.constraints].index(True)]
        if piece.dtau.dim() and piece.dtau.numel() != shape.numel():
            raise InvalidInputError(
                f"shift of {self.program.names[rows.start]}",
                measured=f"{piece.dtau.numel()} values",
                threshold="1" if shape.numel() == 1 else f"1, or {shape.numel()}",
                meaning="A shift moves every row alike, or each by its own amount.",
                cure="Pass one number, or one per row.",
            )
        self.dtau[:, rows] += scale * piece.dtau.reshape(-1).to(self.dtau).expand(rows.stop - rows.start)

    def _resolve(self, scale: float, piece: Removal | Addition | Reweighting) -> None:
        rows, people = self.program.rows, piece.samples.people
        views = [t for t, table in enumerate(rows.tables) if table.samples.people is people]
        if not views:
            raise InvalidInputError(
                f"perturbation of {piece.samples.name!r}",
                measured="no term of the problem uses these samples",
                threshold="at least one",
                meaning="Samples are told apart by identity.",
                cure="Perturb the Samples object from which the objective or the constraints were built.",
            )
        C = rows.C * self._touched(piece.terms)[:, None]
        views = [t for t in views if bool((C[:, rows.columns(t)] != 0).any())]
        if not views:
            raise InvalidInputError(
                f"perturbation of {piece.samples.name!r}",
                measured="none of the terms it is restricted to uses these samples",
                threshold="at least one",
                meaning="Nothing would change.",
                cure="Name terms that use them, or leave terms out.",
            )
        if isinstance(piece, Addition):
            check_tensors(piece.new, self.program.parameters)
        resolve = {Removal: _removed, Addition: _added, Reweighting: _reweighted}[type(piece)]
        for t in views:
            table, columns = rows.tables[t], rows.columns(t)
            live = (C[:, columns] != 0).any(0)  # (k,) the sums that the touched rows use
            alpha, s, samples, index, owner = resolve(piece, table, live)  # type: ignore[operator]
            owner = owner if len(piece) == self.P else None
            self.blocks.append(Block(C[:, columns], columns, scale * alpha, samples, owner, index, scale * s))

    def _touched(self, terms: tuple[Any, ...] | None) -> Tensor:
        touched = self.program.tau.new_zeros(1 + self.program.m)
        if terms is None:
            return touched + 1
        for term in terms:
            if term is self.program.problem.objective:
                touched[0] = 1
            elif any(term is c for c in self.program.problem.constraints):
                rows = self.program.where(term)
                touched[1 + rows.start : 1 + rows.stop] = 1
            else:
                raise InvalidInputError(
                    "terms=",
                    measured=repr(term),
                    threshold="problem.objective or a constraint of the problem, the same object",
                    meaning="Terms are told apart by identity.",
                    cure="Use problem.objective and problem.constraints[j].",
                )
        return touched

    # First-order effects

    def moves(self, theta: Tensor, weights: Tensor, p: Tensor, Dp: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        """How each perturbation moves the rows and the weighted gradient at θ.

        Args:
            theta: Where.
            weights: (1 + m,) weights of the rows, (1, λ̄) for the Lagrangian.
            p: Parts at θ, (K,).
            Dp: Their gradients, (K, d).
            V: Columns along which the gradient is wanted, (d, c).

        Returns:
            bᵀV, (P, c), where b = Σⱼ weightsⱼ δ∇fⱼ; and δf, (P, 1 + m), without the bounds.
        """
        bV = theta.new_zeros((self.P, V.shape[1]))
        df = theta.new_zeros((self.P, 1 + self.program.m))
        for block in self.blocks:
            if bool((block.alpha != 0).any()):
                df += block.alpha @ (block.touch * p[block.columns]).T
                bV += (block.alpha * (weights @ block.touch)) @ (Dp[block.columns] @ V)
            every, place = _unique(block.index, len(block.samples))
            losses, slopes = sample_slopes(block.samples, self.program.parameters, theta, V, every)
            losses, slopes = losses[place], slopes[place]
            _check_finite(losses, slopes, block.samples)
            row_weights = block.s @ block.touch.T  # (E, 1 + m)
            _accumulate(df, block.owner, losses[:, None] * row_weights)
            _accumulate(bV, block.owner, (row_weights @ weights)[:, None] * slopes)
        return bV, df

    def mixed(self, mix: Tensor, theta: Tensor, weights: Tensor, p: Tensor, Dp: Tensor) -> tuple[Tensor, Tensor]:
        """b, (Z, d), and δf, (Z, 1 + m), of Z mixtures of the perturbations, Σₚ mix_zp · (perturbation p).

        One sweep over the touched samples, whatever their number; the arguments are those of `moves`.
        """
        b = theta.new_zeros((len(mix), theta.numel()))
        df = theta.new_zeros((len(mix), 1 + self.program.m))
        for block in self.blocks:
            alpha = mix @ block.alpha.expand(self.P, -1)  # (Z, k)
            df += alpha @ (block.touch * p[block.columns]).T
            b += (alpha * (weights @ block.touch)) @ Dp[block.columns]
            every, place = _unique(block.index, len(block.samples))
            few = block.samples.take(every)
            entries = mix[:, block.owner] if block.owner is not None else mix.sum(1, keepdim=True)  # (Z, E)
            row_weights = block.s @ block.touch.T  # (E, 1 + m)
            df += entries @ (sample_losses(few, self.program.parameters, theta)[place][:, None] * row_weights)
            share = entries * (row_weights @ weights)
            if isinstance(place, Tensor):
                share = share.new_zeros((len(mix), len(few))).index_add(1, place, share)
            rows = Rows(self.program.parameters, (Table(few, (), share),), (), self.program.rows.C[:, :0])
            b += rows.pulled(0, theta, share)[1]
        return b, df

    def moves_by_row(self, theta: Tensor, weights: Tensor, Dp: Tensor, v: Tensor) -> Tensor:
        """weightsⱼ δ∇fⱼ·v of each perturbation and each row j, (P, 1 + m)."""
        total = theta.new_zeros((self.P, 1 + self.program.m))
        for block in self.blocks:
            total += (block.alpha @ (block.touch * (Dp[block.columns] @ v)).T) * weights
            every, place = _unique(block.index, len(block.samples))
            _, slopes = sample_slopes(block.samples, self.program.parameters, theta, v[:, None], every)
            _accumulate(total, block.owner, (block.s @ block.touch.T) * weights * slopes[place])
        return total

    # One perturbation carried out

    def first_order(self, p: int, theta: Tensor, parts: Tensor, Dp: Tensor) -> tuple[Tensor, Tensor]:
        """δf, (1 + m,), and δ∇f, (1 + m, d), of perturbation p at θ, where the parts and their gradients are these."""
        df, DJ = self.touched_samples(p).gradients(theta)
        if not bool(torch.isfinite(df).all() and torch.isfinite(DJ).all()):
            raise _not_finite(", ".join(sorted({block.samples.name for block in self.blocks})), "some")
        A = self.scaled_parts(p)
        return df + A @ parts, DJ + A @ Dp

    def scaled_parts(self, p: int) -> Tensor:
        """A (1 + m, K): the α-part of perturbation p, δf = A·p(θ) + (touched samples)."""
        A = torch.zeros_like(self.program.rows.C)
        for block in self.blocks:
            A[:, block.columns] += block.touch * block.alpha[p if len(block.alpha) > 1 else 0]
        return A

    def touched_samples(self, p: int) -> Rows:
        """The rest of δf as rows of their own, over the touched samples alone."""
        tables, coefficients = [], []
        for block in self.blocks:
            mine = slice(None) if block.owner is None else block.owner == p
            every, place = _unique(block.index[mine], len(block.samples))
            few = block.samples.take(every)
            U = block.s.new_zeros((block.s.shape[1], len(few)))
            U[:, place] = block.s[mine].T
            tables.append(Table(few, (), U))
            coefficients.append(block.touch)
        C = torch.cat([self.program.rows.C[:, :0], *coefficients], 1)
        return Rows(self.program.parameters, tuple(tables), (), C)

    def carried_out(self, p: int) -> Program:
        """The program after perturbation p at ε = 1: weights w + δw, bounds τ + δτ."""
        rows = self.program.rows
        tables = [
            (t.samples, t.U, (rows.C + self.scaled_parts(p))[:, rows.columns(i)]) for i, t in enumerate(rows.tables)
        ]
        functions = rows.C[:, sum(len(t.U) for t in rows.tables) :]
        for block in self.blocks:
            mine = slice(None) if block.owner is None else block.owner == p
            n, k = len(block.samples), block.s.shape[1]
            U = block.s.new_zeros((k, n)).index_add(1, block.index[mine].to(block.s.device), block.s[mine].T)
            found = [i for i, (samples, _, _) in enumerate(tables) if samples is block.samples]
            if found:
                samples, old, C = tables[found[0]]
                tables[found[0]] = (samples, torch.cat([old, U]), torch.cat([C, block.touch], 1))
            else:
                tables.append((block.samples, U, block.touch))
        moved = Rows(
            rows.parameters,
            tuple(Table(samples, (), U) for samples, U, _ in tables),
            rows.functions,
            torch.cat([*(C for _, _, C in tables), functions], 1),
        )
        return replace(self.program, rows=moved, tau=self.program.tau + self.dtau[p])

    def stacked(self) -> Stack:
        """All programs after their perturbations at ε = 1, to be evaluated together."""
        every = [self.carried_out(p) for p in range(self.P)]
        first = every[0].rows
        start = sum(len(t.U) for t in first.tables)
        tables = tuple(
            (table.samples, torch.stack([e.rows.C[:, e.rows.columns(t)] @ e.rows.tables[t].U for e in every]))
            for t, table in enumerate(first.tables)
        )
        tau = torch.stack([e.tau for e in every])
        return Stack(first.parameters, tables, first.functions, first.C[:, start:], tau)


def indispensable(program: Program, samples: SampleLosses) -> dict[int, str]:
    """Samples that are alone in a term of the problem, which would not be defined without them; and in which."""
    found: dict[int, str] = {}
    for number, table in enumerate(program.rows.tables):
        if table.samples.people is samples.people:
            used = (program.rows.C[:, program.rows.columns(number)] != 0).any(0)
            members = table.U != 0
            for k in torch.nonzero(used & (members.sum(1) == 1)).reshape(-1).tolist():
                found[int(members[k].long().argmax())] = table.sums[k].words
    return found


def _removed(piece: Removal, table: Table, live: Tensor):
    U, entries = table.U, piece.entries
    owner, index = entries.owner.to(U.device), entries.index.to(U.device)
    members = U != 0  # (k, n)
    sizes = members.sum(1)  # (k,)
    gone = torch.zeros((len(entries), len(U)), dtype=torch.long, device=U.device)
    gone.index_add_(0, owner, members.T[index].long())
    empty = (gone == sizes) & live
    if bool(empty.any()):
        p, k = (int(i) for i in torch.nonzero(empty)[0])
        words = table.sums[k].words
        raise InvalidInputError(
            f"samples left in {words!r} after perturbation {p} ({piece.labels()[p]})",
            measured=0,
            threshold="at least 1",
            meaning="A term without samples is not defined, so there is nothing to retrain.",
            cure="Remove fewer samples, restrict the removal with terms=[…], or drop the term.",
        )
    renormalised = torch.tensor([s.normalised and piece.renormalise for s in table.sums], device=U.device)
    alpha = torch.where(renormalised, gone.to(U) / (sizes - gone).clamp(min=1), 0.0)
    s = -(1.0 + alpha[owner]) * U.T[index]
    return alpha, s, table.samples, index, owner


def _added(piece: Addition, table: Table, live: Tensor):
    U, entries = table.U, piece.entries
    owner, index = entries.owner.to(U.device), entries.index.to(U.device)
    if piece.like is None:
        unclear = [s.words for s, used in zip(table.sums, live.tolist(), strict=True) if used and not s.everyone]
        if unclear:
            raise InvalidInputError(
                f"membership of the samples added to {piece.samples.name!r}",
                measured=f"unknown in {', '.join(unclear)}",
                threshold="known in every term",
                meaning="Only you know whether a new sample is in a masked mean, or what it weighs in a weighted sum.",
                cure="Say like=i, a sample with the same memberships, or terms=[…].",
            )
        unit = torch.stack([torch.where(row != 0, row, 0.0).max() for row in U]).expand(len(index), len(U))
        unit = unit * torch.tensor([s.everyone for s in table.sums], device=U.device)
    else:
        unit = U.T[piece.like.to(U.device)[index]]  # (E, k)
    sizes = (U != 0).sum(1)
    more = torch.zeros((len(entries), len(U)), dtype=torch.long, device=U.device)
    more.index_add_(0, owner, (unit != 0).long())
    renormalised = torch.tensor([s.normalised and piece.renormalise for s in table.sums], device=U.device)
    alpha = torch.where(renormalised, -more.to(U) / (sizes + more), 0.0)
    return alpha, (1.0 + alpha[owner]) * unit, piece.new.under(table.samples), index, owner


def _reweighted(piece: Reweighting, table: Table, live: Tensor):
    U = table.U
    index = torch.nonzero(piece.dw).reshape(-1).to(U.device)
    s = (U.T[index] != 0) * piece.dw.to(U)[index][:, None]
    return U.new_zeros((1, len(U))), s, table.samples, index, torch.zeros_like(index)


def _unique(index: Tensor, n: int) -> tuple[Tensor | None, Tensor | slice]:
    """The distinct samples (None for all in order) and where each entry finds its own among them."""
    if len(index) == n and bool((index == torch.arange(n, device=index.device)).all()):
        return None, slice(None)
    return torch.unique(index, return_inverse=True)


def _accumulate(total: Tensor, owner: Tensor | None, entries: Tensor) -> None:
    if owner is None:
        total += entries.sum(0)
    elif len(owner) == len(total) and bool((owner == torch.arange(len(owner), device=owner.device)).all()):
        total += entries
    else:
        total.index_add_(0, owner, entries)


def _check_finite(losses: Tensor, slopes: Tensor, samples: SampleLosses) -> None:
    bad = ~(torch.isfinite(losses) & torch.isfinite(slopes).all(1))
    if bool(bad.any()):
        raise _not_finite(samples.name, f"{int(bad.sum())} of {len(bad)}")


def _not_finite(name: str, count: str) -> InvalidInputError:
    return InvalidInputError(
        f"losses or gradients of the perturbed samples of {name!r}",
        measured=f"{count} not finite",
        threshold="0",
        meaning="The influence of such a sample is not defined.",
        cure="Look at those samples, and at the loss where its derivative blows up (sqrt or log at 0).",
    )


def check_kind(perturbation: object) -> None:
    """Refuse what is not a Perturbation."""
    if not isinstance(perturbation, Perturbation):
        raise InvalidInputError(
            "perturbation",
            measured=type(perturbation).__name__,
            threshold="a Perturbation",
            meaning="What is done to the data must be said by train.remove(...), .reweight(...), .add(...), "
            "constraint.shift(...), or sums of these.",
            cure="For one sample write train.remove([i]).",
        )


def chunks(perturbation: Perturbation, size: int = 2**14) -> Sequence[Perturbation]:
    """The perturbations in pieces of at most `size`."""
    check_kind(perturbation)
    return [perturbation[begin : min(begin + size, len(perturbation))] for begin in range(0, len(perturbation), size)]
