"""The Directional Influence Function: the auxiliary variational inequality, solved as a QP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from dif.derivatives.weight_change import check_perturbation
from dif.errors import DegenerateError, InvalidInputError
from dif.estimators.change import Change
from dif.estimators.first_order import FirstOrderEstimator
from dif.estimators.influence import Influence
from dif.estimators.linearisation import Linearisation
from dif.estimators.reach import rows_within_reach
from dif.linalg.cholesky import Solver
from dif.optimality.active_set import Margin
from dif.optimality.kkt_system import KKTSystem
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.runtime.inputs import check_number

_MARGIN_ROWS = 64  # rows nearest to switching whose margins are computed


class DirectionalInfluence(FirstOrderEstimator):
    """Predicted changes under constraints, also where constraints switch (paper: DIF, Definition 2 and its QP).

    Args:
        solution: A certified solution.
        switching: Whether constraints may become active or inactive within the step. "auto" allows it for the rows
            whose slack or multiplier is within reach of what the perturbations move; where none is, the answer is the
            derivative. False is the derivative (the paper's). True allows it for every inequality, at the price of a
            solve for each: the linearised variational inequality itself at ε = 1.
        rho: Weight of GᵀG in H_ρ (None: chosen). It does not change the answer.
        damping: δ in H + δI. It changes the answer and is reported.
        gauss_newton: Use the Gauss–Newton matrix instead of H (the Samples must define `outputs`): it is never
            negative. It changes the answer and is reported.
        solver: Builds a solver for H_ρ (None: Cholesky up to a few thousand parameters, conjugate gradients above).
        strict: Raise where the point is not a solution or the derivative does not exist; False records it instead. With
            "auto", scores of perturbations that no step can follow (the constraints contradict each other) are NaN, and
            a warning names them.
    """

    name = "DIF"

    def __init__(
        self,
        solution: Solution,
        *,
        switching: bool | Literal["auto"] = "auto",
        rho: float | None = None,
        damping: float = 0.0,
        gauss_newton: bool = False,
        solver: Solver = None,
        strict: bool = True,
    ) -> None:
        if not (isinstance(switching, bool) or (isinstance(switching, str) and switching == "auto")):
            raise InvalidInputError(
                f"`switching` is {switching!r}.",
                'It must be "auto", True or False.',
                "It says whether constraints may become active or inactive within the step.",
                'Leave it out for "auto".',
            )
        super().__init__(solution, damping, strict, gauss_newton=gauss_newton, switching=switching)
        self.switching = switching
        self.title += {"auto": "", True: " (switching)", False: " (derivative)"}[switching]
        self._curvature = replace(solution.curvature, gauss_newton=True) if gauss_newton else solution.curvature
        if rho is not None:
            rho = check_number(
                rho,
                "rho",
                zero=True,
                meaning="It weighs GᵀG in H_ρ, makes H_ρ positive definite and does not change the answer.",
                cure="Leave it out to have it chosen.",
            )
        if strict:
            solution.active.check(damped=self.damping > 0 or gauss_newton)
        self._options = {"rho": rho, "damping": self.damping, "solver": solver}
        self._weights = solution.program.weights(solution.lam)
        self.linearisation = self._with_all_rows() if switching is True else self._derivative()
        self._linearised: dict[tuple[int, ...], Linearisation] = {(): self.linearisation}  # by rows within reach

    def _derivative(self) -> Linearisation:
        """Linearise with the active rows only."""
        at, active = self.solution, self.solution.active
        rows = torch.nonzero(active.mask(active.active)).reshape(-1)
        equal = active.mask(active.binding)[rows]
        system = KKTSystem.prepare(self._curvature, at.G[rows], equal, **self._options)
        return Linearisation(at, self._weights, system, rows, equal, strict=self.strict)

    def _with_all_rows(self) -> Linearisation:
        """Linearise with every row, each from its slack and multiplier."""
        at = self.solution
        binding, rows = at.active.mask(at.active.binding), torch.arange(at.program.m, device=at.theta.device)
        system = KKTSystem.prepare_convex(self._curvature, at.G, at.program.kinds, binding, **self._options)
        return Linearisation(at, self._weights, system, rows, system.firm, from_point=True, strict=self.strict)

    def _with_rows_within_reach(self, near: Tensor) -> Linearisation:
        """Linearise with the active rows and those `near`, which may switch; other binding rows are equalities."""
        at, local = self.solution, self.linearisation
        binding = at.active.mask(at.active.binding)
        rows = torch.nonzero(at.active.mask(at.active.active) | near).reshape(-1)
        equal, R = (binding & ~near | at.program.kinds.equal)[rows], torch.zeros_like(at.lam)
        R[local.rows] = local.system.R
        system = KKTSystem(self._curvature, at.G[rows], binding[rows], R[rows], local.system.solver)
        if not torch.equal(equal, binding[rows]):
            try:
                system = KKTSystem.prepare(self._curvature, at.G[rows], equal, **self._options)
            except DegenerateError:  # convex only while the binding rows hold
                equal = binding[rows]
        return Linearisation(at, self._weights, system, rows, equal, from_point=True, strict=False, lenient=True)

    def linearise(self, perturbations: Perturbation) -> Linearisation:
        """Return the linearised problem for these perturbations: rows they reach are added until they reach no more."""
        check_perturbation(perturbations)
        near, lin = self.solution.active.mask(()), self.linearisation
        while self.switching == "auto" and bool(self.solution.program.kinds.one_sided.any()):
            more = near | rows_within_reach(lin, perturbations)
            if torch.equal(more, near):
                break
            near, numbers = more, tuple(torch.nonzero(more).reshape(-1).tolist())
            if numbers not in self._linearised:
                self._linearised[numbers] = self._with_rows_within_reach(near)
            lin = self._linearised[numbers]
        return lin

    def change(self, perturbation: Perturbation) -> Change:
        """Predict Δθ and Δλ of one perturbation, carried out in full."""
        change = super().change(perturbation)
        if self.switching:
            change.diagnostics["switched"] = bool(
                self._find_switched(change.multipliers.flat[None] + self.solution.lam)
            )
        return change

    def by_term(self, target: Any, perturbations: Perturbation) -> Influence:
        """Split the scores of one target by term: a column for the objective and each constraint.

        A sample acts through a constraint by changing its gradient (weighted by the multiplier) and its value (which
        moves the solution along with the bound). The columns add up to `scores`.
        """
        targets = Targets(target, self.solution)
        targets.check_single("by_term")
        lin = self.linearise(perturbations)
        values = lin.scores_by_row(targets, perturbations).double().cpu()
        names = ("objective", *self.solution.program.names)
        title = f"{self.title}, by term, on {targets.names[0]}"
        return Influence(values, perturbations, names, title, self._describe(lin))

    def prices(self, perturbations: Perturbation) -> Influence:
        """Predict the change of each constraint's multiplier, with one column per constraint.

        A multiplier is the price of its constraint: by how much the objective falls per unit by which the bound is
        loosened. A negative entry says that the perturbation makes the constraint cheaper.
        """
        lin = self.linearise(perturbations)
        values = lin.multiplier_changes(perturbations).double().cpu()
        names = self.solution.program.names
        return Influence(values, perturbations, names, f"{self.title}, prices", self._describe(lin))

    def margins(self, perturbations: Perturbation) -> list[Margin | None]:
        """Measure, for each row of the constraints, how far perturbations move it towards switching.

        For a row that binds that is the change of its multiplier, for another row that of f − τ. The entry is None for
        equalities, and for all but the 64 rows that are nearest to switching.
        """
        at, lin = self.solution, self.linearise(perturbations)
        margins: list[Margin | None] = [None] * at.program.m
        rows = torch.nonzero(at.program.kinds.one_sided).reshape(-1)
        nearness = torch.where(at.active.mask(at.active.binding), at.active.force, at.active.slack)
        rows = rows[torch.argsort(nearness[rows])[:_MARGIN_ROWS]]
        if len(rows):
            dc, dlam = (x.abs().double().cpu() for x in lin.margins(rows, perturbations))
            answered = torch.isfinite(dc).all(1)
            for k, j in enumerate(rows.tolist()):
                deciding = (dlam if j in at.active.binding else dc)[answered, k]
                if len(deciding):
                    margins[j] = Margin(float(deciding.max()), float(deciding.median()))
        return margins

    def _describe(self, lin: Linearisation) -> dict[str, Any]:
        names = self.solution.program.names
        near = next(rows for rows, linearisation in self._linearised.items() if linearisation is lin)
        return {**self._diagnostics, "within_reach": [names[j] for j in near]}

    def _find_switched(self, lam: Tensor) -> Tensor:
        if not self.switching:
            return super()._find_switched(lam)
        active = self.solution.active
        forced = self.solution.program.kinds.has_force(lam)
        return (active.mask(active.binding) & ~forced | active.mask(active.inactive) & forced).any(1)
