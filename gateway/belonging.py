"""Which session a call belongs to; first match wins.

path ▸ session key ▸ header ▸ body metadata ▸ the open session whose turn it continues ▸ a new one
"""

import time
from typing import Any

from starlette.requests import Request

from gateway.conversation import chain, continuation_digests
from gateway.identity import Caller
from gateway.render import Message, Tool
from gateway.sessions import ID, SessionBody, Sessions
from rollout_queue.head import SessionHead
from rollout_queue.stream import StreamWriter
from rollout_queue.web.errors import ApiError

HEADERS = (
    "x-session-id",
    "x-weir-session-id",
    "x-litellm-session-id",
    "session-id",
    "session_id",
)


class Belonging:
    """Finds, or opens, the session of a call."""

    def __init__(self, sessions: Sessions, writer: StreamWriter) -> None:
        self._sessions = sessions
        self._writer = writer

    async def session_of(
        self,
        request: Request,
        caller: Caller,
        metadata: dict[str, Any] | None,
        messages: list[Message],
        tools: list[Tool] | None,
    ) -> SessionHead:
        """Raises ApiError 403 for a session key that names another session, 409 for a session that ended."""
        names = _names(request, metadata)
        if caller.session_id is not None and any(name != caller.session_id for name in names):
            raise ApiError(403, "the session key opens another session than the one named")
        session_id = names[0] if names else caller.session_id
        if session_id is None:
            head = await self._continued(caller, messages, tools)
            return head or await self._opened(None, caller)
        head = await self._writer.load(session_id) or await self._opened(session_id, caller)
        if not caller.owns(head.spec):
            raise ApiError(404, f"no session {session_id!r}")
        if refusal := _refusal(head):
            raise refusal
        return head

    async def _continued(
        self, caller: Caller, messages: list[Message], tools: list[Tool] | None
    ) -> SessionHead | None:
        """The open session of this key whose turn the call continues."""
        digests = continuation_digests(messages, chain(tools, messages))
        session_id = await self._writer.find_continuation(caller.owner, digests)
        head = await self._writer.load(session_id) if session_id is not None else None
        return head if head is not None and _refusal(head) is None else None

    async def _opened(self, session_id: str | None, caller: Caller) -> SessionHead:
        """A new session; `inferred` where nobody named it."""
        if caller.session_id is not None:
            raise ApiError(404, f"no session {session_id!r}")
        body = SessionBody(session_id=session_id)
        spec, _ = await self._sessions.open(
            self._sessions.spec_of(body, caller, inferred=session_id is None), caller
        )
        return SessionHead(spec=spec)


def _names(request: Request, metadata: dict[str, Any] | None) -> list[str]:
    """Every session that the call names, the one that counts first. Raises ApiError 400 for what is no id."""
    given = [request.path_params.get("session_id"), *map(request.headers.get, HEADERS)]
    given.append((metadata or {}).get("session_id"))
    names = [name for name in given if name not in (None, "")]
    for name in names:
        if not (isinstance(name, str) and ID.fullmatch(name)):
            raise ApiError(400, f"not a session id: {name!r}", param="session_id")
    return names


def _refusal(head: SessionHead) -> ApiError | None:
    """Why a session takes no call; None when it does."""
    session_id, verdict = head.spec.session_id, head.verdict
    overdue = head.state == "open" and head.expires_at < time.time()
    if overdue or (verdict is not None and verdict.code == "expired"):
        return ApiError(409, f"session {session_id} has expired", code="session_expired")
    if head.state != "open":
        return ApiError(409, f"session {session_id} is finished", code="session_finished")
    return None
