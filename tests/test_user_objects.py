"""Nothing of the user's is changed, after success either."""

from contextlib import suppress

import pytest
import torch
from refusals import (
    ESTIMATORS,
    F64,
    TRAIN,
    X,
    Y,
    drawn,
    estimator,
    point,
    refused,
    samples,
    solve,
    squares,
    through,
    untouched,
)
from torch import nn

import dif


def everything_with(problem, params, train, test):
    at = dif.fit(problem, params, show_progress=False)
    dif.Solution(problem, params)
    dif.Solution.from_params(problem, params)
    for kind in ESTIMATORS:
        one = kind(at)
        one.change(train.remove(0))
        one.scores(test, train.remove_each([0, 1]))
    dif.DirectionalInfluence(at, switching=True).scores(test.mean(), train.remove([0, 1]))
    return at


def test_tensors_are_untouched_by_success():
    x, y = X.clone(), Y.clone()
    start = {"w": torch.ones(2, dtype=F64, requires_grad=True)}
    train, test = dif.Samples(squares, (x, y), name="train"), dif.Samples(squares, (x[:2], y[:2]), name="test")
    with untouched(x, y, start):
        at = everything_with(dif.Problem(train.mean(), [dif.linear([1.0, 1.0]) <= -1.0]), start, train, test)
    assert x.grad is y.grad is start["w"].grad is None
    at.params["w"].zero_()
    assert float(at.theta.sum()) == pytest.approx(-1.0)


@pytest.mark.parametrize("training", [True, False])
def test_modules_are_untouched_by_success(training):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 1)).double()
    model(X).sum().backward()  # gives the buffers and .grad values of their own
    model.train(training)
    model[1].eval()
    train = samples(through, name="train")
    with untouched(model):
        at = everything_with(dif.Problem(train.mean() + dif.ridge(0.5)), model, train, samples(through, name="test"))
    assert set(at.params) == dict(model.named_parameters()).keys()


def test_modules_work_with_both_styles_of_loss():
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    styles = {
        "called": through,
        "read": lambda model, z: (z[0] @ model["weight"][0] + model["bias"] - z[1]) ** 2,
        "both": lambda model, z: (model(z[0])[:, 0] - z[1]) ** 2 + 0 * model["weight"].sum(),
    }
    with untouched(model):
        found = {}
        for name, loss in styles.items():
            train = samples(loss)
            at = solve(train.mean() + dif.ridge(0.1), [dif.linear([[1.0, 1.0]], of="weight") <= -1.0], params=model)
            found[name] = dif.DirectionalInfluence(at).change(train.remove(0)).theta
    for other in (found["read"], found["both"]):
        assert other.keys() == {"weight", "bias"}
        assert all((other[name] - found["called"][name]).abs().max() < 1e-9 for name in other)
    assert found["called"]["weight"].shape == (1, 2)


def test_params_changed_by_the_loss_itself_are_not_the_users():
    start = point(1.0, 2.0)
    loss = lambda params, z: (z[0] @ params["w"].mul_(0.5) - z[1]) ** 2  # noqa: E731
    action = lambda: solve(samples(loss).mean(), params=start)  # noqa: E731
    refused(dif.InvalidInputError, action, "Two calls of the loss", keep=[start])


@pytest.mark.parametrize(
    "kind",
    ESTIMATORS,
)
def test_data_may_require_a_gradient(kind):
    x = X.clone().requires_grad_()
    train = samples(squares, (x, Y))
    with untouched(x):
        at = solve(train.mean(), [dif.linear([1.0, 1.0]) <= -1.0])
        change, scores = kind(at).change(train.remove(0)), kind(at).scores(train, train.remove_each())
    assert (change.flat - estimator(kind).change(TRAIN.remove(0)).flat).abs().max() < 1e-9
    assert not change.flat.requires_grad
    assert not scores.values.requires_grad


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def build_norm():
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 1)).double()
    return model, samples(through, (drawn(8, 2, 3), Y))


@pytest.mark.parametrize("build", [build_norm, lambda: (Counter(), samples(through))], ids=["instance norm", "counter"])
def test_buffers_that_the_forward_pass_writes_are_not_the_users(build):
    model, train = build()
    with untouched(model), suppress(dif.DifError):
        solve(train.mean() + dif.ridge(0.1), params=model)
