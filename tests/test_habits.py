"""What PyTorch users bring and take away: checkpoints, loaders, frames, parquet, numbers to log."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dif
from dif.adapters.checkpoints import restored

generator = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, generator=generator)
Y = (X[:, 0] > 0).float()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "lightning", "model_state_dict"])
def test_weights_from_disk(tmp_path, wrap):
    trained = network()
    with torch.no_grad():
        for p in trained.parameters():
            p += 1.0
    state = trained.state_dict()
    held = {
        "plain": state,
        "state_dict": {"state_dict": state, "epoch": 3},
        "lightning": {"state_dict": {f"net.inner.{k}": v for k, v in state.items()} | {"metric.total": torch.ones(1)}},
        "model_state_dict": {"model_state_dict": state, "optimizer": {"lr": 0.1}},
    }[wrap]
    torch.save(held, tmp_path / "last.ckpt")
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = restored(model, tmp_path / "last.ckpt")
    assert not found.training
    for name, value in found.state_dict().items():
        np.testing.assert_allclose(value, state[name])
    assert next(found.parameters()).dtype == torch.float64
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    if wrap == "lightning":
        restored(model, tmp_path / "last.ckpt", prefix="net.inner.")
        with pytest.raises(dif.InvalidInputError, match=r"there are metric.total \(1,\), net.inner"):
            restored(model, tmp_path / "last.ckpt", prefix="model.")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "broken"), "w"))

    torch.save({"state_dict": Evil()}, tmp_path / "evil.ckpt")
    (tmp_path / "empty.ckpt").touch()
    for name in ("evil", "empty"):
        with pytest.raises(dif.InvalidInputError, match=r"cannot be read .* save only the weights"):
            restored(network(), tmp_path / f"{name}.ckpt")
    assert not (tmp_path / "broken").exists()


def test_weights_that_fit_twice_or_not_quite_are_refused(tmp_path):
    line, deeper = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    two = {f"{who}.{k}": v for who in ("student", "teacher") for k, v in line.state_dict().items()}
    shapes = nn.Linear(4, 3).state_dict()
    for number, state in enumerate((two, shapes)):
        torch.save(state, tmp_path / f"{number}.pt")
        with pytest.raises(dif.InvalidInputError, match="student" if number == 0 else "do not fit"):
            restored(line, tmp_path / f"{number}.pt")
    assert torch.equal(restored(line, tmp_path / "0.pt", prefix="teacher.").weight, line.weight.double())
    torch.save(deeper.state_dict(), tmp_path / "deep.pt")
    with pytest.raises(dif.InvalidInputError):
        restored(deeper[:1], tmp_path / "deep.pt")


def fit_classifier():
    loader = DataLoader(TensorDataset(X.double(), Y.double()), batch_size=16, shuffle=False)
    loss = lambda m, z: nn.functional.binary_cross_entropy_with_logits(m(z[0])[:, 0], z[1], reduction="none")  # noqa: E731
    train = dif.Samples(loss, loader, name="train")
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    return train, dif.fit(dif.Problem(train.mean() + dif.ridge(0.05)), model, show_progress=False)


def test_scores_leave_as_frames_parquet_and_numbers_to_log(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    train, solution = fit_classifier()
    influence = dif.DirectionalInfluence(solution).scores(train.mean(), train.remove_each())
    frame = influence.to_frame()
    frame.to_parquet(tmp_path / "scores.parquet")
    again = pandas.read_parquet(tmp_path / "scores.parquet")
    pandas.testing.assert_frame_equal(again, frame)
    np.testing.assert_array_equal(np.asarray(influence.values), again.to_numpy())
    numbers = influence.metrics()
    assert numbers["perturbations"] == 60
    assert numbers["largest"] == pytest.approx(float(influence.values.abs().max()))
    assert numbers["kkt_residual"] < 1e-9
    assert all(isinstance(value, float) and np.isfinite(value) for value in numbers.values())
    assert json.loads(json.dumps(numbers)) == numbers


@pytest.mark.parametrize(
    ("adapter", "package"),
    [("cvxpy", "cvxpy"), ("cooper", "cooper"), ("fairlearn", "fairlearn"), ("sklearn", "sklearn")],
)
def test_without_an_extra_dif_imports_and_the_adapter_says_which(adapter, package):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"import dif, dif.adapters\n"
        f"try:\n    import dif.adapters.{adapter}\n"
        "except ImportError as error:\n    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f'pip install "directional-influence[{adapter}]"' in result.stdout
