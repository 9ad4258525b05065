"""dif: how each training sample shaped a model that was trained under constraints."""

from importlib import import_module
from types import ModuleType

import dif.evaluation as evaluation
from dif.analyses.bound_curve import BoundCurve, bound_curve
from dif.analyses.removal_sets import Choice, choose, smallest_set
from dif.analyses.self_influence import self_influence
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
from dif.estimators.adaptive import AdaptiveInfluence
from dif.estimators.classical import ClassicalInfluence
from dif.estimators.directional import DirectionalInfluence
from dif.estimators.newton import NewtonInfluence
from dif.estimators.path import PathInfluence
from dif.estimators.penalty import PenaltyInfluence
from dif.estimators.protocol import Estimator
from dif.estimators.retraining import Retraining
from dif.estimators.unrolled import UnrolledInfluence
from dif.linalg.solvers import ConjugateGradients, LinearSolver, Operator
from dif.optimality.judgement import KKT, ActiveSet, Certificate
from dif.optimality.solution import Solution
from dif.problem.parameters import variable
from dif.problem.perturbation import Perturbation
from dif.problem.problem import Problem
from dif.problem.samples import Samples
from dif.problem.term import Constraint, Function, Term, linear, ridge
from dif.results.change import Agreement, Change
from dif.results.influence import Influence
from dif.runtime.guard import sharded
from dif.solving.continuation import Path
from dif.solving.fit import fit
from dif.training.descent import SGD, Adam, AdamW, Ascent
from dif.training.own_step import unroll
from dif.training.run import Run
from dif.training.training import Training

__version__ = "0.1.0"  # the package version; pyproject.toml reads it from here

__all__ = [
    "KKT",
    "SGD",
    "ActiveSet",
    "Adam",
    "AdamW",
    "AdaptiveInfluence",
    "Agreement",
    "Ascent",
    "BoundCurve",
    "Certificate",
    "Change",
    "Choice",
    "ClassicalInfluence",
    "ConjugateGradients",
    "Constraint",
    "DegenerateError",
    "DifError",
    "DirectionalInfluence",
    "Estimator",
    "FirstOrderWarning",
    "Function",
    "InfeasibleError",
    "Influence",
    "InvalidInputError",
    "LinearSolver",
    "MemoryWarning",
    "NewtonInfluence",
    "NotASolutionError",
    "NotConvergedError",
    "NotConvergedWarning",
    "Operator",
    "Path",
    "PathInfluence",
    "PenaltyInfluence",
    "Perturbation",
    "Problem",
    "Retraining",
    "Run",
    "SameDataWarning",
    "Samples",
    "Solution",
    "Term",
    "Training",
    "UnboundedError",
    "UnrolledInfluence",
    "bound_curve",
    "choose",
    "evaluation",
    "fit",
    "linear",
    "ridge",
    "self_influence",
    "sharded",
    "smallest_set",
    "unroll",
    "variable",
]


def __getattr__(name: str) -> ModuleType:
    """Import `dif.fairness` when it is first used; it is built on the names above."""
    if name == "fairness":
        return import_module("dif.fairness")
    raise AttributeError(f"module 'dif' has no attribute {name!r}")
