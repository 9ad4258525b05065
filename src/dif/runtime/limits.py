"""How long work may go on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Limits:
    """Iterations and seconds, and what was used of them."""

    max_iter: int
    max_seconds: float | None = None
    begun: float = field(default_factory=time.monotonic)
    used: int = 0

    def spent(self) -> str | None:
        """Which limit has been reached, if one has."""
        if self.used >= self.max_iter:
            return "max_iter"
        late = self.max_seconds is not None and time.monotonic() - self.begun > self.max_seconds
        return "max_seconds" if late else None
