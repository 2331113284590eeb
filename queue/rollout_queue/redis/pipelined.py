"""The connection of a gateway's writer to Redis: one connection that all callers share.

Commands are sent in the order of the calls, and Redis answers in that order. One write sends all commands of
one iteration of the event loop.

redis-py lends a connection to one caller at a time, and runs each command through layers that serve every
kind of deployment. A gateway would spend half of its CPU time there. So this module writes to and reads from
the socket of redis-py's connection itself, through attributes that redis-py keeps private. WRITTEN_FOR names
the version of redis-py that has these attributes.

Before a caller learns that its record is stored, replicas have it:

append ─▶ answer ─▶ WAIT on the same connection ─▶ the caller gets the answer

WAIT counts the replicas that have everything which this connection has written. While it waits, Redis serves
nothing else of the connection. So one WAIT stands for all appends that were answered before it was sent.

RedisClock estimates the time by Redis' clock, so that Redis stores nothing for a script that it runs too
late.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import hiredis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis.availability import available, not_the_master, stored, unavailable
from rollout_queue.redis.key_names import Rename
from rollout_queue.redis.losses import is_wrong_type, keys_in, moving, not_moved, noting, sentences
from rollout_queue.redis.lua import Argument, Script, T
from rollout_queue.redis.settings import NO_REPLICAS, Replication

logger = logging.getLogger(__name__)


class SharedWait:
    """Sends one WAIT for all callers that came while the one before was under way."""

    def __init__(self, send: Callable[[], Awaitable[int]]) -> None:
        self._send = send
        self._running: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None

    async def after_now(self) -> int:
        """What a WAIT returns that is sent from now on."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
            self._next.add_done_callback(_retrieved)
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        for task in (self._running, self._next):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run(self, before: asyncio.Task[int] | None) -> int:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await self._send()


WRITTEN_FOR = "8.1.0"
"""The version of redis-py whose private parts are used here and by `PatientParser`. Before you name another,
read `Connection._writer`, `._reader`, `_AsyncHiredisParser`, and run tests/service/queue."""
READ_BYTES = 2**16
LAST_LOOK_S = 0.1
"""How long what has arrived is read, before a connection is given up."""


