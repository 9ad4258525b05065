"""How good are scores? Any method that scores samples is compared with training again; TracIn is here as a baseline."""

from dif.evaluation.datamodelling import DatamodellingScore, linear_datamodelling_score
from dif.evaluation.label_errors import LabelErrors, flip_labels, label_error_auc
from dif.evaluation.leave_one_out import LeaveOneOut, leave_one_out_agreement
from dif.evaluation.own_training import OwnTraining
from dif.evaluation.removal_curve import RemovalCurve, removal_curve
from dif.evaluation.table import Table
from dif.evaluation.tracin import TracIn

__all__ = [
    "DatamodellingScore",
    "LabelErrors",
    "LeaveOneOut",
    "OwnTraining",
    "RemovalCurve",
    "Table",
    "TracIn",
    "flip_labels",
    "label_error_auc",
    "leave_one_out_agreement",
    "linear_datamodelling_score",
    "removal_curve",
]
