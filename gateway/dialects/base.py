"""What a dialect is: one public wire shape, read into the gateway's own calls and written back as answers.

body ──Dialect.read──▶ ParsedRequest ──(edge.exchange)──▶ generations ──Responder──▶ JSON or an event stream
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from gateway.generations.generation import Call, Generation
from gateway.language.deltas import Delta
from gateway.language.render import ParsedAnswer
from gateway.sessions.identity import Caller
from rollout_queue.contract.records import Turn
from rollout_queue.http.errors import ApiError


class RecordedAnswer(NamedTuple):
    """One generation whose turn is in Redis, with the answer that was parsed from its tokens."""

    generation: Generation
    turn: Turn
    answer: ParsedAnswer


class Events(Protocol):
    """The server-sent events of one reply. Every method returns whole events, or nothing."""

    heartbeat: bytes
    """Keeps a silent stream open; clients ignore it."""

    def opening(self) -> bytes:
        """The events before the first token of any choice, in the order of choices."""
        ...

    def piece(self, index: int, deltas: Sequence[Delta], start: int) -> bytes:
        """The events for what choice `index` adds; its tokens from `start` on are new."""
        ...

    def closing(self, index: int, recorded: RecordedAnswer) -> bytes:
        """The last events of one choice, once its turn is recorded."""
        ...

    def ending(self) -> bytes:
        """The end of the stream."""
        ...

    def failing(self, error: ApiError) -> bytes:
        """The end of a stream that an error cut short."""
        ...


class Responder(Protocol):
    """Writes the reply to one request, as one body or as a stream."""

    def body(self, recorded: Sequence[RecordedAnswer]) -> bytes: ...

    def events(self, generations: Sequence[Generation]) -> Events: ...


class ParsedRequest(msgspec.Struct, frozen=True):
    """A request as a dialect has read it: what to sample, and how to answer."""

    calls: Sequence[Call]
    """One call for each prompt; only the completions dialect takes several."""
    responder: Responder
    n: int = 1
    """Answers to each call."""
    stream: bool = False
    model: str | None = None
    metadata: Mapping[str, Any] | None = None
    """What the client sent as `metadata`; it may name a session."""
    session_id: str | None = None
    """The session of the response that the request continues (`previous_response_id`)."""
    store: Callable[[Sequence[RecordedAnswer]], Awaitable[None]] | None = None
    """Stores what later requests may refer to; awaited before the client hears the end."""


class Dialect(Protocol):
    """One wire shape. It keeps nothing between calls."""

    prefix: str
    """What the ids of its replies begin with."""

    async def read(self, caller: Caller, body: bytes, heavy: bool) -> ParsedRequest:
        """Parse and check a request body; `heavy` ones are tokenized off the event loop.

        Raises InvalidRequest for what is no request of this dialect.
        """
        ...

    def error(self, error: ApiError) -> bytes:
        """The body of an error in the dialect's wire shape."""
        ...
