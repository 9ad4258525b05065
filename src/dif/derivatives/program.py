"""A Problem compiled for a parameter layout (row 0 is f₀, rows 1 … m are the constraints), and targets beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dif.derivatives.checks import Kink, check_used, find_kinks, probe
from dif.derivatives.losses import sample_gradients, sample_losses, stacked_losses
from dif.derivatives.rows import Rows
from dif.errors import InvalidInputError, count_words, few
from dif.problem.parameters import Parameters
from dif.problem.problem import Problem
from dif.problem.samples import Samples
from dif.problem.term import Constraint, Expression, Kinds, Term
from dif.runtime.inputs import as_index, as_numbers, check_instance


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled problem: rows f = (f₀, f₁ … f_m), bounds τ, and the kinds (≤, =) of the rows."""

    problem: Problem
    parameters: Parameters
    rows: Rows
    tau: Tensor  # (m,)
    kinds: Kinds  # of the m rows
    names: tuple[str, ...]  # of the m rows
    shapes: tuple[torch.Size, ...]  # of the constraints
    terms: Tensor  # (1 + m,) number of the term that each row belongs to: 0 is the objective, 1 the first constraint
    m: int  # constraint rows

    @classmethod
    def of(cls, problem: Problem, parameters: Parameters, theta: Tensor) -> Program:
        """Check the losses and functions of a problem at θ and compile it."""
        check_instance(problem, Problem, "problem", cure="state it as dif.Problem(objective, constraints)")
        terms = [problem.objective, *(c.term for c in problem.constraints)]
        functions = list({id(f): f for t in terms for _, f in t.functions}.values())
        probe(problem.samples, functions, parameters, theta)
        check_used(problem.samples, functions, parameters, theta)
        return cls.compile(problem, parameters, theta)

    @classmethod
    def compile(cls, problem: Problem, parameters: Parameters, theta: Tensor) -> Program:
        """Compile a problem whose losses were checked before."""
        named = zip(problem.constraints, problem.names, strict=True)
        terms = [problem.objective, *(Term(c.term.sums, c.term.functions, c.tau, name) for c, name in named)]
        rows, (first, *shapes), (_, *names) = Rows.compile(terms, parameters, theta)
        if first:
            raise InvalidInputError(
                f"The objective must be a single number, not a vector of length {first.numel()}; add up the rows "
                "inside the function, or make them constraints."
            )
        tau = [c.tau.expand(shape).reshape(-1) for c, shape in zip(problem.constraints, shapes, strict=True)]
        sizes = torch.tensor([1, *(shape.numel() for shape in shapes)], device=theta.device)
        return cls(
            problem,
            parameters,
            rows,
            torch.cat([torch.zeros(0, dtype=torch.float64), *tau]).to(theta),
            Kinds.of(((c.kind, s.numel()) for c, s in zip(problem.constraints, shapes, strict=True)), theta.device),
            tuple(names),
            tuple(shapes),
            torch.repeat_interleave(sizes),
            int(sizes.sum()) - 1,
        )

    def weights(self, lam: Tensor) -> Tensor:
        """Return (1, λ), the weights of the rows in the Lagrangian, (..., 1 + m)."""
        return torch.cat([lam.new_ones((*lam.shape[:-1], 1)), lam], -1)

    def flatten_multipliers(self, multipliers: Any) -> Tensor:
        """Convert multipliers to shape (m,): from a vector, a list per constraint, or a dict by constraint or name."""
        if isinstance(multipliers, Mapping):
            by_name = dict(zip(self.problem.constraints, self.problem.names, strict=True))
            multipliers = {by_name.get(key, key): value for key, value in multipliers.items()}
            unknown = [name for name in multipliers if name not in self.problem.names]
            missing = [name for name in self.problem.names if name not in multipliers]
            if unknown or missing:
                raise InvalidInputError(
                    f"`multipliers` must have one entry for each of {list(self.problem.names)}, but has unknown names "
                    f"{unknown} and lacks the names {missing}."
                )
            multipliers = [multipliers[name] for name in self.problem.names]
        given = multipliers if isinstance(multipliers, Sequence | PerConstraint) else [multipliers]
        vectors = [as_numbers(v, "multipliers").reshape(-1) for v in given]
        flat = torch.cat([torch.zeros(0, dtype=torch.float64), *vectors])
        infinite = int((~torch.isfinite(flat)).sum())
        if flat.numel() != self.m or infinite:
            raise InvalidInputError(
                f"`multipliers` must have {count_words(self.m, 'finite value')}, one per constraint row, not "
                f"{count_words(flat.numel(), 'value')}{f', {infinite} not finite' if infinite else ''}; leave them out "
                "to have them recovered from the parameters."
            )
        return flat.to(self.tau).clone()


