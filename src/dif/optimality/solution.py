"""A point (θ̄, λ̄) of a problem, and how well it solves it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.derivatives.hessian import Curvature
from dif.derivatives.kinks import Kink, explain, find_kinks
from dif.derivatives.loss_checks import check_slopes
from dif.derivatives.program import PerConstraint, Program
from dif.errors import DegenerateError, InfeasibleError, InvalidInputError, NotASolutionError, count_words, few
from dif.optimality.active_set import ActiveSet
from dif.optimality.finding import BAD, GOOD, Finding
from dif.optimality.part_hessians import assemble_parts
from dif.optimality.residuals import KKT, Scales, residuals
from dif.optimality.solution_file import read_solution, write_solution
from dif.optimality.targets import Targets
from dif.problem.parameters import Parameters
from dif.problem.problem import Problem
from dif.problem.term import Expression
from dif.runtime.inputs import check_instance, check_number
from dif.runtime.text_table import TextTable

_MODERATE = 1e3  # ratio of a sample's weights in Lagrangian and objective below which the multipliers count as bounded
_UNBOUNDED = 1e7  # ratio of the curvatures of Lagrangian and objective above which multipliers count as unbounded
_BENT = 10.0  # ratio of finite-difference to exact curvature above which the point is on a kink
_OFF = 10.0  # largest gap between the slopes by differences and by the gradient, in units of step · curvature
_NOISE = 50.0  # rounding error of a sum of losses, as a multiple of eps · (sum of absolute values)
_CANCELLING = 1e6  # ratio of a constraint's force and the objective's gradient above which forces cancel each other
# What to do about a point that is not a solution
_POLISH = "Train on, or polish it: dif.fit(problem, solution.params). If that does not converge, add a ridge."


class Solution:
    """θ̄ and λ̄ of a problem, with the residuals of the optimality conditions.

    Args:
        problem: The problem it should solve.
        params: A dict of tensors or an `nn.Module`; copied, never changed.
        multipliers: Per constraint (a list, a dict by name) or flat; recovered from the params when left out.
        tol: Largest relative KKT residual that counts as a solution (None: 1e-4 in float64, 1e-2 in float32).

    The point is judged as it is given: `kkt` has the residuals, `active` the active set. Estimators refuse a point that
    is not a solution unless `strict=False`.
    """

    def __init__(self, problem: Problem, params: Any, multipliers: Any = None, *, tol: float | None = None) -> None:
        parameters, theta = Parameters.of(params)
        program = Program.of(problem, parameters, theta)
        lam = None if multipliers is None else program.flatten_multipliers(multipliers)
        self._set(program, theta, lam, tol)

    @classmethod
    def from_params(cls, problem: Problem, params: Any, *, tol: float | None = None) -> Solution:
        """Build from parameters only; the multipliers that fit them best are recovered."""
        return cls(problem, params, tol=tol)

    @classmethod
    def of_program(cls, program: Program, theta: Tensor, lam: Tensor | None, tol: float | None = None) -> Solution:
        """Build from a compiled program and flat vectors."""
        solution = cls.__new__(cls)
        solution._set(program, theta, lam, tol)
        return solution

    def _set(self, program: Program, theta: Tensor, lam: Tensor | None, tol: float | None) -> None:
        self.program = program
        self.part_hessians: Tensor | None = None  # (K, d, d), see `assemble`
        self.theta = theta.detach()
        self.parts, self.part_gradients = program.rows.part_gradients(
            self.theta
        )  # the parts of the rows and their gradients
        self.f, self.J = program.rows.C @ self.parts, program.rows.C @ self.part_gradients  # rows and their gradients
        check_gradients(program, self.J)
        self.c, self.G = self.f[1:] - program.tau, self.J[1:]
        self.lam = self._recover_multipliers() if lam is None else lam
        eps = torch.finfo(self.theta.dtype).eps
        self.tol = (1e-4 if eps < 1e-12 else 1e-2) if tol is None else check_tolerance(tol)

    def _recover_multipliers(self) -> Tensor:
        """Find the multipliers that come nearest to stationarity: least squares over the active rows, λ ≥ 0."""
        from scipy.optimize import nnls  # slow to import, seldom needed

        kinds, lam = self.program.kinds, torch.zeros_like(self.c)
        if len(lam) == 0:
            return lam
        scales = self._objective_scales()
        reach = torch.finfo(self.theta.dtype).eps ** 0.25  # 1e-4 in float64, in units
        rows = torch.nonzero(kinds.at_bound(scales.slack(self.c), reach) & (scales.norms > 0)).reshape(-1)
        if len(rows) == 0:
            return lam
        A = (self.G[rows] / scales.root / scales.norms[rows, None]).double().cpu().numpy().T  # (d, k)
        equal = kinds.equal[rows].cpu().numpy()
        goal = (-self.J[0] / scales.root).double().cpu().numpy()
        found = np.zeros(len(rows))
        Q = np.linalg.qr(A[:, equal])[0]
        inside, left = A[:, ~equal] - Q @ (Q.T @ A[:, ~equal]), goal - Q @ (Q.T @ goal)
        size = float(np.linalg.norm(left))
        if size > 1e-14 * float(np.linalg.norm(goal)) and inside.shape[1]:
            found[~equal] = nnls(inside, left / size)[0] * size
        found[equal] = np.linalg.lstsq(A[:, equal], goal - A[:, ~equal] @ found[~equal], rcond=None)[0]
        lam[rows] = torch.as_tensor(found).to(lam) / scales.norms[rows]
        return lam

    @cached_property
    def objective_curvature(self) -> Curvature:
        """∇²f₀(θ̄) as an operator."""
        weights = self.program.weights(torch.zeros_like(self.c))
        return Curvature(self.program.rows, self.theta, weights, parts=self.part_hessians)

    def _objective_scales(self) -> Scales:
        """The units of rows and multipliers without the constraints' curvature."""
        return Scales.of(self.theta, self.J, self.objective_curvature.own, self.objective_curvature.noise)

    @property
    def problem(self) -> Problem:
        """The problem that it should solve."""
        return self.program.problem

    @property
    def params(self) -> dict[str, Tensor]:
        """θ̄ as the params' own structure."""
        parameters = self.program.parameters
        return parameters.bind({name: t.clone() for name, t in parameters.tensors(self.theta).items()})

    @property
    def multipliers(self) -> PerConstraint:
        """λ̄ per constraint: by position, by name or by the Constraint."""
        return PerConstraint.of(self.program, self.lam)

    @property
    def objective(self) -> float:
        """f₀(θ̄)."""
        return float(self.f[0]) + float(self.problem.objective.constant)

    def value(self, term: Expression) -> float:
        """Return the value of a Term or Function at θ̄, such as a test loss or the gap between two groups."""
        targets = Targets(term, self)
        if len(targets.names) != 1:
            raise InvalidInputError(
                f"`term` has {len(targets.names)} values: {few(targets.names)}.",
                "It must have one value.",
                "The value of a Term is one number.",
                "Call `value` once for each Term; of Samples, take their .mean().",
            )
        return float(targets.values(self.theta)[0])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write θ̄, λ̄ and a fingerprint of the problem to one file (npz, no pickle). Data and losses are not written."""
        write_solution(path, self.program, self.theta, self.lam, self.tol)

    @classmethod
    def load(cls, path: str | os.PathLike[str], problem: Problem, params: Any) -> Solution:
        """Read a file that `save` wrote.

        Args:
            path: The file.
            problem: The problem that was solved, stated again: same data, losses, weights and bounds.
            params: Parameters of the same names, shapes and dtype; their values do not matter.

        Raises:
            InvalidInputError: Where the file belongs to another problem, or to other parameters.
        """
        return cls.of_program(*read_solution(path, problem, *Parameters.of(params)))

    def assemble(self, keep: str | os.PathLike[str] | None = None, *, show_progress: bool = True) -> Solution:
        """Return this solution with its Hessian assembled, however long that takes; every solve is then quick.

        In `keep`, a folder, finished columns are kept: a later call for the same solution continues from there.
        """
        other = Solution.of_program(self.program, self.theta, self.lam, self.tol)
        other.part_hessians = assemble_parts(self.program, self.theta, keep, show_progress)
        return other

    @cached_property
    def curvature(self) -> Curvature:
        """∇²θθ L(θ̄, λ̄) as an operator."""
        return Curvature(self.program.rows, self.theta, self.program.weights(self.lam), parts=self.part_hessians)

    @property
    def hessian(self) -> Tensor:
        """∇²θθ L(θ̄, λ̄), assembled, (d, d)."""
        return self.curvature.dense()

    @cached_property
    def scales(self) -> Scales:
        """The units of rows and multipliers at this point."""
        if not bool(torch.isfinite(self.curvature.own).all()):
            raise InvalidInputError(
                "The curvature at the given parameters is NaN or infinite.",
                "It must be finite.",
                "The losses have no second derivative there (a norm or a root at 0), so the point cannot be judged.",
                "Start elsewhere, or smooth the loss.",
            )
        return Scales.of(self.theta, self.J, self.curvature.own, self.curvature.noise)

    @cached_property
    def kkt(self) -> KKT:
        """Residuals of the optimality conditions."""
        gradient = self.program.weights(self.lam) @ self.J
        return residuals(self.scales, gradient, self.c, self.lam, self.program.kinds)

    @property
    def converged(self) -> bool:
        """Whether the KKT residual is within the tolerance."""
        return self.kkt.residual <= max(self.tol, 16 * self.kkt.rounding)

    @cached_property
    def kinks(self) -> tuple[Kink, ...]:
        """Kinks of the losses near this point, found by probing."""
        return find_kinks(self.program.rows, self.theta)

    @cached_property
    def active(self) -> ActiveSet:
        """Binding, weak and inactive rows, and whether the derivative exists."""
        eps = torch.finfo(self.theta.dtype).eps
        tolerance = max(eps**0.447, min(10 * self.kkt.residual, eps**0.25))  # 1e-7 in float64 at a clean solution
        return ActiveSet.read(
            self.program.names, self.scales, self.c, self.lam, self.program.kinds, self.G, self.curvature, tolerance
        )

    def optimality(self) -> Finding:
        """Judge whether the optimality conditions hold."""
        kkt, what = self.kkt, "Is it a solution?"
        found = f"The relative KKT residual is {kkt.residual:.3g} ({kkt}; ‖∇L‖ = {kkt.gradient_norm:.3g})"
        allowed = f"It must be at most {max(self.tol, 16 * kkt.rounding):.1g}."
        if self.converged:
            return Finding(what, GOOD, f"{found}.", "The optimality conditions hold.", allowed=allowed)
        kinds, slack = self.program.kinds, self.scales.slack(self.c)
        parts = {
            "stationarity": None,
            "feasibility": kinds.violation(-slack),
            "complementarity": kinds.complementarity(slack, self.scales.multiplier(self.lam)),
        }
        worst = max(parts, key=lambda part: getattr(kkt, part))
        by_row = parts[worst]
        where = "" if by_row is None else f" of {self.program.names[int(by_row.argmax())]}"
        cure = explain(self.kinks) if self.kinks else _POLISH
        return Finding(
            what,
            BAD,
            f"{found}; {worst}{where} is the largest part.",
            "The point does not solve the problem, so there is no solution whose change could be predicted.",
            cure,
            allowed,
            NotASolutionError,
            "strict=False goes on regardless and records the residual.",
        )

    def bounded_multipliers(self) -> Finding:
        """Judge whether the multipliers are bounded: some point must lie strictly inside the constraints."""
        what, size = "Are the multipliers finite?", float(self.lam.abs().max()) if len(self.lam) else 0.0
        meaning = "A point strictly inside the constraints exists."
        good = Finding(what, GOOD, f"The largest multiplier is {size:.3g}.", meaning)
        if not bool(((self.lam != 0) & self.program.rows.nonlinear_rows()[1:]).any()):
            return good
        nothing, weights = torch.zeros_like(self.lam), self.program.weights
        if self.program.rows.weight_ratio(weights(self.lam), than=weights(nothing)) < _MODERATE:
            return good
        ratio = float(self.curvature.scale().max() / self.objective_curvature.scale().max())
        if ratio <= _UNBOUNDED:
            return good
        row = int(self.lam.abs().argmax())
        return Finding(
            what,
            BAD,
            f"The multiplier of {self.program.names[row]} is {float(self.lam[row]):.3g}; with it the Lagrangian curves "
            f"{ratio:.1e} times as much as the objective.",
            "Multipliers grow without bound where no point lies strictly inside the constraint (no Slater point): the "
            "solution has no derivative there.",
            "Loosen the bound, or state what it fixes as equalities.",
            f"The ratio must be below {_UNBOUNDED:.0e}.",
            DegenerateError,
        )

    def check(self) -> None:
        """Raise where this is not a solution at which derivatives can be trusted."""
        for finding in self.findings():
            finding.check()

    def findings(self) -> Iterator[Finding]:
        """Judge the point: each finding supposes that those before it are good."""
        yield self.optimality()
        if self.converged and self.program.m:
            multipliers = self.feasibility() or self.bounded_multipliers()
            yield multipliers
            if multipliers.verdict == BAD:
                return
        if self.converged:
            yield self.derivatives()

    def derivatives(self) -> Finding:
        """Compare the gradient and the curvature with differences of the Lagrangian along a random direction."""
        what = "Are the derivatives right?"
        eps = torch.finfo(self.theta.dtype).eps
        h, weights = eps**0.25, self.program.weights(self.lam)
        draw = torch.randn(self.theta.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        v = draw.to(self.theta) * torch.minimum(1 / self.scales.root, 1 + self.theta.abs())
        for table in self.program.rows.tables:
            check_slopes(table.samples, self.program.parameters, self.theta, v)
        before, after = (float(weights @ self.program.rows.values(self.theta + sign * h * v)) for sign in (-1, 1))
        slope, bend = (after - before) / (2 * h), (before - 2 * float(weights @ self.f) + after) / h**2
        H = self.curvature
        Hv = H.dense() @ v if H.cheap else H.product(v[:, None])[:, 0]
        along, curved = float(weights @ self.J @ v), float(v @ Hv)
        noise = _NOISE * eps * float(weights.abs() @ self.f.abs())
        if abs(bend) > _BENT * abs(curved) + noise / h**2:
            return Finding(
                what,
                BAD,
                f"The curvature along a random direction is {bend:.3g} by differences of the Lagrangian and "
                f"{curved:.3g} by its second derivative.",
                "The point lies on a kink of a loss (absolute value, hinge, ReLU): there is no derivative there.",
                "Use a smooth loss or activation (a smoothed absolute value, softplus, GELU) and fit again.",
                f"The two must differ by less than a factor of {_BENT:g}.",
                DegenerateError,
            )
        if abs(slope - along) > _OFF * h * max(abs(curved), abs(bend)) + noise / h:
            return Finding(
                what,
                BAD,
                f"The slope of the Lagrangian along a random direction is {slope:.3g} by differences, but {along:.3g} "
                "by its gradient.",
                "What torch returns as the gradient is not the derivative of the losses.",
                "Look for .detach(), torch.no_grad() or a custom backward in the losses.",
                f"The two must differ by less than {_OFF * h:.1g} of its curvature.",
                InvalidInputError,
            )
        found = f"Slope {along:.3g} and curvature {curved:.3g} along a random direction agree with differences."
        return Finding(what, GOOD, found, "Torch returns the derivatives of the losses.")

    def feasibility(self) -> Finding | None:
        """Judge whether huge multipliers hide a violated constraint; None if they do not.

        Multipliers weight the samples that set the units of `kkt`, so huge ones make every residual look small. Here
        violations are measured in the units of the objective alone.
        """
        forces = self.lam.abs() * torch.linalg.vector_norm(self.G, dim=1)
        if not bool((forces > _CANCELLING * self.J[0].norm()).any()):
            return None
        found = self.program.kinds.violation(-self._objective_scales().slack(self.c))
        worst = int(found.argmax())
        if float(found[worst]) <= self.tol:
            return None
        return Finding(
            "Are the multipliers finite?",
            BAD,
            f"{self.program.names[worst]} is violated by {float(self.c[worst].abs()):.4g}, and its multiplier is "
            f"{float(self.lam[worst]):.1e}.",
            "The constraints contradict each other: their forces cancel and grow without bound.",
            "Loosen that bound, or drop one of the constraints in conflict with it.",
            "A solution violates no constraint.",
            InfeasibleError,
        )

    def __str__(self) -> str:
        size, state = count_words(self.theta.numel(), "parameter"), "Solution" if self.converged else "NOT a solution"
        words = f"{state}: {size}, objective {self.objective:.6g}, relative KKT residual {self.kkt.residual:.1e}"
        if not self.program.m:
            return f"{words}, no constraints"
        states = dict.fromkeys(self.active.binding, "binding") | dict.fromkeys(self.active.weak, "weak")
        rounding = 1e-12 * (1 + self.program.tau.abs())  # what is left of f − τ where it is 0
        slack = torch.where(self.c.abs() <= rounding, 0.0, -self.c).tolist()
        rows = (
            (name, states.get(j, "inactive"), f"{slack[j]:.4g}", f"{float(self.lam[j]):.4g}")
            for j, name in enumerate(self.program.names)
        )
        return f"{words}\n{TextTable(('constraint', 'state', 'slack', 'multiplier'), tuple(rows), left=2)}"

    def __repr__(self) -> str:
        state = "solution" if self.converged else "NOT a solution"
        return f"Solution({state}: objective {self.objective:.6g}, {self.kkt})"


def expect_solution(thing: object) -> Solution:
    """Return a Solution; refuse other objects, and models that are in training mode."""
    solution = check_instance(
        thing,
        Solution,
        "solution",
        meaning="Influence is defined at a solution of a problem.",
        cure="Solve the problem with dif.fit(problem, params), or pass your own as dif.Solution(problem, params).",
    )
    solution.program.parameters.check_mode()
    return solution


def check_tolerance(tol: float) -> float:
    """Check a tolerance."""
    return check_number(
        tol,
        "tol",
        zero=False,
        meaning="It is the relative KKT residual at which a problem counts as solved.",
        cure="Leave it out for the default.",
    )


def check_gradients(program: Program, J: Tensor) -> None:
    """Refuse a point where a row has no derivative."""
    bad = torch.nonzero(~torch.isfinite(J).all(1)).reshape(-1).tolist()
    if bad:
        names = ["the objective", *program.names]
        raise InvalidInputError(
            f"The gradient of {few([names[j] for j in bad])} at the given parameters is NaN or infinite.",
            "All gradients must be finite.",
            "There is no derivative at this point (sqrt or log at 0, a norm at its kink), so it cannot be judged.",
            "Start elsewhere, or smooth the loss.",
        )
