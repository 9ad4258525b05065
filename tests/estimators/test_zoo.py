"""Every model of zoo.py under a constraint: every estimator against plain autograd and re-solving."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from zoo import ANIMALS, F64, N

import dif
from dif.problem.parameters import Parameters

QUIET = {"show_progress": False}
GONE = (4, 7)  # one in the group, one not
GROUP = torch.arange(N) % 2 == 0
RIGHT = [name for name, animal in ANIMALS.items() if animal.ends == "right"]


class Plain:
    """The problem in plain torch: gradients by one backward pass, Hessians by differences of these, Newton on KKT."""

    def __init__(self, animal, params, slant, tau, ridge):
        self.layout, self.start = Parameters.of(params)
        self.data, self.loss, self.ridge, self.slant, self.tau = animal.data(), animal.loss, ridge, slant, tau
        self.n = N

    def weights(self, gone=None, share=1.0):
        """Return the weights of objective and constraint, (2, n), after a share of the removal of one sample."""
        full = torch.stack([torch.ones(N, dtype=F64) / N, GROUP / GROUP.sum()])
        if gone is None:
            return full
        left = torch.arange(N) != gone
        after = torch.stack([left / left.sum(), (GROUP & left) / (GROUP & left).sum()])
        return full + share * (after - full)

    def losses(self, theta):
        return self.loss(self.layout.bind(self.layout.tensors(theta)), self.data)

    def gradients(self, theta, W):
        """Return the values of both rows, (2,), and their gradients, (2, d)."""
        leaf = theta.clone().requires_grad_()
        sums = W @ self.losses(leaf)
        found = [torch.autograd.grad(s, leaf, retain_graph=True)[0] for s in sums]
        J = torch.stack(found).detach() + torch.stack([self.ridge * theta, self.slant])
        values = sums.detach() + torch.stack([0.5 * self.ridge * theta @ theta, self.slant @ theta - self.tau])
        return values, J

    def hessian(self, theta, W, mu):
        """Return the Hessian of Σ μⱼfⱼ by central differences of gradients."""
        h, columns = 1e-5, []
        for k in range(len(theta)):
            e = torch.zeros_like(theta)
            e[k] = h
            columns.append((mu @ self.gradients(theta + e, W)[1] - mu @ self.gradients(theta - e, W)[1]) / (2 * h))
        H = torch.stack(columns, 1)
        return 0.5 * (H + H.T)

    def bend(self, theta, lam, W):
        """Return the Hessian of the Lagrangian."""
        return self.hessian(theta, W, torch.stack([torch.ones_like(lam), lam]))

    def step(self, theta, lam, W, H):
        """Return Newton's step on ∇L = 0, f₁ = 0, in θ and λ, and the residual."""
        f, J = self.gradients(theta, W)
        K = torch.zeros(len(theta) + 1, len(theta) + 1, dtype=F64)
        K[:-1, :-1], K[:-1, -1], K[-1, :-1] = H, J[1], J[1]
        right = -torch.cat([J[0] + lam * J[1], f[1:]])
        moved = torch.linalg.solve(K, right)
        return moved[:-1], moved[-1], float(right.abs().max())

    def solve(self, theta, lam, W, H):
        """Solve from a warm start, with the Hessian H from nearby as long as the residual falls fast."""
        before = float("inf")
        for _ in range(200):
            omega, more, residual = self.step(theta, lam, W, H)
            if residual < 1e-12 or (residual < 1e-9 and residual > 0.5 * before):
                return theta, lam
            if residual > 0.1 * before:
                H = self.bend(theta, lam, W)
                omega, more, residual = self.step(theta, lam, W, H)
            theta, lam, before = theta + omega, lam + more, residual
        raise AssertionError(f"the oracle does not converge: {before:.1e}")

    def solve_unconstrained(self, theta, W):
        """Solve without the constraint."""
        for _ in range(50):
            slope = self.gradients(theta, W)[1][0]
            if float(slope.abs().max()) < 1e-11:
                break
            theta = theta - torch.linalg.solve(self.hessian(theta, W, torch.tensor([1.0, 0.0], dtype=F64)), slope)
        return theta

    def without(self, gone, theta, lam, H):
        """Return the solution without a sample, removed in steps; the constraint may become inactive on the way."""
        active = True
        for share in (0.25, 0.5, 0.75, 1.0):
            W = self.weights(gone, share)
            if active:
                theta, lam = self.solve(theta, lam, W, H)
                active = bool(lam >= 0)
            theta = theta if active else self.solve_unconstrained(theta, W)
        return theta


