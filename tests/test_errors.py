"""Every refusal says what was measured, allowed and meant, and what to do; the user's objects stay as they are."""

import ast
import copy
import json
import pickle
import sys
from collections import namedtuple
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dif
from dif.linalg.cholesky import DenseCholesky
from dif.runtime.user_code import UserCodeError

F64 = torch.float64
NAN, INF = float("nan"), float("inf")
SOURCES = sorted(Path(dif.__file__).parent.rglob("*.py"))
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


# The user's objects


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


# What is checked of every refusal


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
    """The error that action raises: its class, the four parts, each of them and these texts in the message."""
    with untouched(*keep), pytest.raises(dif.DifError) as caught:
        action()
    error = caught.value
    assert type(error) is error_class, error
    parts = [str(part) for part in (error.what, error.measured, error.threshold, error.meaning, error.cure)]
    assert all(part.strip() for part in parts)
    assert str(error) == "{}: measured {}, allowed {}. {} {}".format(*parts)
    assert not any(part[0].islower() for part in parts[3:] if not part.startswith("dif "))
    assert all(part.endswith(".") for part in parts[3:])
    for text in texts:
        assert text in str(error)
    return error


def invalid(action, measured, *texts, keep=()):
    error = refused(dif.InvalidInputError, action, *texts, keep=keep)
    assert str(error.measured) == measured
    return error


