"""Compute influence scores with pyinfluence on a binary variant of the problem (digit >= 5), as it requires."""

import numpy as np
import problem
from pyinfluence import InfluenceFunctions
from scipy.special import expit
from sklearn.linear_model import LogisticRegression


def load() -> tuple[LogisticRegression, problem.Data]:
    """Train the binary model on the same inputs (d=65).

    A constant column replaces the intercept, which pyinfluence would not regularise.
    """
    _, data = problem.load()
    x, x_test = problem.with_ones(data.x.numpy()), problem.with_ones(data.x_test.numpy())
    y, y_test = (data.y.numpy() >= 5).astype(int), (data.y_test.numpy() >= 5).astype(int)
    c = 1.0 / (problem.RIDGE * len(x))
    model = LogisticRegression(C=c, fit_intercept=False, solver="newton-cholesky", tol=1e-12, max_iter=100)
    return model.fit(x, y), problem.Data(x, y, x_test, y_test)


def exact(model: LogisticRegression, data: problem.Data) -> np.ndarray:
    """Compute the exact scores of the binary variant."""
    x, y, x_test, y_test = data
    p, p_test = expit(x @ model.coef_[0]), expit(x_test @ model.coef_[0])
    h = (x.T * (p * (1 - p))) @ x / len(x) + problem.RIDGE * np.eye(x.shape[1])
    v = np.linalg.solve(h, (x_test * (p_test - y_test)[:, None]).T)
    return (x * (p - y)[:, None]) @ v / len(x)


def scores(model: LogisticRegression, data: problem.Data) -> np.ndarray:
    """Score all pairs; the ridge comes from the model's C, and pyinfluence returns (test, train) with the 1/N."""
    attributor = InfluenceFunctions(mode="loss", damping=0.0).fit(model, data.x, data.y)
    return attributor.explain(data.x_test, data.y_test).T
