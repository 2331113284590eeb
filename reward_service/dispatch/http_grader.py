"""A grader behind a URL, which grades a session, or all sessions of a group.

POST url {"kind": "session" or "group", "key", "rubric", "attempt",
          "sessions": [{session_id, task_id, group_id, metadata, status, turn_ids, turns}]}
 ──▶ {"rewards": [{"session_id", "value": number or null, "turn_id"?, "explanation"?}]}

The call is made at least once, and may be made again. The header `idempotency-key` tells which calls are one.

An answer with several rewards of one session is refused. The gateway stores one at a time, so a service that
is killed in between would leave the session with a part of them.
"""

import math
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from reward_service.bounded import AnswerTooLarge, read_bounded
from reward_service.dispatch.attempt import AttemptFailed, SessionReward, SourcedReward
from reward_service.dispatch.rules import HttpRule
from reward_service.dispatch.sessions import SessionToGrade
from rollout_queue.foreign_json import read_json
from rollout_queue.protocol.errors import error_message


class GivenReward(msgspec.Struct, frozen=True):
    """A reward in a grader's answer."""

    session_id: str
    value: float | None
    turn_id: str | None = None
    key: str | None = None
    explanation: str | None = None


class GivenRewards(msgspec.Struct, frozen=True):
    """A grader's answer."""

    rewards: list[GivenReward]


class HttpGraderCall:
    """Calls the URL of a rule."""

    def __init__(self, rule: HttpRule, client: httpx.AsyncClient, most_bytes: int) -> None:
        self._rule, self._client, self._most_bytes = rule, client, most_bytes

    async def answer(self, sessions: Sequence[SessionToGrade], unit: str, attempt: int) -> bytes:
        """The body of a successful answer. Raises AttemptFailed."""
        body = {
            "kind": self._rule.per,
            "sessions": [_shown(session) for session in sessions],
            "key": self._rule.name,
            "rubric": self._rule.rubric,
            "attempt": attempt,
        }
        headers = {"idempotency-key": f"{unit}/{self._rule.name}"}
        if self._rule.api_key:
            headers["authorization"] = f"Bearer {self._rule.api_key}"
        timeout_s = self._rule.timeout_s
        try:
            request = self._client.build_request(
                "POST", self._rule.url, json=body, headers=headers, timeout=timeout_s
            )
            status, answer, _ = await read_bounded(self._client, request, self._most_bytes)
        except (httpx.HTTPError, httpx.InvalidURL, AnswerTooLarge) as error:
            raise AttemptFailed(f"{type(error).__name__}: {error}") from error
        if not 200 <= status < 300:
            raise AttemptFailed(f"HTTP {status}: {error_message(answer)}")
        return answer


class HttpSessionGrader:
    """Has each session graded by itself."""

    def __init__(self, call: HttpGraderCall) -> None:
        self._call = call

    async def grade(self, session: SessionToGrade, attempt: int) -> SessionReward | None:
        answer = await self._call.answer([session], session.session_id, attempt)
        given = read_rewards(answer, [session])
        return given[0] if given else None


class HttpGroupGrader:
    """Has the sessions of a group graded together."""

    def __init__(self, call: HttpGraderCall, source: str) -> None:
        self._call, self._source = call, source

    async def grade(
        self, sessions: Sequence[SessionToGrade], unit: str, attempt: int
    ) -> Sequence[SourcedReward | None]:
        rewards = read_rewards(await self._call.answer(sessions, unit, attempt), sessions)
        if not rewards:
            raise AttemptFailed("the answer has no rewards")
        return [None if each is None else SourcedReward(each, self._source) for each in rewards]


def read_rewards(answer: bytes, sessions: Sequence[SessionToGrade]) -> Sequence[SessionReward | None]:
    """The reward of each session, None where it is null; empty if there are none. Raises AttemptFailed."""
    try:
        rewards = read_json(answer, GivenRewards).rewards
    except msgspec.DecodeError as error:
        raise AttemptFailed(f"the answer has no rewards: {error}") from error
    asked = {session.session_id for session in sessions}
    if foreign := [each.session_id for each in rewards if each.session_id not in asked]:
        raise AttemptFailed(f"the answer rewards another session: {foreign[0][:200]!r}")
    given = {each.session_id: each for each in rewards}
    if len(rewards) > len(given):
        raise AttemptFailed(f"the answer has {len(rewards)} rewards of {len(given)} sessions")
    if not given:
        return []
    if missing := asked - given.keys():
        raise AttemptFailed(f"the answer has no reward of {len(missing)} sessions, such as {min(missing)!r}")
    return [_reward(given[session.session_id], session) for session in sessions]


def _reward(given: GivenReward, session: SessionToGrade) -> SessionReward | None:
    if given.value is None:
        return None
    if not math.isfinite(given.value):
        raise AttemptFailed(f"the reward is {given.value}")
    if given.turn_id is not None and given.turn_id not in {turn.turn_id for turn in session.turns}:
        raise AttemptFailed(f"the session has no turn {given.turn_id[:200]!r}")
    return SessionReward(given.value, given.turn_id)


def _shown(session: SessionToGrade) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "task_id": session.task_id,
        "group_id": session.group_id,
        "metadata": session.metadata,
        "status": session.status,
        "turn_ids": [turn.turn_id for turn in session.branch],
        "turns": [
            {
                "turn_id": turn.turn_id,
                "context_text": turn.context_text,
                "output_text": turn.output_text,
                "message": turn.message,
                "finish_reason": turn.finish_reason,
            }
            for turn in session.branch
        ],
    }