def fit_animal(animal):
    """State and fit the model under an active bound on the mean loss of a group plus a linear term."""
    params = animal.params()
    start = Parameters.of(params)[1]
    slant = 0.5 * torch.randn(len(start), generator=torch.Generator().manual_seed(9), dtype=F64)
    train = dif.Samples(animal.loss, animal.data(), name="train")
    free = dif.fit(dif.Problem(train.mean() + dif.ridge(animal.ridge)), params, max_iter=500, **QUIET)
    row = train.mean(where=GROUP) + dif.linear(slant)
    losses = free.program.rows.tables[0].samples.losses(free.params, animal.data(), N)
    tau = float(losses[GROUP].mean() + slant @ free.theta) - animal.tight
    problem = dif.Problem(train.mean() + dif.ridge(animal.ridge), [row <= tau])
    solution = dif.fit(problem, free.params, max_iter=500, **QUIET)
    return train, solution, Plain(animal, params, slant, tau, animal.ridge)


def near(found, wanted, rtol, what):
    found, wanted = (torch.as_tensor(x, dtype=F64).reshape(-1) for x in (found, wanted))
    size = max(float(wanted.abs().max()), 1e-3)
    assert float((found - wanted).abs().max()) <= rtol * size, (what, found, wanted)


def check(name, thorough=False):
    """Compare every estimator; AdaptiveInfluence, which is made of the others, and two processes if `thorough`."""
    animal = ANIMALS[name]
    train, solution, plain = fit_animal(animal)
    derivative = dif.DirectionalInfluence(solution, switching=False)
    assert solution.lam > 0
    theta, lam = solution.theta, solution.lam[0]
    W = plain.weights()
    near(plain.gradients(theta, W)[0][0], solution.objective, 1e-9, "objective")
    H = plain.bend(theta, lam, W)
    near(plain.solve(theta, lam, W, H)[0], theta, 1e-5, "solution")
    H0 = plain.hessian(theta, W, torch.tensor([1.0, 0.0], dtype=F64))
    g0 = plain.gradients(theta, W)[1][0]
    removals, target = train.remove_each(GONE), train.mean()
    slope = plain.gradients(theta, W)[1][0] - plain.ridge * theta  # of the target, the mean loss
    single = derivative.scores(target, removals, assess=0, **QUIET).values[:, 0]
    whole = [dif.Retraining(solution), dif.PathInfluence(solution)]
    whole += [dif.AdaptiveInfluence(solution, accuracy=1e-6)] if thorough else []
    actual = {made.name: made.scores(target, removals).values[:, 0] for made in whole}
    classical, penalty, newton = (
        k(solution) for k in (dif.ClassicalInfluence, dif.PenaltyInfluence, dif.NewtonInfluence)
    )
    for k, gone in enumerate(GONE):
        removal, after = train.remove([gone]), plain.weights(gone)
        e = 1e-4
        ends = [plain.solve(theta, lam, plain.weights(gone, share), H)[0] for share in (-e, e)]
        true = (ends[1] - ends[0]) / (2 * e)
        near(derivative.change(removal).flat, true, 1e-4, "derivative")
        near(single[k], slope @ true, 1e-3, "scores")
        ignoring = -torch.linalg.solve(H0, plain.gradients(theta, after)[1][0] - g0)
        near(classical.change(removal).flat, ignoring, 1e-3, "classical")
        near(penalty.change(removal).flat, ignoring, 1e-3, "penalty")
        omega, more, _ = plain.step(theta, lam, after, plain.bend(theta, lam, after))
        if lam + more > 0:
            near(newton.change(removal).flat, omega, 1e-3, "newton")
        end = plain.without(gone, theta, lam, H)
        near(whole[0].change(removal).flat, end - theta, 1e-4, "retraining")
        moved = plain.losses(end).mean() - plain.losses(theta).mean()
        for made, values in actual.items():
            near(values[k], moved.detach(), 1e-4, made)
    if not thorough:
        return
    try:
        several = derivative.scores(target, removals, assess=0, jobs=2, **QUIET).values[:, 0]
    except dif.InvalidInputError as error:
        assert "the loss, the module and the data must be picklable (" in str(error)  # noqa: PT017
        return
    np.testing.assert_allclose(several.numpy(), single.numpy(), rtol=1e-10, atol=1e-18)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RIGHT)
def test_smooth_models(name):
    check(name, thorough=name in RIGHT[::8])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RIGHT)
def test_smooth_models_thoroughly(name):
    check(name, thorough=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, animal in ANIMALS.items() if animal.ends == "refused"])
def test_refused_models(name):
    """The fit or an estimator raises a DifError."""
    with pytest.raises(dif.DifError):
        check(name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, animal in ANIMALS.items() if animal.ends == "either"])
def test_models_with_kinks(name):
    """The answer is right, or a DifError is raised where the minimum lies on a kink."""
    with contextlib.suppress(dif.DifError):
        check(name)


def test_number_of_models():
    assert len(ANIMALS) >= 100
