"""What the gateway says of sessions: those that wait for a reward, and one of them with its turns; and one
attempt to grade one: what it may return, and how it fails.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import msgspec

from reward_service.graders.grade import sample_of

NOT_GRADED = frozenset({"orphan_retry", "aborted"})
"""Verdicts of turns that a retry replaced, or whose client left."""


class WaitingSession(msgspec.Struct, frozen=True):
    """A row of the list."""

    session_id: str
    task_id: str | None
    group_id: str | None
    metadata: dict[str, Any]


class GroupMember(msgspec.Struct, frozen=True):
    """A row of the list of a group."""

    session_id: str
    state: str
    status: str | None
    reward: float | None
    group_size: int | None
    created_at: float
    expires_at: float

    @property
    def waits(self) -> bool:
        """Whether it is finished and has no reward."""
        return self.state == "waiting_reward"

    @property
    def compared(self) -> bool:
        """Whether it waits or has a reward: a service that was killed may have rewarded a part of a group."""
        return self.waits or (self.state == "finished" and self.reward is not None)


class MemberPage(msgspec.Struct, frozen=True):
    data: list[GroupMember]
    next_cursor: str | None


class WaitingPage(msgspec.Struct, frozen=True):
    data: list[WaitingSession]
    next_cursor: str | None


class GradedVerdict(msgspec.Struct, frozen=True):
    code: str


class GradedTurn(msgspec.Struct, frozen=True):
    """A turn with its text."""

    turn_id: str
    parent_id: str | None
    relation: str
    finish_reason: str
    side_call: str | None
    verdict: GradedVerdict
    context_text: str
    """What the model read since the turn before, with the markers of the chat template."""
    output_text: str
    message: dict[str, Any]
    """What the model answered, as in a chat completion."""


class SessionToGrade(msgspec.Struct, frozen=True, dict=True):
    """A session with its turns."""

    session_id: str
    task_id: str | None
    group_id: str | None
    state: str
    status: str | None
    reward: float | None
    metadata: dict[str, Any]
    turns: list[GradedTurn]

    @property
    def waits(self) -> bool:
        """Whether it is finished and has no reward."""
        return self.state == "waiting_reward"

    @cached_property
    def branch(self) -> Sequence[GradedTurn]:
        """The turns from the root to the last one that counts; empty if there is none."""
        by_id = {turn.turn_id: turn for turn in self.turns}
        counted = [
            turn for turn in self.turns if turn.side_call is None and turn.verdict.code not in NOT_GRADED
        ]
        turn = counted[-1] if counted else None
        branch = list[GradedTurn]()
        while turn is not None:
            branch.append(turn)
            turn = by_id.get(turn.parent_id) if turn.parent_id else None
        return branch[::-1]

    @property
    def transcript(self) -> str:
        """The whole episode as the model read and wrote it."""
        return "".join(turn.context_text + turn.output_text for turn in self.branch)

    @property
    def sample(self) -> Mapping[str, Any] | None:
        """OpenAI's namespace `sample` of the last answer, and the `transcript`; None without an answer."""
        if not self.branch:
            return None
        last = self.branch[-1]
        made = sample_of(str(last.message.get("content") or ""), last.message, last.finish_reason)
        return made | {"transcript": self.transcript}

    @property
    def item(self) -> Mapping[str, Any]:
        """OpenAI's namespace `item`: `metadata.item` if that is an object, else the metadata."""
        item = self.metadata.get("item")
        return item if isinstance(item, dict) else self.metadata


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
