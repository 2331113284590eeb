"""The calls in flight: each makes an answer in a task; its client, and retries that join it, follow it.

request ──begin──▶ task of the call: read ▸ session ▸ sample ▸ record ──▶ tokens, recorded answers, the end
    └─────follow─▶ the client that made it ◀──┐
retry ──join, follow─▶ a later client ◀───────┴── each from the first token on

begun ──stream_as──▶ streaming ──▶ ended, with all answers or with a failure
  └───answer_with──▶ answered ───▶ ended          └──▶ ended, with a failure

What always holds:

1. `follow` alone writes an answer, to the first client as to those that join. Nothing of what it has written
   is kept: events are made from the tokens, which the record needs anyway, and a body is made once.
2. Every client gets the same answer from its beginning, or the failure: as a status, if nothing was sent to
   it, and else as an event.
3. A client gets the end of an answer after its turn is in Redis. No turn is recorded while nobody follows.
4. Tokens are written where they are appended, if the socket takes them at once, and else by the follower's
   task. While one client follows a stream, the sampling is at most one chunk ahead of its socket. As soon as
   two follow, the sampling waits for none of them, and they do not wait for each other.
5. A call that nobody follows for `grace_s` is cancelled, and what was sampled is recorded as aborted. An
   answer in the background is no longer part of its call: nobody follows it.
6. When a call has ended and the last client has left, its objects do not refer to each other: no memory of it
   waits for the garbage collector.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from gateway.callers.identity import Caller
from gateway.cancellation import cancel_and_wait
from gateway.counters import CallFigures
from gateway.dialects.base import Events, ParsedRequest, RecordedAnswer
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.reply import Headers, Reply, answer_stream, opening_headers, reply_headers, written
from gateway.edge.request import DisconnectWatch
from gateway.generations.generation import Generation
from gateway.parts import GatewayParts
from rollout_queue import clock
from rollout_queue.http.errors import ApiError

logger = logging.getLogger(__name__)

Work = Callable[["InFlightCall"], Awaitable[None]]
"""Makes the answer of a call."""
MAX_PIECE = 256
"""The most tokens that are written in one piece. Other calls run between two pieces."""
RETRY_HEADER = "x-stainless-retry-count"


def attempt_of(headers: Mapping[str, str]) -> int:
    """How many attempts of this call the client made before; 0 if it does not say."""
    count = headers.get(RETRY_HEADER)
    return int(count) if count and count.isascii() and count.isdigit() and len(count) < 4 else 0


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


class StreamedAnswers(msgspec.Struct, frozen=True):
    """What a stream is made of."""

    gateway: GatewayParts
    parsed: ParsedRequest
    generations: Sequence[Generation]
    recorded: dict[int, RecordedAnswer]
    """The complete answers, by the index of their choice."""


class AnswerWriter:
    """Writes the tokens and the ends of streamed answers to one client."""

    def __init__(self, stream: StreamedAnswers, reply: Reply) -> None:
        generations = stream.generations
        self.events = stream.parsed.responder.events(generations)
        self.waits = False
        """All is written, and the task of the client waits for more."""
        self._stream, self._reply = stream, reply
        self._answers = [answer_stream(stream.gateway, generation) for generation in generations]
        self._done = [0] * len(generations)
        """How many tokens of each answer were taken."""
        self._closed = set[int]()
        self._unsent = self.events.opening()
        every_s = stream.gateway.settings.heartbeat_s
        reply.keep_alive(self.events.heartbeat, every_s, lambda: opening_headers(generations))

    def write_now(self) -> bool:
        """Write the tokens that were appended, unless that would wait. Returns whether all are written."""
        if not (self.waits and self._reply.writable) or self._take_tokens():
            return False
        if self._unsent:
            now, self._unsent = self._unsent, b""
            self._reply.write_now(now)
        return True

    async def write(self) -> None:
        """Write all that there is to write."""
        more = True
        while more:
            more = self._take_tokens()
            await self._take_ends()
            if any(self._done) or self._closed:
                if not self._reply.begun:
                    await self._reply.open_stream(reply_headers(self._stream.generations))
                if self._unsent:
                    now, self._unsent = self._unsent, b""
                    await self._reply.write(now)
            if more:
                await asyncio.sleep(0)

    def _take_tokens(self) -> bool:
        """Make events of the next tokens of each answer. Returns whether there are more."""
        more = False
        for index, generation in enumerate(self._stream.generations):
            if (start := self._done[index]) < (total := len(generation.ids)):
                self._done[index] = end = min(start + MAX_PIECE, total)
                deltas = self._answers[index].feed(generation.ids[start : min(end, generation.text_tokens)])
                self._unsent += self.events.piece(index, deltas, range(start, end))
                more |= end < total
        return more

    async def _take_ends(self) -> None:
        """Make events of the answers that are recorded, and whose tokens are all taken."""
        for index, recorded in list(self._stream.recorded.items()):
            generation = self._stream.generations[index]
            if index not in self._closed and self._done[index] == len(generation.ids):
                self._closed.add(index)
                self._unsent += self.events.piece(
                    index, self._answers[index].finish(recorded.answer), range(0)
                )
                self._unsent += await written([generation], self.events.closing, index, recorded)


class InFlightCall:
    """One call, and the number of clients that follow it."""

    def __init__(
        self,
        calls: "InFlightCalls",
        key: CallKey,
        attempt: int,
        figures: CallFigures,
        client: DisconnectWatch,
    ) -> None:
        self.digest = key.digest
        self.figures = figures
        self.attempt = attempt
        self.latest_attempt = attempt
        """The highest number of an attempt that joined."""
        self.attempts = {attempt}
        """The numbers of all. Attempts may overtake each other on their way through the workers."""
        self.joined_at = 0.0
        """When `latest_attempt` joined, in seconds since the epoch; 0 if none has joined."""
        self.readers = 1
        self.more_headers: Callable[[], Headers] = dict
        """Headers of the caller's limits, as of the moment at which a reply begins."""
        self.ended = False
        self._calls, self._key, self._client = calls, key, client
        self._task: asyncio.Task[None] | None = None
        self._begun = self._stopped = False
        self._stop_timer: clock.Timer | None = None
        self._why_ended: ApiError | None = None
        self._failure: Exception | None = None
        """The error that ended the call, if one did."""
        self._stream: StreamedAnswers | None = None
        self._writers: list[AnswerWriter] = []
        self._body: tuple[bytes, Headers] | None = None
        """The answer as one body, and the headers of the reply."""
        self._changes = 0
        """Grows whenever there is more to write."""
        self._written = 0
        """The changes that a client has last written."""
        self._paced = False
        """Whether the sampling waits for the client."""
        self._changed = asyncio.Event()
        """Is set for a moment, which wakes all that wait."""

    def start(self, work: Work) -> None:
        """Begin to make the answer."""
        self._task = asyncio.create_task(self._run(work))
        self._calls.running.add(self._task)

    async def _run(self, work: Work) -> None:
        self._begun = True
        try:
            if self._stopped:
                raise asyncio.CancelledError
            await work(self)
        except asyncio.CancelledError:
            self._failure = self._why_ended or ApiError(503, "the call that this one repeats was stopped")
        except Exception as error:  # raised again by `follow`
            self._failure = error
        finally:
            if self._task is not None:
                self._calls.running.discard(self._task)
            self.ended, self._task = True, None
            self._cancel_stop()
            self._calls.remove(self._key, self)
            self.wake()
            if not self.readers:
                self._forget()

    # The side of the task that makes the answer

    def stream_as(
        self, gateway: GatewayParts, parsed: ParsedRequest, generations: Sequence[Generation]
    ) -> dict[int, RecordedAnswer]:
        """From now on the tokens of these generations are written as events. Returns where to put the answers
        that are recorded."""
        self._stream = StreamedAnswers(gateway, parsed, generations, {})
        self.wake()
        return self._stream.recorded

    def answer_with(self, body: bytes, headers: Headers) -> None:
        """Answer with one body, and the caller's limits as they are before its tokens are spent."""
        self._body, self.more_headers = (body, {**headers, **self.more_headers()}), dict

    def appended(self) -> Callable[[], Awaitable[None]] | None:
        """Tokens are appended. Returns what waits for the client, if one alone follows, and is behind."""
        self._changes += 1
        for writer in self._writers:
            if writer.write_now():
                self._written = self._changes
            else:
                self._pulse()
        return self._caught_up if self._behind else None

    @property
    def _behind(self) -> bool:
        """Whether the sampling is too far ahead of a client that alone follows."""
        return self.readers == 1 and self._changes > self._written + 1

    async def _caught_up(self) -> None:
        while self._behind:
            self._paced = True
            await self._changed.wait()
            self._paced = False

    def wake(self) -> None:
        """There is more to write than tokens."""
        self._changes += 1
        self._pulse()

    async def wait_for_reader(self) -> None:
        """Wait until a client follows, because an answer that nobody reads is recorded as aborted.

        If no client comes within the grace period, the whole call is cancelled.
        """
        if self._client.watched:
            await asyncio.sleep(0)  # lets the watching task notice a client that has just left
        while not self.readers:
            await self._changed.wait()

    # The side of the clients

    def join(self, attempt: int) -> None:
        """Another client will follow."""
        self.attempts.add(attempt)
        if attempt > self.latest_attempt:
            self.latest_attempt, self.joined_at = attempt, clock.now()
        self.readers += 1
        self.figures.joined += 1
        self._cancel_stop()
        self.wake()

    async def follow(self, reply: Reply) -> None:
        """Write the whole answer to a client. Raises the error that ended the call, if nothing was sent."""
        try:
            while self._stream is None and not self.ended:
                await self._changed.wait()
            reply.more_headers = self.more_headers
            if self._stream is not None:
                await self._follow_stream(self._stream, reply)
            elif self._body is not None:
                await reply.send_json(200, *self._body)
            elif self._failure is not None:
                raise self._failure
        finally:
            self.leave()

    def leave(self) -> None:
        """A client does not follow any longer."""
        self.readers -= 1
        if self.ended:
            if not self.readers:
                self._forget()
            return
        if not self.readers:
            self._stop_timer = clock.deadline(self._calls.grace_s, self._stop)
        self.wake()

    def end(self, why: ApiError) -> None:
        """End the call before its answer is complete. Its clients get the error."""
        self._why_ended = why
        self._stop()

    async def _follow_stream(self, stream: StreamedAnswers, reply: Reply) -> None:
        """Write the tokens as they come, from the first one on, until the call ends."""
        writer = AnswerWriter(stream, reply)
        self._writers.append(writer)
        try:
            ended = False
            while not ended:
                changes, ended = self._changes, self.ended
                await writer.write()
                self._written = changes
                if self._paced:
                    self._pulse()
                writer.waits = True
                while self._changes == changes and not ended:
                    await self._changed.wait()
                writer.waits = False
        finally:
            self._writers.remove(writer)
        await reply.close(self._last_events(reply, writer.events))

    def _last_events(self, reply: Reply, events: Events) -> bytes:
        """Raises the error that ended the call, if nothing was sent."""
        if self._failure is None:
            return events.ending()
        if not reply.begun:
            raise self._failure
        if isinstance(self._failure, ANSWERABLE):
            return events.failing(api_error(self._failure))
        logger.error("a stream failed", exc_info=self._failure)
        return events.failing(ApiError(500, "internal error"))

    def _stop(self) -> None:
        self._calls.remove(self._key, self)
        self._stopped = True
        if self._task is not None and self._begun:  # a task that has not begun would never end the call
            self._task.cancel()

    def _cancel_stop(self) -> None:
        if self._stop_timer is not None:
            self._stop_timer.cancel()
            self._stop_timer = None

    def _pulse(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _forget(self) -> None:
        """Refer to nothing that refers to the call."""
        self._stream = self._body = self._failure = None


class InFlightCalls:
    """The calls in flight, by caller and request."""

    def __init__(self, grace_s: float, join_identical: bool) -> None:
        self.grace_s = grace_s
        """How long a call continues without a client, because an SDK that timed out retries soon."""
        self._join_identical = join_identical
        self._calls: dict[CallKey, list[InFlightCall]] = {}
        self.running: set[asyncio.Task[None]] = set()
        """The tasks of all calls, also of those that no attempt can join any longer."""

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
        self, key: CallKey, attempt: int, figures: CallFigures, client: DisconnectWatch, work: Work
    ) -> InFlightCall:
        """Begin a call. The client that made it is its first reader."""
        call = InFlightCall(self, key, attempt, figures, client)
        self._calls.setdefault(key, []).append(call)
        call.start(work)
        return call

    def end_all(self, why: ApiError) -> None:
        """End every call. Each client gets the error."""
        for call in [each for calls in self._calls.values() for each in calls]:
            call.end(why)

    async def close(self) -> None:
        """End the calls whose clients have left, and wait until they are recorded."""
        await cancel_and_wait(list(self.running))

    def remove(self, key: CallKey, call: InFlightCall) -> None:
        """Let no later attempt join the call."""
        calls = self._calls.get(key, [])
        if call in calls:
            calls.remove(call)
        if not calls:
            self._calls.pop(key, None)
