"""From afar: the augmented Lagrangian, minimised by L-BFGS in curvature's own coordinates and by trust-region steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dif.errors import InfeasibleError, UnboundedError
from dif.evaluation.hessian import Curvature
from dif.evaluation.program import Program
from dif.linalg.metric import Metric
from dif.linalg.trust_region import exact_step, steihaug_step
from dif.runtime.limits import Limits
from dif.runtime.progress import Reporter

PATIENCE = 8  # rounds that may pass without the residual halving
_FAR = 1e9  # ‖θ‖ relative to the start: beyond it a problem counts as unbounded
_BLOCK = 50  # iterations of L-BFGS between looks
_BLOCKS = 40  # per round
_RENEWED = 2  # blocks between looks at the curvature
_LOOK, _DEAREST = 1000, 16_000  # evaluations of all losses that such a look may cost: at first, and where those fail
_SHRINKINGS = 8  # of the trust region, per step
_STEPS = 5  # by the trust region per look, where the Hessian is not assembled;
_CLOSING = 0.5  # more while each shrinks the gradient by this
_INNER, _MANY = 100, 40  # products per such step at most, and more than a fair look should need


class AugmentedLagrangian:
    """Rounds of minimising f₀ + Σ ψ(cⱼ, λⱼ, ρⱼ), each to a tighter tolerance, with λ and ρ updated in between."""

    def __init__(
        self, program: Program, theta: Tensor, lam: Tensor, limits: Limits, report: Reporter, keep: Callable[..., None]
    ) -> None:
        self.program, self.limits, self.report, self._keep = program, limits, report, keep
        self.theta, self.lam = theta.clone(), lam.clone()
        f, J = program.rows.gradients(theta)
        H0 = Curvature(program.rows, theta, program.weights(torch.zeros_like(lam)))
        self.root = H0.scale().sqrt()
        self.metric = Metric(self.root)
        norms = torch.linalg.vector_norm(J[1:] / self.root, dim=1)
        self.row_scale = torch.where(norms > 0, norms, torch.ones_like(norms)) ** 2
        self.penalty = 10.0  # ρⱼ = penalty / ‖∇fⱼ‖², in √D·θ
        self.accuracy = 1e-3
        self.violation = float("inf")
        self.start_size = max(float((self.root * theta).norm()), H0.noise, float((J[0] / self.root).norm())) or 1.0
        self.radius, self.smallest = self.start_size, torch.finfo(theta.dtype).eps * self.start_size
        gaps = self._gaps(f, J)[1]
        self.nearest = float(gaps.max()) if len(gaps) else 0.0  # least violation seen, as a step in √D·θ
        self.gap, self.stuck = float("inf"), False
        self.look = _LOOK
        self.raised = 0
        self.ran = ""  # where θ ran to, if it ran away
        self.rounds = 0

    def _shifted(self, f: Tensor) -> Tensor:
        ahead = self.lam + self.penalty / self.row_scale * (f[1:] - self.program.tau)
        return self.program.kinds.project(ahead)

    def _value(self, f: Tensor) -> Tensor:
        force = self._shifted(f)
        return f[0] + ((force**2 - self.lam**2) * self.row_scale).sum() / (2 * self.penalty)

    def _evaluate(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The augmented Lagrangian at θ, and its gradient."""
        self.limits.used += 1
        f, gradient = self.program.rows.pullback(theta, lambda f: self.program.weights(self._shifted(f)))
        return self._value(f), gradient

    def round(self) -> bool:
        """Minimise over θ, then move λ, then ρ where the violation did not fall; False if θ ran away."""
        self.rounds += 1
        if not self._minimise():  # ran away: a stiffer penalty may hold it
            if len(self.lam) == 0 or self.raised > PATIENCE:
                self._unbounded()
            self.penalty *= 10.0
            self.raised += 1
            return False
        f, J = self.program.rows.gradients(self.theta)
        c = f[1:] - self.program.tau
        self.lam = self._shifted(f)
        reach = self.row_scale.sqrt()
        missed = (self._shifted(f) - self.lam) * self.row_scale / self.penalty  # 0 where met and complementary
        violation = float((missed.abs() / reach).max()) if len(c) else 0.0
        if violation > 0.25 * self.violation:
            self.penalty *= 10.0
            self.raised += 1
        self.violation = min(violation, self.violation)
        gap, scaled = self._gaps(f, J)
        self.nearest = min(self.nearest, float(scaled.max()) if len(c) else 0.0)
        self.stuck = len(c) > 0 and float(gap.max()) > 0.8 * self.gap  # a stiffer penalty no longer brings it nearer
        self.gap = float(gap.max()) if len(c) else 0.0
        self.accuracy = max(self.accuracy * 0.1, 1e-12)
        return True

    def escape(self, direction: Tensor) -> None:
        """Leave a saddle along a direction of negative curvature (in √D·θ), whichever side falls."""
        value, _ = self._evaluate(self.theta)
        length = self.radius
        for _ in range(_SHRINKINGS):
            for side in (length, -length):
                trial = self.theta + side * direction / self.root / direction.norm()
                if float(self._evaluate(trial)[0]) < float(value):
                    self.theta = trial
                    return
            length *= 0.25

    def _minimise(self) -> bool:
        """Minimise over θ: L-BFGS, and where that is slow the curvature is looked at anew; False if θ runs away."""
        value, gradient = self._evaluate(self.theta)
        first = value
        for block in range(1, _BLOCKS + 1):
            if self.limits.spent():
                break
            before = self.theta
            value, gradient = self._descend(value, gradient)
            left = self._relative(gradient)
            self.report(self.limits.used, f"(augmented Lagrangian {self.rounds}, gradient {left:.1e})")
            if float(value) < -1e15 * (1 + abs(float(first))):
                self.ran = f"still falling at a value of {float(value):.3g}"
                return False
            if not self._size() < _FAR * self.start_size:
                self.ran = f"still falling at ‖θ‖ > {_FAR:.0e} times the start"
                return False
            if left <= self.accuracy:
                break
            stalled = torch.equal(before, self.theta)
            if block % _RENEWED == 0 or stalled:
                value, gradient, moved = self._renew(value, gradient)
                self._keep(self.theta, self.lam, self.penalty, self.accuracy)
                if (stalled and not moved) or self._relative(gradient) <= self.accuracy:
                    break
        return True

    def _size(self) -> float:
        return float((self.root * self.theta).norm())

    def _relative(self, gradient: Tensor) -> float:
        return float((gradient / self.root).norm()) / max(self.start_size, self._size())

    def _descend(self, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """A block of L-BFGS in u; θ moves, value and gradient there are returned."""
        point = self.metric.to_u(self.theta)
        optimiser = torch.optim.LBFGS(
            [point], max_iter=_BLOCK, max_eval=2 * _BLOCK, history_size=20, tolerance_grad=0.0, tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )  # fmt: skip
        begun: dict[str, Any] = {"first": True}

        def closure() -> Tensor:
            if begun.pop("first", False):
                point.grad = self.metric.gradient(gradient)
                return value
            here, slope = self._evaluate(self.metric.to_theta(point))
            if not (bool(torch.isfinite(here)) and bool(torch.isfinite(slope).all())):
                # outside the domain of the objective: a wall, so that the line search turns back
                return value + 1e10 * (1 + value.abs())
            point.grad = self.metric.gradient(slope)
            return here

        optimiser.step(closure)
        self.theta = self.metric.to_theta(point.detach())
        return self._evaluate(self.theta)

    def _renew(self, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, bool]:
        """A look at the curvature, by which L-BFGS goes on from then, and trust-region steps; whether θ moved."""
        H = self._curvature()
        if H.cheap and not bool(torch.isfinite(H.dense()).all()):  # no second derivative here
            return value, gradient, False
        if H.cheap:
            bent, along = torch.linalg.eigh(self.metric.scaled(H.dense()))
            self.metric = self.metric.with_eigenpairs(bent, along)
            exact = partial(exact_step, bent, along, gradient / self.root)
            return self._step(value, gradient, exact, lambda p: p / self.root)
        sketched = H.sketched(self.look)
        if sketched is not None:
            self.metric = self.metric.with_eigenpairs(*torch.linalg.eigh(self.metric.scaled(sketched.rough())))
        moved, steps = False, 0
        while True:
            slope, before = self.metric.gradient(gradient), self.limits.used
            shape = steihaug_step(partial(self._product, H), slope, self.radius, _INNER)
            poor = self.limits.used - before > _MANY
            there, changed, ok = self._step(value, gradient, partial(_shortened, slope, *shape), self.metric.to_theta)
            closing = float(self.metric.gradient(changed).norm()) < _CLOSING * float(slope.norm())
            value, gradient, moved, steps = there, changed, moved or ok, steps + 1
            going = ok and not poor and (closing or steps < _STEPS)
            if not going or self._relative(gradient) <= self.accuracy or self.limits.spent():
                break
            H = self._curvature()
        if poor:
            self.look = min(2 * self.look, _DEAREST)
        return value, gradient, moved

    def _curvature(self) -> Curvature:
        """∇² of the augmented Lagrangian at θ."""
        f, J = self.program.rows.gradients(self.theta)
        force = self._shifted(f)
        pushing = self.program.kinds.pushing(force)
        H = Curvature(self.program.rows, self.theta, self.program.weights(force))
        return H.with_rows(J[1:][pushing], (self.penalty / self.row_scale)[pushing])

    def _step(
        self,
        value: Tensor,
        gradient: Tensor,
        proposed: Callable[[float], tuple[Tensor, float]],
        to_theta: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, bool]:
        """The step that is proposed for a radius, and the gain it promises; shorter until it keeps the promise."""
        for _ in range(_SHRINKINGS):
            if self.limits.spent():
                break
            p, gain = proposed(self.radius)
            trial = self.theta + to_theta(p)
            there, changed = self._evaluate(trial)
            ratio = float(there - value) / gain if gain < 0 else -1.0
            if ratio > 0.75:
                self.radius = max(self.radius, 2 * float(p.norm()))
            if ratio > 0.1 and bool(torch.isfinite(changed).all()):
                self.theta = trial
                return there, changed, True
            self.radius = max(0.25 * float(p.norm()), self.smallest)
            if self.radius == self.smallest:
                break
        return value, gradient, False

    def _product(self, H: Curvature, v: Tensor) -> Tensor:
        """H·v in u."""
        self.limits.used += 1
        return self.metric.gradient(H.product(self.metric.to_theta(v)[:, None])[:, 0])

    def _unbounded(self) -> None:
        raise UnboundedError(
            "objective of the problem",
            measured=f"{self.ran}, penalty raised {self.raised} times",
            threshold="a minimum at finite θ",
            meaning="The objective falls without end inside the constraints (or on its way to them).",
            cure="Add a ridge, or constraints that hold the free directions; check the sign of the objective.",
        )

    def judge(self, goal: float) -> None:
        """Say so if what stopped us is an empty feasible set."""
        f, J = self.program.rows.gradients(self.theta)
        gap, scaled = self._gaps(f, J)
        if len(gap) == 0:
            return
        worst = int(scaled.argmax())
        allowed = max(1e-5, 1e3 * goal) * max(self.start_size, self._size())
        if self.stuck and float(scaled[worst]) > allowed and self.nearest > allowed:
            raise InfeasibleError(
                f"violation of {self.program.names[worst]} at the point that violates the constraints least",
                measured=f"{float(gap[worst]):.4g}",
                threshold="0",
                meaning="The constraints contradict each other (or no point near the start meets them).",
                cure="Loosen that bound, or drop one of the constraints in conflict with it.",
            )

    def _gaps(self, f: Tensor, J: Tensor) -> tuple[Tensor, Tensor]:
        """How far each row is from being met, as it is and as a step in √D·θ."""
        c = f[1:] - self.program.tau
        gap = self.program.kinds.violation(c)
        reach = torch.linalg.vector_norm(J[1:] / self.root, dim=1)
        return gap, gap / torch.where(reach > 0, reach, 1.0)


def _shortened(slope: Tensor, p: Tensor, Hp: Tensor, radius: float) -> tuple[Tensor, float]:
    """The step p, not longer than the radius, and what it gains."""
    t = min(1.0, radius / max(float(p.norm()), torch.finfo(p.dtype).tiny))
    return t * p, float(t * slope @ p + 0.5 * t**2 * p @ Hp)
