"""What dif says when it cannot answer: what was found, what is allowed, what that means, what to do."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path


class DifError(ValueError):
    """An answer that cannot be given, said in four parts; each is a sentence.

    Args:
        found: What was found, for example "`tol` is -1."
        allowed: What would have been accepted, for example "It must be a positive number."
        meaning: What that means.
        cure: What to do about it.
    """

    def __init__(self, found: str, allowed: str, meaning: str, cure: str) -> None:
        self.found, self.allowed, self.meaning, self.cure = found, allowed, meaning, cure
        super().__init__(f"{found} {allowed} {meaning} {cure}")

    def __reduce__(self):
        """Travel between processes with all four parts."""
        return type(self), (self.found, self.allowed, self.meaning, self.cure)


class InvalidInputError(DifError):
    """Something handed to dif is malformed: shapes, types, indices, non-finite numbers."""


class NotASolutionError(DifError):
    """The parameters do not satisfy the optimality conditions, so nothing can be differentiated there."""


class DegenerateError(DifError):
    """The directional derivative does not exist: dependent active gradients or no tangent curvature."""


class InfeasibleError(DifError):
    """No parameters satisfy the constraints."""


class UnboundedError(DifError):
    """The objective falls without end inside the feasible set."""


class NotConvergedError(DifError):
    """A solver stopped before it reached its tolerance and the answer would rest on it."""


class NotConvergedWarning(UserWarning):
    """`fit` stopped at a limit; the returned solution says so too."""


class FirstOrderWarning(UserWarning):
    """The first order cannot be trusted with what is done to the data; the result says where."""


class SameDataWarning(UserWarning):
    """Two Samples of a problem hold the same data without being views: removing from one leaves the other as it is."""

    @staticmethod
    def words(one: str, other: str) -> str:
        """What is asked about two Samples with these names."""
        return (
            f"Samples {one!r} and {other!r} hold the same data. Are they the same people under two losses? A removal "
            f"from {one!r} now leaves them in {other!r}. To remove them from both, make {other!r} a view: "
            f"{one}.view(loss, name={other!r})."
        )


class MemoryWarning(UserWarning):
    """Memory ran out; the work goes on in smaller batches, and gives the same answer."""


def warn(words: str, category: type[Warning]) -> None:
    """Give a warning that points at the line outside dif from which it comes."""
    ours, frame, level = str(Path(__file__).parent), inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(ours) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(words, category, stacklevel=level)


def few(values: Sequence[object], *, quoted: bool = False) -> str:
    """The first of them, and how many there are; `quoted` puts text in quotation marks."""
    shown = ", ".join(repr(value) if quoted and isinstance(value, str) else str(value) for value in values[:6])
    return shown if len(values) <= 6 else f"{shown}, … {len(values)} in all"


def count_words(number: int, noun: str) -> str:
    """How many there are, in words: "1 value", "2 values"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
