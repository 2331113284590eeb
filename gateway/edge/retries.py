"""A retry joins the call that it repeats, while that is in flight: one sample, one turn, two readers.

first ──begin──▶ Flight ──▶ its client            gone, and nobody joins within the grace ──▶ stopped
retry ──join───────┴─────▶ all that was said so far, then what follows
"""

import asyncio
import hashlib
import time
from collections.abc import Hashable, Mapping
from types import TracebackType

from starlette.types import Message, Send

from gateway.edge.disconnect import Attention
from gateway.edge.reply import Reply
from rollout_queue.http.errors import ApiError

RETRY_HEADER = "x-stainless-retry-count"


def attempt_of(headers: Mapping[str, str]) -> int:
    """How often the client has made this call before; 0 where it does not say."""
    count = headers.get(RETRY_HEADER, "")
    return int(count) if count.isascii() and count.isdigit() and len(count) < 4 else 0


def request_digest(dialect: str, body: bytes) -> str:
    """The same for the same bytes asked of the same dialect: SDKs repeat a body as it was."""
    return hashlib.sha256(dialect.encode() + b"\0" + body).hexdigest()[:32]


class Flight:
    """One call in flight: what was said, and how many listen. Its `with` block is the work."""

    def __init__(
        self, flights: "Flights", key: Hashable, digest: str, attempt: int, reply: Reply, client: Attention
    ) -> None:
        self.digest = digest
        self.attempt = attempt
        self.latest_attempt = attempt
        """The last attempt that joined: attempts at one call follow each other, never side by side."""
        self.joined_at = 0.0
        """When it joined; 0 where none did."""
        self.listeners = 1
        self._flights, self._key = flights, key
        self._client = client
        self._send: Send | None = reply.divert(self._say)
        self._said: list[Message] = []
        self._ended = False
        self._failure: Exception | None = None
        self._news: asyncio.Event | None = None
        self._last_call: asyncio.TimerHandle | None = None
        client.when_gone(self._first_left)

    def __enter__(self) -> "Flight":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self._failure = error
        elif error is not None:
            self._failure = ApiError(503, "the call that this one repeats was stopped")
        self._ended = True
        self._rest()
        self._flights.forget(self._key, self)
        self._tell()

    async def heard(self) -> None:
        """Wait until somebody listens: an answer that nobody waits for is not recorded as one.

        Cancelled, like all of the call, when nobody comes in time.
        """
        if self._client.watched:
            await asyncio.sleep(0)  # a client that left while its socket was full: it may be told now
        while not self.listeners:
            await self._something_new()

    def join(self, attempt: int) -> None:
        if attempt > self.latest_attempt:
            self.latest_attempt, self.joined_at = attempt, time.time()
        self.listeners += 1
        self._rest()
        self._tell()

    async def follow(self, reply: Reply) -> None:
        """Say to one who joined all that was said, from the beginning, and what is still to come.

        Raises what the first call raised.
        """
        said = 0
        try:
            while True:
                while said < len(self._said):
                    said += 1
                    await reply.repeat(self._said[said - 1])
                if self._ended:
                    break
                await self._something_new()
        finally:
            self._leave()
        if self._failure is not None:
            raise self._failure

    async def _say(self, message: Message) -> None:
        self._said.append(message)
        self._tell()
        if self._send is not None:
            await self._send(message)

    def _first_left(self) -> None:
        self._send = None
        self._leave()

    def _leave(self) -> None:
        self.listeners -= 1
        if not self.listeners and not self._ended:
            self._last_call = asyncio.get_running_loop().call_later(self._flights.grace_s, self._give_up)

    def _give_up(self) -> None:
        self._flights.forget(self._key, self)
        self._client.stop()

    def _rest(self) -> None:
        if self._last_call is not None:
            self._last_call.cancel()
            self._last_call = None

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    async def _something_new(self) -> None:
        if self._news is None:
            self._news = asyncio.Event()
        await self._news.wait()


class Flights:
    """The calls that are in flight, by who asks what."""

    def __init__(self, grace_s: float, join_identical: bool) -> None:
        self.grace_s = grace_s
        """How long a call goes on without its client: an SDK that timed out comes back soon."""
        self._join_identical = join_identical
        self._flights: dict[Hashable, list[Flight]] = {}

    def join(self, key: Hashable, attempt: int) -> Flight | None:
        """The flight that this attempt repeats, rather one whose client has left; None for a new call."""
        flights = self._flights.get(key)
        if flights is None or not (attempt or self._join_identical):
            return None
        earlier = [each for each in flights if self._join_identical or each.latest_attempt < attempt]
        if not earlier:
            return None
        flight = min(earlier, key=lambda each: each.listeners > 0)
        flight.join(attempt)
        return flight

    def begin(self, key: Hashable, digest: str, attempt: int, reply: Reply, client: Attention) -> Flight:
        flight = Flight(self, key, digest, attempt, reply, client)
        self._flights.setdefault(key, []).append(flight)
        return flight

    def forget(self, key: Hashable, flight: Flight) -> None:
        """Let nobody join it any more."""
        flights = self._flights.get(key, [])
        if flight in flights:
            flights.remove(flight)
        if not flights:
            self._flights.pop(key, None)
