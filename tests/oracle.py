"""Constrained problems written out in numpy and solved by enumerating active sets: the truth, owing nothing to dif."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy.special import expit

# A weighted sum of means, each over the samples of its own mask: the part of a row that comes from the data.
Means = tuple[tuple[float, np.ndarray], ...]


@dataclass(frozen=True, eq=False)
class Removal:
    """Samples taken out of the means of some rows (row 0 is the objective)."""

    gone: np.ndarray  # (n,) bool
    rows: tuple[int, ...]
    renormalise: bool


@dataclass(frozen=True, eq=False)
class Point:
    theta: np.ndarray
    lam: np.ndarray  # (m,)
    held: np.ndarray  # (m,) bool, the rows solved as equalities


@dataclass(frozen=True, eq=False)
class Oracle:
    """min f₀ s.t. fⱼ ≤ τⱼ or fⱼ = τⱼ, where fⱼ(θ) = Σᵢ Wⱼᵢ ℓᵢ(θ) + ½ θᵀBⱼθ + aⱼᵀθ."""

    loss: str  # "squared" or "logistic"
    X: np.ndarray  # (n, d)
    y: np.ndarray  # (n,)
    means: tuple[Means, ...]  # of the 1 + m rows
    W: np.ndarray  # (1 + m, n) weights as they are now
    B: np.ndarray  # (1 + m, d, d)
    A: np.ndarray  # (1 + m, d)
    tau: np.ndarray  # (m,)
    equality: np.ndarray  # (m,) bool

    # Rows and their derivatives

    def losses(self, theta):
        """ℓ, and its first two derivatives in the score xᵀθ, each (n,)."""
        score = self.X @ theta
        if self.loss == "squared":
            return 0.5 * (score - self.y) ** 2, score - self.y, np.ones_like(score)
        chance = expit(-self.y * score)  # of the other label
        return np.logaddexp(0.0, -self.y * score), -self.y * chance, chance * (1.0 - chance)

    def values(self, theta):
        return self.W @ self.losses(theta)[0] + 0.5 * (self.B @ theta) @ theta + self.A @ theta

    def gradients(self, theta):
        return (self.W * self.losses(theta)[1]) @ self.X + self.B @ theta + self.A

    def hessian(self, theta, mu):
        """Σⱼ μⱼ ∇²fⱼ."""
        weights = (mu @ self.W) * self.losses(theta)[2]
        return (self.X.T * weights) @ self.X + np.tensordot(mu, self.B, 1)

    def lagrangian(self, theta, lam):
        """Gradient and Hessian of f₀ + Σ λⱼ(fⱼ − τⱼ)."""
        mu = np.concatenate([[1.0], lam])
        return mu @ self.gradients(theta), self.hessian(theta, mu)

    # Changing the data

    def moved(self, removal: Removal, epsilon: float) -> Oracle:
        """The problem with weights w + ε·δw, where w + δw are the weights once the samples are gone."""
        W = self.W.copy()
        for row in removal.rows:
            after = weights_of(self.means[row], len(self.y), removal.gone, removal.renormalise)
            W[row] += epsilon * (after - self.W[row])
        return replace(self, W=W)

    # Solving

    def newton(self, start: Point, held: np.ndarray, reach: float) -> Point | None:
        """Plain Newton on ∇L = 0, f = τ on the rows held; None where it does not converge, or leaves the reach."""
        d, rows = len(start.theta), np.flatnonzero(held)
        theta, lam = start.theta.copy(), np.where(held, start.lam, 0.0)
        before = np.inf
        for _ in range(25):
            gradient, H = self.lagrangian(theta, lam)
            G = self.gradients(theta)[1:][rows]
            c = (self.values(theta)[1:] - self.tau)[rows]
            K = np.block([[H, G.T], [G, np.zeros((len(rows), len(rows)))]])
            try:
                step = np.linalg.solve(K, -np.concatenate([gradient, c]))
            except np.linalg.LinAlgError:
                return None
            theta, size = theta + step[:d], np.abs(step).max()
            lam[rows] += step[d:]
            if not np.linalg.norm(theta - start.theta) <= reach:
                return None
            if size <= 1e-13 or (size <= 1e-11 and size >= before):  # rounding has the last word
                return Point(theta, lam, held)
            before = size
        return None

    def tangent_curvature(self, theta, lam, rows) -> float:
        """Smallest eigenvalue of ∇²L across the gradients of these rows."""
        H = self.lagrangian(theta, lam)[1]
        G = self.gradients(theta)[1:][rows]
        Z = np.linalg.svd(G)[2][len(G) :].T if len(G) else np.eye(len(theta))
        return float(np.linalg.eigvalsh(Z.T @ H @ Z)[0]) if Z.shape[1] else np.inf

    def minimum(self, start: Point, reach: float = 1e3) -> Point:
        """The local solution within reach: every active set is tried, those nearest to the start's first."""
        free = np.flatnonzero(~self.equality)
        patterns = np.array(list(product([False, True], repeat=len(free))), dtype=bool)
        order = np.argsort((patterns != start.held[free]).sum(1), kind="stable")
        for pattern in patterns[order]:
            held = self.equality.copy()
            held[free] = pattern
            if held.sum() > len(start.theta):
                continue
            found = self.newton(start, held, reach)
            if found is None:
                continue
            c = self.values(found.theta)[1:] - self.tau
            sound = (c[~held] <= 1e-12).all() and (found.lam[free] >= -1e-12).all()
            if sound and self.tangent_curvature(found.theta, found.lam, held) > 0:
                return found
        raise AssertionError("no active set solves the problem")