@dataclass(frozen=True, eq=False)
class PerConstraint:
    """One tensor per constraint, indexed by position, name or Constraint; `.flat` has all rows."""

    flat: Tensor  # (m,)
    problem: Problem
    shapes: tuple[torch.Size, ...]  # of the constraints

    def __getitem__(self, key: int | str | Constraint) -> Tensor:
        names, number = self.problem.names, as_index(key)
        if isinstance(key, Constraint):
            number = next((j for j, c in enumerate(self.problem.constraints) if c is key), None)
            if number is None:
                raise KeyError(f"{key!r} is not a constraint of this problem. Constraints are told apart by identity.")
        elif isinstance(key, str) and key in names:
            number = names.index(key)
        if number is None or not -len(self) <= number < len(self):
            error = KeyError if number is None else IndexError
            raise error(f"There is no constraint {key!r}. The constraints are {', '.join(names) or 'none'}.")
        return list(self)[number]

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[Tensor]:
        values = torch.split(self.flat, [s.numel() for s in self.shapes]) if self.shapes else ()
        return (value.reshape(shape) for value, shape in zip(values, self.shapes, strict=True))

    def items(self) -> list[tuple[str, Tensor]]:
        """Return (name, values) of each constraint."""
        return list(zip(self.problem.names, self, strict=True))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name}: {value.tolist()}" for name, value in self.items()) + "}"


class Point(Protocol):
    """θ of a compiled problem."""

    program: Program
    theta: Tensor


class Targets:
    """A Term, a list of Terms, a dict of Terms by name, or Samples (one target per sample).

    Perturbations move θ, not the weights of targets.
    """

    def __init__(self, target: Any, point: Point) -> None:
        parameters, theta = point.program.parameters, point.theta
        parameters.check_mode()
        self.samples = target if isinstance(target, Samples) else None
        self.alike = self.samples is not None  # whether all targets are in the same unit
        listed = [target] if isinstance(target, Expression) else target
        if isinstance(target, Mapping):  # its keys name the terms
            listed = [t.named(str(name)) if isinstance(t, Expression) else t for name, t in target.items()]
        terms = list(listed) if isinstance(listed, Sequence) else []
        wrong = [t for t in terms if not isinstance(t, Expression)]
        if wrong or (not terms and self.samples is None):
            entry = "" if isinstance(target, str) or not wrong else f" with an entry of type {type(wrong[0]).__name__}"
            raise InvalidInputError(
                "The target must be a Term, a list of Terms, a dict of Terms by name, or Samples, not of type "
                f"{type(target).__name__}{entry}; for the loss on test data pass dif.Samples(loss, test_data)."
            )
        self.terms: tuple[Term, ...] = tuple(t.as_term() for t in terms)
        constant = [repr(t) for t in self.terms if not t.sums and not t.functions]
        if constant:
            raise InvalidInputError(
                f"The target {few(constant)} is a constant, which does not change with the parameters; build it from "
                "Samples.mean() or a Function."
            )
        used = [s.samples for t in self.terms for _, s in t.sums] if self.samples is None else [self.samples]
        known = {id(table.samples) for table in point.program.rows.tables}
        new = {id(s): s for s in used if id(s) not in known}
        functions = {id(f): f for t in self.terms for _, f in t.functions}
        probe(list(new.values()), list(functions.values()), parameters, theta)
        self.rows, shapes, names = Rows.compile(self.terms, parameters, theta)  # none for Samples
        constants = [t.constant.to(theta).expand(s).reshape(-1) for t, s in zip(self.terms, shapes, strict=True)]
        self.constant = torch.cat([theta.new_zeros(0), *constants])
        if self.samples is not None:
            names = [f"{self.samples.name}[{i}]" for i in range(len(self.samples))]
        self.names = tuple(names)

    def check_single(self, method: str) -> None:
        """Refuse several targets for a method whose result has a column for each term."""
        if len(self.names) != 1:
            raise InvalidInputError(
                f"`{method}` takes exactly 1 target, not {len(self.names)}: the columns of its result are the terms of "
                "the problem."
            )

    def kinks(self, theta: Tensor) -> tuple[Kink, ...]:
        """Find kinks of the targets near θ by probing."""
        return find_kinks(self.rows, theta)

    def values(self, theta: Tensor) -> Tensor:
        """Return the targets at θ, (T,)."""
        if self.samples is not None:
            return sample_losses(self.samples, self.rows.parameters, theta)
        return self.rows.values(theta) + self.constant

    def stacked_values(self, thetas: Tensor) -> Tensor:
        """Return the targets at several θ (P, d), as (P, T)."""
        if self.samples is not None:
            return stacked_losses(self.samples, self.rows.parameters, thetas)
        return self.rows.stacked_values(thetas) + self.constant

    def gradients(self, theta: Tensor) -> Tensor:
        """Return the gradients of the targets at θ as columns, (d, T)."""
        if self.samples is not None:
            Q = sample_gradients(self.samples, self.rows.parameters, theta)
        else:
            Q = self.rows.C @ self.rows.part_gradients(theta)[1]
        bad = torch.nonzero(~torch.isfinite(Q).all(1)).reshape(-1).tolist()
        if bad:
            raise InvalidInputError(
                f"The gradient of {few([self.names[t] for t in bad])} is not finite, so the target has no derivative "
                "at the solution; leave it out, or use Newton or Retraining, which evaluate the target instead."
            )
        return Q.T
