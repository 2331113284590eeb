"""One attempt to grade one session: what it may return, and how it fails."""

from collections.abc import Sequence
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


@dataclass(frozen=True)
class SourcedReward:
    """A reward, and the `source` that is recorded with it."""

    reward: SessionReward
    source: str


class GroupGrader(Protocol):
    """Grades the sessions of a group at once for one rule."""

    async def grade(
        self, sessions: Sequence[SessionToGrade], unit: str, attempt: int
    ) -> Sequence[SourcedReward | None]:
        """The reward of each session; None if the grader has no opinion on it. Raises AttemptFailed."""
        ...


class SessionGrader(Protocol):
    """Grades sessions for one rule."""

    async def grade(self, session: SessionToGrade, attempt: int) -> SessionReward | None:
        """The reward; None if the grader has no opinion. Raises AttemptFailed."""
        ...
