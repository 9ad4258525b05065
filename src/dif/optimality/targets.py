"""Targets of scores: T numbers that depend on θ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dif.errors import InvalidInputError, few
from dif.evaluation.kinks import Kink, find_kinks
from dif.evaluation.probe import probe
from dif.evaluation.rows import Rows, name_rows
from dif.evaluation.sweeps import sample_gradients, sample_losses, stacked_losses
from dif.optimality.solution import Solution
from dif.problem.parameters import Parameters
from dif.problem.samples import Samples
from dif.problem.term import Expression


class Targets:
    """A Term, a list of Terms, or Samples (one target per sample). Perturbations move θ, not the weights of targets."""

    def __init__(self, target: Any, solution: Solution) -> None:
        self._parameters: Parameters = solution.program.parameters
        self._parameters.check_mode()
        theta = solution.theta
        known = {id(table.samples) for table in solution.program.rows.tables}
        self.alike = isinstance(target, Samples)  # whether all targets are in the same unit
        if isinstance(target, Samples):
            self.samples, self.rows, self.constant = target, None, theta.new_zeros(())
            self.names = tuple(f"{target.name}[{i}]" for i in range(len(target)))
            if id(target) not in known:
                probe([target], [], self._parameters, theta)
            return
        listed = [target] if isinstance(target, Expression) else list(target) if isinstance(target, Sequence) else []
        if not listed or not all(isinstance(t, Expression) for t in listed):
            raise InvalidInputError(
                f"The target is of type {type(target).__name__}.",
                "It must be a Term, a list of Terms, or Samples.",
                "A score is the change of a number that depends on the parameters.",
                "For the loss on test data pass dif.Samples(loss, test_data), or its .mean().",
            )
        terms = [t.as_term() for t in listed]
        constant = [repr(t) for t in terms if not t.sums and not t.functions]
        if constant:
            raise InvalidInputError(
                f"The target {few(constant)} is a constant.",
                "It must be a Term with samples or functions in it.",
                "A constant does not change with the parameters.",
                "Build the target from Samples.mean() or a Function.",
            )
        new = {id(s.samples): s.samples for t in terms for _, s in t.sums if id(s.samples) not in known}
        functions = {id(f): f for t in terms for _, f in t.functions}
        probe(list(new.values()), list(functions.values()), self._parameters, theta)
        self.samples = None
        self.rows, shapes = Rows.compile(terms, self._parameters, theta)
        self.constant = torch.cat(
            [term.constant.to(theta).expand(shape).reshape(-1) for term, shape in zip(terms, shapes, strict=True)]
        )
        self.names = name_rows((repr(term)[5:-1] for term in terms), shapes)

    def check_single(self, method: str) -> None:
        """Refuse several targets for a method whose result has a column for each term."""
        if len(self.names) != 1:
            raise InvalidInputError(
                f"`{method}` was given {len(self.names)} targets.",
                "It takes exactly 1 target.",
                "The columns of its result are the terms of the problem.",
                "Call it once for each target.",
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
                f"The gradient of {few([self.names[t] for t in bad])} is not finite.",
                "The gradients of all targets must be finite.",
                "The target has no derivative at the solution, so no first-order change.",
                "Leave it out, or use Newton or Retraining, which evaluate the target instead.",
            )
        return Q.T
