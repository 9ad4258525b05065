"""Invalid losses, functions, multipliers and perturbations are refused when they are evaluated."""

import re

import numpy as np
import pytest
import torch
from refusals import (
    CAP,
    ESTIMATORS,
    EYE,
    F64,
    GROUP,
    INF,
    NAN,
    OTHER,
    PROBLEM,
    START,
    TRAIN,
    X,
    Y,
    drawn,
    estimator,
    fit_loss,
    invalid,
    point,
    refused,
    samples,
    solution,
    solve,
    squares,
    table,
    through,
    untouched,
)
from torch import nn

import dif
from dif.runtime.guard import UserCodeError


def shaped(change):
    return lambda params, z: change(squares(params, z))


LOSSES = {
    "scalar": (shaped(torch.mean), "shape ()"),
    "column": (shaped(lambda loss: loss[:, None]), "shape (8, 1)"),
    "one too few": (shaped(lambda loss: loss[1:]), "shape (7,)"),
    "a number": (shaped(lambda loss: 1.0), "float"),
    "nothing": (shaped(lambda loss: None), "NoneType"),
    "a list": (shaped(list), "list"),
}


@table(LOSSES)
def test_a_loss_of_the_wrong_shape_is_refused(case):
    loss, measured = case
    texts = ("The loss of Samples 'odd' must return a tensor of shape (8,) for a batch of 8, one loss per sample",)
    invalid(lambda: fit_loss(loss), measured, *texts)
    invalid(lambda: estimator(dif.DirectionalInfluence).scores(samples(loss), TRAIN.remove(0)), measured, *texts)
    invalid(lambda: dif.Solution(dif.Problem(samples(loss).mean()), START), measured, *texts)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_loss_that_is_not_finite_is_refused_with_the_samples_named(bad):
    def loss(params, z):
        return torch.where(z[1] > limit, bad, squares(params, z))

    limit = float(torch.sort(Y).values[5])
    worst = torch.nonzero(limit < Y).reshape(-1).tolist()
    expected = f"NaN or infinite for 2 of 8 samples ({worst})"
    invalid(lambda: fit_loss(loss), expected, "log_softmax", "Samples 'odd'")
    invalid(lambda: estimator(dif.NewtonInfluence).scores(samples(loss), TRAIN.remove(0)), expected)


def dropout(params, z):
    return nn.functional.dropout(squares(params, z), 0.5, training=True)


def uniform(params, z):
    return squares(params, z) * torch.rand(len(z[1]), dtype=F64)


@pytest.mark.parametrize("loss", [dropout, uniform])
def test_a_random_loss_is_refused(loss):
    text = "It is random (dropout, augmentation, sampling), so there is no solution to differentiate."
    actions = [
        lambda: fit_loss(loss),
        lambda: dif.Solution(dif.Problem(samples(loss).mean()), START),
        lambda: estimator(dif.DirectionalInfluence).scores(samples(loss), TRAIN.remove(0)),
        lambda: estimator(dif.Retraining).scores(samples(loss).mean(), TRAIN.remove(0)),
    ]
    for action in actions:
        error = refused(dif.InvalidInputError, action, text, "model.eval()")
        assert error.allowed == "They must return the same values."
        found = r"Two calls of the loss of Samples 'odd' returned values that differ by up to (\S+)\."
        assert float(re.fullmatch(found, error.found).group(1)) > 0


def test_the_difference_of_two_calls_is_measured():
    calls = iter(range(100))
    loss = shaped(lambda losses: losses + 0.25 * (next(calls) % 2))
    invalid(lambda: fit_loss(loss), "returned values that differ by up to 0.25.")


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return X[i] + torch.randn(2, dtype=F64), Y[i]


def test_random_augmentation_in_a_dataset_is_refused():
    with pytest.raises(dif.InvalidInputError, match="Two calls of the loss of Samples 'odd'"):
        solve(samples(squares, Augmented()).mean(), params=point(1.0, 1.0))


def test_a_loss_that_mixes_the_samples_of_a_batch_is_refused():
    loss = shaped(lambda losses: losses - losses.mean())  # the loss of a single sample is 0
    meaning = (
        "The loss of a sample depends on the other samples of its batch (batch statistics, contrastive losses, "
        "a mean inside), so removing one is not a change of weights."
    )
    error = refused(dif.InvalidInputError, lambda: fit_loss(loss), meaning, "'odd'")
    losses = Y**2  # the first two samples are evaluated alone, the others in half batches
    whole, halves = losses - losses.mean(), torch.empty_like(losses)
    for half in (slice(0, None, 2), slice(1, None, 2)):
        halves[half] = losses[half] - losses[half].mean()
    halves[:2] = 0
    gap = float(((whole - halves).abs() / (1 + halves.abs())).max())
    found = f"The loss of a sample of 'odd' changes by {gap:.3g} of its size when its batch has other samples."
    assert error.found == found
    assert error.allowed == "The relative change must be at most 1e-08."


