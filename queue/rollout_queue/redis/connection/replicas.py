"""Waits until replicas have a record, before its caller is told that it is stored.

append ─▶ answer ─▶ WAIT on the same connection ─▶ the caller hears the answer

WAIT counts the replicas that have everything which this connection has written. While it waits, Redis serves
nothing else of the connection. So one WAIT stands for all appends that were answered before it was sent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from redis import Redis
from redis.commands.core import AsyncScript, Script

from rollout_queue.redis.availability import stored
from rollout_queue.redis.client.replication import Replication

Argument = str | bytes | float
Confirm = Callable[[AsyncScript, list[str], list[Argument]], Awaitable[Any]]
"""What a script answers, once replicas have what it wrote. Raises StorageUnavailable."""
RunScript = Callable[[Sequence[str], Sequence[Argument]], Any]
"""Runs a script with these keys and arguments. Raises RedisError."""


async def unconfirmed(script: AsyncScript, keys: list[str], arguments: list[Argument]) -> Any:
    """A `Confirm` that asks no replica."""
    return await stored(script(keys, arguments))


def confirmed_now(
    redis: Redis, replication: Replication, script: Script, keys: Sequence[str], arguments: Sequence[Argument]
) -> Any:
    """What the script answers a blocking client, once replicas have what it wrote. Raises RedisError."""
    if not replication.replicas:
        return script(keys, arguments)
    with redis.pipeline(transaction=False) as pipeline:  # so that both have the same connection
        script(keys, arguments, cast(Redis, pipeline))
        # bounded: WAIT and its two arguments
        pipeline.execute_command(*replication.command)  # type: ignore[no-untyped-call]
        answer, confirmed = pipeline.execute()
    replication.require(confirmed)
    return answer


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


def _retrieved(task: asyncio.Task[int]) -> None:
    """Retrieve the exception, so that asyncio logs no warning when every waiting caller was cancelled."""
    if not task.cancelled():
        task.exception()
