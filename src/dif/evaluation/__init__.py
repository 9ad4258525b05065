"""How good are scores? Any method that scores samples is compared with training again."""

from dif.evaluation.comparisons import (
    DatamodellingScore,
    LabelErrors,
    LeaveOneOut,
    RemovalCurve,
    Table,
    label_error_auc,
    leave_one_out_agreement,
    linear_datamodelling_score,
    removal_curve,
)

__all__ = [
    "DatamodellingScore",
    "LabelErrors",
    "LeaveOneOut",
    "RemovalCurve",
    "Table",
    "label_error_auc",
    "leave_one_out_agreement",
    "linear_datamodelling_score",
    "removal_curve",
]
