"""A point (θ̄, λ̄) of a problem, and how well it solves it."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dif.derivatives.checks import Kink, find_kinks
from dif.derivatives.fingerprint import encode_tensor, fingerprint_program, hash_all
from dif.derivatives.hessian import Curvature
from dif.derivatives.program import PerConstraint, Program, Targets
from dif.errors import InvalidInputError, count_words, few, format_table
from dif.optimality.judgement import BAD, KKT, ActiveSet, Certificate, Scales, judge_solution, list_rows, residuals
from dif.problem.parameters import Parameters
from dif.problem.problem import Problem
from dif.problem.term import Expression
from dif.runtime.archive import read_archive, write_archive
from dif.runtime.inputs import check_instance, check_number

_MOST_ENTRIES = 3  # parameters that an error names


def _list(entries: list[str]) -> str:
    """Return the first entries as text."""
    more = len(entries) - _MOST_ENTRIES
    return (", ".join(entries[:_MOST_ENTRIES]) + (f" and {more} more" if more > 0 else "")) or "nothing else"


def _name_dtype(parameters: Parameters) -> str:
    return str(parameters.dtype).removeprefix("torch.")


def describe_program(program: Program) -> dict[str, Any]:
    """Return what can be compared in words between a file and a program."""
    parameters = program.parameters
    layout = [[name, list(shape)] for name, shape in zip(parameters.names, parameters.shapes, strict=True)]
    return {"params": layout, "dtype": _name_dtype(parameters), "constraints": list(program.names)}


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
        self.made_by = b""  # identity of the training run that ended here
        self.part_hessians: Tensor | None = None  # (K, d, d) ∇²pₖ(θ̄) of the parts of f = C·p, if known
        self.theta = theta.detach()
        self.parts, self.part_gradients = program.rows.part_gradients(self.theta)  # what the rows are made of
        self.f, self.J = program.rows.A @ self.parts, program.rows.A @ self.part_gradients  # rows and their gradients
        check_gradients(program, self.J)
        self.c, self.G = self.f[1:] - program.tau, self.J[1:]
        self.lam = self._recover_multipliers() if lam is None else lam
        eps = torch.finfo(self.theta.dtype).eps
        self.tol = (1e-4 if eps < 1e-12 else 1e-2) if tol is None else check_number(tol, "tol")

    def _recover_multipliers(self) -> Tensor:
        """Find the multipliers that come nearest to stationarity: least squares over the active rows, λ ≥ 0."""
        from scipy.optimize import nnls  # slow to import, seldom needed

        kinds, lam = self.program.kinds, torch.zeros_like(self.c)
        if len(lam) == 0:
            return lam
        scales = self.objective_scales
        reach = torch.finfo(self.theta.dtype).eps ** 0.25  # 1e-4 in float64, in units
        slack, _ = scales.steps(self.c, lam)
        rows = torch.nonzero(kinds.at_bound(slack, reach) & (scales.norms > 0)).reshape(-1)
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

    @property
    def objective_scales(self) -> Scales:
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
        return PerConstraint(self.lam, self.program.problem, self.program.shapes)

    @property
    def identity(self) -> bytes:
        """Hash of θ̄, λ̄ and all that led to them: the problem, or the training run."""
        origin = self.made_by or fingerprint_program(self.program)
        return hash_all((encode_tensor(self.theta), encode_tensor(self.lam), origin))

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
        fingerprint = fingerprint_program(self.program).hex()
        if fingerprint != fingerprint_program(self.program).hex():
            raise InvalidInputError(
                "A loss or function of the problem refers to an object that cannot be inspected, so the problem would "
                "never be recognised again; take that object (an open file, a lock) out, or save solution.params with "
                "torch.save."
            )
        about = {**describe_program(self.program), "problem": fingerprint, "tol": self.tol}
        write_archive(path, "solution", {"theta": self.theta, "lam": self.lam}, about)

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
        parameters, theta = Parameters.of(params)
        arrays, about = read_archive(path, "solution")
        layouts = zip(parameters.names, parameters.shapes, strict=True), about["params"]
        given, kept = ([f"{name} of shape {tuple(shape)}" for name, shape in each] for each in layouts)
        dtype = _name_dtype(parameters)
        if (given, dtype) != (kept, about["dtype"]):
            words = f"they have dtype {dtype}, and the file has {about['dtype']}"
            if set(given) != set(kept):
                new, old = [one for one in given if one not in kept], [one for one in kept if one not in given]
                words = f"they have {_list(new)}, and the file has {_list(old)}"
            elif given != kept:
                words = "they have the same entries in another order"
            raise InvalidInputError(
                f"`params` differ from the parameters in the solution file {os.fspath(path)!r}: {words}; "
                "pass the parameters of the model that was saved, with any values."
            )
        program = Program.of(problem, parameters, theta)
        wanted = describe_program(program)
        different = [f"{key} {about[key]}, not {wanted[key]}" for key in wanted if about[key] != wanted[key]]
        if not different and about["problem"] != fingerprint_program(program).hex():
            different = ["the same parameters and constraints, but other data, weights, bounds or code"]
        if different:
            raise InvalidInputError(
                f"The solution file {os.fspath(path)!r} belongs to another problem: it has {'; '.join(different)}; "
                "state the problem as when it was saved, or fit this one."
            )
        theta, lam = (torch.from_numpy(arrays[name]).to(theta) for name in ("theta", "lam"))
        return cls.of_program(program, theta, lam, about["tol"])

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
        return residuals(self.scales, gradient, self.c, self.lam, self.program.kinds, self.tol)

    @property
    def converged(self) -> bool:
        """Whether the KKT residual is within the tolerance."""
        return self.kkt.residual <= self.kkt.goal

    @cached_property
    def kinks(self) -> tuple[Kink, ...]:
        """Kinks of the losses near this point, found by probing."""
        return find_kinks(self.program.rows, self.theta)

    active = cached_property(ActiveSet.read)
    """Binding, weak and inactive rows, and whether the derivative exists."""

    findings = cached_property(judge_solution)
    """Whether this is a solution at which derivatives can be trusted, judged once."""

    certificate = cached_property(Certificate.judge)
    """All that is known about this point, good and bad, judged once."""

    def check(self, *, independent: bool = False, minimum: bool = False) -> None:
        """Raise where this is not a solution at which derivatives can be trusted.

        With `independent` or `minimum`, also where LICQ or the second-order condition fails, so that none exists.
        """
        findings = self.findings
        if findings[-1].verdict != BAD and (independent or minimum):
            regular = zip(self.active.judge_regularity(), (independent, minimum), strict=True)
            findings += tuple(one for one, asked in regular if asked)
        for one in findings:
            if one.verdict == BAD:
                raise one.refusal()

    def __str__(self) -> str:
        size, state = count_words(self.theta.numel(), "parameter"), "Solution" if self.converged else "NOT a solution"
        words = f"{state}: {size}, objective {self.objective:.6g}, relative KKT residual {self.kkt.residual:.1e}"
        if not self.program.m:
            return f"{words}, no constraints"
        rows = [(row.name, row.state, f"{row.slack:.4g}", f"{row.multiplier:.4g}") for row in list_rows(self)]
        return f"{words}\n{format_table(('constraint', 'state', 'slack', 'multiplier'), tuple(rows), left=2)}"

    def __repr__(self) -> str:
        state = "solution" if self.converged else "NOT a solution"
        return f"Solution({state}: objective {self.objective:.6g}, {self.kkt})"


def expect_solution(thing: object) -> Solution:
    """Return a Solution; refuse other objects, and models that are in training mode."""
    solution = check_instance(thing, Solution, "solution", cure="find it with dif.fit(problem, params)")
    solution.program.parameters.check_mode()
    return solution


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
