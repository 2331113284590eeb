"""Implements WriterConnection with redis-py's own client: each call borrows a connection from a pool."""

from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError

from rollout_queue.redis.connection.writer_connection import Argument

MOST_CONNECTIONS = 64


class PooledConnection:
    """A pool for the writer alone. A call waits up to `timeout_s` for a free connection."""

    def __init__(
        self, redis: Redis, on_connect: Callable[[], None] = lambda: None, timeout_s: float = 10.0
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

    async def command(self, *arguments: Argument) -> Any:
        return await self._redis.execute_command(*arguments)  # type: ignore[no-untyped-call]

    async def script(self, script: AsyncScript, keys: list[str], arguments: list[Argument]) -> Any:
        return await script(keys, arguments, client=self._redis)

    async def close(self) -> None:
        await self._pool.disconnect()
