"""The Directional Influence Function: the auxiliary variational inequality, solved as a QP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dif.errors import DegenerateError, InvalidInputError
from dif.estimators.assessment import ASSESSED, Assessor
from dif.estimators.influence import Change, Influence
from dif.estimators.linearisation import Linearisation, checked_damping, none_switched, trust
from dif.estimators.reach import reached
from dif.estimators.scoring import Out
from dif.evaluation.weight_change import Direction, check_kind
from dif.linalg.cholesky import LinearSolver, Solver, prepare
from dif.linalg.multiplier_qp import no_direction
from dif.optimality.active_set import Margin
from dif.optimality.solution import Solution, expect_solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.runtime.inputs import check_number

_ROWS = 64  # whose margins are compared with what perturbations move


class DirectionalInfluence:
    """Predicted changes under constraints, right at the kinks too (paper: DIF, Definition 2 and its QP).

    Args:
        solution: A certified solution.
        switching: Whether constraints may let go or begin to bind within the step. "auto" keeps the rows whose
            slack or multiplier is within reach of what the perturbations move; where none is, the answer is the
            derivative. False is the derivative (the paper's). True keeps every inequality with its slack and
            multiplier, at the price of a solve for each: the linearised variational inequality itself at ε = 1.
        rho: Weight of GᵀG in H_ρ (None: chosen). It does not change the answer.
        damping: δ in H + δI. It changes the answer, and is reported.
        gauss_newton: Leave the curvature of the model out of H (the Samples must know their `outputs`): positive where
            H is not. It changes the answer, and is reported.
        solver: Prepares a solver for H_ρ (None: Cholesky up to a few thousand parameters, conjugate gradients above).
        strict: Raise where the point is not a solution or the derivative does not exist; False records it instead. With
            "auto", scores of perturbations that no step can follow (the constraints contradict each other) are NaN, and
            a warning says which.
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
        self.solution = expect_solution(solution)
        if not (isinstance(switching, bool) or switching == "auto"):
            raise InvalidInputError(
                "switching",
                measured=repr(switching),
                threshold='"auto", True or False',
                meaning="It says whether constraints may let go or begin to bind within the step.",
                cure='Leave it out for "auto", which keeps the constraints that are within reach.',
            )
        self.switching, self.strict = switching, strict
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
        self._prepare = partial(prepare, self._curvature, rho=rho, damping=damping, solver=solver)
        self.linearisation = self._all_rows() if switching is True else self._local()
        self._assessor = Assessor(solution)
        self._near: dict[tuple[int, ...], Linearisation] = {(): self.linearisation}

    def _local(self) -> Linearisation:
        """The derivative: active rows alone."""
        at, active = self.solution, self.solution.active
        kept = _index(active.active, at.theta)
        free = torch.isin(kept, _index(active.binding, at.theta))
        prepared, R = self._prepare(at.G[kept][free])
        weights = at.program.weights(at.lam)
        return Linearisation(at, weights, prepared, kept, free, _spread(R, free), strict=self.strict)

    def _all_rows(self) -> Linearisation:
        """Every row with its slack and multiplier."""
        at = self.solution
        free = at.program.kinds.equal
        try:
            prepared, R = self._prepare(at.G[free])
        except DegenerateError:  # not convex on the equalities alone: hold the binding rows, check their signs later
            free = at.active.mask(at.active.binding)
            prepared, R = self._prepare(at.G[free])
        return self._with_slack(torch.ones_like(free), free, prepared, _spread(R, free), strict=self.strict)

    def _within_reach(self, near: Tensor) -> Linearisation:
        """The active rows and those `near`, these with slack and multiplier; other binding rows hold as equalities."""
        at, local = self.solution, self.linearisation
        binding = at.active.mask(at.active.binding)
        free, held = binding & ~near | at.program.kinds.equal, local.kept[local.free]
        solver, R = local.solver, torch.zeros_like(at.lam)
        R[held] = local.R[local.free]
        if not torch.equal(free, binding):
            try:
                solver, R_free = self._prepare(at.G[free])
                R = _spread(R_free, free)
            except DegenerateError:  # convex only while the binding rows hold
                free = binding
        kept = at.active.mask(at.active.active) | near
        return self._with_slack(kept, free, solver, R, strict=False, lenient=True)

    def _with_slack(self, kept: Tensor, free: Tensor, solver: LinearSolver, R: Tensor, **how: bool) -> Linearisation:
        """Rows given as masks over all, which begin from their slack and multiplier."""
        at, index = self.solution, torch.nonzero(kept).reshape(-1)
        weights = at.program.weights(at.lam)
        return Linearisation(
            at, weights, solver, index, free[index], R[index], c0=at.c[index], lam0=at.lam[index], **how
        )

    def _for(self, perturbations: Perturbation) -> Linearisation:
        """What these perturbations need: rows that they reach are added until they reach no other."""
        check_kind(perturbations)
        near, lin = self.solution.active.mask(()), self.linearisation
        while self.switching == "auto" and bool(self.solution.program.kinds.one_sided.any()):
            more = near | reached(lin, perturbations)
            if torch.equal(more, near):
                break
            near, rows = more, tuple(torch.nonzero(more).reshape(-1).tolist())
            if rows not in self._near:
                self._near[rows] = self._within_reach(near)
            lin = self._near[rows]
        return lin

    def change(self, perturbation: Perturbation) -> Change:
        """Δθ and Δλ of one perturbation, carried out in full."""
        Direction.single(self.solution.program, perturbation)  # refuses more than one
        lin = self._for(perturbation)
        change = lin.change(perturbation, self._about(lin))
        if self.strict and change.diagnostics["unanswered"]:
            raise no_direction(*next(iter(change.diagnostics["unanswered"].items())))
        if self.switching:
            change.diagnostics["switched"] = bool(self._switched(change.multipliers.flat[None] + self.solution.lam))
        return change

    def scores(
        self, target: Any, perturbations: Perturbation, *, out: Out = None, jobs: int = 1,
        show_progress: bool = True, assess: int = ASSESSED,
    ) -> Influence:  # fmt: skip
        """Predicted change of each target under each perturbation, qᵀΔθ; keywords as in `dif.Estimator`.

        For so many of the strongest as `assess` says, and as many others at random, the error to be expected is found:
        `Influence.expected_error`, `Influence.trusted`; a FirstOrderWarning says where the scores are not to be
        trusted. 0 leaves that out.
        """
        lin, look = self._for(perturbations), self._assessor.assess(assess)
        count = partial(self._count, lin) if self.switching else none_switched
        return lin.influence(
            self._title, target, perturbations, self._about(lin), out, jobs, show_progress, look, count
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
        lin = self._for(perturbations)
        values = lin.by_row(targets, perturbations).double().cpu()
        names = ("objective", *self.solution.program.names)
        title = f"{self._title}, by term, on {targets.names[0]}"
        return Influence(values, perturbations, names, title, self._about(lin))

    def prices(self, perturbations: Perturbation) -> Influence:
        """How much the multiplier of each constraint changes: which samples set what a constraint costs.

        A multiplier is the price of its constraint, the fall of the objective per unit that the bound is loosened. A
        negative entry: carrying the perturbation out makes the constraint cheaper.
        """
        lin = self._for(perturbations)
        values = lin.multiplier_changes(perturbations).double().cpu()
        names = self.solution.program.names
        return Influence(values, perturbations, names, f"{self._title}, prices", self._about(lin))

    def margins(self, perturbations: Perturbation) -> list[Margin | None]:
        """For each row of the constraints: how far perturbations move what decides whether it binds.

        That is the multiplier of a row that binds, and f − τ of one that does not. None for equalities, and beyond the
        64 rows that are nearest to switching.
        """
        at, lin = self.solution, self._for(perturbations)
        found: list[Margin | None] = [None] * at.program.m
        rows = torch.nonzero(at.program.kinds.one_sided).reshape(-1)
        nearness = torch.where(at.active.mask(at.active.binding), at.active.force, at.active.slack)
        rows = rows[torch.argsort(nearness[rows])[:_ROWS]]
        if len(rows):
            moved, priced = (x.abs().double().cpu() for x in lin.margins(rows, perturbations))
            answered = torch.isfinite(moved).all(1)
            for k, j in enumerate(rows.tolist()):
                deciding = (priced if j in at.active.binding else moved)[answered, k]
                if len(deciding):
                    found[j] = Margin(float(deciding.max()), float(deciding.median()))
        return found

    def reevaluated(self, target: Any, perturbations: Perturbation, *, show_progress: bool = True) -> Influence:
        """The difference of each target between θ̄ and θ̄ + Δθ, where `scores` has its first-order part qᵀΔθ."""
        lin = self._for(perturbations)
        return lin.reevaluated(self._title, target, perturbations, self._about(lin), show_progress)

    @property
    def _title(self) -> str:
        return self.name + {"auto": "", True: " (switching)", False: " (derivative)"}[self.switching]

    def _about(self, lin: Linearisation) -> dict[str, Any]:
        names = self.solution.program.names
        near = next(rows for rows, one in self._near.items() if one is lin)
        return {**self._diagnostics, "within_reach": [names[j] for j in near]}

    def ends(self, perturbations: Perturbation) -> tuple[Tensor, Tensor]:
        """Δθ of each perturbation, (P, d), and the multipliers after it, (P, m)."""
        return self._for(perturbations).ends(perturbations)

    def _count(self, lin: Linearisation, nu: Tensor) -> int:
        return int(self._switched(self.solution.lam + lin.multiplier_change(nu)).sum())

    def _switched(self, nu: Tensor) -> Tensor:
        """For which perturbations a constraint lets go or begins to bind within the step, (P,) bool."""
        at, active = self.solution, self.solution.active
        binding = _index(active.binding, at.theta)
        binding = binding[at.program.kinds.one_sided[binding]]
        inactive = _index(active.inactive, at.theta)
        return (nu[:, binding] <= 0).any(1) | (nu[:, inactive] > 0).any(1)


def _index(rows: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.long, device=like.device)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    out = values.new_zeros(len(mask))
    out[mask] = values
    return out
