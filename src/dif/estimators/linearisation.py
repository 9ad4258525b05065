"""The KKT system at (θ̄, λ̄), first order: what is prepared once and serves any number of perturbations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dif.errors import DegenerateError
from dif.estimators.assessment import Assess, warn_unanswered
from dif.estimators.influence import Change, Influence
from dif.estimators.scoring import Out, Piece, Scoring, differences, joined
from dif.evaluation.program import PerConstraint
from dif.evaluation.weight_change import Direction, chunks
from dif.linalg.cholesky import LinearSolver
from dif.linalg.multiplier_qp import no_direction, solve_reduced_qp
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation
from dif.runtime.inputs import check_number
from dif.runtime.workers import checked_jobs, in_order

_PIECE = 2**25  # slopes held at once
_MOVED = 2**25  # numbers of Δθ held at once
_PIECES, _FEWEST = 64, 2**14  # pieces of a sweep at most, perturbations in one at least (memory permitting)
_SHARES = 4  # pieces of work per job
_OVERHEAD = 500  # samples whose gradients cost as much as starting a sweep

Count = Callable[[Tensor], int]


def none_switched(nu: Tensor) -> int:
    """Of an estimator that does not ask."""
    return 0


class Linearisation:
    """min (b − Gᵀλ₀)ᵀω + ½ωᵀHω  s.t.  c₀ + r + Gω = 0 on free rows, ≤ 0 on the other kept rows.

    H comes as a solver for H_ρ = H + GᵀRG; b and r are linear in the perturbation. With `priced=False` there are no
    multipliers and R acts as the stiffness of a penalty.

    Args:
        at: The point, with its rows and gradients.
        weights: (1 + m,) what each row weighs in b; (1, λ̄) for the Lagrangian.
        solver: For H_ρ.
        kept: (k,) row numbers among the m.
        free: (k,) bool, rows with equality.
        R: (k,) diagonal; zero on rows that are not free.
        c0: (k,) f − τ of the kept rows, or zero.
        lam0: (k,) multipliers already in the linear term, or zero.
        priced: Whether rows have multipliers.
        strict: Raise where a perturbation has no answer, instead of NaN.
        lenient: Where a row would let go on which the convexity of the Lagrangian rests, answer as if it held.
    """

    def __init__(
        self, at: Solution, weights: Tensor, solver: LinearSolver, kept: Tensor, free: Tensor, R: Tensor,
        c0: Tensor | None = None, lam0: Tensor | None = None, priced: bool = True, strict: bool = True,
        lenient: bool = False,
    ) -> None:  # fmt: skip
        self.at, self.weights, self.solver, self.kept, self.free, self.R = at, weights, solver, kept, free, R
        self.G = at.G[kept]
        self.c0 = torch.zeros_like(R) if c0 is None else c0
        self.lam0 = torch.zeros_like(R) if lam0 is None else lam0
        # whose whole multipliers must stay ≥ 0
        self.held = free & at.program.kinds.one_sided[kept] & (lam0 is not None and not lenient)
        self.priced = priced
        self.strict = strict
        self.V = solver.solve(self.G.T)  # (d, k)
        self.S = self.G @ self.V  # (k, k)

    def push(self, bV: Tensor, r: Tensor, perturbations: Perturbation) -> tuple[Tensor, Tensor, dict[str, str]]:
        """The multipliers ν, (P, k), and the whole force on the kept rows, ω = −H_ρ⁻¹(b + Gᵀ·force).

        The force is NaN where the linearised constraints contradict each other, or one lets go that must hold for the
        Lagrangian to be convex, with the reasons; with strict that is raised.
        """
        stiff = self.R * (self.c0 + r)
        a = self.c0 + r - bV - (stiff - self.lam0) @ self.S
        if not self.priced:
            return self.R * a, stiff, {}
        nu, failed = solve_reduced_qp(
            (0.5 * (self.S + self.S.T)).double().cpu().numpy(), a.double().cpu().numpy(), self.free.cpu().numpy()
        )
        unanswered = {perturbations[p].labels[0]: reason for p, reason in failed.items()}
        if unanswered and self.strict:
            raise no_direction(*next(iter(unanswered.items())))
        multipliers = torch.as_tensor(nu).to(a)
        force = multipliers - self.lam0 + stiff
        for p in torch.nonzero((multipliers[:, self.held] < 0).any(1)).reshape(-1).tolist():
            error = self._lets_go(multipliers[p])
            if self.strict:
                raise error
            force[p] = float("nan")
            unanswered[perturbations[p].labels[0]] = str(error)
        return multipliers, force, unanswered

    def _lets_go(self, nu: Tensor) -> DegenerateError:
        j = int(torch.where(self.held, nu, float("inf")).argmin())
        return DegenerateError(
            f"multiplier of {self.at.program.names[int(self.kept[j])]} after the step",
            measured=f"{float(nu[j]):.3g}",
            threshold="≥ 0",
            meaning="The constraint lets go, but the Lagrangian is convex only while it holds, so the linearised "
            "problem has no minimum.",
            cure="Use switching=False for the derivative, or Retraining for the change itself.",
        )

    def multiplier_change(self, nu: Tensor) -> Tensor:
        """Δλ on all m rows, (P, m), from the multipliers of the kept rows."""
        change = nu.new_zeros((len(nu), self.at.program.m))
        change[:, self.kept] = nu - self.lam0
        return change

    def respond(self, perturbation: Perturbation) -> tuple[Tensor, Tensor, dict[str, str]]:
        """Δθ, (d,), and the multipliers of the kept rows, (k,), of one perturbation; what could not be answered."""
        omega, nu, unanswered = self.moved(Direction.single(self.at.program, perturbation))
        return omega[0], nu[0], unanswered

    def moved(self, direction: Direction) -> tuple[Tensor, Tensor, dict[str, str]]:
        """Δθ, (P, d), by one solve for all, NaN where there is no answer; the multipliers, (P, k), and the reasons."""
        return self.step(*self.first_order(direction), direction)

    def first_order(self, direction: Direction) -> tuple[Tensor, Tensor]:
        """The perturbations' b, (P, d), and r, (P, m)."""
        at, P = self.at, direction.P
        if P > 1 and P * direction.touched <= _OVERHEAD * P:  # few samples: one sweep for all
            b, df = direction.mixed(torch.eye(P).to(at.theta), at.theta, self.weights, at.p, at.Dp)
            if bool(torch.isfinite(b).all() and torch.isfinite(df).all()):  # else it is said below whose are not
                return b, df[:, 1:] - direction.dtau
        first = [direction.first_order(p, at.theta, at.p, at.Dp) for p in range(P)]
        b, r = torch.stack([self.weights @ DJ for _, DJ in first]), torch.stack([df[1:] for df, _ in first])
        return b, r - direction.dtau

    def step(self, B: Tensor, r: Tensor, direction: Direction) -> tuple[Tensor, Tensor, dict[str, str]]:
        """What `moved` says, for perturbations whose b and r are known."""
        nu, force, unanswered = self.push(B @ self.V, r[:, self.kept], direction.perturbation)
        answered = torch.isfinite(force).all(1)
        omega = torch.full_like(B, float("nan"))
        omega[answered] = -self.solver.solve((B + force @ self.G)[answered].T).T
        return omega, nu, unanswered

    def ends(self, perturbations: Perturbation) -> tuple[Tensor, Tensor]:
        """Δθ, (P, d), and the multipliers after it, (P, m)."""
        omega, nu, _ = self.moved(Direction(self.at.program, perturbations))
        lam = self.at.lam.expand(len(omega), -1)
        return omega, lam + self.multiplier_change(nu) if self.priced else lam

    def _scored(self, columns: Tensor, count: Count, some: Perturbation) -> Piece:
        k = len(self.kept)
        bV, _, nu, force, unanswered = self._pushed(Direction(self.at.program, some), columns)
        values = -bV[:, k:] - force @ (self.G @ columns[:, k:])
        return Piece(values.double().cpu(), {"switched": count(nu), "unanswered": unanswered})

    def _pushed(self, direction: Direction, columns: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, str]]:
        """What perturbations do along columns that begin with V, bᵀ·columns and r on all rows, and their push."""
        bV, df = direction.moves(self.at.theta, self.weights, self.at.p, self.at.Dp, columns)
        r = df[:, 1:] - direction.dtau
        return bV, r, *self.push(bV[:, : len(self.kept)], r[:, self.kept], direction.perturbation)

    def margins(self, rows: Tensor, perturbations: Perturbation) -> tuple[Tensor, Tensor]:
        """How each perturbation moves f − τ of some rows, and their multipliers, (P, rows) each, NaN without answer."""
        k = len(self.kept)
        columns = torch.cat([self.V, self.solver.solve(self.at.G[rows].T)], 1)
        moved, priced = [], []
        for some in chunks(perturbations):
            bV, r, nu, force, _ = self._pushed(Direction(self.at.program, some), columns)
            moved.append(r[:, rows] - bV[:, k:] - force @ (self.G @ columns[:, k:]))
            change = self.multiplier_change(nu)[:, rows]
            priced.append(torch.where(torch.isfinite(force).all(1, keepdim=True), change, float("nan")))
        return torch.cat(moved), torch.cat(priced)

    def multiplier_changes(self, perturbations: Perturbation) -> Tensor:
        """Δλ on all m rows, (P, m), NaN where there is no answer."""
        parts = []
        for some in chunks(perturbations):
            _, _, nu, force, _ = self._pushed(Direction(self.at.program, some), self.V)
            change = self.multiplier_change(nu)
            change[~torch.isfinite(force).all(1)] = float("nan")
            parts.append(change)
        return torch.cat(parts)

    def by_row(self, targets: Targets, perturbations: Perturbation) -> Tensor:
        """The score of one target in the parts that come by way of the objective and of each constraint, (P, 1 + m).

        On the rows that hold after the step, ω is linear in what happens to each row: δ∇fⱼ, weighed, and δfⱼ.
        """
        q = targets.gradients(self.at.theta)
        x = self.solver.solve(q)[:, 0]  # H_ρ⁻¹q
        parts = []
        for some in chunks(perturbations):
            direction = Direction(self.at.program, some)
            bV, r, nu, force, _ = self._pushed(direction, self.V)
            holding = self.free | (nu > 0)  # (P, k)
            patterns, which = holding[:1], torch.zeros(len(some), dtype=torch.long, device=holding.device)
            if len(self.kept):
                patterns, which = torch.unique(holding, dim=0, return_inverse=True)
            values = bV.new_zeros((len(some), 1 + self.at.program.m))
            for number, held in enumerate(patterns):
                mine = which == number
                V = self.V[:, held]
                pull, failed = torch.linalg.solve_ex(self.S[held][:, held], V.T @ q[:, 0])  # on each of these rows
                if bool(failed):
                    raise DegenerateError(
                        "gradients of the constraints that hold",
                        measured="one depends on the others",
                        threshold="independent",
                        meaning="What comes by way of each of them is not unique, only their sum.",
                        cure="Drop one of them, or ask for the sum: scores().",
                    )
                y = x - V @ pull  # H⁻¹q along the rows that hold
                values[mine] = -direction.moves_by_row(self.at.theta, self.weights, self.at.Dp, y)[mine]
                values[:, 1 + self.kept] += mine[:, None] * (self.lam0 * (self.G @ y))
                values[:, 1 + self.kept[held]] -= mine[:, None] * ((self.c0 + r[:, self.kept])[:, held] * pull)
            values[~torch.isfinite(force).all(1)] = float("nan")
            parts.append(values)
        return torch.cat(parts)

    # Results

    def change(self, perturbation: Perturbation, diagnostics: dict[str, Any]) -> Change:
        """The Change of one perturbation."""
        omega, nu, unanswered = self.respond(perturbation)
        program = self.at.program
        return Change(
            theta=program.parameters.tensors(omega),
            multipliers=PerConstraint.of(program, self.multiplier_change(nu[None])[0]),
            flat=omega,
            diagnostics={**diagnostics, **self._work(), "unanswered": unanswered},
        )

    def influence(
        self, name: str, target: Any, perturbations: Perturbation, diagnostics: dict[str, Any], out: Out, jobs: int,
        show_progress: bool, assess: Assess | None = None, count: Count = none_switched,
    ) -> Influence:  # fmt: skip
        """The scores qᵀΔθ, in a file where one is named. `assess` says what error is to be expected of them."""
        targets = Targets(target, self.at)
        scoring = Scoring(name, self.at, targets, perturbations, diagnostics, out, show_progress)
        jobs = checked_jobs(jobs)
        size = max(1, min(_PIECE // (len(self.kept) + len(targets.names)), max(_FEWEST, len(perturbations) // _PIECES)))
        if jobs != 1:
            size = max(1, min(size, -(-len(perturbations) // (_SHARES * abs(jobs)))))
        Q = targets.gradients(self.at.theta)

        def pieces(begin: int) -> Iterator[Piece]:
            columns = torch.cat([self.V, self.solver.solve(Q)], 1)  # (d, k + T)
            return in_order(partial(self._scored, columns, count), chunks(perturbations[begin:], size), jobs)

        def complete(influence: Influence, pieces: list[dict[str, Any]]) -> None:
            unanswered = joined(pieces, "unanswered")
            influence.diagnostics.update(self._work(), unanswered=unanswered, switched=joined(pieces, "switched"))
            if unanswered:
                warn_unanswered(unanswered, len(perturbations))
            if assess is not None:
                ends = lambda rows: self.ends(perturbations.pick(rows))  # noqa: E731
                influence.diagnostics["assessment"] = assess(targets, perturbations, influence.stored, ends)

        return scoring.run(pieces, size, complete)

    def reevaluated(
        self, name: str, target: Any, perturbations: Perturbation, diagnostics: dict[str, Any], show_progress: bool
    ) -> Influence:
        """The difference of each target between θ̄ and θ̄ + Δθ, where `influence` has qᵀΔθ."""
        targets, size = Targets(target, self.at), max(1, _MOVED // self.at.theta.numel())
        scoring = Scoring(f"{name}, re-evaluated", self.at, targets, perturbations, diagnostics, None, show_progress)

        def work(some: Perturbation) -> Piece:
            omega, _, missing = self.moved(Direction(self.at.program, some))
            return Piece(differences(self.at, targets, omega), {"unanswered": missing})

        def complete(influence: Influence, pieces: list[dict[str, Any]]) -> None:
            influence.diagnostics.update(self._work(), unanswered=joined(pieces, "unanswered"))

        return scoring.run(lambda begin: in_order(work, chunks(perturbations[begin:], size), 1), size, complete)

    def _work(self) -> dict[str, Any]:
        """What the solves took, and what torch could not do with the losses."""
        return {
            "solver": type(self.solver).__name__,
            "solver_residual": self.solver.residual,
            "solver_steps": self.solver.steps,
            "fallbacks": sorted({f for table in self.at.program.rows.tables for f in table.samples.fallbacks}),
        }


def checked_damping(damping: float) -> float:
    """δ ≥ 0."""
    return check_number(
        damping,
        "damping",
        zero=True,
        meaning="Damping, δ in H + δI, makes up for missing curvature, at the price of another answer.",
        cure="Use 0 for the exact answer.",
    )


def trust(solution: Solution) -> dict[str, Any]:
    """What every answer carries about the point it rests on."""
    active = solution.active
    return {
        "kkt": {
            "stationarity": solution.kkt.stationarity,
            "feasibility": solution.kkt.feasibility,
            "complementarity": solution.kkt.complementarity,
        },
        "binding": [active.names[j] for j in active.binding],
        "weak": [active.names[j] for j in active.weak],
        "uncertain": [active.names[j] for j in active.uncertain],
        "smallest_margin": float(active.margins.abs().min()) if len(active.names) else None,
        "licq": active.licq,
        "curvature": active.curvature,
    }
