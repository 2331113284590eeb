"""A grader behind a URL.

POST url {"kind": "session", "sessions": [{session_id, task_id, group_id, metadata, status, turn_ids, turns}],
          "key", "rubric", "attempt"}
 ──▶ {"rewards": [{"session_id", "value": number or null, "turn_id"?, "explanation"?}]}

The call is made at least once, and may be made again. `key` and the session's id tell which calls are one.
"""

import math
from typing import Any

import httpx
import msgspec

from reward_service.bounded import AnswerTooLarge, read_bounded
from reward_service.dispatch.attempt import AttemptFailed, SessionReward
from reward_service.dispatch.rules import HttpRule
from reward_service.dispatch.sessions import SessionToGrade
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


class HttpSessionGrader:
    """Calls the URL of a rule."""

    def __init__(self, rule: HttpRule, client: httpx.AsyncClient, most_bytes: int) -> None:
        self._rule, self._client, self._most_bytes = rule, client, most_bytes

    async def grade(self, session: SessionToGrade, attempt: int) -> SessionReward | None:
        body = {
            "kind": "session",
            "sessions": [_shown(session)],
            "key": self._rule.name,
            "rubric": self._rule.rubric,
            "attempt": attempt,
        }
        headers = {"idempotency-key": f"{session.session_id}/{self._rule.name}"}
        if self._rule.api_key:
            headers["authorization"] = f"Bearer {self._rule.api_key}"
        timeout_s = self._rule.timeout_s
        try:
            request = self._client.build_request(
                "POST", self._rule.url, json=body, headers=headers, timeout=timeout_s
            )
            status, answer = await read_bounded(self._client, request, self._most_bytes)
        except (httpx.HTTPError, httpx.InvalidURL, AnswerTooLarge) as error:
            raise AttemptFailed(f"{type(error).__name__}: {error}") from error
        if not 200 <= status < 300:
            raise AttemptFailed(f"HTTP {status}: {error_message(answer)}")
        return read_rewards(answer, session)


def read_rewards(answer: bytes, session: SessionToGrade) -> SessionReward | None:
    """The session's reward; None if there is none, or it is null. Raises AttemptFailed.

    An answer with several rewards of one session is refused. The gateway stores one at a time, so a service
    that is killed in between would leave the session with a part of them.
    """
    try:
        rewards = msgspec.json.decode(answer, type=GivenRewards).rewards
    except (msgspec.DecodeError, RecursionError) as error:
        raise AttemptFailed(f"the answer has no rewards: {error}") from error
    if foreign := [each.session_id for each in rewards if each.session_id != session.session_id]:
        raise AttemptFailed(f"the answer rewards another session: {foreign[0][:200]!r}")
    if len(rewards) > 1:
        raise AttemptFailed(f"the answer has {len(rewards)} rewards of one session")
    if not rewards or rewards[0].value is None:
        return None
    value, turn_id = rewards[0].value, rewards[0].turn_id
    if not math.isfinite(value):
        raise AttemptFailed(f"the reward is {value}")
    if turn_id is not None and turn_id not in {turn.turn_id for turn in session.turns}:
        raise AttemptFailed(f"the session has no turn {turn_id[:200]!r}")
    return SessionReward(value, turn_id)


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
