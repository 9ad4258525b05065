"""What every result of an evaluation shows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from dif.evaluation.table import Table


class Result(ABC):
    """A result that is a table and a picture."""

    @abstractmethod
    def table(self) -> Table:
        """Return the numbers that matter, one row per method."""

    def to_frame(self) -> Any:
        """Return the table as a pandas DataFrame."""
        return self.table().to_frame()

    def __repr__(self) -> str:
        return str(self.table())
