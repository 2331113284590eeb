"""Implements WriterConnection with redis-py's own client: each call borrows a connection from a pool."""

from collections.abc import Callable
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError

from rollout_queue.redis.connection.replicas import NO_REPLICAS, Replication
from rollout_queue.redis.connection.writer_connection import Argument

MOST_CONNECTIONS = 64


class PooledConnection:
    """A pool for the writer alone. A call waits up to `timeout_s` for a free connection."""

    def __init__(
        self,
        redis: Redis,
        on_connect: Callable[[], None] = lambda: None,
        replication: Replication = NO_REPLICAS,
        timeout_s: float = 10.0,
    ) -> None:
        """`redis` gives the address and the credentials; `timeout_s` is how long an answer may take;
        `on_connect` is called after each new connection of the pool."""

        async def connected(connection: AbstractConnection) -> None:
            await connection.on_connect()
            on_connect()

        pool = redis.connection_pool
        fields = pool.connection_kwargs | {
            "socket_timeout": timeout_s,
            "redis_connect_func": connected,
            "retry": Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        }
        self._pool = BlockingConnectionPool(
            MOST_CONNECTIONS, timeout_s, connection_class=pool.connection_class, **fields
        )
        self._redis = Redis(connection_pool=self._pool)
        self._replication = replication

    async def command(self, *arguments: Argument) -> Any:
        return await self._redis.execute_command(*arguments)  # type: ignore[no-untyped-call]

    async def script(self, script: AsyncScript, keys: list[str], arguments: list[Argument]) -> Any:
        return await script(keys, arguments, client=self._redis)

    async def confirmed(self, script: AsyncScript, keys: list[str], arguments: list[Argument]) -> Any:
        if not self._replication.replicas:
            return await self.script(script, keys, arguments)
        try:
            return await self._waited("EVALSHA", script.sha, keys, arguments)
        except NoScriptError:
            return await self._waited("EVAL", cast(str, script.script), keys, arguments)

    async def _waited(self, command: str, script: str, keys: list[str], arguments: list[Argument]) -> Any:
        async with self._redis.pipeline(transaction=False) as pipeline:  # one connection carries both
            pipeline.execute_command(command, script, len(keys), *keys, *arguments)
            pipeline.execute_command(*self._replication.command)
            answer, confirmed = await pipeline.execute()
        self._replication.require(confirmed)
        return answer

    async def close(self) -> None:
        await self._pool.disconnect()
