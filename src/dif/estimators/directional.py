"""The Directional Influence Function: the auxiliary variational inequality, solved as a QP."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dif.errors import DegenerateError, InvalidInputError
from dif.influence import Change, Influence
from dif.linear_solve import Solver, prepare
from dif.linearisation import Linearisation, checked_damping, none_switched, trust
from dif.perturbation import Perturbation
from dif.reading import check_number
from dif.solution import Solution, expect_solution
from dif.targets import Targets


class DirectionalInfluence:
    """Predicted changes under constraints, right at the kinks too (paper: DIF, Definition 2 and its QP).

    Args:
        solution: A certified solution.
        switching: Solve the linearised variational inequality itself at ε = 1: every inequality is kept with its
            slack and multiplier, so constraints may let go or begin to bind within the step. The same first order;
            better where a constraint is nearly weak.
        rho: Weight of GᵀG in H_ρ (None: chosen). It does not change the answer.
        damping: δ in H + δI. It changes the answer, and is reported.
        gauss_newton: Leave the curvature of the model out of H (the Samples must know their `outputs`): positive where
            H is not. It changes the answer, and is reported.
        solver: Prepares a solver for H_ρ (None: Cholesky up to a few thousand parameters, conjugate gradients above).
        strict: Raise where the point is not a solution or the derivative does not exist; False records it instead.
    """

    name = "DIF"

    def __init__(
        self,
        solution: Solution,
        *,
        switching: bool = False,
        rho: float | None = None,
        damping: float = 0.0,
        gauss_newton: bool = False,
        solver: Solver = None,
        strict: bool = True,
    ) -> None:
        self.solution = expect_solution(solution)
        self.switching = switching
        self._curvature = replace(solution.curvature, gauss_newton=True) if gauss_newton else solution.curvature
        damping = checked_damping(damping)
        if rho is not None:
            rho = check_number(
                rho, "rho", zero=True, meaning="It weighs GᵀG in H_ρ.", cure="Leave it out: it is chosen."
            )
        if strict:
            solution.check()
            solution.active.check(damped=damping > 0 or gauss_newton)
        settings = {"damping": damping, "gauss_newton": gauss_newton, "switching": switching, "strict": strict}
        self._diagnostics = {**trust(solution), **settings}
        self.linearisation = (self._switching if switching else self._local)(rho, damping, solver, strict)

    def _local(self, rho: float | None, damping: float, solver: Solver, strict: bool) -> Linearisation:
        at, active = self.solution, self.solution.active
        kept = _index(active.active, at.theta)
        free = torch.isin(kept, _index(active.binding, at.theta))
        prepared, R_free = prepare(self._curvature, at.G[kept][free], rho, damping, solver)
        return Linearisation(at, at.program.weights(at.lam), prepared, kept, free, _spread(R_free, free), strict=strict)

    def _switching(self, rho: float | None, damping: float, solver: Solver, strict: bool) -> Linearisation:
        at = self.solution
        kept = torch.arange(at.program.m, device=at.theta.device)
        free = at.program.equality
        try:
            prepared, R_free = prepare(self._curvature, at.G[free], rho, damping, solver)
        except DegenerateError:  # not convex on the equalities alone: hold the binding rows, check their signs later
            free = torch.isin(kept, _index(at.active.binding, at.theta))
            prepared, R_free = prepare(self._curvature, at.G[free], rho, damping, solver)
        return Linearisation(
            at,
            at.program.weights(at.lam),
            prepared,
            kept,
            free,
            _spread(R_free, free),
            c0=at.c,
            lam0=at.lam,
            strict=strict,
        )

    def change(self, perturbation: Perturbation) -> Change:
        """Δθ and Δλ of one perturbation, carried out in full."""
        change = self.linearisation.change(perturbation, self._diagnostics)
        if self.switching:
            change.diagnostics["switched"] = bool(self._switched(change.multipliers.flat[None] + self.solution.lam))
        return change

    def scores(
        self,
        target: Any,
        perturbations: Perturbation,
        *,
        out: str | os.PathLike[str] | None = None,
        jobs: int = 1,
        show_progress: bool = True,
    ) -> Influence:
        """Predicted change of each target under each perturbation, qᵀΔθ.

        With `out`, a name ending in .npy or .zarr, the scores go there as they come (NaN until then) and are not held
        in memory; `Influence.load` reads them, and the same call goes on where an earlier one was interrupted. `jobs`
        processes share the work (joblib; its `parallel_config` chooses the backend).
        """
        name = self.name + (" (switching)" if self.switching else "")
        count = self._count if self.switching else none_switched
        return self.linearisation.influence(
            name, target, perturbations, self._diagnostics, out, show_progress, jobs, count
        )

    def by_term(self, target: Any, perturbations: Perturbation) -> Influence:
        """Through which term each perturbation acts on one target: a column for the objective and each constraint.

        A sample acts through a constraint by what it does to its gradient (weighed by the multiplier) and to its value
        (which moves the solution along with the bound). The columns add up to `scores`.
        """
        targets = Targets(target, self.solution)
        if len(targets.names) != 1:
            raise InvalidInputError(
                "targets of by_term",
                measured=len(targets.names),
                threshold="1",
                meaning="Its columns are the terms of the problem.",
                cure="Ask for one target after the other.",
            )
        values = self.linearisation.by_row(targets, perturbations).double().cpu()
        names = ("objective", *self.solution.program.names)
        return Influence(
            values, perturbations, names, f"{self.name}, by term, on {targets.names[0]}", self._diagnostics
        )

    def prices(self, perturbations: Perturbation) -> Influence:
        """How much the multiplier of each constraint changes: which samples set what a constraint costs.

        A multiplier is the price of its constraint, the fall of the objective per unit that the bound is loosened. A
        negative entry: carrying the perturbation out makes the constraint cheaper.
        """
        values = self.linearisation.multiplier_changes(perturbations).double().cpu()
        return Influence(values, perturbations, self.solution.program.names, f"{self.name}, prices", self._diagnostics)

    def reevaluated(self, target: Any, perturbations: Perturbation, *, show_progress: bool = True) -> Influence:
        """The difference of each target between θ̄ and θ̄ + Δθ, where `scores` has its first-order part qᵀΔθ."""
        name = self.name + (" (switching)" if self.switching else "")
        return self.linearisation.reevaluated(name, target, perturbations, self._diagnostics, show_progress)

    def _count(self, nu: Tensor) -> int:
        return int(self._switched(nu).sum())

    def _switched(self, nu: Tensor) -> Tensor:
        """For which perturbations a constraint lets go or begins to bind within the step, (P,) bool."""
        at, active = self.solution, self.solution.active
        binding = _index(active.binding, at.theta)
        binding = binding[~at.program.equality[binding]]
        inactive = _index(active.inactive, at.theta)
        return (nu[:, binding] <= 0).any(1) | (nu[:, inactive] > 0).any(1)


def _index(rows: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.long, device=like.device)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    out = values.new_zeros(len(mask))
    out[mask] = values
    return out
