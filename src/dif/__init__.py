"""dif: how each training sample shaped a model that was trained under constraints."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

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
from dif.estimators.directional import DirectionalInfluence
from dif.estimators.protocol import Estimator
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
from dif.solving.fit import fit

if TYPE_CHECKING:  # `__getattr__` imports these when they are first used
    import dif.evaluation as evaluation
    from dif.analyses.bound_curve import BoundCurve, bound_curve
    from dif.analyses.removal_sets import Choice, choose, smallest_set
    from dif.analyses.self_influence import self_influence
    from dif.estimators.adaptive import AdaptiveInfluence
    from dif.estimators.classical import ClassicalInfluence
    from dif.estimators.newton import NewtonInfluence
    from dif.estimators.path import PathInfluence
    from dif.estimators.penalty import PenaltyInfluence
    from dif.estimators.retraining import Retraining
    from dif.estimators.unrolled import UnrolledInfluence
    from dif.solving.continuation import Path
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


_LATER = {
    "evaluation": (),
    "fairness": (),
    "report": (),
    "analyses.bound_curve": ("BoundCurve", "bound_curve"),
    "analyses.removal_sets": ("Choice", "choose", "smallest_set"),
    "analyses.self_influence": ("self_influence",),
    "estimators.adaptive": ("AdaptiveInfluence",),
    "estimators.classical": ("ClassicalInfluence",),
    "estimators.newton": ("NewtonInfluence",),
    "estimators.path": ("PathInfluence",),
    "estimators.penalty": ("PenaltyInfluence",),
    "estimators.retraining": ("Retraining",),
    "estimators.unrolled": ("UnrolledInfluence",),
    "solving.continuation": ("Path",),
    "training.descent": ("SGD", "Adam", "AdamW", "Ascent"),
    "training.own_step": ("unroll",),
    "training.run": ("Run",),
    "training.training": ("Training",),
}  # modules that are imported when one of their names is first used; those without names, when they themselves are


def __getattr__(name: str) -> ModuleType:  # of what type checkers do not see above
    """Import what few programs need when it is first used."""
    for module, names in _LATER.items():
        if name == module or name in names:
            found = import_module(f"dif.{module}")
            return found if name == module else getattr(found, name)
    raise AttributeError(f"module 'dif' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
