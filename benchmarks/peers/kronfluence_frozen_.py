"""Run Kronfluence with all loaded objects excluded from the ten garbage collections that it triggers."""

import gc

import kronfluence_
import numpy as np
from problem import Data
from torch import nn


def scores(model: nn.Linear, data: Data) -> np.ndarray:
    """Score as in kronfluence_, after excluding all existing objects from garbage collection."""
    gc.freeze()
    return kronfluence_.scores(model, data)