def weights_of(means: Means, n: int, gone: np.ndarray | None = None, renormalise: bool = True) -> np.ndarray:
    """The weight of each sample in a sum of means; over the samples left, or with the old 1/N of each mean."""
    w = np.zeros(n)
    for coefficient, mask in means:
        left = mask if gone is None else mask & ~gone
        w += coefficient * left / (left.sum() if renormalise else mask.sum())
    return w


@dataclass(frozen=True, eq=False)
class Slope:
    """One-sided derivative of (θ, λ) at ε = 0, by re-solving."""

    theta: np.ndarray
    lam: np.ndarray
    rows: np.ndarray  # (m,) slope of f − τ
    held: np.ndarray  # (m,) bool, the rows that hold for small ε > 0
    doubt: float  # what the last extrapolation still changed, relative: the accuracy of the difference itself


def slope(oracle: Oracle, at: Point, removal: Removal, sign: float) -> Slope:
    """(x(ε) − x̄)/ε at ε, ε/2 and ε/4, extrapolated to ε = 0; ε falls until one active set holds and it settles."""
    found: list[Slope] = []
    for epsilon in (1e-4, 1e-5, 1e-6):
        quotients, held, start = [], [], at
        for step in (epsilon, epsilon / 2, epsilon / 4):
            changed = oracle.moved(removal, sign * step)
            start = changed.minimum(Point(at.theta, at.lam, start.held), reach=100 * step)  # |dθ/dε| is far below 100
            rows = changed.values(start.theta)[1:] - oracle.values(at.theta)[1:]
            quotients.append(np.concatenate([start.theta - at.theta, start.lam - at.lam, rows]) / step)
            held.append(start.held)
        if (held[0] != held[1]).any() or (held[1] != held[2]).any():
            continue
        first, second = 2 * quotients[1] - quotients[0], 2 * quotients[2] - quotients[1]
        best = (4 * second - first) / 3
        theta, lam, rows = np.split(best, [len(at.theta), len(at.theta) + len(at.lam)])
        doubt = float(np.linalg.norm(best - second) / max(np.linalg.norm(best), 1e-3))
        found.append(Slope(theta, lam, rows, held[2], doubt))
        if doubt < 1e-7:
            break
    if not found:
        raise AssertionError("the active set does not settle as ε falls")
    return min(found, key=lambda one: one.doubt)