def test_an_error_inside_the_loss_names_the_samples():
    with untouched():
        error = refused(
            UserCodeError,
            lambda: fit_loss(lambda params, z: z[0] @ params["nope"]),
            "The exception was raised by your code, or by torch inside it.",
        )
    assert error.found == "The loss of Samples 'odd' raised KeyError: 'nope'."
    assert isinstance(error.__cause__, KeyError)


def test_a_loss_that_uses_no_parameter_is_refused():
    invalid(lambda: fit_loss(lambda p, z: z[1]), "depends on these parameters: w.", "detach")


def test_a_loss_that_hides_its_parameters_is_refused():
    hidden = lambda p, z: (z[0] @ p["w"].detach() - z[1]) ** 2  # noqa: E731
    text = "What torch returns is not the derivative, so neither a solution nor an influence can rest on it."
    refused(dif.InvalidInputError, lambda: fit_loss(hidden), text, "gradient of the loss of Samples 'odd'", ".detach()")


FUNCTIONS = {
    "a number": (lambda p: 3.0, "not a value of type float", "shape () or (rows,)"),
    "a matrix": (lambda p: torch.outer(p["w"], p["w"]), "The function 'odd' must return", "not shape (2, 2)"),
    "nan": (lambda p: (p["w"] - 5).log().sum(), "The function 'odd' must be finite", "[nan]"),
    "infinite rows": (lambda p: 1 / p["w"], "[inf, inf]", "must be finite where the work starts"),
}


@table(FUNCTIONS)
def test_functions_are_checked(case):
    fn, *expected = case
    odd = dif.Function(fn, name="odd")
    invalid(lambda: solve(TRAIN.mean(), [odd <= 1.0]), *expected)
    if fn is not FUNCTIONS["infinite rows"][0]:
        invalid(lambda: solve(TRAIN.mean() + odd), *expected)


PROGRAMS = {
    "missing name": (
        lambda: solve(TRAIN.mean(), [dif.linear([1.0, 1.0], of="v") <= 1.0]),
        "`of` of linear(A, of='v') must be one of w.",
    ),
    "columns": (
        lambda: solve(TRAIN.mean(), [dif.linear([1.0, 1.0, 1.0]) <= 1.0]),
        "`A` of linear(A) must have 2 columns, the number of scalars in the params, not 3.",
    ),
    "columns of one tensor": (
        lambda: solve(TRAIN.mean(), [dif.linear([1.0], of="w") <= 1.0]),
        "`A` of linear(A) must have 2 columns, the number of scalars in w, not 1.",
    ),
    "bounds": (
        lambda: solve(TRAIN.mean(), [EYE <= [1.0, 2.0, 3.0]]),
        "the same number of rows, or one row, not 2 and 3",
        "check the rows of A against the length of b",
    ),
    "vector objective": (
        lambda: solve(EYE),
        "The objective must be a single number, not a vector of length 2;",
    ),
    "vector added to the objective": (
        lambda: solve(TRAIN.mean() + np.ones(3)),
        "not a vector of length 3;",
    ),
}


@table(PROGRAMS)
def test_programs_refuse(case):
    invalid(*case)


MULTIPLIERS = {
    "too many": ([1.0, 2.0], "1 finite value, one per constraint row, not 2 values;"),
    "none": ([], "not 0 values;"),
    "nan": (torch.tensor([NAN]), "not 1 value, 1 not finite;", "leave them out to have them recovered"),
    "unknown name": (
        {"caps": 1.0},
        "unknown names ['caps'] and lacks the names ['cap']",
        "one entry for each of ['cap']",
    ),
    "missing name": ({}, "has unknown names [] and lacks the names ['cap']."),
}


@table(MULTIPLIERS)
@pytest.mark.parametrize("entry", [dif.Solution, lambda p, w, m: dif.fit(p, w, multipliers=m)], ids=["Solution", "fit"])
def test_multipliers_are_checked(case, entry):
    given, *expected = case
    invalid(lambda: entry(PROBLEM, START, given), *expected)


