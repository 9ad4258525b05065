"""A fit of the paper's network at full size: descent in coordinates of equal curvature, then Newton's method.

`dif.fit` needs thousands of Hessian-vector products for this, each of which takes seconds on a processor with ten
thousand images. Here Hessians are assembled layer by layer. How the point was found does not matter afterwards:
`dif.Solution` judges it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

import dif
from dif.derivatives.program import Program
from dif.linalg.conjugate_gradients import conjugate_gradients
from dif.optimality.judgement import KKT, Scales, residuals
from dif.runtime.archive import open_atomically, read_archive, write_archive
from studies.cnn_curvature import GroupRisks

_BLOCK = 20  # iterations of L-BFGS between two checkpoints
_ROUND = 120  # iterations between two Hessians
_SHARE = 0.15  # of the images, for the Hessians on the way
_SINGLE = 2e-4  # ‖W⊤∇‖ to which the gradients of single precision are good
_NEAR = 2e-6  # ‖W⊤∇‖ at which Newton's method begins; the value then falls by about half its square
_PENALTY = 10.0  # weight of the squared violations
_DIFFERENCE = 1e-6  # length in u of the differences of gradients: rounding and bending are both below 1e-4
_PRODUCTS = 100  # with the Hessian, in one Newton step
_STEPS = 25  # of Newton's method, of which most removals need about ten
_TRIES = 5  # of Newton's method, with a round of descent between two
_CLOSE = 0.01  # relative distance of two θ with similar Hessians
_SAME = 1e-5  # relative distance of two θ, by Newton's last steps, that have the same Hessian to about three digits
_KIND = "Hessians of the parts"  # of file


def say(text: str) -> None:
    """Print a line of progress with the time of day."""
    print(f"{datetime.now():%H:%M:%S} {text}", flush=True)


@dataclass(frozen=True)
class State:
    """Where the fit is; kept in a file, so that a killed fit resumes."""

    theta: Tensor
    lam: Tensor
    rounds: int = 0  # of the descent
    slope: float = float("inf")  # ‖W⊤∇‖ of the augmented Lagrangian at the last end of a round
    residual: float = float("inf")  # relative KKT residual, once Newton's method has measured it

    def save(self, path: Path) -> None:
        """Write the file, complete or not at all."""
        with open_atomically(path) as file:
            numbers = {"rounds": self.rounds, "slope": self.slope, "residual": self.residual}
            np.savez(file, theta=self.theta.cpu(), lam=self.lam.cpu(), **numbers)

    @classmethod
    def load(cls, path: Path) -> State:
        """Read the file."""
        with np.load(path, allow_pickle=False) as file:
            theta, lam = (torch.as_tensor(file[name]) for name in ("theta", "lam"))
            return cls(theta, lam, int(file["rounds"]), float(file["slope"]), float(file["residual"]))


@dataclass(frozen=True, eq=False)
class GroupProgram:
    """A program whose samples are the images of `risks`, in sums that are multiples of the means of its groups."""

    program: Program
    risks: GroupRisks

    @cached_property
    def C(self) -> Tensor:
        """Coefficients of the risks of the groups, and then of the functions, in the rows, (1 + m, K)."""
        rows, group = self.program.rows, self.risks.group
        (table,) = rows.tables
        weights, kept = rows.C[:, : rows.sums] @ table.U, group >= 0
        by_group = rows.C.new_zeros((len(rows.C), int(group.max()) + 1))
        return torch.cat([by_group.index_add(1, group[kept], weights[:, kept]), rows.C[:, rows.sums :]], 1)

    def without(self, image: int, program: Program) -> GroupProgram:
        """Return `program`, the one after the removal of an image, with the risks of the others."""
        group = self.risks.group.clone()
        group[image] = -1
        return GroupProgram(program, replace(self.risks, group=group))

    def gradients(self, theta: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Return f(θ), (1 + m,), and its Jacobian, (1 + m, d)."""
        values, gradients = self.risks.values_and_gradients(theta, dtype)
        others = [f.gradient(theta) for f in self.program.rows.functions]
        p = torch.cat([values, *(value for value, _ in others)])
        return self.C @ p, self.C @ torch.cat([gradients, *(gradient for _, gradient in others)])

    def part_hessians(self, theta: Tensor, share: float = 1.0, keep: Path | None = None) -> Tensor:
        """Return the Hessians of the risks and of the functions, (K, d, d), those of the risks in single precision.

        `keep` is as in `GroupRisks.hessians`.
        """
        rows, eye = self.program.rows, torch.eye(len(theta)).to(theta)
        units = torch.eye(rows.C.shape[1]).to(theta)[rows.sums :]
        functions = [rows.hessian_products(theta, unit, eye) for unit in units]
        return torch.cat([self.risks.hessians(theta, share, keep=keep), *(H[None] for H in functions)])


