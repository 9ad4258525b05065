"""Data frames and series as data."""

import warnings

import numpy as np
import pytest
import torch
from problems import F64, regression_data, squared
from refusals import invalid

import dif
from dif.runtime.inputs import read_frame

pandas = pytest.importorskip("pandas")

X, Y = (part.numpy() for part in regression_data())
LABELS = [f"person {i}" for i in range(40)]


def frames():
    return pandas.DataFrame(X, index=LABELS, columns=list("abcd")), pandas.Series(Y, index=LABELS, name="y")


def test_a_frame_becomes_rows_and_columns():
    frame, y = frames()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that must not be written to
        train = dif.Samples(squared, (frame, y), name="train")
    assert torch.equal(train.storage.data[0], torch.from_numpy(X.copy()))
    assert torch.equal(train.storage.data[1], torch.from_numpy(Y.copy()))
    mixed = pandas.DataFrame({"age": [30, 41], "member": [True, False], "income": np.float32([1.5, 2.5])})
    data = dif.Samples(lambda p, z: z[:, 0], mixed).storage.data
    assert data.dtype == F64
    assert data.tolist() == [[30.0, 1.0, 1.5], [41.0, 0.0, 2.5]]


def test_arrays_that_pandas_protects_are_taken_without_a_warning():
    protected = X.copy()
    protected.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train = dif.Samples(squared, (protected, Y), name="train")
    assert train.storage.data[0].data_ptr() == protected.ctypes.data  # not copied


def test_labels_of_a_series_are_converted_by_the_user():
    labels = pandas.Series(np.arange(40) % 2)
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    train = dif.Samples(lambda p, z: cross_entropy(z[0] @ p["theta"], z[1], reduction="none"), (X, labels))
    with pytest.raises(dif.InvalidInputError, match="Convert whole numbers, such as labels, to floating point"):
        dif.fit(dif.Problem(train.mean()), {"theta": torch.zeros(4, dtype=F64)}, show_progress=False)


def test_what_keeps_its_dtype():
    assert dif.Samples(squared, frames()[0].astype("float32")).storage.data.dtype == torch.float32
    classes = {"x": frames()[0], "label": pandas.Series(np.arange(40) % 3, index=LABELS)}
    assert dif.Samples(squared, classes).storage.data["label"].dtype == torch.int64
    assert dif.Samples(squared, pandas.DataFrame({"count": [1, 2]})).storage.data.dtype == F64
    nullable = pandas.DataFrame({"count": pandas.array([1, 2], dtype="Int64")})
    assert read_frame(nullable, "data").tolist() == [[1.0], [2.0]]


def test_text_dates_and_missing_entries_are_refused_by_column():
    frame = pandas.DataFrame({"age": [30.0, 41.0], "city": ["Rome", "Oslo"], "kind": pandas.Categorical(["a", "b"])})
    frame["since"] = pandas.to_datetime(["2020", "2021"])
    error = invalid(
        lambda: dif.Samples(squared, frame, name="train"),
        "data of Samples 'train' has columns that are not numbers: city",
        "pandas.get_dummies(frame, dtype=float)",
    )
    assert all(name in error.found for name in ("kind", "since"))
    assert "age" not in error.found
    invalid(lambda: dif.Samples(squared, frame["city"]), "was given as data of Samples", "encode text as numbers")
    invalid(lambda: dif.Samples(squared, pandas.DataFrame({"a": [1.0, np.nan]})), "NaN or infinite in 1 sample (1)")


