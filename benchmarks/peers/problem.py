"""The problem that all libraries solve: multinomial logistic regression with a ridge on scikit-learn's digits."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

RIDGE = 0.01  # weight of ½‖θ‖²
N_TRAIN, N_TEST, N_PIXELS, N_CLASSES = 1500, 50, 64, 10


class Data(NamedTuple):
    """Training and test points, float64 inputs and int64 labels."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def softmax(z: np.ndarray) -> np.ndarray:
    """Return the row-wise softmax."""
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def with_ones(x: np.ndarray) -> np.ndarray:
    """Append a constant column to the inputs, so that the bias is one more weight."""
    return np.hstack([x, np.ones((len(x), 1))])


def hessian(a: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Return the Hessian of the mean cross-entropy in class-major order, with the bias last in each class."""
    k, d = p.shape[1], a.shape[1]
    z = (p[:, :, None] * a[:, None, :]).reshape(len(a), k * d)
    h = -(z.T @ z)
    for c in range(k):
        block = slice(c * d, (c + 1) * d)
        h[block, block] += z[:, block].T @ a
    return h / len(a)


def train(x: np.ndarray, y: np.ndarray, tol: float = 1e-12) -> np.ndarray:
    """Train by Newton's method; return theta of shape (classes, pixels + 1)."""
    a, onehot = with_ones(x), np.eye(N_CLASSES)[y]
    theta = np.zeros((N_CLASSES, a.shape[1]))
    for _ in range(50):
        p = softmax(a @ theta.T)
        gradient = (p - onehot).T @ a / len(a) + RIDGE * theta
        if np.linalg.norm(gradient) < tol:
            return theta
        h = hessian(a, p)
        h[np.diag_indices_from(h)] += RIDGE
        theta = theta - np.linalg.solve(h, gradient.ravel()).reshape(theta.shape)
    raise RuntimeError("Newton's method did not converge.")


def load() -> tuple[nn.Linear, Data]:
    """Train the model; return it with the data."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, last = x / 16.0, N_TRAIN + N_TEST
    theta = torch.from_numpy(train(x[:N_TRAIN], y[:N_TRAIN]))
    model = nn.Linear(N_PIXELS, N_CLASSES, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(theta[:, :-1])
        model.bias.copy_(theta[:, -1])
    parts = (x[:N_TRAIN], y[:N_TRAIN], x[N_TRAIN:last], y[N_TRAIN:last])
    return model.eval(), Data(*(torch.from_numpy(part) for part in parts))