class PipelinedConnection:
    """Sends commands that may be repeated. The first one opens the connection. If it is lost before an answer
    arrives, it is opened again, and the command is sent once more."""

    def __init__(
        self,
        redis: AsyncRedis,
        on_connect: Callable[[], None] = lambda: None,
        replication: Replication = NO_REPLICAS,
        timeout_s: float = 10.0,
    ) -> None:
        """`redis` gives the address and the credentials; `timeout_s` is how long an answer may take;
        `on_connect` is called after each new connection, because a Redis that was restarted may have lost
        records."""
        pool = redis.connection_pool
        # The connection has no timeout of its own: `_watch` checks the call that has waited longest.
        self._connection = pool.connection_class(**pool.connection_kwargs | {"socket_timeout": None})
        self._timeout_s, self._on_connect = timeout_s, on_connect
        self._replication = replication
        self._wait = SharedWait(lambda: self.command(*replication.command))  # bounded: WAIT
        self._opened = 0
        """How many connections there have been."""
        self._still_s, self._watch_due, self._looks_again = 0.0, 0.0, False
        """How long this process has stood still; when `_watch` is due, and whether for a last look."""
        self._rename: Rename | None = pool.connection_kwargs.get("rename")
        self._unsent: list[bytes] = []
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._gone = True
        """Nothing reads from the connection."""
        self._watching: asyncio.TimerHandle | None = None

    async def command(self, *arguments: Argument) -> Any:
        """What Redis answers. Raises StorageUnavailable."""
        try:
            try:
                if self._gone:
                    await self._connected()
                return await self._sent(arguments)
            except (RedisConnectionError, OSError):
                if self._gone:
                    await self._connected()
                return await self._sent(arguments)
            except ResponseError as error:
                if not is_wrong_type(error):
                    raise
                await self._clear(arguments, error)
                return await self._sent(arguments)
        except (RedisError, OSError) as error:
            raise unavailable(error) from error

    async def run(self, script: Script[T], keys: Sequence[str], arguments: Sequence[Argument]) -> T:
        """What the script answers, once as many replicas have what it wrote as this connection was told to
        wait for. Raises StorageUnavailable, also if the script ran, and the replicas took too long."""
        replicated, number = self._replication.replicas > 0, str(len(keys))
        for _ in range(2):
            if replicated and self._gone:
                await stored(self._connected())
            opened = self._opened
            try:  # bounded: by the script
                answer: T = await self.command("EVALSHA", script.sha, number, *keys, *arguments)
            except StorageUnavailable as error:
                if not isinstance(error.__cause__, NoScriptError):
                    raise  # bounded: so, too
                answer = await self.command("EVAL", script.text, number, *keys, *arguments)
            if not replicated:
                return answer
            confirmed = await self._wait.after_now()
            if self._opened == opened:  # else the WAIT may be another server's, which lacks the record
                with available():
                    self._replication.require(confirmed)
                return answer
        lost = RedisConnectionError("the connection to Redis was lost before replicas had the record")
        raise unavailable(lost) from lost

    async def close(self) -> None:
        """Close the connection. Callers that still wait get an error."""
        await self._wait.close()
        if self._watching is not None:
            self._watching.cancel()
        for task in (self._connecting, self._reading):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._gone = True
        await self._connection.disconnect(nowait=True)

    async def _clear(self, arguments: tuple[Argument, ...], error: ResponseError) -> None:
        """Move values that another program has written to keys among the arguments."""
        found = keys_in(arguments)
        try:
            for key, said in sentences(found, await self._sent(moving(found))).items():
                await self._sent(noting(key, said))
        except RedisError as why:
            raise not_moved(error, found, why) from error

    def _sent(self, arguments: tuple[Argument, ...]) -> asyncio.Future[Any]:
        """Queue a command for the next write. Returns the future of its answer."""
        renamed = arguments if self._rename is None else tuple(self._rename(arguments))
        packed: bytes = hiredis.pack_command(renamed)  # type: ignore[arg-type] # its stub knows one argument
        if self._gone:
            raise RedisConnectionError("the connection to Redis was closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if not self._unsent:
            loop.call_soon(self._send)
        # Answers come in the order of the commands, so the oldest waiting call gets the next one.
        self._unsent.append(packed)
        self._waiting.append((answer, loop.time() - self._still_s))
        return answer

    def _send(self) -> None:
        """Write the commands of this iteration of the event loop."""
        # redis-py's own `send_packed_command` would wait for a slow socket, close the connection of all
        # callers when one of them is cancelled, and reconnect by itself. A caller has at most one unsent
        # command, which bounds the buffer.
        unsent, self._unsent = b"".join(self._unsent), []
        if unsent and (writer := self._connection._writer) is not None:
            with suppress(RuntimeError):  # uvloop raises it for a closed connection; `_read` reports that
                writer.write(unsent)

    async def _connected(self) -> None:
        """Wait until the connection is open. All callers share one attempt, which goes on if one of them is
        cancelled."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(_retrieved)
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        """Raises RedisConnectionError or RedisTimeoutError."""
        if self._watching is not None:
            self._watching.cancel()
        try:
            async with clock.real_timeout(self._timeout_s):  # redis-py's handshake has no timeout here
                await self._connection.disconnect(nowait=True)
                await self._connection.connect()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise RedisTimeoutError("Redis did not answer in time") from error
        self._opened += 1
        self._on_connect()
        self._reading, self._gone = asyncio.create_task(self._read()), False
        self._watch_in(self._timeout_s / 4)

    async def _read(self) -> None:
        """Give each answer to its caller until the connection ends; then fail the calls that still wait."""
        error: Exception = RedisConnectionError("the connection to Redis was closed")
        # This bypasses redis-py's `read_response`, whose timeout and error handling suit a single caller
        # only.
        stream, parser = cast(Any, self._connection._reader), cast(Any, self._connection._parser)._reader
        try:
            while arrived := await stream.read(READ_BYTES):
                parser.feed(arrived)
                while (answer := parser.gets()) is not NOT_ENOUGH_DATA:
                    self._answered(answer)
        except (RedisConnectionError, OSError) as ended:
            error = ended
        finally:
            self._gone = True
            left, self._waiting = self._waiting, deque()
            self._unsent.clear()
            for waiting, _ in left:
                if not waiting.done():
                    waiting.set_exception(error)

    def _answered(self, answer: Any) -> None:
        """Give an answer to the oldest waiting call. Raises RedisConnectionError if Redis sent one, or is not
        the master: the calls that wait are repeated, each once, on the next connection."""
        if isinstance(answer, RedisConnectionError):
            raise answer
        if isinstance(answer, ResponseError) and not_the_master(answer):
            raise RedisConnectionError(f"Redis is not the master: {answer}")
        if isinstance(answer, hiredis.PushNotification):
            return
        waiting, _ = self._waiting.popleft()
        if waiting.done():
            return  # the caller was cancelled
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _watch(self) -> None:
        """Check every quarter of the timeout, and drop a connection whose oldest answer is overdue.

        While this process stood still, so that this is late, it read no answer: that time does not count.
        """
        now = asyncio.get_running_loop().time()
        self._still_s += max(0.0, now - self._watch_due)
        overdue = bool(self._waiting) and now - self._still_s - self._waiting[0][1] > self._timeout_s
        if overdue and self._looks_again:
            logger.warning("Redis has not answered for %g s", self._timeout_s)
            left, self._waiting = self._waiting, deque()
            for waiting, _ in left:
                if not waiting.done():
                    waiting.set_exception(RedisTimeoutError("Redis did not answer in time"))
            if self._reading is not None:
                self._reading.cancel()
            return
        self._looks_again = overdue
        self._watch_in(LAST_LOOK_S if overdue else self._timeout_s / 4)

    def _watch_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._watch_due = loop.time() + seconds
        self._watching = loop.call_later(seconds, self._watch)


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception, so that asyncio logs no warning when every waiting caller was cancelled."""
    if not task.cancelled():
        task.exception()


READ_EVERY_S = 60.0
"""The clocks of two machines may drift apart by some milliseconds in this time."""


class RedisClock:
    """Reads Redis' clock once a minute. The estimate is never ahead, unless the clock was set back."""

    def __init__(self, connection: PipelinedConnection) -> None:
        self._connection = connection
        self._ahead_s = 0.0
        """By how much Redis' clock is ahead of this process' monotonic clock."""
        self._read_at = float("-inf")

    async def deadline_ms(self, within_s: float) -> int:
        """The moment `within_s` from now, in milliseconds by Redis' clock. Raises StorageUnavailable."""
        began = clock.monotonic()
        if began - self._read_at > READ_EVERY_S:
            await self.read()
        return int((began + within_s + self._ahead_s) * 1000)

    async def read(self) -> None:
        """Read the clock now. Raises StorageUnavailable."""
        seconds, microseconds = await self._connection.command("TIME")
        # Redis read its clock before this moment, so an answer that took long makes the estimate too low.
        self._read_at = clock.monotonic()
        self._ahead_s = int(seconds) + int(microseconds) / 1e6 - self._read_at
