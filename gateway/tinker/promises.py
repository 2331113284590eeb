"""Waits for the results of commands.

trainer ── answer ─▶ Redis: result, announcement ─▶ every gateway process ─▶ the polls that wait for it

Promises of samples in Redis: any gateway process answers the polls for what another one makes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.errors import invalid
from gateway.tinker.paths import PromiseId
from rollout_queue import clock
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.client_session_scripts import CANCEL, KEEP, RENEW
from rollout_queue.redis.command_log import READ_TTL_S

T = TypeVar("T")
BLOCK_MS = 5000
"""Redis answers a read without announcements after this time."""
LOOK_AGAIN_S = 5.0
"""A poll looks for its result so often, also without an announcement: one may be lost with a connection."""
RETRY_S = 0.5

logger = logging.getLogger(__name__)


class Announcements:
    """Wakes those who wait for a result, when it is announced. `follow` runs in a task of its own."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._waiting: dict[str, set[Callable[[], None]]] = {}

    def announce(self, request: str) -> None:
        """Wake those who wait for this request."""
        for notify in tuple(self._waiting.get(request, ())):
            notify()

    @contextmanager
    def listening(self, request: str, notify: Callable[[], None]) -> Iterator[None]:
        """Inside the block, `notify` is called at each announcement of this request."""
        self._waiting.setdefault(request, set()).add(notify)
        try:
            yield
        finally:
            waiting = self._waiting[request]
            waiting.discard(notify)
            if not waiting:
                del self._waiting[request]

    async def follow(self) -> None:
        """Read announcements, until the task is cancelled."""
        last: Any = "$"
        while True:
            try:
                streams: Any = await self._redis.xread({key_names.RESULTS_ANNOUNCED: last}, 1000, BLOCK_MS)
            except (RedisError, OSError) as error:
                logger.warning("announcements of results cannot be read: %s", error)
                await clock.sleep(RETRY_S)
                continue
            for position, fields in streams[0][1] if streams else ():
                last = position
                self.announce(fields[b"r"].decode())

    async def wait(self, request: str, read: Callable[[], Awaitable[T | None]], within_s: float) -> T | None:
        """What `read` returns as soon as that is not None. None if it still is after `within_s`."""
        event = asyncio.Event()
        with self.listening(request, event.set):
            until = clock.monotonic() + within_s
            while (found := await read()) is None and (left := until - clock.monotonic()) > 0:
                with suppress(TimeoutError):
                    async with clock.timeout(min(left, LOOK_AGAIN_S)):
                        await event.wait()
                event.clear()
            return found


LEASE_S = 30.0
"""How long a promise is kept without a sign of life of the gateway that makes the sample."""
KEPT_S = 3600.0
"""How long a sample waits for its first reader."""
MADE, REFUSED = b"+", b"-"
"""What a result begins with: a message of protobuf follows, or JSON. A promise begins with a digest."""
DIGEST_CHARS = 32
CANCELLED = REFUSED + msgspec.json.encode({"error": "the client has cancelled it", "category": "user"})


class SamplePromises:
    """Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def known(self, promise: PromiseId, digest: str) -> bool:
        """Whether the sample is promised or made. Raises InvalidRequest if it has another content."""
        found: Any = await stored(self._redis.get(_digest_key(promise)))
        if found is not None and found.decode() != digest:
            raise invalid(
                "seq_id",
                f"number {promise.number} of {promise.of} was used for another sample",
                code="sequence_conflict",
            )
        return found is not None and bool(await stored(self._redis.exists(key_names.result(str(promise)))))

    async def begin(self, promise: PromiseId, digest: str) -> bool:
        """Promise it. Returns False if another process was first."""
        await stored(self._redis.set(_digest_key(promise), digest, ex=int(KEPT_S)))
        first = await stored(self._redis.set(key_names.result(str(promise)), b"", nx=True, ex=int(LEASE_S)))
        return bool(first)

    async def renew(self, promise: PromiseId) -> bool:
        """The gateway that makes it is alive. Returns False if the sample was cancelled."""
        return bool(await RENEW.run(self._redis, [key_names.result(str(promise))], [int(LEASE_S)]))

    async def keep(self, promise: PromiseId, made: bytes | dict[str, Any]) -> None:
        """Store what was made, or why there is nothing, and wake those who wait for it. What is stored
        already stays."""
        packed = MADE + made if isinstance(made, bytes) else REFUSED + msgspec.json.encode(made)
        named = [key_names.result(str(promise)), key_names.RESULTS_ANNOUNCED]
        await KEEP.run(self._redis, named, [str(promise), packed, int(KEPT_S)])

    async def drop(self, promise: PromiseId) -> None:
        """The sample will not be made."""
        await stored(self._redis.delete(key_names.result(str(promise))))

    async def cancel(self, promise: PromiseId) -> None:
        """Have the gateway that makes it stop, and tell those who wait for it. What is made already stays."""
        named = [key_names.result(str(promise)), key_names.RESULTS_ANNOUNCED]
        await CANCEL.run(self._redis, named, [str(promise), CANCELLED, int(READ_TTL_S)])

    async def result(self, promise: PromiseId) -> bytes | None:
        """What `keep` stored; empty while it is made; None for an unknown promise."""
        name = key_names.result(str(promise))
        found: bytes | None = await stored(self._redis.get(name))
        if found:
            await stored(self._redis.expire(name, int(READ_TTL_S)))
        return found


def _digest_key(promise: PromiseId) -> str:
    return key_names.sample_digest(str(promise))
