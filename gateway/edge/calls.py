"""Lets a client's retry join the call that it repeats, while that call is in flight.

Both attempts then read one answer, which is sampled and recorded once.

first ──begin──▶ InFlightCall ──▶ first client      no client left for `retry_grace_s` ──▶ stopped
retry ──join─────────┴──────────▶ second client: the whole answer, from its beginning

Writes an answer to the client that made the call, at this client's pace unless others read it, too.

sampling ──message──▶ first client           alone: the sampling waits until the socket takes the message
            └─────────▶ unsent ──task──▶ first client     a retry reads as well: nobody waits for this socket

Writes a stream in flight once more, from its first token, to a client that repeats the call.

The events are made again from the tokens, which are kept for the record anyway. So a stream stores no output
for a retry that may never come.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import msgspec
from starlette.types import Message, Send

from gateway.callers.identity import Caller
from gateway.dialects.base import ParsedRequest, RecordedAnswer
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.reply import Reply, answer_stream, opening_headers, reply_headers, written
from gateway.edge.request import DisconnectWatch
from gateway.generations.generation import Generation
from gateway.parts import GatewayParts
from rollout_queue import clock
from rollout_queue.http.errors import ApiError


class FirstClient:
    """The client that made a call, and what is still to be sent to it once others read the answer, too."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._gone = self._complete = False
        self._sending: dict[asyncio.Task[object], int] = {}
        """The tasks that wait for the client's socket, and how often each had been cancelled before."""
        self._freed: set[asyncio.Task[object]] = set()
        self._unsent: deque[Message] = deque()
        self._more = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        if self._gone:
            return
        if self._writing is not None:
            self._later(message)
            return
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a call is always served by a task
        self._sending[task] = task.cancelling()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            # As in asyncio.timeout: if others cancelled the task as well, it stays cancelled.
            if task not in self._freed or task.uncancel() > self._sending[task]:
                raise
            self._later(message)  # the server waits for the socket before it takes a message
        finally:
            del self._sending[task]

    def free(self) -> None:
        """From now on nobody waits for this client. What it has not taken is kept until the call ends."""
        if self._writing is None and not (self._gone or self._complete):
            self._writing = asyncio.create_task(self._write())
            self._freed.update(self._sending)
            for task in self._sending:
                task.cancel()

    def leave(self) -> None:
        """The client has left."""
        self._gone = True
        self._unsent.clear()
        if self._writing is not None:
            self._writing.cancel()

    async def flush(self) -> None:
        """The others have the answer: return when this client has all of it, and wait for it from now on."""
        if self._writing is None:
            return
        writing, self._complete = self._writing, True
        self._more.set()
        try:
            await asyncio.wait([writing])
        finally:
            writing.cancel()
            self._writing = None

    def _later(self, message: Message) -> None:
        self._unsent.append(message)
        self._more.set()

    async def _write(self) -> None:
        while True:
            while self._unsent:
                await self._send(self._unsent.popleft())
            if self._complete:
                return
            self._more.clear()
            await self._more.wait()


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


RETRY_HEADER = "x-stainless-retry-count"


def attempt_of(headers: Mapping[str, str]) -> int:
    """How many attempts of this call the client made before; 0 if it does not say."""
    count = headers.get(RETRY_HEADER, "")
    return int(count) if count.isascii() and count.isdigit() and len(count) < 4 else 0


def request_digest(dialect: str, body: bytes) -> str:
    """A digest of the dialect and the body. An SDK's retry repeats the body byte by byte."""
    return hashlib.sha256(dialect.encode() + b"\0" + body).hexdigest()[:32]


class CallKey(msgspec.Struct, frozen=True):
    """What a call and its retry have in common."""

    caller: Caller
    session_id: str | None
    """In the path."""
    headers: tuple[str | None, ...]
    """The headers that may name the session."""
    digest: str
    """From `request_digest`."""


