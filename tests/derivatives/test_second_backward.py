"""Losses and functions whose second backward pass is lost: another method replaces it, or they are refused."""

import pytest
import torch
from problems import F64, class_data
from refusals import invalid
from torch.autograd.function import once_differentiable

import dif
from dif.derivatives.losses import NO_SECOND_BACKWARD

QUIET = {"show_progress": False}
SOFTPLUS = torch.nn.functional.softplus


class Backward(torch.autograd.Function):
    """softplus with two backward passes and no forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.nn.functional.softplus(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].sigmoid()


class Lost(Backward):
    """The same, but its backward pass cannot be differentiated; torch.func takes it for a constant."""

    backward = staticmethod(once_differentiable(Backward.backward))


class Forward(Lost):
    """Lost, but with forward mode."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def jvp(ctx, t):
        return t * ctx.saved_tensors[0].sigmoid()


def state_problem(softplus=SOFTPLUS, of_function=SOFTPLUS, dtype=F64):
    X, y = (part.to(dtype) for part in class_data(n=160, d=3))
    loss = lambda p, z: softplus(-z[1] * (z[0] @ p["w"]))  # noqa: E731
    train = dif.Samples(loss, (X, y), name="train")
    bend = dif.Function(lambda p: 0.1 * of_function(p["w"]).sum(), name="bend")
    cap = dif.Function(lambda p: of_function(p["w"]).sum(), name="cap") <= 1.9
    return train, dif.Problem(train.mean() + bend + dif.ridge(0.1), [cap])


def compare(first, second, rtol):
    """Compare Hessians, derivatives and retrainings of two statements of the same problem."""
    answers = []
    for train, problem in (first, second):
        start = {"w": torch.zeros(3, dtype=train.storage.data[0].dtype)}
        solution = dif.fit(problem, start, **QUIET)
        assert solution.active.binding == (0,)
        removals = train.remove_each(range(5))
        scores = dif.DirectionalInfluence(solution).scores(train.mean(), removals, assess=0, **QUIET)
        retrained = dif.Retraining(solution).scores(train.mean(), removals, **QUIET)
        answers.append((solution.hessian, scores.values, retrained.values))
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * float(other.abs().max()), check_dtype=False)
    return scores.diagnostics["fallbacks"]


def test_of_a_function():
    assert compare(state_problem(), state_problem(of_function=Forward.apply), 1e-8) == [NO_SECOND_BACKWARD]


@pytest.mark.parametrize(("dtype", "rtol"), [(F64, 1e-8), (torch.float32, 1e-2)])
def test_of_a_loss(dtype, rtol):
    odd = state_problem(softplus=Forward.apply, dtype=dtype)
    assert compare(state_problem(dtype=dtype), odd, rtol) == [NO_SECOND_BACKWARD]


def test_a_loss_and_a_function_that_need_different_methods():
    odd = state_problem(softplus=Forward.apply, of_function=Backward.apply)
    assert NO_SECOND_BACKWARD in compare(state_problem(), odd, 1e-8)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_without_forward_mode_the_loss_is_refused(dtype):
    _, problem = state_problem(softplus=Lost.apply, dtype=dtype)
    invalid(
        lambda: dif.fit(problem, {"w": torch.full((3,), 0.1, dtype=dtype)}, **QUIET),
        "The second derivative of the loss of Samples 'train' differs from finite differences by",
        "What torch returns is not the derivative",
    )


@pytest.mark.parametrize("operator", [Backward.apply, Forward.apply])
def test_sweeps_through_training_take_the_pass_that_the_operator_has(operator):
    found = []
    for softplus in (SOFTPLUS, operator):
        train, problem = state_problem(softplus, softplus)
        start = {"w": torch.full((3,), 0.1, dtype=F64)}
        run = dif.Training(problem, start, dif.SGD(0.5), dif.Ascent(0.5), 20, 3).run(**QUIET)
        sweep = dif.UnrolledInfluence(run).scores
        found.append(sweep(train.mean(), train.remove_each(), probe=0, **QUIET).values)
        both = {"one": train.mean(), "other": 2 * train.mean()}
        found += sweep(both, train.remove_each(), probe=0, **QUIET).values.T[..., None] / torch.tensor(
            [[[1.0]], [[2.0]]]
        )
    for values in found[1:]:
        torch.testing.assert_close(values, found[0], rtol=1e-9, atol=1e-15)
