"""Compute influence scores with Kronfluence's EKFAC, an approximation; the library has no exact method."""

import copy
import tempfile

import numpy as np
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from problem import RIDGE, Data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

F64 = torch.float64
FACTORS = FactorArguments(
    strategy="ekfac",
    activation_covariance_dtype=F64,
    gradient_covariance_dtype=F64,
    per_sample_gradient_dtype=F64,
    lambda_dtype=F64,
)
SCORES = ScoreArguments(damping_factor=RIDGE, per_sample_gradient_dtype=F64, precondition_dtype=F64, score_dtype=F64)


class CrossEntropy(Task):
    """Summed cross-entropy; labels are drawn from the model when the true Fisher matrix is fitted."""

    def compute_train_loss(self, batch: tuple[Tensor, Tensor], model: nn.Module, sample: bool = False) -> Tensor:
        """Return the training loss of the batch."""
        x, y = batch
        logits = model(x)
        if sample:
            y = torch.multinomial(logits.detach().softmax(dim=-1), num_samples=1).flatten()
        return cross_entropy(logits, y, reduction="sum")

    def compute_measurement(self, batch: tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
        """Return the test loss of the batch."""
        return self.compute_train_loss(batch, model)


def scores(model: nn.Linear, data: Data) -> np.ndarray:
    """Fit the factors and score all pairs; Kronfluence returns (test, train) without the 1/N and writes to files."""
    torch.manual_seed(0)
    task, n = CrossEntropy(), len(data.x)
    train, test = TensorDataset(data.x, data.y), TensorDataset(data.x_test, data.y_test)
    wrapped = prepare_model(nn.Sequential(copy.deepcopy(model)), task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("digits", wrapped, task, cpu=True, disable_tqdm=True, output_dir=folder)
        analyzer.fit_all_factors("ekfac", train, per_device_batch_size=n, factor_args=FACTORS)
        analyzer.compute_pairwise_scores(
            "pairs",
            "ekfac",
            query_dataset=test,
            train_dataset=train,
            per_device_query_batch_size=len(data.x_test),
            per_device_train_batch_size=n,
            score_args=SCORES,
        )
        pairs = analyzer.load_pairwise_scores("pairs")["all_modules"]
    return pairs.numpy().T / n