class InFlightCall:
    """One call in flight, and the number of clients that read its answer.

    `with call:` surrounds the writing of the reply.
    """

    def __init__(
        self,
        calls: "InFlightCalls",
        key: CallKey,
        digest: str,
        attempt: int,
        reply: Reply,
        client: DisconnectWatch,
    ) -> None:
        self.digest = digest
        self.figures = reply.figures
        self.attempt = attempt
        self.latest_attempt = attempt
        """The highest number of an attempt that joined."""
        self.attempts = {attempt}
        """The numbers of all. Attempts may overtake each other on their way through the workers."""
        self.joined_at = 0.0
        """When `latest_attempt` joined, in seconds since the epoch; 0 if none has joined."""
        self.readers = 1
        self.ending: ApiError | None = None
        """Why the gateway ended the call before its answer was complete."""
        self._calls, self._key = calls, key
        self._client = client
        self._first = FirstClient(reply.redirect(self._record))
        self.stream: ToldStream | None = None
        """Set once the call answers with a stream; `_messages` then stays empty."""
        self.changes = 0
        """Grows whenever there is more to tell a client that joined."""
        self.ended = False
        self.failure: Exception | None = None
        self._messages: list[Message] = []
        self._followed = False
        self._changed: asyncio.Event | None = None
        self._stop_timer: clock.Timer | None = None
        client.on_disconnect(self._first_left)

    def __enter__(self) -> "InFlightCall":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._followed:
            self.stream = None  # with it or with the error, the call's memory would wait for the collector
        elif isinstance(error, Exception):
            self.failure = error
        elif error is not None:
            self.failure = self.ending or ApiError(503, "the call that this one repeats was stopped")
        self.ended = True
        self._cancel_stop()
        self._calls.remove(self._key, self)
        self._wake_readers()

    async def wait_for_reader(self) -> None:
        """Wait until a client reads, because an answer without a reader is recorded as aborted.

        If no client comes within the grace period, the whole call is cancelled.
        """
        if self._client.watched:
            await asyncio.sleep(0)  # lets the watching task notice a client that has just left
        while not self.readers:
            await self._change()

    def join(self, attempt: int) -> None:
        self.attempts.add(attempt)
        if attempt > self.latest_attempt:
            self.latest_attempt, self.joined_at = attempt, clock.now()
        self.readers += 1
        self._followed = True
        self._first.free()
        self._cancel_stop()
        self._wake_readers()

    def end(self, why: ApiError) -> None:
        """End the call before its answer is complete. Its clients get the error."""
        self.ending = why
        self._client.stop(why)

    async def follow(self, reply: Reply) -> None:
        """Send the whole answer to a client that joined. Raises the error that ended the call, if one did."""
        try:
            while self.stream is None and not self.ended:
                await self._change()
            if self.stream is not None:
                await self.stream.tell(reply, self)
                return
            if self.failure is not None:
                raise self.failure
            for message in self._messages:
                await reply.repeat(message)
        finally:
            self._leave()

    async def change(self, seen: int) -> None:
        """Wait until `changes` is no longer `seen`."""
        while self.changes == seen:
            await self._change()

    async def _record(self, message: Message) -> None:
        if self.stream is None:
            self._messages.append(message)
        self._wake_readers()
        await self._first.send(message)

    async def flush(self) -> None:
        """Return when the first client has the whole answer. The others need not wait for that."""
        await self._first.flush()

    def _first_left(self) -> None:
        self._first.leave()
        self._leave()

    def _leave(self) -> None:
        self.readers -= 1
        if not self.readers and not self.ended:
            self._stop_timer = clock.deadline(self._calls.grace_s, self._stop)

    def _stop(self) -> None:
        self._calls.remove(self._key, self)
        self._client.stop()

    def _cancel_stop(self) -> None:
        if self._stop_timer is not None:
            self._stop_timer.cancel()
            self._stop_timer = None

    def _wake_readers(self) -> None:
        self.changes += 1
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()


class InFlightCalls:
    """The calls in flight, by caller and request."""

    def __init__(self, grace_s: float, join_identical: bool) -> None:
        self.grace_s = grace_s
        """How long a call continues without a client, because an SDK that timed out retries soon."""
        self._join_identical = join_identical
        self._calls: dict[CallKey, list[InFlightCall]] = {}

    def join(self, key: CallKey, attempt: int) -> InFlightCall | None:
        """Join the call that this attempt repeats; None if there is none. Of several, rather one that no
        later attempt has joined, and then one without a reader."""
        call = self.find(key, attempt)
        if call is not None:
            call.join(attempt)
        return call

    def may_join(self, attempt: int) -> bool:
        """Whether this attempt may repeat a call in flight."""
        return self._join_identical or attempt > 0

    def find(self, key: CallKey, attempt: int) -> InFlightCall | None:
        """The call that `join` would join."""
        calls = self._calls.get(key)
        if calls is None or not self.may_join(attempt):
            return None
        others = [each for each in calls if self._join_identical or attempt not in each.attempts]
        return min(others, key=lambda each: (each.latest_attempt >= attempt, each.readers > 0), default=None)

    def begin(
        self, key: CallKey, digest: str, attempt: int, reply: Reply, client: DisconnectWatch
    ) -> InFlightCall:
        call = InFlightCall(self, key, digest, attempt, reply, client)
        self._calls.setdefault(key, []).append(call)
        return call

    def end_all(self, why: ApiError) -> None:
        """End every call. Each client gets the error."""
        for call in [each for calls in self._calls.values() for each in calls]:
            call.end(why)

    def remove(self, key: CallKey, call: InFlightCall) -> None:
        """Let no later attempt join the call."""
        calls = self._calls.get(key, [])
        if call in calls:
            calls.remove(call)
        if not calls:
            self._calls.pop(key, None)
