"""Errors and warnings, and how texts list, count and tabulate things."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path


class DifError(ValueError):
    """Base class of all errors of dif.

    Where an argument is wrong, the message is one sentence. Where a number is judged, it has four parts.

    Args:
        found: The sentence, such as "`tol` must be a positive number, not -1."; or what was measured.
        allowed: The threshold.
        meaning: What it means that the number is beyond it.
        cure: What to do about it.
    """

    reasons: dict[int, str] = {}  # the sentence for each of the perturbations that are invalid, where others are not

    def __init__(self, found: str, allowed: str = "", meaning: str = "", cure: str = "") -> None:
        self.found, self.allowed, self.meaning, self.cure = found, allowed, meaning, cure
        super().__init__(" ".join(part for part in (found, allowed, meaning, cure) if part))

    def __reduce__(self):
        """Pickle all four parts, so that the error can be raised again in another process."""
        return type(self), (self.found, self.allowed, self.meaning, self.cure)


class InvalidInputError(DifError):
    """An argument is invalid: its shape, type, index or value, such as NaN."""


class NotASolutionError(DifError):
    """The parameters do not satisfy the optimality conditions, so nothing can be differentiated there."""


class DegenerateError(DifError):
    """The directional derivative does not exist: dependent active gradients or no tangent curvature."""


class InfeasibleError(DifError):
    """No parameters satisfy the constraints."""


class UnboundedError(DifError):
    """The objective is unbounded below on the feasible set."""


class NotConvergedError(DifError):
    """A solver stopped before it reached its tolerance, so there is no answer."""


class NotConvergedWarning(UserWarning):
    """`fit` reached a limit before its tolerance; see `Solution.converged` and `Solution.kkt` of the result."""


class FirstOrderWarning(UserWarning):
    """First-order predictions of these perturbations cannot be trusted; see `Influence.expected_error`."""


class SameDataWarning(UserWarning):
    """Two Samples of a problem hold the same data, but neither is a view of the other.

    A removal from one of them does not change the other.
    """

    @staticmethod
    def words(one: str, other: str) -> str:
        """Return the text of the warning about two Samples with these names."""
        return (
            f"Samples {one!r} and {other!r} hold the same data. Are they the same people under two losses? A removal "
            f"from {one!r} now leaves them in {other!r}. To remove them from both, make {other!r} a view: "
            f"{one}.view(loss, name={other!r})."
        )


class MemoryWarning(UserWarning):
    """Memory ran out. The computation continues in smaller batches and gives the same answer."""


def warn(words: str, category: type[Warning]) -> None:
    """Warn, and name the line outside dif that made the call."""
    ours, frame, level = str(Path(__file__).parent), inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(ours) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(words, category, stacklevel=level)


def few(values: Sequence[object], *, quoted: bool = False) -> str:
    """List the values as text; of more than six, the first six and their number. `quoted` puts text in quotes."""
    shown = ", ".join(repr(value) if quoted and isinstance(value, str) else str(value) for value in values[:6])
    return shown if len(values) <= 6 else f"{shown}, … {len(values)} in all"


def count_words(number: int, noun: str) -> str:
    """Return a number with its noun: "1 value", "2 values"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table as text. The first `left` columns, of words, are aligned to the left, the others to the right.

    >>> print(format_table(("constraint", "slack"), (("parity", "0.02"), ("budget", "1.5"))))
    constraint  slack
    parity       0.02
    budget        1.5
    """
    columns = []
    for number, cells in enumerate(zip(headings, *rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.ljust(width) if number < left else cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
