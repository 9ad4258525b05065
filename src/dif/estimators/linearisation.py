"""The problem linearised at (θ̄, λ̄): prepared once, it gives the first-order effect of any number of perturbations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.weight_change import Direction, split_perturbation
from dif.errors import DegenerateError
from dif.linalg.multiplier_qp import no_step_error
from dif.optimality.kkt_system import KKTSystem
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.perturbation import Perturbation

_SWEEP_OVERHEAD = 500  # samples whose gradients cost as much as starting a sweep over the data


@dataclass(frozen=True)
class Response:
    """The effect of some perturbations on the linearised problem."""

    b: Tensor  # (P, columns) the change of ∇L along the columns asked for
    r: Tensor  # (P, m) the change of f − τ at θ̄
    nu: Tensor  # (P, k) multipliers of the linearised rows
    w: Tensor  # (P, k) the weights of the rows in ω = −H_ρ⁻¹(b + Gᵀw); NaN where there is no answer
    unanswered: dict[str, str]  # reasons, by the label of the perturbation

    @property
    def answered(self) -> Tensor:
        """Perturbations that have an answer, (P,) bool."""
        return torch.isfinite(self.w).all(1)


class Linearisation:
    """min (b − Gᵀλ₀)ᵀω + ½ωᵀHω  s.t.  c₀ + r + Gω = 0 on equal rows, ≤ 0 on the other rows.

    b and r are linear in the perturbation.

    Args:
        at: The solution.
        weights: (1 + m,) the weight of each row in b; (1, λ̄) for the Lagrangian.
        system: H and the gradients of the k rows that take part.
        rows: (k,) their numbers among the m rows of the problem.
        equal: (k,) bool, rows solved as equalities; None where rows have no multipliers (penalties).
        from_point: Whether rows begin at their slack c₀ and multiplier λ₀ at θ̄, so that they may switch; else both
            are zero, which gives the derivative.
        strict: Raise where a perturbation has no answer, instead of returning NaN.
        lenient: Accept negative multipliers of inequalities that are solved as equalities for the sake of convexity.
            Otherwise a perturbation with such a multiplier has no answer.
    """

    def __init__(
        self,
        at: Solution,
        weights: Tensor,
        system: KKTSystem,
        rows: Tensor,
        equal: Tensor | None,
        *,
        from_point: bool = False,
        strict: bool = True,
        lenient: bool = False,
    ) -> None:
        self.at, self.weights, self.system, self.rows = at, weights, system, rows
        self.has_multipliers = equal is not None
        self.equal = torch.zeros_like(rows).bool() if equal is None else equal
        self.c0, self.lam0 = (x[rows] if from_point else torch.zeros_like(x[rows]) for x in (at.c, at.lam))
        self.strict = strict
        _ = system.V  # solved now, once for any number of perturbations
        # inequalities that are solved as equalities: their multipliers must stay ≥ 0
        self.sign_checked = self.equal & at.program.kinds.one_sided[rows] & (from_point and not lenient)

    def respond(self, direction: Direction, columns: Tensor) -> Response:
        """Return the response to perturbations, with bᵀ·columns, for columns (d, k + …) that begin with V."""
        at = self.at
        b, df = direction.first_order_effects(at.theta, self.weights, at.parts, at.part_gradients, columns)
        return self._response(b, b[:, : len(self.rows)], df[:, 1:] - direction.dtau, direction)

    def _response(self, b: Tensor, bV: Tensor, r: Tensor, direction: Direction) -> Response:
        """Solve for the multipliers; with strict, raise where there are none."""
        equal = self.equal if self.has_multipliers else None
        nu, w, failed = self.system.solve_rows(bV, self.c0 + r[:, self.rows], self.lam0, equal)
        unanswered = {direction.perturbation[p].labels[0]: reason for p, reason in failed.items()}
        if unanswered and self.strict:
            raise no_step_error(*next(iter(unanswered.items())))
        for p in torch.nonzero((nu[:, self.sign_checked] < 0).any(1)).reshape(-1).tolist():
            error = self._released_error(nu[p])
            if self.strict:
                raise error
            w[p] = float("nan")
            unanswered[direction.perturbation[p].labels[0]] = str(error)
        return Response(b, r, nu, w, unanswered)

    def _released_error(self, nu: Tensor) -> DegenerateError:
        j = int(torch.where(self.sign_checked, nu, float("inf")).argmin())
        return DegenerateError(
            f"The multiplier of {self.at.program.names[int(self.rows[j])]} would be {float(nu[j]):.3g} after the step.",
            "The multiplier of an inequality must be at least 0.",
            "The constraint becomes inactive, but the Lagrangian is convex only while it holds, so the linearised "
            "problem has no minimum.",
            "Use switching=False for the derivative, or Retraining for the change itself.",
        )

    def multiplier_change(self, nu: Tensor) -> Tensor:
        """Return Δλ on all m rows, (P, m), for multipliers ν of the linearised rows."""
        change = nu.new_zeros((len(nu), self.at.program.m))
        change[:, self.rows] = nu - self.lam0
        return change

    def first_order(self, direction: Direction) -> tuple[Tensor, Tensor]:
        """Return b, (P, d), and r, (P, m), of the perturbations."""
        at, P = self.at, direction.P
        entries = sum(len(block.index) for block in direction.blocks)
        if P > 1 and entries <= _SWEEP_OVERHEAD:  # few samples: one sweep for all
            b, df = direction.combine(torch.eye(P).to(at.theta), at.theta, self.weights, at.parts, at.part_gradients)
            if bool(torch.isfinite(b).all() and torch.isfinite(df).all()):  # else the loop below names the sample
                return b, df[:, 1:] - direction.dtau
        first = [direction.first_order(p, at.theta, at.parts, at.part_gradients) for p in range(P)]
        b, r = torch.stack([self.weights @ DJ for _, DJ in first]), torch.stack([df[1:] for df, _ in first])
        return b, r - direction.dtau

    def steps(self, direction: Direction) -> tuple[Tensor, Response]:
        """Return Δθ, (P, d), by one solve for all, NaN where there is no answer; and the response."""
        b, r = self.first_order(direction)
        response = self._response(b, b @ self.system.V, r, direction)
        omega, answered = torch.full_like(b, float("nan")), response.answered
        omega[answered] = -self.system.solver.solve((b + response.w @ self.system.G)[answered].T).T
        return omega, response

    def scores(self, columns: Tensor, direction: Direction) -> tuple[Tensor, Response]:
        """Return qᵀΔθ, (P, T), for columns (V, H_ρ⁻¹q₁ … H_ρ⁻¹q_T); and the response."""
        response, k = self.respond(direction, columns), len(self.rows)
        return -response.b[:, k:] - response.w @ (self.system.G @ columns[:, k:]), response

    def margins(self, rows: Tensor, perturbations: Perturbation) -> tuple[Tensor, Tensor]:
        """Return the changes of f − τ and of λ of some rows, (P, rows) each, NaN where unanswered."""
        columns = torch.cat([self.system.V, self.system.solver.solve(self.at.G[rows].T)], 1)

        def move(direction: Direction) -> tuple[Tensor, Response]:
            values, response = self.scores(columns, direction)
            change = self.multiplier_change(response.nu)[:, rows]
            return torch.stack([response.r[:, rows] + values, change], 1), response

        dc, dlam = self._by_chunk(move, perturbations).unbind(1)
        return dc, dlam

    def multiplier_changes(self, perturbations: Perturbation) -> Tensor:
        """Return Δλ on all m rows, (P, m), NaN where unanswered."""

        def change(direction: Direction) -> tuple[Tensor, Response]:
            response = self.respond(direction, self.system.V)
            return self.multiplier_change(response.nu), response

        return self._by_chunk(change, perturbations)

    def _by_chunk(self, work: Callable[[Direction], tuple[Tensor, Response]], perturbations: Perturbation) -> Tensor:
        """Return what `work` returns for chunks of the perturbations, joined, with NaN where unanswered."""
        parts = []
        for chunk in split_perturbation(perturbations):
            values, response = work(Direction(self.at.program, chunk))
            values[~response.answered] = float("nan")
            parts.append(values)
        return torch.cat(parts)

    def scores_by_row(self, targets: Targets, perturbations: Perturbation) -> Tensor:
        """Split the score of one target into the parts that act through the objective and each constraint, (P, 1 + m).

        On the rows that hold after the step, ω is linear in what happens to each row: δ∇fⱼ, weighted, and δfⱼ.
        """
        q, at, system = targets.gradients(self.at.theta), self.at, self.system
        x = system.solver.solve(q)[:, 0]  # H_ρ⁻¹q

        def split(direction: Direction) -> tuple[Tensor, Response]:
            response = self.respond(direction, system.V)
            holds = self.equal | at.program.kinds.take(self.rows).has_force(response.nu)  # (P, k)
            patterns, which = holds[:1], torch.zeros(len(holds), dtype=torch.long, device=holds.device)
            if len(self.rows):
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
                values[mine] = -direction.first_order_effects_by_row(at.theta, self.weights, at.part_gradients, y)[mine]
                values[:, 1 + self.rows] += mine[:, None] * (self.lam0 * (system.G @ y))
                moved = (self.c0 + response.r[:, self.rows])[:, pattern]
                values[:, 1 + self.rows[pattern]] -= mine[:, None] * (moved * pull)
            return values, response

        return self._by_chunk(split, perturbations)

    @property
    def work(self) -> dict[str, Any]:
        """Diagnostics of the solves, and of what torch could not do with the losses."""
        solver = self.system.solver
        return {
            "solver": type(solver).__name__,
            "solver_residual": solver.residual,
            "solver_steps": solver.steps,
            "fallbacks": sorted(self.at.program.rows.fallbacks),
        }
