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
        named = self._named(request, metadata)
        if caller.session_id is not None and named not in (None, caller.session_id):
            raise ApiError(403, "the session key opens another session than the one named")
        session_id = named or caller.session_id
        inferred = session_id is None
        if session_id is None:
            digests = continuation_digests(messages, chain(tools, messages))
            session_id = await self._writer.find_continuation(caller.owner, digests)
        head = await self._open(session_id, caller, inferred=inferred)
        if head.state != "open":
            raise ApiError(409, f"session {head.spec.session_id} is finished", code="session_finished")
        if head.expires_at < time.time():
            raise ApiError(409, f"session {head.spec.session_id} has expired", code="session_expired")
        return head

    async def _open(self, session_id: str | None, caller: Caller, *, inferred: bool) -> SessionHead:
        if session_id is not None:
            head = await self._writer.load(session_id)
            if head is not None:
                if not caller.owns(head.spec):
                    raise ApiError(404, f"no session {session_id!r}")
                return head
        if caller.session_id is not None:
            raise ApiError(404, f"no session {session_id!r}")
        spec = self._sessions.spec_of(SessionBody(session_id=session_id), caller, inferred=inferred)
        spec, _ = await self._sessions.open(spec, caller)
        return SessionHead(spec=spec)

    @staticmethod
    def _named(request: Request, metadata: dict[str, Any] | None) -> str | None:
        named = request.path_params.get("session_id")
        for header in HEADERS:
            named = named or request.headers.get(header)
        named = named or (metadata or {}).get("session_id")
        if named is not None and not (isinstance(named, str) and ID.fullmatch(named)):
            raise ApiError(400, f"not a session id: {named!r}", param="session_id")
        return named
