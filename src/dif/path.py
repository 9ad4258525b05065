"""θ(ε) and λ(ε) while a perturbation is carried out, with the ε at which constraints switch on or off."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dif.curvature import Curvature
from dif.direction import Direction
from dif.errors import DegenerateError, NotConvergedError
from dif.kkt import residuals
from dif.kkt_step import kkt_step
from dif.perturbation import Perturbation
from dif.program import Program
from dif.solution import Solution

_FIRST, _SHORTEST = 0.25, 1e-7  # steps of ε
_CORRECTIONS = 8  # Newton steps per point
_EASY = 3  # corrections after which the next step of ε may be longer
_ROOTS = 60  # steps in which an event is located
_LOCATED = 1e-13  # ε


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

    epsilons: Tensor  # (K,) ascending from 0
    thetas: Tensor  # (K, d)
    multipliers: Tensor  # (K, m)
    events: tuple[Event, ...]
    end: Solution  # of the perturbed problem, with its own certificate
    newton_steps: int


@dataclass
class _Point:
    epsilon: float
    program: Program
    theta: Tensor
    lam: Tensor
    c: Tensor  # f − τ
    J: Tensor  # gradients of all rows
    corrections: int = 0


@dataclass
class Follower:
    """Predictor–corrector along ε: the directional derivative ahead, Newton on the KKT system with its rows held.

    Rows are held as equalities between events; where one would be violated, or its multiplier turn negative, the ε at
    which that begins is located, and the quadratic problem of the derivative there decides which rows go on.
    """

    at: Solution
    perturbation: Perturbation
    tol: float
    max_steps: int
    steps: int = 0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.direction = Direction.single(self.at.program, self.perturbation)
        self.equality = self.at.program.equality
        self.goal = max(self.tol, 16 * self.at.scales.rounding)

    def run(self) -> Path:
        """From ε = 0 to 1."""
        active = self.at.active
        held = self._mask(active.binding)
        weak = self._mask(active.weak)
        here = _Point(0.0, self.at.program, self.at.theta, self.at.lam, self.at.c, self.at.J)
        points, length = [here], _FIRST
        held, slope = self._turned(here, held, weak)
        while here.epsilon < 1.0:
            length = min(length, 1.0 - here.epsilon)
            there = self._corrected(here, slope, here.epsilon + length, held)
            if there is None:
                length *= 0.25
                if length < _SHORTEST:
                    raise self._lost(here)
                continue
            wrong = self._wrong(there, held)
            if bool(wrong.any()):
                there, row = self._located(here, there, slope, held)
                touching, held_before = self._mask((row,)), bool(held[row])
                held, slope = self._turned(there, held & ~touching, touching)
                if bool(held[row]) != held_before:
                    name = self.at.program.names[row]
                    self.events.append(Event(there.epsilon, row, name, bool(held[row])))
            else:
                held, slope = self._turned(there, held, torch.zeros_like(held))
                length *= 2.0 if there.corrections <= _EASY else 1.0 if there.corrections < _CORRECTIONS else 0.5
            here = there
            points.append(here)
        return Path(
            torch.tensor([p.epsilon for p in points], dtype=torch.float64),
            torch.stack([p.theta for p in points]),
            torch.stack([p.lam for p in points]),
            tuple(self.events),
            Solution.of_program(here.program, here.theta, here.lam),
            self.steps,
        )

    def _mask(self, rows: tuple[int, ...]) -> Tensor:
        mask = torch.zeros_like(self.equality)
        mask[list(rows)] = True
        return mask

    # One point

    def _turned(self, at: _Point, held: Tensor, weak: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Which rows hold ahead of a point, and (θ′, λ′) there; weak rows may go either way."""
        p, Dp = self.at.program.rows.part_gradients(at.theta)
        df, DJ = self.direction.first_order(0, at.theta, p, Dp)
        weights = at.program.weights(at.lam)
        b, r = weights @ DJ, df[1:] - self.direction.dtau[0]
        some = torch.nonzero(held | weak).reshape(-1)
        H, G = Curvature(at.program.rows, at.theta, weights), at.J[1:][some]
        self.steps += 1
        step = kkt_step(b, H, r[some], G, torch.zeros_like(r[some]), held[some], torch.ones_like(held[some]))
        ahead = held.clone()
        ahead[some] = held[some] | (step.lam > 0)
        slope = torch.zeros_like(at.lam)
        slope[some] = step.lam
        return ahead, (step.omega, slope)

    def _corrected(self, start: _Point, slope: tuple[Tensor, Tensor], epsilon: float, held: Tensor) -> _Point | None:
        """The point at ε with these rows held, from the derivative at another; None where Newton does not close in."""
        ahead = epsilon - start.epsilon
        theta, lam = start.theta + ahead * slope[0], start.lam + ahead * slope[1]
        program = Direction(self.at.program, epsilon * self.perturbation).carried_out(0)
        last = float("inf")
        rows = torch.nonzero(held).reshape(-1)
        everything = torch.ones_like(held[rows])
        for count in range(_CORRECTIONS + 1):
            f, J = program.rows.gradients(theta)
            c, weights = f[1:] - program.tau, program.weights(lam)
            counted = torch.where(held, c, -1.0)  # the others are looked at when the point is found
            residual = residuals(self.at.scales, weights @ J, counted, torch.where(held, lam, 0.0), held).residual
            if residual <= self.goal:
                return _Point(epsilon, program, theta, lam, c, J, count)
            if not residual < 0.9 * last or count == _CORRECTIONS:
                return None
            last = residual
            if self.steps >= self.max_steps:
                raise self._lost(start)
            self.steps += 1
            try:
                H = Curvature(program.rows, theta, weights)
                step = kkt_step(weights @ J, H, c[rows], J[1:][rows], lam[rows], everything, everything)
            except (DegenerateError, NotConvergedError):
                return None
            theta = theta + step.omega
            lam = torch.zeros_like(lam)
            lam[rows] = step.lam
        return None

    def _wrong(self, point: _Point, held: Tensor) -> Tensor:
        """Rows that are violated though not held, or held by a negative multiplier, (m,) bool."""
        return self._functions(point, held) < -10 * self.goal

    def _functions(self, point: _Point, held: Tensor) -> Tensor:
        """What must stay ≥ 0 of each row, scaled, (m,): its multiplier where it is held, else its slack."""
        found = torch.where(held, self.at.scales.multiplier(point.lam), self.at.scales.slack(point.c))
        return torch.where(self.equality, torch.ones_like(found), found)

    def _located(self, low: _Point, high: _Point, slope: tuple[Tensor, Tensor], held: Tensor) -> tuple[_Point, int]:
        """The point at which the first row goes wrong between two, and that row."""
        before, after = self._functions(low, held), self._functions(high, held)
        low_eps = low.epsilon
        found, row = high, int(after.argmin())
        for turn in range(_ROOTS):
            wrong = torch.nonzero(after < -self.goal).reshape(-1)
            if len(wrong) == 0:
                break
            span = found.epsilon - low_eps
            shares = (before[wrong] / (before[wrong] - after[wrong]).clamp(min=1e-300)).clamp(0.0, 1.0)
            first = int(shares.argmin())
            row = int(wrong[first])
            share = float(shares[first])
            if turn % 3 == 2:  # where secants creep, halving does not
                share = 0.5
            middle = low_eps + min(max(share, 1e-3), 1 - 1e-3) * span if span > 1e-9 else low_eps + share * span
            if span <= _LOCATED:
                break
            point = self._corrected(low, slope, middle, held)
            if point is None:
                raise self._lost(low)
            values = self._functions(point, held)
            if bool((values < -self.goal).any()):
                found, after = point, values
            else:
                low_eps, before = middle, values
                if float(values[row]) <= self.goal:
                    found = point
                    break
        return found, row

    def _lost(self, at: _Point) -> NotConvergedError:
        return NotConvergedError(
            f"path of the solution under {self.perturbation.labels[0]!r}",
            measured=f"lost at ε = {at.epsilon:.6g} after {self.steps} Newton steps",
            threshold=f"followed to ε = 1 within {self.max_steps}",
            meaning="No solution beyond that continues the one before: a fold, or a constraint that cannot be kept.",
            cure="Perturb less, add a ridge, or use Retraining, which may jump to another solution.",
        )
