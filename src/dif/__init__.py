"""dif: how each training sample shaped a model that was trained under constraints."""

from dif.active_set import ActiveSet
from dif.adaptive import AdaptiveInfluence
from dif.agreement import Agreement
from dif.bound_curve import BoundCurve, bound_curve
from dif.choosing import Choice, choose, smallest_set
from dif.cleaning import self_influence
from dif.conjugate_gradients import ConjugateGradients
from dif.constraint import Constraint
from dif.errors import (
    DegenerateError,
    DifError,
    FirstOrderWarning,
    InfeasibleError,
    InvalidInputError,
    MemoryWarning,
    NotASolutionError,
    NotConvergedError,
    NotConvergedWarning,
    SameDataWarning,
    UnboundedError,
)
from dif.estimators.classical import ClassicalInfluence
from dif.estimators.directional import DirectionalInfluence
from dif.estimators.following import PathInfluence
from dif.estimators.newton import NewtonInfluence
from dif.estimators.penalty import PenaltyInfluence
from dif.estimators.retraining import Retraining
from dif.fit import fit
from dif.influence import Change, Influence
from dif.kkt import KKT
from dif.parameters import variable
from dif.perturbation import Perturbation
from dif.problem import Problem
from dif.refinement import Refinement
from dif.samples import Samples
from dif.shards import sharded
from dif.solution import Solution
from dif.term import Function, Term, linear, ridge

__version__ = "0.1.0"

GroupInfluence = AdaptiveInfluence  # its first name

__all__ = [
    "KKT",
    "ActiveSet",
    "AdaptiveInfluence",
    "Agreement",
    "BoundCurve",
    "Change",
    "Choice",
    "ClassicalInfluence",
    "ConjugateGradients",
    "Constraint",
    "DegenerateError",
    "DifError",
    "DirectionalInfluence",
    "FirstOrderWarning",
    "Function",
    "GroupInfluence",
    "InfeasibleError",
    "Influence",
    "InvalidInputError",
    "MemoryWarning",
    "NewtonInfluence",
    "NotASolutionError",
    "NotConvergedError",
    "NotConvergedWarning",
    "PathInfluence",
    "PenaltyInfluence",
    "Perturbation",
    "Problem",
    "Refinement",
    "Retraining",
    "SameDataWarning",
    "Samples",
    "Solution",
    "Term",
    "UnboundedError",
    "bound_curve",
    "choose",
    "fit",
    "linear",
    "ridge",
    "self_influence",
    "sharded",
    "smallest_set",
    "variable",
]
