"""Solve from a distant start: rounds of the augmented Lagrangian, minimised by L-BFGS and trust-region steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from dif.derivatives.hessian import Curvature
from dif.derivatives.program import Program
from dif.errors import InfeasibleError, UnboundedError, warn
from dif.linalg.lanczos import KrylovModel, exact_step
from dif.linalg.preconditioner import Metric
from dif.runtime.work import Limits, Reporter

PATIENCE = 8  # rounds allowed without halving the residual
_DIVERGED = 1e9  # ‖θ‖ relative to its start, beyond which a problem counts as unbounded
_BLOCK = {True: 50, False: 100}  # L-BFGS iterations per block, by whether the Hessian is cheap
_BLOCKS = 40  # blocks per round
_CURVATURE_EVERY = {True: 2, False: 1}  # least number of blocks between two updates of the curvature, likewise
_SPENT = 0.25  # share of the price of a matrix that L-BFGS must have cost before a further one is assembled
_PAIRS = {True: 20, False: 100}  # steps that L-BFGS remembers, likewise
_SKETCH_COST = 1000  # evaluations of all losses that a sketch of the Hessian may cost at first
_SKETCH_COST_MAX = 16_000  # the same after sketches have proved too coarse
_SHRINKS = 8  # reductions of the trust region per step
_TRUST_STEPS = 5  # trust-region steps per update of the curvature, where there is no cheap Gauss–Newton matrix
_FAST = 0.5  # further steps are made while each reduces the gradient norm by at least this factor
_INNER = 100  # Hessian-vector products per trust-region step
_EARLY, _LONG = 12.0, 60.0  # seconds after which slow progress is mentioned, and that it must still take
_FLAT = 0.01  # curvature of a flat direction, relative to the mean
_TOO_MANY = 40  # products per trust-region step above which the sketch counts as too coarse


class _Reached(Exception):
    """Ends L-BFGS at a point whose gradient is small enough."""


class AugmentedLagrangian:
    """Rounds of minimising f₀ + Σ ψ(cⱼ, λⱼ, ρⱼ), each to a tighter tolerance, with λ and ρ updated in between.

    H is the curvature at the start or nearby, by which coordinates are scaled.
    `save(theta, lam, penalty, accuracy)` is called between blocks of iterations, so that the work can be resumed.
    """

    def __init__(
        self, program: Program, theta: Tensor, lam: Tensor, H: Curvature, limits: Limits, report: Reporter,
        save: Callable[..., None],
    ) -> None:  # fmt: skip
        self.program, self.limits, self.report, self._save = program, limits, report, save
        self.theta, self.lam = theta.clone(), lam.clone()
        self.value = self.gradient = theta  # of the augmented Lagrangian at θ, during a round
        f, J = program.rows.gradients(theta)
        self.cheap = H.cheap  # whether the Hessian is
        self.root = H.scale().sqrt()
        least = _CURVATURE_EVERY[self.cheap]  # blocks before the first update of the curvature; then before others
        self.patience = least, max(least, math.ceil(_SPENT * H.price / _BLOCK[self.cheap]) if self.cheap else 0)
        self.blocks = 0  # since the last update
        self.metric = Metric(self.root)
        norms = torch.linalg.vector_norm(J[1:] / self.root, dim=1)
        self.row_scale = torch.where(norms > 0, norms, torch.ones_like(norms)) ** 2
        self.penalty = 10.0  # ρⱼ = penalty / ‖∇fⱼ‖², in √D·θ
        self.accuracy = 1e-3  # relative gradient norm to reach in the next round
        self.violation = float("inf")  # smallest so far, complementarity included
        self.start_size = max(float((self.root * theta).norm()), H.noise, float((J[0] / self.root).norm())) or 1.0
        self.radius, self.smallest_radius = self.start_size, torch.finfo(theta.dtype).eps * self.start_size
        self.nearest = float("inf")  # least violation so far, as a step in √D·θ
        self.largest_violation = float("inf")  # after the last round
        self.stuck = False  # whether a larger penalty no longer reduces it
        self._find_violated(f, J)
        self.sketch_cost = _SKETCH_COST
        self.raised = 0  # how often the penalty was raised
        self.divergence = ""  # how far θ or the objective went, if it diverged
        self.rounds = 0
        self.warned = False  # whether the slow progress was mentioned

    def _next_multipliers(self, f: Tensor) -> Tensor:
        """Return λ + ρ(f − τ), projected onto the admissible multipliers."""
        return self.program.kinds.project(self.lam + self.penalty / self.row_scale * (f[1:] - self.program.tau))

    def _evaluate(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the augmented Lagrangian at θ and its gradient."""
        self.limits.used += 1
        f, gradient = self.program.rows.pullback(theta, lambda f: self.program.weights(self._next_multipliers(f)))
        lam = self._next_multipliers(f)
        return f[0] + ((lam**2 - self.lam**2) * self.row_scale).sum() / (2 * self.penalty), gradient

    def run_round(self) -> bool:
        """Minimise over θ, update λ, and raise ρ unless the violation fell; return False if θ diverged."""
        self.rounds += 1
        if not self._minimise():  # it diverged, which a larger penalty may prevent
            if len(self.lam) == 0 or self.raised > PATIENCE:
                raise UnboundedError(
                    f"The objective still falls {self.divergence} (penalty raised {self.raised} times).",
                    "It must have a minimum at finite θ.",
                    "The objective is unbounded below on the feasible set, or on the way to it.",
                    "Add a ridge, or constraints on the directions in which it falls; check the sign of the objective.",
                )
            self.penalty *= 10.0
            self.raised += 1
            return False
        if self.limits.find_reached():  # the round is not finished
            return True
        f, J = self.program.rows.gradients(self.theta)
        self.lam = self._next_multipliers(f)
        # 0 on rows that are satisfied and complementary
        missing = (self._next_multipliers(f) - self.lam).abs() * self.row_scale.sqrt() / self.penalty
        violation = float(missing.max()) if len(missing) else 0.0
        if violation > 0.25 * self.violation:
            self.penalty *= 10.0
            self.raised += 1
        self.violation = min(violation, self.violation)
        self._find_violated(f, J)
        self.accuracy = max(self.accuracy * 0.1, 1e-12)
        return True

    def escape(self, direction: Tensor) -> None:
        """Leave a saddle along a direction of negative curvature (in √D·θ), to the side on which the value falls."""
        value, _ = self._evaluate(self.theta)
        for length in (sign * 0.25**k * self.radius for k in range(_SHRINKS) for sign in (1.0, -1.0)):
            trial = self.theta + length * direction / self.root / direction.norm()
            if float(self._evaluate(trial)[0]) < float(value):
                self.theta = trial
                return

    def _minimise(self) -> bool:
        """Minimise over θ by L-BFGS, with trust-region steps where that is slow; return False if θ diverges."""
        self.value, self.gradient = self._evaluate(self.theta)
        first, start = float(self.value), self._relative_size(self.gradient)
        if not self.cheap and self.metric.vectors is None:
            self._scale_coordinates(self._curvature())
        for _ in range(_BLOCKS):
            if self.limits.find_reached():
                break
            before = self.theta
            self._descend()
            size = self._relative_size(self.gradient)
            self.report(self.limits.used, f"(augmented Lagrangian, round {self.rounds}, gradient {size:.1e})")
            if not self.warned:
                self._warn_slow(start, size)
            if float(self.value) < -1e15 * (1 + abs(first)):
                self.divergence = f"at a value of {float(self.value):.3g}"
                return False
            if not self._size() < _DIVERGED * self.start_size:
                self.divergence = f"at ‖θ‖ > {_DIVERGED:.0e} times its size at the start"
                return False
            if size <= self.accuracy:
                break
            stalled = torch.equal(before, self.theta)
            self.blocks += 1
            if self.blocks >= self.patience[self.metric.vectors is not None] or stalled:
                moved = self._use_curvature()
                self._save(self.theta, self.lam, self.penalty, self.accuracy)
                if (stalled and not moved) or self._relative_size(self.gradient) <= self.accuracy:
                    break
        return True

    def _warn_slow(self, start: float, size: float) -> None:
        """Say early, and once, that the end is far away at the rate of the first round."""
        spent = time.monotonic() - self.limits.begun
        if self.rounds > 1 or spent < _EARLY or size <= self.accuracy:
            return
        left = math.log(size / self.accuracy) / math.log(start / size) if size < start else float("inf")
        if left * spent < _LONG:
            return
        self.warned, curvatures = True, torch.as_tensor(self.metric.size) ** 2
        flat = int((curvatures < _FLAT * curvatures.mean()).sum())
        warn(
            f"`fit` has reduced the gradient from {start:.2g} to {size:.2g} of its scale in {spent:.0f} s. It must be "
            f"at most {self.accuracy:.0e} before Newton's method takes over; at this rate that takes "
            f"{left * spent:.0f} s more. {flat} of {len(self.theta)} directions are flat (curvature below {_FLAT:g} "
            "of the mean); along such, the minimum is far, and one removal moves the parameters too far for a "
            "derivative. `dif.Training` needs no minimum, and `dif.UnrolledInfluence(run)` predicts for the model as "
            "it was trained. A larger ridge makes `fit` faster; `max_seconds` limits it.",
            UserWarning,
        )

    def _size(self) -> float:
        """Return ‖√D·θ‖."""
        return float((self.root * self.theta).norm())

    def _relative_size(self, gradient: Tensor) -> float:
        """Return the norm of a gradient relative to the size of θ."""
        return float((gradient / self.root).norm()) / max(self.start_size, self._size())

    def _descend(self) -> None:
        """Run a block of L-BFGS in scaled coordinates u.

        Lengths are multiples of a small gradient's size: of shorter steps, torch's optimiser learns no curvature.
        """
        metric, known = self.metric, (self.value, self.gradient)  # the first call is at θ
        unit = min(1.0, float(metric.map_gradient(self.gradient).abs().sum())) or 1.0
        point = metric.to_u(self.theta) / unit
        optimiser = torch.optim.LBFGS(
            [point], max_iter=_BLOCK[self.cheap], max_eval=2 * _BLOCK[self.cheap], history_size=_PAIRS[self.cheap],
            tolerance_grad=0.0, tolerance_change=0.0, line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure() -> Tensor:
            nonlocal known
            theta = metric.to_theta(unit * point)
            value, gradient = known or self._evaluate(theta)
            first, known = known is not None, None
            if not (first or (bool(torch.isfinite(value)) and bool(torch.isfinite(gradient).all()))):
                # outside the domain of the objective: a large value makes the line search turn back
                return (self.value + 1e10 * (1 + self.value.abs())) / unit**2
            near = not first and not self.cheap and self._relative_size(gradient) <= self.accuracy
            if near and float(value) <= float(self.value):
                self.theta, self.value, self.gradient = theta, value, gradient
                raise _Reached
            point.grad = metric.map_gradient(gradient) / unit
            return value / unit**2

        with suppress(_Reached):
            optimiser.step(closure)
            self.theta = metric.to_theta(unit * point)
            self.value, self.gradient = self._evaluate(self.theta)

    def _use_curvature(self) -> bool:
        """Scale the coordinates by the curvature at θ and make trust-region steps; return whether θ moved."""
        H, self.blocks = self._curvature(), 0
        if H.cheap:
            matrix = H.rough() if self.patience[1] > self.patience[0] else H.dense()
            if not bool(torch.isfinite(matrix).all()):  # no second derivative here
                return False
            eigenvalues, vectors = torch.linalg.eigh(self.metric.scale_hessian(matrix))
            self.metric = self.metric.with_eigenpairs(eigenvalues, vectors)
            propose = partial(exact_step, eigenvalues, vectors, self.gradient / self.root)
            return self._trust_region_step(propose, lambda p: p / self.root)
        self._scale_coordinates(H)
        any_moved, steps, most = False, 0, 1 if H.has_gauss_newton else _TRUST_STEPS
        while True:
            slope, used = self.metric.map_gradient(self.gradient), self.limits.used
            model = KrylovModel(partial(self._product, H), slope, self.radius, _INNER)
            coarse = self.limits.used - used > _TOO_MANY
            moved = self._trust_region_step(model.step, self.metric.to_theta)
            fast = float(self.metric.map_gradient(self.gradient).norm()) < _FAST * float(slope.norm())
            any_moved, steps = any_moved or moved, steps + 1
            proceed = moved and not coarse and (fast or steps < most)
            if not proceed or self._relative_size(self.gradient) <= self.accuracy or self.limits.find_reached():
                break
            H = self._curvature()
        if coarse:
            self.sketch_cost = min(2 * self.sketch_cost, _SKETCH_COST_MAX)
        return any_moved

    def _scale_coordinates(self, H: Curvature) -> None:
        """Scale the coordinates by a cheap estimate of the curvature, where the Hessian is expensive."""
        matrix = H.metric_matrix(self.sketch_cost)
        if matrix is not None:
            self.metric = self.metric.with_eigenpairs(*torch.linalg.eigh(self.metric.scale_hessian(matrix)))

    def _curvature(self) -> Curvature:
        """Return the Hessian of the augmented Lagrangian at θ."""
        f, J = self.program.rows.gradients(self.theta)
        lam = self._next_multipliers(f)
        forced = self.program.kinds.has_force(lam)
        H = Curvature(self.program.rows, self.theta, self.program.weights(lam))
        return H.with_rows(J[1:][forced], (self.penalty / self.row_scale)[forced])

    def _trust_region_step(
        self, propose: Callable[[float], tuple[Tensor, float]], to_theta: Callable[[Tensor], Tensor]
    ) -> bool:
        """Shrink the trust region until a step decreases the value about as much as predicted; say if there is one.

        Args:
            propose: For a radius: a step not longer than it, and the change of the value that it predicts.
            to_theta: Maps the step to a change of θ.
        """
        for _ in range(_SHRINKS):
            if self.limits.find_reached():
                break
            p, predicted = propose(self.radius)
            trial = self.theta + to_theta(p)
            value, gradient = self._evaluate(trial)
            ratio = float(value - self.value) / predicted if predicted < 0 else -1.0
            if ratio > 0.75:
                self.radius = max(self.radius, 2 * float(p.norm()))
            if ratio > 0.1 and bool(torch.isfinite(gradient).all()):
                self.theta, self.value, self.gradient = trial, value, gradient
                return True
            self.radius = max(0.25 * float(p.norm()), self.smallest_radius)
            if self.radius == self.smallest_radius:
                break
        return False

    def _product(self, H: Curvature, v: Tensor) -> Tensor:
        """Return H·v in scaled coordinates u."""
        self.limits.used += 1
        return self.metric.map_gradient(H.product(self.metric.to_theta(v)[:, None])[:, 0])

    def check_feasible(self, tol: float) -> None:
        """Raise an InfeasibleError where no further progress is possible because no point is feasible."""
        allowed = max(1e-5, 1e3 * tol) * max(self.start_size, self._size())
        if self.stuck and self.distance > allowed and self.nearest > allowed:
            raise InfeasibleError(
                f"The least infeasible point found violates {self.program.names[self.row]!r} by {self.violated:.4g}.",
                "At least one point must satisfy all constraints.",
                "The constraints contradict each other, or no point near the start satisfies them.",
                "Loosen that bound, or drop one of the constraints in conflict with it.",
            )

    def _find_violated(self, f: Tensor, J: Tensor) -> None:
        """Find the row that is farthest from being satisfied: its violation, and that as a step in √D·θ."""
        violations = self.program.kinds.violation(f[1:] - self.program.tau)
        if len(violations) == 0:
            return
        norms = torch.linalg.vector_norm(J[1:] / self.root, dim=1)
        distances = violations / torch.where(norms > 0, norms, 1.0)
        self.row = int(distances.argmax())
        self.distance, self.violated = float(distances[self.row]), float(violations[self.row])
        self.stuck = float(violations.max()) > 0.8 * self.largest_violation
        self.nearest, self.largest_violation = min(self.nearest, self.distance), float(violations.max())
