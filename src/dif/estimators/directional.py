"""The Directional Influence Function: the auxiliary variational inequality, solved as a QP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dif.derivatives.program import Targets
from dif.derivatives.weight_change import Direction
from dif.errors import DegenerateError, InvalidInputError
from dif.estimators.first_order import FirstOrderEstimator
from dif.estimators.protocol import resolve
from dif.linalg.solvers import Solver
from dif.optimality.judgement import Margin
from dif.optimality.kkt_system import KKTSystem, Response
from dif.optimality.solution import Solution
from dif.problem.perturbation import Perturbation
from dif.results.influence import Influence
from dif.runtime.inputs import check_number

_MARGIN_ROWS = 64  # rows nearest to switching whose margins are computed
_CHUNK = 2**17  # perturbations whose rows are in memory at once
_PERTURBATIONS = 32  # perturbations at most under each of which the moves of all rows are computed
_PARAMETERS = 64  # parameters up to which they are for any number of perturbations
_COLUMNS = 3  # products per sample up to which they are, too: mixtures cost as much
_NUMBERS = 2**25  # entries of their steps and rows at most: 256 MiB in double precision
_MIXTURES = 8  # random mixtures of the perturbations, where there are more
_MIXTURES_WITHOUT_HESSIAN = 4  # the same, where each solve is by conjugate gradients
_MARGIN = 3.0  # a row is within reach up to this many times the estimated move of its slack or multiplier
_ROWS = 64  # rows at most that are taken, or whose moves are computed, without asking whether fewer would do
_ROUNDING = 1e-10  # relative size up to which a violation counts as rounding

Work = Callable[[KKTSystem, Direction], tuple[Tensor, Response]]  # numbers for each perturbation, (P, columns)


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
            raise InvalidInputError(f'`switching` must be "auto", True or False, not {switching!r}.')
        super().__init__(solution, damping, strict, gauss_newton=gauss_newton, switching=switching)
        self.switching = switching
        self.title += {"auto": "", True: " (switching)", False: " (derivative)"}[switching]
        if strict:
            solution.check(independent=True, minimum=not (self.damping > 0 or gauss_newton))
        at, active, program = solution, solution.active, solution.program
        self._curvature = replace(at.curvature, gauss_newton=True) if gauss_newton else at.curvature
        rho = None if rho is None else check_number(rho, "rho", zero=True)
        self._options = {"rho": rho, "damping": self.damping, "solver": solver}
        self.weights = program.weights(at.lam)
        rows, binding = torch.arange(program.m, device=at.theta.device), active.is_binding
        if switching is True:  # every row, from its slack and multiplier
            system = KKTSystem.prepare_convex(self._curvature, at.G, program.kinds, binding, **self._options)
            self.system = system.start(rows, system.firm, at.c, at.lam, system.firm & program.kinds.one_sided)
        else:
            rows = rows[active.is_active]
            system = KKTSystem.prepare(self._curvature, at.G[rows], binding[rows], **self._options)
            self.system = system.start(rows, binding[rows])
        _ = self.system.V  # solved now, once for any number of perturbations
        self._systems: dict[tuple[int, ...], KKTSystem] = {(): self.system}  # by rows within reach
        self._notes[self.system] = {"within_reach": []}
        self._most = max(1, min(_CHUNK, _NUMBERS // (at.theta.numel() + program.m)))  # perturbations at once

    def linearise(self, direction: Direction) -> KKTSystem:
        """Return the linearised problem for these perturbations: rows they reach are added until they reach no more.

        Its rows are the active ones and those within reach, which may switch; other binding rows are equalities.
        """
        at, active, kinds = self.at, self.at.active, self.at.program.kinds
        binding, near, system = active.is_binding, torch.zeros_like(active.is_binding), self.system
        while self.switching == "auto" and bool(kinds.one_sided.any()):
            more = near | self._rows_within_reach(system, direction)
            if torch.equal(more, near):
                break
            near, numbers = more, tuple(torch.nonzero(more).reshape(-1).tolist())
            if numbers not in self._systems:
                rows = torch.nonzero(active.is_active | near).reshape(-1)
                equal, R = (binding & ~near | kinds.equal)[rows], torch.zeros_like(at.lam)
                R[self.system.rows] = self.system.R
                system = KKTSystem(self._curvature, at.G[rows], binding[rows], R[rows], self.system.solver)
                if not torch.equal(equal, binding[rows]):
                    try:
                        system = KKTSystem.prepare(self._curvature, at.G[rows], equal, **self._options)
                    except DegenerateError:  # convex only while the binding rows hold
                        equal = binding[rows]
                self._systems[numbers] = system = system.start(rows, equal, at.c, at.lam)
                self._notes[system] = {"within_reach": [at.program.names[j] for j in numbers]}
            system = self._systems[numbers]
        return system

    def by_term(self, target: Any, perturbations: Perturbation) -> Influence:
        """Split the scores of one target by term: a column for the objective and each constraint.

        A sample acts through a constraint by changing its gradient (weighted by the multiplier) and its value (which
        moves the solution along with the bound). The columns add up to `scores`.
        """
        targets = Targets(target, self.at)
        targets.check_single("by_term")
        names, title = ("objective", *self.at.program.names), f"by term, on {targets.names[0]}"
        return self._table(perturbations, names, title, partial(self._scores_by_row, targets))

    def prices(self, perturbations: Perturbation) -> Influence:
        """Predict the change of each constraint's multiplier, with one column per constraint.

        A multiplier is the price of its constraint: by how much the objective falls per unit by which the bound is
        loosened. A negative entry says that the perturbation makes the constraint cheaper.
        """

        def change(system: KKTSystem, chunk: Direction) -> tuple[Tensor, Response]:
            response = self.answer(system, chunk, system.V)[1]
            return response.dlam, response

        return self._table(perturbations, self.at.program.names, "prices", change)

    def _table(self, perturbations: Perturbation, names: tuple[str, ...], title: str, work: Work) -> Influence:
        """Return a result with one column for each of some terms."""
        direction, reasons = resolve(self.at.program, perturbations)
        system, parts = self.linearise(direction), []
        unanswered = {perturbations.labels[p]: reason for p, reason in reasons.items()}
        for begin in range(0, direction.P, self._most):
            values, response = work(system, direction[begin : begin + self._most])
            values[list(response.failed)] = float("nan")
            unanswered |= {perturbations.labels[begin + p]: reason for p, reason in response.failed.items()}
            parts.append(values.double().cpu())
        values = torch.cat(parts)
        values[list(reasons)] = float("nan")
        about = self._describe(system) | ({"unanswered": unanswered} if unanswered else {})
        return Influence(values, perturbations, names, f"{self.title}, {title}", about)

    def _scores_by_row(self, targets: Targets, system: KKTSystem, direction: Direction) -> tuple[Tensor, Response]:
        """Split the score of one target into the parts that act through the objective and each constraint, (P, 1 + m).

        On the rows that hold after the step, ω is linear in what happens to each row: δ∇fⱼ, weighted, and δfⱼ.
        """
        q, at = targets.gradients(self.at.theta), self.at
        x = system.solver.solve(q)[:, 0]  # H_ρ⁻¹q
        response = self.answer(system, direction, system.V)[1]
        holds = system.equal | at.program.kinds.take(system.rows).has_force(response.nu)  # (P, k)
        patterns, which = holds[:1], torch.zeros(len(holds), dtype=torch.long, device=holds.device)
        if len(system.rows):
            patterns, which = torch.unique(holds, dim=0, return_inverse=True)
        values = response.r.new_zeros((len(holds), 1 + at.program.m))
        for number, pattern in enumerate(patterns):
            mine = which == number
            V = system.V[:, pattern]
            pull, failed = torch.linalg.solve_ex(system.S[pattern][:, pattern], V.T @ q[:, 0])
            if bool(failed):
                raise DegenerateError(
                    "The gradient of one active constraint depends on those of the others.",
                    "The gradients of the constraints that hold must be independent.",
                    "The part that acts through each of them is not unique, only their sum is.",
                    "Drop one of them, or ask for the sum: scores().",
                )
            y = x - V @ pull  # H⁻¹q along the rows that hold
            each = torch.diag(self.weights)  # every row by itself
            effects, _ = direction.first_order_effects(at.theta, each, at.parts, at.part_gradients, y[:, None])
            values[mine] = -effects[mine, :, 0]
            values[:, 1 + system.rows] += mine[:, None] * (system.lam * (system.G @ y))
            moved = (system.c + response.r[:, system.rows])[:, pattern]
            values[:, 1 + system.rows[pattern]] -= mine[:, None] * (moved * pull)
        return values, response

    def margins(self, perturbations: Perturbation) -> list[Margin | None]:
        """Measure, for each row of the constraints, how far perturbations move it towards switching.

        For a row that binds that is the change of its multiplier, for another row that of f − τ. The entry is None for
        equalities, and for all but the 64 rows that are nearest to switching.
        """
        at, (direction, _) = self.at, resolve(self.at.program, perturbations)
        margins: list[Margin | None] = [None] * at.program.m
        rows = torch.nonzero(at.program.kinds.one_sided).reshape(-1)
        nearness = torch.where(at.active.is_binding, at.active.force, at.active.slack)
        rows = rows[torch.argsort(nearness[rows])[:_MARGIN_ROWS]]
        if len(rows):
            moves = zip(*self._moves(self.linearise(direction), rows, direction), strict=True)
            dc, dlam = (torch.cat(parts).abs().double().cpu() for parts in moves)
            answered = torch.isfinite(dc).all(1)
            for k, j in enumerate(rows.tolist()):
                deciding = dlam[answered, j] if j in at.active.binding else dc[answered, k]
                if len(deciding):
                    margins[j] = Margin(float(deciding.max()), float(deciding.median()))
        return margins

    def _moves(self, system: KKTSystem, rows: Tensor, direction: Direction) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the changes of f − τ of some rows, (P, rows), and of λ, (P, m), chunk by chunk; NaN where unanswered.

        What is solved for are the perturbations, the gradients of the rows or all d directions, whichever are fewest.
        """
        G, d = self.at.G[rows], self.at.theta.numel()
        few, columns = min(len(rows), d) >= direction.P, system.V
        basis = G if len(rows) <= d else torch.eye(d).to(G)
        if not few:
            columns = torch.cat([columns, system.solver.solve(basis.T)], 1)
        for begin in range(0, direction.P, self._most):
            chunk = direction[begin : begin + self._most]
            move, response, _ = self.answer(system, chunk, None if few else columns)  # Δθ, or its part along the basis
            r = response.r[:, rows]
            yield (r + move if basis is G and not few else torch.addmm(r, move, G.T)), response.dlam

    # Constraints within reach: those that could become active or inactive within a step

    def _rows_within_reach(self, system: KKTSystem, direction: Direction) -> Tensor:
        """Return which inequalities could switch within a step though `system` does not allow them to, (m,) bool.

        For few perturbations, parameters or rows, the moves of the rows are computed under each perturbation. For many,
        mixtures of the perturbations with random signs tell first which rows that could be: the root mean square of the
        moves of a row over the mixtures estimates √(Σₚ move²), which is at least the largest move. A few rows are then
        taken as they are. Of many, those that do switch under a perturbation are.
        """
        at, P, equal, kinds = self.at, direction.P, system.equal, self.at.program.kinds
        fixed = torch.ones_like(kinds.equal)  # inequalities that cannot switch in `system`
        fixed[system.rows] = equal
        fixed = fixed & kinds.one_sided
        binding = at.active.is_binding
        d, columns = at.theta.numel(), len(equal) + int((fixed & ~binding).sum())  # of the sweep for their moves
        again = bool((~equal).any()) and int(fixed.sum()) <= _ROWS
        if d > _PARAMETERS and (P > _PERTURBATIONS or P * d > _NUMBERS) and columns > _COLUMNS and not again:
            dc, dlam = self._typical_moves(system, direction)
            fixed = fixed & torch.where(binding, at.lam <= _MARGIN * dlam, -at.c <= _MARGIN * dc)
            if int(fixed.sum()) <= _ROWS:
                return fixed
        held, rows, near = fixed & binding, torch.nonzero(fixed & ~binding).reshape(-1), torch.zeros_like(fixed)
        c, lam = at.c[rows], at.lam[held]
        for dc, dlam in self._moves(system, rows, direction) if bool(fixed.any()) else ():  # NaN compares as False
            near[rows] |= (dc > 2 * _ROUNDING * c.abs() - c).any(0)
            near[held] |= (dlam[:, held] < -(1 + 2 * _ROUNDING) * lam).any(0)
        return near

    def _typical_moves(self, system: KKTSystem, direction: Direction) -> tuple[Tensor, Tensor]:
        """Estimate √(Σₚ move²) of f − τ and of the multiplier of each row, (m,) each, with the equal rows only."""
        at, equal = self.at, system.equal
        Z = _MIXTURES if at.curvature.assembled else _MIXTURES_WITHOUT_HESSIAN
        generator = torch.Generator().manual_seed(0)
        b, r = at.theta.new_zeros((Z, at.theta.numel())), at.theta.new_zeros((Z, at.program.m))
        for begin in range(0, direction.P, self._most):
            chunk = direction[begin : begin + self._most]
            mix = (2.0 * torch.randint(0, 2, (Z, chunk.P), generator=generator) - 1.0).to(at.theta)
            more_b, more_f = chunk.combine(mix, at.theta, self.weights, at.parts, at.part_gradients)
            b, r = b + more_b, r + more_f[:, 1:] - mix @ chunk.dtau
        stiffness = (system.R * r[:, system.rows])[:, equal]
        S, V, G = system.S[equal][:, equal], system.V[:, equal], system.G[equal]
        nu = torch.linalg.lstsq(S, (r[:, system.rows][:, equal] - b @ V - stiffness @ S).T).solution.T
        omega = -system.solver.solve((b + (nu + stiffness) @ G).T).T
        dlam = torch.zeros_like(r)
        dlam[:, system.rows[equal]] = nu
        dc = r + omega @ at.G.T
        return torch.linalg.vector_norm(dc, dim=0) / Z**0.5, torch.linalg.vector_norm(dlam, dim=0) / Z**0.5
