"""Validation: scikit-learn's checks of X and y, with plain words where they meet text or a missing argument."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from dif import InvalidInputError


def validate(estimator: Any, X: Any, *y: Any, **options: Any) -> Any:
    """Return X, or X and y, as `validate_data` of scikit-learn does; columns of text are refused by name."""
    try:
        return validate_data(estimator, X, *y, **options)
    except (TypeError, ValueError) as error:
        if options.get("dtype") is not None:  # None leaves text as it is
            refuse_text(X, error)
        raise


def refuse_text(X: Any, cause: Exception, names: Sequence[str] | None = None) -> None:
    """Refuse columns of text or dates by name, or by number where X has no names and none are given."""
    columns = _list_columns(X)
    named = zip(names or [name for name, _ in columns], (column for _, column in columns), strict=True)
    wrong = [name for name, column in named if any(_is_text(value) for value in column)]
    if wrong:
        shown = ", ".join(wrong[:6]) + (f" and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        raise InvalidInputError(
            f"X has columns of text or dates: {shown}.",
            "All columns must be numbers, or True and False.",
            "A linear model multiplies each column with a coefficient.",
            "Leave those columns out, or encode them: pandas.get_dummies(X, dtype=float), or a OneHotEncoder.",
        ) from cause


def refuse_words(column: Any, name: str) -> None:
    """Refuse text in a column of numbers, such as the target of a regression."""
    words = [value for value in np.ravel(np.asarray(column, dtype=object)) if _is_text(value)]
    if words:
        raise InvalidInputError(
            f"`{name}` contains {words[0]!r}.",
            "It must contain numbers only.",
            "It is computed with, and text has no value.",
            "Encode the text as numbers." + (" If it names two classes, use a classifier." if name == "y" else ""),
        )


def require_both(X: Any, y: Any) -> None:
    """Refuse test samples without targets, and targets without test samples."""
    if X is None or y is None:
        raise InvalidInputError(
            f"`{'X' if X is None else 'y'}` is None.",
            "Test samples need both X and y.",
            "The loss of a test sample depends on its features and on its target.",
            "Pass both; `influence()` without either is about the coefficients.",
        )


def _list_columns(X: Any) -> list[tuple[str, Any]]:
    """Return the columns of X by name, or by number; none where X is not a table."""
    if hasattr(X, "columns"):
        return [(str(name), np.asarray(X[name], dtype=object)) for name in X.columns]
    try:
        table = np.asarray(X, dtype=object)
    except ValueError:  # rows of different lengths
        table = np.asarray(None)
    return [(str(number), column) for number, column in enumerate(table.T)] if table.ndim == 2 else []


def _is_text(value: Any) -> bool:
    """Return whether a value is a date, or text that is not a number."""
    if not isinstance(value, str):
        return isinstance(value, date | np.datetime64)
    try:
        float(value)
    except ValueError:
        return True
    return False
