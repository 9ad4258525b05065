"""Fairness by name: constraints and metrics of groups, in smooth form. Uses the public names of dif."""

from dif.fairness.constraints import (
    bounded_group_loss,
    demographic_parity,
    equal_opportunity,
    equalised_odds,
    error_rate_parity,
    false_positive_rate_parity,
    read_moment,
)
from dif.fairness.metrics import compare_metrics, smooth_metrics
from dif.runtime.inputs import check_order

__all__ = [
    "bounded_group_loss",
    "check_order",
    "compare_metrics",
    "demographic_parity",
    "equal_opportunity",
    "equalised_odds",
    "error_rate_parity",
    "false_positive_rate_parity",
    "read_moment",
    "smooth_metrics",
]
