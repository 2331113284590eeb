"""One attempt to grade one session: what it may return, and how it fails."""

from dataclasses import dataclass
from typing import Protocol

from reward_service.dispatch.sessions import SessionToGrade


class AttemptFailed(Exception):
    """The grader gave no reward. A missing reward is never a reward of 0."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final
        """Whether a further attempt cannot succeed."""


@dataclass(frozen=True)
class SessionReward:
    """What a grader gave."""

    value: float
    """Finite."""
    turn_id: str | None = None
    """The turn that it credits; None for the session."""


class SessionGrader(Protocol):
    """Grades sessions for one rule."""

    async def grade(self, session: SessionToGrade, attempt: int) -> SessionReward | None:
        """The reward; None if the grader has no opinion. Raises AttemptFailed."""
        ...
