"""Limits on iterations and time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Limits:
    """The iterations and seconds that a solver may take, and the iterations it has used."""

    max_iter: int
    max_seconds: float | None = None
    begun: float = field(default_factory=time.monotonic)  # time.monotonic() at the start, seconds
    used: int = 0  # iterations

    def find_reached(self) -> str | None:
        """Return the name of the limit that has been reached, or None."""
        if self.used >= self.max_iter:
            return "max_iter"
        late = self.max_seconds is not None and time.monotonic() - self.begun > self.max_seconds
        return "max_seconds" if late else None
