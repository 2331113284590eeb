"""Lets a client's retry join the call that it repeats, while that call is in flight.

Both attempts then read one answer, which is sampled and recorded once.

first ──begin──▶ InFlightCall ──▶ first client      no client left for `retry_grace_s` ──▶ stopped
retry ──join─────────┴──────────▶ second client: the whole answer, from its beginning
"""

import asyncio
import hashlib
from collections.abc import Mapping
from types import TracebackType

import msgspec
from starlette.types import Message

from gateway.callers.identity import Caller
from gateway.edge.disconnect import DisconnectWatch
from gateway.edge.first_client import FirstClient
from gateway.edge.reply import Reply
from gateway.edge.retelling import ToldStream
from rollout_queue import clock
from rollout_queue.http.errors import ApiError

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
