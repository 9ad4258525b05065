"""What is refused while a problem is stated: samples, terms, parameters, perturbations."""

from collections import namedtuple

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
    PROBLEM,
    START,
    TRAIN,
    X,
    Y,
    drawn,
    estimator,
    influence,
    invalid,
    point,
    refused,
    samples,
    solve,
    squares,
    table,
    through,
    untouched,
)
from torch import nn

import dif

SAMPLES = {
    "loss and data swapped": (
        lambda: dif.Samples(X, squares, name="train"),
        "`loss` of Samples 'train' must be a callable loss(params, batch), not of type Tensor.",
    ),
    "batch_size zero": (
        lambda: samples(squares, batch_size=0),
        "`batch_size` of Samples 'odd' must be an integer ≥ 1, not 0.",
    ),
    "batch_size negative": (lambda: samples(squares, batch_size=-2), "an integer ≥ 1, not -2."),
    "batch_size float": (lambda: samples(squares, batch_size=2.0), "an integer ≥ 1, not 2.0."),
    "generator": (lambda: samples(squares, (x for x in X)), "generator", "a Dataset with a length"),
    "no data": (
        lambda: dif.Samples(squares, None, name="odd"),
        "Data of Samples 'odd' must be a tensor",
        "not of type NoneType.",
    ),
    "unequal lengths": (
        lambda: samples(squares, (X, Y[:3])),
        "must have one length, the number of samples, not 8, 3;",
    ),
    "outputs not callable": (
        lambda: samples(squares, outputs=3),
        "`outputs` of Samples 'odd' must be a callable outputs(params, batch), not of type int.",
    ),
    "a scalar": (lambda: samples(squares, torch.tensor(1.0)), "none (a scalar)"),
    "zero samples": (lambda: samples(squares, X[:0]), "Samples 'odd' is empty; pass the data of at least one sample."),
    "empty tuple": (lambda: samples(squares, ()), "Samples 'odd' is empty; pass the data of at least one sample."),
    "empty dict": (lambda: samples(squares, {}), "Samples 'odd' is empty; pass the data of at least one sample."),
    "empty dataset": (
        lambda: samples(squares, torch.utils.data.TensorDataset(X[:0])),
        "Samples 'odd' is empty; pass the data of at least one sample.",
    ),
    "list of numbers": (
        lambda: samples(squares, [1.0, 2.0]),
        "none (a scalar), none (a scalar);",
        "pass a list of numbers as torch.tensor(numbers)",
    ),
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
    expected = "NaN or infinite in 2 samples (3, 5); drop or impute"
    invalid(lambda: samples(squares, data), expected, keep=[broken])


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
    invalid(
        lambda: method(where=mask), f"it is {measured}.", "The mask `where` of 'train' must be torch.bool, shape (8,)"
    )


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
    name = "w" if method == TRAIN.weighted else "dw"
    text = f"The vector `{name}` of 'train' must have shape (8,), with all entries finite and at least one nonzero;"
    invalid(lambda: method(weights), f"{measured} entries.", text)


INDICES = {
    "beyond": ([2, 8, 9], "8, 9", "integers from 0 to 7"),
    "negative": ([-1], "-1", "integers from 0 to 7"),
    "scalar beyond": (8, "8", "integers from 0 to 7"),
    "huge": ([10**20], "100000000000000000000", "integers from 0 to 7"),
    "float": ([1.0], "1.0", "integers from 0 to 7"),
    "numpy float": (np.array([1.0]), "1.0", "integers from 0 to 7"),
    "float tensor": (torch.tensor([1.0]), "1.0", "integers from 0 to 7"),
    "nan": ([NAN], "nan", "integers from 0 to 7"),
    "text in a list": (["a"], "'a'", "integers from 0 to 7"),
    "text": ("ab", "'ab'", "integers from 0 to 7"),
    "slice": (slice(0, 3), "slice(0, 3, None)", "write a slice as range(begin, end)"),
    "none": (None, "None", "integers from 0 to 7"),
    "nested": ([[1, 2]], "[1, 2]", "integers from 0 to 7"),
    "boolean mask": (torch.tensor([True, False, True]), "True, False, True", "a mask as torch.nonzero(mask)[:, 0]"),
    "numpy mask": (np.array([True] * 3), "True, True, True", "a mask as torch.nonzero(mask)[:, 0]"),
    "single bool": (True, "True", "a mask as torch.nonzero(mask)[:, 0]"),
    "empty": ([], "an empty list", "at least one"),
    "twice": (
        [4, 1, 4, 1, 2],
        "The sample indices 1, 4 of 'train' were given more than once.",
        "'train'",
    ),
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
    found = (
        measured
        if "given" in measured
        else f"Indices of Samples 'train' must be integers from 0 to 7, at least one, not {measured};"
    )
    invalid(lambda: method(index), found, "'train'", text)


def test_many_unknown_indices_are_counted():
    error = refused(dif.InvalidInputError, lambda: TRAIN.remove(range(100)), "92 in all", "integers from 0 to 7")
    assert "not 8, 9, 10" in error.found


def test_no_group_is_refused():
    invalid(lambda: TRAIN.remove_groups([]), "`groups` must be a list of lists of indices, not an empty one.")
    invalid(lambda: TRAIN.remove_groups(3), "`groups` must be a list of lists of indices, not of type int.")


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
    text = "The new data for 'train' must have the structure (float64[2], float64[]), not "
    invalid(lambda: method(data), f"{text}{measured};")


LIKE = {
    "beyond": (8, "8", "integers from 0 to 7"),
    "negative": (-1, "-1", "integers from 0 to 7"),
    "one of them beyond": ([0, 1, 99], "99", "integers from 0 to 7"),
    "bool": (True, "True", "integers from 0 to 7"),
    "two for three": ([1, 2], "`like` must have 1 or 3 indices, one for each new sample, not 2.", ""),
    "empty": ([], "`like` must have 1 or 3 indices", "not 0."),
}


@table(LIKE)
def test_like_is_checked(case):
    like, measured, text = case
    invalid(lambda: TRAIN.add((X[:3], Y[:3]), like=like), measured, text)


PERTURBATIONS = {
    "new data not finite": (
        lambda: TRAIN.add((X[:1], Y[:1] * NAN)),
        "NaN or infinite in 1 sample (0);",
        "data of Samples 'new train'",
    ),
    "fewer new than old": (
        lambda: TRAIN.replace([1, 2], (X[:1], Y[:1])),
        "There must be as many new as old samples of 'train', not 1 for 2;",
    ),
    "no terms": (
        lambda: TRAIN.remove(0, terms=[]),
        "`terms` must list problem.objective or constraints of the problem, at least one.",
    ),
    "slice with step": (
        lambda: TRAIN.remove_each()[::2],
        "slice(None, None, 2)",
        "non-empty range inside 0 … 8 with step 1",
    ),
    "empty slice": (lambda: TRAIN.remove_each()[5:2], "slice(5, 2, None)", "inside 0 … 8", "perturbations.pick("),
    "sum of different numbers": (
        lambda: TRAIN.remove_groups([[0], [1]]) + TRAIN.remove_each(),
        "2 + 8 perturbations cannot be added; both must be equally many",
    ),
    "shift not finite": (
        lambda: CAP.shift(NAN),
        "The shift of a bound must be one finite number, or one per row, not nan.",
    ),
    "shift by a matrix": (lambda: CAP.shift([[1.0]]), "[[1.0]]", "one finite number, or one per row"),
}


@table(PERTURBATIONS)
def test_perturbations_refuse(case):
    invalid(*case)


def test_the_cures_of_indices_work():
    assert TRAIN.remove(torch.nonzero(GROUP == 1)[:, 0]).labels == TRAIN.remove(range(4, 8)).labels
    assert TRAIN.remove_each().pick([0, 2, 4]).labels == TRAIN.remove_each([0, 2, 4]).labels


def test_a_missing_perturbation_ends_iteration():
    with pytest.raises(IndexError, match="There are 8 perturbations, but index 8 was given"):
        TRAIN.remove_each()[8]
    assert len(list(TRAIN.remove_each())) == 8


TERMS = {
    "infinite bound": (
        lambda: TRAIN.mean() <= INF,
        "The number in a Term must be finite, or a vector of finite numbers, not inf;",
    ),
    "factor nan": (lambda: NAN * TRAIN.mean(), "nan", "leave a constraint out"),
    "long bound": (lambda: TRAIN.mean() <= [NAN] * 10, "shape (10,)", "must be finite, or a vector of finite numbers"),
    "matrix bound": (
        lambda: TRAIN.mean() <= [[1.0, 2.0]],
        "[[1.0, 2.0]]",
        "must be finite, or a vector of finite numbers",
    ),
    "linear nan": (
        lambda: dif.linear([[NAN, 1.0]]),
        "shape (1, 2), and 1 of 2 entries are not finite",
        "must be finite, with shape (d,) or (rows, d)",
    ),
    "linear cube": (
        lambda: dif.linear(torch.ones(1, 1, 1)),
        "shape (1, 1, 1), and 0 of 1 entries are not finite",
        "`A` of linear(A)",
    ),
    "linear empty": (
        lambda: dif.linear([]),
        "shape (0,), and 0 of 0 entries are not finite",
        "`A` of linear(A) must be",
    ),
    "ridge negative": (lambda: dif.ridge(-1.0), "The coefficient c of ridge(c) must be a number ≥ 0, not -1.0."),
    "ridge nan": (lambda: dif.ridge(NAN), "a number ≥ 0, not nan"),
    "ridge infinite": (lambda: dif.ridge(INF), "a number ≥ 0, not inf"),
    "objective samples": (
        lambda: dif.Problem(TRAIN),
        "The objective must be a Term or a Function, such as Samples.mean(), not of type Samples.",
    ),
    "objective a constraint": (lambda: dif.Problem(CAP), "not of type Constraint."),
    "constraint a bool": (
        lambda: dif.Problem(TRAIN.mean(), [CAP, True]),
        "The constraints must be made by comparing Terms, such as train.mean() <= 0.3, not of type bool.",
    ),
    "constraint twice": (
        lambda: dif.Problem(TRAIN.mean(), [CAP, CAP]),
        "The list of constraints has cap more than once;",
    ),
    "unnamed constraint twice": (
        lambda: dif.Problem(TRAIN.mean(), [(c := TRAIN.mean() <= 1.0), c]),
        "one constraint more than once;",
    ),
    "name twice": (
        lambda: dif.Problem(TRAIN.mean(), [(TRAIN.mean() <= 1.0).named("a"), (TRAIN.mean() <= 2.0).named("a")]),
        "The list of constraints has a more than once;",
        ".named(...)",
    ),
}


@table(TERMS)
def test_terms_and_problems_refuse(case):
    invalid(*case)


OPERATORS = {
    "chained": (lambda: 0 <= TRAIN.mean() <= 1, "A Constraint has no truth value", "two constraints"),
    "truth": (lambda: bool(CAP), "A Constraint has no truth value", "compare Terms by `is`"),
    "if": (lambda: 1 if TRAIN.mean() == 1.0 else 2, "A Constraint has no truth value"),
    "not equal": (lambda: TRAIN.mean() != 1.0, "A Constraint has no truth value"),
    "less": (lambda: TRAIN.mean() < 1, "Strict inequalities have no minimiser", "Write <= or >="),
    "greater": (lambda: TRAIN.mean() > 1, "Strict inequalities have no minimiser"),
    "less from the left": (lambda: 0 < TRAIN.mean(), "Strict inequalities have no"),
    "product": (
        lambda: TRAIN.mean() * TRAIN.mean(),
        "A Term can be multiplied by one number, not by Term",
        "dif.Function",
    ),
    "times a vector": (lambda: TRAIN.mean() * [1.0, 2.0], "A Term can be multiplied by one number, not by list"),
    "times text": (lambda: TRAIN.mean() * "a", "A Term can be multiplied by one number, not by str"),
    "bound text": (lambda: TRAIN.mean() <= "a", "A Term can be compared with a Term or a number, not with str"),
    "bound none": (lambda: TRAIN.mean() == None, "A Term can be compared with a Term or a number, not with NoneType"),  # noqa: E711
    "plus none": (lambda: TRAIN.mean() + None, "unsupported operand"),
    "square": (lambda: TRAIN.mean() ** 2, "unsupported operand"),
    "divide by a term": (lambda: 1.0 / TRAIN.mean(), "unsupported operand"),
    "perturbation times text": (
        lambda: TRAIN.remove(0) * "2",
        "Perturbation can be multiplied by one number, not by str",
    ),
    "text times perturbation": (
        lambda: "a" * TRAIN.remove(0),
        "Perturbation can be multiplied by one number, not by str",
    ),
    "perturbation times a vector": (lambda: np.ones(2) * TRAIN.remove(0), "by one number, not by ndarray"),
    "perturbation times a tensor": (lambda: TRAIN.remove(0) * torch.ones(2), "by one number, not by Tensor"),
    "perturbation times a perturbation": (lambda: TRAIN.remove(0) * TRAIN.remove(1), "not by Perturbation"),
    "perturbation plus number": (lambda: TRAIN.remove(0) + 1, "unsupported operand"),
    "samples as a term": (lambda: TRAIN <= 1.0, "not supported between instances of 'Samples'"),
}


@table(OPERATORS)
def test_operators_that_mean_nothing_are_type_errors(case):
    action, *texts = case
    with untouched(), pytest.raises(TypeError) as caught:
        action()
    assert all(text in str(caught.value) for text in texts)


TWO = {"w": torch.zeros(2, dtype=F64), "v": torch.zeros(1)}


AWAY = {"w": torch.zeros(2, dtype=F64), "v": torch.zeros(1, dtype=F64, device="meta")}


PARAMS = {
    "a tensor": (X[0], "`params` must be a dict of tensors or an nn.Module, not of type Tensor;"),
    "none": (None, "NoneType", 'wrap a single tensor as {"theta": tensor}.'),
    "a list": ([X[0]], "list", "a dict of tensors or an nn.Module"),
    "empty": ({}, "`params` must have at least one tensor to optimise;"),
    "integer": (
        {"w": torch.zeros(2, dtype=torch.long)},
        "The parameter 'w' must be a floating-point tensor, not of type torch.int64.",
    ),
    "complex": (
        {"w": torch.zeros(2, dtype=torch.cfloat)},
        "The parameter 'w' must be a floating-point tensor, not of type torch.complex64.",
    ),
    "a number": ({"w": 1.0}, "must be a floating-point tensor, not of type float."),
    "numpy": ({"w": np.zeros(2)}, "must be a floating-point tensor, not of type ndarray."),
    "two dtypes": (TWO, "w: torch.float64, v: torch.float32", "must have the same dtype"),
    "two devices": (AWAY, "w: cpu, v: meta", "must have the same device"),
    "nan": (point(1.0, NAN), "1 NaN or infinite of 2 entries", "parameter 'w'", "all must be finite"),
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
    invalid(lambda: solve(TRAIN.mean(), params=model), "at least one tensor", "requires_grad=True", keep=[model])


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
    invalid(lambda: solve(loss.mean(), params=model), names, text, "call model.eval()", keep=[model])
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
    text = "must be torch.float64 on cpu, like the parameters"
    for action in (lambda: solve(odd.mean()), lambda: estimator(dif.Retraining).scores(odd, TRAIN.remove(0))):
        invalid(action, measured, "data of Samples 'odd'", text, keep=[data])


def test_parameters_on_another_device_than_the_data():
    away = {"w": torch.zeros(2, dtype=F64, device="meta")}
    text = "must be float64 or float32, dense (.to_dense()), and on a device that holds values"
    found = "torch.float64, torch.strided, on meta"
    invalid(lambda: solve(TRAIN.mean(), params=away), found, "parameter 'w'", text)


@pytest.mark.parametrize("sparse", [torch.eye(2, dtype=F64).to_sparse(), torch.eye(2, dtype=F64).to_sparse_csr()])
def test_sparse_parameters_are_refused(sparse):
    invalid(lambda: solve(TRAIN.mean(), params={"w": sparse}), f"torch.float64, {sparse.layout}, on cpu", "to_dense")


def test_a_vector_objective_of_one_row_is_told_from_a_number():
    vector = TRAIN.mean() + dif.linear([[1.0, 1.0]])
    invalid(lambda: solve(vector), "The objective must be a single number, not a vector of length 1;")


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
    with pytest.warns(dif.FirstOrderWarning, match="1 of 2 perturbations have no answer"):
        scores = estimator(kind).scores(TRAIN.mean(), groups)
    assert torch.isfinite(scores.values[:, 0]).tolist() == [True, False]
    (reason,) = scores.diagnostics["unanswered"].values()
    assert reason.startswith("Perturbation 1 ")


@pytest.mark.parametrize(
    ("action", "number"),
    [
        (lambda i: TRAIN.remove(i).labels, np.array(2)),
        (lambda i: TRAIN.add((X[:1], Y[:1]), like=i).labels, np.int64(2)),
        (lambda i: TRAIN.add((X[:1], Y[:1]), like=i).labels, torch.tensor(2)),
        (lambda size: samples(squares, batch_size=size).batch_size, np.int64(4)),
        (lambda most: solve(TRAIN.mean(), max_iter=most).objective, np.int64(100)),
    ],
    ids=["remove", "like", "like a tensor", "batch_size", "max_iter"],
)
def test_numpy_integers_are_integers(action, number):
    assert action(number) == action(int(number))


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


class Failing(Pairs):
    def __getitem__(self, i):
        raise AssertionError("Torch not compiled with CUDA enabled\nmore")  # as x.cuda() does


def test_a_dataset_that_fails_is_named():
    train = samples(squares, Failing())
    expected = "The Dataset of Samples 'odd' raised AssertionError: Torch not compiled with CUDA enabled."
    invalid(lambda: solve(train.mean()), expected)
    training = dif.Training(dif.Problem(train.mean()), START, dif.SGD(0.1))
    invalid(lambda: training.run(show_progress=False), expected)


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