def test_nullable_columns_are_numbers_unless_an_entry_is_missing():
    for dtype in ("Float64", "Float32"):
        data = dif.Samples(squared, frames()[0].astype(dtype)).storage.data
        assert data.dtype == getattr(torch, dtype.lower())
        assert torch.equal(data, torch.from_numpy(X.astype(dtype.lower())))
    frame = pandas.DataFrame({"children": [1, 2], "member": [True, False], "income": [1.5, 2.5]})
    mixed = frame.astype({"children": "Int64", "member": "boolean", "income": "Float64"})
    assert read_frame(mixed, "data").tolist() == [[1.0, 1.0, 1.5], [2.0, 0.0, 2.5]]
    missing = mixed.mask(pandas.DataFrame({name: [False, name != "income"] for name in mixed}))
    invalid(
        lambda: dif.Samples(squared, missing),
        "data of Samples 'samples' has columns with missing entries: children (Int64, 1), member (boolean, 1);",
        "frame.dropna()",
    )
    words = pandas.DataFrame({"city": pandas.array(["Rome", None], dtype="string")})
    invalid(lambda: dif.Samples(squared, words), "has columns that are not numbers: city")


def test_frames_in_different_orders_are_refused():
    frame, y = frames()
    invalid(
        lambda: dif.Samples(squared, (frame, y[::-1]), name="train"),
        "`frame 1 of data of Samples 'train'` has the labels of `frame 0 of data of Samples 'train'` in another order.",
        "so values of different samples would be combined.",
    )
    renumbered = dif.Samples(squared, (frame, y.reset_index(drop=True)))
    assert list(renumbered.remove_each([0]).index) == ["person 0"]


def test_removals_know_the_index():
    frame, y = frames()
    train = dif.Samples(squared, (frame, y), name="train")
    assert list(train.remove_each([3, 1]).index) == ["person 3", "person 1"]
    assert list(train.view(squared).remove([5]).index) == ["person 5"]
    assert list(train.remove_each()[2:4].index) == ["person 2", "person 3"]
    assert list(train.take(torch.tensor([7, 9])).remove_each().index) == ["person 7", "person 9"]
    for other in (train.remove([1, 2]), 0.5 * train.remove([1]), train.reweight(np.ones(40))):
        assert other.index is None
    assert dif.Samples(squared, (X, Y)).remove_each().index is None


def test_added_rows_keep_their_labels():
    frame, y = frames()
    train = dif.Samples(squared, (frame, y), name="train")
    problem = dif.Problem(train.mean() + dif.ridge(0.1))
    more = (pandas.DataFrame(X[:1], index=["newcomer"], columns=list("abcd")), pandas.Series(Y[:1], index=["newcomer"]))
    (after,) = problem.after(train.remove([0]) + train.add(more)).samples
    assert list(after.remove_each().index)[-1] == "newcomer"
    (unlabelled,) = problem.after(train.add((X[:1], Y[:1]))).samples
    assert unlabelled.remove_each().index is None


def test_masks_and_weights_in_another_order_are_refused():
    frame, y = frames()
    train = dif.Samples(squared, (frame, y), name="train")
    mask, weights = frame["a"] > 0, frame["a"].abs()
    at = dif.Solution(dif.Problem(train.mean()), {"theta": torch.ones(4, dtype=F64)}).value
    losses = 0.5 * (X.sum(1) - Y) ** 2
    expected = losses[mask.to_numpy()].mean()
    assert at(train.mean(where=mask)) == pytest.approx(expected, rel=1e-12)
    for plain in (mask.to_numpy(), mask.reset_index(drop=True), mask.rename("patient {}".format)):  # by position
        assert at(train.mean(where=plain)) == pytest.approx(expected, rel=1e-12)
    combined = "so values of different samples would be combined."
    found = "of 'train' has the labels of the samples in another order."
    for use in (train.mean, train.sum):
        invalid(lambda use=use: use(where=mask[::-1]), f"The mask `where` {found}", combined, "with .loc[X.index]")
    invalid(lambda: train.mean(weights=weights.sort_values()), f"The vector `weights` {found}", combined)
    invalid(lambda: train.weighted(weights.sort_values()), found, combined)
    some = train.take(torch.arange(10, 20))
    assert len(some.mean(where=mask[10:20]).sums) == 1
    invalid(lambda: some.mean(where=mask[10:20][::-1]), found.removeprefix("of 'train' "), combined)
