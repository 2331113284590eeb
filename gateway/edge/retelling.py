"""Tells a stream that is in flight to a client that repeats its call, from the first token.

The events are written again from the tokens that are kept for the record, so a stream keeps no output for
a retry that may never come.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.dialects.base import ParsedRequest, RecordedAnswer
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.reply import Reply
from gateway.edge.streaming import answer_stream, opening_headers, reply_headers
from gateway.generations.generation import Generation
from gateway.wiring import GatewayParts
from rollout_queue.http.errors import ApiError


class Progress(Protocol):
    """The call whose stream is told."""

    changes: int
    """Grows whenever there is more to tell."""
    ended: bool
    failure: Exception | None
    """The error that ended the call, if one did."""

    async def change(self, seen: int) -> None:
        """Wait until `changes` is no longer `seen`."""
        ...


@dataclass
class ToldStream:
    """A stream that other clients may hear."""

    gateway: GatewayParts
    parsed: ParsedRequest
    generations: Sequence[Generation]
    recorded: dict[int, RecordedAnswer] = field(default_factory=dict)
    """The answers that are complete, by choice."""
    failure: ApiError | None = None
    """The error that ended the stream, if one did after it had begun."""

    async def tell(self, reply: Reply, call: Progress) -> None:
        """Write the stream to another client, until the call ends."""
        events = self.parsed.responder.events(self.generations)
        every_s = self.gateway.settings.heartbeat_s
        reply.keep_alive(events.heartbeat, every_s, lambda: opening_headers(self.generations))
        answers = [answer_stream(self.gateway, generation) for generation in self.generations]
        told, closed = [0] * len(self.generations), set[int]()
        unsent, ended = events.opening(), False
        while not ended:
            seen, ended = call.changes, call.ended
            for index, generation in enumerate(self.generations):
                if (start := told[index]) < len(generation.ids):
                    told[index] = len(generation.ids)
                    unsent += events.piece(index, answers[index].feed(generation.ids[start:]), start)
                if index in self.recorded and index not in closed:
                    closed.add(index)
                    done = self.recorded[index]
                    unsent += events.piece(index, answers[index].finish(done.answer), told[index])
                    unsent += events.closing(index, done)
            if any(told) or closed:
                if not reply.begun:
                    await reply.open_stream(reply_headers(self.generations))
                if unsent:
                    now, unsent = unsent, b""
                    await reply.write(now)
            if not ended:
                await call.change(seen)
        failure = self.failure or call.failure
        if failure is None:
            await reply.close(events.ending())
        elif reply.begun:
            error = api_error(failure) if isinstance(failure, ANSWERABLE) else ApiError(500, "internal error")
            await reply.close(events.failing(error))
        else:
            raise failure
