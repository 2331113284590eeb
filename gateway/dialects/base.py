"""A dialect is one public wire shape: it reads a request into `Call`s, and writes the answers to it.

body ──Dialect.read──▶ ParsedRequest ──(edge.exchange)──▶ generations ──Responder──▶ JSON or an event stream
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from gateway.callers.identity import Caller
from gateway.generations.generation import Call, Generation
from gateway.language.deltas import Delta
from gateway.language.parsed_answer import ParsedAnswer
from rollout_queue.contract.records import Turn
from rollout_queue.http.errors import ApiError


class RecordedAnswer(NamedTuple):
    """A generation, its turn in Redis, and the answer that was parsed from its tokens."""

    generation: Generation
    turn: Turn
    answer: ParsedAnswer


class Events(Protocol):
    """The server-sent events of one reply. Every method returns whole events, or nothing."""

    heartbeat: bytes
    """The event that keeps a silent stream open; clients ignore it."""

    def opening(self) -> bytes:
        """The events before the first token of any choice, in the order of choices."""
        ...

    def piece(self, index: int, deltas: Sequence[Delta], tokens: range) -> bytes:
        """The events for new `deltas` of choice `index`, and for its new tokens, given by their places."""
        ...

    def closing(self, index: int, recorded: RecordedAnswer) -> bytes:
        """The last events of one choice, once its turn is recorded."""
        ...

    def ending(self) -> bytes:
        """The last events of the stream."""
        ...

    def failing(self, error: ApiError) -> bytes:
        """The last events of a stream that ends with an error."""
        ...


class Responder(Protocol):
    """Writes the reply to one request, as one body or as a stream."""

    def body(self, recorded: Sequence[RecordedAnswer]) -> bytes: ...

    def events(self, generations: Sequence[Generation]) -> Events: ...


class BackgroundReply(Protocol):
    """The reply to a request whose answer is made in the background: it is stored, and read by its id.

    All methods raise StorageUnavailable.
    """

    async def begin(self, generation: Generation) -> bytes:
        """Store that the answer is being made. Returns the body of the reply. Raises Deleted."""
        ...

    async def renew(self) -> bool:
        """Say that the answer is still being made. Returns False if it was cancelled or deleted."""
        ...

    async def end(self, recorded: RecordedAnswer) -> None:
        """Store the answer, unless it was cancelled or deleted. Raises Deleted."""
        ...

    async def fail(self, error: ApiError) -> None:
        """Store that there is no answer, unless it was cancelled or deleted."""
        ...


class ParsedRequest(msgspec.Struct, frozen=True):
    """A request as a dialect has read it: the calls to sample, and the responder that writes the reply."""

    calls: Sequence[Call]
    """One call for each prompt. Only the completions dialect takes several prompts."""
    responder: Responder
    n: int = 1
    """The number of answers to each call."""
    stream: bool = False
    model: str | None = None
    metadata: Mapping[str, Any] | None = None
    """The client's `metadata`, which may name a session."""
    session_id: str | None = None
    """The session of the response that the request continues (`previous_response_id`)."""
    store: Callable[[Sequence[RecordedAnswer]], Awaitable[None]] | None = None
    """Stores the answers for later requests that refer to them; awaited before the reply ends."""
    background: BackgroundReply | None = None
    """Set if the client does not wait for the answer."""


class Dialect(Protocol):
    """One wire shape. It has no state between calls."""

    prefix: str
    """The prefix of the ids of its replies."""

    async def read(self, caller: Caller, body: bytes, heavy: bool) -> ParsedRequest:
        """Parse and check a request body; a `heavy` body is tokenized in a thread.

        Raises InvalidRequest for a body that this dialect does not accept.
        """
        ...

    def error(self, error: ApiError) -> bytes:
        """The body of an error in the dialect's wire shape."""
        ...
