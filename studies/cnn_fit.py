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
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

import dif
from dif.derivatives.program import Program
from dif.linalg.solvers import Matrix
from dif.optimality.judgement import residuals
from dif.optimality.kkt_system import kkt_step
from dif.runtime.archive import open_atomically, read_archive, write_archive
from studies.cnn_curvature import GroupRisks

_BLOCK = 20  # iterations of L-BFGS between two checkpoints
_ROUND = 120  # iterations between two Hessians
_SHARE = 0.15  # of the images, for the Hessians on the way
_SINGLE = 2e-4  # ‖W⊤∇‖ to which the gradients of single precision are good
_NEAR = 2e-6  # ‖W⊤∇‖ at which Newton's method begins; the value then falls by about half its square
_PENALTY = 10.0  # weight of the squared violations
_TRIES = 5  # Hessians of all images
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
    """A program whose samples are the images of `risks`, in sums that are the means of its groups."""

    program: Program
    risks: GroupRisks

    @property
    def order(self) -> list[int]:
        """The group of each sum."""
        (table,) = self.program.rows.tables
        return [int(self.risks.group[weights.argmax()]) for weights in table.U]

    def gradients(self, theta: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Return f(θ), (1 + m,), and its Jacobian, (1 + m, d)."""
        rows = self.program.rows
        values, gradients = self.risks.values_and_gradients(theta, dtype)
        others = [f.gradient(theta) for f in rows.functions]
        p = torch.cat([values[self.order], *(value for value, _ in others)])
        return rows.C @ p, rows.C @ torch.cat([gradients[self.order], *(gradient for _, gradient in others)])

    def part_hessians(self, theta: Tensor, share: float = 1.0, keep: Path | None = None) -> Tensor:
        """Return the Hessians of the parts of the rows, (K, d, d), those of the samples in single precision.

        `keep` is as in `GroupRisks.hessians`.
        """
        rows, eye = self.program.rows, torch.eye(len(theta)).to(theta)
        units = torch.eye(rows.C.shape[1]).to(theta)[len(self.order) :]
        functions = [rows.hessian_products(theta, unit, eye) for unit in units]
        return torch.cat([self.risks.hessians(theta, share, keep=keep)[self.order], *(H[None] for H in functions)])

    def hessian(self, parts: Tensor, lam: Tensor) -> Tensor:
        """Return the Hessian of the Lagrangian, (d, d)."""
        return torch.tensordot(self.program.weights(lam) @ self.program.rows.C, parts, 1)


def descend(problem: GroupProgram, state: State, parts: Tensor, floor: float, save: Callable[[State], None]) -> State:
    """Run a round of L-BFGS on the augmented Lagrangian, in coordinates u with θ + W·u, and update λ.

    W W⊤ is the inverse of the Hessian at θ, with its eigenvalues by absolute value and not less than `floor`.
    """
    single = state.slope > _SINGLE
    goal, dtype = (_SINGLE, torch.float32) if single else (_NEAR, torch.float64)
    tau = problem.program.tau

    def next_multipliers(f: Tensor, lam: Tensor) -> Tensor:
        return (lam + _PENALTY * (f[1:] - tau)).clamp(min=0)

    f, J = problem.gradients(state.theta, dtype)
    forced = next_multipliers(f, state.lam)
    G = J[1:][forced > 0]
    eigenvalues, vectors = torch.linalg.eigh(problem.hessian(parts, forced) + _PENALTY * G.T @ G)
    say(f"curvatures {float(eigenvalues[0]):.3g} to {float(eigenvalues[-1]):.3g}, {int((eigenvalues < 0).sum())} < 0")
    W = vectors / eigenvalues.abs().clamp(min=floor).sqrt()
    left, slope, force = _ROUND, float("inf"), 0.0
    while left > 0:
        at, done = state, 0

        def augmented_lagrangian(u: np.ndarray, at: State = at) -> tuple[float, np.ndarray]:
            f, J = problem.gradients(at.theta + W @ torch.tensor(u).to(W), dtype)
            lam = next_multipliers(f, at.lam)
            value = f[0] + ((lam**2).sum() - (at.lam**2).sum()) / (2 * _PENALTY)
            return float(value), (W.T @ (problem.program.weights(lam) @ J)).cpu().numpy()

        def checkpoint(u: np.ndarray, at: State = at) -> None:
            nonlocal done
            done += 1
            if done % _BLOCK == 0:
                say(f"{done} iterations")
                save(replace(at, theta=at.theta + W @ torch.tensor(u).to(W)))

        found = minimize(
            augmented_lagrangian, np.zeros(len(W)), jac=True, method="L-BFGS-B", callback=checkpoint,
            options={"maxiter": left, "maxfun": 2 * left, "maxcor": 60, "ftol": 0.0, "gtol": 0.1 * goal},
        )  # fmt: skip
        left -= max(done, 1)
        theta, slope = at.theta + W @ torch.tensor(found.x).to(W), float(np.linalg.norm(found.jac))
        f, _ = problem.gradients(theta, dtype)
        lam = next_multipliers(f, at.lam)
        say(f"{found.nfev} gradients, value {found.fun:.8f}, slope {slope:.1e}, multipliers {lam.tolist()}")
        state = replace(at, theta=theta, lam=lam, slope=slope)
        save(state)
        force = float((W.T @ (J[1:].T @ (lam - at.lam))).norm())  # what the change of λ adds to the slope
        if slope > goal or force <= goal:
            break
    slope = max(slope, force)
    if single and left > 0:  # the line search failed by rounding: double precision goes on
        slope = min(slope, _SINGLE)
    return replace(state, rounds=state.rounds + 1, slope=slope)


def polish(
    problem: GroupProgram, state: State, parts: Tensor, goal: float, save: Callable[[State], None], steps: int = 40
) -> State:
    """Make Newton steps on the KKT conditions with the Hessians of the parts, while the residual falls."""
    program = problem.program
    at = dif.Solution.of_program(program, state.theta, state.lam)
    at.part_hessians = parts
    scales, kinds, z, length = at.scales, program.kinds, state, 1.0
    f, J = problem.gradients(z.theta)
    kkt = residuals(scales, program.weights(z.lam) @ J, f[1:] - program.tau, z.lam, kinds)
    z = replace(z, residual=kkt.residual)
    say(f"Newton: {kkt}")
    omega = nu = None
    for _ in range(steps):
        if z.residual <= goal:
            break
        if omega is None or nu is None:
            H, c = problem.hessian(parts, z.lam), f[1:] - program.tau
            binding = kinds.has_force(z.lam) | (c > 0)
            omega, nu, _ = kkt_step(program.weights(z.lam) @ J, Matrix(H), c, J[1:], z.lam, kinds, binding)
        theta, lam = z.theta + length * omega, kinds.project(z.lam + length * (nu - z.lam))
        f1, J1 = problem.gradients(theta)
        kkt = residuals(scales, program.weights(lam) @ J1, f1[1:] - program.tau, lam, kinds)
        say(f"step {length:g}: {kkt}, λ {lam.tolist()}")
        if kkt.residual < (1 - 0.1 * length) * z.residual:
            z = replace(z, theta=theta, lam=lam, residual=kkt.residual)
            save(z)
            f, J, omega, length = f1, J1, None, 1.0
        else:
            length *= 0.5
            if length < 0.1:
                break
    return z


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


def minimise(problem: GroupProgram, state: State, l2: float, goal: float, files: Checkpoint) -> State:
    """Find a KKT point: rounds of descent, then Newton's method with the Hessian of all images.

    Where that fails several times (at a saddle, say), the last point is returned as it is.
    """
    place, parts = torch.full_like(state.theta, float("inf")), None  # the last Hessian
    for _ in range(_TRIES):
        if state.residual <= goal:
            break
        while state.slope > _NEAR:
            if parts is None or float((state.theta - place).norm()) > _CLOSE * float(state.theta.norm()):
                place, parts = state.theta, problem.part_hessians(state.theta, _SHARE, files.part)
            state = descend(problem, state, parts, l2 / 3, files.save)
            files.save(state)
        parts, before = files.assemble(problem, state.theta), state
        with suppress(dif.DegenerateError):
            state = polish(problem, state, parts, goal, files.save)
        if not state.residual < 0.1 * before.residual:  # a saddle, or too far away: descend with this Hessian
            state = descend(problem, replace(before, slope=0.0), parts, l2 / 3, files.save)
    return state
