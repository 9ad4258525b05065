"""Linear models: losses, samples and parameters that the scikit-learn adapters share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif import InvalidInputError

# Losses of a batch (X, targets), one number per sample.
# params: "coef" (d,) or (k, d), and "intercept" () or (k,) if the model has one.


def squared_loss(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return (x·coef + intercept − y)² for every sample."""
    return (predict_linear(params, batch[0]) - batch[1]) ** 2


def logistic_loss(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return the log-loss for every sample, with labels −1 and 1."""
    return torch.nn.functional.softplus(-batch[1] * predict_linear(params, batch[0]))


def softmax_loss(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Return the log-loss for every sample, with labels 0 … k − 1."""
    return torch.nn.functional.cross_entropy(predict_linear(params, batch[0]), batch[1], reduction="none")


def predict_linear(params: dict[str, Tensor], X: Tensor) -> Tensor:
    """Return X·coef + intercept."""
    product = X @ params["coef"].mT if params["coef"].dim() == 2 else X @ params["coef"]
    return product + params["intercept"] if "intercept" in params else product


def build_ridge(strength: float) -> dif.Function:
    """Build ½ strength ‖coef‖²; the intercept is not penalised."""
    return dif.Function(lambda params: 0.5 * strength * (params["coef"] ** 2).sum(), name=f"½·{strength:g}‖coef‖²")


def read_index(X: Any) -> Any:
    """Return the index of a pandas DataFrame, which results then show; None for other data."""
    return X.index if hasattr(X, "columns") and hasattr(X, "index") else None


def label_rows(X: Any, index: Any) -> Any:
    """Return a copy of X in double precision: a DataFrame with this index, or an array if there is none."""
    rows = np.array(X, dtype=np.float64)
    if index is None:
        return rows
    import pandas

    return pandas.DataFrame(rows, index=index)


def build_samples(loss: Any, X: Any, y: Any, index: Any = None, name: str = "train") -> dif.Samples:
    """Build Samples from the rows of X, their targets and, unless it is None, the index of a DataFrame."""
    return dif.Samples(loss, (label_rows(X, index), torch.as_tensor(np.array(y))), name=name)


def build_risk(loss: Any, X: Any, y: Any, weights: Any, index: Any = None) -> dif.Term:
    """Build the sum of the losses, weighted unless weights is None."""
    train = build_samples(loss, X, y, index)
    return train.sum() if weights is None else train.weighted(np.asarray(weights, dtype=float))


def build_params(coef: Any, intercept: Any) -> dict[str, Tensor]:
    """Build the parameters coef, and intercept unless it is None, in double precision."""
    params = {"coef": torch.tensor(np.array(coef, dtype=np.float64))}
    return params if intercept is None else params | {"intercept": torch.tensor(np.array(intercept, dtype=np.float64))}


def check_strength(value: Any, name: str) -> float:
    """Return the option `name` as a float; it must be finite and ≥ 0, or > 0 if it is C."""
    number = np.asarray(value if np.isscalar(value) or isinstance(value, np.ndarray) else None)
    valid = number.ndim == 0 and number.dtype.kind in "if" and np.isfinite(number) and float(number) >= 0
    if not valid or (name == "C" and float(number) == 0):
        raise InvalidInputError(
            f"`{name}` is {value!r}.",
            f"It must be one finite number {'>' if name == 'C' else '≥'} 0.",
            "It scales a term of the objective, or relaxes a constraint.",
            "Pass a single number.",
        )
    return float(number)