def test_multipliers_are_indexed_by_name_position_or_constraint():
    found = solution().multipliers
    assert found["cap"] == found[0] == found[CAP]
    with pytest.raises(KeyError, match=r"There is no constraint 'lid'. The constraints are cap."):
        found["lid"]
    for number in (9, -2):
        with pytest.raises(IndexError, match=f"There is no constraint {number}. The constraints are cap."):
            found[number]
    with pytest.raises(KeyError, match="There is no constraint None"):
        found[None]
    with pytest.raises(KeyError, match="not a constraint of this problem"):
        found[TRAIN.mean() <= 1.0]


def everywhere(perturbation, found, *texts):
    """Check that change and scores of every estimator refuse the perturbation."""
    for kind in ESTIMATORS:
        invalid(lambda kind=kind: estimator(kind).change(perturbation), found, *texts)
        invalid(lambda kind=kind: estimator(kind).scores(TRAIN.mean(), perturbation), found, *texts)


FOREIGN_TERM = TRAIN.mean()


FOREIGN_CONSTRAINT = TRAIN.mean() <= 1.0


RESOLVED = {
    "foreign samples": (
        OTHER.remove(0),
        "Samples 'other' cannot be perturbed: no term of the problem uses these samples.",
        "take them from solution.problem.samples",
    ),
    "samples that a term does not use": (
        TRAIN.remove(0, terms=[CAP]),
        "The perturbation of 'train' is restricted to terms that do not use these samples.",
    ),
    "foreign constraint": (
        FOREIGN_CONSTRAINT.shift(1.0),
        "Constraint(Term(mean of train) <= 1)",
        "is not a constraint of this problem",
        "problem.constraints[j]",
        "take them from solution.problem.constraints",
    ),
    "renamed constraint": (CAP.named("lid").shift(1.0), repr(CAP.named("lid")), "is not a constraint of this problem"),
    "equal term": (
        TRAIN.remove(0, terms=[FOREIGN_TERM]),
        "Term(mean of train)",
        "objective or constraint objects, not Term",
    ),
    "equal constraint": (
        TRAIN.reweight([1.0] * 8, terms=[FOREIGN_CONSTRAINT]),
        repr(FOREIGN_CONSTRAINT),
        "`terms` must contain the problem's own objective or constraint objects",
    ),
    "name of a term": (TRAIN.add((X[:1], Y[:1]), terms="objective"), "'objective'", "take them from solution.problem."),
    "rows of a shift": (CAP.shift([1.0, 2.0]), "The shift of cap must have 1 value, not 2."),
}


@table(RESOLVED)
def test_perturbations_that_are_not_of_the_problem_are_refused(case):
    everywhere(*case)


def test_removing_every_sample_of_a_term_is_refused():
    everyone = "(remove train[0, 1, 2, 3, 4, 5, … 8 in all]) leaves no samples in 'mean of train';"
    first = f"Perturbation 0 {everyone}"
    everywhere(TRAIN.remove(range(8)), first, "a term must keep at least one")
    everywhere(TRAIN.remove(range(8), terms=[PROBLEM.objective], renormalise=False), first)
    DIF = estimator(dif.DirectionalInfluence)
    groups = TRAIN.remove_groups([[0], range(8)])
    with pytest.warns(dif.FirstOrderWarning, match="1 of 2 perturbations have no answer"):
        found = DIF.scores(TRAIN, groups)
    assert f"Perturbation 1 {everyone}" in found.diagnostics["unanswered"][groups.labels[1]]
    assert "Restrict the removal" in found.diagnostics["unanswered"][groups.labels[1]]
    invalid(lambda: DIF.scores(TRAIN, groups[1]), first)


def masked():
    """Return a problem with means over two halves of the samples, and its DIF estimator."""
    problem = dif.Problem(TRAIN.mean(where=GROUP == 0), [(TRAIN.mean(where=GROUP == 1) <= 9.0).named("second half")])
    return problem, dif.DirectionalInfluence(dif.fit(problem, START, show_progress=False))


def test_removing_every_sample_of_a_constraint_is_refused_unless_terms_exclude_it():
    problem, DIF = masked()
    gone = "Perturbation 0 (remove train[4, 5, 6, 7]) leaves no samples in 'mean of 4 of train';"
    invalid(lambda: DIF.change(TRAIN.remove([4, 5, 6, 7])), gone)
    assert torch.equal(
        DIF.change(TRAIN.remove([4, 5, 6, 7], terms=[problem.objective])).flat.abs(), torch.zeros(2).double()
    )


