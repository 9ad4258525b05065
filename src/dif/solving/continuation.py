"""Follow a solution θ(ε), λ(ε) while a perturbation is carried out, and locate where constraints switch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from dif.derivatives.hessian import Curvature
from dif.derivatives.program import Program, Targets
from dif.derivatives.weight_change import Direction
from dif.errors import DegenerateError, DifError, NotConvergedError, count_words
from dif.linalg.anderson import Extrapolation
from dif.optimality.judgement import residuals
from dif.optimality.kkt_system import KKTSystem, kkt_step
from dif.optimality.solution import Solution
from dif.problem.perturbation import Perturbation
from dif.problem.term import Kinds

_FIRST_STEP = 0.25  # first step of ε; later ones adapt
_SHORTEST = 1e-7  # smallest step of ε; where it fails, the path is lost
_CORRECTIONS = 60  # corrector steps per point
_HALVED = 8  # corrector steps within which the residual must halve
_EASY = 10  # with at most so many corrections, the next step of ε is doubled
_HARD = 20  # with more corrections than this, the next step of ε is halved
_ROUGH = 1e-2  # residual of trial points while an event is located, relative to the margin that changes sign
_ROOT_STEPS = 60  # root-finding steps per event
_LOCATED = 1e-13  # width in ε at which an event counts as located
_DEPENDENT = 1e-8  # relative norm of what a projection leaves of a gradient that depends on others
_TOUCHING = 1e-6  # scaled margin within which other rows switch at the same ε


@dataclass(frozen=True)
class Event:
    """A constraint that becomes binding or inactive."""

    epsilon: float
    row: int
    name: str
    binds: bool  # whether it is binding beyond this ε

    def __str__(self) -> str:
        return f"ε = {self.epsilon:.6g}: {self.name} becomes {'binding' if self.binds else 'inactive'}"


@dataclass(frozen=True, eq=False)
class Path:
    """The solutions of the problems between the solved one and the perturbed one."""

    start: Solution
    perturbation: Perturbation
    epsilons: Tensor  # (K,) ascending from 0
    thetas: Tensor  # (K, d)
    multipliers: Tensor  # (K, m)
    events: tuple[Event, ...]
    residual: float  # largest KKT residual of the points, in the units of the start
    steps: int  # gradients of the Lagrangian computed
    curvatures: int  # Hessians computed, apart from the one at the start

    @cached_property
    def end(self) -> Solution:
        """The solution of the perturbed problem, with its own certificate; it can be saved, scored, perturbed again.

        It is judged by the tolerance of the start: `end.converged` is False if the path was followed less accurately.
        """
        problem, theta = self.start.problem.after(self.perturbation), self.thetas[-1]
        program = Program.compile(problem, self.start.program.parameters, theta)
        return Solution.of_program(program, theta, self.multipliers[-1], self.start.tol)

    def changes(self, target: Any) -> Tensor:
        """Return the change of each target from the start to each ε, (K, T)."""
        targets = Targets(target, self.start)
        values = torch.stack([targets.values(theta) for theta in self.thetas])
        return (values - values[:1]).double().cpu()

    def plot(self, ax: Any = None) -> Any:
        """Plot the parameters that change most along the path, on new axes if `ax` is None; return the axes."""
        from dif.report.plots import path

        return path(self, ax)

    def __str__(self) -> str:
        moved = float((self.thetas[-1] - self.thetas[0]).norm())
        label, switches = self.perturbation.labels[0], count_words(len(self.events), "event")
        return "\n".join(
            [
                f"Path of the solution under {label!r}: ε from 0 to {float(self.epsilons[-1]):g} in "
                f"{count_words(len(self.epsilons) - 1, 'step')}, ‖Δθ‖ = {moved:.4g}, {switches}",
                *map(str, self.events),
            ]
        )


@dataclass
class PathPoint:
    """The solution at one ε."""

    epsilon: float
    program: Program
    theta: Tensor
    lam: Tensor
    c: Tensor  # f − τ
    corrections: int = 0
    residual: float = 0.0


@dataclass
class PathFollower:
    """Predictor–corrector method along ε with an active set.

    The directional derivative predicts the next point, and Newton's method on the KKT system, with the active rows as
    equalities, corrects it. Corrections use the last prepared curvature and prepare a new one where they do not
    converge. Where an inactive row would be violated, or the multiplier of an active one turn negative, that ε is
    located and the row switches. Where several rows switch at the same ε, the quadratic program of the directional
    derivative decides.
    """

    at: Solution
    perturbation: Perturbation
    tol: float
    max_steps: int
    prepared: KKTSystem
    points: list[PathPoint] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    steps: int = 0
    curvatures: int = 0

    def __post_init__(self) -> None:
        self.end_program = Direction.resolve_single(self.at.program, self.perturbation).perturbed_program(0)
        self.one_sided = self.at.program.kinds.one_sided
        self.goal = max(self.tol, self.at.scales.floor)

    def run(self, stops: Sequence[float] = (1.0,)) -> Path:
        """Follow the solution from ε = 0 to the last stop, with a point at each stop (ascending)."""
        known = self.at.active
        active, weak = known.is_binding, known.is_active & ~known.is_binding
        here = PathPoint(0.0, self.at.program, self.at.theta, self.at.lam, self.at.c)
        self.points.append(here)
        up_to_date = True  # whether the curvature was prepared at this point
        length, waiting = _FIRST_STEP, [stop for stop in stops if stop > 0.0]
        if bool(weak.any()):
            active = self._resolve(here, active, weak)
        slope = self._slope(here, active)
        while waiting:
            aim = min(here.epsilon + length, waiting[0])
            step = aim - here.epsilon
            there = self._correct(here.theta + step * slope[0], here.lam + step * slope[1], aim, active)
            if there is None and not up_to_date:
                self._prepare(here, active)
                up_to_date, slope = True, self._slope(here, active)
                continue
            if there is None:
                length = 0.25 * step
                if length < _SHORTEST:
                    raise self._lost_error(here)
                continue
            if bool((self._margins(there, active) < -10 * self.goal).any()):
                there, row = self._locate(here, there, active)
                active = self._switch(there, active, row)
            else:
                length *= 2.0 if there.corrections <= _EASY else 1.0 if there.corrections <= _HARD else 0.5
            here, up_to_date = there, False
            self.points.append(here)
            slope = self._slope(here, active)
            if here.epsilon >= waiting[0]:
                waiting.pop(0)
        return Path(
            self.at,
            self.perturbation,
            torch.tensor([p.epsilon for p in self.points], dtype=torch.float64),
            torch.stack([p.theta for p in self.points]),
            torch.stack([p.lam for p in self.points]),
            tuple(self.events),
            max(p.residual for p in self.points),
            self.steps,
            self.curvatures,
        )

    # Points

    def _prepare(self, at: PathPoint, active: Tensor) -> None:
        """Prepare the KKT system at a point."""
        self.curvatures += 1
        try:
            H = Curvature(at.program.rows, at.theta, at.program.weights(at.lam))
            G = at.program.rows.gradients(at.theta)[1][1:]
            self.prepared = KKTSystem.prepare_convex(H, G, at.program.kinds, active)
        except DegenerateError as error:
            raise self._lost_error(at) from error

    def _derivative(self, at: PathPoint) -> tuple[Tensor, Tensor]:
        """Return ∂∇L/∂ε, (d,), and ∂(f − τ)/∂ε, (m,): differences between ε = 1 and 0, as both are linear in ε."""
        weights = self.at.program.weights(at.lam)
        self.steps += 2
        ends = (self.end_program, self.at.program)
        (f1, g1), (f0, g0) = (program.rows.weighted_gradient(at.theta, weights) for program in ends)
        return g1 - g0, (f1 - f0)[1:] - (self.end_program.tau - self.at.program.tau)

    def _slope(self, at: PathPoint, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return (θ′, λ′) with the active rows as equalities, for the prepared curvature."""
        return self.prepared.hold(*self._derivative(at), active)

    def _correct(
        self, theta: Tensor, lam: Tensor, epsilon: float, active: Tensor, goal: float = 0.0
    ) -> PathPoint | None:
        """Solve for the point at ε with the active rows as equalities; return None if that does not converge."""
        program = Direction(self.at.program, epsilon * self.perturbation).perturbed_program(0)
        d, scales = theta.numel(), self.at.scales
        past = Extrapolation(1, d + len(lam), partial(scales.lengths, G=self.at.G))
        only = torch.tensor([0], device=theta.device)
        mark, since = float("inf"), 0  # last residual of at most half the previous mark, and steps since
        for count in range(_CORRECTIONS):
            f, g = program.rows.weighted_gradient(theta, program.weights(lam))
            c = f[1:] - program.tau
            counted = torch.where(active, c, -1.0)  # inactive rows are checked by the caller
            residual = residuals(scales, g, counted, torch.where(active, lam, 0.0), Kinds(active)).residual
            if residual <= max(goal, self.goal):
                return PathPoint(epsilon, program, theta, lam, c, count, residual)
            mark, since = (residual, 0) if residual < 0.5 * mark else (mark, since + 1)
            if since >= _HALVED or not residual < float("inf"):
                return None
            if self.steps >= self.max_steps:
                raise self._lost_error(self.points[-1])
            self.steps += 1
            try:
                omega, mu = self.prepared.hold(g, c, active)
            except NotConvergedError:
                return None
            here = torch.cat([theta, lam])[None]
            there = here + past.combine(only, here, torch.cat([omega, mu])[None])
            theta, lam = there[0, :d], there[0, d:]
        return None

    # Events

    def _margins(self, point: PathPoint, active: Tensor) -> Tensor:
        """Return what must stay ≥ 0 of each row, scaled, (m,): the multiplier of active rows, the slack of others."""
        slack, force = self.at.scales.steps(point.c, point.lam)
        margins = torch.where(active, force, slack)
        return torch.where(self.one_sided, margins, 1.0)

    def _locate(self, low: PathPoint, high: PathPoint, active: Tensor) -> tuple[PathPoint, int]:
        """Find the point between two at which the first margin changes sign, and the row of that margin."""
        before, after = self._margins(low, active), self._margins(high, active)
        row = int(after.argmin())
        for turn in range(_ROOT_STEPS):
            negative = torch.nonzero(after < -self.goal).reshape(-1)
            span = high.epsilon - low.epsilon
            if len(negative) == 0 or span <= _LOCATED:
                break
            shares = (before[negative] / (before[negative] - after[negative]).clamp(min=1e-300)).clamp(0.0, 1.0)
            first = int(shares.argmin())
            # bisection now and then, as secant steps may converge slowly
            row, share = int(negative[first]), 0.5 if turn % 3 == 2 else float(shares[first])
            if span > 1e-9:
                share = min(max(share, 1e-3), 1 - 1e-3)
            theta, lam = (torch.lerp(getattr(low, x), getattr(high, x), share) for x in ("theta", "lam"))
            rough = _ROUGH * min(abs(float(before[row])), abs(float(after[row])))
            point = self._correct(theta, lam, low.epsilon + share * span, active, rough)
            if point is not None and abs(float(self._margins(point, active)[row])) <= 10 * point.residual:
                point = self._correct(point.theta, point.lam, point.epsilon, active)  # too rough to know the sign
            if point is None:
                raise self._lost_error(low)
            margins = self._margins(point, active)
            if bool((margins < -self.goal).any()):
                high, after = point, margins
            elif float(margins[row]) <= self.goal:
                return point, row
            else:
                low, before = point, margins
        exact = self._correct(high.theta, high.lam, high.epsilon, active)
        return (high if exact is None else exact), row

    def _switch(self, at: PathPoint, active: Tensor, row: int) -> Tensor:
        """Return the active rows beyond an event at which a row switches; record the events and adjust λ."""
        touching = (self._margins(at, active).abs() < _TOUCHING) & self.one_sided
        touching[row] = True
        if int(touching.sum()) > 1:
            self._prepare(at, active & ~touching)
            try:
                ahead = self._resolve(at, active & ~touching, touching)
            except DifError as error:  # the rows that meet here contradict each other beyond it
                raise self._lost_error(at) from error
        else:
            ahead = active ^ touching if bool(active[row]) else self._activate(at, active, row)
        at.lam = torch.where(ahead, at.lam, 0.0)
        for j in torch.nonzero(ahead != active).reshape(-1).tolist():
            self.events.append(Event(at.epsilon, j, self.at.program.names[j], bool(ahead[j])))
        if bool((self.prepared.firm & ~ahead).any()):
            self._prepare(at, ahead)
        return ahead

    def _resolve(self, at: PathPoint, active: Tensor, weak: Tensor) -> Tensor:
        """Return the rows that are active beyond the point of the prepared curvature; weak rows may go either way."""
        b, r = self._derivative(at)
        rows = torch.nonzero(active | weak).reshape(-1)
        lam, firm, kinds = torch.zeros_like(r[rows]), torch.ones_like(active[rows]), Kinds(active[rows])
        _, nu, _ = kkt_step(b, self.prepared.H, r[rows], self.prepared.G[rows], lam, kinds, firm)
        ahead = active.clone()
        ahead[rows] = kinds.has_force(nu)
        return ahead

    def _activate(self, at: PathPoint, active: Tensor, row: int) -> Tensor:
        """Return the active rows once another becomes active; if its gradient depends on theirs, it replaces one.

        Along the linear combination of gradients that vanishes, force is shifted to the new row until the multiplier
        of another is zero: that one becomes inactive. Where none decreases, the constraints contradict each other
        beyond the point.
        """
        ahead = active.clone()
        ahead[row] = True
        G = at.program.rows.gradients(at.theta)[1][1:] / self.at.scales.root
        rows = torch.nonzero(active).reshape(-1)
        share = torch.linalg.lstsq(G[rows].T, G[row][:, None]).solution[:, 0] if len(rows) else G[row, :0]
        if float((G[row] - share @ G[rows]).norm()) > _DEPENDENT * float(G[row].norm()):
            return ahead
        decreasing = (share > _DEPENDENT) & self.one_sided[rows]
        if not bool(decreasing.any()):
            raise self._lost_error(at)
        ratios = torch.where(decreasing, at.lam[rows] / share, float("inf"))
        first = int(ratios.argmin())
        at.lam = at.lam.clone()
        at.lam[rows] -= float(ratios[first]) * share
        at.lam[row] = float(ratios[first])
        ahead[rows[first]] = False
        return ahead

    def _lost_error(self, at: PathPoint) -> NotConvergedError:
        found = (
            f"The path of the solution under {self.perturbation.labels[0]!r} was lost at ε = {at.epsilon:.6g} "
            f"after {count_words(self.steps, 'step')}."
        )
        if self.steps >= self.max_steps:
            allowed = f"It must reach ε = 1 within {count_words(self.max_steps, 'step')}."
            cure = "Raise max_steps, perturb less, or use Retraining."
            return NotConvergedError(found, allowed, "The limit on steps was reached before the end of the path.", cure)
        return NotConvergedError(
            found,
            "It must reach ε = 1.",
            "No solution was found beyond that ε: the path may fold back, or the constraints contradict each other.",
            "Perturb less, add a ridge, or use Retraining, which may jump to another solution.",
        )
