"""θ(ε) and λ(ε) while a perturbation is carried out, with the ε at which constraints switch on or off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from dif.errors import DegenerateError, DifError, NotConvergedError
from dif.evaluation.hessian import Curvature
from dif.evaluation.program import Program
from dif.evaluation.weight_change import Direction
from dif.linalg.anderson import Extrapolation
from dif.optimality.kkt_system import KKTSystem, kkt_step
from dif.optimality.residuals import residuals
from dif.optimality.solution import Solution
from dif.optimality.targets import Targets
from dif.problem.kinds import Kinds
from dif.problem.perturbation import Perturbation

_FIRST, _SHORTEST = 0.25, 1e-7  # steps of ε
_CORRECTIONS = 60  # steps with one prepared system per point,
_HALVED = 8  # within so many of which the residual must halve
_EASY, _HARD = 10, 20  # corrections after which the next step of ε is longer or shorter
_ROUGH = 1e-2  # residual, of what is to be told apart, while an event is located
_ROOTS = 60  # steps in which an event is located
_LOCATED = 1e-13  # ε
_DEPENDENT = 1e-8  # relative size of what is left of a gradient beside others on which it depends
_TOUCHING = 1e-6  # units, within which other rows switch at the same place


@dataclass(frozen=True)
class Event:
    """A constraint that lets go or begins to bind."""

    epsilon: float
    row: int
    name: str
    binds: bool  # from then on

    def __str__(self) -> str:
        return f"ε = {self.epsilon:.6g}: {self.name} {'begins to bind' if self.binds else 'lets go'}"


@dataclass(frozen=True, eq=False)
class Path:
    """The solutions of the problems between the one that was solved and the perturbed one."""

    start: Solution
    perturbation: Perturbation
    epsilons: Tensor  # (K,) ascending from 0
    thetas: Tensor  # (K, d)
    multipliers: Tensor  # (K, m)
    events: tuple[Event, ...]
    residual: float  # the largest KKT residual of its points, in the units of the start
    steps: int  # gradients of the Lagrangian that it took
    curvatures: int  # Hessians beside the one at the start

    @cached_property
    def end(self) -> Solution:
        """The solution of the perturbed problem, with its own certificate; it can be saved, scored, perturbed again."""
        problem, theta = self.start.problem.after(self.perturbation), self.thetas[-1]
        program = Program.compile(problem, self.start.program.parameters, theta)
        return Solution.of_program(program, theta, self.multipliers[-1])

    def changes(self, target: Any) -> Tensor:
        """How far each target has moved at each ε, (K, T)."""
        targets = Targets(target, self.start)
        values = torch.stack([targets.values(theta) for theta in self.thetas])
        return (values - values[:1]).double().cpu()


@dataclass
class Point:
    """A solution on the way."""

    epsilon: float
    program: Program
    theta: Tensor
    lam: Tensor
    c: Tensor  # f − τ
    corrections: int = 0
    residual: float = 0.0


@dataclass
class Follower:
    """Predictor–corrector along ε: the directional derivative ahead, Newton on the KKT system with its rows held.

    Corrections use the curvature of the last point at which it was looked at, and look again where they do not close
    in. Rows are held as equalities between events; where one would be violated, or its multiplier turn negative, the ε
    at which that begins is located and the row changes sides; where several meet there, the quadratic problem of the
    derivative decides.
    """

    at: Solution
    perturbation: Perturbation
    tol: float
    max_steps: int
    prepared: KKTSystem
    points: list[Point] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    steps: int = 0
    curvatures: int = 0

    def __post_init__(self) -> None:
        Direction.single(self.at.program, self.perturbation)  # refuses several
        self.whole = self._program(1.0)
        self.one_sided = self.at.program.kinds.one_sided
        self.goal = max(self.tol, 16 * self.at.scales.rounding)

    def run(self, stops: Sequence[float] = (1.0,)) -> Path:
        """From ε = 0 to 1, with a point at each of the stops on the way (ascending; the last is the end)."""
        active = self.at.active
        held, weak = active.mask(active.binding), active.mask(active.weak)
        here = Point(0.0, self.at.program, self.at.theta, self.at.lam, self.at.c)
        self.points.append(here)
        fresh, length, waiting = True, _FIRST, [s for s in stops if s > 0.0]
        if bool(weak.any()):
            held = self._turned(here, held, weak)
        slope = self._slope(here, held)
        while waiting:
            aim = min(here.epsilon + length, waiting[0])
            ahead = aim - here.epsilon
            there = self._corrected(here.theta + ahead * slope[0], here.lam + ahead * slope[1], aim, held)
            if there is None and not fresh:
                self._look(here, held)
                fresh, slope = True, self._slope(here, held)
                continue
            if there is None:
                length = 0.25 * ahead
                if length < _SHORTEST:
                    raise self._lost(here)
                continue
            if bool((self._functions(there, held) < -10 * self.goal).any()):
                there, row = self._located(here, there, held)
                touching = (self._functions(there, held).abs() < _TOUCHING) & self.one_sided
                touching[row] = True
                before = held
                if int(touching.sum()) > 1:
                    held = self._turned_anew(there, held & ~touching, touching)
                else:
                    held = self._exchanged(there, held, row) if not bool(held[row]) else held ^ touching
                there.lam = torch.where(held, there.lam, 0.0)
                for j in torch.nonzero(held != before).reshape(-1).tolist():
                    self.events.append(Event(there.epsilon, j, self.at.program.names[j], bool(held[j])))
                if bool((self.prepared.firm & ~held).any()):
                    self._look(there, held)
            else:
                length *= 2.0 if there.corrections <= _EASY else 1.0 if there.corrections <= _HARD else 0.5
            here, fresh = there, False
            self.points.append(here)
            slope = self._slope(here, held)
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

    def _program(self, epsilon: float) -> Program:
        return Direction(self.at.program, epsilon * self.perturbation).carried_out(0)

    # One point

    def _look(self, at: Point, held: Tensor) -> None:
        """Prepare anew."""
        self.curvatures += 1
        try:
            H = Curvature(at.program.rows, at.theta, at.program.weights(at.lam))
            G = at.program.rows.gradients(at.theta)[1][1:]
            self.prepared = KKTSystem.prepare_convex(H, G, at.program.kinds, held)
        except DegenerateError as error:
            raise self._lost(at) from error

    def _turned_anew(self, at: Point, held: Tensor, weak: Tensor) -> Tensor:
        self._look(at, held)
        try:
            return self._turned(at, held, weak)
        except DifError as error:  # the rows that meet here contradict each other ahead
            raise self._lost(at) from error

    def _derivative(self, at: Point) -> tuple[Tensor, Tensor]:
        """∂∇L/∂ε, (d,), and ∂(f − τ)/∂ε, (m,): the problem is linear in ε, so that its two ends tell."""
        weights = self.at.program.weights(at.lam)
        self.steps += 2
        (f1, g1), (f0, g0) = (p.rows.pullback(at.theta, lambda _: weights) for p in (self.whole, self.at.program))
        return g1 - g0, (f1 - f0)[1:] - (self.whole.tau - self.at.program.tau)

    def _slope(self, at: Point, held: Tensor) -> tuple[Tensor, Tensor]:
        """(θ′, λ′) with these rows held, as the prepared curvature has it."""
        return self.prepared.hold(*self._derivative(at), held)

    def _turned(self, at: Point, held: Tensor, weak: Tensor) -> Tensor:
        """Which rows hold ahead of the point at which the curvature was prepared; weak rows may go either way."""
        b, r = self._derivative(at)
        some = torch.nonzero(held | weak).reshape(-1)
        nothing, firm = torch.zeros_like(r[some]), torch.ones_like(held[some])
        step = kkt_step(b, self.prepared.H, r[some], self.prepared.G[some], nothing, Kinds(held[some]), firm)
        ahead = held.clone()
        ahead[some] = held[some] | (step.lam > 0)
        return ahead

    def _exchanged(self, at: Point, held: Tensor, row: int) -> Tensor:
        """The rows that hold once another begins to; where its gradient depends on theirs, it takes over from one.

        Along the combination of gradients that vanishes, force can be shifted onto the new row until another has none
        left: that one lets go. Where all of them gain force instead, the constraints contradict each other ahead.
        """
        ahead = held.clone()
        ahead[row] = True
        G = at.program.rows.gradients(at.theta)[1][1:] / self.at.scales.root
        rows = torch.nonzero(held).reshape(-1)
        share = torch.linalg.lstsq(G[rows].T, G[row][:, None]).solution[:, 0] if len(rows) else G[row, :0]
        if float((G[row] - share @ G[rows]).norm()) > _DEPENDENT * float(G[row].norm()):
            return ahead
        gives = (share > _DEPENDENT) & self.one_sided[rows]
        if not bool(gives.any()):
            raise self._lost(at)
        ratios = torch.where(gives, at.lam[rows] / share, float("inf"))
        first = int(ratios.argmin())
        at.lam = at.lam.clone()
        at.lam[rows] -= float(ratios[first]) * share
        at.lam[row] = float(ratios[first])
        ahead[rows[first]] = False
        return ahead

    def _corrected(self, theta: Tensor, lam: Tensor, epsilon: float, held: Tensor, goal: float = 0.0) -> Point | None:
        """The point at ε with these rows held, from a guess; None where the steps do not close in."""
        program = self._program(epsilon)
        d, scales = theta.numel(), self.at.scales
        past = Extrapolation(1, d + len(lam), partial(scales.lengths, G=self.at.G))
        only = torch.tensor([0], device=theta.device)
        mark, since = float("inf"), 0
        for count in range(_CORRECTIONS):
            weights = program.weights(lam)
            f, g = program.rows.pullback(theta, lambda _, weights=weights: weights)
            c = f[1:] - program.tau
            counted = torch.where(held, c, -1.0)  # the others are looked at when the point is found
            residual = residuals(scales, g, counted, torch.where(held, lam, 0.0), Kinds(held)).residual
            if residual <= max(goal, self.goal):
                return Point(epsilon, program, theta, lam, c, count, residual)
            mark, since = (residual, 0) if residual < 0.5 * mark else (mark, since + 1)
            if since >= _HALVED or not residual < float("inf"):
                return None
            if self.steps >= self.max_steps:
                raise self._lost(self.points[-1])
            self.steps += 1
            try:
                omega, mu = self.prepared.hold(g, c, held)
            except NotConvergedError:
                return None
            here = torch.cat([theta, lam])[None]
            there = here + past.combined(only, here, torch.cat([omega, mu])[None])
            theta, lam = there[0, :d], there[0, d:]
        return None

    # Events

    def _functions(self, point: Point, held: Tensor) -> Tensor:
        """What must stay ≥ 0 of each row, scaled, (m,): its multiplier where it is held, else its slack."""
        found = torch.where(held, self.at.scales.multiplier(point.lam), self.at.scales.slack(point.c))
        return torch.where(self.one_sided, found, 1.0)

    def _located(self, low: Point, high: Point, held: Tensor) -> tuple[Point, int]:
        """The point at which the first row goes wrong between two, and that row."""
        before, after = self._functions(low, held), self._functions(high, held)
        row = int(after.argmin())
        for turn in range(_ROOTS):
            wrong = torch.nonzero(after < -self.goal).reshape(-1)
            span = high.epsilon - low.epsilon
            if len(wrong) == 0 or span <= _LOCATED:
                break
            shares = (before[wrong] / (before[wrong] - after[wrong]).clamp(min=1e-300)).clamp(0.0, 1.0)
            first = int(shares.argmin())
            row, share = int(wrong[first]), float(shares[first])
            if turn % 3 == 2:  # where secants creep, halving does not
                share = 0.5
            if span > 1e-9:
                share = min(max(share, 1e-3), 1 - 1e-3)
            theta, lam = (torch.lerp(getattr(low, x), getattr(high, x), share) for x in ("theta", "lam"))
            rough = _ROUGH * min(abs(float(before[row])), abs(float(after[row])))
            point = self._corrected(theta, lam, low.epsilon + share * span, held, rough)
            if point is not None and abs(float(self._functions(point, held)[row])) <= 10 * point.residual:
                point = self._corrected(point.theta, point.lam, point.epsilon, held)  # too rough to tell
            if point is None:
                raise self._lost(low)
            values = self._functions(point, held)
            if bool((values < -self.goal).any()):
                high, after = point, values
            elif float(values[row]) <= self.goal:
                return point, row
            else:
                low, before = point, values
        exact = self._corrected(high.theta, high.lam, high.epsilon, held)
        return (high if exact is None else exact), row

    def _lost(self, at: Point) -> NotConvergedError:
        return NotConvergedError(
            f"path of the solution under {self.perturbation.labels[0]!r}",
            measured=f"lost at ε = {at.epsilon:.6g} after {self.steps} steps",
            threshold=f"followed to ε = 1 within {self.max_steps}",
            meaning="No solution was found beyond it that continues the one before: a fold, or clashing constraints.",
            cure="Perturb less, add a ridge, or use Retraining, which may jump to another solution.",
        )