def find_coordinates(problem: GroupProgram, state: State, parts: Tensor, l2: float) -> Tensor:
    """Return W, (d, d), for coordinates u with θ + W·u, in which the augmented Lagrangian has about the same curvature.

    W W⊤ is the inverse of the Hessian at θ, with its eigenvalues by absolute value and not less than a share of L2.
    """
    f, J = problem.gradients(state.theta)
    forced = (state.lam + _PENALTY * (f[1:] - problem.program.tau)).clamp(min=0)
    G = J[1:][forced > 0]
    H = torch.tensordot(problem.program.weights(forced) @ problem.C, parts, 1) + _PENALTY * G.T @ G
    eigenvalues, vectors = torch.linalg.eigh(H)
    say(f"curvatures {float(eigenvalues[0]):.3g} to {float(eigenvalues[-1]):.3g}, {int((eigenvalues < 0).sum())} < 0")
    return vectors / eigenvalues.abs().clamp(min=l2 / 3).sqrt()


def descend(problem: GroupProgram, state: State, W: Tensor, save: Callable[[State], None]) -> State:
    """Run a round of L-BFGS on the augmented Lagrangian, in coordinates u with θ + W·u, and update λ."""
    single = state.slope > _SINGLE
    goal, dtype = (_SINGLE, torch.float32) if single else (_NEAR, torch.float64)
    tau = problem.program.tau

    def next_multipliers(f: Tensor, lam: Tensor) -> Tensor:
        return (lam + _PENALTY * (f[1:] - tau)).clamp(min=0)

    def augmented_lagrangian(u: np.ndarray, at: State) -> tuple[float, np.ndarray]:
        f, J = problem.gradients(at.theta + W @ torch.tensor(u).to(W), dtype)
        lam = next_multipliers(f, at.lam)
        value = f[0] + ((lam**2).sum() - (at.lam**2).sum()) / (2 * _PENALTY)
        return float(value), (W.T @ (problem.program.weights(lam) @ J)).cpu().numpy()

    left, slope, force = _ROUND, float("inf"), 0.0
    while left > 0:
        at, done = state, 0

        def checkpoint(u: np.ndarray, at: State = at) -> None:
            nonlocal done
            done += 1
            if done % _BLOCK == 0:
                say(f"{done} iterations")
                save(replace(at, theta=at.theta + W @ torch.tensor(u).to(W)))

        found = minimize(
            augmented_lagrangian, np.zeros(len(W)), (at,), "L-BFGS-B", jac=True, callback=checkpoint,
            options={"maxiter": left, "maxfun": 2 * left, "maxcor": 60, "ftol": 0.0, "gtol": 0.1 * goal},
        )  # fmt: skip
        left -= max(done, 1)
        theta, slope = at.theta + W @ torch.tensor(found.x).to(W), float(np.linalg.norm(found.jac))
        f, gradients = problem.gradients(theta, dtype)
        lam = next_multipliers(f, at.lam)
        say(f"{found.nfev} gradients, value {found.fun:.8f}, slope {slope:.1e}, multipliers {lam.tolist()}")
        state = replace(at, theta=theta, lam=lam, slope=slope)
        save(state)
        force = float((W.T @ (gradients[1:].T @ (lam - at.lam))).norm())  # what the change of λ adds to the slope
        if slope > goal or force <= goal:
            break
    slope = max(slope, force)
    if single and left > 0:  # the line search failed by rounding: double precision goes on
        slope = min(slope, _SINGLE)
    return replace(state, rounds=state.rounds + 1, slope=slope)


@dataclass(frozen=True, eq=False)
class Point:
    """A point of Newton's method, in coordinates u with θ + W·u; its multipliers are those of least squares."""

    problem: GroupProgram
    W: Tensor
    theta: Tensor
    J: Tensor  # (1 + m, d) gradients of the rows in u
    c: Tensor  # (m,) f − τ
    active: Tensor  # (m,) bool, rows that a step holds as equalities
    lam: Tensor  # zero on the others
    kkt: KKT

    @classmethod
    def of(cls, problem: GroupProgram, W: Tensor, scales: Scales, theta: Tensor, active: Tensor) -> Point:
        """Evaluate a point; of the active rows given, those with a wrong sign are released, violated ones are added."""
        program, (f, gradients) = problem.program, problem.gradients(theta)
        J, c = gradients @ W, f[1:] - program.tau

        def fit_multipliers(active: Tensor) -> Tensor:
            lam = torch.zeros_like(c)
            lam[active] = -(J[0] @ torch.linalg.pinv(J[1:][active]))
            return lam

        held = torch.where(active, fit_multipliers(active) + _PENALTY * c > 0, c > 0)
        lam = fit_multipliers(held)
        price = lam.clamp(min=0)
        kkt = residuals(scales, program.weights(price) @ gradients, c, price, program.kinds)
        return cls(problem, W, theta, J, c, held, lam, kkt)

    def step(self, goal: float) -> Tensor | None:
        """Return the Newton step in u; None where the Lagrangian curves downwards along the active rows.

        Products with the Hessian are differences of gradients. Those needed are few, as it is near the identity in u.
        """
        weights, G = self.problem.program.weights(self.lam), self.J[1:][self.active]
        inverse, force = torch.linalg.pinv(G), weights @ self.J

        def project(v: Tensor) -> Tensor:
            return v - inverse @ (G @ v)

        def multiply(v: Tensor) -> Tensor:
            move = _DIFFERENCE / float(v.norm())
            gradients = self.problem.gradients(self.theta + self.W @ (move * v))[1]
            return (weights @ gradients @ self.W - force) / move

        normal = -(inverse @ self.c[self.active])
        rest = -project(force + multiply(normal) if float(normal.norm()) > 0 else force)
        accuracy = min(0.1, max(0.3 * goal / self.kkt.residual, 30 * float(rest.norm())))
        tolerance = torch.full((1,), accuracy).to(rest)
        found = conjugate_gradients(
            lambda D, _: project(multiply(D[:, 0]))[:, None], rest[:, None], tolerance, _PRODUCTS, lambda R: R
        )
        say(f"Newton: {self.kkt}, {found.iterations} products, λ {self.lam.tolist()}")
        return None if bool(torch.isfinite(found.negative)) else normal + found.X[:, 0]


