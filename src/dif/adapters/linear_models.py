"""Linear models: their losses, the samples of a design matrix, and their parameters by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import dif
from dif import InvalidInputError

# Losses of one sample; params: coef (d,) or (k, d), and intercept () or (k,) where there is one


def squared(params: dict[str, Tensor], batch: Any) -> Tensor:
    """(x·coef + intercept − y)²."""
    return (linear_part(params, batch[0]) - batch[1]) ** 2


def logistic(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Log-loss of a label in {−1, 1}."""
    return torch.nn.functional.softplus(-batch[1] * linear_part(params, batch[0]))


def softmax(params: dict[str, Tensor], batch: Any) -> Tensor:
    """Log-loss of a class number."""
    return torch.nn.functional.cross_entropy(linear_part(params, batch[0]), batch[1], reduction="none")


def linear_part(params: dict[str, Tensor], X: Tensor) -> Tensor:
    """X·coef + intercept."""
    found = X @ params["coef"].mT if params["coef"].dim() == 2 else X @ params["coef"]
    return found + params["intercept"] if "intercept" in params else found


def shrunk(strength: float) -> dif.Function:
    """½ strength ‖coef‖²: the intercept is not shrunk."""
    return dif.Function(lambda params: 0.5 * strength * (params["coef"] ** 2).sum(), name=f"½·{strength:g}‖coef‖²")


def samples_of(loss: Any, X: Any, y: Any) -> dif.Samples:
    """Rows of X with their targets."""
    target = torch.as_tensor(np.array(y))
    return dif.Samples(loss, (torch.as_tensor(np.array(X, dtype=np.float64)), target), name="train")


def risk_of(loss: Any, X: Any, y: Any, weights: Any) -> dif.Term:
    """The sum of the losses, weighted where there are weights."""
    train = samples_of(loss, X, y)
    return train.sum() if weights is None else train.weighted(np.asarray(weights, dtype=float))


def strength(value: Any, name: str) -> float:
    """A number ≥ 0; of C, not 0."""
    number = np.asarray(value)
    known = number.ndim == 0 and number.dtype.kind in "if" and np.isfinite(number) and float(number) >= 0
    if not known or (name == "C" and float(number) == 0):
        raise InvalidInputError(
            name,
            measured=repr(value),
            threshold="one finite number, ≥ 0" + (", not 0" if name == "C" else ""),
            meaning="It weighs a part of the objective, or loosens a bound.",
            cure="Pass a number.",
        )
    return float(number)


def params_of(coef: Any, intercept: Any) -> dict[str, Tensor]:
    """coef, and intercept where there is one, in double precision."""
    params = {"coef": torch.tensor(np.array(coef, dtype=np.float64))}
    return params if intercept is None else params | {"intercept": torch.tensor(np.array(intercept, dtype=np.float64))}
