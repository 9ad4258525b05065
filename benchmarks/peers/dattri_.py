"""Compute influence scores with dattri's IFAttributorExplicit."""

import numpy as np
import torch
from dattri.algorithm.influence_function import IFAttributorExplicit
from dattri.task import AttributionTask
from problem import RIDGE, Data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def scores(model: nn.Linear, data: Data) -> np.ndarray:
    """Score with a dense Hessian and one solve.

    All data are one batch, because dattri sums the inverses of several batches. Its buffers use the default dtype.
    """

    def loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    task = AttributionTask(loss_func=loss, model=model, checkpoints=model.state_dict())
    attributor = IFAttributorExplicit(task=task, regularization=RIDGE)
    train = DataLoader(TensorDataset(data.x, data.y), batch_size=len(data.x))
    test = DataLoader(TensorDataset(data.x_test, data.y_test), batch_size=len(data.x_test))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        attributor.cache(train)
        return attributor.attribute(train, test).detach().numpy() / len(data.x)
    finally:
        torch.set_default_dtype(default)
