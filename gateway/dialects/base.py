"""A dialect: one public wire shape of asking a model, read into the same inner calls, and told back.

body ──Dialect.read──▶ Ask ──(exchange)──▶ generations ──Telling──▶ JSON, or server-sent events
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from gateway.collaborators import Collaborators
from gateway.edge.request import Arrival
from gateway.generations.generation import Call, Generation
from gateway.language.deltas import Delta
from gateway.language.render import ParsedAnswer
from gateway.sessions.identity import Caller
from rollout_queue.contract.records import Turn
from rollout_queue.http.errors import ApiError


class Answered(NamedTuple):
    """One generation that is recorded, and what it says."""

    generation: Generation
    turn: Turn
    answer: ParsedAnswer


class Events(Protocol):
    """The server-sent events of one reply; every method gives whole events, or nothing."""

    heartbeat: bytes
    """Says that the stream lives; changes nothing."""

    def opening(self) -> bytes:
        """Before the first token of any choice, and in the order of choices."""
        ...

    def piece(self, index: int, deltas: Sequence[Delta], start: int) -> bytes:
        """What choice `index` added; its tokens from `start` on are new."""
        ...

    def closing(self, index: int, answered: Answered) -> bytes:
        """The end of one choice: it is recorded."""
        ...

    def ending(self) -> bytes:
        """The end of the stream."""
        ...

    def failing(self, error: ApiError) -> bytes:
        """The end of a stream that broke."""
        ...


class Telling(Protocol):
    """How one request wants to be answered."""

    def plain(self, answered: Sequence[Answered]) -> bytes: ...

    def events(self, generations: Sequence[Generation]) -> Events: ...


class Ask(msgspec.Struct, frozen=True):
    """A request, understood: what to sample, and how to tell it."""

    calls: Sequence[Call]
    """One, or several prompts in a request where the dialect has that."""
    telling: Telling
    n: int = 1
    """Answers to each call."""
    stream: bool = False
    model: str | None = None
    metadata: dict[str, Any] | None = None
    session_id: str | None = None
    """The session that the request continues by the dialect's own means."""
    keep: Callable[[Sequence[Answered]], Awaitable[None]] | None = None
    """What is to be remembered before the client hears the end."""


class Dialect(Protocol):
    """One wire shape. It keeps nothing between calls."""

    prefix: str
    """What ids of its replies begin with."""

    async def read(self, gateway: Collaborators, caller: Caller, arrival: Arrival) -> Ask:
        """Raises ApiError 400 for what is no request of this dialect."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The body of an error, as the dialect's clients read it."""
        ...
