"""Fairness by name: constraints and metrics of groups, in smooth form. Uses only the public names of dif."""

from dif.fairness.columns import check_order
from dif.fairness.constraints import (
    bounded_group_loss,
    demographic_parity,
    equal_opportunity,
    equalised_odds,
    error_rate_parity,
    false_positive_rate_parity,
)
from dif.fairness.metrics import compare_metrics, smooth_metrics
from dif.fairness.moments import read_moment

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
