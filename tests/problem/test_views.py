"""One population under several losses: what is done to a person is done in every view of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from oracle import Oracle, Point, Removal, slope, weights_of
from parity import FILE, resolve_without
from scipy.special import expit

import dif

F64 = torch.float64


def logistic(params, batch):
    return torch.nn.functional.softplus(-batch[1] * (batch[0] @ params["theta"]))


def rate(params, batch):
    return torch.sigmoid(batch[0] @ params["theta"])


def energy(params, batch):
    return 0.5 * (batch[0] @ params["theta"]) ** 2


@dataclass(frozen=True, eq=False)
class ThreeViews(Oracle):
    """The same rows of X three times over: the first third under the logistic loss, then rates, then energies."""

    def losses(self, theta):
        n = len(self.y) // 3
        score, y = (self.X @ theta)[:n], self.y[:n]
        other, chance = expit(-y * score), expit(score)
        return (
            np.concatenate([np.logaddexp(0.0, -y * score), chance, 0.5 * score**2]),
            np.concatenate([-y * other, chance * (1 - chance), score]),
            np.concatenate([other * (1 - other), chance * (1 - chance) * (1 - 2 * chance), np.ones(n)]),
        )


def random_problem(seed):
    """A fair rate (at most) and an energy budget (at most, or equal) on views of the same people; and that in numpy."""
    rng = np.random.default_rng(seed)
    n, d = 40, 4
    X, group = rng.normal(size=(n, d)), rng.random(n) < 0.5
    y = np.where(X @ rng.normal(size=d) + 0.7 * group + rng.normal(size=n) > 0.3, 1.0, -1.0)
    third = [np.repeat(np.eye(3, dtype=bool)[v], n) for v in range(3)]
    inside = np.tile(group, 3)
    means = [((1.0, third[0]),), ((1.0, third[1] & inside), (-1.0, third[1] & ~inside)), ((1.0, third[2]),)]
    B = np.zeros((3, d, d))
    B[0] = 0.05 * np.eye(d)
    equality = np.array([False, bool(seed % 2)])
    truth = ThreeViews(
        "", np.tile(X, (3, 1)), np.tile(y, 3), tuple(means), np.stack([weights_of(m, 3 * n) for m in means]), B,
        np.zeros((3, d)), np.full(2, 1e9), np.zeros(2, dtype=bool),
    )  # fmt: skip
    free = truth.minimum(Point(np.zeros(d), np.zeros(2), np.zeros(2, dtype=bool)))
    at = truth.values(free.theta)[1:]
    tau = at - np.array([0.15 * abs(at[0]), 0.1 * at[1]])  # one binds at least
    truth = ThreeViews(truth.loss, truth.X, truth.y, truth.means, truth.W, B, truth.A, tau, equality)
    solved = truth.minimum(Point(free.theta, np.zeros(2), np.array([True, True])))

    train = dif.Samples(logistic, (torch.tensor(X), torch.tensor(y)), name="train")
    rates, energies = train.view(rate, name="rates"), train.view(energy, name="energies")
    mask = torch.tensor(group)
    budget = energies.mean() == tau[1] if equality[1] else energies.mean() <= tau[1]
    parity = rates.mean(where=mask) - rates.mean(where=~mask) <= tau[0]
    problem = dif.Problem(train.mean() + dif.ridge(0.05), [parity.named("parity"), budget.named("budget")])
    solution = dif.fit(problem, {"theta": torch.tensor(solved.theta)}, show_progress=False)
    np.testing.assert_allclose(solution.theta.numpy(), solved.theta, atol=1e-9)
    return train, rates, problem, solution, truth, solved


def removal_of(index, n, rows=(0, 1, 2)):
    gone = np.zeros(3 * n, dtype=bool)
    for v in range(3):
        gone[np.asarray(index) + v * n] = True
    return Removal(gone, rows, True)


@pytest.mark.parametrize("seed", range(10))
def test_a_removal_acts_on_every_view(seed):
    train, rates, problem, solution, truth, at = random_problem(seed)
    n = len(train)
    derivative = dif.DirectionalInfluence(solution, switching=False)
    for index in ([3], [5, 17, 30]):
        gone = removal_of(index, n)
        found = derivative.change(train.remove(index))
        wanted = slope(truth, at, gone, 1.0)
        np.testing.assert_allclose(found.flat.numpy(), wanted.theta, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.multipliers.flat.numpy(), wanted.lam, rtol=1e-4, atol=1e-6)
        again = derivative.change(rates.remove(index))  # whichever view it is said of
        np.testing.assert_array_equal(again.flat.numpy(), found.flat.numpy())

        end = truth.moved(gone, 1.0).minimum(at)
        moved = dif.Retraining(solution).change(train.remove(index))
        np.testing.assert_allclose(moved.flat.numpy(), end.theta - at.theta, atol=1e-7)
        without = dif.fit(problem.after(rates.remove(index)), solution.params, show_progress=False)
        np.testing.assert_allclose(without.theta.numpy(), end.theta, atol=1e-7)

    some = [problem.objective, problem.constraints[0]]
    found = derivative.change(train.remove([3], terms=some))
    wanted = slope(truth, at, removal_of([3], n, rows=(0, 1)), 1.0)
    np.testing.assert_allclose(found.flat.numpy(), wanted.theta, rtol=1e-4, atol=1e-6)


def test_reweighting_replacing_and_adding_act_on_every_view():
    train, rates, _, solution, truth, at = random_problem(1)
    n, X, y = len(train), truth.X, truth.y
    retraining = dif.Retraining(solution)

    dw = np.zeros(n)
    dw[[2, 9]] = 0.004, -0.002
    W = truth.W + np.tile(dw, 3) * np.sign(truth.W)  # every mean has coefficient +1 or −1
    end = ThreeViews("", X, y, truth.means, W, truth.B, truth.A, truth.tau, truth.equality).minimum(at)
    moved = retraining.change(train.reweight(torch.tensor(dw))).flat.numpy()
    np.testing.assert_allclose(moved, end.theta - at.theta, atol=1e-7)

    for views in (train, rates):
        corrected = (torch.tensor(X[4:5] + 0.3), torch.tensor(-y[4:5]))
        X_new, y_new = X.copy(), y.copy()
        for v in range(3):
            X_new[v * n + 4], y_new[v * n + 4] = X[4] + 0.3, -y[4]
        end = ThreeViews("", X_new, y_new, truth.means, truth.W, truth.B, truth.A, truth.tau, truth.equality)
        moved = retraining.change(views.replace(4, corrected)).flat.numpy()
        np.testing.assert_allclose(moved, end.minimum(at).theta - at.theta, atol=1e-7)

    joined = retraining.change(train.add((torch.tensor(X[7:8]), torch.tensor(y[7:8])), like=7)).flat.numpy()
    means = []  # person 7 twice: the same as weighing them double
    for mean in truth.means:
        w = np.zeros(3 * n)
        for c, mask in mean:
            twice = mask * np.where(np.arange(3 * n) % n == 7, 2.0, 1.0)
            w += c * twice / twice.sum()
        means.append(w)
    end = ThreeViews("", X, y, truth.means, np.stack(means), truth.B, truth.A, truth.tau, truth.equality).minimum(at)
    np.testing.assert_allclose(joined, end.theta - at.theta, atol=1e-7)


def test_sets_are_chosen_from_people():
    train, rates, _, solution, truth, at = random_problem(2)
    chosen = dif.choose(solution, train.mean(), rates, 2, lower=False, show_progress=False)
    end = truth.moved(removal_of(list(chosen.indices), len(train)), 1.0).minimum(at)
    risk = weights_of(truth.means[0], 3 * len(train)) @ truth.losses(end.theta)[0]
    assert chosen.verified == pytest.approx(risk, abs=1e-8)


def test_someone_alone_in_one_view_is_not_removed():
    X, y = torch.randn(20, 2, dtype=F64, generator=torch.Generator().manual_seed(0)), torch.ones(20, dtype=F64)
    train = dif.Samples(logistic, (X, y), name="train")
    lone = train.view(energy).mean(where=torch.arange(20) == 6)
    problem = dif.Problem(train.mean() + dif.ridge(0.1), [lone <= 50.0])
    solution = dif.fit(problem, {"theta": torch.zeros(2, dtype=F64)}, show_progress=False)
    with pytest.raises(dif.DifError, match="mean of 1 of view of train"):
        dif.DirectionalInfluence(solution).change(train.remove(6))
    assert bool(torch.isnan(dif.self_influence(dif.DirectionalInfluence(solution), train).values[6]))


def test_the_same_data_twice_is_asked_about():
    X, y = torch.randn(20, 2, dtype=F64), torch.ones(20, dtype=F64)
    train, rates = dif.Samples(logistic, (X, y), name="train"), dif.Samples(rate, (X, y), name="rates")
    with pytest.warns(dif.SameDataWarning, match=r"Are they the same people.*train\.view\(loss, name='rates'\)"):
        dif.Problem(train.mean(), [rates.mean() <= 0.3])
    both = torch.utils.data.TensorDataset(X, y)
    with pytest.warns(dif.SameDataWarning):
        dif.Problem(train.mean(), [dif.Samples(rate, both, name="rates").mean() <= 0.3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dif.Problem(train.mean(), [train.view(rate).mean() <= 0.3])
        dif.Problem(train.mean(), [dif.Samples(rate, (X + 1, y + 1)).mean() <= 0.3])
        dif.Problem(train.mean(), [dif.Samples(rate, (X[10:], y[10:])).mean() <= 0.3])


def test_parity_of_rates_against_slsqp(tmp_path):
    """600 people, demographic parity: removal from the loss and from the rates, against SciPy solved anew."""
    (tmp_path / "model.py").write_text(FILE)
    told = {}
    exec(compile(FILE, "model.py", "exec"), told)
    people = np.random.default_rng(0).permutation(600)[:100].tolist()
    truth = np.array([resolve_without(told, i) for i in people])
    target = told["targets"]["risk of the childless"]
    found = dif.DirectionalInfluence(told["solution"]).scores(target, told["train"].remove_each())
    predicted = found.values[people, 0].numpy()
    assert np.corrcoef(predicted, truth)[0, 1] > 0.99
    top = [one.index for one in found.top(8)]
    actual = np.array([resolve_without(told, i) for i in top])
    np.testing.assert_allclose(found.values[top, 0].numpy(), actual, rtol=0.1)
