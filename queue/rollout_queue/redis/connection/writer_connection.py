"""What a gateway's writer needs of its connection to Redis. Two classes provide it:

PipelinedConnection   one connection that all callers share; the default, and the cheaper one per call
PooledConnection      redis-py's own client, which lends each call a connection of its own
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from rollout_queue.redis.connection.replicas import Replication

Argument = str | bytes | float
Listener = Callable[[], None]
"""Called after each new connection, because a Redis that was restarted may have lost records."""


class WriterConnection(Protocol):
    """Sends commands that may be repeated. If the connection is lost before the answer arrives, it sends the
    command once more."""

    async def command(self, *arguments: Argument) -> Any:
        """What Redis answers. Raises RedisError."""
        ...

    async def script(self, script: AsyncScript, keys: list[str], arguments: list[Argument]) -> Any:
        """What the script answers. If Redis does not know the script, its text is sent. Raises RedisError."""
        ...

    async def confirmed(self, script: AsyncScript, keys: list[str], arguments: list[Argument]) -> Any:
        """What the script answers, once as many replicas have what it wrote as this connection was told to
        wait for. Raises RedisError; TimeoutError if the script ran, and the replicas took too long."""
        ...

    async def close(self) -> None:
        """Close every connection. Callers that still wait get an error."""
        ...


Confirm = Callable[[AsyncScript, list[str], list[Argument]], Awaitable[Any]]
"""What a script answers, once replicas have what it wrote. Raises StorageUnavailable."""
ConnectionFactory = Callable[[Redis, Listener, Replication], WriterConnection]
