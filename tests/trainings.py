"""A small classifier under group constraints, for the tests of training on mini-batches."""

import torch
from torch import nn

import dif

F64 = torch.float64


def classify(n=60, seed=0):
    """A two-layer classifier on random data, with a group of each sample."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 3, generator=generator, dtype=F64)
    y = torch.sign(X[:, 0] + 0.5 * torch.randn(n, generator=generator, dtype=F64))
    params = {
        "W": torch.randn(3, 2, generator=generator, dtype=F64),
        "v": torch.randn(2, generator=generator, dtype=F64),
    }
    return X, y, torch.arange(n) % 3, params


def logistic(p, z):
    return nn.functional.softplus(-z[1] * (torch.tanh(z[0] @ p["W"]) @ p["v"]))


def state_problem(X, y, group):
    """Bounded group losses and a linear equality."""
    train = dif.Samples(logistic, (X, y), name="train")
    risk = train.mean()
    constraints = [(train.mean(where=group == g) <= risk + 0.01).named(f"group {g}") for g in range(2)]
    return train, dif.Problem(risk + dif.ridge(0.01), [*constraints, dif.linear([1.0] + [0.0] * 7) == 0.1])


def violations(losses, group, first):
    """f − τ of the constraints in a batch; 0 for a group without members there."""
    gaps = [losses[group == g].mean() - losses.mean() - 0.01 for g in range(2)]
    rows = [gap if bool((group == g).any()) else torch.zeros_like(gap) for g, gap in enumerate(gaps)]
    return torch.stack([*rows, first - 0.1])


class Explicit:
    """The steps of a training of `state_problem`, written out with weights of the samples: no code of dif.

    A mean is Σ a ℓ / Σ b over the members in the batch, a group without members is left out; a and b are (B,), or
    (3, B) for the mean of all and of each group. The state is (θ, velocity, λ) of SGD with momentum.
    """

    def __init__(self, X, y, group, lr=0.1, momentum=0.9, up=0.5, weight_decay=0.0):
        self.X, self.y, self.group, self.lr, self.momentum, self.up, self.decay = (
            X,
            y,
            group,
            lr,
            momentum,
            up,
            weight_decay,
        )

    def lagrangian(self, theta, lam, index, a, b, dtau):
        losses = logistic({"W": theta[:6].reshape(3, 2), "v": theta[6:]}, (self.X[index], self.y[index]))
        (a, *above), (b, *below) = a.expand(3, -1), b.expand(3, -1)
        mean = (a * losses).sum() / b.sum()
        rows = []
        for g, a_g, b_g in zip(range(2), above, below, strict=True):
            mine = self.group[index] == g
            there = bool((b_g[mine] != 0).any())
            rows.append((a_g * losses)[mine].sum() / b_g[mine].sum() - mean - 0.01 - dtau[g] if there else 0 * mean)
        rows = torch.stack([*rows, theta[0] - 0.1 - dtau[2]])
        return mean + 0.005 * theta.square().sum() + lam @ rows, rows

    def step(self, state, index, a, b, dtau, factor=1.0):
        """Return the state after a step."""
        theta, velocity, lam = state[:8], state[8:16], state[16:]
        g, rows = torch.func.grad(self.lagrangian, has_aux=True)(theta, lam, index, a, b, dtau)
        velocity = self.momentum * velocity + g + self.decay * theta
        ahead = lam + self.up * rows
        return torch.cat([theta - factor * self.lr * velocity, velocity, ahead[:2].clamp(min=0), ahead[2:]])

    def linearise(self, start, batches, factors):
        """Return each step as it is, for samples of the run and those that only a perturbed run has.

        That is the state before it, its samples, their weights, the factor of the learning rate, the state after it and
        the derivative of that.
        """
        steps, state, none = [], start, torch.zeros(3, dtype=F64)
        for (index, extra), factor in zip(batches, factors, strict=True):
            every = torch.cat([index, extra])
            one = (torch.arange(len(every)) < len(index)).double()
            advance = lambda s, *args: (after := self.step(s, *args), after)  # noqa: E731
            J, after = torch.func.jacfwd(advance, has_aux=True)(state, every, one, one, none, factor)
            steps.append((state, every, one, factor, after, J))
            state = after
        return steps

    def predict(self, steps, moved):
        """Return how the state at the end is predicted to change, if `moved` gives the weights a, b and the shift of τ.

        Each step changes by its difference with and without the perturbation, and carries on what came before linearly.
        """
        change = torch.zeros_like(steps[0][0])
        for state, every, one, factor, after, J in steps:
            change = J @ change + self.step(state, every, *moved(every, one), factor) - after
        return change