def table(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


def texts_of(calls):
    """The literal strings of the `meaning` of every DifError built in the sources, with where they stand."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if name not in calls:
                continue
            for keyword in node.keywords:
                if keyword.arg == "meaning":
                    literals = [n.value for n in ast.walk(keyword.value) if isinstance(n, ast.Constant)]
                    yield from ((text, f"{path.name}:{node.lineno}") for text in literals if isinstance(text, str))


ELSEWHERE = (
    "linear_solvers",
    "zoo",
    "stale_files",
    "after",
    "units",
    "streams",
    "nonconvex",
    "cnn",
    "cli",
    "by_term",
    "plots",
    "cvxpy",
    "cooper",
    "sklearn",
    "habits",
    "path",
    "groups",
    "bound_curve",
    "choosing",
    "scale_out",
    "faults",
    "switching",
    "trust",
    "losses",
)


def test_every_text_is_asserted_here():
    asserted = {n.value for n in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(n, ast.Constant)}
    long = [text for text in asserted if isinstance(text, str) and len(text) > 12]
    others = [path for path in Path(__file__).parent.rglob("test_*.py") if path.stem.removeprefix("test_") in ELSEWHERE]
    assert len(others) == len(ELSEWHERE)
    elsewhere = "".join(path.read_text() for path in others)
    texts = list(texts_of({error.__name__ for error in ERRORS} | {"check_number"}))
    missing = [where for text, where in texts if not any(part in text for part in long) and text not in elsewhere]
    assert len(texts) > 60
    assert missing == []


@pytest.mark.parametrize("error_class", ERRORS)
def test_errors_travel_whole(error_class):
    error = error_class("thing", measured=3.5, threshold="at most 2", meaning="It is large.", cure="Make it small.")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is error_class
        assert str(other) == str(error) == "thing: measured 3.5, allowed at most 2. It is large. Make it small."
        assert vars(other) == vars(error)
    assert isinstance(error, dif.DifError)
    assert isinstance(error, ValueError)


# Samples

SAMPLES = {
    "loss and data swapped": (lambda: dif.Samples(X, squares, name="train"), "Tensor", "the loss comes first"),
    "batch_size zero": (lambda: samples(squares, batch_size=0), "0", "It is the number of samples per pass."),
    "batch_size negative": (lambda: samples(squares, batch_size=-2), "-2", "an integer ≥ 1"),
    "batch_size float": (lambda: samples(squares, batch_size=2.0), "2.0", "batch_size of Samples 'odd'"),
    "generator": (lambda: samples(squares, (x for x in X)), "generator", "countable and addressable by index"),
    "no data": (lambda: dif.Samples(squares, None, name="odd"), "NoneType", "Load an iterable into tensors first."),
    "unequal lengths": (lambda: samples(squares, (X, Y[:3])), "8, 3", "The first dimension of every tensor counts"),
    "a scalar": (lambda: samples(squares, torch.tensor(1.0)), "a scalar", "number of samples in 'odd'"),
    "zero samples": (lambda: samples(squares, X[:0]), "0", "one length ≥ 1"),
    "empty tuple": (lambda: samples(squares, ()), "no tensor", "Make the first dimensions equal."),
    "empty dict": (lambda: samples(squares, {}), "no tensor", "Make the first dimensions equal."),
    "empty dataset": (lambda: samples(squares, torch.utils.data.TensorDataset(X[:0])), "0", "one length ≥ 1"),
    "list of numbers": (lambda: samples(squares, [1.0, 2.0]), "a scalar, a scalar", "counts the samples"),
}


@table(SAMPLES)
def test_samples_refuse(case):
    invalid(*case)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("structure", ["tensor", "tuple", "dict"])
def test_data_that_is_not_finite_is_refused_with_the_samples_named(bad, structure):
    broken = X.clone()
    broken[3, 1] = broken[5, 0] = bad
    data = {"tensor": broken, "tuple": (broken, Y), "dict": {"x": broken, "y": Y}}[structure]
    expected = "NaN or infinite in 2 samples (3, 5)"
    invalid(lambda: samples(squares, data), expected, "A loss of such a sample is not finite", keep=[broken])


WHERE = {
    "short": ([True], "torch.bool, shape (1,), 1 true"),
    "integers": ([1, 0, 1, 0, 0, 0, 0, 0], "torch.int64, shape (8,), 2 true"),
    "nobody": ([False] * 8, "torch.bool, shape (8,), 0 true"),
    "two columns": (X > 0, f"torch.bool, shape (8, 2), {int((X > 0).sum())} true"),
}


@table(WHERE)
@pytest.mark.parametrize("method", [TRAIN.mean, TRAIN.sum])
def test_masks_are_checked(case, method):
    mask, measured = case
    invalid(lambda: method(where=mask), measured, "where= over 'train'", "The mask says which samples")


WEIGHTS = {
    "short": ([1.0], "shape (1,), 0 not finite, 1 nonzero"),
    "nan": ([NAN] * 8, "shape (8,), 8 not finite, 8 nonzero"),
    "zero": ([0.0] * 8, "shape (8,), 0 not finite, 0 nonzero"),
    "column": (torch.ones(8, 1), "shape (8, 1), 0 not finite, 8 nonzero"),
}


@table(WEIGHTS)
@pytest.mark.parametrize("method", [TRAIN.weighted, TRAIN.reweight])
def test_weights_are_checked(case, method):
    weights, measured = case
    invalid(lambda: method(weights), measured, "over 'train'", "One weight per sample is needed.", "shape (8,)")


INDICES = {
    "beyond": ([2, 8, 9], "8, 9", "No such sample."),
    "negative": ([-1], "-1", "No such sample."),
    "scalar beyond": (8, "8", "No such sample."),
    "huge": ([10**20], "100000000000000000000", "No such sample."),
    "float": ([1.0], "1.0", "No such sample."),
    "numpy float": (np.array([1.0]), "1.0", "No such sample."),
    "float tensor": (torch.tensor([1.0]), "1.0", "No such sample."),
    "nan": ([NAN], "nan", "No such sample."),
    "text": (["a"], "a", "No such sample."),
    "none": (None, "None", "No such sample."),
    "nested": ([[1, 2]], "[1, 2]", "No such sample."),
    "boolean mask": (torch.tensor([True, False, True]), "True, False, True", "use torch.nonzero(mask)"),
    "numpy mask": (np.array([True] * 3), "True, True, True", "use torch.nonzero(mask)"),
    "single bool": (True, "True", "use torch.nonzero(mask)"),
    "empty": ([], "none", "Nothing would change."),
    "twice": ([4, 1, 4, 1, 2], "1, 4 given more than once", "A sample can be removed only once."),
}


@table(INDICES)
@pytest.mark.parametrize(
    "method",
    [
        TRAIN.remove,
        TRAIN.remove_each,
        lambda index: TRAIN.remove_groups([[0, 1], index]),
        lambda index: TRAIN.replace(index, (X[:1], Y[:1])),
    ],
    ids=["remove", "remove_each", "remove_groups", "replace"],
)
def test_sample_indices_are_checked(case, method):
    index, measured, text = case
    if method == TRAIN.remove_each and index is None:
        assert len(method(index)) == 8  # None means every sample there
        return
    invalid(lambda: method(index), measured, "sample indices of 'train'", text)


def test_many_unknown_indices_are_counted():
    error = refused(dif.InvalidInputError, lambda: TRAIN.remove(range(100)), "92 in all", "integers 0 … 7")
    assert str(error.measured).startswith("8, 9, 10")


def test_no_group_is_refused():
    invalid(lambda: TRAIN.remove_groups([]), "none", "Each group is one perturbation.")
    invalid(lambda: TRAIN.remove_groups(3), "int", "Each group is one perturbation.")


@pytest.mark.parametrize(
    "index",
    [
        2,
        [2],
        (2,),
        {2},
        range(2, 3),
        iter([2]),
        np.int64(2),
        np.array([2]),
        [np.int32(2)],
        torch.tensor([2]),
        torch.tensor(2),
    ],
    ids=lambda index: type(index).__name__,
)
def test_every_kind_of_integer_is_an_index(index):
    assert TRAIN.remove(index).labels == ["remove train[2]"]


NEW_DATA = {
    "more columns": ((drawn(1, 3), Y[:1]), "(float64[3], float64[])"),
    "other dtype": ((X[:1].float(), Y[:1]), "(float32[2], float64[])"),
    "a tensor alone": (X[:1], "float64[2]"),
    "a dict": ({"x": X[:1], "y": Y[:1]}, "{x: float64[2], y: float64[]}"),
}


@table(NEW_DATA)
@pytest.mark.parametrize("method", [TRAIN.add, lambda data: TRAIN.replace(0, data)], ids=["add", "replace"])
def test_new_samples_of_another_structure_are_refused(case, method):
    data, measured = case
    text = "New samples go through the same loss"
    error = invalid(lambda: method(data), measured, "new data for 'train'", text)
    assert error.threshold == "(float64[2], float64[])"


LIKE = {
    "beyond": (8, "8", "No such sample."),
    "negative": (-1, "-1", "No such sample."),
    "one of them beyond": ([0, 1, 99], "99", "No such sample."),
    "bool": (True, "True", "No such sample."),
    "two for three": ([1, 2], "2 indices for 3 new samples", "takes the memberships of one old sample"),
    "empty": ([], "0 indices for 3 new samples", "1 or 3"),
}


@table(LIKE)
def test_like_is_checked(case):
    like, measured, text = case
    invalid(lambda: TRAIN.add((X[:3], Y[:3]), like=like), measured, text)


PERTURBATIONS = {
    "new data not finite": (
        lambda: TRAIN.add((X[:1], Y[:1] * NAN)),
        "NaN or infinite in 1 samples (0)",
        "data of Samples 'new train'",
    ),
    "fewer new than old": (
        lambda: TRAIN.replace([1, 2], (X[:1], Y[:1])),
        "1 new for 2 old",
        "Each new sample takes the place of one old sample.",
    ),
    "no terms": (lambda: TRAIN.remove(0, terms=[]), "an empty list", "Nothing would change."),
    "slice with step": (
        lambda: TRAIN.remove_each()[::2],
        "slice(None, None, 2)",
        "Perturbations are stored in consecutive rows.",
    ),
    "empty slice": (lambda: TRAIN.remove_each()[5:2], "slice(5, 2, None)", "inside 0 … 8"),
    "sum of different numbers": (
        lambda: TRAIN.remove_groups([[0], [1]]) + TRAIN.remove_each(),
        "2 + 8",
        "Perturbations are added pair by pair.",
    ),
    "shift not finite": (lambda: CAP.shift(NAN), "nan", "The bound moves by this much"),
    "shift by a matrix": (lambda: CAP.shift([[1.0]]), "[[1.0]]", "one finite number, or one per row"),
}


@table(PERTURBATIONS)
def test_perturbations_refuse(case):
    invalid(*case)


def test_a_missing_perturbation_ends_iteration():
    with pytest.raises(IndexError, match="perturbation 8 of 8"):
        TRAIN.remove_each()[8]
    assert len(list(TRAIN.remove_each())) == 8


# Terms and problems

TERMS = {
    "infinite bound": (lambda: TRAIN.mean() <= INF, "inf", "Bounds and factors must be finite."),
    "factor nan": (lambda: NAN * TRAIN.mean(), "nan", "Leave a constraint out"),
    "long bound": (lambda: TRAIN.mean() <= [NAN] * 10, "shape (10,)", "one finite number, or a vector"),
    "matrix bound": (lambda: TRAIN.mean() <= [[1.0, 2.0]], "[[1.0, 2.0]]", "one finite number, or a vector"),
    "linear nan": (
        lambda: dif.linear([[NAN, 1.0]]),
        "shape (1, 2), 1 entries not finite",
        "must be a number or a vector",
    ),
    "linear cube": (lambda: dif.linear(torch.ones(1, 1, 1)), "shape (1, 1, 1), 0 entries not finite", "A of linear(A)"),
    "linear empty": (lambda: dif.linear([]), "shape (0,), 0 entries not finite", "one row of coefficients"),
    "ridge negative": (lambda: dif.ridge(-1.0), "-1.0", "with c < 0 has no minimum"),
    "ridge nan": (lambda: dif.ridge(NAN), "nan", "a finite number ≥ 0"),
    "ridge infinite": (lambda: dif.ridge(INF), "inf", "a finite number ≥ 0"),
    "objective samples": (
        lambda: dif.Problem(TRAIN),
        "objective Samples, constraints sound",
        "Constraints are made by comparing Terms",
    ),
    "objective a constraint": (lambda: dif.Problem(CAP), "objective Constraint, constraints sound", "friends"),
    "constraint a bool": (
        lambda: dif.Problem(TRAIN.mean(), [CAP, True]),
        "objective Term, constraints bool",
        "friends",
    ),
    "constraint twice": (lambda: dif.Problem(TRAIN.mean(), [CAP, CAP]), "cap more than once", "each once"),
    "unnamed constraint twice": (
        lambda: dif.Problem(TRAIN.mean(), [(c := TRAIN.mean() <= 1.0), c]),
        "one constraint more than once",
        "Multipliers and reports are looked up",
    ),
    "name twice": (
        lambda: dif.Problem(TRAIN.mean(), [(TRAIN.mean() <= 1.0).named("a"), (TRAIN.mean() <= 2.0).named("a")]),
        "a more than once",
        ".named(...)",
    ),
}


@table(TERMS)
def test_terms_and_problems_refuse(case):
    invalid(*case)


OPERATORS = {
    "chained": (lambda: 0 <= TRAIN.mean() <= 1, "a Constraint has no truth value", "two constraints"),
    "truth": (lambda: bool(CAP), "a Constraint has no truth value", "compare Terms by `is`"),
    "if": (lambda: 1 if TRAIN.mean() == 1.0 else 2, "a Constraint has no truth value"),
    "not equal": (lambda: TRAIN.mean() != 1.0, "a Constraint has no truth value"),
    "less": (lambda: TRAIN.mean() < 1, "strict inequalities have no minimiser", "write <= (or >=)"),
    "greater": (lambda: TRAIN.mean() > 1, "strict inequalities have no minimiser"),
    "less from the left": (lambda: 0 < TRAIN.mean(), "strict inequalities have no"),
    "product": (lambda: TRAIN.mean() * TRAIN.mean(), "a Term scales by one number, not by Term", "dif.Function"),
    "times a vector": (lambda: TRAIN.mean() * [1.0, 2.0], "a Term scales by one number, not by list"),
    "times text": (lambda: TRAIN.mean() * "a", "a Term scales by one number, not by str"),
    "bound text": (lambda: TRAIN.mean() <= "a", "a Term compares with a Term or a number, not with str"),
    "bound none": (lambda: TRAIN.mean() == None, "a Term compares with a Term or a number, not with NoneType"),  # noqa: E711
    "plus none": (lambda: TRAIN.mean() + None, "unsupported operand"),
    "square": (lambda: TRAIN.mean() ** 2, "unsupported operand"),
    "divide by a term": (lambda: 1.0 / TRAIN.mean(), "unsupported operand"),
    "perturbation plus number": (lambda: TRAIN.remove(0) + 1, "unsupported operand"),
    "samples as a term": (lambda: TRAIN <= 1.0, "not supported between instances of 'Samples'"),
}


@table(OPERATORS)
def test_operators_that_mean_nothing_are_type_errors(case):
    action, *texts = case
    with untouched(), pytest.raises(TypeError) as caught:
        action()
    assert all(text in str(caught.value) for text in texts)


# Parameters

TWO = {"w": torch.zeros(2, dtype=F64), "v": torch.zeros(1)}
AWAY = {"w": torch.zeros(2, dtype=F64), "v": torch.zeros(1, dtype=F64, device="meta")}
PARAMS = {
    "a tensor": (X[0], "Tensor", "The names of the parameters are needed"),
    "none": (None, "NoneType", 'Wrap a single tensor as {"theta": tensor}.'),
    "a list": ([X[0]], "list", "a dict of tensors or an nn.Module"),
    "empty": ({}, "no tensor", "There is nothing to optimise."),
    "integer": ({"w": torch.zeros(2, dtype=torch.long)}, "torch.int64", "Only real-valued parameters", "'w'"),
    "complex": ({"w": torch.zeros(2, dtype=torch.cfloat)}, "torch.complex64", "Only real-valued parameters", "'w'"),
    "a number": ({"w": 1.0}, "float", "Only real-valued parameters can be differentiated.", "parameter 'w'"),
    "numpy": ({"w": np.zeros(2)}, "ndarray", "torch.as_tensor(value, dtype=torch.float64)"),
    "two dtypes": (TWO, "w: torch.float64, v: torch.float32", "dtype of the parameters", "Flat θ is one vector."),
    "two devices": (AWAY, "w: cpu, v: meta", "device of the parameters", "one device for all"),
    "nan": (point(1.0, NAN), "1 NaN or infinite of 2 entries", "parameter 'w'", "A point that is not finite"),
    "infinite": (point(INF, -INF), "2 NaN or infinite of 2 entries", "parameter 'w'"),
}


@table(PARAMS)
@pytest.mark.parametrize("entry", [dif.fit, dif.Solution, dif.Solution.from_params])
def test_params_are_checked(case, entry):
    params, *expected = case
    keep = [params] if isinstance(params, dict) and all(isinstance(t, torch.Tensor) for t in params.values()) else []
    invalid(lambda: entry(PROBLEM, params), *expected, keep=keep)


def test_a_frozen_module_has_nothing_to_optimise():
    model = nn.Linear(2, 1).double().requires_grad_(False)
    invalid(lambda: solve(TRAIN.mean(), params=model), "no tensor", "requires_grad=True", keep=[model])


def through(model, z):
    return (model(z[0])[:, 0] - z[1]) ** 2


NOISY = {
    "dropout": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)), "1 (Dropout)"),
    "batch norm": (lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), "1 (BatchNorm1d)"),
    "both, nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.AlphaDropout()), nn.BatchNorm1d(3), nn.Linear(3, 1)),
        "0.1 (AlphaDropout), 1 (BatchNorm1d)",
    ),
}


@table(NOISY)
def test_modules_in_training_mode_are_refused_by_name(case):
    build, names = case
    model, loss = build().double(), samples(through)
    text = "Their losses are random, or depend on the other samples"
    invalid(lambda: solve(loss.mean(), params=model), names, text, "Call model.eval()", keep=[model])
    assert dif.Solution(dif.Problem(loss.mean()), model.eval()).theta.numel() > 0


DATA_KINDS = {
    "float32": ((X.float(), Y.float()), "torch.float32 on cpu"),
    "one of them float32": ((X, Y.float()), "torch.float32 on cpu"),
    "other device": ((X.to("meta"), Y.to("meta")), "torch.float64 on meta"),
}


@table(DATA_KINDS)
def test_dtypes_and_devices_of_the_data_must_be_those_of_the_parameters(case):
    data, measured = case
    odd = samples(squares, data)
    text = "Mixed types lose digits silently"
    for action in (lambda: solve(odd.mean()), lambda: estimator(dif.Retraining).scores(odd, TRAIN.remove(0))):
        error = invalid(action, measured, "data of Samples 'odd'", text, keep=[data])
        assert error.threshold == "torch.float64 on cpu, as the parameters"


def test_parameters_on_another_device_than_the_data():
    away = {"w": torch.zeros(2, dtype=F64, device="meta")}
    text = "Fewer digits do not carry a second derivative, sparse tensors do not flatten, and the meta device is empty."
    found = "torch.float64, torch.strided, on meta"
    invalid(lambda: solve(TRAIN.mean(), params=away), found, "parameter 'w'", text)


@pytest.mark.parametrize("sparse", [torch.eye(2, dtype=F64).to_sparse(), torch.eye(2, dtype=F64).to_sparse_csr()])
def test_sparse_parameters_are_refused(sparse):
    invalid(lambda: solve(TRAIN.mean(), params={"w": sparse}), f"torch.float64, {sparse.layout}, on cpu", "to_dense")


def test_a_point_without_a_second_derivative_is_refused():
    odd = dif.Samples(lambda p, z: (z[0] @ p["w"]) ** 2 + (p["w"].abs() ** 1.5).sum(), (X, Y), name="odd")
    solution = dif.Solution(dif.Problem(odd.mean() + dif.ridge(1.0)), point(0.0, 0.0))
    for strict in (True, False):
        invalid(
            lambda strict=strict: dif.DirectionalInfluence(solution, strict=strict),
            "NaN or infinite",
            "curvature at the given parameters",
            "The point has no second derivative there (a norm or a root at 0), so it cannot be judged.",
        )


# Losses and functions, asked before any number is trusted


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
    texts = ("what the loss of Samples 'odd' returned", "the loss of each sample by itself", 'reduction="none"')
    error = invalid(lambda: fit_loss(loss), measured, *texts)
    assert error.threshold == "a tensor of shape (8,) for a batch of 8"
    invalid(lambda: estimator(dif.DirectionalInfluence).scores(samples(loss), TRAIN.remove(0)), measured, *texts)
    invalid(lambda: dif.Solution(dif.Problem(samples(loss).mean()), START), measured, *texts)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_loss_that_is_not_finite_is_refused_with_the_samples_named(bad):
    def loss(params, z):
        return torch.where(z[1] > limit, bad, squares(params, z))

    limit = float(torch.sort(Y).values[5])
    worst = torch.nonzero(limit < Y).reshape(-1).tolist()
    expected = f"NaN or infinite for 2 of 8 samples ({worst})"
    invalid(lambda: fit_loss(loss), expected, "losses of 'odd'", "Their sum, and every derivative of it")
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
        error = refused(dif.InvalidInputError, action, "two calls of the loss of Samples 'odd'", text, "model.eval()")
        assert error.threshold == "0"
        assert float(str(error.measured).removeprefix("values that differ by up to ")) > 0


def test_the_difference_of_two_calls_is_measured():
    calls = iter(range(100))
    loss = shaped(lambda losses: losses + 0.25 * (next(calls) % 2))
    error = refused(dif.InvalidInputError, lambda: fit_loss(loss))
    assert error.measured == "values that differ by up to 0.25"


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return X[i] + torch.randn(2, dtype=F64), Y[i]


def test_random_augmentation_in_a_dataset_is_refused():
    with pytest.raises(dif.InvalidInputError, match="two calls of the loss of Samples 'odd'"):
        solve(samples(squares, Augmented()).mean(), params=point(1.0, 1.0))


def test_a_loss_that_mixes_the_samples_of_a_batch_is_refused():
    loss = shaped(lambda losses: losses - losses.mean())  # alone every loss is 0
    error = refused(dif.InvalidInputError, lambda: fit_loss(loss), "depends on the other samples of its batch", "'odd'")
    losses = Y**2  # of the first two samples by themselves nothing is left, of the others half of the batch
    whole, halves = losses - losses.mean(), torch.empty_like(losses)
    for some in (slice(0, None, 2), slice(1, None, 2)):
        halves[some] = losses[some] - losses[some].mean()
    halves[:2] = 0
    gap = float(((whole - halves).abs() / (1 + halves.abs())).max())
    assert error.measured == f"values that differ by {gap:.3g} of their size"
    assert error.threshold == "1e-08"


def test_an_error_inside_the_loss_says_whose_loss_it_was():
    with untouched():
        error = refused(
            UserCodeError,
            lambda: fit_loss(lambda params, z: z[0] @ params["nope"]),
            "It was raised by your code, or by torch inside it.",
        )
    assert error.what == "loss of Samples 'odd'"
    assert error.measured == "KeyError: 'nope'"
    assert isinstance(error.__cause__, KeyError)


def test_a_loss_that_uses_no_parameter_is_refused():
    texts = ("parameters that nothing depends on", "No loss and no function (a ridge apart) uses them", "detach")
    invalid(lambda: fit_loss(lambda p, z: z[1]), "w", *texts)


def test_a_loss_that_hides_its_parameters_is_refused():
    hidden = lambda p, z: (z[0] @ p["w"].detach() - z[1]) ** 2  # noqa: E731
    text = "What torch returns is not the derivative, so neither a solution nor an influence can rest on it."
    refused(dif.InvalidInputError, lambda: fit_loss(hidden), text, "gradient of the loss of Samples 'odd'", ".detach()")


FUNCTIONS = {
    "a number": (lambda p: 3.0, "float", "one number, or one per row"),
    "a matrix": (lambda p: torch.outer(p["w"], p["w"]), "shape (2, 2)", "what the function 'odd' returned"),
    "nan": (lambda p: (p["w"] - 5).log().sum(), "[nan]", "value of the function 'odd'", "part of an objective"),
    "infinite rows": (lambda p: 1 / p["w"], "[inf, inf]", "Start where the function is finite."),
}


@table(FUNCTIONS)
def test_functions_are_checked(case):
    fn, *expected = case
    odd = dif.Function(fn, name="odd")
    invalid(lambda: solve(TRAIN.mean(), [odd <= 1.0]), *expected)
    if fn is not FUNCTIONS["infinite rows"][0]:
        invalid(lambda: solve(TRAIN.mean() + odd), *expected)


EYE = dif.linear(torch.eye(2))
PROGRAMS = {
    "missing name": (
        lambda: solve(TRAIN.mean(), [dif.linear([1.0, 1.0], of="v") <= 1.0]),
        "no parameter 'v'",
        "one of w",
        "The tensor that A multiplies is not among the params.",
    ),
    "columns": (
        lambda: solve(TRAIN.mean(), [dif.linear([1.0, 1.0, 1.0]) <= 1.0]),
        "3",
        "2, the number of scalars in the params",
        "Each column multiplies one entry of θ.",
    ),
    "columns of one tensor": (
        lambda: solve(TRAIN.mean(), [dif.linear([1.0], of="w") <= 1.0]),
        "1",
        "2, the number of scalars in w",
    ),
    "bounds": (
        lambda: solve(TRAIN.mean(), [EYE <= [1.0, 2.0, 3.0]]),
        "2 and 3",
        "Functions and bounds in one expression",
        "Check the rows of A against the length of b.",
    ),
    "vector objective": (
        lambda: solve(EYE),
        "a vector of 2",
        "rows of the objective",
        "Only a single number can be minimised.",
    ),
    "vector added to the objective": (
        lambda: solve(TRAIN.mean() + np.ones(3)),
        "a vector of 3",
        "rows of the objective",
    ),
    "no iterations": (
        lambda: solve(TRAIN.mean(), max_iter=0),
        "max_iter=0, max_seconds=None",
        "Nothing could be done within them.",
    ),
    "no time": (lambda: solve(TRAIN.mean(), max_seconds=0), "max_iter=20000, max_seconds=0", "both positive"),
    "no iterations to retrain": (
        lambda: dif.Retraining(solution(), max_iter=0).change(TRAIN.remove(0)),
        "max_iter=0, max_seconds=None",
        "limits of fit",
    ),
}


@table(PROGRAMS)
def test_programs_refuse(case):
    invalid(*case)


MULTIPLIERS = {
    "too many": ([1.0, 2.0], "2 values, 0 not finite", "Every row of every constraint has one multiplier."),
    "none": ([], "0 values, 0 not finite", "1 finite values, one per constraint row"),
    "nan": (torch.tensor([NAN]), "1 values, 1 not finite", "leave them out: they are recovered"),
    "unknown name": (
        {"caps": 1.0},
        "unknown ['caps'], missing ['cap']",
        "Each constraint has its own multipliers.",
        "one for each of ['cap']",
    ),
    "missing name": ({}, "unknown [], missing ['cap']", "names of the multipliers"),
}


@table(MULTIPLIERS)
@pytest.mark.parametrize("entry", [dif.Solution, lambda p, w, m: dif.fit(p, w, multipliers=m)], ids=["Solution", "fit"])
def test_multipliers_are_checked(case, entry):
    given, *expected = case
    invalid(lambda: entry(PROBLEM, START, given), *expected)


def test_multipliers_are_looked_up_by_what_the_problem_has():
    found = solution().multipliers
    assert found["cap"] == found[0] == found[CAP]
    with pytest.raises(KeyError, match="no constraint 'lid'; there are cap"):
        found["lid"]
    with pytest.raises(KeyError, match="not a constraint of this problem"):
        found[TRAIN.mean() <= 1.0]


# Perturbations of a problem


def everywhere(perturbation, measured, *texts):
    """Refused by change and scores of every estimator."""
    for kind in ESTIMATORS:
        invalid(lambda kind=kind: estimator(kind).change(perturbation), measured, *texts)
        invalid(lambda kind=kind: estimator(kind).scores(TRAIN.mean(), perturbation), measured, *texts)


FOREIGN_TERM = TRAIN.mean()
FOREIGN_CONSTRAINT = TRAIN.mean() <= 1.0
RESOLVED = {
    "foreign samples": (
        OTHER.remove(0),
        "no term of the problem uses these samples",
        "perturbation of 'other'",
        "Samples are told apart by identity.",
    ),
    "foreign constraint": (
        FOREIGN_CONSTRAINT.shift(1.0),
        "Constraint(Term(mean of train) <= 1)",
        "Constraints are told apart by identity",
        "problem.constraints[j]",
    ),
    "renamed constraint": (CAP.named("lid").shift(1.0), repr(CAP.named("lid")), ".named(...) makes a new one"),
    "equal term": (
        TRAIN.remove(0, terms=[FOREIGN_TERM]),
        "Term(mean of train)",
        "Terms are told apart by identity.",
    ),
    "equal constraint": (TRAIN.reweight([1.0] * 8, terms=[FOREIGN_CONSTRAINT]), repr(FOREIGN_CONSTRAINT), "terms="),
    "name of a term": (TRAIN.add((X[:1], Y[:1]), terms="objective"), "'objective'", "Use problem.objective"),
    "rows of a shift": (CAP.shift([1.0, 2.0]), "2 values", "shift of cap", "A shift moves every row alike"),
}


@table(RESOLVED)
def test_perturbations_that_are_not_of_the_problem_are_refused(case):
    everywhere(*case)


def test_removing_every_sample_of_a_term_is_refused():
    everyone = "samples left in 'mean of train' after perturbation 0 (remove train[0, 1, 2, 3, 4, 5, … 8 in all])"
    everywhere(TRAIN.remove(range(8)), "0", everyone, "A term without samples is not defined")
    everywhere(TRAIN.remove(range(8), terms=[PROBLEM.objective], renormalise=False), "0", everyone)
    DIF = estimator(dif.DirectionalInfluence)
    second = "after perturbation 1 (remove train[0, 1, 2, 3, 4, 5, … 8 in all])"
    invalid(lambda: DIF.scores(TRAIN, TRAIN.remove_groups([[0], range(8)])), "0", second, "restrict the removal")


def masked():
    problem = dif.Problem(TRAIN.mean(where=GROUP == 0), [(TRAIN.mean(where=GROUP == 1) <= 9.0).named("second half")])
    return problem, dif.DirectionalInfluence(dif.fit(problem, START, show_progress=False))


def test_removing_every_sample_of_a_constraint_is_refused_unless_kept_out_of_it():
    problem, DIF = masked()
    gone = "samples left in 'mean of 4 of train' after perturbation 0 (remove train[4, 5, 6, 7])"
    invalid(lambda: DIF.change(TRAIN.remove([4, 5, 6, 7])), "0", gone)
    assert torch.equal(
        DIF.change(TRAIN.remove([4, 5, 6, 7], terms=[problem.objective])).flat.abs(), torch.zeros(2).double()
    )


def test_membership_of_added_samples_must_be_known():
    problem, DIF = masked()
    new = (X[:1], Y[:1])
    text = "Only you know whether a new sample is in a masked mean"
    measured = "unknown in mean of 4 of train, mean of 4 of train"
    invalid(lambda: DIF.change(TRAIN.add(new)), measured, "membership of the samples added to 'train'", text)
    objective = [problem.objective]
    invalid(lambda: DIF.change(TRAIN.add(new, terms=objective)), "unknown in mean of 4 of train", "Say like=i")
    assert torch.isfinite(DIF.change(TRAIN.add(new, like=0)).flat).all()


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_change_takes_one_perturbation(kind):
    text = "What is done to the data must be said by train.remove"
    invalid(lambda: estimator(kind).change(3), "int", text)
    invalid(lambda: estimator(kind).change([TRAIN.remove(0)]), "list", text)
    many = TRAIN.remove_each()
    invalid(lambda: estimator(kind).change(many), "8", "A Change is the answer to one perturbation.")


TARGETS = {
    "none": (None, "NoneType"),
    "text": ("loss", "str"),
    "no terms": ([], "list"),
    "a number": (3.0, "float"),
    "a function": (squares, "function"),
    "a constraint": (CAP, "Constraint"),
    "a mixed list": ([TRAIN.mean(), 3.0], "list"),
    "a tensor": (X, "Tensor"),
    "a list of samples": ([TRAIN], "list"),
    "a problem": (PROBLEM, "Problem"),
}


@table(TARGETS)
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_targets_are_checked(case, kind):
    target, measured = case
    text = "A score is the change of a number that depends on the parameters."
    invalid(lambda: estimator(kind).scores(target, TRAIN.remove(0)), measured, text, "dif.Samples(loss, test_data)")


def roots(params, z):
    return (z + params["t"] ** 2).sqrt()


@cache
def kinked():
    """θ̄ = 0, where the loss of a new sample z = 0 has no derivative."""
    train = dif.Samples(roots, torch.ones(4, dtype=F64), name="roots")
    return train, solve(train.mean(), params={"t": torch.zeros((), dtype=F64)})


@pytest.mark.parametrize("kind", ESTIMATORS[:3])
def test_scores_refuse_perturbed_samples_without_a_derivative(kind):
    train, at = kinked()
    added = train.add(torch.tensor([0.0, 2.0], dtype=F64))
    texts = (
        "losses or gradients of the perturbed samples of 'new roots'",
        "The influence of such a sample is not defined.",
    )
    invalid(lambda: kind(at).scores(train.mean(), added), "1 of 2 not finite", *texts)


# Solutions and the existence of the derivative


def test_an_infeasible_problem_is_named_with_its_violation():
    low, high = (dif.linear([1.0, 0.0]) <= -1.0).named("low"), (dif.linear([1.0, 0.0]) >= 2.0).named("high")
    error = refused(
        dif.InfeasibleError, lambda: solve(TRAIN.mean(), [low, high]), "The constraints contradict each other"
    )
    assert error.what.split()[:3] in (["violation", "of", "low"], ["violation", "of", "high"])
    assert float(error.measured) == pytest.approx(1.5, rel=1e-3)  # half of the gap for each
    twice = [dif.linear([1.0, 0.0]) == 1.0, dif.linear([1.0, 0.0]) == 2.0]
    error = refused(dif.InfeasibleError, lambda: solve(TRAIN.mean(), twice), "violation of constraint")
    assert float(error.measured) == pytest.approx(0.5, rel=1e-3)


def test_an_infeasible_constraint_on_the_data():
    least = float(solve(TRAIN.mean()).objective)
    action = lambda: solve(dif.ridge(1.0) + 0 * TRAIN.mean(), [(TRAIN.mean() <= 0.01).named("tight")])  # noqa: E731
    error = refused(dif.InfeasibleError, action, "violation of tight", "Loosen that bound")
    assert float(error.measured) == pytest.approx(least - 0.01, rel=1e-2)


UNBOUNDED = {
    "linear": (lambda: solve(dif.linear([1.0, 1.0])), "penalty raised 0 times"),
    "concave": (lambda: solve(-TRAIN.mean()), "penalty raised 0 times"),
    "along a constraint": (lambda: solve(dif.linear([1.0, 1.0]), [dif.linear([1.0, 0.0]) >= 0.0]), "penalty raised"),
}


@table(UNBOUNDED)
def test_an_unbounded_problem_is_refused(case):
    action, text = case
    error = refused(dif.UnboundedError, action, text, "The objective falls without end", "Add a ridge")
    assert error.threshold == "a minimum at finite θ"


def logistic(params, z):
    return nn.functional.softplus(-torch.sign(z[1]) * (z[0] @ params["w"]))


LIMITS = {
    "max_iter": ({"max_iter": 1}, "after 1 iterations (max_iter)"),
    "max_seconds": ({"max_seconds": 1e-9}, "(max_seconds)"),
}


@table(LIMITS)
def test_fit_warns_where_a_limit_came_first(case):
    limit, text = case
    with untouched(), pytest.warns(dif.NotConvergedWarning) as caught:
        found = solve(samples(logistic).mean() + dif.ridge(0.1), **limit)
    message = str(caught[0].message)
    assert f"measured residual {found.kkt.residual:.3g} ({found.kkt}), allowed 1e-10" in message
    assert text in message
    assert "The point is not a solution. Raise max_iter or max_seconds" in message
    assert not found.converged
    assert found.kkt.residual > found.tol
    refused(dif.NotASolutionError, lambda: dif.DirectionalInfluence(found), f"{found.kkt.residual:.3g}")


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


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_point_that_is_not_a_solution_is_refused_with_its_residual(kind):
    texts = ("The point does not solve the problem", "dif.fit(problem, solution.params)")
    at = not_stationary()
    gradient, root = 2 * X.T @ Y / 8, (2 * X.T @ X / 8).diagonal().sqrt()
    residual = float((gradient / root).norm()) / at.scales.size  # θ = 0: in units of what the samples would move
    assert residual == pytest.approx(at.kkt.stationarity)
    assert 0.3 < at.scales.size / float((2 * X * Y[:, None] / 8 / root).norm()) < 3
    error = refused(
        dif.NotASolutionError, lambda: kind(at), *texts, "stationarity", f"‖∇L‖ = {float(gradient.norm()):.3g}"
    )
    assert error.measured.startswith(f"{residual:.3g} (stationarity {residual:.2e}")
    assert error.threshold == "0.0001"

    error = refused(dif.NotASolutionError, lambda: kind(not_feasible()), *texts, "feasibility (worst at cap)")
    units = not_feasible().scales
    root = (2 * X.T @ X / 8).diagonal().sqrt()
    assert float(units.norms[0]) == pytest.approx(float((1 / root).norm()))
    away = 2 / (float(units.norms[0]) * units.size)  # f − τ = 2
    assert error.measured.startswith(f"{away:.3g} (")
    assert f"feasibility {away:.2e}" in error.measured

    error = refused(
        dif.NotASolutionError, lambda: kind(not_complementary()), *texts, "complementarity (worst at loose)"
    )
    gap = 1 / 3**0.5 / (10 / 3)  # slack 1 in units of what the three samples, of gradient −10/3 each, would move
    assert error.measured.startswith(
        f"{gap:.3g} (stationarity 0.00e+00, feasibility 0.00e+00, complementarity {gap:.2e}"
    )


@pytest.mark.parametrize("kind", ESTIMATORS[:4])
@pytest.mark.parametrize("bad", [not_stationary, not_feasible], ids=lambda f: f.__name__)
def test_without_strict_a_point_that_is_not_a_solution_is_recorded_and_answered(kind, bad):
    at = bad()
    with untouched():
        change = kind(at, strict=False).change(TRAIN.remove(0))
        scores = kind(at, strict=False).scores(TRAIN.mean(), TRAIN.remove_each())
    for answer in (change, scores):
        assert answer.diagnostics["kkt"] == {
            "stationarity": at.kkt.stationarity,
            "feasibility": at.kkt.feasibility,
            "complementarity": at.kkt.complementarity,
        }
    assert at.kkt.residual > at.tol
    assert not at.converged
    assert torch.isfinite(change.flat).all()
    assert torch.isfinite(scores.values).all()


def test_retraining_without_strict_records_the_start():
    change = dif.Retraining(not_feasible(), strict=False).change(TRAIN.remove(0))
    assert change.diagnostics["kkt"]["feasibility"] == not_feasible().kkt.feasibility


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


DUPLICATES = {"linear": None, "of the data": GROUP == 1}


@pytest.mark.parametrize("where", DUPLICATES.values(), ids=DUPLICATES.keys())
@pytest.mark.parametrize("split", [False, True], ids=["one carries λ", "both carry λ"])
def test_dependent_active_gradients_are_refused_or_recorded(where, split):
    once, twice = stated(1, where=where), stated(2, where=where)
    good = dif.fit(once, START, show_progress=False)
    lam = float(good.lam[0])
    assert lam > 0.1
    assert good.active.binding == (0,)
    doubled = dif.Solution(twice, good.params, [lam / 2, lam / 4] if split else [lam, 0.0])
    assert doubled.converged

    texts = (
        "independence of the active constraints (constraint 0, constraint 1)",
        "(LICQ fails), so the multipliers are not unique",
        "strict=False",
    )
    for kind in (dif.DirectionalInfluence, dif.NewtonInfluence):
        error = refused(dif.DegenerateError, lambda kind=kind: kind(doubled), *texts)
        assert error.measured == f"smallest singular value {doubled.active.licq:.3g} of their scaled gradients"
        assert doubled.active.licq < 1e-12
        assert error.threshold == "above 1.5e-08"

    removals = TRAIN.remove_groups([[0], [5], [4, 6], [1, 7]])
    for options in ({}, {"switching": True}):
        strict = dif.DirectionalInfluence(good, **options)
        loose = dif.DirectionalInfluence(doubled, strict=False, **options)
        assert loose.scores(TRAIN, removals).diagnostics["licq"] == doubled.active.licq
        gap = loose.scores(TRAIN, removals).values - strict.scores(TRAIN, removals).values
        assert gap.abs().max() < 1e-9
        for removal in (*removals, TRAIN.remove(5, renormalise=False), TRAIN.reweight(torch.arange(8) / 80)):
            assert (loose.change(removal).flat - strict.change(removal).flat).abs().max() < 1e-9
    for removal in removals:
        gap = (
            dif.NewtonInfluence(doubled, strict=False).change(removal).flat
            - dif.NewtonInfluence(good).change(removal).flat
        )
        assert gap.abs().max() < 1e-9


def test_duplicated_weak_constraints_answer_like_one_without_strict():
    free = solve(TRAIN.mean())
    limit = float(free.theta.sum())
    rows = [dif.linear([1.0, 1.0]) <= limit, dif.linear([3.0, 3.0]) <= 3 * limit]
    one = dif.DirectionalInfluence(dif.Solution(dif.Problem(TRAIN.mean(), rows[:1]), free.params, [0.0]))
    at = dif.Solution(dif.Problem(TRAIN.mean(), rows), free.params, [0.0, 0.0])
    assert at.active.weak == (0, 1)
    refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(at), "LICQ fails")
    two = dif.DirectionalInfluence(at, strict=False)
    for removal in TRAIN.remove_each():
        assert (one.change(removal).flat - two.change(removal).flat).abs().max() < 1e-9


def saddle(params, z):
    w = params["w"]
    return z[:, 0] * (w[0] ** 2 - w[1] ** 2) / 2 + z[:, 1] * w.sum()


SADDLE = dif.Samples(saddle, torch.tensor([[1.0, 0.0]] * 3, dtype=F64), name="saddle")


def test_no_positive_curvature_on_the_tangent_space_is_refused():
    at = dif.Solution(dif.Problem(SADDLE.mean(), [dif.linear([1.0, 0.0]) == 0.0]), START)
    texts = ("curvature of the Lagrangian along the binding constraints", "The solution is not a strict minimum there")
    for kind in (dif.DirectionalInfluence, dif.NewtonInfluence):
        error = refused(dif.DegenerateError, lambda kind=kind: kind(at), *texts, "Add a ridge")
        assert error.measured == "smallest eigenvalue -1"
        assert error.threshold == f"above {at.active.curvature_floor:.1e} of each coordinate's own"
    # without strict there is still no unique answer, and none is given
    error = refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(at, strict=False), "pivots of the curvature")
    assert error.measured == "one not positive"
    none = dif.NewtonInfluence(at, strict=False).change(SADDLE.remove(0))
    assert bool(torch.isnan(none.flat).all())
    assert "curvature of the linearised problem" in none.diagnostics["unanswered"]


def test_a_flat_direction_is_refused_and_damping_is_the_named_way_out():
    flat = samples(lambda p, z: (z[0][:, 0] * p["w"].sum() - z[1]) ** 2, name="flat")
    at = solve(flat.mean())
    error = refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(at), "it is not unique, or it is a saddle")
    assert abs(float(error.measured.removeprefix("smallest eigenvalue "))) < 1e-12
    for kind in (dif.ClassicalInfluence, dif.PenaltyInfluence):
        refused(dif.DegenerateError, lambda kind=kind: kind(at), "no unique solution", "or pass damping")
    damped = dif.DirectionalInfluence(at, damping=0.1).change(flat.remove(0))
    assert damped.diagnostics["damping"] == 0.1


def test_a_linear_solve_that_misses_its_tolerance_is_refused():
    # no problem reaches this through the public API: Cholesky with refinement is backward stable
    H = torch.tensor([[3.0, 1.0], [1.0, 0.7]], dtype=F64)
    solver = DenseCholesky(H, tolerance=0.0)
    text = "The curvature is too badly conditioned for this precision."
    error = refused(
        dif.NotConvergedError, lambda: solver.solve(drawn(2, 5)), "relative residual of the linear solve", text
    )
    assert error.measured == f"{solver.residual:.3g}"
    assert error.threshold == "0"


def test_a_pivot_of_rounding_size_is_refused():
    thin = dif.Function(lambda p: 0.5 * p["w"].sum() ** 2 + 0.5e-15 * p["w"][1] ** 2, name="thin")
    at = dif.Solution(dif.Problem(thin), START)
    error = refused(dif.DegenerateError, lambda: dif.ClassicalInfluence(at), "The curvature is not positive definite")
    assert error.measured.startswith("smallest ")
    assert 0 <= float(error.measured.split()[1]) < 2.2e-14
    assert error.threshold == "all above 2.2e-14"


@cache
def held():
    """Convex only while the constraint w₁ ≤ 1 holds; λ̄ = 1."""
    problem = dif.Problem(SADDLE.mean(), [(dif.linear([0.0, 1.0]) <= 1.0).named("wall")])
    return dif.Solution(problem, point(0.0, 1.0))


def test_a_constraint_that_lets_go_where_only_it_kept_the_problem_convex():
    at = held()
    assert at.active.binding == (0,)
    push = SADDLE.add(torch.tensor([[1.0, 5.0]], dtype=F64))  # λ = 1 − 5/4 after it
    switching = dif.DirectionalInfluence(at, switching=True)
    for action in (
        lambda: switching.change(push),
        lambda: switching.scores(SADDLE.mean(), push),
        lambda: switching.reevaluated(SADDLE.mean(), push),
    ):
        error = refused(dif.DegenerateError, action, "multiplier of wall after the step", "The constraint lets go, but")
        assert error.measured == "-0.25"
        assert error.threshold == "≥ 0"
    lenient = dif.DirectionalInfluence(at, switching=True, strict=False)
    for answer in (lenient.scores(SADDLE.mean(), push), lenient.reevaluated(SADDLE.mean(), push)):
        assert bool(answer.values.isnan().all())
        assert "lets go" in answer.diagnostics["unanswered"][push.labels[0]]
    assert bool(lenient.change(push).flat.isnan().all())
    newton = dif.NewtonInfluence(at)
    for action in (lambda: newton.change(push), lambda: newton.scores(SADDLE.mean(), push)):
        text = "The quadratic problem of the step has no minimum"
        refused(dif.DegenerateError, action, "curvature of the linearised problem", text, "DirectionalInfluence")
    assert torch.isfinite(dif.DirectionalInfluence(at).change(push).flat).all()
    refused(dif.UnboundedError, lambda: dif.Retraining(at).change(push), "The objective falls without end")
    refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(at, rho=1e-3), "pivots of the curvature")


def test_bounds_of_dependent_constraints_that_move_apart_are_refused():
    equalities = dif.Problem(TRAIN.mean(), [dif.linear([1.0, 1.0]) == -1.0, dif.linear([2.0, 2.0]) == -2.0])
    at = dif.DirectionalInfluence(dif.Solution(equalities, solution().params), strict=False)
    first, second = equalities.constraints
    unanswered(at, first.shift(1.0), "equalities moved apart by")
    together = at.scores(TRAIN, first.shift(1.0) + second.shift(2.0)).values
    derivative = dif.DirectionalInfluence(solution(), switching=False)
    assert (together - derivative.scores(TRAIN, CAP.shift(1.0)).values).abs().max() < 1e-9

    twice = stated(2)
    at = dif.DirectionalInfluence(dif.Solution(twice, solution().params, [float(solution().lam[0]), 0.0]), strict=False)
    unanswered(at, twice.constraints[1].shift(-1.0), "moved past them")
    assert torch.equal(at.scores(TRAIN, twice.constraints[1].shift(1.0)).values.abs(), torch.zeros(1, 8, dtype=F64))

    free = solve(TRAIN.mean())
    edge = float(free.theta[0])
    pinched = dif.Problem(TRAIN.mean(), [dif.linear([1.0, 0.0]) <= edge, dif.linear([1.0, 0.0]) >= edge])
    at = dif.DirectionalInfluence(dif.Solution(pinched, free.params, [0.0, 0.0]), strict=False)
    unanswered(at, pinched.constraints[0].shift(-0.1), "inequalities moved apart")
    assert torch.isfinite(at.scores(TRAIN, pinched.constraints[0].shift(0.1)).values).all()


def unanswered(at, perturbation, reason):
    """NaN in change and scores, with the reason in the diagnostics."""
    for answer in (at.change(perturbation), at.scores(TRAIN, perturbation)):
        assert torch.isnan(answer.flat if isinstance(answer, dif.Change) else answer.values).all()
        (found,) = answer.diagnostics["unanswered"].values()
        assert reason in found


def test_a_changed_problem_without_feasible_points_is_refused_by_name_or_recorded():
    text = "moves them apart, or the changed problem is infeasible."
    low, high = dif.linear([1.0, 1.0]) >= 0.9, dif.linear([1.0, 1.0]) <= 1.0
    at = solve(TRAIN.mean() + dif.ridge(0.1), [low, high])
    shut, sound = high.shift(-0.2), TRAIN.remove_each([0, 1])
    for kind, options in ((dif.DirectionalInfluence, {"switching": True}), (dif.NewtonInfluence, {})):
        refused(dif.DegenerateError, lambda k=kind, o=options: k(at, **o).scores(TRAIN, sound + shut), text)
        loose = kind(at, strict=False, **options)
        mixed = loose.scores(TRAIN.mean(), TRAIN.remove_each([0]) + 0.0 * shut)
        assert torch.isfinite(mixed.values).all()
        none = loose.scores(TRAIN.mean(), sound + shut)
        assert torch.isnan(none.values).all()
        assert len(none.diagnostics["unanswered"]) == 2
        assert "remove train[0]" in next(iter(none.diagnostics["unanswered"]))


def test_the_gap_of_dependent_bounds_is_measured_whatever_rho():
    equalities = dif.Problem(TRAIN.mean(), [dif.linear([1.0, 1.0]) == -1.0, dif.linear([2.0, 2.0]) == -2.0])
    at, shift = dif.Solution(equalities, solution().params), equalities.constraints[0].shift(1.0)
    small, large = (
        dif.DirectionalInfluence(at, rho=rho, strict=False).scores(TRAIN, shift).diagnostics["unanswered"]
        for rho in (0.1, 10.0)
    )
    assert small == large != {}


@pytest.mark.parametrize(("rho", "k"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (NAN, 1.0), (1.0, INF)])
def test_penalties_must_be_positive(rho, k):
    action = lambda: dif.PenaltyInfluence(solution(), rho, k)  # noqa: E731
    wrong = rho if rho != 1.0 else k
    invalid(action, str(wrong), "A penalty of weight 0 is no penalty.", "Use ClassicalInfluence")


def test_a_penalised_objective_that_cannot_be_minimised():
    action = lambda: dif.PenaltyInfluence(solution(), 1e30, 1e30, at_minimiser=True)  # noqa: E731
    error = refused(dif.NotConvergedError, action, "The penalised objective was not minimised", "Use smaller rho and k")
    assert float(error.measured) > float(error.threshold) == 1e-11


def test_a_retraining_that_stops_early_is_refused_or_recorded_as_nan():
    train = samples(logistic, name="signs")
    at = solve(train.mean() + dif.ridge(0.1))
    removals = train.remove_groups([[0, 1, 2], [3]])
    text = "The changed problem was not solved"
    error = refused(
        dif.NotConvergedError, lambda: dif.Retraining(at, max_iter=1).change(removals[0]), text, "Raise max_iter"
    )
    assert error.what == "KKT residual after retraining (remove signs[0, 1, 2])"
    assert float(error.measured) > float(error.threshold) == 1e-10
    refused(dif.NotConvergedError, lambda: dif.Retraining(at, max_iter=1).scores(train.mean(), removals), text)
    recorded = dif.Retraining(at, max_iter=1, strict=False).scores(train.mean(), removals)
    assert torch.isnan(recorded.values).all()
    assert list(recorded.diagnostics["failed"]) == removals.labels
    full = dif.Retraining(at).scores(train.mean(), removals)
    assert max(full.diagnostics["residuals"]) <= 1e-10
    invalid(
        lambda: recorded.compare(full), "shapes (2, 1) and (2, 1), 2 not finite", "Agreement is taken value by value."
    )


# Results

RESULTS = {
    "top of nothing": (lambda: influence().top(0), "k = 0, target 0", "There is no such ranking."),
    "top of a missing target": (lambda: influence().top(3, 8), "k = 3, target 8", "a target among 0 … 7"),
    "top of an unknown name": (
        lambda: influence().top(3, "test"),
        "k = 3, target 'test'",
        "The targets are train[0], train[1]",
    ),
    "other perturbations": (
        lambda: influence().compare(estimator(dif.NewtonInfluence).scores(TRAIN, TRAIN.remove_each([1, 2]))),
        "8 × 8 and 2 × 8 entries, labels differ",
        "Agreement is taken entry by entry.",
    ),
    "other order": (
        lambda: influence().compare(estimator(dif.NewtonInfluence).scores(TRAIN, TRAIN.remove_each(range(7, -1, -1)))),
        "8 × 8 and 8 × 8 entries, labels differ",
        "the same perturbations and targets in the same order",
    ),
    "other targets": (
        lambda: influence().compare(estimator(dif.NewtonInfluence).scores(TRAIN.mean(), TRAIN.remove_each())),
        "8 × 8 and 8 × 1 entries, labels differ",
        "Score the same perturbations and targets",
    ),
    "one value": (
        lambda: (one := estimator(dif.DirectionalInfluence).scores(TRAIN.mean(), TRAIN.remove(0))).compare(one),
        "shapes (1, 1) and (1, 1), 0 not finite",
        "Agreement is taken value by value.",
    ),
    "other shape": (
        lambda: dif.Agreement.of(torch.ones(3), torch.ones(4)),
        "shapes (3,) and (4,), 0 not finite",
        "one shape, at least 2 values, all finite",
    ),
    "study's bounds": (lambda: study().problem(0, "loose"), "loose", "They choose the right-hand sides"),
    "study's removals": (lambda: study().run(removals=1), "1", "Each removal takes one of the samples out."),
}


def study():
    from dif.studies import regression

    return regression


@table(RESULTS)
def test_results_refuse(case):
    invalid(*case)


def archive(path, values, about):
    np.savez(path, values=values, about=np.array(json.dumps(about)))


SOUND = {"format": "dif influence 1", "perturbations": ["a"], "targets": ["b"], "estimator": "DIF", "diagnostics": {}}
FILES = {
    "empty": (lambda path, raw: path.write_bytes(b""), "EOFError"),
    "text": (lambda path, raw: path.write_text("perturbation,score"), "ValueError"),
    "half": (lambda path, raw: path.write_bytes(raw[: len(raw) // 2]), "BadZipFile"),
    "flipped": (lambda path, raw: path.write_bytes(raw[:300] + bytes([raw[300] ^ 255]) + raw[301:]), "BadZipFile"),
    "another archive": (lambda path, raw: np.savez(path, other=np.zeros(3)), "KeyError"),
    "newer": (
        lambda path, raw: archive(path, np.zeros((1, 1)), {**SOUND, "format": "dif influence 9"}),
        "dif influence 9",
    ),
    "other shape": (lambda path, raw: archive(path, np.zeros((2, 1)), SOUND), "values of shape (2, 1)"),
}


@table(FILES)
def test_damaged_files_are_refused(case, tmp_path):
    damage, found = case
    path = tmp_path / "scores.npz"
    influence().save(path)
    assert torch.equal(dif.Influence.load(path).values, influence().values)
    damage(path, path.read_bytes())
    text = "It was not written by Influence.save, is damaged, or comes from a newer version."
    error = refused(dif.InvalidInputError, lambda: dif.Influence.load(path), f"influence file '{path}'", text)
    assert found in error.measured
    assert error.threshold == "a file of format 'dif influence 1'"


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        dif.Influence.load(tmp_path / "none.npz")
    with pytest.raises(FileNotFoundError):
        influence().save(tmp_path / "none" / "scores.npz")


def test_a_save_that_fails_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "scores.npz"
    influence().save(path)
    old = path.read_bytes()
    unsound = dif.Influence(torch.zeros(1, 1), ("a",), ("b",), "DIF", {"not for JSON": torch.zeros(1)})
    with pytest.raises(TypeError):
        unsound.save(path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["scores.npz"]


def test_a_frame_needs_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r'pip install "dif\[pandas\]"'):
        influence().to_frame()


def test_a_landscape_needs_two_parameters():
    from dif.report.plots import landscape

    invalid(lambda: landscape(not_complementary(), None), "1", "It is drawn in the plane.")


# Nothing of the user's is changed, after success either


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
    refused(dif.InvalidInputError, action, "two calls of the loss", keep=[start])


# What users do without thinking


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


def test_the_cure_of_a_point_that_is_not_a_solution_works_for_modules():
    problem = dif.Problem(samples(through).mean() + dif.ridge(0.1))
    at = dif.Solution(problem, nn.Linear(2, 1).double())
    assert "dif.fit(problem, solution.params)" in str(refused(dif.NotASolutionError, at.check))
    assert dif.fit(problem, at.params, show_progress=False).converged


class Half(nn.Module):
    """Uses one of its two layers."""

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
    invalid(action, names, "parameters that nothing depends on", "No loss and no function (a ridge apart) uses them")


@pytest.mark.parametrize(("change", "dtype"), [(torch.Tensor.long, "torch.int64"), (lambda x: x > 0, "torch.bool")])
def test_a_loss_without_a_derivative_is_refused(change, dtype):
    text = "Counts and booleans have no derivative, and other types lose digits silently."
    invalid(lambda: fit_loss(shaped(change)), dtype, "what the loss of Samples 'odd' returned", text)


@pytest.mark.parametrize(
    "ask",
    [
        lambda at, train: dif.DirectionalInfluence(at).change(train.remove(0)),
        lambda at, train: dif.DirectionalInfluence(at).scores(train.mean(), train.remove_each()),
        lambda at, train: dif.Retraining(at).change(train.remove(0)),
    ],
    ids=["change", "scores", "retraining"],
)
def test_a_module_put_into_training_mode_after_the_fit_is_refused(ask):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double().eval()
    train = samples(through)
    at = solve(train.mean() + dif.ridge(0.1), params=model)
    model.train()
    refused(dif.InvalidInputError, lambda: ask(at, train), "modules in training mode", keep=[model])


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def normed():
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(6, 1)).double()
    return model, samples(through, (drawn(8, 2, 3), Y))


@pytest.mark.parametrize("build", [normed, lambda: (Counter(), samples(through))], ids=["instance norm", "counter"])
def test_buffers_that_the_forward_pass_writes_are_not_the_users(build):
    model, train = build()
    with untouched(model), suppress(dif.DifError):
        solve(train.mean() + dif.ridge(0.1), params=model)


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
def test_types_and_devices_are_refused_in_words(case):
    refused(dif.InvalidInputError, case)


def test_functions_are_of_the_parameters_type():
    text = "Other types have no derivative, or lose digits silently."
    odd = dif.Function(lambda p: p["w"].float().sum(), name="odd")
    invalid(lambda: solve(TRAIN.mean() + odd), "torch.float32", "what the function 'odd' returned", text)


def test_inference_mode_is_named():
    with torch.inference_mode():
        invalid(lambda: dif.fit(PROBLEM, point(0.0, 0.0)), "on", "Nothing can be differentiated inside it.")


def ball(radius):
    square = dif.Function(lambda p: (p["w"] ** 2).sum(), name="square")
    return dif.Problem(TRAIN.mean(), [(square <= radius**2).named("ball")])


def test_a_problem_without_a_point_inside_is_not_certified():
    """‖w‖² ≤ 0 allows only w = 0, where its gradient vanishes and no multiplier is large enough."""
    with pytest.warns(dif.NotConvergedWarning):
        dif.fit(ball(0.0), point(1.0, 1.0), show_progress=False)


def test_multipliers_that_drown_the_objective_are_refused():
    w = -1e-13 * torch.nn.functional.normalize(2 * X.T @ -Y, dim=0) / 1.0
    lam = float((2 * X.T @ (X @ w - Y) / 8).norm()) / 2e-13
    at = dif.Solution(ball(1e-13), {"w": w}, [lam])
    text = "Multipliers grow without bound where no point lies strictly inside the constraint"
    refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(at), "multiplier of ball", text)


def test_wrong_objects_are_named():
    text = "An objective and its constraints are stated by dif.Problem(objective, constraints)."
    invalid(lambda: dif.fit(TRAIN.mean(), START), "Term", text)
    invalid(lambda: dif.Function(3.0, name="three"), "float", "A Function is evaluated at many parameters.")
    unreadable = refused(dif.InvalidInputError, lambda: TRAIN.reweight(None), "It cannot be read as numbers.")
    assert "NoneType" in unreadable.measured
    invalid(lambda: TRAIN.mean() / 0, "0", "A Term divided by 0 is not defined.")
    constant = dif.Term(constant=torch.ones((), dtype=F64))
    text = "A constant does not change with the parameters."
    invalid(lambda: estimator(dif.DirectionalInfluence).scores(constant, TRAIN.remove(0)), "Term(1)", text)


def test_a_bare_batch_norm_is_refused_by_name():
    refused(dif.InvalidInputError, lambda: solve(TRAIN.mean(), params=nn.BatchNorm1d(2).double()), "BatchNorm1d")


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_change_refuses_perturbed_samples_without_a_derivative(kind):
    train, at = kinked()
    text = "The influence of such a sample is not defined."
    refused(dif.InvalidInputError, lambda: kind(at).change(train.add(torch.zeros(1, dtype=F64))), text)


def test_a_target_without_a_derivative_is_named():
    train, at = kinked()
    test = dif.Samples(roots, torch.zeros(1, dtype=F64), name="test")
    text = "The target has no derivative at the solution, so no first-order change."
    invalid(lambda: dif.DirectionalInfluence(at).scores(test, train.remove(0)), "not finite for test[0]", text)


@pytest.mark.parametrize("factor", [NAN, INF])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_perturbations_scale_by_finite_numbers(kind, factor):
    text = "It says how much of the perturbation is carried out."
    invalid(lambda: estimator(kind).change(factor * TRAIN.remove(0)), str(factor), text)


def test_fit_from_a_point_without_a_derivative_is_refused():
    train = dif.Samples(roots, torch.tensor([0.0, 1.0], dtype=F64), name="roots")
    action = lambda: solve(train.mean(), params={"t": torch.zeros((), dtype=F64)})  # noqa: E731
    invalid(
        action, "NaN or infinite for the objective", "gradients at the given parameters", "The point has no derivative"
    )


@pytest.mark.parametrize(
    "barrier",
    [
        lambda p: (p["w"] - p["w"].log()).sum(),
        lambda p: (p["w"] ** 2 - p["w"].log()).sum() + (p["w"][0] * p["w"][1]).sqrt(),
    ],
    ids=["one at a time", "coupled"],
)
def test_an_objective_with_a_domain_is_not_called_unbounded(barrier):
    with suppress(dif.NotConvergedWarning, dif.InvalidInputError):  # said in words
        assert solve(dif.Function(barrier, name="barrier"), params=point(100.0, 200.0)).converged


def test_an_unbounded_value_is_measured_as_such():
    falling = dif.Function(lambda p: -p["w"].exp().sum(), name="falling")
    assert "‖θ‖ > 1e+09" not in refused(dif.UnboundedError, lambda: solve(falling)).measured


def scalar_problem(*constraints):
    train = dif.Samples(lambda p, z: 0.5 * (z - p["w"][0]) ** 2, torch.full((3,), 11.0, dtype=F64), name="scalar")
    return dif.Problem(train.mean(), constraints)


def test_the_row_whose_complementarity_fails_is_named():
    tight, loose = (dif.linear([1.0]) <= 1.0).named("tight"), (dif.linear([1.0]) <= 2.0).named("loose")
    at = dif.Solution(scalar_problem(tight, loose), {"w": torch.ones(1, dtype=F64)}, [9.0, 1.0])
    refused(dif.NotASolutionError, at.check, "complementarity (worst at loose)")


def test_the_row_whose_feasibility_fails_is_named():
    fine, coarse = (1e-3 * dif.linear([1.0]) <= 0.0).named("fine"), (1e3 * dif.linear([1.0]) <= 10999.0).named("coarse")
    at = dif.Solution(scalar_problem(fine, coarse), {"w": torch.full((1,), 11.0, dtype=F64)}, [0.0, 0.0])
    refused(dif.NotASolutionError, at.check, "feasibility (worst at fine)")


def test_damping_does_not_excuse_dependent_constraints():
    doubled = dif.fit(stated(2), START, show_progress=False)
    refused(dif.DegenerateError, lambda: dif.DirectionalInfluence(doubled, damping=1e-3), "LICQ fails")


@pytest.mark.parametrize("kind", [dif.DirectionalInfluence, dif.ClassicalInfluence])
@pytest.mark.parametrize("damping", [-1.0, NAN])
def test_damping_must_be_a_number_from_zero(kind, damping):
    text = "Damping, δ in H + δI, makes up for missing curvature, at the price of another answer."
    invalid(lambda: kind(solution(), damping=damping), str(damping), "damping", text)


@pytest.mark.parametrize("rho", [-1.0, NAN, INF, "large"])
def test_rho_must_be_a_number_from_zero(rho):
    invalid(lambda: dif.DirectionalInfluence(solution(), rho=rho), str(rho), "It weighs GᵀG in H_ρ.")


def test_a_tolerance_is_a_positive_number():
    text = "It is the relative KKT residual that counts as solved."
    for tol in (NAN, 0.0, -1e-6, INF):
        invalid(lambda tol=tol: dif.Retraining(solution(), tol=tol), str(tol), "tol", text)
        invalid(lambda tol=tol: dif.fit(PROBLEM, START, tol=tol), str(tol), "tol", text)
        invalid(lambda tol=tol: dif.Solution(PROBLEM, START, tol=tol), str(tol), "tol", text)


def test_a_vector_objective_of_one_row_is_told_from_a_number():
    error = refused(dif.InvalidInputError, lambda: solve(TRAIN.mean() + dif.linear([[1.0, 1.0]])))
    assert str(error.measured) != str(error.threshold)


def test_linear_keeps_its_own_coefficients():
    row, constraints = torch.zeros(2, dtype=F64), []
    for i in range(2):
        row[i] = 1.0
        constraints.append(dif.linear(row) <= -1.0)
        row[i] = 0.0
    at = dif.Solution(dif.Problem(TRAIN.mean(), constraints), START)
    assert torch.equal(at.G, torch.eye(2, dtype=F64))


@pytest.mark.parametrize("kind", [dif.NewtonInfluence, dif.Retraining])
def test_the_number_of_the_perturbation_is_its_place(kind):
    groups = TRAIN.remove_groups([[0], range(8)])
    refused(dif.InvalidInputError, lambda: estimator(kind).scores(TRAIN.mean(), groups), "after perturbation 1 ")


@pytest.mark.parametrize(
    "action",
    [
        lambda: TRAIN.remove(np.array(2)),
        lambda: TRAIN.add((X[:1], Y[:1]), like=np.int64(2)),
        lambda: TRAIN.add((X[:1], Y[:1]), like=torch.tensor(2)),
        lambda: samples(squares, batch_size=np.int64(4)),
    ],
    ids=["remove", "like", "like a tensor", "batch_size"],
)
def test_numpy_integers_are_integers(action):
    action()


Pair = namedtuple("Pair", ["x", "y"])


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return Pair(X[i], Y[i])


def test_a_dataset_of_named_tuples():
    train = samples(lambda p, z: (z.x @ p["w"] - z.y) ** 2, Pairs())
    at = solve(train.mean(), [dif.linear([1.0, 1.0]) <= -1.0])
    gap = dif.DirectionalInfluence(at).scores(train, train.remove_each()).values - influence().values
    assert gap.abs().max() < 1e-12


MALFORMED = {
    "reweight by none": lambda: TRAIN.reweight(None),
    "weights of text": lambda: TRAIN.weighted(["a"] * 8),
    "ragged weights": lambda: TRAIN.weighted([[1.0], [1.0, 2.0]]),
    "mask of text": lambda: TRAIN.mean(where="first half"),
    "mask of none": lambda: TRAIN.mean(where=[None] * 8),
    "index of an array of arrays": lambda: TRAIN.remove([np.array([1])]),
    "groups a number": lambda: TRAIN.remove_groups(3),
    "like a float": lambda: TRAIN.add((X[:1], Y[:1]), like=1.0),
    "data of text": lambda: solve(samples(squares, "abc").mean()),
    "data a list of texts": lambda: samples(squares, ["a", "b"]),
    "data of objects": lambda: samples(squares, np.array([None, 1])),
    "linear of none": lambda: dif.linear(None),
    "linear ragged": lambda: dif.linear([[1.0], [1.0, 2.0]]),
    "ridge of none": lambda: dif.ridge(None),
    "ridge of two numbers": lambda: dif.ridge(torch.ones(2)),
    "shift by none": lambda: CAP.shift(None),
    "bound ragged": lambda: TRAIN.mean() <= [[1.0], [1.0, 2.0]],
    "no constraints, said as none": lambda: dif.Problem(TRAIN.mean(), None),
    "a term for constraints": lambda: dif.Problem(TRAIN.mean(), TRAIN.mean()),
    "function not callable": lambda: solve(TRAIN.mean() + dif.Function(3.0)),
    "fit of a term": lambda: dif.fit(TRAIN.mean(), START),
    "solution of a term": lambda: dif.Solution(TRAIN.mean(), START),
    "multipliers of text": lambda: dif.Solution(PROBLEM, START, ["a"]),
    "multipliers of another problem": lambda: dif.Solution(
        PROBLEM, START, dif.Solution(dif.Problem(TRAIN.mean(), [EYE <= 9.0]), START).multipliers
    ),
    "top of half": lambda: influence().top(2.5),
    "top of a float target": lambda: influence().top(3, 1.5),
    "compare with a tensor": lambda: influence().compare(influence().values),
    "rank of a constant target": lambda: estimator(dif.DirectionalInfluence).scores(
        dif.Term(constant=torch.ones((), dtype=F64)), TRAIN.remove(0)
    ),
    **{f"{kind.__name__} of a problem": lambda kind=kind: kind(PROBLEM) for kind in ESTIMATORS},
    **{
        f"{kind.__name__}, {name}": lambda kind=kind, given=given: estimator(kind).scores(TRAIN.mean(), given)
        for kind in ESTIMATORS
        for name, given in {"scores of an index": 3, "scores of no list": []}.items()
    },
    **{
        f"{kind.__name__}, scores of a list": lambda kind=kind: estimator(kind).scores(TRAIN.mean(), [TRAIN.remove(0)])
        for kind in (dif.NewtonInfluence, dif.Retraining)
    },
}


@table(MALFORMED)
def test_malformed_input_is_refused_in_words(case):
    refused(dif.InvalidInputError, case)


INCOMPLETE = {
    "no estimator": {key: SOUND[key] for key in ("format", "perturbations", "targets")},
    "no labels": {"format": SOUND["format"]},
    "a number of labels": {**SOUND, "perturbations": 1},
}


@table(INCOMPLETE)
def test_incomplete_files_are_refused(case, tmp_path):
    archive(tmp_path / "scores.npz", np.zeros((1, 1)), case)
    refused(dif.InvalidInputError, lambda: dif.Influence.load(tmp_path / "scores.npz"), "is damaged")
