"""One Redis connection that many callers share: commands leave as they come, answers return in order.

redis-py lends a connection to one caller at a time, and runs each command through layers that serve every
kind of deployment; a gateway's turn would spend half of its time there. Here a command costs a write and a
future, and commands of the same moment travel together.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import hiredis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeoutError

logger = logging.getLogger(__name__)

Argument = str | bytes | float
READ_BYTES = 2**16


class Express:
    """Commands that may be repeated: one whose answer was lost with its connection is sent again, once."""

    def __init__(
        self, redis: Redis, timeout_s: float = 10.0, connected: Callable[[], None] = lambda: None
    ) -> None:
        """`redis` gives the address and the credentials; `timeout_s` is how long an answer may take;
        `connected` is called when there is a new connection."""
        pool = redis.connection_pool
        # An answer is awaited together with those before it, so the connection keeps no time of its own.
        self._connection = pool.connection_class(**pool.connection_kwargs | {"socket_timeout": None})
        self._timeout_s, self._heed = timeout_s, connected
        self._unsent: list[bytes] = []
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.TimerHandle | None = None

    async def command(self, *arguments: Argument) -> Any:
        """What Redis answers. Raises RedisError."""
        packed = hiredis.pack_command(arguments)  # type: ignore[arg-type] # its stub knows one argument
        try:
            if self._gone:
                await self._connected()
            return await self._sent(packed)
        except (RedisConnectionError, OSError):
            if self._gone:
                await self._connected()
            return await self._sent(packed)

    async def script(self, script: AsyncScript, keys: list[str], arguments: list[Argument]) -> Any:
        """What the script answers; a Redis that does not know it learns it. Raises RedisError."""
        try:
            return await self.command("EVALSHA", script.sha, str(len(keys)), *keys, *arguments)
        except NoScriptError:
            return await self.command("EVAL", cast(str, script.script), str(len(keys)), *keys, *arguments)

    async def close(self) -> None:
        """Hang up. Callers that still wait get an error."""
        if self._watching is not None:
            self._watching.cancel()
        for task in (self._connecting, self._reading):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._connection.disconnect()

    @property
    def _gone(self) -> bool:
        return self._reading is None or self._reading.done()

    def _sent(self, packed: bytes) -> asyncio.Future[Any]:
        """The answer to come."""
        if self._gone:
            raise RedisConnectionError("the connection to Redis was closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if not self._unsent:
            loop.call_soon(self._send)
        # Answers come in the order of the commands, which is that of those who wait.
        self._unsent.append(packed)
        self._waiting.append((answer, loop.time()))
        return answer

    def _send(self) -> None:
        """What callers of the same moment ask goes out in one write."""
        # redis-py's own way to send would wait for a slow socket, hang up for everybody when one caller is
        # cancelled there, and connect anew beside us. What is unsent is bounded by who waits for an answer.
        unsent, self._unsent = b"".join(self._unsent), []
        if unsent and (writer := self._connection._writer) is not None:
            with suppress(RuntimeError):  # uvloop, where the connection has just ended: its reader tells
                writer.write(unsent)

    async def _connected(self) -> None:
        """One attempt serves all who wait, in good and in bad; it goes on when one of them is cancelled."""
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(_heeded)
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        """Raises RedisConnectionError or RedisTimeoutError."""
        if self._watching is not None:
            self._watching.cancel()
        try:
            async with asyncio.timeout(self._timeout_s):  # redis-py greets without any
                await self._connection.disconnect()
                await self._connection.connect()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise RedisTimeoutError("Redis did not answer in time") from error
        self._heed()
        self._reading = asyncio.create_task(self._read())
        self._watch()

    async def _read(self) -> None:
        """Hand out answers until the connection ends; then nobody is left waiting."""
        error: Exception = RedisConnectionError("the connection to Redis was closed")
        # Below redis-py's own read_response, whose deadline and whose error handling would serve one caller.
        stream, parser = cast(Any, self._connection._reader), cast(Any, self._connection._parser)._reader
        try:
            while arrived := await stream.read(READ_BYTES):
                parser.feed(arrived)
                while (answer := parser.gets()) is not NOT_ENOUGH_DATA:
                    self._answered(answer)
        except (RedisConnectionError, OSError) as ended:
            error = ended
        finally:
            left, self._waiting = self._waiting, deque()
            self._unsent.clear()
            for waiting, _ in left:
                if not waiting.done():
                    waiting.set_exception(error)

    def _answered(self, answer: Any) -> None:
        """Raises RedisConnectionError where the answer is that there will be none."""
        if isinstance(answer, RedisConnectionError):
            raise answer
        if isinstance(answer, hiredis.PushNotification):
            return
        waiting, _ = self._waiting.popleft()
        if waiting.done():
            return  # its caller was cancelled
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _watch(self) -> None:
        """Give a connection up whose oldest answer is overdue."""
        loop = asyncio.get_running_loop()
        if self._waiting and loop.time() - self._waiting[0][1] > self._timeout_s:
            logger.warning("Redis has not answered for %g s", self._timeout_s)
            left, self._waiting = self._waiting, deque()
            for waiting, _ in left:
                if not waiting.done():
                    waiting.set_exception(RedisTimeoutError("Redis did not answer in time"))
            if self._reading is not None:
                self._reading.cancel()
            return
        self._watching = loop.call_later(self._timeout_s / 4, self._watch)


def _heeded(task: asyncio.Task[None]) -> None:
    """Who waited has left: asyncio is not to complain of a failure that nobody hears of."""
    if not task.cancelled():
        task.exception()