def test_membership_of_added_samples_must_be_known():
    problem, DIF = masked()
    new = (X[:1], Y[:1])
    found = "It is unknown whether the samples added to 'train' belong to mean of 4 of train"
    invalid(lambda: DIF.change(TRAIN.add(new)), f"{found}, mean of 4 of train;", "pass like=i")
    objective = [problem.objective]
    invalid(lambda: DIF.change(TRAIN.add(new, terms=objective)), f"{found};", "pass like=i")
    assert torch.isfinite(DIF.change(TRAIN.add(new, like=0)).flat).all()


class Half(nn.Module):
    """A module that uses one of its two layers."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()

    def forward(self, x):
        return self.used(x)


HALF = Half()


EXTRA = {**point(0.0, 0.0), "extra": torch.zeros(2, dtype=F64)}


UNUSED = {
    "dict": (lambda: solve(TRAIN.mean(), params=EXTRA), "extra"),
    "dict with a ridge": (lambda: solve(TRAIN.mean() + dif.ridge(0.1), params=EXTRA), "extra"),
    "module": (lambda: solve(samples(through).mean() + dif.ridge(0.1), params=HALF), "idle.weight, idle.bias"),
}


@table(UNUSED)
def test_parameters_that_the_loss_does_not_use_are_refused_by_name(case):
    action, names = case
    found = f"No loss and no function other than a ridge depends on these parameters: {names}."
    invalid(action, found)


NO_DERIVATIVE = "counts and booleans have no derivative"


@pytest.mark.parametrize(("change", "dtype"), [(torch.Tensor.long, "torch.int64"), (lambda x: x > 0, "torch.bool")])
def test_a_loss_without_a_derivative_is_refused(change, dtype):
    found = "The loss of Samples 'odd' must return torch.float64, the type of the parameters"
    invalid(lambda: fit_loss(shaped(change)), found, f"not {dtype}", NO_DERIVATIVE)


def late_noise(params, z):
    noise = torch.rand(len(z[1]), dtype=F64) * (torch.arange(len(z[1])) > 20)
    return squares(params, z) * (1 + noise)


def dropped_features(params, z):
    return squares(params, (nn.functional.dropout(z[0], 0.5, training=True), z[1]))


RANDOM = {
    "augmentation": lambda: solve(samples(squares, Augmented()).mean(), params=point(1.0, 1.0)),
    "augmentation, at θ = 0": lambda: solve(samples(squares, Augmented()).mean()),
    "dropout of the features, at θ = 0": lambda: fit_loss(dropped_features),
    "function": lambda: solve(
        TRAIN.mean() + dif.Function(lambda p: (p["w"] * torch.rand(2, dtype=F64)).sum(), name="odd")
    ),
    "after the samples that are probed": lambda: fit_loss(late_noise, (drawn(40, 2), drawn(40))),
}


@table(RANDOM)
def test_all_randomness_is_refused(case):
    refused(dif.InvalidInputError, case, "odd", "random")


def test_a_loss_seeded_inside_works():
    def loss(params, z):
        return squares(params, z) * (1 + torch.rand((), generator=torch.Generator().manual_seed(0), dtype=F64))

    assert fit_loss(loss).converged


KINDS = {
    "loss of float32": lambda: fit_loss(shaped(torch.Tensor.float)),
    "function of float32": lambda: solve(TRAIN.mean() + dif.Function(lambda p: p["w"].float().sum(), name="odd")),
    "function of integers": lambda: solve(TRAIN.mean(), [dif.Function(lambda p: p["w"].long(), name="odd") <= 1.0]),
    "params of float16": lambda: solve(
        samples(squares, (X.half(), Y.half())).mean(), params={"w": torch.zeros(2, dtype=torch.half)}
    ),
    "all on the meta device": lambda: solve(
        samples(squares, (X.to("meta"), Y.to("meta"))).mean(), params={"w": torch.zeros(2, dtype=F64, device="meta")}
    ),
    "new samples on another device": lambda: estimator(dif.DirectionalInfluence).change(
        TRAIN.add((X[:1].to("meta"), Y[:1].to("meta")))
    ),
}


@table(KINDS)
def test_wrong_types_and_devices_are_refused(case):
    refused(dif.InvalidInputError, case)


def test_functions_must_have_the_type_of_the_parameters():
    odd = dif.Function(lambda p: p["w"].float().sum(), name="odd")
    invalid(lambda: solve(TRAIN.mean() + odd), "The function 'odd' must return", "not torch.float32", NO_DERIVATIVE)


def test_a_bare_batch_norm_is_refused_by_name():
    refused(dif.InvalidInputError, lambda: solve(TRAIN.mean(), params=nn.BatchNorm1d(2).double()), "BatchNorm1d")
