"""What the tests of refusals share: a small problem, and what is checked of every error."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import nn

import dif

F64 = torch.float64


NAN, INF = float("nan"), float("inf")


ESTIMATORS = [
    dif.DirectionalInfluence,
    dif.ClassicalInfluence,
    dif.PenaltyInfluence,
    dif.NewtonInfluence,
    dif.Retraining,
]


ERRORS = [
    dif.InvalidInputError,
    dif.NotASolutionError,
    dif.DegenerateError,
    dif.InfeasibleError,
    dif.UnboundedError,
    dif.NotConvergedError,
]


def squares(params, z):
    return (z[0] @ params["w"] - z[1]) ** 2


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def point(*values):
    return {"w": torch.tensor(values, dtype=F64)}


X, Y = drawn(8, 2), drawn(8, seed=1)


GROUP = torch.arange(8) // 4


START = {"w": torch.zeros(2, dtype=F64, requires_grad=True)}


START["w"].grad = torch.ones(2, dtype=F64)


TRAIN = dif.Samples(squares, (X, Y), name="train")


OTHER = dif.Samples(squares, (X, Y), name="other")


PROBLEM = dif.Problem(TRAIN.mean(), [(dif.linear([1.0, 1.0]) <= -1.0).named("cap")])


CAP = PROBLEM.constraints[0]


def solve(objective, constraints=(), params=START, **options):
    return dif.fit(dif.Problem(objective, constraints), params, show_progress=False, **options)


@cache
def solution():
    return dif.fit(PROBLEM, START, show_progress=False)


@cache
def estimator(kind):
    return kind(solution())


@cache
def influence():
    return estimator(dif.DirectionalInfluence).scores(TRAIN, TRAIN.remove_each())


def samples(loss, data=None, name="odd", **options):
    return dif.Samples(loss, (X, Y) if data is None else data, name=name, **options)


def fit_loss(loss, data=None):
    """A fit in which only the loss is odd."""
    return solve(samples(loss, data).mean() + dif.ridge(1.0))


def picture(thing):
    """All that a user can see of a tensor, a module or a container of them."""
    if isinstance(thing, torch.Tensor):
        seen = thing.detach()
        values = seen.clone() if thing.device.type != "meta" else torch.empty(0)
        grad = None if thing.grad is None else thing.grad.clone()
        return (values.nan_to_num(nan=-7.0) if values.is_floating_point() else values, thing.requires_grad, grad)
    if isinstance(thing, nn.Module):
        named = [*thing.named_parameters(), *thing.named_buffers()]
        return ([(k, id(t), picture(t)) for k, t in named], [(k, m.training) for k, m in thing.named_modules()])
    values = thing.values() if isinstance(thing, dict) else thing
    return [picture(value) for value in values]


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@contextmanager
def untouched(*things):
    """The user's objects, and the random state, are afterwards what they were."""
    everything = [X, Y, START, *things]
    before, random = picture(everything), torch.get_rng_state()
    yield
    assert same(picture(everything), before)
    assert torch.equal(torch.get_rng_state(), random)


def refused(error_class, action, *texts, keep=()):
    """Return the error that an action raises, after checking its class, its four sentences and these texts."""
    with untouched(*keep), pytest.raises(dif.DifError) as caught:
        action()
    error = caught.value
    assert type(error) is error_class, error
    parts = [part for part in (error.found, error.allowed, error.meaning, error.cure) if part]
    assert str(error) == " ".join(parts)
    assert all(part.endswith(".") for part in parts), parts
    assert not any(part[0].islower() for part in parts[1:] if not part.startswith("dif")), parts
    for text in texts:
        assert text in str(error)
    return error


def invalid(action, measured, *texts, keep=()):
    """Return the InvalidInputError that an action raises; its first sentence says what was found."""
    error = refused(dif.InvalidInputError, action, *texts, keep=keep)
    assert measured in error.found
    return error


def table(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


def through(model, z):
    return (model(z[0])[:, 0] - z[1]) ** 2


EYE = dif.linear(torch.eye(2))


def roots(params, z):
    return (z + params["t"] ** 2).sqrt()


@cache
def kinked():
    """θ̄ = 0, where the loss of a new sample z = 0 has no derivative."""
    train = dif.Samples(roots, torch.ones(4, dtype=F64), name="roots")
    return train, solve(train.mean(), params={"t": torch.zeros((), dtype=F64)})


def logistic(params, z):
    return nn.functional.softplus(-torch.sign(z[1]) * (z[0] @ params["w"]))


@cache
def not_stationary():
    return dif.Solution(dif.Problem(TRAIN.mean()), START)


@cache
def not_feasible():
    return dif.Solution(PROBLEM, point(1.0, 0.0))


@cache
def not_complementary():
    """min ½(t − 11)² s.t. t ≤ 2, at t = 1 with λ = 10: stationary, but the constraint has slack 1."""
    train = dif.Samples(lambda p, z: 0.5 * (z - p["w"][0]) ** 2, torch.full((3,), 11.0, dtype=F64), name="scalar")
    problem = dif.Problem(train.mean(), [(dif.linear([1.0]) <= 2.0).named("loose")])
    return dif.Solution(problem, {"w": torch.ones(1, dtype=F64)}, [10.0])


def stated(times, *, where=None, factor=2.0):
    """One inequality, stated once or twice (the second time scaled)."""
    if where is None:
        rows = [dif.linear([1.0, 1.0]) <= -1.0, dif.linear([factor, factor]) <= -factor]
        return dif.Problem(TRAIN.mean(), rows[:times])
    group = TRAIN.mean(where=where)
    free, least = solve(TRAIN.mean() + dif.ridge(0.1)), solve(group)
    bound = 0.5 * (least.objective + float(squares(free.params, (X, Y))[where].mean()))
    rows = [group <= bound, factor * group <= factor * bound]
    return dif.Problem(TRAIN.mean() + dif.ridge(0.1), rows[:times])


def saddle(params, z):
    w = params["w"]
    return z[:, 0] * (w[0] ** 2 - w[1] ** 2) / 2 + z[:, 1] * w.sum()


SADDLE = dif.Samples(saddle, torch.tensor([[1.0, 0.0]] * 3, dtype=F64), name="saddle")
