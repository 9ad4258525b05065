"""dif: how each training sample shaped a model that was trained under constraints."""

from dif.active_set import ActiveSet
from dif.agreement import Agreement
from dif.conjugate_gradients import ConjugateGradients
from dif.constraint import Constraint
from dif.errors import (
    DegenerateError,
    DifError,
    InfeasibleError,
    InvalidInputError,
    NotASolutionError,
    NotConvergedError,
    NotConvergedWarning,
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
from dif.solution import Solution
from dif.term import Function, Term, linear, ridge

__version__ = "0.1.0"

__all__ = [
    "KKT",
    "ActiveSet",
    "Agreement",
    "Change",
    "ClassicalInfluence",
    "ConjugateGradients",
    "Constraint",
    "DegenerateError",
    "DifError",
    "DirectionalInfluence",
    "Function",
    "InfeasibleError",
    "Influence",
    "InvalidInputError",
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
    "Samples",
    "Solution",
    "Term",
    "UnboundedError",
    "fit",
    "linear",
    "ridge",
    "variable",
]
