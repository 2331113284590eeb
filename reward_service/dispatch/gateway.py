"""The calls to the gateway: its list of sessions that wait for a reward, one session, and a reward.

GatewayFailure
├── GatewayAway        later it may answer
├── GatewayRefusal     it refuses, and will refuse again
└── SessionTooLarge
"""

from collections.abc import AsyncIterator
from enum import Enum
from typing import Any, TypeVar

import httpx
import msgspec

from reward_service.bounded import AnswerTooLarge, read_bounded
from reward_service.dispatch.reward_rules import DispatchSettings
from reward_service.dispatch.waiting_sessions import (
    GroupMember,
    MemberPage,
    SessionToGrade,
    WaitingPage,
    WaitingSession,
)
from rollout_queue import clock
from rollout_queue.foreign_json import read_json
from rollout_queue.protocol.message import error_message

T = TypeVar("T")
GONE = (404, 410)
PAGE_BYTES = 64 * 2**20
"""A page of 1000 sessions, each with 16 KiB of metadata, has a third of it."""


class GatewayFailure(Exception):
    """The gateway did not do what it was asked."""


class GatewayAway(GatewayFailure):
    """It did not answer, or cannot answer now."""


class GatewayRefusal(GatewayFailure):
    """It refused, or its answer cannot be read."""


class SessionTooLarge(GatewayFailure):
    """The session is larger than this service reads."""


class RewardOutcome(Enum):
    """What the gateway did with a reward."""

    STORED = "rewarded"
    LATE = "late"
    """Stored, but the session had ended without it."""
    ALREADY = "already"
    """The session has another reward with this key."""
    GONE = "gone"
    """The session is deleted, or was removed."""


class SessionGateway:
    """The gateway's public routes. `client` has its URL and a key."""

    def __init__(self, client: httpx.AsyncClient, settings: DispatchSettings) -> None:
        self._client, self._settings = client, settings

    async def waiting(self) -> AsyncIterator[list[WaitingSession]]:
        """All sessions that wait for a reward, page by page, the oldest first. Raises GatewayFailure."""
        cursor: str | None = "0"
        while cursor is not None:
            page = await self._page(WaitingPage, cursor, state="waiting_reward")
            yield page.data
            cursor = page.next_cursor

    async def members(self, group_id: str) -> list[GroupMember]:
        """All sessions of a group. Raises GatewayFailure."""
        found, cursor = list[GroupMember](), "0"
        while True:
            page = await self._page(MemberPage, cursor, group_id=group_id)
            found += page.data
            if page.next_cursor is None:
                return found
            cursor = page.next_cursor

    async def _page(self, kind: type[T], cursor: str, **wanted: str) -> T:
        params = {"limit": str(self._settings.page), "cursor": cursor, **wanted}
        status, body = await self._send("GET", "/sessions", PAGE_BYTES, params=params)
        return _read(_successful(status, body), kind)

    async def session(self, session_id: str) -> SessionToGrade | None:
        """The session with its text; None if there is no such session any more. Raises GatewayFailure."""
        status, body = await self._send(
            "GET", f"/sessions/{session_id}", self._settings.session_bytes, params={"text": "true"}
        )
        return None if status in GONE else _read(_successful(status, body), SessionToGrade)

    async def reward(
        self, session_id: str, value: float, key: str, source: str, turn_id: str | None = None
    ) -> RewardOutcome:
        """Raises GatewayFailure."""
        given = {"value": value, "key": key, "source": source, "turn_id": turn_id}
        status, body = await self._send("POST", f"/sessions/{session_id}/reward", PAGE_BYTES, json=given)
        if status in GONE:
            return RewardOutcome.GONE
        if status == 409:
            return RewardOutcome.ALREADY
        stored = _read(_successful(status, body), StoredReward)
        return RewardOutcome.LATE if stored.late else RewardOutcome.STORED

    async def _send(self, method: str, path: str, most_bytes: int, **more: Any) -> tuple[int, bytes]:
        timeout_s = self._settings.gateway_timeout_s
        try:
            async with clock.timeout(timeout_s):
                request = self._client.build_request(method, path, timeout=timeout_s, **more)
                status, body, _ = await read_bounded(self._client, request, most_bytes)
                return status, body
        except TimeoutError as error:
            raise GatewayAway(f"the gateway did not answer within {timeout_s} s") from error
        except httpx.HTTPError as error:
            raise GatewayAway(f"the gateway: {type(error).__name__}: {error}") from error
        except AnswerTooLarge as error:
            raise SessionTooLarge(str(error)) from error


class StoredReward(msgspec.Struct, frozen=True):
    """The answer to a reward."""

    late: bool = False


def _successful(status: int, body: bytes) -> bytes:
    if 200 <= status < 300:
        return body
    message = f"the gateway answered HTTP {status}: {error_message(body)}"
    # A key that is not known yet, or no more, is the deployment's fault and not the session's.
    later = status in (401, 403, 408, 429) or status >= 500
    raise GatewayAway(message) if later else GatewayRefusal(message)


def _read(body: bytes, kind: type[T]) -> T:
    try:
        return read_json(body, kind)
    except msgspec.DecodeError as error:
        raise GatewayRefusal(f"the gateway's answer cannot be read: {error}") from error