def newton(problem: GroupProgram, state: State, W: Tensor, scales: Scales, goal: float) -> State:
    """Make Newton steps on the KKT conditions, each at least half as good as it would be on a quadratic problem."""
    at = Point.of(problem, W, scales, state.theta, state.lam > 0)
    for _ in range(_STEPS):
        if at.kkt.residual <= goal or (u := at.step(goal)) is None:
            break
        lengths = (1.0, 0.5, 0.25)
        tried = ((x, Point.of(problem, W, scales, at.theta + W @ (x * u), at.active)) for x in lengths)
        there = next((p for x, p in tried if p.kkt.residual <= (1 - 0.5 * x) * at.kkt.residual), None)
        if there is None:
            break
        at = there
    say(f"Newton ends: {at.kkt}")
    return replace(state, theta=at.theta, lam=at.lam.clamp(min=0), residual=at.kkt.residual)


def settle(
    problem: GroupProgram, state: State, W: Tensor, scales: Scales, goal: float,
    save: Callable[[State], None] = lambda state: None,
) -> State:  # fmt: skip
    """Find a KKT point by Newton's method, with rounds of descent where that fails; if all fails, the best point."""
    best = state
    for number in range(_TRIES):
        if number:
            state = descend(problem, state, W, save)
        found = newton(problem, state, W, scales, goal)
        best = found if found.residual < best.residual else best
        if best.residual <= goal:
            break
    save(best)
    return best


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The files of a fit that may be killed."""

    state: Path  # where it is
    hessians: Path  # of all images, with the θ to which they belong
    part: Path  # of a sum of Hessians

    def save(self, state: State) -> None:
        """Write where the fit is."""
        state.save(self.state)

    def assemble(self, problem: GroupProgram, theta: Tensor) -> Tensor:
        """Return the Hessians of the parts of the rows from all images, as in the file if that has them."""
        with suppress(FileNotFoundError, dif.InvalidInputError):
            arrays, _ = read_archive(self.hessians, _KIND)
            if float((torch.from_numpy(arrays["theta"]).to(theta) - theta).norm()) <= _SAME * float(theta.norm()):
                return torch.from_numpy(arrays["parts"]).to(theta)
        say("Hessian of all images")
        parts = problem.part_hessians(theta, keep=self.part)
        write_archive(self.hessians, _KIND, {"theta": theta, "parts": parts}, {})
        self.part.unlink(missing_ok=True)
        return parts


def approach(problem: GroupProgram, state: State, l2: float, slope: float, files: Checkpoint) -> State:
    """Descend in rounds until the slope is this small, with Hessians of a share of the images on the way."""
    place, W = torch.full_like(state.theta, float("inf")), state.theta  # of the last Hessian
    while state.slope > slope:
        if not float((state.theta - place).norm()) <= _CLOSE * float(state.theta.norm()):
            place = state.theta
            W = find_coordinates(problem, state, problem.part_hessians(place, _SHARE, files.part), l2)
        state = descend(problem, state, W, files.save)
        files.save(state)
    return state


def minimise(problem: GroupProgram, state: State, l2: float, goal: float, files: Checkpoint) -> State:
    """Find a KKT point: rounds of descent, then Newton's method in coordinates of the Hessian of all images."""
    state = approach(problem, state, l2, _NEAR, files)
    at = dif.Solution.of_program(problem.program, state.theta, state.lam)
    at.part_hessians = files.assemble(problem, state.theta)
    W = find_coordinates(problem, state, at.part_hessians, l2)
    return settle(problem, state, W, at.scales, goal, files.save)
