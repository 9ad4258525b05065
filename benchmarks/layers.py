"""Predict with cvxpylayers how removing samples changes a constrained regression: python layers.py kink.npz."""

import json
import statistics
import sys
import time

import cvxpy as cp
import numpy as np
import torch
from cvxpylayers.torch import CvxpyLayer

torch.set_num_threads(1)
with np.load(sys.argv[1]) as file:
    X, y, a, tau = (file[name] for name in ("X", "y", "a", "tau"))
n, d = X.shape
root, theta = cp.Parameter(n, nonneg=True), cp.Variable(d)  # square roots of the weights: cvxpylayers needs this form
objective = cp.Minimize(0.5 / n * cp.sum_squares(cp.multiply(root, X @ theta - y)))
layer = CvxpyLayer(cp.Problem(objective, [a @ theta <= float(tau)]), parameters=[root], variables=[theta])


def remove_each() -> np.ndarray:
    """Return the predicted change of θ for each removal, (n, d): minus the derivative with respect to its weight."""
    roots = torch.ones(n, dtype=torch.float64, requires_grad=True)
    (solution,) = layer(roots)
    rows = [torch.autograd.grad(solution[j], roots, retain_graph=True)[0] for j in range(d)]
    return -0.5 * torch.stack(rows, 1).numpy()  # w = root²


answer, seconds = remove_each(), []
for _ in range(5):
    begun = time.perf_counter()
    remove_each()
    seconds.append(time.perf_counter() - begun)
print(json.dumps({"removed": answer.tolist(), "seconds": statistics.median(seconds)}))
