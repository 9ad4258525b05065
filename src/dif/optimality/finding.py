"""A finding: one condition of a solution and whether it holds. Certificates list findings; bad ones raise errors."""

from __future__ import annotations

from dataclasses import dataclass

from dif.errors import DifError

GOOD, NOTE, BAD = "good", "note", "bad"  # verdicts: the condition holds, holds with a reservation, fails


@dataclass(frozen=True)
class Finding:
    """The answer to one question about a point, in sentences."""

    what: str  # the question
    verdict: str  # good, note or bad
    found: str
    meaning: str
    cure: str = ""
    allowed: str = ""
    error: type[DifError] = DifError  # raised by `check` where the verdict is bad
    otherwise: str = ""  # how a caller can go on regardless; only the error says it

    @property
    def measured(self) -> str:
        """The text of `found`, followed by that of `allowed` if there is one."""
        return f"{self.found} {self.allowed}".strip()

    def check(self) -> None:
        """Raise where the verdict is bad."""
        if self.verdict == BAD:
            raise self.error(self.found, self.allowed, self.meaning, f"{self.cure} {self.otherwise}".strip())
