"""Writes a stream in flight once more, from its first token, to a client that repeats the call.

The events are made again from the tokens, which are kept for the record anyway. So a stream stores no output
for a retry that may never come.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.dialects.base import ParsedRequest, RecordedAnswer
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.reply import Reply
from gateway.edge.streaming import answer_stream, opening_headers, reply_headers
from gateway.edge.writing import written
from gateway.generations.generation import Generation
from gateway.parts import GatewayParts
from rollout_queue.http.errors import ApiError

MAX_PIECE = 256
"""The most tokens that are written in one piece. Other calls run between two pieces."""


class Progress(Protocol):
    """The call whose stream is written to another client."""

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
    """A stream that can be written to other clients as well."""

    gateway: GatewayParts
    parsed: ParsedRequest
    generations: Sequence[Generation]
    recorded: dict[int, RecordedAnswer] = field(default_factory=dict)
    """The complete answers, by the index of their choice."""
    failure: ApiError | None = None
    """The error with which the stream ended after it had begun; None without one."""

    async def tell(self, reply: Reply, call: Progress) -> None:
        """Write the stream to another client, until the call ends."""
        events = self.parsed.responder.events(self.generations)
        every_s = self.gateway.settings.heartbeat_s
        reply.keep_alive(events.heartbeat, every_s, lambda: opening_headers(self.generations))
        answers = [answer_stream(self.gateway, generation) for generation in self.generations]
        told, closed = [0] * len(self.generations), set[int]()
        unsent, ended, behind = events.opening(), False, False
        while not ended or behind:
            seen, ended, behind = call.changes, call.ended, False
            for index, generation in enumerate(self.generations):
                if (start := told[index]) < len(generation.ids):
                    told[index] = end = min(start + MAX_PIECE, len(generation.ids))
                    deltas = answers[index].feed(generation.ids[start : min(end, generation.text_tokens)])
                    unsent += events.piece(index, deltas, range(start, end))
                    behind |= end < len(generation.ids)
                if index in self.recorded and index not in closed and told[index] == len(generation.ids):
                    closed.add(index)
                    done = self.recorded[index]
                    unsent += events.piece(index, answers[index].finish(done.answer), range(0))
                    closing = await written([generation], events.closing, index, done)
                    unsent += closing
            if any(told) or closed:
                if not reply.begun:
                    await reply.open_stream(reply_headers(self.generations))
                if unsent:
                    now, unsent = unsent, b""
                    await reply.write(now)
            if behind:
                await asyncio.sleep(0)
            elif not ended:
                await call.change(seen)
        failure = self.failure or call.failure
        if failure is None:
            await reply.close(events.ending())
        elif reply.begun:
            error = api_error(failure) if isinstance(failure, ANSWERABLE) else ApiError(500, "internal error")
            await reply.close(events.failing(error))
        else:
            raise failure
