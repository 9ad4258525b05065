"""Targets of scores: T numbers that depend on θ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dif.derivatives.checks import Kink, find_kinks, probe
from dif.derivatives.program import Program
from dif.derivatives.rows import Rows, name_rows
from dif.derivatives.sweeps import sample_gradients, sample_losses, stacked_losses
from dif.errors import InvalidInputError, few
from dif.problem.parameters import Parameters
from dif.problem.samples import Samples
from dif.problem.term import Expression, Term


class Point(Protocol):
    """θ of a compiled problem."""

    program: Program
    theta: Tensor


class Targets:
    """A Term, a list of Terms, a dict of Terms by name, or Samples (one target per sample).

    Perturbations move θ, not the weights of targets.
    """

    def __init__(self, target: Any, point: Point) -> None:
        self._parameters: Parameters = point.program.parameters
        self._parameters.check_mode()
        theta = point.theta
        known = {id(table.samples) for table in point.program.rows.tables}
        self.alike = isinstance(target, Samples)  # whether all targets are in the same unit
        if isinstance(target, Samples):
            self.samples, self.rows, self.constant = target, None, theta.new_zeros(())
            self.terms: tuple[Term, ...] = ()
            self.names = tuple(f"{target.name}[{i}]" for i in range(len(target)))
            if id(target) not in known:
                probe([target], [], self._parameters, theta)
            return
        terms = _list_terms(target)
        constant = [repr(t) for t in terms if not t.sums and not t.functions]
        if constant:
            raise InvalidInputError(
                f"The target {few(constant)} is a constant, which does not change with the parameters; build it from "
                "Samples.mean() or a Function."
            )
        new = {id(s.samples): s.samples for t in terms for _, s in t.sums if id(s.samples) not in known}
        functions = {id(f): f for t in terms for _, f in t.functions}
        probe(list(new.values()), list(functions.values()), self._parameters, theta)
        self.samples, self.terms = None, terms
        self.rows, shapes = Rows.compile(terms, self._parameters, theta)
        self.constant = torch.cat(
            [term.constant.to(theta).expand(shape).reshape(-1) for term, shape in zip(terms, shapes, strict=True)]
        )
        self.names = name_rows((term.label for term in terms), shapes)

    def check_single(self, method: str) -> None:
        """Refuse several targets for a method whose result has a column for each term."""
        if len(self.names) != 1:
            raise InvalidInputError(
                f"`{method}` takes exactly 1 target, not {len(self.names)}: the columns of its result are the terms of "
                "the problem."
            )

    def kinks(self, theta: Tensor) -> tuple[Kink, ...]:
        """Find kinks of the targets near θ by probing."""
        return () if self.rows is None else find_kinks(self.rows, theta)

    def values(self, theta: Tensor) -> Tensor:
        """Return the targets at θ, (T,)."""
        if self.rows is not None:
            return self.rows.values(theta) + self.constant
        assert self.samples is not None
        return sample_losses(self.samples, self._parameters, theta)

    def stacked_values(self, thetas: Tensor) -> Tensor:
        """Return the targets at several θ (P, d), as (P, T)."""
        if self.rows is not None:
            return self.rows.stacked_values(thetas) + self.constant
        assert self.samples is not None
        return stacked_losses(self.samples, self._parameters, thetas)

    def gradients(self, theta: Tensor) -> Tensor:
        """Return the gradients of the targets at θ as columns, (d, T)."""
        if self.rows is not None:
            Q = self.rows.gradients(theta)[1]
        else:
            assert self.samples is not None
            Q = sample_gradients(self.samples, self._parameters, theta).detach()
        bad = torch.nonzero(~torch.isfinite(Q).all(1)).reshape(-1).tolist()
        if bad:
            raise InvalidInputError(
                f"The gradient of {few([self.names[t] for t in bad])} is not finite, so the target has no derivative "
                "at the solution; leave it out, or use Newton or Retraining, which evaluate the target instead."
            )
        return Q.T


def _list_terms(target: Any) -> tuple[Term, ...]:
    """Return the Terms of a target that is not Samples; those of a dict are named by its keys."""
    if isinstance(target, Mapping):
        listed = [t.named(str(name)) if isinstance(t, Expression) else t for name, t in target.items()]
    else:
        listed = [target] if isinstance(target, Expression) else list(target) if isinstance(target, Sequence) else []
    wrong = [t for t in listed if not isinstance(t, Expression)]
    if wrong or not listed:
        inside = f" with an entry of type {type(wrong[0]).__name__}" if wrong and not isinstance(target, str) else ""
        raise InvalidInputError(
            "The target must be a Term, a list of Terms, a dict of Terms by name, or Samples, not of type "
            f"{type(target).__name__}{inside}; for the loss on test data pass dif.Samples(loss, test_data)."
        )
    return tuple(t.as_term() for t in listed)
