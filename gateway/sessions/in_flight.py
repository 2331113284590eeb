"""Keeps sessions open while calls are in flight: a call is a sign of life, however long its answer takes."""

from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from rollout_queue import clock
from rollout_queue.contract.errors import SessionClosed
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.stream import StreamWriter

MARGIN_S = 5.0
"""A session with calls in flight is extended this long before it expires. Some polls may be late."""


@dataclass
class SessionInFlight:
    """A session with calls in flight."""

    ttl_s: float
    expires_at: float
    """Seconds since the epoch; as far as this gateway knows, the session expires then."""
    calls: int = 0

    @property
    def due(self) -> bool:
        """Whether the expiry has to be put off now."""
        return self.expires_at < clock.now() + max(MARGIN_S, self.ttl_s / 4)


class CallsInFlight:
    """The sessions of this gateway that have calls in flight."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._sessions: dict[str, SessionInFlight] = {}

    def call(self, head: SessionHead) -> "KeptOpen":
        """Keep the session open inside an `async with` block."""
        return KeptOpen(self, head)

    async def enter(self, head: SessionHead) -> SessionInFlight:
        """A call of the session begins. Raises StorageUnavailable."""
        spec = head.spec
        session = self._sessions.get(spec.session_id)
        if session is None:
            session = self._sessions[spec.session_id] = SessionInFlight(spec.ttl_s, head.expires_at)
        session.calls += 1
        if head.stored and session.expires_at < clock.now() + MARGIN_S:
            try:
                await self._put_off(spec.session_id, session)
            except BaseException:
                self.leave(spec.session_id, session)
                raise
        return session

    def leave(self, session_id: str, session: SessionInFlight) -> None:
        """A call of the session ended."""
        session.calls -= 1
        # The turn of this call has set a new expiry. Other calls in flight may outlast it.
        session.expires_at = min(session.expires_at, clock.now() + session.ttl_s)
        if not session.calls:
            self._sessions.pop(session_id, None)

    async def put_off_expiry(self) -> None:
        """Put off the expiry of every session whose expiry is near. Raises StorageUnavailable."""
        for session_id, session in list(self._sessions.items()):
            if session.due:
                await self._put_off(session_id, session)

    async def _put_off(self, session_id: str, session: SessionInFlight) -> None:
        # The session may have got another time to live since the call began, so Redis says when it expires.
        with suppress(SessionClosed):  # it was finished meanwhile, or its first turn will open it
            session.expires_at = await self._writer.heartbeat(session_id, clock.now(), 2 * MARGIN_S)


class KeptOpen:
    """The block of `CallsInFlight.call`. It is a class, because a generator would cost each call more."""

    __slots__ = ("_calls", "_head", "_session")

    def __init__(self, calls: CallsInFlight, head: SessionHead) -> None:
        self._calls, self._head = calls, head

    async def __aenter__(self) -> None:
        self._session = await self._calls.enter(self._head)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.leave(self._head.spec.session_id, self._session)
